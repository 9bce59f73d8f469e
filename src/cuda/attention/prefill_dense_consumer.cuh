// The consumer warpgroups of the dense prefill kernel: products with keys and values, and the softmax between them.
//
// A warpgroup has 64 query rows and a warp 16. A lane has rows lane / 4 and lane / 4 + 8 of its warp. The softmax of a tile runs while
// the values of the tile before are summed, and while the other warpgroup multiplies (ping-pong scheduling).
#pragma once

#include "cuda/attention/prefill_dense.cuh"

namespace weft::cuda::dense {

// Weights are multiplied by 2^kWeightExponent: they are below 2^(kLazyRescale + kWeightExponent).
constexpr float kWeightExponent = 8;
#if WEFT_HAS_WGMMA

// Turns of the ping-pong schedule: named barriers at which one warpgroup waits and the other only arrives. A turn ends when a warpgroup
// has its scores, or else when it has issued its products. Heads of 256 take no turns.
constexpr bool kTurnEndsWithScores = true;
constexpr int kFirstTurn = 5;
template <int D>
constexpr bool kTakesTurns = D <= 128;
template <int D>
__device__ __forceinline__ void turn_sync(uint32_t turn) {
  if constexpr (kTakesTurns<D>) asm volatile("bar.sync %0, %1;" ::"r"(turn), "n"(kConsumers) : "memory");
}
template <int D>
__device__ __forceinline__ void turn_arrive(uint32_t turn) {
  if constexpr (kTakesTurns<D>) asm volatile("bar.arrive %0, %1;" ::"r"(turn), "n"(kConsumers) : "memory");
}

// The same number in all lanes, kept in a register.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(0xffffffffu, x, 0); }

// Row h of a lane, of its block.
__device__ __forceinline__ int lane_row(int h) { return static_cast<int>(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) + 8 * h; }

// The two rows of a lane.
struct LaneRows {
  float unit[2], shift[2];  // a score is sum * gain * unit + shift
  VisibleRange seen[2];
  bool scaled;  // some row of the warp has a unit of its own

  __device__ __forceinline__ LaneRows(const DenseParams& p, const RowTile& rows, int64_t appended, const float2* scales) {
    const QueryParams& q = p.queries;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int index = lane_row(h);
      const bool exists = index < rows.rows;
      const float2 scale = exists ? scales[index] : float2{1, 0};
      unit[h] = scale.x;
      shift[h] = scale.y;
      seen[h] = exists ? seen_by(q, rows, appended, query_row(rows, q.group, index).t) : VisibleRange{0, 0};
    }
    scaled = __any_sync(0xffffffffu, unit[0] != 1.0f || unit[1] != 1.0f);
  }
};

template <int D>
struct Sums {
  float o[D / 8][4] = {};
  RunningSoftmax softmax[2];
  float keep[2] = {1, 1};              // what o must be multiplied by before the values of the current tile are added
  int top_exponent = kLowestExponent;  // of the tiles of values so far

  __device__ __forceinline__ void scale(float first, float second) {
#pragma unroll
    for (int nt = 0; nt < D / 8; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[nt][e] *= e / 2 ? second : first;
  }
};

// Scores of a tile, which become its weights.
template <int D>
struct Scores {
  static constexpr int kColumns = tile_tokens(D) / 8;
  float s[kColumns][4];
  FragmentA weights[kColumns / 2];  // of the tile whose values are to be added
  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int ks = 0; ks < kColumns / 2; ++ks) weights[ks] = operand<__half>(s[2 * ks], s[2 * ks + 1]);
  }
};

// Descriptors, the same in all lanes.
template <int D>
struct Operands {
  uint32_t queries, keys, own_turn, other_turn;
  __device__ __forceinline__ Operands(const uint8_t* shared, int group) {
    using L = DenseLayout<D>;
    const uint32_t base = shared_address(shared);
    queries = uniform(smem_descriptor(base + L::kQueries + group * 64 * 128));
    keys = uniform(smem_descriptor(base + L::kKeys));
    own_turn = uniform(kFirstTurn + group);
    other_turn = uniform(kFirstTurn + 1 - group);
  }
  // Descriptors of values differ from those of keys by a constant, so that they take no register of their own.
  __device__ __forceinline__ uint32_t values() const {
    using L = DenseLayout<D>;
    return keys + (transposed_descriptor(L::kValues, L::kPanel) - smem_descriptor(L::kKeys));
  }
};

template <int D>
__device__ __forceinline__ void multiply_keys(const Operands<D>& at, int stage, Scores<D>& tile) {
  using L = DenseLayout<D>;
  const uint32_t keys = at.keys + (stage * L::kTileBytes >> 4);
  wgmma_fence();
#pragma unroll
  for (int ks = 0; ks < D / 16; ++ks) {
    const uint32_t q = at.queries + ((ks / 4 * L::kQueryPanel + ks % 4 * 32) >> 4),
                   k = keys + ((ks / 4 * L::kPanel + ks % 4 * 32) >> 4);
    if (ks == 0)
      multiply_shared<false>(tile.s, q, k);
    else
      multiply_shared<true>(tile.s, q, k);
  }
  wgmma_commit();
}

template <int D>
__device__ __forceinline__ void multiply_values(const Operands<D>& at, int stage, const Scores<D>& tile, Sums<D>& sums) {
  using L = DenseLayout<D>;
  const uint32_t values = at.values() + (stage * L::kTileBytes >> 4);
  wgmma_fence();
#pragma unroll
  for (int ks = 0; ks < L::kTile / 16; ++ks) multiply_transposed(sums.o, tile.weights[ks], values + (ks * 16 * 128 >> 4));
  wgmma_commit();
}

// --- softmax ------------------------------------------------------------------------------------------------------------------

// What is known of a tile before its scores.
struct TileExponents {
  bool hides;     // some row of the block does not see some token
  int behind;     // exponent of the tile's values relative to the largest so far, <= 0
  float above;    // what exponents of weights have in common, besides the running maximum
  float from[2];  // what makes exponents of weights of the scores of either row
};

template <int D, bool Coded>
__device__ __forceinline__ TileExponents prepare_tile(const DenseShared<D>& share, int stage, Sums<D>& sums) {
  sums.keep[0] = sums.keep[1] = 1;
  TileExponents exponents{share.hides[stage] != 0, 0};
  if constexpr (Coded) {
    const int exponent = share.record[stage].exponent;
    if (exponent > sums.top_exponent) {
      sums.keep[0] = sums.keep[1] = power_of_two_or_zero(sums.top_exponent - exponent);
      sums.top_exponent = exponent;
    }
    exponents.behind = exponent - sums.top_exponent;
  }
  exponents.above = kWeightExponent + static_cast<float>(exponents.behind);
#pragma unroll
  for (int h = 0; h < 2; ++h) exponents.from[h] = exponents.above - sums.softmax[h].reference();
  return exponents;
}

// What makes sums scores: those of columns 8 nt + 2 t + e and 8 (nt + 1) + 2 t + e, for even nt.
template <int D, bool Coded>
__device__ __forceinline__ void read_gains(const DenseParams& p, const DenseShared<D>& share, int stage, int nt, int t,
                                           float (&gains)[2][2]) {
  const float4 four =
      Coded ? *reinterpret_cast<const float4*>(share.record[stage].gain + nt * 8 + t * 4) : float4{p.unit, p.unit, p.unit, p.unit};
  gains[0][0] = four.x, gains[0][1] = four.y, gains[1][0] = four.z, gains[1][1] = four.w;
}

// Sums to exponents of weights. Shaped: with softcap, or rows relative to powers of two.
template <int D, bool Coded, bool Shaped>
__device__ __forceinline__ void scale_scores(const DenseParams& p, const DenseShared<D>& share, const float (&from)[2],
                                             const LaneRows& rows, int stage, int t, Scores<D>& tile) {
  const float cap = p.queries.mask.softcap, inverse = Shaped && cap > 0 ? __fdividef(kTwoLog2e, cap) : 0;
#pragma unroll
  for (int nt = 0; nt < tile.kColumns; nt += 2) {
    float gains[2][2];
    read_gains<D, Coded>(p, share, stage, nt, t, gains);
#pragma unroll
    for (int a = 0; a < 2; ++a)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& s = tile.s[nt + a][e];
        if constexpr (Shaped) {
          s = fmaf(s * gains[a][e % 2], rows.unit[e / 2], rows.shift[e / 2]);
          if (cap > 0) s = softcap_fast(s, cap, inverse) * kLog2e;
          s += from[e / 2];
        } else {
          s = fmaf(s, gains[a][e % 2], from[e / 2]);
        }
      }
  }
}

// Scores of tokens with NaN or infinite values become NaN, and those of tokens that a row does not see, minus infinity.
template <int D>
__device__ __forceinline__ void mask_scores(const DenseShared<D>& share, const LaneRows& rows, int stage, int t, Scores<D>& tile) {
#pragma unroll
  for (int nt = 0; nt < tile.kColumns; ++nt) {
    const int column = 8 * nt + 2 * t;
    const int2 position = *reinterpret_cast<const int2*>(share.position[stage] + column);
    const unsigned bad = share.bad[stage][column / 32] >> column % 32;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (bad >> e % 2 & 1) tile.s[nt][e] = NAN;
      if (rows.seen[e / 2].hides(e % 2 ? position.y : position.x)) tile.s[nt][e] = kMasked;
    }
  }
}

// Raises the running maxima where scores exceed them by more than the threshold, which is rare. The test compares floats as integers:
// floats above zero keep their order, and those below zero are less.
template <int D>
__device__ __forceinline__ void raise_maxima(float above, Scores<D>& tile, Sums<D>& sums) {
  constexpr int kColumns = Scores<D>::kColumns;
  auto& s = tile.s;
  bool exceeded = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int tops[2] = {__float_as_int(s[0][2 * h]), __float_as_int(s[0][2 * h + 1])};
#pragma unroll
    for (int nt = 1; nt < kColumns - 1; nt += 2)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        tops[e] = __vimax3_s32(tops[e], __float_as_int(s[nt][2 * h + e]), __float_as_int(s[nt + 1][2 * h + e]));
    const int top =
        __vimax3_s32(max(tops[0], tops[1]), __float_as_int(s[kColumns - 1][2 * h]), __float_as_int(s[kColumns - 1][2 * h + 1]));
    exceeded |= sums.softmax[h].max == kMasked || !(kLazyRescale + above > 0) || __int_as_float(top) > kLazyRescale + above;
  }
  if (!__any_sync(0xffffffffu, exceeded)) return;
  float lower[2], top[2] = {kMasked, kMasked};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int nt = 0; nt < kColumns; ++nt) top[h] = fmaxf(top[h], fmaxf(s[nt][2 * h], s[nt][2 * h + 1]));
    lower[h] = sums.softmax[h].raise_relative(max_over_lanes<1, 4>(top[h]) - above, sums.keep[h]);
  }
#pragma unroll
  for (int nt = 0; nt < kColumns; ++nt)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[nt][e] -= lower[e / 2];
}

// The softmax of a tile: sums to weights, and what o must be multiplied by. Returns a number made of all weights.
template <int D, bool Coded>
__device__ __forceinline__ float weigh_tokens(const DenseParams& p, const DenseShared<D>& share, const Barriers<D>& barriers,
                                              const TileExponents& exponents, const LaneRows& rows, const Stage& keys,
                                              const Stage& values, int t, Scores<D>& tile, Sums<D>& sums) {
  if (p.queries.mask.has_softcap() || rows.scaled) {
    scale_scores<D, Coded, true>(p, share, exponents.from, rows, keys.slot, t, tile);
  } else {
    const float from[2] = {exponents.from[0] + rows.shift[0], exponents.from[1] + rows.shift[1]};
    scale_scores<D, Coded, false>(p, share, from, rows, keys.slot, t, tile);
  }
  if (exponents.hides) {
    mbarrier_wait(barriers.v_full(values.slot), values.parity);
    mask_scores<D>(share, rows, values.slot, t, tile);
  }
  raise_maxima<D>(exponents.above, tile, sums);
  float tile_sums[4] = {};
#pragma unroll
  for (int nt = 0; nt < tile.kColumns; ++nt)
#pragma unroll
    for (int e = 0; e < 4; ++e) tile.s[nt][e] = add_weight(tile.s[nt][e], tile_sums[e]);
  const float here[2] = {tile_sums[0] + tile_sums[1], tile_sums[2] + tile_sums[3]};
  const float ahead = Coded ? power_of_two(min(-exponents.behind, 127)) : 1.0f;  // further behind, all weights are 0
#pragma unroll
  for (int h = 0; h < 2; ++h) sums.softmax[h].sum = fmaf(here[h], ahead, sums.softmax[h].sum);
  return here[0] + here[1];
}

// --- the main loop ------------------------------------------------------------------------------------------------------------

// Releases a stage that the warp has read. `after` is never -1 and depends on what the warp must have computed before: without that
// dependence the assembler would wait for the sums before the softmax.
__device__ __forceinline__ void release_stage(uint32_t barrier, float after, int lane) {
  __syncwarp();
  if (lane == 0 && after != -1.0f) mbarrier_arrive(barrier);
}

template <int D, bool Coded>
__device__ __forceinline__ void attend_tiles(const DenseParams& p, int first_tile, int last_tile, const DenseShared<D>& share,
                                             const LaneRows& rows, const Operands<D>& at, int lane, Sums<D>& sums) {
  const int t = lane % 4;
  const Barriers<D> barriers(share);
  Scores<D> tile;
  Stage keys, values;
  const auto weigh = [&](const TileExponents& exponents, const Stage& of_keys, const Stage& of_values) {
    return weigh_tokens<D, Coded>(p, share, barriers, exponents, rows, of_keys, of_values, t, tile, sums);
  };
  mbarrier_wait(barriers.q_full(), 0);
  mbarrier_wait(barriers.k_full(keys.slot), keys.parity);
  turn_sync<D>(at.own_turn);
  multiply_keys<D>(at, keys.slot, tile);
  const TileExponents first = prepare_tile<D, Coded>(share, keys.slot, sums);
  wgmma_wait<0>();
  pin(tile.s);
  turn_arrive<D>(at.other_turn);
  release_stage(barriers.k_empty(keys.slot), weigh(first, keys, values), lane);
  keys.next();
  tile.pack_weights();
  bool keys_full = false, values_full = false;  // tested a tile ahead, since a test takes long
#pragma unroll 1
  for (int index = first_tile + 1; index < last_tile; ++index) {
    if (!keys_full) mbarrier_wait(barriers.k_full(keys.slot), keys.parity);
    if (!values_full) mbarrier_wait(barriers.v_full(values.slot), values.parity);
    turn_sync<D>(at.own_turn);
    pin(tile.s);
    multiply_keys<D>(at, keys.slot, tile);
    pin(sums.o);
    multiply_values<D>(at, values.slot, tile, sums);
    if (!kTurnEndsWithScores) turn_arrive<D>(at.other_turn);
    const Stage scored = keys, summed = values;
    keys.next();
    values.next();
    keys_full = mbarrier_test(barriers.k_full(keys.slot), keys.parity);
    values_full = mbarrier_test(barriers.v_full(values.slot), values.parity);
    const TileExponents exponents = prepare_tile<D, Coded>(share, scored.slot, sums);
    wgmma_wait<1>();
    pin(tile.s);
    if (kTurnEndsWithScores) turn_arrive<D>(at.other_turn);
    release_stage(barriers.k_empty(scored.slot), weigh(exponents, scored, values), lane);
    pin(tile.s);
    wgmma_wait<0>();
    pin(sums.o);
    release_stage(barriers.v_empty(summed.slot), 0.0f, lane);
    if (__any_sync(0xffffffffu, sums.keep[0] != 1.0f || sums.keep[1] != 1.0f)) sums.scale(sums.keep[0], sums.keep[1]);
    tile.pack_weights();
  }
  if (!values_full) mbarrier_wait(barriers.v_full(values.slot), values.parity);
  pin(sums.o);
  multiply_values<D>(at, values.slot, tile, sums);
  wgmma_wait<0>();
  pin(sums.o);
}

// --- the end of a row ---------------------------------------------------------------------------------------------------------

template <int D>
__device__ __forceinline__ void write_partials(const DenseParams& p, const RowTile& rows, unsigned split, int t,
                                               const Sums<D>& sums) {
  const PartialsView& out = p.plan.out;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float l = sum_over_lanes<1, 4>(sums.softmax[h].sum);
    if (lane_row(h) >= rows.rows) continue;
    const QueryRow row = query_row(rows, p.queries.group, lane_row(h));
    const float unit = p.v_unit * power_of_two(sums.top_exponent);
    float* to = out.o + out.o_at(row.t, row.hq, split, 0) + 2 * t;
#pragma unroll
    for (int nt = 0; nt < D / 8; ++nt)
      if (8 * nt < p.merge.rotate.D)
        *reinterpret_cast<float2*>(to + 8 * nt) = {sums.o[nt][2 * h] * unit, sums.o[nt][2 * h + 1] * unit};
    if (t == 0) {
      out.m[out.m_at(row.t, row.hq, split)] = l != l ? NAN : natural_max(sums.softmax[h].max, kWeightExponent);
      out.l[out.l_at(row.t, row.hq, split)] = l;
    }
  }
}

// Applies H_run to runs of the two rows of a lane quad. Bits of a coordinate, lowest first: e, two of the lane, those of nt.
template <int D>
__device__ __forceinline__ void transform_rows(int run, int lane, float (&o)[D / 8][4]) {
#pragma unroll
  for (int nt = 0; nt < D / 8; ++nt)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float &x = o[nt][2 * h], &y = o[nt][2 * h + 1];
      if (run > 1) {
        const float low = x, high = y;
        x = low + high;
        y = low - high;
      }
#pragma unroll
      for (int apart = 1; apart < 4; apart *= 2)
        if (2 * apart < run) {
          const float sign = lane & apart ? -1.0f : 1.0f;
          x = fmaf(sign, x, __shfl_xor_sync(0xffffffffu, x, apart));
          y = fmaf(sign, y, __shfl_xor_sync(0xffffffffu, y, apart));
        }
    }
#pragma unroll
  for (int half = 1; half < D / 8; half *= 2)
    if (8 * half < run) {
#pragma unroll
      for (int nt = 0; nt < D / 8; ++nt)
        if (!(nt & half)) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float low = o[nt][e], high = o[nt + half][e];
            o[nt][e] = low + high;
            o[nt + half][e] = low - high;
          }
        }
    }
}

// Sink, normalisation, V's rotation and mean, output: as finish_row(), for the rows of a block that has all of their tokens.
template <int D>
__device__ __forceinline__ void finish_rows(const DenseParams& p, const RowTile& rows, int lane, Sums<D>& sums) {
  const MergeParams& m = p.merge;
  const int t = lane % 4;
  float tokens[2];  // share of the weights, without the sink
  QueryRow row[2];
  const float unit = p.v_unit * power_of_two(sums.top_exponent);
  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float l = sum_over_lanes<1, 4>(sums.softmax[h].sum);
    SoftmaxSum<float> sum{l != l ? NAN : natural_max(sums.softmax[h].max, kWeightExponent), l};
    row[h] = query_row(rows, p.queries.group, min(lane_row(h), rows.rows - 1));
    float scale = 1;
    if (m.sinks) scale = sum.join(m.sinks[row[h].hq * m.sink_stride], 1).keep;
    scale *= sum.inverse();
    tokens[h] = l * scale;
    factor[h] = scale * unit;
    if (m.lse && t == 0 && lane_row(h) < rows.rows) m.lse[row[h].t * m.lse_token + row[h].hq * m.lse_head] = sum.log_sum();
  }
  sums.scale(factor[0], factor[1]);
  const bool rotated = m.rotate.rotation != Rotation::none;
  if (rotated) transform_rows<D>(m.rotate.run, lane, sums.o);
  const float* mean = m.mean.data ? m.mean.data + rows.hk * m.mean.head : nullptr;
#pragma unroll
  for (int nt = 0; nt < D / 8; ++nt) {
    const int column = 8 * nt + 2 * t;
    float sign[2] = {1, 1}, add[2] = {0, 0};
    const uint32_t bits = rotated ? m.rotate.signs[nt / 4] >> column % 32 : 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (rotated) sign[e] = bits >> e & 1 ? -m.rotate.scale : m.rotate.scale;
      if (mean) add[e] = mean[column + e];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (lane_row(h) >= rows.rows) continue;
      const float x = fmaf(tokens[h], add[0], sums.o[nt][2 * h] * sign[0]),
                  y = fmaf(tokens[h], add[1], sums.o[nt][2 * h + 1] * sign[1]);
      const int64_t to = row[h].t * m.o_token + row[h].hq * m.o_head + column;
      if (m.o_dtype == DType::f32) {
        if (p.wide_stores) {
          *reinterpret_cast<float2*>(static_cast<float*>(m.o) + to) = {x, y};
        } else {
          static_cast<float*>(m.o)[to] = x;
          static_cast<float*>(m.o)[to + 1] = y;
        }
      } else {
        const uint32_t pair = m.o_dtype == DType::bf16 ? pack<__nv_bfloat16>(x, y) : pack<__half>(x, y);
        auto* const at = static_cast<uint16_t*>(m.o) + to;
        if (p.wide_stores)
          *reinterpret_cast<uint32_t*>(at) = pair;
        else
          at[0] = static_cast<uint16_t>(pair), at[1] = static_cast<uint16_t>(pair >> 16);
      }
    }
  }
}

// A consumer thread from the arrival of its queries to its outputs.
template <int D, bool Coded>
__device__ void consume(const DenseParams& p, int64_t appended, int first_tile, int last_tile, const float2* scales,
                        const uint8_t* shared, const DenseShared<D>& share) {
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32), group = warp / 4;
  Sums<D> sums;
  if constexpr (!Coded) sums.top_exponent = 0;
  const Operands<D> at(shared, group);
  if (group == 1) turn_arrive<D>(at.other_turn);
  if (first_tile < last_tile) {
    const LaneRows own(p, share.rows, appended, scales);
    attend_tiles<D, Coded>(p, first_tile, last_tile, share, own, at, lane, sums);
  }
  if (group == 0) turn_sync<D>(at.own_turn);
  const RowTile rows = share.rows;
  if (p.finishes)
    finish_rows<D>(p, rows, lane, sums);
  else
    write_partials<D>(p, rows, DenseItem(p).split, lane % 4, sums);
}

#endif  // WEFT_HAS_WGMMA

}  // namespace weft::cuda::dense
