// Attention over tiles in lanes order: integer tensor-core products for scores, f16 ones for values, codes looked up in registers.
//
// A warp takes tiles of 64 tokens of its own, which it copies into a ring of shared memory ahead of time; the warps of a block, or of
// either half of it, join their sums at the end. The block finishes its rows where it has all of their tokens, or the cluster of blocks
// that have; else what is left are partials. Both products are transposed, tokens and coordinates in the 16 rows of an instruction,
// query rows in its 8 columns. For lane = 4 j + t operands lie so that nothing moves between lanes but row maxima and the transposed
// weights:
//   K as A of m16n8k32: a 16-byte piece of K holds 4 tokens of one group of coordinates. Lane (j, t) takes piece quad(j, h) of group t
//     of a k-step, tokens 4 quad + x. Which coordinate a byte is decides where q puts its own.
//   S: lane (j, t) then holds query rows 2 t and 2 t + 1 of those tokens, or both planes of row t where there are but 4 rows;
//     transposed, query row j of tokens x of the pieces of j = 2 t and 2 t + 1, as B of m16n8k16 wants them.
//   V as A: a word of V holds one coordinate of just such tokens, and quad() is such that it decodes to those pairs. A 16-byte piece is
//     4 coordinates 32 b + 4 j + x.
// q is two planes of int8, 128 hi + lo, so that scores are exact integers until the gain. A level is (n + 1/2) step: half the sum of
// q, and half the sum of the weights where V's tables hold n only, stand for the 1/2. Weights carry V's gain, relative to the largest
// that the warp has met.
#pragma once

#include "cuda/attention/decode_coded_merge.cuh"
#include "cuda/attention/decode_coded_queries.cuh"
#include "cuda/attention/decode_coded_tile.cuh"
#include "cuda/attention/work_split.cuh"
#include "cuda/common/pdl.cuh"

namespace weft::cuda {

template <int KBits, int VBits, int D, int Rows>
__global__ void __launch_bounds__(32 * CodedShape<KBits, VBits, D, Rows>::kWarps, 1)
    decode_coded_kernel(const __grid_constant__ CodedParams p) {
  using Shape = CodedShape<KBits, VBits, D, Rows>;
  using K = typename Shape::K;
  using V = typename Shape::V;
  constexpr int kWarps = Shape::kWarps, kMaxItems = Shape::kMaxItems, U = Shape::kRowBlocks, E = Shape::kRowsPerLane;
  constexpr float kFull = 0x1p9f;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(16) uint8_t rows_room[sizeof(CodedRows<Shape>)];  // not the type itself, which has initializers
  auto& all_rows = *reinterpret_cast<CodedRows<Shape>*>(rows_room);
  __shared__ CodedSums<Shape> sums;
  const QueryParams& q = p.queries;
  // The same in all lanes, and so that the compiler knows it.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = static_cast<int>(threadIdx.x) % 32;
  const int j = lane / 4, t = lane % 4;
  // A team of warps has a share of the work to itself; where a block has two, the last one may have none.
  const bool two = kMaxItems == 2 && p.items_per_block == 2;
  const int mates = two ? kWarps / 2 : kWarps, team = two && warp >= mates ? 1 : 0, mate = warp - team * mates;
  const unsigned number = two ? 2 * blockIdx.x + team : blockIdx.x;
  const bool idle = number >= p.items;
  const BlockItem item(p.by_row_tiles, p.by_splits, p.by_heads, idle ? 0 : number);
  uint8_t* const table = shared + Shape::kMaxItems * Shape::kQueryBytes;
  if constexpr (Shape::kPairTable) fill_pairs<VBits, Shape>(p.v, table, warp, lane);
  const bool cluster = p.finish == CodedFinish::cluster;
  if (cluster) {
    if (threadIdx.x == 0) expect_splits<Shape>(sums, static_cast<int>(item.part), static_cast<int>(p.plan.count));
    if constexpr (Shape::kReceiveSeparate) cluster_sync<false>();
  }
  pdl_wait();  // all that other kernels have no part in is done
  pdl_launch_dependents();
  const int length = CacheTiles::length_at(q, item.n), slot = CacheTiles::slot_at(q, item.n);
  RowTile rows = row_tile(q.queries.sequences, q.T, q.longest, q.group, item.n, item.hk, item.row_tile, Rows);
  if (idle || rows.range.length() * q.group > p.most_rows) rows.rows = 0;
  if (rows.rows == 0 && !two) return;
  constexpr int kOwn = D / 32;  // coordinates of a query in a lane
  uint32_t query_bits[kOwn] = {};
  if (mate < rows.rows) load_query_bits<kOwn>(q.queries.q, query_row(rows, p.by_group, mate), lane, query_bits);
  CacheTiles cache(q, item, length, slot);

  // What the rows see.
  VisibleRange mine{0x7fffffff, 0};
  if (lane < rows.rows) mine = seen_by(q, rows, cache.appended, query_row(rows, p.by_group, lane).t);
  const bool some = lane < rows.rows && mine.first < mine.end;
  const int first_seen = __reduce_min_sync(0xffffffffu, some ? mine.first : 0x7fffffff);
  const int end_seen = __reduce_max_sync(0xffffffffu, some ? mine.end : 0);

  // This team's tiles, of which the warps take turns.
  cache.take(item, first_seen, end_seen, [&](unsigned tiles) { return p.by_splits.quotient(tiles + p.by_splits.by - 1); });
  const int first_tile = cache.first_tile + mate, last_tile = cache.last_tile;
  uint8_t* const planes = shared + team * Shape::kQueryBytes;
  uint8_t* const warp_ring = table + Shape::kTableBytes + warp * Shape::kWarpBytes;
  const auto k_slot = [&](int i) { return warp_ring + i % Shape::kKStages * K::kBytes; };
  const auto v_slot = [&](int i) { return warp_ring + Shape::kKStages * K::kBytes + i % Shape::kVStages * Shape::kVBytes; };
  const auto copy_k = [&](int i) {
    const int tile = first_tile + i * mates;
    if (i >= 0 && tile < last_tile)
      if (const uint8_t* from = cache.find(q, p.by_page, p.k, tile)) K::copy(shared_address(k_slot(i)), from, lane);
    cp_async_commit();
  };
  // The gains lie before the codes; a second half finds them there.
  const auto copy_v = [&](int i, int half) {
    const int tile = first_tile + i * mates;
    if (i >= 0 && tile < last_tile)
      if (const uint8_t* from = cache.find(q, p.by_page, p.v, tile))
        V::template copy_part<Shape::kVHalves>(shared_address(v_slot(i)), from, half, lane);
    cp_async_commit();
  };
  constexpr int kAhead = Shape::kKStages > Shape::kVStages ? Shape::kKStages : Shape::kVStages;
#pragma unroll 1
  for (int i = -kAhead; i < 0; ++i) {
    copy_k(i + Shape::kKStages);
    copy_v(i + Shape::kVStages, 0);
  }

  // Tiles that all rows see all of.
  const int first_all = __reduce_max_sync(0xffffffffu, lane < rows.rows ? mine.first : 0);
  const int end_all = __reduce_min_sync(0xffffffffu, lane < rows.rows ? mine.end : 0x7fffffff);
  constexpr int kTokens = static_cast<int>(kTileTokens);
  const int whole_first = first_all / kTokens + (first_all % kTokens != 0);  // positions reach as far as int does
  const int whole_end =
      cache.ring || q.mask.softcap ? 0 : static_cast<int>(min(static_cast<int64_t>(end_all), cache.live) / kTokens);

#pragma unroll 1
  for (int r = mate; r < Rows; r += mates) {
    if (r > mate && r < rows.rows) load_query_bits<kOwn>(q.queries.q, query_row(rows, p.by_group, r), lane, query_bits);
    place_query<KBits, Shape>(p, item.hk, r < rows.rows, query_bits, r, team, planes, all_rows, lane);
  }
  if (mate == 0 && lane == 0) {  // so that nobody keeps it in registers until the end
    all_rows.tile[team] = rows;
    all_rows.part[team] = static_cast<int>(item.part);
    all_rows.busy[team] = min(last_tile - cache.first_tile, mates);
  }
  __syncthreads();
  const auto row_of = [&](int u, int e) { return Rows == 4 ? t : 8 * u + 2 * t + e; };
  LaneScales<Shape> own_rows;
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int e = 0; e < E; ++e) {
      own_rows.factor[u][e] = all_rows.factor[team][row_of(u, e)];
      own_rows.offset[u][e] = all_rows.offset[team][row_of(u, e)];
      own_rows.mean[u][e] = all_rows.mean[team][row_of(u, e)];
    }
  const uint2* fragments = reinterpret_cast<const uint2*>(planes) + lane;

  float o[U][D / 32][2][4] = {};
  RunningSoftmax softmax[U][E];
  float sum_weights[U][E] = {};
  float gain_top = 0, gain_unit = 0;  // largest gain met, as a power of two, and kFull over it
  for (int i = 0; first_tile + i * mates < last_tile; ++i) {
    const int tile = first_tile + i * mates;
    cp_async_wait<2 * Shape::kKStages - 1>();
    __syncwarp();
    float s[U][2][4][E];
    score_keys<KBits, VBits, D, Rows>(k_slot(i), p.k, fragments, own_rows, lane, s);
    __syncwarp();
    copy_k(i + Shape::kKStages);

    // Masks, where somebody is not to see something; gains that stand for nothing are 0.
    const int first_token = tile * static_cast<int>(kTileTokens);
    const bool whole = tile >= whole_first && tile < whole_end && (!cache.paged || cache.there(q, p.by_page, tile));
    bool lives[2] = {true, true};  // of tokens 2 lane and 2 lane + 1
    uint32_t hidden[U] = {};       // bit (h, x, e)
    if (!whole) {
      const bool there = cache.there(q, p.by_page, tile);
      const bool wrapped = cache.ring && cache.appended > q.index.rows;
      const RingPositions around(q.index, cache.appended);
      const auto position = [&](int token) {
        const int row = first_token + token;
        return !there || row >= cache.live ? -1 : wrapped ? around.of(row) : row;
      };
      lives[0] = position(2 * lane) >= 0;
      lives[1] = position(2 * lane + 1) >= 0;
      int at[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int x = 0; x < 4; ++x) at[h][x] = position(4 * V::quad(j, h) + x);
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int e = 0; e < E; ++e) {
          const int row = row_of(u, e);
          const VisibleRange seen{__shfl_sync(0xffffffffu, mine.first, row), __shfl_sync(0xffffffffu, mine.end, row)};
#pragma unroll
          for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int x = 0; x < 4; ++x) {
              float& score = s[u][h][x][e];
              if (q.mask.softcap) score = softcap_fast(score, *q.mask.softcap) * kLog2e;
              if (seen.hides(at[h][x])) {
                score = kMasked;
                hidden[u] |= 1u << (h * 8 + x * 2 + e);
              }
            }
        }
    }

    cp_async_wait<2 * Shape::kVStages - 1>();
    __syncwarp();
    const uint8_t* v = v_slot(i);
    // Weights are relative to the largest gain, and to a score that none so far passes by much.
    float common = 1;
    {
      const float2 gains = unpack<__half>(*reinterpret_cast<const uint32_t*>(v + lane * 4));
      const float top = fmaxf(lives[0] ? fabsf(gains.x) : 0.0f, lives[1] ? fabsf(gains.y) : 0.0f);
      if (__any_sync(0xffffffffu, top > gain_top)) {
        const float raised = exp2f(ceilf(log2f(fmaxf(max_warp(top), 0x1p-24f))));
        if (raised > gain_top) {
          common = gain_top / raised;
          gain_top = raised;
          gain_unit = kFull / raised;
        }
      }
    }
    uint32_t weights[U][2][4];  // pairs of tokens of a query row, as f16
    float gain[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      read_gains(v, V::quad(j, h), gain[h]);
#pragma unroll
      for (int x = 0; x < 4; ++x) gain[h][x] *= gain_unit;
    }
    bool passed = common != 1.0f;
    float top[U][E];
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int e = 0; e < E; ++e) {
        top[u][e] = kMasked;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int x = 0; x < 4; ++x) top[u][e] = fmaxf(top[u][e], s[u][h][x][e]);
        passed |= softmax[u][e].exceeded_by(top[u][e]);
      }
    if (__any_sync(0xffffffffu, passed)) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        float rescale[E];
#pragma unroll
        for (int e = 0; e < E; ++e) {
          rescale[e] = common;
          softmax[u][e].raise(max_over_lanes<4, 32>(top[u][e]), rescale[e]);
          sum_weights[u][e] *= rescale[e];
        }
#pragma unroll
        for (int b = 0; b < D / 32; ++b)
#pragma unroll
          for (int y = 0; y < 2; ++y)
#pragma unroll
            for (int c = 0; c < 4; ++c) o[u][b][y][c] *= rescale[E == 1 ? 0 : c % 2];
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      float from[E];
#pragma unroll
      for (int e = 0; e < E; ++e) from[e] = softmax[u][e].reference();
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int x = 0; x < 4; ++x)
#pragma unroll
          for (int e = 0; e < E; ++e) {
            s[u][h][x][e] = add_weight(s[u][h][x][e] - from[e], softmax[u][e].sum) * gain[h][x];
          }
      if (hidden[u]) {  // what is hidden may hold anything
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int x = 0; x < 4; ++x)
#pragma unroll
            for (int e = 0; e < E; ++e)
              if (hidden[u] >> (h * 8 + x * 2 + e) & 1) s[u][h][x][e] = 0;
      }
      if constexpr (!Shape::kPairTable) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int x = 0; x < 4; ++x)
#pragma unroll
            for (int e = 0; e < E; ++e) sum_weights[u][e] += s[u][h][x][e];
      }
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          if constexpr (E == 2) {
            weights[u][h][x] = transpose(pack<__half>(s[u][h][x][0], s[u][h][x][1]));
          } else if (x % 2 == 0) {
            // Column 2 r takes tokens x of row r, column 2 r + 1 tokens x + 1; their sums are added at the end.
            const uint32_t both = transpose(pack<__half>(s[u][h][x][0], s[u][h][x + 1][0]));
            weights[u][h][x] = j % 2 == 0 ? both : 0u;
            weights[u][h][x + 1] = j % 2 == 0 ? 0u : both;
          }
        }
    }
    add_values<KBits, VBits, D, Rows>(v, table, p.v, lane, weights, o, [&] {
      copy_v(i, 1);
      cp_async_wait<0>();
    });
    __syncwarp();
    copy_v(i + Shape::kVStages, 0);
  }

  // The warps leave what they have for each other, in units of V.
  cp_async_wait<0>();
  if constexpr (!Shape::kSumsInOwnStages) __syncthreads();
  if constexpr (!Shape::kReceiveSeparate)
    if (cluster) cluster_sync<true>();
  const float unit = gain_top / kFull * p.v.step;
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int e = 0; e < E; ++e) {
      softmax[u][e].sum = sum_over_lanes<4, 32>(softmax[u][e].sum);
      if constexpr (!Shape::kPairTable) sum_weights[u][e] = sum_over_lanes<4, 32>(sum_weights[u][e]);
      const int r = row_of(u, e);
      if (j == 0) sums.m[warp][r] = softmax[u][e].max, sums.l[warp][r] = softmax[u][e].sum;
      const float half = 0.5f * sum_weights[u][e];
      const auto sum = [&](int b, int y, int c) {
        return ((E == 1 ? o[u][b][y][2 * c] + o[u][b][y][2 * c + 1] : o[u][b][y][2 * c + e]) + half) * unit;
      };
#pragma unroll
      for (int b = 0; b < D / 32; ++b)
        *reinterpret_cast<float4*>(warp_sums_at<Shape>(shared, warp, r, 8 * b + j)) = {sum(b, 0, 0), sum(b, 0, 1), sum(b, 1, 0),
                                                                                       sum(b, 1, 1)};
    }
  __syncthreads();
  const int first_warp = team * mates;
  finish_item<Shape>(p, all_rows.part[team], all_rows.tile[team], {first_warp, first_warp + all_rows.busy[team], mate, mates},
                     shared, sums, warp, lane);
}

template <int KBits, int VBits, int D, int Rows>
constexpr CodedKernel make_coded_kernel() {
  using Shape = CodedShape<KBits, VBits, D, Rows>;
  return {KBits, VBits, D, Rows, Shape::kWarps, Shape::kMaxItems, Shape::kSharedBytes, decode_coded_kernel<KBits, VBits, D, Rows>};
}

}  // namespace weft::cuda
