// The general decode kernel: weights of a unit's tokens as operands, and sums of its values.
//
// V^T is the A operand, coordinates in its rows. Of every 64 coordinates, a sweep, a lane 4 g + t has the 8 neighbours 8 g and up, of
// tokens 4 t to 4 t + 3; mma i of the sweep takes 2 i in its upper and 2 i + 1 in its lower rows. A last sweep of fewer coordinates
// gives each g an eighth of them. Weights are B operands and carry the gains.
#pragma once

#include "cuda/attention/decode_general_scores.cuh"

namespace weft::cuda {

// Weights are multiplied by 2^kGeneralWeightExponent, which keeps small ones from f16's underflow.
constexpr float kGeneralWeightExponent = 9;

// f16, bf16: [plane][pair of tokens], two planes. f32: by token.
template <int U>
using GeneralWeights = uint32_t[U][4];

// The weights `w` times gains.
template <class Half, int U>
__device__ __forceinline__ void make_half_weights(const GeneralScores<U>& w, const float (&gain)[2], GeneralWeights<U>& weights) {
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // A weight of 0 stays 0 where the gain is no number.
      float x = w[u][2 * h] == 0 ? 0.0f : w[u][2 * h] * gain[h], y = w[u][2 * h + 1] == 0 ? 0.0f : w[u][2 * h + 1] * gain[h];
#pragma unroll
      for (int plane = 0; plane < 2; ++plane) {
        const uint32_t pair = pack<Half>(x, y);
        const float2 taken = unpack<Half>(pair);
        x -= taken.x, y -= taken.y;
        weights[u][2 * plane + h] = transpose(pair);
      }
    }
}
template <int U>
__device__ __forceinline__ void make_f32_weights(const GeneralScores<U>& w, GeneralWeights<U>& weights) {
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t x = __float_as_uint(w[u][2 * h]), y = __float_as_uint(w[u][2 * h + 1]);
      const uint32_t low = transpose(lower_halves(x, y)), high = transpose(upper_halves(x, y));
      weights[u][2 * h] = lower_halves(low, high), weights[u][2 * h + 1] = upper_halves(low, high);
    }
}
template <int U>
__device__ __forceinline__ void make_weights(const GeneralSide& side, const GeneralScores<U>& w, const float (&gain)[2],
                                             GeneralWeights<U>& weights) {
  if (side.kind == SideKind::f32)
    make_f32_weights<U>(w, weights);
  else if (side.kind == SideKind::bf16)
    make_half_weights<__nv_bfloat16, U>(w, gain, weights);
  else
    make_half_weights<__half, U>(w, gain, weights);
}

// What a lane knows of a sweep.
struct ValueSweep {
  const uint8_t* data;  // of the piece
  int row, next_row;    // places of token 4 t, and from token to token, in bytes
  int first, each;      // the lane's first coordinate, from that of the piece on, and its number of coordinates
  int coordinates;      // of the piece
  bool odd;             // the unit is the second half of its 32 tokens
  __device__ __forceinline__ const uint8_t* row_of(int k) const { return data + row + k * next_row; }
};

template <int U>
using SweepSums = float[U][4][4];  // mma i: coordinates 2 i and 2 i + 1, for rows 8 u + 2 t and 8 u + 2 t + 1

// Mma i of a sweep.
template <class Half, bool Split, int U>
__device__ __forceinline__ void add_products(const FragmentA& a, const FragmentA& low, const GeneralWeights<U>& weights, int i,
                                             SweepSums<U>& o) {
#pragma unroll
  for (int u = 0; u < U; ++u) {
    multiply<Half>(o[u][i], a, weights[u][0], weights[u][1]);
    multiply<Half>(o[u][i], a, weights[u][2], weights[u][3]);
    if constexpr (Split) multiply<Half>(o[u][i], low, weights[u][0], weights[u][1]);
  }
}

// NaN or infinite values must not reach rows that do not see them: a weight of 0 does not remove them. They become zeros, and `bad` names
// their tokens.
template <SideKind Kind>
__device__ __forceinline__ void remove_bad_values(int each, int token, uint32_t (&x)[2 * kElementBytes<Kind>], uint32_t& bad) {
  using Half = std::conditional_t<Kind == SideKind::bf16, __nv_bfloat16, __half>;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < 2 * kElementBytes<Kind>; ++i) {
    if constexpr (Kind == SideKind::f32) {
      finite &= i >= each || (x[i] & 0x7f800000u) != 0x7f800000u;
    } else {
      const uint32_t wanted = 2 * i + 1 < each ? 3 : 2 * i < each ? 1 : 0;
      finite &= (finite_pair<Half>(x[i]) & wanted) == wanted;
    }
  }
  if (finite) return;
#pragma unroll
  for (uint32_t& word : x) word = 0;
  bad |= 1u << token;
}

// A sweep of values in f32.
template <int U>
__device__ __forceinline__ void add_f32_sweep(const ValueSweep& sweep, int t, bool hides, const GeneralWeights<U>& weights,
                                              uint32_t& bad, SweepSums<U>& o) {
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
    uint32_t x[2][8];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      row_words<SideKind::f32, true>(sweep.row_of(k + e), sweep.first, sweep.each, x[e]);
      if (hides) remove_bad_values<SideKind::f32>(sweep.each, 4 * t + k + e, x[e], bad);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (2 * i >= sweep.each) break;
      FragmentA high, low;
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // both coordinates of the first token, then of the second
        const uint32_t value = x[e / 2][2 * i + e % 2];
        high.x[e] = tf32_part(__uint_as_float(value));
        low.x[e] = tf32_part(__uint_as_float(value) - __uint_as_float(high.x[e]));
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        uint32_t w[2], rest[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float weight = __uint_as_float(weights[u][k + e]);
          w[e] = tf32_part(weight);
          rest[e] = tf32_part(weight - __uint_as_float(w[e]));
        }
        multiply_tf32(o[u][i], high, w[0], w[1]);
        multiply_tf32(o[u][i], high, rest[0], rest[1]);
        multiply_tf32(o[u][i], low, w[0], w[1]);
      }
    }
  }
}

// A sweep of values in f16 or bf16.
template <SideKind Kind, int U>
__device__ __forceinline__ void add_half_sweep(const ValueSweep& sweep, int t, bool hides, const GeneralWeights<U>& weights,
                                               uint32_t& bad, SweepSums<U>& o) {
  using Half = std::conditional_t<Kind == SideKind::bf16, __nv_bfloat16, __half>;
  uint32_t x[4][4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    row_words<Kind, true>(sweep.row_of(k), sweep.first, sweep.each, x[k]);
    if (hides) remove_bad_values<Kind>(sweep.each, 4 * t + k, x[k], bad);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (2 * i >= sweep.each) break;
    const FragmentA a{{lower_halves(x[0][i], x[1][i]), upper_halves(x[0][i], x[1][i]), lower_halves(x[2][i], x[3][i]),
                       upper_halves(x[2][i], x[3][i])}};
    add_products<Half, false, U>(a, a, weights, i, o);
  }
}

// A sweep of codes in bit streams.
template <SideKind Kind, int U>
__device__ __forceinline__ void add_coded_sweep(const LevelReader<Kind, false>& levels, const ValueSweep& sweep,
                                                const GeneralWeights<U>& weights, SweepSums<U>& o) {
  constexpr bool kPairs = Kind == SideKind::pairs || Kind == SideKind::linear, kSplit = Kind == SideKind::split_levels;
  Codes codes[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) codes[k] = codes_at(sweep.row_of(k), sweep.first * levels.field, levels.field);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (2 * i >= sweep.each) break;
    FragmentA a, low;
    uint32_t x[2][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t word = Kind == SideKind::pairs || i < 2 ? codes[k].low : codes[k].high;
      if constexpr (kPairs) {
        x[0][k] = levels.pair(word, Kind == SideKind::pairs ? i : i % 2);
      } else {
        x[0][k] = levels.level(word, i % 2 * 2), x[1][k] = levels.level(word, i % 2 * 2 + 1);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {  // operand e: coordinate e % 2 of tokens 2 (e / 2) and the next
      const int k = e / 2 * 2;
      if constexpr (kPairs) {
        a.x[e] = e % 2 ? upper_halves(x[0][k], x[0][k + 1]) : lower_halves(x[0][k], x[0][k + 1]);
      } else {
        a.x[e] = lower_halves(x[e % 2][k], x[e % 2][k + 1]);
        if constexpr (kSplit) low.x[e] = upper_halves(x[e % 2][k], x[e % 2][k + 1]);
      }
    }
    add_products<__half, kSplit, U>(a, low, weights, i, o);
  }
}

// A sweep of codes in lanes order.
template <SideKind Kind, int U>
__device__ __forceinline__ void add_lanes_sweep(const LevelReader<Kind, true>& levels, int bits, const ValueSweep& sweep, int t,
                                                const GeneralWeights<U>& weights, SweepSums<U>& o) {
  constexpr bool kSplit = Kind == SideKind::split_levels;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (4 * half >= sweep.each) break;
    uint32_t codes[4];
    value_lanes_at(bits, sweep.data, sweep.coordinates, sweep.first + 4 * half, t, sweep.odd, codes);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      FragmentA a, low;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t word = codes[2 * i + e % 2];
        if constexpr (Kind == SideKind::linear) {
          a.x[e] = levels.pair(word, e / 2);
        } else {
          const uint32_t x = levels.level(word, e / 2 * 2), y = levels.level(word, e / 2 * 2 + 1);
          a.x[e] = lower_halves(x, y);
          if constexpr (kSplit) low.x[e] = upper_halves(x, y);
        }
      }
      add_products<__half, kSplit, U>(a, low, weights, 2 * half + i, o);
    }
  }
}

template <int U>
__device__ __forceinline__ void add_sweep(const GeneralSide& side, const uint8_t* memory, const ValueSweep& sweep, int lane,
                                          bool hides, const GeneralWeights<U>& weights, uint32_t& bad, SweepSums<U>& o) {
  with_kind(side, [&]<SideKind Kind, bool Lanes>() {
    if constexpr (Kind == SideKind::f32) {
      add_f32_sweep<U>(sweep, lane % 4, hides, weights, bad, o);
    } else if constexpr (!is_coded(Kind)) {
      add_half_sweep<Kind, U>(sweep, lane % 4, hides, weights, bad, o);
    } else {
      const LevelReader<Kind, Lanes> levels(side, KvRole::v, shared_address(memory) + side.table_at, lane);
      if constexpr (Lanes)
        add_lanes_sweep<Kind, U>(levels, side.bits, sweep, lane % 4, weights, o);
      else
        add_coded_sweep<Kind, U>(levels, sweep, weights, o);
    }
  });
}

}  // namespace weft::cuda
