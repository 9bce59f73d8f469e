// The general decode kernel: attention of few query rows over nearly any cache, on tensor cores, nearly as exact as f32.
//
// A warp takes units of 16 tokens, whose keys and values it copies ahead of time, as they are in memory, into slots of its own. Lanes
// read codes or numbers of a few rows and make mma operands of them in registers: no decoded tile exists. Kinds, orders and bits
// of both sides are branches that a whole warp takes. The warps of a block merge their sums at the end and write split-KV partials.
//
// Numbers. Exact levels are n + 1/2 in f16; others, and queries and weights, are sums of two f16 numbers, so that nothing is rounded
// that f32 would keep. bf16 sides multiply in bf16, f32 sides in tf32, by sums of up to three and of two numbers. A gain of K multiplies
// scores. A gain of V multiplies the token's weight, relative to a power of two no smaller than the gain of any token that was seen so far:
// gains of a split that differ by more than 2^25 cost the smaller ones bits.
#pragma once

#include "cuda/attention/decode_general_values.cuh"
#include "cuda/common/pdl.cuh"

namespace weft::cuda {

// Softcap and mask. `mine` is what row `lane` sees. Returns whether a token that exists is hidden from one of the item's `rows`.
template <int U>
__device__ __forceinline__ bool mask_scores(const QueryParams& q, const TokenPositions& positions, int first_token,
                                            const LaneTokens& tokens, const VisibleRange& mine, int rows, int lane,
                                            GeneralScores<U>& s) {
  bool hides = false;
  const int at[2] = {positions.of(first_token + tokens.first), positions.of(first_token + tokens.second)};
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int row = 8 * u + lane % 4 * 2 + c % 2, position = at[c / 2];
      const VisibleRange seen{__shfl_sync(0xffffffffu, mine.first, row), __shfl_sync(0xffffffffu, mine.end, row)};
      if (q.mask.has_softcap()) s[u][c] = softcapped(s[u][c], q.mask) * kLog2e;
      const bool hidden = seen.hides(position);
      hides |= hidden && position >= 0 && row < rows;
      if (hidden) s[u][c] = kMasked;
    }
  return hides;
}

// The sums of a lane over all units of its warp. Values are relative to 2^exponent.
template <int Sweeps, int U>
struct GeneralSums {
  SweepSums<U> o[Sweeps] = {};
  RunningSoftmax softmax[U][2];
  int exponent = 0;
};

__device__ __forceinline__ float general_power_of_two(int e) {
  return e < -126 ? 0.0f : __uint_as_float(static_cast<uint32_t>(e + 127) << 23);
}
constexpr int kLeastExponent = -100, kLargestExponent = 126;

// The exponent that no gain of the unit, and no gain before, exceeds. NaN and infinity do not count, nor do tokens that no row sees.
template <int U>
__device__ __forceinline__ int raised_exponent(const float (&gain)[2][2], const GeneralScores<U>& s, int exponent) {
  bool seen[2] = {};
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int c = 0; c < 4; ++c) seen[c / 2] |= s[u][c] != kMasked;
  uint32_t top = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t bits = __float_as_uint(gain[i / 2][i % 2]) & 0x7fffffffu;
    top = max(top, seen[i % 2] && bits < 0x7f800000u ? bits : 0u);
  }
  top = __reduce_max_sync(0xffffffffu, top);
  return min(max(static_cast<int>((top + 0x7fffffu) >> 23) - 127, exponent), kLargestExponent);
}

// Raises the running maxima where scores exceed them by more than the threshold, and the exponent: all sums follow.
template <int Sweeps, int U>
__device__ __forceinline__ void rescale_sums(const GeneralScores<U>& s, int exponent, GeneralSums<Sweeps, U>& sums) {
  bool exceeded = false;
  float top[U][2];
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      top[u][e] = fmaxf(s[u][e], s[u][2 + e]);
      exceeded |= sums.softmax[u][e].exceeded_by(top[u][e]);
    }
  exceeded = __any_sync(0xffffffffu, exceeded);
  if (!exceeded && exponent == sums.exponent) return;
  const float shrink = general_power_of_two(sums.exponent - exponent);
  sums.exponent = exponent;
#pragma unroll
  for (int u = 0; u < U; ++u) {
    float keep[2] = {shrink, shrink};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float highest = max_over_lanes<4, 32>(top[u][e]);
      if (exceeded) sums.softmax[u][e].raise(highest, keep[e]);
    }
#pragma unroll
    for (int sweep = 0; sweep < Sweeps; ++sweep)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums.o[sweep][u][i][c] *= keep[c % 2];
  }
}

// Adds the values of a unit, whose first piece lies at `slot`, by their weights `w`. Returns the tokens with values that are not finite.
template <int Sweeps, int U>
__device__ __forceinline__ uint32_t add_values(GeneralPipeline& pipeline, const uint8_t* memory, const uint8_t* slot, bool odd,
                                               const float (&gain)[2][2], const GeneralScores<U>& w, bool hides, int lane,
                                               GeneralSums<Sweeps, U>& sums) {
  const GeneralSide& side = pipeline.p.v();
  const float shrink = general_power_of_two(-sums.exponent);
  GeneralWeights<U> weights;
  make_weights<U>(side, w, {gain[0][0] * shrink, gain[0][1] * shrink}, weights);
  const int t = lane % 4, g = lane / 4;
  ValueSweep sweep{slot + kGeneralGainBytes,
                   (side.adjacent ? 4 * t : t) * side.stride,
                   (side.adjacent ? 1 : 4) * side.stride,
                   0,
                   0,
                   min(side.piece, side.D),
                   odd};
  int piece_end = side.piece;  // coordinates
  uint32_t bad = 0;
#pragma unroll
  for (int s = 0; s < Sweeps; ++s) {
    const int first = 64 * s;
    if (first >= side.D) break;
    if (s > 0 && first == piece_end) {
      pipeline.release();
      sweep.data = pipeline.wait_next() + kGeneralGainBytes;
      sweep.coordinates = min(side.piece, side.D - first);
      piece_end += side.piece;
    }
    if (side.gain_groups == 2 && first == side.D / 2) make_weights<U>(side, w, {gain[1][0] * shrink, gain[1][1] * shrink}, weights);
    sweep.each = min(8, (side.D - first) / 8);
    sweep.first = first - (piece_end - side.piece) + g * sweep.each;
    add_sweep<U>(side, memory, sweep, lane, hides, weights, bad, sums.o[s]);
  }
  pipeline.release();
  return hides ? __reduce_or_sync(0xffffffffu, bad) : 0;
}

// All units of the warp: scores, mask, softmax, values. `mine` is what row `lane` sees, `all` what all rows see.
template <int Sweeps, int U>
__device__ __forceinline__ void attend_units(GeneralPipeline& pipeline, const VisibleRange& mine, const VisibleRange& all, int rows,
                                             const GeneralShared<U>& shared, const uint8_t* memory, int lane,
                                             GeneralSums<Sweeps, U>& sums) {
  const GeneralParams& p = pipeline.p;
  const QueryParams& q = p.queries;
  const auto& cache = pipeline.cache;
  const LaneTokens tokens(lane);
#pragma unroll 1
  for (int i = 0; pipeline.unit(i) < pipeline.last_unit; ++i) {
    const int first_token = pipeline.unit(i) * kGeneralTokens, end_token = first_token + kGeneralTokens;
    const bool odd = pipeline.inside(pipeline.unit(i)) % 2 != 0, exists = pipeline.exists(i);
    GeneralScores<U> s;
    score_keys<U>(pipeline, shared, memory, tokens, lane, s);
    const bool whole = !cache.ring && first_token >= all.first && end_token <= all.end && end_token <= pipeline.live && exists;
    bool hides = false;
    if (!whole || q.mask.has_softcap())
      hides = mask_scores<U>(q, cache.positions(q, exists), first_token, tokens, mine, rows, lane, s);
    hides = __any_sync(0xffffffffu, hides);

    const uint8_t* slot = pipeline.wait_next();
    float gain[2][2];
    read_gains(p.v(), slot, tokens, gain);
    rescale_sums<Sweeps, U>(s, p.v().gain_groups > 0 ? raised_exponent<U>(gain, s, sums.exponent) : 0, sums);
    uint32_t shown = 0;  // bit 4 u + c: the row sees the token
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (s[u][c] != kMasked) shown |= 1u << (4 * u + c);
        RunningSoftmax& softmax = sums.softmax[u][c % 2];
        s[u][c] = add_weight(s[u][c] - (softmax.reference() - kGeneralWeightExponent), softmax.sum);
      }
    const uint32_t bad = add_values<Sweeps, U>(pipeline, memory, slot, odd, gain, s, hides, lane, sums);
    if (bad)
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (bad >> (c < 2 ? tokens.first : tokens.second) & 1 && shown >> (4 * u + c) & 1) sums.softmax[u][c % 2].sum = NAN;
  }
  cp_async_wait<0>();
}

// Brings the sums of a lane to the maximum of all warps, and l to shared memory.
template <int Sweeps, int U>
__device__ __forceinline__ void align_sums(float unit, GeneralSums<Sweeps, U>& sums, GeneralShared<U>& shared, int warp, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      RunningSoftmax& softmax = sums.softmax[u][e];
      softmax.sum = sum_over_lanes<4, 32>(softmax.sum);
      if (g == 0) shared.m[warp][8 * u + 2 * t + e] = softmax.max;
    }
  __syncthreads();
  unit *= general_power_of_two(sums.exponent);
#pragma unroll
  for (int u = 0; u < U; ++u) {
    float keep[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int r = 8 * u + 2 * t + e;
      float top = kMasked;
#pragma unroll
      for (int w = 0; w < kGeneralWarps; ++w) top = fmaxf(top, shared.m[w][r]);
      const RunningSoftmax& softmax = sums.softmax[u][e];
      keep[e] = join_factor(softmax.max, softmax.sum, top);
      if (g == 0) shared.l[warp][r] = softmax.sum * keep[e];
      keep[e] *= unit;
    }
#pragma unroll
    for (int s = 0; s < Sweeps; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums.o[s][u][i][c] *= keep[c % 2];
  }
}

// Bytes in which a warp leaves its sums for another.
template <int Sweeps, int U>
inline constexpr int kGeneralSumBytes = Sweeps* U * 16 * 32 * static_cast<int>(sizeof(float));

// Adds the sums of all warps to those of warp 0, half of the warps at a time.
template <int Sweeps, int U>
__device__ __forceinline__ void merge_warps(GeneralSums<Sweeps, U>& sums, uint8_t* memory, int warp, int lane) {
#pragma unroll 1
  for (int half = kGeneralWarps / 2; half > 0; half /= 2) {
    float* buffer = reinterpret_cast<float*>(memory + warp % half * kGeneralSumBytes<Sweeps, U>) + lane;
    if (warp >= half && warp < 2 * half)
#pragma unroll
      for (int j = 0; j < Sweeps * U * 16; ++j) buffer[j * 32] = sums.o[j / (U * 16)][j / 16 % U][j / 4 % 4][j % 4];
    __syncthreads();
    if (warp < half)
#pragma unroll
      for (int j = 0; j < Sweeps * U * 16; ++j) sums.o[j / (U * 16)][j / 16 % U][j / 4 % 4][j % 4] += buffer[j * 32];
    __syncthreads();
  }
}

// The partials of the item's rows, in natural units: values by warp 0, (m, l) by warp 1.
template <int Sweeps, int U>
__device__ __forceinline__ void write_partials(const GeneralParams& p, const RowTile& rows, unsigned split,
                                               const GeneralSums<Sweeps, U>& sums, const GeneralShared<U>& shared, int warp,
                                               int lane) {
  const PartialsView& out = p.plan.out;
  if (warp == 1 && lane < rows.rows) {
    float top = kMasked, l = 0;
#pragma unroll
    for (int w = 0; w < kGeneralWarps; ++w) {
      top = fmaxf(top, shared.m[w][lane]);
      l += shared.l[w][lane];
    }
    const QueryRow row = query_row(rows, p.queries.group, lane);
    out.m[out.m_at(row.t, row.hq, split)] = l != l ? NAN : natural_max(top, kGeneralWeightExponent);
    out.l[out.l_at(row.t, row.hq, split)] = l;
  }
  if (warp != 0) return;
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int r = 8 * u + lane % 4 * 2 + e;
      if (r >= rows.rows) continue;
      const QueryRow row = query_row(rows, p.queries.group, r);
      float* to = out.o + out.o_at(row.t, row.hq, split, 0);
#pragma unroll
      for (int s = 0; s < Sweeps; ++s) {
        const int each = min(8, (p.v().D - 64 * s) / 8), d = 64 * s + lane / 4 * each;
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (i < each) to[(d + i) / 4 * out.o_four + (d + i) % 4] = sums.o[s][u][i / 2][i % 2 * 2 + e];
      }
    }
}

// Levels of a side: a copy for each lane.
__device__ inline void fill_levels(const GeneralSide& side, KvRole role, uint8_t* memory) {
  uint8_t* table = memory + side.table_at;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  if (side.kind == SideKind::pairs) {
    const int mask = (1 << side.bits) - 1;
    for (int i = thread / 32; i < 1 << 2 * side.bits; i += kGeneralWarps)
      *reinterpret_cast<uint32_t*>(table + i * kPairStride + lane * 4) = side.levels[i & mask] | side.levels[i >> side.bits] << 16;
  } else if (side.kind == SideKind::levels || side.kind == SideKind::split_levels) {
    for (int i = thread / 32; i < 1 << side.bits; i += kGeneralWarps)
      *reinterpret_cast<uint32_t*>(table + i * kLevelStride + (role == KvRole::v ? 128 : 0) + lane * 4) = side.levels[i];
  }
}

template <int Sweeps, int U>
__global__ void __launch_bounds__(32 * kGeneralWarps, Sweeps* U <= 2 ? 2 : 1)
    decode_general_kernel(const __grid_constant__ GeneralParams p) {
  extern __shared__ __align__(128) uint8_t memory[];
  auto& shared = *reinterpret_cast<GeneralShared<U>*>(memory);
  pdl_wait();
  pdl_launch_dependents();
  const QueryParams& q = p.queries;
  const BlockItem item(q, p.row_tiles, p.plan.splits);
  const RowTile rows = row_tile(q.queries.sequences, q.T, q.longest, q.group, item.n, item.hk, item.row_tile, 8 * U);
  if (rows.rows == 0 || rows.range.length() * q.group > p.most_rows) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // What the rows see, and the tokens of this warp.
  GeneralPipeline::Cache cache(q, item);
  VisibleRange mine = kSeesNothing;
  if (lane < rows.rows) mine = seen_by(q, rows, cache.appended, query_row(rows, q.group, lane).t);
  const VisibleRange any = seen_by_any(mine, lane < rows.rows), all = seen_by_all(mine, lane < rows.rows);
  cache.take(item, p.plan.splits, any);
  uint8_t* slots = memory + p.slots_at + warp * p.warp_bytes;
  GeneralPipeline pipeline(p, cache, slots, warp, lane);
  pipeline.fill(0, p.early_slots);

  const int fragments = (p.k().D + 31) / 32 * p.planes * U * 32 * general_fragment_bytes(p.k().kind);
  for (int i = threadIdx.x * 16; i < fragments; i += 32 * kGeneralWarps * 16)
    *reinterpret_cast<uint4*>(memory + p.queries_at + i) = {};
  fill_levels(p.k(), KvRole::k, memory);
  fill_levels(p.v(), KvRole::v, memory);
  __syncthreads();
  place_queries<U>(p, rows, memory + p.queries_at, reinterpret_cast<float*>(slots + p.early_slots * p.slot_bytes), shared, warp,
                   lane);
  pipeline.fill(p.early_slots, p.slots);
  __syncthreads();

  GeneralSums<Sweeps, U> sums;
  if (p.v().gain_groups > 0) sums.exponent = kLeastExponent;
  attend_units<Sweeps, U>(pipeline, mine, all, rows.rows, shared, memory, lane, sums);
  align_sums<Sweeps, U>(p.v().unit, sums, shared, warp, lane);
  merge_warps<Sweeps, U>(sums, memory + general_tables_at(U), warp, lane);
  write_partials<Sweeps, U>(p, rows, item.split, sums, shared, warp, lane);
}

template <int Sweeps, int U>
GeneralKernel make_general_kernel() {
  return {Sweeps, U, Sweeps * U <= 2 ? 2 : 1, decode_general_kernel<Sweeps, U>};
}

}  // namespace weft::cuda
