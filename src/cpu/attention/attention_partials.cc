// attention_scores, attention_values, attention_partials and attention_merge on the cpu: how each op is split over threads.
#include <string>

#include "cpu/attention/attention.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/table.h"

namespace weft::cpu {
namespace {

// How a call is split into work items: sequences x kv heads x blocks of query rows x ranges of `step` blocks of tokens.
struct ItemsPlan {
  Isa isa = Isa::best;
  AttentionShape shape;
  int threads = 1;
  int64_t blocks = 1, step = 1;  // blocks: of tokens
  size_t worker_bytes = 0;
  size_t scratch_bytes = 0;
};

ItemsPlan plan_items(const Stream& stream, const AttentionShape& shape, int64_t blocks, int64_t step) {
  ItemsPlan plan;
  plan.isa = resolve_isa(stream.isa);
  plan.shape = shape;
  plan.threads = thread_count(stream);
  plan.blocks = blocks;
  plan.step = step;
  plan.worker_bytes = attention_worker_bytes(shape);
  plan.scratch_bytes = plan.worker_bytes * static_cast<size_t>(plan.threads);
  return plan;
}

AttentionShape shape_of(const AttentionQueries& queries, const KvCache& cache) {
  return attention_shape(cache, queries.sequences, queries.q.size(0), queries.q.size(1));
}

Choice chosen(const ItemsPlan& plan, const std::string& op, const std::string& rest) {
  const AttentionShape& shape = plan.shape;
  return {"cpu." + op + (shape.integer ? ".integer." : ".decoded.") + isa_name(plan.isa),
          std::to_string(plan.threads) + " threads over " + std::to_string(shape.sequences.count) + " sequences x " +
              std::to_string(shape.Hk) + " kv heads x " + std::to_string(shape.query_blocks()) + " blocks of query rows" + rest};
}

// Calls work(item, memory) for every work item.
template <class Work>
void for_each_item(const ItemsPlan& plan, Scratch scratch, Work&& work) {
  const AttentionShape& shape = plan.shape;
  const int64_t query_blocks = shape.query_blocks(), steps = ceil_div(plan.blocks, plan.step);
  parallel_for(plan.threads, shape.sequences.count * shape.Hk * query_blocks * steps, [&](int64_t i, int worker) {
    const int64_t item = i / steps, first = i % steps * plan.step;
    work(AttentionWorkItem{item / (query_blocks * shape.Hk), item / query_blocks % shape.Hk, item % query_blocks * kQueryBlock,
                           first, std::min(first + plan.step, plan.blocks)},
         static_cast<char*>(scratch.data) + static_cast<size_t>(worker) * plan.worker_bytes);
  });
}

// ---- attention_scores

ItemsPlan plan_scores(const Stream& stream, const AttentionScoresArgs& args) {
  AttentionShape shape = shape_of(args.queries, args.cache);
  shape.integer = has_level_bytes(args.cache, args.cache.k.format);
  return plan_items(stream, shape, ceil_div(args.scores.size(2), kBlockTokens), 1);
}

void attention_scores(const Stream&, const AttentionScoresArgs& args, const ItemsPlan& plan, Scratch scratch) {
  const AttentionCall call = attention_call(plan.shape, args.queries, args.mask);
  for_each_item(plan, scratch,
                [&](const AttentionWorkItem& item, void* memory) { run_scores(plan.isa, call, item, args.scores, memory); });
}

Choice describe_scores(const Stream&, const AttentionScoresArgs&, const ItemsPlan& plan) {
  return chosen(plan, "attention_scores", " x " + std::to_string(plan.blocks) + " blocks of tokens");
}

// ---- attention_values

ItemsPlan plan_values(const Stream& stream, const AttentionValuesArgs& args) {
  return plan_items(stream, attention_shape(args.cache, args.sequences, args.weights.size(0), args.weights.size(1)), 1, 1);
}

void attention_values(const Stream&, const AttentionValuesArgs& args, const ItemsPlan& plan, Scratch scratch) {
  const AttentionCall call = attention_call(plan.shape);
  const OutputEpilogue epilogue = output_epilogue(args.cache.v.format, args.domain, args.o, {}, {}, call.Hk);
  for_each_item(plan, scratch,
                [&](const AttentionWorkItem& item, void* memory) { run_values(plan.isa, call, item, args, epilogue, memory); });
}

Choice describe_values(const Stream&, const AttentionValuesArgs&, const ItemsPlan& plan) {
  return chosen(plan, "attention_values", ", each over all its tokens");
}

// ---- attention_partials

ItemsPlan plan_partials(const Stream& stream, const AttentionPartialsArgs& args) {
  const KvCache& cache = args.cache;
  AttentionShape shape = shape_of(args.queries, cache);
  // Integer arithmetic processes whole tiles: several blocks inside one tile would each repeat its work.
  shape.integer =
      has_level_bytes(cache, cache.k.format) && has_level_bytes(cache, cache.v.format) && args.block_tokens % kTileTokens == 0;
  shape.block_tokens =
      std::min<int64_t>(args.block_tokens, INT32_MAX);  // no sequence is longer; keeps block * block_tokens from overflowing
  return plan_items(stream, shape, args.partials.count, std::max<int64_t>(1, kBlockTokens / args.block_tokens));
}

void attention_partials(const Stream&, const AttentionPartialsArgs& args, const ItemsPlan& plan, Scratch scratch) {
  const AttentionCall call = attention_call(plan.shape, args.queries, args.mask);
  const PartialsView out = partials_view(args.partials, call.T, call.Hq, call.Dv);
  for_each_item(plan, scratch,
                [&](const AttentionWorkItem& item, void* memory) { run_partials(plan.isa, call, item, out, true, memory); });
}

Choice describe_partials(const Stream&, const AttentionPartialsArgs&, const ItemsPlan& plan) {
  return chosen(plan, "attention_partials", " x " + std::to_string(plan.blocks) + " blocks of tokens");
}

// ---- attention_merge

constexpr int64_t kMergeRows = 4;  // query rows of a work item

struct MergePlan {
  Isa isa = Isa::best;
  int threads = 1;
  int64_t rows = 0;
  size_t scratch_bytes = 0;
};

MergePlan plan_merge(const Stream& stream, const AttentionMergeArgs& args) {
  return {resolve_isa(stream.isa), thread_count(stream), args.o.size(0) * args.o.size(1)};
}

void attention_merge(const Stream&, const AttentionMergeArgs& args, const MergePlan& plan, Scratch) {
  const int64_t T = args.o.size(0), Hq = args.o.size(1);
  const PartialsView in = partials_view(args.partials, T, Hq, args.o.size(2));
  const OutputEpilogue epilogue = output_epilogue(args.v_format, args.domain, args.o, args.lse, args.sinks, args.kv_heads);
  parallel_for(plan.threads, ceil_div(plan.rows, kMergeRows), [&](int64_t i, int) {
    for (int64_t r = i * kMergeRows; r < std::min(plan.rows, (i + 1) * kMergeRows); ++r)
      run_merge(plan.isa, in, args.partials.count, epilogue, r / Hq, r % Hq);
  });
}

Choice describe_merge(const Stream&, const AttentionMergeArgs& args, const MergePlan& plan) {
  return {std::string("cpu.attention_merge.") + isa_name(plan.isa), std::to_string(plan.threads) + " threads over " +
                                                                        std::to_string(plan.rows) + " rows of " +
                                                                        std::to_string(args.partials.count) + " partials"};
}

}  // namespace

OpEntry<AttentionScoresArgs> attention_scores_entry() { return entry<plan_scores, describe_scores, attention_scores>(kAllFloats); }
OpEntry<AttentionValuesArgs> attention_values_entry() { return entry<plan_values, describe_values, attention_values>(kAllFloats); }
OpEntry<AttentionPartialsArgs> attention_partials_entry() {
  return entry<plan_partials, describe_partials, attention_partials>(kAllFloats);
}
OpEntry<AttentionMergeArgs> attention_merge_entry() { return entry<plan_merge, describe_merge, attention_merge>(kAllFloats); }

}  // namespace weft::cpu
