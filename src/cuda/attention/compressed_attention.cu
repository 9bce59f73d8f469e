// compressed_attention on cuda: the plan of a call (which kernels, how many splits of the context), and its launches.
#include <algorithm>

#include "cuda/attention/decode_coded.h"
#include "cuda/attention/decode_general.h"
#include "cuda/attention/decode_uncompressed.h"
#include "cuda/attention/finish_row.cuh"
#include "cuda/attention/prefill.h"
#include "cuda/attention/prefill_dense.h"
#include "cuda/common/launch.cuh"
#include "cuda/table.h"

namespace weft::cuda {
namespace {

constexpr int64_t kMaxSplits = 128;

// Which kernels run, and in how many splits of the context. With sequences of different lengths, those with many query rows may go
// to a prefill kernel and the others to a decode kernel in the same call: each kernel skips the sequences of the other.
enum class Decode { none, any, coded, uncompressed, general };  // any: in f32, for any cache; the others: on tensor cores
enum class Prefill { none, coded, dense };                      // coded: decodes tiles in every block; dense: reads them decoded
struct Plan {
  Prefill prefill = Prefill::none;
  Decode decode = Decode::any;
  int64_t splits = 1;
  DensePlan dense;
  GeneralFit general;        // of decode_general
  CodedLaunch how;           // of decode_coded; how.most_rows holds for every decode kernel
  size_t scratch_bytes = 0;  // what the dense prefill wants, then partials [T, Hq, splits]
  bool finished() const { return prefill == Prefill::dense && dense.finishes; }  // the prefill kernel needs no partials
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

// The same for the coded prefill kernel, in tiles: its prologue and epilogue cost about kEnds tiles.
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

// The same for the dense prefill kernel. Splits also cost the writes and reads of partials, kPartials tiles for each block.
int64_t dense_splits(int64_t blocks, int64_t tiles, int multiprocessors, bool finishes) {
  constexpr double kEnds = 2, kPartials = 3, kMerge = 2;
  int64_t best = 1;
  double least = 0;
  for (int64_t splits = 1; splits <= std::clamp<int64_t>(tiles, 1, kMaxSplits); ++splits) {
    const auto waves = static_cast<double>(ceil_div(blocks * splits, multiprocessors));
    const bool merges = splits > 1 || !finishes;
    const double cost =
        waves * (kEnds + static_cast<double>(ceil_div(tiles, splits)) + (merges ? kPartials : 0)) + (merges ? kMerge : 0);
    if (splits == 1 || cost < least) best = splits, least = cost;
  }
  return best;
}

// From so many query rows of a sequence and kv head on, a prefill kernel is faster than the decode kernel of the cache.
int64_t prompt_rows_of(const Stream& stream, const KvCache& cache) {
  constexpr int64_t kRowsOfCoded = 97;  // decode_coded, where the coded prefill does not take the cache
  return !uncompressed_tiles(cache) && !prefill_takes(stream, cache) && coded_fit(stream, cache, kPromptRows).rows > 0
             ? kRowsOfCoded
             : kPromptRows;
}

// The prefill kernel for that many rows. The dense kernel decodes the cache once; up to kFewRows rows that costs more than decoding it
// in every block. An invariant schedule may not ask how many rows the longest sequence has.
Prefill choose_prefill(const Stream& stream, const CompressedAttentionArgs& args, int64_t rows, int64_t query_rows) {
  constexpr int64_t kFewRows = 512;
  if (rows < prompt_rows_of(stream, args.cache)) return Prefill::none;
  const bool coded = prefill_takes(stream, args.cache);
  if (coded && rows <= kFewRows && args.schedule != Schedule::invariant) return Prefill::coded;
  if (prefill_dense_takes(stream, args.cache, query_rows)) return Prefill::dense;
  return coded ? Prefill::coded : Prefill::none;
}

// Which kernels run and how the context is split.
Plan plan_kernels(const Stream& stream, const CompressedAttentionArgs& args) {
  Plan plan;
  const int64_t tokens = std::max<int64_t>(reach(args), 1), T = args.queries.q.size(0), Hk = args.cache.heads();
  const int64_t group = args.queries.q.size(1) / Hk, N = args.queries.sequences.count;
  const int64_t rows = max_tokens(args.queries.sequences, T) * group;
  const bool invariant = args.schedule == Schedule::invariant;
  plan.prefill = choose_prefill(stream, args, rows, T * group);
  const bool prompt = plan.prefill != Prefill::none;
  plan.how.most_rows = prompt ? prompt_rows_of(stream, args.cache) - 1 : rows;
  // With an invariant schedule, neither kernel nor splits may depend on the other sequences of the call.
  plan.how.choose_rows = invariant ? group : plan.how.most_rows;
  const CodedFit fit = coded_fit(stream, args.cache, plan.how.choose_rows);
  if (prompt && !args.queries.sequences.cu_seqlens.present())
    plan.decode = Decode::none;
  else if (fit.rows > 0)
    plan.decode = Decode::coded;
  else if (decode_uncompressed_takes(stream, args.cache))
    plan.decode = Decode::uncompressed;
  if (plan.prefill == Prefill::dense) {
    plan.dense = plan_prefill_dense(args.cache, N, tokens, T * group);
    plan.dense.least_rows = plan.how.most_rows + 1;
  }
  if (plan.decode == Decode::any) plan.general = general_fit(stream, args.cache, plan.how.choose_rows);
  const GeneralFit& general = plan.general;
  if (general.rows > 0) plan.decode = Decode::general;
  if (invariant) {
    constexpr int64_t kInvariantTokens = 1024, kInvariantSplits = 16;
    plan.splits = std::clamp<int64_t>(ceil_div(sequence_capacity(args.cache), kInvariantTokens), 1, kInvariantSplits);
    return plan;
  }
  const int multiprocessors = facts_of(stream).multiprocessors;
  const int64_t tiles = ceil_div(tokens, kTileTokens);
  if (plan.prefill == Prefill::dense) {
    const bool finishes = prefill_dense_can_finish(args.cache);
    plan.splits = dense_splits(std::max<int64_t>(plan.dense.pairs * ceil_div(rows, kDenseRows), 1), plan.dense.tiles,
                               multiprocessors, finishes);
  } else if (plan.prefill == Prefill::coded) {
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
  plan.dense.finishes = plan.prefill == Prefill::dense && plan.splits == 1 && prefill_dense_can_finish(args.cache);
  plan.scratch_bytes = plan.dense.scratch_bytes;
  if (plan.how.finish == CodedFinish::merge_kernel && !(plan.finished() && plan.decode == Decode::none))
    plan.scratch_bytes += static_cast<size_t>(T * Hq * plan.splits * (Dv + 2)) * sizeof(float);
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
  if (plan.finished()) return "1 split";
  return std::to_string(plan.splits) + (plan.splits == 1 ? " split" : " splits") +
         (finish == CodedFinish::cluster        ? ", merged in clusters"
          : finish == CodedFinish::merge_kernel ? ", then a merge"
                                                : "") +
         (plan.how.items_per_block > 1 ? "; two work items per block" : "");
}

// Precision is an argument, but each kernel has one precision: the plan says which.
Choice describe(const Stream&, const CompressedAttentionArgs& args, const Plan& plan) {
  const std::string splits = describe_splits(plan);
  if (plan.prefill != Prefill::none)
    return {plan.prefill == Prefill::dense ? "cuda.compressed_attention.prefill_dense" : "cuda.compressed_attention.prefill",
            splits +
                (plan.prefill == Prefill::coded ? "; wgmma"
                 : plan.dense.direct            ? "; TMA and wgmma over the cache"
                                                : "; TMA and wgmma over a copy of the cache, decoded to f16") +
                "; precision: f16 queries and weights, f32 sums" +
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
          splits +
              "; precision: f32; no tensor cores, which want rows that begin at multiples of 4 bytes, and gains of a whole row, "
              "or of half a row that is a multiple of 64"};
}

void launch_attention(const Stream& stream, const CompressedAttentionArgs& args, const Plan& plan, Scratch scratch) {
  constexpr const char* kOp = "compressed_attention";
  const int64_t T = args.o.size(0), Hq = args.o.size(1), Dv = args.o.size(2);
  const QueryParams queries = query_params(args.queries, args.cache, args.mask);
  const bool merges = plan.how.finish == CodedFinish::merge_kernel;
  auto* const of_partials = reinterpret_cast<float*>(static_cast<uint8_t*>(scratch.data) + plan.dense.scratch_bytes);
  const PartialsPlan partials{merges ? scratch_view(of_partials, plan, T, Hq, Dv) : PartialsView{}, plan.splits, 0};
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
      launch_decode_general(kOp, stream, queries, args.cache, partials, plan.general, plan.how.most_rows);
      break;
  }
  if (plan.prefill == Prefill::coded) launch_prefill(kOp, stream, queries, args.cache, partials);
  if (plan.prefill == Prefill::dense)
    launch_prefill_dense(kOp, stream, queries, args.cache, partials, plan.dense, merge, scratch.data);
  if (!merges) return;
  if (plan.finished()) {  // only sequences of the decode kernel are left
    if (plan.decode == Decode::none) return;
    merge.most_rows = plan.how.most_rows;
    merge.longest = std::min(merge.longest, plan.how.most_rows / queries.group);
  }
  launch_merge(kOp, stream, merge);
}

// A decode kernel reads the cache again for every few query rows, which is slow for prompts.
Choice describe_with_speed(const Stream& stream, const CompressedAttentionArgs& args, const Plan& plan) {
  constexpr int64_t kManyRows = 128;
  Choice choice = describe(stream, args, plan);
  const int64_t group = args.queries.q.size(1) / args.cache.heads();
  const bool many = max_tokens(args.queries.sequences, args.queries.q.size(0)) * group >= kManyRows;
  if (many && choice.kernel.find(".decode_") != std::string::npos) choice.speed = Speed::portable;
  if (plan.decode == Decode::any) choice.speed = Speed::slow;
  return choice;
}

}  // namespace

OpEntry<CompressedAttentionArgs> compressed_attention_entry() {
  return entry<plan_attention, describe_with_speed, launch_attention>(kAllFloats);
}

}  // namespace weft::cuda
