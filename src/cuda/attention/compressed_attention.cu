// compressed_attention on cuda: the plan of a call (which kernels, how many splits of the context), and its launches.
#include <algorithm>

#include "cuda/attention/decode_coded.h"
#include "cuda/attention/decode_general.h"
#include "cuda/attention/decode_uncompressed.h"
#include "cuda/attention/finish_row.cuh"
#include "cuda/attention/prefill.h"
#include "cuda/common/launch.cuh"
#include "cuda/table.h"

namespace weft::cuda {
namespace {

constexpr int64_t kMaxSplits = 128;

// Which kernels run, and in how many splits of the context. With sequences of different lengths, those with many query rows may go
// to the prefill kernel and the others to a decode kernel in the same call: each kernel skips the sequences of the other.
enum class Decode { none, any, coded, uncompressed, general };  // any: in f32, for any cache; the others: on tensor cores
struct Plan {
  bool prefill = false;
  Decode decode = Decode::any;
  int64_t splits = 1;
  CodedLaunch how;           // of decode_coded; how.most_rows holds for every decode kernel
  size_t scratch_bytes = 0;  // of the partials [T, Hq, splits]
};

// Tokens of a sequence that its queries can see together.
int64_t reach(const CompressedAttentionArgs& args) {
  const int64_t capacity = sequence_capacity(args.cache);
  if (!args.mask.window || !args.mask.causal || args.queries.positions.present() || args.cache.kind == CacheKind::ring)
    return capacity;
  return std::min(capacity, std::min(*args.mask.window, capacity) + max_tokens(args.queries.sequences, args.queries.q.size(0)));
}

struct SplitChoice {
  int64_t splits = 1;
  int items_per_block = 1;
  CodedFinish finish = CodedFinish::merge_kernel;
};
// Minimises the time of a decode kernel on tensor cores, in rounds: the time in which every warp of a block processes one tile. A
// block occupies a multiprocessor; further blocks wait for it. A block takes as many rounds as its warps have tiles, where the last
// round is quicker if few warps have a tile, and kEnds rounds for its prologue and epilogue. Two work items in a block share a
// prologue and an epilogue. Splits cost a merge: nothing for one split, a little in a cluster, more in a kernel of its own.
//   items: work items of one split; room(splits): clusters of that many blocks that the device holds at once, 0 if clusters cannot
//   finish rows; ends: what prologue, epilogue and merge are multiplied by, because rounds are that much shorter than those of
//   coded tiles.
template <class Room>
SplitChoice choose_split(int64_t items, int64_t tiles, const CodedFit& fit, bool finishes, int multiprocessors, Room&& room,
                         double ends = 1) {
  constexpr double kEnds = 1.2, kMerge = 0.01, kQuickest = 0.4, kKernel = 0.4, kCluster = 0.15;
  SplitChoice best;
  double least = -1;
  for (int64_t splits = 1; splits <= std::clamp<int64_t>(tiles, 1, kMaxSplits); ++splits)
    for (int items_per_block = 1; items_per_block <= fit.max_items; ++items_per_block) {
      const int64_t each = ceil_div(tiles, splits), warps = fit.warps / items_per_block, last = each % warps;
      const double rounds = static_cast<double>(each / warps) +
                            (last > 0 ? std::max(kQuickest, static_cast<double>(last) / static_cast<double>(warps)) : 0.0);
      const auto consider = [&](CodedFinish finish, int64_t waves, double merge) {
        const double cost = static_cast<double>(waves) * (kEnds * ends + rounds) + merge * ends;
        if (least < 0 || cost < least) best = {splits, items_per_block, finish}, least = cost;
      };
      const int64_t waves = ceil_div(ceil_div(items * splits, items_per_block), multiprocessors);
      if (finishes && splits == 1) consider(CodedFinish::block, waves, 0);
      consider(CodedFinish::merge_kernel, waves, kKernel + kMerge * static_cast<double>(splits));
      if (const int64_t clusters = finishes && items_per_block == 1 && splits > 1 ? room(splits) : 0)
        consider(CodedFinish::cluster, ceil_div(items, clusters), kCluster + kMerge * static_cast<double>(splits));
    }
  return best;
}

// The same for the prefill kernel, in tiles: its prologue and epilogue cost about kEnds tiles.
int64_t prefill_splits(int64_t blocks, int64_t tiles, int multiprocessors) {
  constexpr double kEnds = 8, kMerge = 0.5;
  int64_t best = 1;
  double least = 0;
  for (int64_t splits = 1; splits <= std::clamp<int64_t>(tiles, 1, kMaxSplits); ++splits) {
    const auto waves = static_cast<double>(ceil_div(blocks * splits, multiprocessors));
    const double cost = waves * (kEnds + static_cast<double>(ceil_div(tiles, splits))) + kMerge * static_cast<double>(splits);
    if (splits == 1 || cost < least) best = splits, least = cost;
  }
  return best;
}

// Which kernels run and how the context is split.
Plan plan_kernels(const Stream& stream, const CompressedAttentionArgs& args) {
  Plan plan;
  const int64_t tokens = std::max<int64_t>(reach(args), 1), T = args.queries.q.size(0), Hk = args.cache.heads();
  const int64_t group = args.queries.q.size(1) / Hk, N = args.queries.sequences.count;
  const int64_t rows = max_tokens(args.queries.sequences, T) * group;
  const bool invariant = args.schedule == Schedule::invariant;
  plan.prefill = rows >= kPromptRows && prefill_takes(stream, args.cache);
  plan.how.most_rows = plan.prefill ? kPromptRows - 1 : rows;
  // With an invariant schedule, neither kernel nor splits may depend on the other sequences of the call.
  plan.how.choose_rows = invariant ? group : plan.how.most_rows;
  const CodedFit fit = coded_fit(stream, args.cache, plan.how.choose_rows);
  if (plan.prefill && !args.queries.sequences.cu_seqlens.present())
    plan.decode = Decode::none;
  else if (fit.rows > 0)
    plan.decode = Decode::coded;
  else if (decode_uncompressed_takes(stream, args.cache))
    plan.decode = Decode::uncompressed;
  const GeneralFit general =
      plan.decode == Decode::any ? general_fit(stream, args.cache, plan.how.choose_rows) : GeneralFit{};
  if (general.rows > 0) plan.decode = Decode::general;
  if (invariant) {
    constexpr int64_t kInvariantTokens = 1024, kInvariantSplits = 16;
    plan.splits = std::clamp<int64_t>(ceil_div(sequence_capacity(args.cache), kInvariantTokens), 1, kInvariantSplits);
    return plan;
  }
  const int multiprocessors = facts_of(stream).multiprocessors;
  const int64_t tiles = ceil_div(tokens, kTileTokens);
  if (plan.prefill) {
    plan.splits = prefill_splits(std::max<int64_t>(N * Hk * ceil_div(rows, kPrefillRows), 1), tiles, multiprocessors);
  } else if (plan.decode == Decode::coded) {
    const int64_t row_tiles = ceil_div(rows, fit.rows);
    const bool finishes = finish_fits(rotate_view(args.cache.v.format));
    const auto room = [&](int64_t splits) {
      return row_tiles == 1 && (splits == 2 || splits == 4 || splits == 8 || splits == 16)
                 ? coded_cluster_room(stream, args.cache, plan.how.choose_rows, static_cast<int>(splits))
                 : 0;
    };
    const SplitChoice choice = choose_split(std::max<int64_t>(N * Hk * row_tiles, 1), tiles, fit, finishes, multiprocessors, room);
    plan.splits = choice.splits;
    plan.how.items_per_block = choice.items_per_block;
    plan.how.finish = choice.finish;
  } else if (plan.decode == Decode::uncompressed) {
    // A round with heads of 256 moves as many bytes as one of coded tiles.
    plan.splits = choose_split(
                      std::max<int64_t>(N * Hk * ceil_div(rows, kUncompressedRows), 1), ceil_div(tokens, kUncompressedTokens),
                      {kUncompressedRows, kUncompressedWarps, 1}, false, multiprocessors, [](int64_t) { return 0; },
                      256.0 / static_cast<double>(args.cache.k.format.head_dim))
                      .splits;
  } else if (plan.decode == Decode::general) {
    plan.splits = choose_split(
                      std::max<int64_t>(N * Hk * ceil_div(rows, general.rows), 1), ceil_div(tokens, kGeneralTokens),
                      {general.rows, kGeneralWarps, 1}, false, multiprocessors * general.blocks, [](int64_t) { return 0; },
                      384.0 / static_cast<double>(args.cache.k.format.head_dim + args.cache.v.format.head_dim))
                      .splits;
  } else {
    constexpr int64_t kBlocksEach = 4, kFewestTokens = 64;
    plan.splits = std::clamp<int64_t>(kBlocksEach * multiprocessors / std::max<int64_t>(N * Hk * ceil_div(rows, kRows), 1), 1,
                                      std::min(kMaxSplits, ceil_div(tokens, kFewestTokens)));
  }
  return plan;
}

Plan plan_attention(const Stream& stream, const CompressedAttentionArgs& args) {
  Plan plan = plan_kernels(stream, args);
  const int64_t T = args.o.size(0), Hq = args.o.size(1), Dv = args.o.size(2);
  if (plan.how.finish == CodedFinish::merge_kernel)
    plan.scratch_bytes = static_cast<size_t>(T * Hq * plan.splits * (Dv + 2)) * sizeof(float);
  return plan;
}

PartialsView scratch_view(float* data, const Plan& plan, int64_t T, int64_t Hq, int64_t Dv) {
  PartialsView view;
  view.o = data;
  view.m = view.o + T * Hq * plan.splits * Dv;
  view.l = view.m + T * Hq * plan.splits;
  view.o_block = Dv, view.o_head = plan.splits * Dv, view.o_token = Hq * view.o_head, view.o_four = 4;
  view.m_block = view.l_block = 1;
  view.m_head = view.l_head = plan.splits;
  view.m_token = view.l_token = Hq * plan.splits;
  return view;
}

// "8 splits, then a merge".
std::string describe_splits(const Plan& plan) {
  const CodedFinish finish = plan.how.finish;
  return std::to_string(plan.splits) + (plan.splits == 1 ? " split" : " splits") +
         (finish == CodedFinish::cluster        ? ", merged in clusters"
          : finish == CodedFinish::merge_kernel ? ", then a merge"
                                                : "") +
         (plan.how.items_per_block > 1 ? "; two work items per block" : "");
}

// Precision is an argument, but each kernel has one precision: the plan says which.
Choice describe(const Stream&, const CompressedAttentionArgs& args, const Plan& plan) {
  const std::string splits = describe_splits(plan);
  if (plan.prefill)
    return {"cuda.compressed_attention.prefill",
            splits + "; wgmma; precision: f16 queries and weights, f32 sums" +
                (plan.decode == Decode::none           ? ""
                 : plan.decode == Decode::coded        ? "; short sequences by decode_coded, precision: exact scores"
                 : plan.decode == Decode::uncompressed ? "; short sequences by decode_uncompressed, precision: f32"
                 : plan.decode == Decode::general      ? "; short sequences by decode_general, precision: f32"
                                                       : "; short sequences by decode_any, precision: f32")};
  if (plan.decode == Decode::coded)
    return {"cuda.compressed_attention.decode_coded", splits + "; tensor cores; precision: exact scores"};
  if (plan.decode == Decode::uncompressed)
    return {"cuda.compressed_attention.decode_uncompressed", splits + "; tensor cores; precision: f32"};
  if (plan.decode == Decode::general)
    return {"cuda.compressed_attention.decode_general", splits + "; tensor cores; precision: f32"};
  return {"cuda.compressed_attention.decode_any",
          splits + "; precision: f32; no tensor cores, which want rows that begin at multiples of 4 bytes, and gains of a whole row, "
                   "or of half a row that is a multiple of 64"};
}

void launch_attention(const Stream& stream, const CompressedAttentionArgs& args, const Plan& plan, Scratch scratch) {
  constexpr const char* kOp = "compressed_attention";
  const int64_t T = args.o.size(0), Hq = args.o.size(1), Dv = args.o.size(2);
  const QueryParams queries = query_params(args.queries, args.cache, args.mask);
  const bool merges = plan.how.finish == CodedFinish::merge_kernel;
  const PartialsPlan partials{merges ? scratch_view(static_cast<float*>(scratch.data), plan, T, Hq, Dv) : PartialsView{},
                              plan.splits, 0};
  MergeParams merge;
  merge.in = partials.out;
  merge.splits = plan.splits;
  merge.sequences = view_of(args.queries.sequences);
  merge.T = T;
  merge.longest = max_tokens(args.queries.sequences, T);
  merge.Hq = Hq;
  merge.group = queries.group;
  leave_rotated(args.cache.v.format, KvDomain::original, merge.rotate, merge.mean);
  merge.set_outputs(args.sinks, args.o, args.lse);
  switch (plan.decode) {
    case Decode::none: break;
    case Decode::any: launch_partials(kOp, stream, queries, args.cache, partials, plan.how.most_rows); break;
    case Decode::coded: launch_decode_coded(kOp, stream, queries, args.cache, partials, plan.how, merge); break;
    case Decode::uncompressed: launch_decode_uncompressed(kOp, stream, queries, args.cache, partials, plan.how.most_rows); break;
    case Decode::general:
      launch_decode_general(kOp, stream, queries, args.cache, partials, plan.how.choose_rows, plan.how.most_rows);
      break;
  }
  if (plan.prefill) launch_prefill(kOp, stream, queries, args.cache, partials);
  if (merges) launch_merge(kOp, stream, merge);
}

}  // namespace

OpEntry<CompressedAttentionArgs> compressed_attention_entry() {
  return entry<plan_attention, describe, launch_attention>(kAllFloats);
}

}  // namespace weft::cuda
