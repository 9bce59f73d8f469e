// compressed_attention on the cpu: threads over sequences, kv heads and query blocks, or over blocks of tokens where those are few.
#include <string>

#include "cpu/attention/attention.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/scratch.h"
#include "cpu/table.h"

namespace weft::cpu {
namespace {

// Work items per thread that balance the load well enough. With fewer, the call is split over tokens, too.
constexpr int64_t kItemsPerThread = 4;
// More query rows than this are never split over tokens: there are enough work items, and partials would take much memory.
constexpr int64_t kMaxSplitRows = 1024;
// One thread finishes this many tokens of a kv head before another has woken up.
constexpr int64_t kTokensPerThread = 1024;

// How a call is split into work items. Every split gives the same bits.
struct AttentionSplit {
  int threads = 1;
  int64_t items = 0;   // sequences x kv heads x blocks of query rows
  int64_t blocks = 0;  // partials per query row; 0: not split over tokens, an item covers all of its tokens
  size_t worker_bytes = 0, partial_bytes = 0;

  int64_t o_floats(const AttentionCall& call) const { return call.T * call.Hq * blocks * call.Dv; }
  size_t bytes() const { return worker_bytes * static_cast<size_t>(threads) + partial_bytes; }
};

AttentionSplit split_attention(const Stream& stream, const AttentionCall& call) {
  AttentionSplit split;
  split.threads = thread_count(stream);
  split.items = call.sequences.count * call.Hk * call.query_blocks();
  split.worker_bytes = attention_worker_bytes(call);
  const int64_t blocks = std::min(kMaxBlocks, ceil_div(sequence_capacity(*call.cache), kBlockTokens));
  if (blocks > 1 && split.items < kItemsPerThread * split.threads && split.threads > 1 && call.T * call.Hq <= kMaxSplitRows) {
    split.blocks = blocks;
    // Aligned, since the workers' buffers follow the partials.
    split.partial_bytes = align_scratch(static_cast<size_t>(split.o_floats(call) + 2 * call.T * call.Hq * blocks) * sizeof(float));
  }
  return split;
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
  return split_attention(stream, lower(args)).bytes();
}

// Why the call cannot use integer arithmetic, for its printed plan.
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
  const AttentionSplit split = split_attention(stream, call);
  const std::string arithmetic = !call.integer ? "decoded" : call.ints == RowInts::wide ? "integer" : "integer_fast";
  std::string plan = std::to_string(split.threads) + " threads over " + std::to_string(call.sequences.count) + " sequences x " +
                     std::to_string(call.Hk) + " kv heads x " + std::to_string(call.query_blocks()) + " blocks of up to " +
                     std::to_string(std::min(kQueryBlock, call.max_query_rows())) + " query rows";
  plan += split.blocks > 0 ? " x up to " + std::to_string(split.blocks) + " blocks of tokens, partials merged in order"
                           : ", each over all its tokens";
  if (!call.integer) plan += "; not in integers, " + why_not_integer(call);
  return {"cpu.compressed_attention." + arithmetic + "." + isa_name(resolve_isa(stream.isa)), plan};
}

PartialsView scratch_partials(const AttentionCall& call, const AttentionSplit& split, void* data) {
  const int64_t B = split.blocks, Hq = call.Hq, Dv = call.Dv;
  PartialsView view;
  view.o = static_cast<float*>(data);
  view.m = view.o + split.o_floats(call);
  view.l = view.m + call.T * Hq * B;
  view.o_token = Hq * B * Dv, view.o_head = B * Dv, view.o_block = Dv, view.o_four = 4;
  view.m_token = view.l_token = Hq * B;
  view.m_head = view.l_head = B;
  view.m_block = view.l_block = 1;
  return view;
}

// Work of a call in tokens x kv heads x blocks of query rows. Reads cache lengths and sequence boundaries, which are in host memory
// on the cpu.
int64_t tokens_of_call(const AttentionCall& call) {
  int64_t tokens = 0;
  for (int64_t n = 0; n < call.sequences.count; ++n)
    if (tokens_of(call.sequences, n, call.T).length() > 0) tokens += live_tokens(*call.cache, appended_tokens(*call.cache, n));
  return tokens * call.Hk * call.query_blocks();
}

void compressed_attention(const Stream& stream, const CompressedAttentionArgs& args, Scratch scratch) {
  const AttentionCall call = lower(args);
  const AttentionSplit split = split_attention(stream, call);
  const OutputEpilogue epilogue = output_epilogue(args.cache.v.format, KvDomain::original, args.o, args.lse, args.sinks, call.Hk);
  const int threads = static_cast<int>(std::clamp<int64_t>(tokens_of_call(call) / kTokensPerThread, 1, split.threads));
  auto* workers = static_cast<char*>(scratch.data) + split.partial_bytes;
  const auto memory = [&](int worker) { return workers + static_cast<size_t>(worker) * split.worker_bytes; };
  const auto item_at = [&](int64_t i) {
    const int64_t query_blocks = std::max<int64_t>(1, call.query_blocks());  // no query rows: no items either
    return AttentionWorkItem{i / (query_blocks * call.Hk), i / query_blocks % call.Hk, i % query_blocks * kQueryBlock, 0, 0};
  };
  if (split.blocks == 0 || threads == 1) {
    parallel_for(threads, split.items,
                 [&](int64_t i, int worker) { run_attention(stream.isa, call, item_at(i), epilogue, memory(worker)); });
    return;
  }
  const PartialsView partials = scratch_partials(call, split, scratch.data);
  parallel_for(threads, split.items * split.blocks, [&](int64_t i, int worker) {
    AttentionWorkItem item = item_at(i / split.blocks);
    item.first_block = i % split.blocks;
    item.end_block = item.first_block + 1;
    run_partials(stream.isa, call, item, partials, false, memory(worker));
  });
  parallel_for(threads, call.sequences.count * call.Hq, [&](int64_t i, int) {
    const TokenRange range = tokens_of(call.sequences, i / call.Hq, call.T);
    for (int64_t t = range.begin; t < range.end; ++t) run_merge(stream.isa, partials, split.blocks, epilogue, t, i % call.Hq);
  });
}

}  // namespace

OpEntry<CompressedAttentionArgs> compressed_attention_entry() {
  return {compressed_attention, kAllFloats, nullptr, attention_choose, attention_scratch};
}

}  // namespace weft::cpu
