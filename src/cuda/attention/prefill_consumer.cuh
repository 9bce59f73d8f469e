// The consumer warpgroups of the prefill kernel: query rows, products with keys and values, and the softmax between them.
//
// A warpgroup has 64 query rows and a warp 16. A lane has rows lane / 4 and lane / 4 + 8 of its warp. The two warpgroups alternate
// (ping-pong scheduling): while one multiplies, the other computes its softmax.
#pragma once

#include "cuda/attention/prefill_coded.cuh"

namespace weft::cuda::prefill {

constexpr int kConsumers = 2 * kGroup;  // threads of both warpgroups

#if WEFT_HAS_WGMMA

// Turns of the ping-pong schedule: named barriers at which one warpgroup waits and the other only arrives.
constexpr int kFirstTurn = 5;
__device__ inline void turn_sync(uint32_t turn) { asm volatile("bar.sync %0, %1;" ::"r"(turn), "n"(kConsumers) : "memory"); }
__device__ inline void turn_arrive(uint32_t turn) { asm volatile("bar.arrive %0, %1;" ::"r"(turn), "n"(kConsumers) : "memory"); }

// Weights are multiplied by 2^kWeightExponent: they are below 2^(kLazyRescale + kWeightExponent).
constexpr float kWeightExponent = 8;

// --- query rows ---------------------------------------------------------------------------------------------------------------

// The warp's rows, rotated, as f16, in the order of the keys' coordinates, to shared memory. Rows outside f16's range are relative
// to a power of two of their own. row_scales: that power of two, and what K's mean adds to scores.
template <int D>
__device__ __forceinline__ void place_queries(const PrefillParams& p, const RowTile& rows, int64_t hk, uint8_t* queries,
                                              float (*row_scales)[2], int warp, int lane) {
  using L = Layout<D>;
  constexpr int kOwn = D / 32;
  const QueryParams& q = p.queries;
  uint32_t bits[kOwn] = {};
  const auto load_row = [&](int row) {
    if (row < rows.rows) load_query_bits<kOwn>(q.queries.q, query_row(rows, q.group, row), lane, bits);
  };
  load_row(warp * 16);
#pragma unroll 1
  for (int r = 0; r < 16; ++r) {
    const int row = warp * 16 + r;
    float x[kOwn] = {}, from_mean = 0, unit = 1;
    uint32_t now[kOwn];
#pragma unroll
    for (int e = 0; e < kOwn; ++e) now[e] = bits[e];
    if (r < 15) load_row(row + 1);
    if (row < rows.rows) from_mean = fit_query<kOwn>(q.scale, rotate_query<kOwn>(q, now, hk, lane, x), x, unit);
#pragma unroll
    for (int e = 0; e < kOwn; ++e)
      *reinterpret_cast<__half*>(queries + r * L::kQueryRow + packed_place(p.k_bits, lane * kOwn + e) * 2) = __float2half_rn(x[e]);
    if (lane == 0) {
      row_scales[row][0] = unit;
      row_scales[row][1] = from_mean * score_unit(q.scale, q.mask.has_softcap());
    }
  }
  __syncwarp();
}

// The A operands of the products with keys.
template <int D>
struct QueryFragments {
  FragmentA step[D / 16];
  __device__ __forceinline__ QueryFragments(const uint8_t* queries, int lane) {
    const LdmatrixLane place(lane);
#pragma unroll
    for (int ks = 0; ks < D / 16; ++ks)
      ldmatrix(step[ks].x,
               shared_address(queries) + place.across_row() * Layout<D>::kQueryRow + (2 * ks + place.across_piece()) * 16);
    __syncwarp();
  }
};

// The two rows of a lane.
struct LaneRows {
  int index[2];
  float unit[2], shift[2];  // a score is sum * gain * unit + shift
  VisibleRange seen[2];
  bool scaled;  // some row of the warp has a unit of its own

  __device__ __forceinline__ LaneRows(const QueryParams& q, const RowTile& rows, int64_t appended, const float (*row_scales)[2],
                                      int warp, int lane)
      : index{warp * 16 + lane / 4, warp * 16 + lane / 4 + 8} {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      unit[h] = row_scales[index[h]][0];
      shift[h] = row_scales[index[h]][1];
      seen[h] = index[h] < rows.rows ? seen_by(q, rows, appended, query_row(rows, q.group, index[h]).t) : VisibleRange{0, 0};
    }
    scaled = __any_sync(0xffffffffu, unit[0] != 1.0f || unit[1] != 1.0f);
  }
};

// --- registers of the main loop -----------------------------------------------------------------------------------------------

// Sums over all tiles.
template <int D>
struct ConsumerSums {
  float o[D / 8][4] = {};
  RunningSoftmax softmax[2];
  float keep[2];           // what o must be multiplied by before the values of the current tile are added
  int top_exponent = -24;  // power of two of the largest gain of values so far

  __device__ __forceinline__ void scale(float first, float second) {
#pragma unroll
    for (int nt = 0; nt < D / 8; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[nt][e] *= e / 2 ? second : first;
  }
};

// Scores of a tile, which become its weights.
struct ConsumerTile {
  float s[8][4];
  float gains[8][2];     // of tokens 8 nt + 2 t and the next
  FragmentA weights[4];  // of the tile whose values are to be added
  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int ks = 0; ks < 4; ++ks) weights[ks] = operand<__half>(s[2 * ks], s[2 * ks + 1]);
  }
};

// Addresses in shared memory and barriers, the same in all lanes.
template <int D>
struct ConsumerAddresses {
  uint32_t keys, values, group, own_turn, other_turn;
  StageBarriers of_keys, of_values;
  __device__ __forceinline__ ConsumerAddresses(const Layout<D>& places, SharedState& share, int warp) {
    const uint32_t base = uniform(shared_address(&share));
    keys = uniform(shared_address(places.keys));
    values = uniform(shared_address(places.values));
    group = uniform(warp / 4);
    own_turn = uniform(kFirstTurn + group);
    other_turn = uniform(kFirstTurn + 1 - group);
    of_keys = keys_barriers(base);
    of_values = values_barriers(base);
  }
};

// --- products -----------------------------------------------------------------------------------------------------------------

template <int D>
__device__ __forceinline__ void multiply_keys(const ConsumerAddresses<D>& at, const QueryFragments<D>& query, int stage,
                                              float (&s)[8][4]) {
  using L = Layout<D>;
  const uint32_t first = smem_descriptor(at.keys + stage * L::kTileBytes);
  wgmma_fence();
#pragma unroll
  for (int ks = 0; ks < D / 16; ++ks) {
    const uint32_t k = first + ((ks / 4 * (kTile * 128) + ks % 4 * 32) >> 4);
    if (ks == 0)
      wgmma<__half, false>(s, query.step[ks], k);
    else
      wgmma<__half, true>(s, query.step[ks], k);
  }
  wgmma_commit();
}

template <int D>
__device__ __forceinline__ void multiply_values(const ConsumerAddresses<D>& at, const FragmentA (&weights)[4], int stage,
                                                ConsumerSums<D>& sums) {
  const uint32_t address = at.values + stage * Layout<D>::kTileBytes;
  wgmma_fence();
#pragma unroll
  for (int ks = 0; ks < 4; ++ks) wgmma<__half, true>(sums.o, weights[ks], smem_descriptor(address) + (ks * 32 >> 4));
  wgmma_commit();
}

// --- softmax ------------------------------------------------------------------------------------------------------------------

// What is known of a tile before its scores.
struct TileExponents {
  bool hides;     // some row of the block does not see some token
  int behind;     // exponent of the largest gain of its values relative to the largest so far, <= 0
  float above;    // what exponents of weights have in common, besides the running maximum
  float from[2];  // what makes exponents of weights of the scores of either row
};

// Reads the gains of keys and raises the largest gain of values.
template <int D>
__device__ __forceinline__ TileExponents prepare_tile(const TileInfo& info, int t, float (&gains)[8][2], ConsumerSums<D>& sums) {
#pragma unroll
  for (int nt = 0; nt < 8; nt += 2) {
    const float4 four = *reinterpret_cast<const float4*>(info.gain[t] + 2 * nt);
    gains[nt][0] = four.x, gains[nt][1] = four.y, gains[nt + 1][0] = four.z, gains[nt + 1][1] = four.w;
  }
  const int2 others = *reinterpret_cast<const int2*>(&info.v_exponent);
  sums.keep[0] = sums.keep[1] = 1;
  if (others.x > sums.top_exponent) {
    sums.keep[0] = sums.keep[1] = power_of_two(sums.top_exponent - others.x);
    sums.top_exponent = others.x;
  }
  TileExponents exponents{others.y != 0, others.x - sums.top_exponent};
  exponents.above = kWeightExponent + static_cast<float>(exponents.behind);
#pragma unroll
  for (int h = 0; h < 2; ++h) exponents.from[h] = exponents.above - sums.softmax[h].reference();
  return exponents;
}

// Sums to exponents of weights, with softcap and mask.
__device__ __forceinline__ void mask_scores(const QueryParams& q, const TileInfo& info, const TileExponents& exponents,
                                            const LaneRows& rows, int t, ConsumerTile& tile) {
#pragma unroll
  for (int nt = 0; nt < 8; ++nt) {
    const int2 position = *reinterpret_cast<const int2*>(info.position + 8 * nt + 2 * t);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int h = e / 2, where = e % 2 ? position.y : position.x;
      float score = fmaf(tile.s[nt][e] * tile.gains[nt][e % 2], rows.unit[h], rows.shift[h]);
      if (q.mask.has_softcap()) score = softcap_fast(score, q.mask.softcap) * kLog2e;
      tile.s[nt][e] = rows.seen[h].hides(where) ? kMasked : score + exponents.from[h];
    }
  }
}

// Raises the running maxima where scores exceed them by more than the threshold, which is rare. The test compares floats as
// integers: floats above zero keep their order, and those below zero are less.
template <int D>
__device__ __forceinline__ void raise_maxima(float above, ConsumerTile& tile, ConsumerSums<D>& sums) {
  float(&s)[8][4] = tile.s;
  bool exceeded = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int tops[2] = {__float_as_int(s[0][2 * h]), __float_as_int(s[0][2 * h + 1])};
#pragma unroll
    for (int nt = 1; nt < 7; nt += 2)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        tops[e] = __vimax3_s32(tops[e], __float_as_int(s[nt][2 * h + e]), __float_as_int(s[nt + 1][2 * h + e]));
    const int top = __vimax3_s32(max(tops[0], tops[1]), __float_as_int(s[7][2 * h]), __float_as_int(s[7][2 * h + 1]));
    exceeded |= sums.softmax[h].max == kMasked || !(kLazyRescale + above > 0) || __int_as_float(top) > kLazyRescale + above;
  }
  if (!__any_sync(0xffffffffu, exceeded)) return;
  float lower[2], top[2] = {kMasked, kMasked};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int nt = 0; nt < 8; ++nt) top[h] = fmaxf(top[h], fmaxf(s[nt][2 * h], s[nt][2 * h + 1]));
    lower[h] = sums.softmax[h].raise_relative(max_over_lanes<1, 4>(top[h]) - above, sums.keep[h]);
  }
#pragma unroll
  for (int nt = 0; nt < 8; ++nt)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[nt][e] -= lower[e / 2];
}

// The softmax of a tile: sums to weights, and what o must be multiplied by. Returns a number made of all weights.
template <int D>
__device__ __forceinline__ float weigh_tokens(const QueryParams& q, const TileInfo& info, const TileExponents& exponents,
                                              const LaneRows& rows, int t, ConsumerTile& tile, ConsumerSums<D>& sums) {
  if (q.mask.has_softcap() || exponents.hides || rows.scaled) {
    mask_scores(q, info, exponents, rows, t, tile);
  } else {
    const float from[2] = {exponents.from[0] + rows.shift[0], exponents.from[1] + rows.shift[1]};
#pragma unroll
    for (int nt = 0; nt < 8; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) tile.s[nt][e] = fmaf(tile.s[nt][e], tile.gains[nt][e % 2], from[e / 2]);
  }
  raise_maxima<D>(exponents.above, tile, sums);
  float tile_sums[4] = {};
#pragma unroll
  for (int nt = 0; nt < 8; ++nt)
#pragma unroll
    for (int e = 0; e < 4; ++e) tile.s[nt][e] = add_weight(tile.s[nt][e], tile_sums[e]);
  const float here[2] = {tile_sums[0] + tile_sums[1], tile_sums[2] + tile_sums[3]};
  const float ahead = power_of_two(-exponents.behind);
#pragma unroll
  for (int h = 0; h < 2; ++h) sums.softmax[h].sum = fmaf(here[h], ahead, sums.softmax[h].sum);
  return here[0] + here[1];
}

// --- the consumer -------------------------------------------------------------------------------------------------------------

// Releases a stage that the warp has read. `after` is never -1 and depends on what the warp must have computed before: without that
// dependence the assembler would wait for the sums before the softmax.
__device__ __forceinline__ void release_stage(uint32_t barrier, float after, int lane) {
  __syncwarp();
  if (lane == 0 && after != -1.0f) mbarrier_arrive(barrier);
}

// All tiles of the block. The softmax of a tile runs while the values of the tile before are summed, and while the other warpgroup
// multiplies. A turn ends when a warpgroup has its scores. If it ended when all products are issued, the products of both
// warpgroups would mix, and both would wait for scores at the same time. If it ended when the sums are done, the other's turn would
// begin too late.
template <int D>
__device__ __forceinline__ void attend_tiles(const PrefillParams& p, const CacheTiles& cache, const SharedState& share,
                                             const QueryFragments<D>& query, const LaneRows& rows, const ConsumerAddresses<D>& at,
                                             int lane, ConsumerSums<D>& sums) {
  const QueryParams& q = p.queries;
  const int t = lane % 4;
  ConsumerTile tile;
  PipelineStage<Layout<D>::kStages> keys, values;
  const auto info_of = [&](int index) -> const TileInfo& { return share.info[info_slot(index)]; };
  const auto weigh = [&](int index, const TileExponents& exponents) {
    return weigh_tokens<D>(q, info_of(index), exponents, rows, t, tile, sums);
  };
  mbarrier_wait(at.of_keys.full_of(keys.slot), keys.parity);
  turn_sync(at.own_turn);
  multiply_keys<D>(at, query, keys.slot, tile.s);
  turn_arrive(at.other_turn);
  const TileExponents first = prepare_tile<D>(info_of(cache.first_tile), t, tile.gains, sums);
  wgmma_wait<0>();
  pin(tile.s);
  release_stage(at.of_keys.empty_of(keys.slot), weigh(cache.first_tile, first), lane);
  keys.next();
  tile.pack_weights();
  bool keys_full = false, values_full = false;  // tested a tile ahead, since a test takes long
#pragma unroll 1
  for (int index = cache.first_tile + 1; index < cache.last_tile; ++index) {
    if (!keys_full) mbarrier_wait(at.of_keys.full_of(keys.slot), keys.parity);
    if (!values_full) mbarrier_wait(at.of_values.full_of(values.slot), values.parity);
    turn_sync(at.own_turn);
    pin(tile.s);
    multiply_keys<D>(at, query, keys.slot, tile.s);
    pin(sums.o);
    multiply_values<D>(at, tile.weights, values.slot, sums);
    const PipelineStage<Layout<D>::kStages> scored = keys, summed = values;
    keys.next();
    values.next();
    keys_full = mbarrier_test(at.of_keys.full_of(keys.slot), keys.parity);
    values_full = mbarrier_test(at.of_values.full_of(values.slot), values.parity);
    const TileExponents exponents = prepare_tile<D>(info_of(index), t, tile.gains, sums);
    wgmma_wait<1>();
    pin(tile.s);
    turn_arrive(at.other_turn);
    release_stage(at.of_keys.empty_of(scored.slot), weigh(index, exponents), lane);
    pin(tile.s);
    wgmma_wait<0>();
    pin(sums.o);
    release_stage(at.of_values.empty_of(summed.slot), 0.0f, lane);
    if (__any_sync(0xffffffffu, sums.keep[0] != 1.0f || sums.keep[1] != 1.0f)) sums.scale(sums.keep[0], sums.keep[1]);
    tile.pack_weights();
  }
  mbarrier_wait(at.of_values.full_of(values.slot), values.parity);
  pin(sums.o);
  multiply_values<D>(at, tile.weights, values.slot, sums);
  wgmma_wait<0>();
  pin(sums.o);
}

template <int D>
__device__ __forceinline__ void write_partials(const PrefillParams& p, const RowTile& rows, unsigned split, const LaneRows& own,
                                               int t, const ConsumerSums<D>& sums) {
  const PartialsView& out = p.plan.out;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float l = sum_over_lanes<1, 4>(sums.softmax[h].sum);
    if (own.index[h] >= rows.rows) continue;
    const QueryRow row = query_row(rows, p.queries.group, own.index[h]);
    const float unit = p.v.step * power_of_two(sums.top_exponent);
    float* to = out.o + out.o_at(row.t, row.hq, split, 0) + 2 * t;
#pragma unroll
    for (int nt = 0; nt < D / 8; ++nt) {
      const float(&o)[4] = sums.o[nt];
      *reinterpret_cast<float2*>(to + 8 * nt) = {o[2 * h] * unit, o[2 * h + 1] * unit};
    }
    if (t == 0) {
      out.m[out.m_at(row.t, row.hq, split)] = l != l ? NAN : natural_max(sums.softmax[h].max, kWeightExponent);
      out.l[out.l_at(row.t, row.hq, split)] = l;
    }
  }
}

// A consumer thread from its queries to its partials.
template <int D>
__device__ void consume(const PrefillParams& p, const RowTile& rows, const CacheTiles& cache, unsigned split,
                        const Layout<D>& places, SharedState& share, float (*row_scales)[2]) {
  const int warp = threadIdx.x / 32, lane = __shfl_sync(0xffffffffu, threadIdx.x % 32, threadIdx.x % 32);
  uint8_t* const queries = places.queries + warp * 16 * Layout<D>::kQueryRow;
  place_queries<D>(p, rows, cache.hk, queries, row_scales, warp, lane);
  const QueryFragments<D> query(queries, lane);
  // The queries are in registers: values may fill their memory.
  if (lane < Layout<D>::kStages) mbarrier_arrive(values_barriers(shared_address(&share)).empty_of(lane));
  const LaneRows own(p.queries, rows, cache.appended, row_scales, warp, lane);
  ConsumerSums<D> sums;
  const ConsumerAddresses<D> at(places, share, warp);
  if (at.group == 1) turn_arrive(at.other_turn);
  if (cache.first_tile < cache.last_tile) attend_tiles<D>(p, cache, share, query, own, at, lane, sums);
  if (at.group == 0) turn_sync(at.own_turn);
  write_partials<D>(p, rows, split, own, lane % 4, sums);
}

#endif  // WEFT_HAS_WGMMA

}  // namespace weft::cuda::prefill
