// compressed_attention on cuda: partials of parts of the context, by tensor cores where they read the cache, then their merge.
#include <algorithm>

#include "cuda/attention/decode_coded.h"
#include "cuda/attention/decode_uncompressed.h"
#include "cuda/attention/finish_row.cuh"
#include "cuda/attention/prefill.h"
#include "cuda/common/launch.cuh"
#include "cuda/table.h"

namespace weft::cuda {
namespace {

constexpr int64_t kMostParts = 128;

// Who computes the partials, and in how many parts. Where sequences of many query rows have a kernel of their own, and there may be
// others, each chooses by its own rows.
enum class Few { none, f32, lanes, plain };  // the kernel for few rows; lanes and plain: by tensor cores
struct Plan {
  bool prefill = false;  // a kernel for many rows
  Few few = Few::f32;
  int64_t parts = 1;
  CodedLaunch how;  // few, by lanes; how.most_rows for others, too
};

// Tokens of a sequence that its queries can see together.
int64_t reach(const CompressedAttentionArgs& args) {
  const int64_t capacity = sequence_capacity(args.cache);
  if (!args.mask.window || !args.mask.causal || args.queries.positions.present() || args.cache.kind == CacheKind::ring)
    return capacity;
  return std::min(capacity, std::min(*args.mask.window, capacity) + max_tokens(args.queries.sequences, args.queries.q.size(0)));
}

// Blocks of the tensor-core kernel have a multiprocessor to themselves, and take turns when there are more. A block costs as many rounds
// as its warps have tiles, of which the last is quicker when few have one, and a start and an end worth kEnds rounds. Two teams of its
// warps save one of two starts. Parts cost a merge: nothing where there is one, a little in a cluster, else another kernel. `brief`: how
// much shorter than those of lane tiles rounds are.
struct SplitChoice {
  int64_t parts = 1;
  int items_per_block = 1;
  CodedFinish finish = CodedFinish::merge_kernel;
};
// `room(parts)`: clusters of so many blocks that the device holds at once; 0: none, or they cannot finish rows.
template <class Room>
SplitChoice choose_split(int64_t shares, int64_t tiles, const CodedFit& fit, bool finishes, int multiprocessors, Room&& room,
                         double brief = 1) {
  constexpr double kEnds = 1.2, kMerge = 0.01, kQuickest = 0.4, kKernel = 0.4, kCluster = 0.15;
  SplitChoice best;
  double least = -1;
  for (int64_t parts = 1; parts <= std::clamp<int64_t>(tiles, 1, kMostParts); ++parts)
    for (int items_per_block = 1; items_per_block <= fit.max_items; ++items_per_block) {
      const int64_t each = ceil_div(tiles, parts), warps = fit.warps / items_per_block, last = each % warps;
      const double rounds = static_cast<double>(each / warps) +
                            (last > 0 ? std::max(kQuickest, static_cast<double>(last) / static_cast<double>(warps)) : 0.0);
      const auto consider = [&](CodedFinish finish, int64_t turns, double merge) {
        const double cost = static_cast<double>(turns) * (kEnds * brief + rounds) + merge * brief;
        if (least < 0 || cost < least) best = {parts, items_per_block, finish}, least = cost;
      };
      const int64_t turns = ceil_div(ceil_div(shares * parts, items_per_block), multiprocessors);
      if (finishes && parts == 1) consider(CodedFinish::block, turns, 0);
      consider(CodedFinish::merge_kernel, turns, kKernel + kMerge * static_cast<double>(parts));
      if (const int64_t clusters = finishes && items_per_block == 1 && parts > 1 ? room(parts) : 0)
        consider(CodedFinish::cluster, ceil_div(shares, clusters), kCluster + kMerge * static_cast<double>(parts));
    }
  return best;
}

// Blocks for many rows have a multiprocessor to themselves, too; a start and an end cost about what kEnds tiles do.
int64_t prefill_parts(int64_t blocks, int64_t tiles, int multiprocessors) {
  constexpr double kEnds = 8, kMerge = 0.5;
  int64_t best = 1;
  double least = 0;
  for (int64_t parts = 1; parts <= std::clamp<int64_t>(tiles, 1, kMostParts); ++parts) {
    const auto turns = static_cast<double>(ceil_div(blocks * parts, multiprocessors));
    const double cost = turns * (kEnds + static_cast<double>(ceil_div(tiles, parts))) + kMerge * static_cast<double>(parts);
    if (parts == 1 || cost < least) best = parts, least = cost;
  }
  return best;
}

Plan plan_of(const Stream& stream, const CompressedAttentionArgs& args) {
  Plan plan;
  const int64_t tokens = std::max<int64_t>(reach(args), 1), T = args.queries.q.size(0), Hk = args.cache.heads();
  const int64_t group = args.queries.q.size(1) / Hk, N = args.queries.sequences.count;
  const int64_t rows = max_tokens(args.queries.sequences, T) * group;
  const bool invariant = args.schedule == Schedule::invariant;
  plan.prefill = rows >= kPromptRows && prefill_takes(stream, args.cache);
  plan.how.most_rows = plan.prefill ? kPromptRows - 1 : rows;
  // What a sequence is cut into may depend on nothing but its own call when the schedule is invariant.
  plan.how.choose_rows = invariant ? group : plan.how.most_rows;
  const CodedFit fit = coded_fit(stream, args.cache, plan.how.choose_rows);
  if (plan.prefill && !args.queries.sequences.cu_seqlens.present())
    plan.few = Few::none;
  else if (fit.rows > 0)
    plan.few = Few::lanes;
  else if (decode_uncompressed_takes(stream, args.cache))
    plan.few = Few::plain;
  if (invariant) {
    constexpr int64_t kInvariantTokens = 1024, kInvariantParts = 16;
    plan.parts = std::clamp<int64_t>(ceil_div(sequence_capacity(args.cache), kInvariantTokens), 1, kInvariantParts);
    return plan;
  }
  const int multiprocessors = facts_of(stream).multiprocessors;
  const int64_t tiles = ceil_div(tokens, kTileTokens);
  if (plan.prefill) {
    plan.parts = prefill_parts(std::max<int64_t>(N * Hk * ceil_div(rows, kPrefillRows), 1), tiles, multiprocessors);
  } else if (plan.few == Few::lanes) {
    const int64_t row_tiles = ceil_div(rows, fit.rows);
    const bool finishes = finish_fits(rotate_view(args.cache.v.format));
    const auto room = [&](int64_t parts) {
      return row_tiles == 1 && (parts == 2 || parts == 4 || parts == 8 || parts == 16)
                 ? coded_cluster_room(stream, args.cache, plan.how.choose_rows, static_cast<int>(parts))
                 : 0;
    };
    const SplitChoice share = choose_split(std::max<int64_t>(N * Hk * row_tiles, 1), tiles, fit, finishes, multiprocessors, room);
    plan.parts = share.parts;
    plan.how.items_per_block = share.items_per_block;
    plan.how.finish = share.finish;
  } else if (plan.few == Few::plain) {
    // A round of heads of 256 moves as many bytes as one of lane tiles.
    plan.parts = choose_split(
                     std::max<int64_t>(N * Hk * ceil_div(rows, kUncompressedRows), 1), ceil_div(tokens, kUncompressedTokens),
                     {kUncompressedRows, kUncompressedWarps, 1}, false, multiprocessors, [](int64_t) { return 0; },
                     256.0 / static_cast<double>(args.cache.k.format.head_dim))
                     .parts;
  } else {
    constexpr int64_t kBlocksEach = 4, kFewestTokens = 64;
    plan.parts = std::clamp<int64_t>(kBlocksEach * multiprocessors / std::max<int64_t>(N * Hk * ceil_div(rows, kRows), 1), 1,
                                     std::min(kMostParts, ceil_div(tokens, kFewestTokens)));
  }
  return plan;
}

// Partials [T, Hq, parts] in scratch.
size_t partial_floats(const Plan& plan, int64_t T, int64_t Hq, int64_t Dv) {
  if (plan.how.finish != CodedFinish::merge_kernel) return 0;
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
  const std::string parts = "parts=" + std::to_string(plan.parts) + (plan.how.items_per_block > 1 ? " two to a block" : "");
  if (plan.prefill)
    return {"cuda.compressed_attention.prefill", parts + " warpgroup products" +
                                                     (plan.few == Few::none  ? ""
                                                      : plan.few == Few::f32 ? ", f32 for few rows"
                                                                             : ", tensor cores for few rows")};
  if (plan.few == Few::lanes)
    return {"cuda.compressed_attention.lanes", parts + " tensor cores" +
                                                   (plan.how.finish == CodedFinish::merge_kernel ? ", then a merge"
                                                    : plan.how.finish == CodedFinish::cluster    ? ", joined in clusters"
                                                                                                 : "")};
  if (plan.few == Few::plain) return {"cuda.compressed_attention.plain", parts + " tensor cores"};
  return {
      "cuda.compressed_attention.tiles",
      parts + (coded_tile_cache(args.cache) ? " f32; not on tensor cores, which have no kernel for these bits and this head size"
                                            : " f32; not on tensor cores, which want coded tiles in lanes order, K and V alike, or "
                                              "f16 or bf16 on both sides, of 64, 128 or 256 on 16 bytes")};
}

void compressed_attention(const Stream& stream, const CompressedAttentionArgs& args, Scratch scratch) {
  constexpr const char* kOp = "compressed_attention";
  const Plan plan = plan_of(stream, args);
  const int64_t T = args.o.size(0), Hq = args.o.size(1), Dv = args.o.size(2);
  const QueryParams queries = query_params(args.queries, args.cache, args.mask);
  const bool later = plan.how.finish == CodedFinish::merge_kernel;
  const PartialsPlan partials{later ? scratch_view(static_cast<float*>(scratch.data), plan, T, Hq, Dv) : PartialsView{}, plan.parts,
                              0};
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
  switch (plan.few) {
    case Few::none: break;
    case Few::f32: launch_partials(kOp, stream, queries, args.cache, partials, plan.how.most_rows); break;
    case Few::lanes: launch_decode_coded(kOp, stream, queries, args.cache, partials, plan.how, merge); break;
    case Few::plain: launch_decode_uncompressed(kOp, stream, queries, args.cache, partials, plan.how.most_rows); break;
  }
  if (plan.prefill) launch_prefill(kOp, stream, queries, args.cache, partials);
  if (later) launch_merge(kOp, stream, merge);
}

}  // namespace

OpRow<CompressedAttentionArgs> compressed_attention_row() {
  return {compressed_attention, kAllFloats, nullptr, choose, scratch_bytes_of};
}

}  // namespace weft::cuda
