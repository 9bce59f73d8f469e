// The uncompressed decode kernel: attention of few query rows over an f16 or bf16 cache, on tensor cores, nearly as exact as f32.
//
// A warp takes units of 16 tokens, whose keys and values it copies ahead of time into pipeline stages of its own. The warps of a
// block merge their sums at the end and write split-KV partials. Both products are transposed: tokens or coordinates are the 16
// rows of an instruction, query rows its 8 columns, twice.
//   S = K q^T: keys are A, queries are B and lie in shared memory as fragments.
//   o^T = V^T w^T: values are A, transposed by ldmatrix; weights are B, which are the transposed scores.
// The kernel is bound by memory and has instructions to spare. Queries and weights are therefore sums of 16-bit numbers, as many as
// make up f32 (or the type of q), so that nothing is rounded that f32 would keep.
#pragma once

#include "cuda/attention/decode_uncompressed_pipeline.cuh"
#include "cuda/common/pdl.cuh"

namespace weft::cuda {

// What a block's threads share besides fragments and stages.
template <class Shape>
struct UncompressedShared {
  float factor[Shape::kRows], bad[Shape::kRows];  // a score is sum * factor + bad; bad: NaN where q holds NaN or infinity, else 0
  float m[Shape::kWarps][Shape::kRows], l[Shape::kWarps][Shape::kRows];
};

// Weights are multiplied by 2^kWeightExponent, which keeps small ones from f16's underflow.
constexpr float kWeightExponent = 9;

// The queries, each relative to a power of two, as fragments: `planes` 16-bit numbers whose sum is a query's number. `bits`: the
// warp's first row.
template <class Shape>
__device__ __forceinline__ void place_queries(const UncompressedParams& p, const RowTile& rows, uint8_t* fragments,
                                              uint32_t (&bits)[Shape::kD / 32], UncompressedShared<Shape>& shared, int warp,
                                              int lane) {
  using Half = typename Shape::Half;
  constexpr int kOwn = Shape::kD / 32;
  const QueryParams& q = p.queries;
#pragma unroll 1
  for (int r = warp; r < Shape::kRows; r += Shape::kWarps) {
    float x[kOwn] = {}, unit = 0, bad = 0;
    if (r < rows.rows) {
      if (r > warp) load_query_bits<kOwn>(q.queries.q, query_row(rows, q.group, r), lane, bits);
      float top = 0;
#pragma unroll
      for (int e = 0; e < kOwn; ++e) {
        x[e] = bits_to_float(bits[e], q.queries.q.dtype);
        top = fmaxf(top, fabsf(x[e]));
        bad += x[e] * 0.0f;
      }
      bad = sum_warp(bad);
      unit = __uint_as_float(min(max(__float_as_uint(max_warp(top)) & 0x7f800000u, 27u << 23), 253u << 23));  // 2^-100 to 2^126
#pragma unroll
      for (int e = 0; e < kOwn; ++e) x[e] *= 1 / unit;
    }
#pragma unroll 1
    for (int plane = 0; plane < p.planes; ++plane) {
#pragma unroll
      for (int e = 0; e < kOwn; e += 2) {
        const int c = lane * kOwn + e;
        const uint32_t pair = pack<Half>(x[e], x[e + 1]);
        const float2 taken = unpack<Half>(pair);
        x[e] -= taken.x, x[e + 1] -= taken.y;
        uint8_t* fragment =
            fragments + ((plane * Shape::kSteps + c / 16) * Shape::kRowBlocks + r / 8) * 256 + (r % 8 * 4 + c % 8 / 2) * 8;
        *reinterpret_cast<uint32_t*>(fragment + c % 16 / 8 * 4) = pair;
      }
    }
    if (lane == 0) {
      shared.factor[r] = unit * score_unit(q.scale, q.mask.has_softcap());
      shared.bad[r] = bad;
    }
  }
}

// What makes scores of sums, for the rows of a lane.
template <class Shape>
struct UncompressedScales {
  float factor[Shape::kRowBlocks][2], bad[Shape::kRowBlocks][2];
  __device__ __forceinline__ UncompressedScales(const UncompressedShared<Shape>& shared, int lane) {
#pragma unroll
    for (int u = 0; u < Shape::kRowBlocks; ++u)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        factor[u][e] = shared.factor[Shape::lane_row(u, e, lane % 4)];
        bad[u][e] = shared.bad[Shape::lane_row(u, e, lane % 4)];
      }
  }
};

// Scores of the 16 tokens whose keys lie at `keys`.
template <class Shape>
__device__ __forceinline__ void score_keys(uint32_t keys, const uint2* fragments, int planes,
                                           const UncompressedScales<Shape>& scales, const LdmatrixLane& place,
                                           typename Shape::Scores& s) {
  float sums[Shape::kRowBlocks][2][4] = {};
#pragma unroll 1
  for (int plane = 0; plane < planes; ++plane) {
#pragma unroll
    for (int step = 0; step < Shape::kSteps; ++step) {
      FragmentA a;
      ldmatrix(a.x, keys + Shape::Stage::offset(place.across_row(), 2 * step + place.across_piece()));
#pragma unroll
      for (int u = 0; u < Shape::kRowBlocks; ++u) {
        const uint2 b = fragments[((plane * Shape::kSteps + step) * Shape::kRowBlocks + u) * 32];
        multiply<typename Shape::Half>(sums[u][step % 2], a, b.x, b.y);
      }
    }
  }
#pragma unroll
  for (int u = 0; u < Shape::kRowBlocks; ++u)
#pragma unroll
    for (int c = 0; c < 4; ++c) s[u][c] = fmaf(sums[u][0][c] + sums[u][1][c], scales.factor[u][c % 2], scales.bad[u][c % 2]);
}

// Softcap and mask. `mine` is what row `lane` sees. Returns whether a token that exists is hidden from one of the item's `rows`.
template <class Shape>
__device__ __forceinline__ bool mask_scores(const QueryParams& q, const TokenPositions& positions, int first_token,
                                            const VisibleRange& mine, int rows, int lane, typename Shape::Scores& s) {
  bool hides = false;
  int at[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) at[h] = positions.of(first_token + lane / 4 + 8 * h);
#pragma unroll
  for (int u = 0; u < Shape::kRowBlocks; ++u)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int row = Shape::lane_row(u, c % 2, lane % 4), position = at[c / 2];
      const VisibleRange seen{__shfl_sync(0xffffffffu, mine.first, row), __shfl_sync(0xffffffffu, mine.end, row)};
      if (q.mask.has_softcap()) s[u][c] = softcapped(s[u][c], q.mask) * kLog2e;
      const bool hidden = seen.hides(position);
      hides |= hidden && position >= 0 && row < rows;
      if (hidden) s[u][c] = kMasked;
    }
  return hides;
}

// NaN or infinite values must not reach rows that do not see them: a weight of 0 does not remove them. They become zeros, and the
// scores of their tokens NaN where they are not masked.
template <class Shape>
__device__ __forceinline__ void remove_bad_values(const UncompressedPipeline<Shape>& pipeline, uint32_t values, int lane,
                                                  typename Shape::Scores& s) {
  using Half = typename Shape::Half;
  uint32_t tokens = 0;
#pragma unroll 1
  for (int c = 0; c < pipeline.kCopies; ++c) {
    auto* piece = reinterpret_cast<uint4*>(__cvta_shared_to_generic(values + pipeline.own_offset(c)));
    const uint4 x = *piece;
    if ((finite_pair<Half>(x.x) & finite_pair<Half>(x.y) & finite_pair<Half>(x.z) & finite_pair<Half>(x.w)) == 3) continue;
    *piece = {};
    tokens |= 1u << (c * pipeline.kAtOnce + pipeline.token);
  }
  tokens = __reduce_or_sync(0xffffffffu, tokens);
#pragma unroll
  for (int u = 0; u < Shape::kRowBlocks; ++u)
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (tokens >> (lane / 4 + c / 2 * 8) & 1 && s[u][c] != kMasked) s[u][c] = NAN;
  __syncwarp();
}

// The sums of a lane over all units of its warp.
template <class Shape>
struct UncompressedAccumulators {
  typename Shape::Values o = {};
  RunningSoftmax softmax[Shape::kRowBlocks][2];
};

// Raises the running maxima where scores exceed them by more than the threshold: all sums follow.
template <class Shape>
__device__ __forceinline__ void rescale_sums(const typename Shape::Scores& s, UncompressedAccumulators<Shape>& sums) {
  bool exceeded = false;
  float top[Shape::kRowBlocks][2];
#pragma unroll
  for (int u = 0; u < Shape::kRowBlocks; ++u)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      top[u][e] = fmaxf(s[u][e], s[u][2 + e]);
      exceeded |= sums.softmax[u][e].exceeded_by(top[u][e]);
    }
  if (!__any_sync(0xffffffffu, exceeded)) return;
#pragma unroll
  for (int u = 0; u < Shape::kRowBlocks; ++u) {
    float keep[2] = {1, 1};
#pragma unroll
    for (int e = 0; e < 2; ++e) sums.softmax[u][e].raise(max_over_lanes<4, 32>(top[u][e]), keep[e]);
#pragma unroll
    for (int m = 0; m < Shape::kD / 16; ++m)
#pragma unroll
      for (int c = 0; c < 4; ++c) sums.o[u][m][c] *= keep[c % 2];
  }
}

// 16-bit numbers that a weight is the sum of.
constexpr int kWeightPlanes = 2;

// Scores to weights and their sums; the weights are B operands. Uses up the scores.
template <class Shape>
__device__ __forceinline__ void weigh_tokens(typename Shape::Scores& s, UncompressedAccumulators<Shape>& sums,
                                             uint32_t (&weights)[Shape::kRowBlocks][kWeightPlanes][2]) {
  using Half = typename Shape::Half;
#pragma unroll
  for (int u = 0; u < Shape::kRowBlocks; ++u) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      RunningSoftmax& softmax = sums.softmax[u][c % 2];
      s[u][c] = add_weight(s[u][c] - (softmax.reference() - kWeightExponent), softmax.sum);
    }
#pragma unroll
    for (int plane = 0; plane < kWeightPlanes; ++plane)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t pair = pack<Half>(s[u][2 * h], s[u][2 * h + 1]);
        const float2 taken = unpack<Half>(pair);
        s[u][2 * h] -= taken.x, s[u][2 * h + 1] -= taken.y;
        weights[u][plane][h] = transpose(pair);
      }
  }
}

// Adds the values at `values` by their weights.
template <class Shape>
__device__ __forceinline__ void add_values(uint32_t values, const LdmatrixLane& place,
                                           const uint32_t (&weights)[Shape::kRowBlocks][kWeightPlanes][2],
                                           typename Shape::Values& o) {
#pragma unroll
  for (int m = 0; m < Shape::kD / 16; ++m) {
    FragmentA a;
    ldmatrix_trans(a.x, values + Shape::Stage::offset(place.row(), 2 * m + place.piece()));
#pragma unroll
    for (int u = 0; u < Shape::kRowBlocks; ++u)
#pragma unroll
      for (int plane = 0; plane < kWeightPlanes; ++plane)
        multiply<typename Shape::Half>(o[u][m], a, weights[u][plane][0], weights[u][plane][1]);
  }
}

// All units of the warp: scores, mask, softmax, values. `mine` is what row `lane` sees, `all` what all rows see.
template <class Shape>
__device__ __forceinline__ void attend_units(UncompressedPipeline<Shape>& pipeline, const VisibleRange& mine,
                                             const VisibleRange& all, int rows, const uint2* fragments,
                                             const UncompressedScales<Shape>& scales, int lane,
                                             UncompressedAccumulators<Shape>& sums) {
  const QueryParams& q = pipeline.p.queries;
  const auto& cache = pipeline.cache;
  const LdmatrixLane place(lane);
  for (int i = 0; pipeline.unit(i) < pipeline.last_unit; ++i) {
    const int first_token = pipeline.unit(i) * Shape::kTokens, end_token = first_token + Shape::kTokens;
    typename Shape::Scores s;
    score_keys<Shape>(pipeline.wait_next(), fragments, pipeline.p.planes, scales, place, s);
    __syncwarp();
    pipeline.load_next();

    const bool exists = pipeline.exists(i);
    const bool whole = !cache.ring && first_token >= all.first && end_token <= all.end && end_token <= pipeline.live && exists;
    bool hides = false;
    if (!whole || q.mask.has_softcap()) hides = mask_scores<Shape>(q, cache.positions(q, exists), first_token, mine, rows, lane, s);

    const uint32_t values = pipeline.wait_next();
    if (__any_sync(0xffffffffu, hides)) remove_bad_values<Shape>(pipeline, values, lane, s);
    rescale_sums<Shape>(s, sums);
    uint32_t weights[Shape::kRowBlocks][kWeightPlanes][2];
    weigh_tokens<Shape>(s, sums, weights);
    add_values<Shape>(values, place, weights, sums.o);
    __syncwarp();
    pipeline.load_next();
  }
  cp_async_wait<0>();
}

// A row of a warp's sums in shared memory, where they lie over the stages.
template <class Shape>
__device__ __forceinline__ float* warp_sums_at(uint8_t* memory, int warp, int r) {
  return reinterpret_cast<float*>(memory + Shape::kQueryBytes) + (warp * Shape::kRows + r) * Shape::kMergeRow;
}

// The sums of a lane to shared memory, relative to the maximum of all warps. `busy`: warps that had a unit.
template <class Shape>
__device__ __forceinline__ void store_warp_sums(UncompressedAccumulators<Shape>& sums, int rows, int busy, uint8_t* memory,
                                                UncompressedShared<Shape>& shared, int warp, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int u = 0; u < Shape::kRowBlocks; ++u)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      RunningSoftmax& softmax = sums.softmax[u][e];
      softmax.sum = sum_over_lanes<4, 32>(softmax.sum);
      if (g == 0) shared.m[warp][Shape::lane_row(u, e, t)] = softmax.max;
    }
  __syncthreads();
#pragma unroll
  for (int u = 0; u < Shape::kRowBlocks; ++u)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int r = Shape::lane_row(u, e, t);
      if (r >= rows || warp >= busy) continue;
      float top = kMasked;
#pragma unroll 4
      for (int w = 0; w < busy; ++w) top = fmaxf(top, shared.m[w][r]);
      const RunningSoftmax& softmax = sums.softmax[u][e];
      const float keep = join_factor(softmax.max, softmax.sum, top);
      if (g == 0) shared.l[warp][r] = softmax.sum * keep;
#pragma unroll
      for (int m = 0; m < Shape::kD / 16; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) warp_sums_at<Shape>(memory, warp, r)[16 * m + 8 * h + g] = sums.o[u][m][2 * h + e] * keep;
    }
}

// Adds the sums of the warps and writes the partials of the item's rows, in natural units.
template <class Shape>
__device__ __forceinline__ void write_partials(const UncompressedParams& p, const RowTile& rows, unsigned split, int busy,
                                               uint8_t* memory, const UncompressedShared<Shape>& shared) {
  constexpr int kFours = Shape::kD / 4;
  const PartialsView& out = p.plan.out;
  for (int e = threadIdx.x; e < rows.rows * kFours; e += 32 * Shape::kWarps) {
    const int r = e / kFours, d = e % kFours * 4;
    float4 sum{};
#pragma unroll 4
    for (int w = 0; w < busy; ++w) {
      const float4 own = *reinterpret_cast<const float4*>(warp_sums_at<Shape>(memory, w, r) + d);
      sum.x += own.x, sum.y += own.y, sum.z += own.z, sum.w += own.w;
    }
    const QueryRow row = query_row(rows, p.queries.group, r);
    *reinterpret_cast<float4*>(out.o + out.o_at(row.t, row.hq, split, d)) = sum;
    if (d == 0) {
      float top = kMasked, l = 0;
#pragma unroll 4
      for (int w = 0; w < busy; ++w) {
        top = fmaxf(top, shared.m[w][r]);
        l += shared.l[w][r];
      }
      out.m[out.m_at(row.t, row.hq, split)] = l != l ? NAN : natural_max(top, kWeightExponent);
      out.l[out.l_at(row.t, row.hq, split)] = l;
    }
  }
}

template <class Half, int D>
__global__ void __launch_bounds__(32 * kUncompressedWarps, 1)
    decode_uncompressed_kernel(const __grid_constant__ UncompressedParams p) {
  using Shape = UncompressedShape<Half, D>;
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ UncompressedShared<Shape> shared;
  pdl_wait();
  pdl_launch_dependents();
  const QueryParams& q = p.queries;
  const BlockItem item(q, p.row_tiles, p.plan.splits);
  const RowTile rows = row_tile(q.queries.sequences, q.T, q.longest, q.group, item.n, item.hk, item.row_tile, Shape::kRows);
  if (rows.rows == 0 || rows.range.length() * q.group > p.most_rows) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t query_bits[D / 32] = {};
  if (warp < rows.rows) load_query_bits<D / 32>(q.queries.q, query_row(rows, q.group, warp), lane, query_bits);

  // What the rows see, and the tokens of this warp.
  typename Shape::Cache cache(q, item);
  VisibleRange mine = kSeesNothing;
  if (lane < rows.rows) mine = seen_by(q, rows, cache.appended, query_row(rows, q.group, lane).t);
  const VisibleRange any = seen_by_any(mine, lane < rows.rows), all = seen_by_all(mine, lane < rows.rows);
  cache.take(item, p.plan.splits, any);
  UncompressedPipeline<Shape> pipeline(p, cache, memory, warp, lane);
  pipeline.fill();

  place_queries<Shape>(p, rows, memory, query_bits, shared, warp, lane);
  __syncthreads();
  const UncompressedScales<Shape> scales(shared, lane);
  UncompressedAccumulators<Shape> sums;
  attend_units<Shape>(pipeline, mine, all, rows.rows, reinterpret_cast<const uint2*>(memory) + lane, scales, lane, sums);

  const int busy = min(cache.last_tile - cache.first_tile, Shape::kWarps);
  store_warp_sums<Shape>(sums, rows.rows, busy, memory, shared, warp, lane);
  __syncthreads();
  write_partials<Shape>(p, rows, item.split, busy, memory, shared);
}

}  // namespace weft::cuda
