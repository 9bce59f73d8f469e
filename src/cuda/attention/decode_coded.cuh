// The coded-tile decode kernel: attention of few query rows over tiles in lanes order, on int8 and f16 tensor cores.
//
// Work. A work item is a tile of query rows of a sequence and kv head, and one split of its context. A block has one item, or two
// of which each half of its warps has one. The warps of an item take its tiles of 64 tokens in turn, and copy them ahead of time
// into pipeline stages of their own. At the end they merge their sums. If the block has all tokens of its rows, it finishes them.
// If a cluster of blocks has all splits, the cluster does. Otherwise the block writes split-KV partials.
//
// Operands. Both products are transposed: tokens or coordinates are the 16 rows of an instruction, query rows its 8 columns. With
// lane = 4 j + t, operands are laid out so that only row maxima and the transposed weights move between lanes:
//   K is A of m16n8k32. A 16-byte vector of K holds 4 tokens of one group of coordinates. Lane (j, t) takes vector quad(j, h) of
//     group t of a k-step, which holds tokens 4 quad + x. Which coordinate a byte of K is determines where q puts its own: see
//     query_place().
//   S: lane (j, t) then holds query rows 2 t and 2 t + 1 of those tokens, or both int8 planes of row t where an item has 4 rows.
//     Transposed, it holds query row j of tokens x of the vectors of j = 2 t and 2 t + 1, which is B of m16n8k16.
//   V is A of m16n8k16. A word of V holds one coordinate of just those tokens: quad() makes it decode to those pairs. A 16-byte
//     vector of V is 4 coordinates 32 b + 4 j + x.
//
// Numbers. q is two planes of int8, 128 hi + lo, so that scores are exact integers until the gain multiplies them. A level is
// (n + 1/2) step: half the sum of q stands for the 1/2 of K, and half the sum of the weights for that of V where V's tables hold
// only n. Weights carry V's gain relative to the largest that the warp has seen.
#pragma once

#include "cuda/attention/decode_coded_merge.cuh"
#include "cuda/attention/decode_coded_queries.cuh"
#include "cuda/attention/decode_coded_softmax.cuh"
#include "cuda/common/pdl.cuh"

namespace weft::cuda {

// The query rows of the item as int8 fragments in shared memory, and what finish_item() needs of the item. `bits`: the warp's first
// row.
template <class Shape>
__device__ __forceinline__ void place_queries(const CodedParams& p, const BlockItem& item, const RowTile& rows,
                                              const CacheTiles& cache, const ItemWarps<Shape>& warps, uint8_t* fragments,
                                              uint32_t (&bits)[Shape::kD / 32], CodedRows<Shape>& all_rows, int lane) {
#pragma unroll 1
  for (int r = warps.index; r < Shape::kRows; r += warps.count) {
    if (r > warps.index && r < rows.rows)
      load_query_bits<Shape::kD / 32>(p.queries.queries.q, query_row(rows, p.by_group, r), lane, bits);
    place_query<Shape>(p, item.hk, r < rows.rows, bits, r, warps.half, fragments, all_rows, lane);
  }
  if (warps.index == 0 && lane == 0) {  // in shared memory, so that no thread keeps it in registers until the end
    all_rows.tile[warps.half] = rows;
    all_rows.split[warps.half] = static_cast<int>(item.split);
    all_rows.busy_warps[warps.half] = min(cache.last_tile - cache.first_tile, warps.count);
  }
}

// All tiles of the warp: scores, mask, softmax, values. `mine` is what row `lane` sees.
template <class Shape>
__device__ __forceinline__ void attend_tiles(const CodedPipeline<Shape>& pipeline, const VisibleRange& mine,
                                             const UnmaskedTiles& unmasked, const uint2* fragments, const LaneScales<Shape>& scales,
                                             const uint8_t* table, CodedAccumulators<Shape>& sums, GainScale& gains) {
  const CodedParams& p = pipeline.p;
  const QueryParams& q = p.queries;
  const CacheTiles& cache = pipeline.cache;
  const int lane = pipeline.lane;
  for (int i = 0; pipeline.tile(i) < pipeline.last_tile; ++i) {
    const int tile = pipeline.tile(i);
    typename Shape::Scores s;
    pipeline.wait_keys();
    score_keys<Shape>(pipeline.k_stage(i), p.k, fragments, scales, lane, s);
    __syncwarp();
    pipeline.load_keys(i + Shape::kKStages);

    TileMask<Shape> mask;
    if (!(unmasked.holds(tile) && (!cache.paged || cache.exists(q, p.by_page, tile))))
      mask_scores<Shape>(q, cache.positions(q, cache.exists(q, p.by_page, tile)), tile, mine, lane, s, mask);

    pipeline.wait_values();
    const uint8_t* v = pipeline.v_stage(i);
    const float gain_rescale = gains.raise(v, mask.exists, lane);
    float gain[2][4];
    gains.read<Shape>(v, lane, gain);
    rescale_sums<Shape>(s, gain_rescale, sums);
    typename Shape::Weights weights;
    weigh_tokens<Shape>(mask, gain, lane, s, sums, weights);
    add_values<Shape>(v, table, p.v, lane, weights, sums.o, [&] {
      pipeline.load_values(i, 1);
      cp_async_wait<0>();
    });
    __syncwarp();
    pipeline.load_values(i + Shape::kVStages, 0);
  }
  cp_async_wait<0>();
}

template <int KBits, int VBits, int D, int Rows>
__global__ void __launch_bounds__(32 * CodedShape<KBits, VBits, D, Rows>::kWarps, 1)
    decode_coded_kernel(const __grid_constant__ CodedParams p) {
  using Shape = CodedShape<KBits, VBits, D, Rows>;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(16) uint8_t rows_storage[sizeof(CodedRows<Shape>)];  // not the type itself, which has initializers
  auto& all_rows = *reinterpret_cast<CodedRows<Shape>*>(rows_storage);
  __shared__ CodedSums<Shape> block_sums;
  const QueryParams& q = p.queries;
  // The shuffle tells the compiler that all lanes have the same warp number.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = static_cast<int>(threadIdx.x) % 32;
  const ItemWarps<Shape> warps(p, warp);
  const BlockItem item(p.by_row_tiles, p.by_splits, p.by_heads, warps.idle ? 0 : warps.item);
  uint8_t* const table = shared + Shape::kMaxItems * Shape::kQueryBytes;
  if constexpr (Shape::kPairTable) fill_pair_table<Shape>(p.v, table, warp, lane);
  const bool cluster = p.finish == CodedFinish::cluster;
  if (cluster) {
    if (threadIdx.x == 0) expect_splits<Shape>(block_sums, static_cast<int>(item.split), static_cast<int>(p.plan.splits));
    if constexpr (Shape::kReceiveSeparate) cluster_sync<false>();
  }
  pdl_wait();  // nothing above reads what other kernels write
  pdl_launch_dependents();

  // The rows of the item, what they see, and the tiles of this warp.
  const int length = CacheTiles::length_at(q, item.n), slot = CacheTiles::slot_at(q, item.n);
  RowTile rows = row_tile(q.queries.sequences, q.T, q.longest, q.group, item.n, item.hk, item.row_tile, Rows);
  if (warps.idle || rows.range.length() * q.group > p.most_rows) rows.rows = 0;
  if (rows.rows == 0 && !warps.two_items) return;
  uint32_t query_bits[D / 32] = {};
  if (warps.index < rows.rows) load_query_bits<D / 32>(q.queries.q, query_row(rows, p.by_group, warps.index), lane, query_bits);
  CacheTiles cache(q, item, length, slot);
  VisibleRange mine = kSeesNothing;
  if (lane < rows.rows) mine = seen_by(q, rows, cache.appended, query_row(rows, p.by_group, lane).t);
  cache.take(item, seen_by_any(mine, lane < rows.rows),
             [&](unsigned tiles) { return p.by_splits.quotient(tiles + p.by_splits.by - 1); });
  const CodedPipeline<Shape> pipeline{
      .p = p,
      .cache = cache,
      .stages = table + Shape::kTableBytes + warp * Shape::kWarpBytes,
      .first_tile = cache.first_tile + warps.index,
      .last_tile = cache.last_tile,
      .stride = warps.count,
      .lane = lane,
  };
  pipeline.fill();
  const UnmaskedTiles unmasked(q, cache, seen_by_all(mine, lane < rows.rows));
  uint8_t* const fragments = shared + warps.half * Shape::kQueryBytes;
  place_queries<Shape>(p, item, rows, cache, warps, fragments, query_bits, all_rows, lane);
  __syncthreads();

  const LaneScales<Shape> scales(all_rows, warps.half, lane);
  CodedAccumulators<Shape> sums;
  GainScale gains;
  attend_tiles<Shape>(pipeline, mine, unmasked, reinterpret_cast<const uint2*>(fragments) + lane, scales, table, sums, gains);

  // A warp's sums may lie over stages that other warps still read. Sums from other blocks may lie over all that this block reads.
  if constexpr (!Shape::kSumsInOwnStages) __syncthreads();
  if constexpr (!Shape::kReceiveSeparate)
    if (cluster) cluster_sync<true>();
  store_warp_sums<Shape>(sums, gains.top / GainScale::kFull * p.v.step, shared, block_sums, warp, lane);
  __syncthreads();
  finish_item<Shape>(p, all_rows.split[warps.half], all_rows.tile[warps.half], warps, all_rows.busy_warps[warps.half], shared,
                     block_sums, warp, lane);
}

template <int KBits, int VBits, int D, int Rows>
constexpr CodedKernel make_coded_kernel() {
  using Shape = CodedShape<KBits, VBits, D, Rows>;
  return {KBits, VBits, D, Rows, Shape::kWarps, Shape::kMaxItems, Shape::kSharedBytes, decode_coded_kernel<KBits, VBits, D, Rows>};
}

}  // namespace weft::cuda
