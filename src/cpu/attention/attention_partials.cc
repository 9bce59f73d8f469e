// attention_scores, attention_values, attention_partials and attention_merge on the cpu: how each op is split over threads.
#include <string>

#include "cpu/attention/attention.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/table.h"

namespace weft::cpu {
namespace {

Choice chosen(const Stream& stream, const std::string& op, const AttentionCall& call, const std::string& rest) {
  return {"cpu." + op + (call.integer ? ".integer." : ".decoded.") + isa_name(resolve_isa(stream.isa)),
          std::to_string(thread_count(stream)) + " threads over " + std::to_string(call.sequences.count) + " sequences x " +
              std::to_string(call.Hk) + " kv heads x " + std::to_string(call.query_blocks()) + " blocks of query rows" + rest};
}

// Calls work(item, memory) for every sequence, kv head and block of query rows, and for every `step` of the `blocks` blocks of
// tokens.
template <class Work>
void for_each_item(const Stream& stream, const AttentionCall& call, int64_t blocks, int64_t step, Scratch scratch, Work&& work) {
  const size_t bytes = attention_worker_bytes(call);
  const int64_t query_blocks = call.query_blocks(), steps = ceil_div(blocks, step);
  parallel_for(thread_count(stream), call.sequences.count * call.Hk * query_blocks * steps, [&](int64_t i, int worker) {
    const int64_t item = i / steps, first = i % steps * step;
    work(AttentionWorkItem{item / (query_blocks * call.Hk), item / query_blocks % call.Hk, item % query_blocks * kQueryBlock, first,
                           std::min(first + step, blocks)},
         static_cast<char*>(scratch.data) + static_cast<size_t>(worker) * bytes);
  });
}

// ---- attention_scores

AttentionCall lower(const AttentionScoresArgs& args) {
  AttentionCall call = attention_call(args.queries, args.cache, args.mask);
  call.k_levels = level_bytes(call.k);
  call.integer = call.k_levels.step > 0;
  return call;
}

int64_t score_blocks(const AttentionScoresArgs& args) { return ceil_div(args.scores.size(2), kBlockTokens); }

void attention_scores(const Stream& stream, const AttentionScoresArgs& args, Scratch scratch) {
  const AttentionCall call = lower(args);
  for_each_item(stream, call, score_blocks(args), 1, scratch,
                [&](const AttentionWorkItem& item, void* memory) { run_scores(stream.isa, call, item, args.scores, memory); });
}

// ---- attention_values

AttentionCall lower(const AttentionValuesArgs& args) {
  return attention_call(args.cache, args.sequences, args.weights.size(0), args.weights.size(1));
}

void attention_values(const Stream& stream, const AttentionValuesArgs& args, Scratch scratch) {
  const AttentionCall call = lower(args);
  const OutputEpilogue epilogue = output_epilogue(args.cache.v.format, args.domain, args.o, {}, {}, call.Hk);
  for_each_item(stream, call, 1, 1, scratch,
                [&](const AttentionWorkItem& item, void* memory) { run_values(stream.isa, call, item, args, epilogue, memory); });
}

// ---- attention_partials

AttentionCall lower(const AttentionPartialsArgs& args) {
  AttentionCall call = attention_call(args.queries, args.cache, args.mask);
  call.k_levels = level_bytes(call.k);
  call.v_levels = level_bytes(call.v);
  // Integer arithmetic processes whole tiles: several blocks inside one tile would each repeat its work.
  call.integer = call.k_levels.step > 0 && call.v_levels.step > 0 && args.block_tokens % kTileTokens == 0;
  call.block_tokens =
      std::min<int64_t>(args.block_tokens, INT32_MAX);  // no sequence is longer; keeps block * block_tokens from overflowing
  return call;
}

void attention_partials(const Stream& stream, const AttentionPartialsArgs& args, Scratch scratch) {
  const AttentionCall call = lower(args);
  const PartialsView out = partials_view(args.partials, call.T, call.Hq, call.Dv);
  const int64_t step = std::max<int64_t>(1, kBlockTokens / args.block_tokens);
  for_each_item(stream, call, args.partials.count, step, scratch,
                [&](const AttentionWorkItem& item, void* memory) { run_partials(stream.isa, call, item, out, true, memory); });
}

// ---- attention_merge

constexpr int64_t kMergeRows = 4;  // query rows of a work item

void attention_merge(const Stream& stream, const AttentionMergeArgs& args, Scratch) {
  const int64_t T = args.o.size(0), Hq = args.o.size(1), rows = T * Hq;
  const PartialsView in = partials_view(args.partials, T, Hq, args.o.size(2));
  const OutputEpilogue epilogue = output_epilogue(args.v_format, args.domain, args.o, args.lse, args.sinks, args.kv_heads);
  parallel_for(thread_count(stream), ceil_div(rows, kMergeRows), [&](int64_t i, int) {
    for (int64_t r = i * kMergeRows; r < std::min(rows, (i + 1) * kMergeRows); ++r)
      run_merge(stream.isa, in, args.partials.count, epilogue, r / Hq, r % Hq);
  });
}

template <class Args>
size_t worker_scratch(const Stream& stream, const Args& args) {
  return attention_worker_bytes(lower(args)) * static_cast<size_t>(thread_count(stream));
}

}  // namespace

OpEntry<AttentionScoresArgs> attention_scores_entry() {
  return {attention_scores, kAllFloats, nullptr,
          [](const Stream& stream, const AttentionScoresArgs& args) {
            return chosen(stream, "attention_scores", lower(args),
                          " x " + std::to_string(score_blocks(args)) + " blocks of tokens");
          },
          worker_scratch<AttentionScoresArgs>};
}

OpEntry<AttentionValuesArgs> attention_values_entry() {
  return {attention_values, kAllFloats, nullptr,
          [](const Stream& stream, const AttentionValuesArgs& args) {
            return chosen(stream, "attention_values", lower(args), ", each over all its tokens");
          },
          worker_scratch<AttentionValuesArgs>};
}

OpEntry<AttentionPartialsArgs> attention_partials_entry() {
  return {attention_partials, kAllFloats, nullptr,
          [](const Stream& stream, const AttentionPartialsArgs& args) {
            return chosen(stream, "attention_partials", lower(args),
                          " x " + std::to_string(args.partials.count) + " blocks of tokens");
          },
          worker_scratch<AttentionPartialsArgs>};
}

OpEntry<AttentionMergeArgs> attention_merge_entry() {
  return {attention_merge, kAllFloats, nullptr, [](const Stream& stream, const AttentionMergeArgs& args) {
            return Choice{std::string("cpu.attention_merge.") + isa_name(resolve_isa(stream.isa)),
                          std::to_string(thread_count(stream)) + " threads over " +
                              std::to_string(args.o.size(0) * args.o.size(1)) + " rows of " + std::to_string(args.partials.count) +
                              " partials"};
          }};
}

}  // namespace weft::cpu
