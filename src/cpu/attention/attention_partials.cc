// attention_scores, attention_values, attention_partials and attention_merge on the cpu.
#include <string>

#include "cpu/attention/attention.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/table.h"

namespace weft::cpu {
namespace {

Choice chosen(const Stream& stream, const std::string& op, const AttentionCall& call, const std::string& pieces) {
  return {"cpu." + op + (call.integer ? ".integer." : ".decoded.") + isa_name(resolve_isa(stream.isa)),
          std::to_string(thread_count(stream)) + " threads over " + std::to_string(call.sequences.count) + " sequences x " +
              std::to_string(call.Hk) + " kv heads x " + std::to_string(call.row_blocks()) + " blocks of query rows" + pieces};
}

// Calls work(piece, memory) for every block of rows and every `step` of `blocks` blocks of tokens.
template <class Work>
void for_each_piece(const Stream& stream, const AttentionCall& call, int64_t blocks, int64_t step, Scratch scratch, Work&& work) {
  const size_t bytes = attention_worker_bytes(call);
  const int64_t row_blocks = call.row_blocks(), steps = blocks_of(blocks, step);
  parallel_for(thread_count(stream), call.sequences.count * call.Hk * row_blocks * steps, [&](int64_t i, int worker) {
    const int64_t piece = i / steps, first = i % steps * step;
    work(AttentionPiece{piece / (row_blocks * call.Hk), piece / row_blocks % call.Hk, piece % row_blocks * kRowBlock, first,
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

int64_t score_blocks(const AttentionScoresArgs& args) { return blocks_of(args.scores.size(2), kBlockTokens); }

void attention_scores(const Stream& stream, const AttentionScoresArgs& args, Scratch scratch) {
  const AttentionCall call = lower(args);
  for_each_piece(stream, call, score_blocks(args), 1, scratch,
                 [&](const AttentionPiece& piece, void* memory) { run_scores(stream.isa, call, piece, args.scores, memory); });
}

// ---- attention_values

AttentionCall lower(const AttentionValuesArgs& args) {
  return attention_call(args.cache, args.sequences, args.weights.size(0), args.weights.size(1));
}

void attention_values(const Stream& stream, const AttentionValuesArgs& args, Scratch scratch) {
  const AttentionCall call = lower(args);
  const RowFinish finish = row_finish(args.cache.v.format, args.domain, args.o, {}, {}, call.Hk);
  for_each_piece(stream, call, 1, 1, scratch,
                 [&](const AttentionPiece& piece, void* memory) { run_values(stream.isa, call, piece, args, finish, memory); });
}

// ---- attention_partials

AttentionCall lower(const AttentionPartialsArgs& args) {
  AttentionCall call = attention_call(args.queries, args.cache, args.mask);
  call.k_levels = level_bytes(call.k);
  call.v_levels = level_bytes(call.v);
  // Integers go by whole tiles: blocks that cut them would do the work of a tile several times.
  call.integer = call.k_levels.step > 0 && call.v_levels.step > 0 && args.block_tokens % kTileTokens == 0;
  call.block_tokens = std::min<int64_t>(args.block_tokens, INT32_MAX);  // no sequence is longer, and block numbers multiply it
  return call;
}

void attention_partials(const Stream& stream, const AttentionPartialsArgs& args, Scratch scratch) {
  const AttentionCall call = lower(args);
  const PartialsView out = partials_view(args.partials, call.T, call.Hq, call.Dv);
  const int64_t step = std::max<int64_t>(1, kBlockTokens / args.block_tokens);
  for_each_piece(stream, call, args.partials.count, step, scratch,
                 [&](const AttentionPiece& piece, void* memory) { run_partials(stream.isa, call, piece, out, true, memory); });
}

// ---- attention_merge

constexpr int64_t kMergeRows = 4;  // of a piece

void attention_merge(const Stream& stream, const AttentionMergeArgs& args, Scratch) {
  const int64_t T = args.o.size(0), Hq = args.o.size(1), rows = T * Hq;
  const PartialsView in = partials_view(args.partials, T, Hq, args.o.size(2));
  const RowFinish finish = row_finish(args.v_format, args.domain, args.o, args.lse, args.sinks, args.kv_heads);
  parallel_for(thread_count(stream), blocks_of(rows, kMergeRows), [&](int64_t i, int) {
    for (int64_t r = i * kMergeRows; r < std::min(rows, (i + 1) * kMergeRows); ++r)
      run_merge(stream.isa, in, args.partials.count, finish, r / Hq, r % Hq);
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
