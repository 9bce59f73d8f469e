// compressed_attention on the cpu: threads over sequences, kv heads and blocks of query rows, or over blocks of tokens where those are few.
#include <string>

#include "cpu/attention/attention.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/scratch.h"
#include "cpu/table.h"

namespace weft::cpu {
namespace {

// Pieces that each thread should find, so that uneven ones even out.
constexpr int64_t kPiecesPerThread = 4;
// More rows than this are never split over tokens: there are enough pieces without, and partials would take much memory.
constexpr int64_t kMaxSplitRows = 1024;
// Tokens (of one kv head) that are done before other threads have woken up.
constexpr int64_t kTokensPerThread = 1024;

// How a call is cut. Any cut gives the same bits.
struct AttentionCut {
  int threads = 1;
  int64_t pieces = 0;  // sequences x kv heads x blocks of rows
  int64_t blocks = 0;  // split over tokens: partials of each row; 0: a piece takes all its tokens
  size_t worker_bytes = 0, partial_bytes = 0;

  int64_t o_floats(const AttentionCall& call) const { return call.T * call.Hq * blocks * call.Dv; }
  size_t bytes() const { return worker_bytes * static_cast<size_t>(threads) + partial_bytes; }
};

AttentionCut cut_attention(const Stream& stream, const AttentionCall& call) {
  AttentionCut cut;
  cut.threads = thread_count(stream);
  cut.pieces = call.sequences.count * call.Hk * call.row_blocks();
  cut.worker_bytes = attention_worker_bytes(call);
  const int64_t blocks = std::min(kMaxBlocks, blocks_of(sequence_capacity(*call.cache), kBlockTokens));
  if (blocks > 1 && cut.pieces < kPiecesPerThread * cut.threads && cut.threads > 1 && call.T * call.Hq <= kMaxSplitRows) {
    cut.blocks = blocks;
    // Whole units, since what the workers get comes behind.
    cut.partial_bytes = scratch_piece(static_cast<size_t>(cut.o_floats(call) + 2 * call.T * call.Hq * blocks) * sizeof(float));
  }
  return cut;
}

AttentionCall lower(const CompressedAttentionArgs& args) {
  AttentionCall call = attention_call(args.queries, args.cache, args.mask);
  call.k_levels = level_bytes(call.k);
  call.v_levels = level_bytes(call.v);
  call.integer = call.k_levels.step > 0 && call.v_levels.step > 0;
  call.ints = args.precision == Precision::fast ? RowInts::bytes : RowInts::wide;
  return call;
}

size_t attention_scratch(const Stream& stream, const CompressedAttentionArgs& args) {
  return cut_attention(stream, lower(args)).bytes();
}

// What keeps a side without integer levels from them, for people.
std::string why_not_integer(const AttentionCall& call) {
  const bool keys = call.k_levels.step <= 0;
  const SideView& side = keys ? call.k : call.v;
  const std::string name = keys ? "K " : "V ";
  if (side.format->passthrough) return name + "is not coded";
  if (side.storage != KvStorage::lane_tiles) return name + "does not lie in tiles of lanes order";
  if (!side.format->grid_step) return name + "has levels off an integer grid";
  return name + (side.groups != 1 ? "has several gains in a row" : "has 7 or 8 bits with a table of its own");
}

Choice attention_choose(const Stream& stream, const CompressedAttentionArgs& args) {
  const AttentionCall call = lower(args);
  const AttentionCut cut = cut_attention(stream, call);
  const std::string arithmetic = !call.integer ? "decoded" : call.ints == RowInts::wide ? "integer" : "integer_fast";
  std::string plan = std::to_string(cut.threads) + " threads over " + std::to_string(call.sequences.count) + " sequences x " +
                     std::to_string(call.Hk) + " kv heads x " + std::to_string(call.row_blocks()) + " blocks of up to " +
                     std::to_string(std::min(kRowBlock, call.max_rows())) + " query rows";
  plan += cut.blocks > 0 ? " x up to " + std::to_string(cut.blocks) + " blocks of tokens, partials merged in order"
                         : ", each over all its tokens";
  if (!call.integer) plan += "; not in integers, " + why_not_integer(call);
  return {"cpu.compressed_attention." + arithmetic + "." + isa_name(resolve_isa(stream.isa)), plan};
}

PartialsView scratch_partials(const AttentionCall& call, const AttentionCut& cut, void* data) {
  const int64_t B = cut.blocks, Hq = call.Hq, Dv = call.Dv;
  PartialsView view;
  view.o = static_cast<float*>(data);
  view.m = view.o + cut.o_floats(call);
  view.l = view.m + call.T * Hq * B;
  view.o_token = Hq * B * Dv, view.o_head = B * Dv, view.o_block = Dv, view.o_four = 4;
  view.m_token = view.l_token = Hq * B;
  view.m_head = view.l_head = B;
  view.m_block = view.l_block = 1;
  return view;
}

// Fewer threads for little work; the lengths of a cpu call lie where they can be read.
int64_t tokens_of_call(const AttentionCall& call) {
  int64_t tokens = 0;
  for (int64_t n = 0; n < call.sequences.count; ++n)
    if (tokens_of(call.sequences, n, call.T).length() > 0) tokens += live_tokens(*call.cache, appended_tokens(*call.cache, n));
  return tokens * call.Hk * call.row_blocks();
}

void compressed_attention(const Stream& stream, const CompressedAttentionArgs& args, Scratch scratch) {
  const AttentionCall call = lower(args);
  const AttentionCut cut = cut_attention(stream, call);
  const RowFinish finish = row_finish(args.cache.v.format, KvDomain::original, args.o, args.lse, args.sinks, call.Hk);
  const int threads = static_cast<int>(std::clamp<int64_t>(tokens_of_call(call) / kTokensPerThread, 1, cut.threads));
  auto* workers = static_cast<char*>(scratch.data) + cut.partial_bytes;
  const auto memory = [&](int worker) { return workers + static_cast<size_t>(worker) * cut.worker_bytes; };
  const auto piece_of = [&](int64_t i) {
    const int64_t row_blocks = std::max<int64_t>(1, call.row_blocks());  // without rows there are no pieces either
    return AttentionPiece{i / (row_blocks * call.Hk), i / row_blocks % call.Hk, i % row_blocks * kRowBlock, 0, 0};
  };
  if (cut.blocks == 0 || threads == 1) {
    parallel_for(threads, cut.pieces,
                 [&](int64_t i, int worker) { run_attention(stream.isa, call, piece_of(i), finish, memory(worker)); });
    return;
  }
  const PartialsView partials = scratch_partials(call, cut, scratch.data);
  parallel_for(threads, cut.pieces * cut.blocks, [&](int64_t i, int worker) {
    AttentionPiece piece = piece_of(i / cut.blocks);
    piece.first_block = i % cut.blocks;
    piece.end_block = piece.first_block + 1;
    run_partials(stream.isa, call, piece, partials, false, memory(worker));
  });
  parallel_for(threads, call.sequences.count * call.Hq, [&](int64_t i, int) {
    const TokenRange range = tokens_of(call.sequences, i / call.Hq, call.T);
    for (int64_t t = range.begin; t < range.end; ++t) run_merge(stream.isa, partials, cut.blocks, finish, t, i % call.Hq);
  });
}

}  // namespace

OpEntry<CompressedAttentionArgs> compressed_attention_entry() {
  return {compressed_attention, kAllFloats, nullptr, attention_choose, attention_scratch};
}

}  // namespace weft::cpu
