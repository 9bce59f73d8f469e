// compressed_attention on cuda: partials of parts of the context, by tensor cores where they read the cache, then their merge.
#include <algorithm>

#include "cuda/attention_lanes.h"
#include "cuda/attention_parts.cuh"
#include "cuda/kv_table.h"
#include "cuda/launch.cuh"

namespace weft::cuda {
namespace {

constexpr int64_t kMostParts = 128;

// How a call is cut.
struct Plan {
  bool lanes = false;
  int64_t parts = 1;
};

// Tokens of a sequence that its queries can see together.
int64_t reach(const CompressedAttentionArgs& args) {
  const int64_t capacity = sequence_capacity(args.cache);
  if (!args.mask.window || !args.mask.causal || args.queries.positions.present() || args.cache.kind == CacheKind::ring)
    return capacity;
  return std::min(capacity, std::min(*args.mask.window, capacity) + max_tokens(args.queries.sequences, args.queries.q.size(0)));
}

// Blocks of the tensor-core kernel have a multiprocessor to themselves, and take turns when there are more. A block costs what its
// longest warp has to do, and a start and an end worth about kEnds tiles; every part costs the merge a little.
int64_t lanes_parts(int64_t blocks, int64_t tiles, int warps, int multiprocessors) {
  constexpr double kEnds = 1.5, kMerge = 0.02;
  int64_t best = 1;
  double least = 0;
  for (int64_t parts = 1; parts <= std::clamp<int64_t>(tiles, 1, kMostParts); ++parts) {
    const auto turns = static_cast<double>(ceil_div(blocks * parts, multiprocessors));
    const double cost =
        turns * (kEnds + static_cast<double>(ceil_div(ceil_div(tiles, parts), warps))) + kMerge * static_cast<double>(parts);
    if (parts == 1 || cost < least) best = parts, least = cost;
  }
  return best;
}

Plan plan_of(const Stream& stream, const CompressedAttentionArgs& args) {
  Plan plan;
  const int64_t tokens = std::max<int64_t>(reach(args), 1), T = args.queries.q.size(0), Hk = args.cache.heads();
  const int64_t rows = max_tokens(args.queries.sequences, T) * (args.queries.q.size(1) / Hk);
  const LanesFit fit = lanes_fit_of(args.cache, rows);
  plan.lanes = fit.rows > 0;
  // What a sequence is cut into may depend on nothing but its own call when the schedule is invariant.
  if (args.schedule == Schedule::invariant) {
    constexpr int64_t kInvariantTokens = 1024, kInvariantParts = 16;
    plan.parts = std::clamp<int64_t>(ceil_div(sequence_capacity(args.cache), kInvariantTokens), 1, kInvariantParts);
    return plan;
  }
  const int64_t row_tiles = ceil_div(rows, plan.lanes ? fit.rows : kRows);
  const int64_t blocks = std::max<int64_t>(args.queries.sequences.count * Hk * row_tiles, 1);
  const int multiprocessors = facts_of(stream).multiprocessors;
  if (plan.lanes) {
    plan.parts = lanes_parts(blocks, ceil_div(tokens, kTileTokens), fit.warps, multiprocessors);
  } else {
    constexpr int64_t kBlocksEach = 4, kFewestTokens = 64;
    plan.parts =
        std::clamp<int64_t>(kBlocksEach * multiprocessors / blocks, 1, std::min(kMostParts, ceil_div(tokens, kFewestTokens)));
  }
  return plan;
}

// Partials [T, Hq, parts] in scratch.
size_t partial_floats(const Plan& plan, int64_t T, int64_t Hq, int64_t Dv) {
  return static_cast<size_t>(T * Hq * plan.parts * (Dv + 2));
}

PartialsView scratch_view(float* data, const Plan& plan, int64_t T, int64_t Hq, int64_t Dv) {
  PartialsView view;
  view.o = data;
  view.m = view.o + T * Hq * plan.parts * Dv;
  view.l = view.m + T * Hq * plan.parts;
  view.o_block = Dv, view.o_head = plan.parts * Dv, view.o_token = Hq * view.o_head, view.o_four = 4;
  view.m_block = view.l_block = 1;
  view.m_head = view.l_head = plan.parts;
  view.m_token = view.l_token = Hq * plan.parts;
  return view;
}

size_t scratch_bytes_of(const Stream& stream, const CompressedAttentionArgs& args) {
  return partial_floats(plan_of(stream, args), args.o.size(0), args.o.size(1), args.o.size(2)) * sizeof(float);
}

Choice choose(const Stream& stream, const CompressedAttentionArgs& args) {
  const Plan plan = plan_of(stream, args);
  return {plan.lanes ? "cuda.compressed_attention.lanes" : "cuda.compressed_attention.tiles",
          "parts=" + std::to_string(plan.parts) + (plan.lanes ? " tensor cores" : " f32")};
}

void compressed_attention(const Stream& stream, const CompressedAttentionArgs& args, Scratch scratch) {
  constexpr const char* kOp = "compressed_attention";
  const Plan plan = plan_of(stream, args);
  const int64_t T = args.o.size(0), Hq = args.o.size(1), Dv = args.o.size(2);
  const QueryParams queries = query_params(args.queries, args.cache, args.mask);
  const PartialsPlan partials{scratch_view(static_cast<float*>(scratch.data), plan, T, Hq, Dv), plan.parts, 0};
  (plan.lanes ? launch_lanes : launch_partials)(kOp, stream, queries, args.cache, partials);
  MergeParams merge;
  merge.in = partials.out;
  merge.count = plan.parts;
  merge.sequences = args.queries.sequences;
  merge.T = T;
  merge.longest = max_tokens(args.queries.sequences, T);
  merge.Hq = Hq;
  merge.group = queries.group;
  leave_rotated(args.cache.v.format, KvDomain::original, merge.rotate, merge.mean);
  merge.sinks = args.sinks;
  merge.o = args.o;
  merge.lse = args.lse;
  launch_merge(kOp, stream, merge);
}

}  // namespace

OpRow<CompressedAttentionArgs> compressed_attention_row() {
  return {compressed_attention, kAllFloats, nullptr, choose, scratch_bytes_of};
}

}  // namespace weft::cuda
