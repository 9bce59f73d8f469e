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
struct AttentionPlan {
  Isa isa = Isa::best;
  AttentionShape shape;
  int threads = 1;
  int64_t items = 0;   // sequences x kv heads x blocks of query rows
  int64_t blocks = 0;  // partials per query row; 0: not split over tokens, an item covers all of its tokens
  size_t worker_bytes = 0, partial_bytes = 0;
  size_t scratch_bytes = 0;

  int64_t o_floats() const { return shape.T * shape.Hq * blocks * shape.Dv; }
};

AttentionPlan plan_attention(const Stream& stream, const CompressedAttentionArgs& args) {
  AttentionPlan plan;
  const KvCache& cache = args.cache;
  AttentionShape& shape = plan.shape;
  shape = attention_shape(cache, args.queries.sequences, args.queries.q.size(0), args.queries.q.size(1));
  shape.integer = has_level_bytes(cache, cache.k.format) && has_level_bytes(cache, cache.v.format);
  shape.ints = args.precision == Precision::fast ? RowInts::bytes : RowInts::wide;
  plan.isa = resolve_isa(stream.isa);
  plan.threads = thread_count(stream);
  plan.items = shape.sequences.count * shape.Hk * shape.query_blocks();
  plan.worker_bytes = attention_worker_bytes(shape);
  const int64_t blocks = std::min(kMaxBlocks, ceil_div(sequence_capacity(cache), kBlockTokens)), rows = shape.T * shape.Hq;
  if (blocks > 1 && plan.items < kItemsPerThread * plan.threads && plan.threads > 1 && rows <= kMaxSplitRows) {
    plan.blocks = blocks;
    // Aligned, since the workers' buffers follow the partials.
    plan.partial_bytes = align_scratch(static_cast<size_t>(plan.o_floats() + 2 * rows * blocks) * sizeof(float));
  }
  plan.scratch_bytes = plan.worker_bytes * static_cast<size_t>(plan.threads) + plan.partial_bytes;
  return plan;
}

// Why the call cannot use integer arithmetic, for its printed plan.
std::string why_not_integer(const KvCache& cache) {
  const bool keys = !has_level_bytes(cache, cache.k.format);
  const KvFormat& format = (keys ? cache.k : cache.v).format;
  const std::string name = keys ? "K " : "V ";
  if (format.passthrough) return name + "is not coded";
  if (kv_storage(cache, format) != KvStorage::lane_tiles) return name + "does not lie in tiles of lanes order";
  if (!format.grid_step) return name + "has levels off an integer grid";
  return name + (gains_per_row(format) != 1 ? "has several gains in a row" : "has 7 or 8 bits with a table of its own");
}

Choice describe_attention(const Stream&, const CompressedAttentionArgs& args, const AttentionPlan& plan) {
  const AttentionShape& shape = plan.shape;
  const std::string arithmetic = !shape.integer ? "decoded" : shape.ints == RowInts::wide ? "integer" : "integer_fast";
  std::string text = std::to_string(plan.threads) + " threads over " + std::to_string(shape.sequences.count) + " sequences x " +
                     std::to_string(shape.Hk) + " kv heads x " + std::to_string(shape.query_blocks()) + " blocks of up to " +
                     std::to_string(std::min(kQueryBlock, shape.max_query_rows())) + " query rows";
  text += plan.blocks > 0 ? " x up to " + std::to_string(plan.blocks) + " blocks of tokens, partials merged in order"
                          : ", each over all its tokens";
  if (!shape.integer) text += "; not in integers, " + why_not_integer(args.cache);
  return {"cpu.compressed_attention." + arithmetic + "." + isa_name(plan.isa), text};
}

PartialsView scratch_partials(const AttentionPlan& plan, void* data) {
  const int64_t B = plan.blocks, T = plan.shape.T, Hq = plan.shape.Hq, Dv = plan.shape.Dv;
  PartialsView view;
  view.o = static_cast<float*>(data);
  view.m = view.o + plan.o_floats();
  view.l = view.m + T * Hq * B;
  view.o_token = Hq * B * Dv, view.o_head = B * Dv, view.o_block = Dv, view.o_four = 4;
  view.m_token = view.l_token = Hq * B;
  view.m_head = view.l_head = B;
  view.m_block = view.l_block = 1;
  return view;
}

// Work of a call in tokens x kv heads x blocks of query rows. Reads cache lengths and sequence boundaries, so only
// a launch may call it: a plan does not depend on data.
int64_t tokens_of_call(const AttentionShape& shape) {
  int64_t tokens = 0;
  for (int64_t n = 0; n < shape.sequences.count; ++n)
    if (tokens_of(shape.sequences, n, shape.T).length() > 0) tokens += live_tokens(*shape.cache, appended_tokens(*shape.cache, n));
  return tokens * shape.Hk * shape.query_blocks();
}

void compressed_attention(const Stream&, const CompressedAttentionArgs& args, const AttentionPlan& plan, Scratch scratch) {
  const AttentionCall call = attention_call(plan.shape, args.queries, args.mask);
  const OutputEpilogue epilogue = output_epilogue(args.cache.v.format, KvDomain::original, args.o, args.lse, args.sinks, call.Hk);
  const int threads = static_cast<int>(std::clamp<int64_t>(tokens_of_call(plan.shape) / kTokensPerThread, 1, plan.threads));
  auto* workers = static_cast<char*>(scratch.data) + plan.partial_bytes;
  const auto memory = [&](int worker) { return workers + static_cast<size_t>(worker) * plan.worker_bytes; };
  const auto item_at = [&](int64_t i) {
    const int64_t query_blocks = std::max<int64_t>(1, call.query_blocks());  // no query rows: no items either
    return AttentionWorkItem{i / (query_blocks * call.Hk), i / query_blocks % call.Hk, i % query_blocks * kQueryBlock, 0, 0};
  };
  if (plan.blocks == 0 || threads == 1) {
    parallel_for(threads, plan.items,
                 [&](int64_t i, int worker) { run_attention(plan.isa, call, item_at(i), epilogue, memory(worker)); });
    return;
  }
  const PartialsView partials = scratch_partials(plan, scratch.data);
  parallel_for(threads, plan.items * plan.blocks, [&](int64_t i, int worker) {
    AttentionWorkItem item = item_at(i / plan.blocks);
    item.first_block = i % plan.blocks;
    item.end_block = item.first_block + 1;
    run_partials(plan.isa, call, item, partials, false, memory(worker));
  });
  parallel_for(threads, call.sequences.count * call.Hq, [&](int64_t i, int) {
    const TokenRange range = tokens_of(call.sequences, i / call.Hq, call.T);
    for (int64_t t = range.begin; t < range.end; ++t) run_merge(plan.isa, partials, plan.blocks, epilogue, t, i % call.Hq);
  });
}

}  // namespace

OpEntry<CompressedAttentionArgs> compressed_attention_entry() {
  return entry<plan_attention, describe_attention, compressed_attention>(kAllFloats);
}

}  // namespace weft::cpu
