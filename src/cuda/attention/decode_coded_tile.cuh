// A coded tile and the query rows of a warp: scores by int8 tensor-core products, sums of values by f16 ones.
#pragma once

#include "cuda/attention/decode_coded_queries.cuh"

namespace weft::cuda {

// The table of pairs of levels for the bytes of V, by all warps: see CodedShape.
template <class Shape>
__device__ void fill_pair_table(const CodedSide& side, uint8_t* table, int warp, int lane) {
  const auto pair = [&](int low, int high) {
    return static_cast<uint32_t>(side.halves[low]) | static_cast<uint32_t>(side.halves[high]) << 16;
  };
#pragma unroll 1
  for (int high = warp; high < 16; high += Shape::kWarps) {
#pragma unroll
    for (int low = 0; low < 16; ++low) {
      uint8_t* entry = table + (high * 16 + low) * 256;
      if constexpr (Shape::kVBits == 2)
        reinterpret_cast<uint2*>(entry)[lane] = {pair(low & 3, high & 3), pair(low >> 2, high >> 2)};
      else
        reinterpret_cast<uint32_t*>(entry)[lane] = pair(low, high);
    }
  }
}

// Integer sums of a piece of K and the queries. Items of 4 rows have the sums of both planes of q in `high`.
template <class Shape>
struct KeySums {
  int high[Shape::kRowBlocks][2][4] = {}, low[Shape::kRowBlocks][2][4] = {};

  // One k-step: b0[x] and b1[x] are the bytes of token x, of the lane's first and second four coordinates.
  __device__ __forceinline__ void add_step(const uint2* fragments, int step, const uint32_t (&b0)[4], const uint32_t (&b1)[4]) {
    const auto fragment = [&](int plane, int u) {
      return fragments[((plane * Shape::kSteps + step) * Shape::kRowBlocks + u) * 32];
    };
#pragma unroll
    for (int u = 0; u < Shape::kRowBlocks; ++u) {
      const uint2 q_high = fragment(0, u);
      uint2 q_low = q_high;
      if constexpr (Shape::kRows != 4) q_low = fragment(1, u);
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        const FragmentA a{{b0[2 * y], b0[2 * y + 1], b1[2 * y], b1[2 * y + 1]}};
        multiply_bytes(high[u][y], a, q_high);
        if constexpr (Shape::kRows != 4) multiply_bytes(low[u][y], a, q_low);
      }
    }
  }
  __device__ __forceinline__ float value(int u, int x, int e) const {
    const int c = x % 2 * 2 + e;
    return static_cast<float>(high[u][x / 2][c] * 128 + (Shape::kRows == 4 ? high[u][x / 2][c + 1] : low[u][x / 2][c]));
  }
};

// All k-steps of a piece of K whose wide plane has 2 bits: a word holds the coordinates of two k-steps.
template <class Shape>
__device__ __forceinline__ void multiply_narrow_keys(const uint8_t* k, const CodedSide& side, const uint2* fragments, int piece,
                                                     int t, KeySums<Shape>& sums) {
  using K = typename Shape::K;
#pragma unroll 1
  for (int pair = 0; pair < Shape::kSteps / 2; ++pair) {
    const uint4 four = K::read(k, 4 * pair + t, piece, t);
    const uint32_t words[4] = {four.x, four.y, four.z, four.w};
    uint32_t more[4] = {};
    if constexpr (Shape::kKBits == 3) {
      const uint4 bits = K::read_narrow(k, 2 * pair + t / 2, piece);
      const int shift = t % 2 * 4;
      more[0] = bits.x >> shift, more[1] = bits.y >> shift, more[2] = bits.z >> shift, more[3] = bits.w >> shift;
    }
    uint32_t even0[4], even1[4], odd0[4], odd1[4];
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const uint32_t even = nibbles<Shape::kKBits, 0>(words[x], more[x]), odd = nibbles<Shape::kKBits, 1>(words[x], more[x]);
      even0[x] = permute(side.table[0], side.table[1], even);
      even1[x] = permute(side.table[0], side.table[1], even >> 16);
      odd0[x] = permute(side.table[0], side.table[1], odd);
      odd1[x] = permute(side.table[0], side.table[1], odd >> 16);
    }
    sums.add_step(fragments, 2 * pair, even0, even1);
    sums.add_step(fragments, 2 * pair + 1, odd0, odd1);
  }
}

// The same for codes of 4 and 8 bits.
template <class Shape>
__device__ __forceinline__ void multiply_wide_keys(const uint8_t* k, const CodedSide& side, const uint2* fragments, int piece,
                                                   int t, KeySums<Shape>& sums) {
  using K = typename Shape::K;
  constexpr int kSteps = Shape::kSteps;
#pragma unroll kSteps <= 4 ? kSteps : 2
  for (int step = 0; step < kSteps; ++step) {
    uint32_t b0[4], b1[4];
    if constexpr (Shape::kKBits == 4) {
      const uint4 four = K::read(k, 4 * step + t, piece, t);
      look_up_16(side.table, four.x, b0[0], b1[0]);
      look_up_16(side.table, four.y, b0[1], b1[1]);
      look_up_16(side.table, four.z, b0[2], b1[2]);
      look_up_16(side.table, four.w, b0[3], b1[3]);
    } else {
      const uint4 x = K::read(k, 8 * step + t, piece, t), y = K::read(k, 8 * step + 4 + t, piece, t);
      constexpr uint32_t kFlip = 0x80808080u;
      b0[0] = x.x ^ kFlip, b0[1] = x.y ^ kFlip, b0[2] = x.z ^ kFlip, b0[3] = x.w ^ kFlip;
      b1[0] = y.x ^ kFlip, b1[1] = y.y ^ kFlip, b1[2] = y.z ^ kFlip, b1[3] = y.w ^ kFlip;
    }
    sums.add_step(fragments, step, b0, b1);
  }
}

// Scores of the tile at `k` and the queries at `fragments`.
template <class Shape>
__device__ __forceinline__ void score_keys(const uint8_t* k, const CodedSide& side, const uint2* fragments,
                                           const LaneScales<Shape>& rows, int lane, typename Shape::Scores& s) {
  using K = typename Shape::K;
  const int j = lane / 4, t = lane % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    KeySums<Shape> sums;
    const int piece = Shape::V::quad(j, h);
    if constexpr (K::kWide == 2)
      multiply_narrow_keys<Shape>(k, side, fragments, piece, t, sums);
    else
      multiply_wide_keys<Shape>(k, side, fragments, piece, t, sums);
    float gain[4];
    read_gains(k + K::kCodes, piece, gain);
#pragma unroll
    for (int u = 0; u < Shape::kRowBlocks; ++u)
#pragma unroll
      for (int x = 0; x < 4; ++x)
#pragma unroll
        for (int e = 0; e < Shape::kRowsPerLane; ++e)
          s[u][h][x][e] = fmaf(fmaf(sums.value(u, x, e), rows.factor[u][e], rows.offset[u][e]), gain[x], rows.mean[u][e]);
  }
}

// V's words of all tiles of 2- and 3-bit codes hold the tokens of both halves h; wider codes take the halves in turn.
template <class Shape>
inline constexpr int kValueTurns = Shape::V::kWide == 2 ? 1 : 2;

// Four coordinates of V for the lane's tokens: pairs[coordinate][pair of tokens], as f16. `b`: which 32 coordinates; `group`: which
// half of the tokens, among the halves that are in shared memory.
template <class Shape>
__device__ __forceinline__ void decode_values(const uint8_t* codes, const uint8_t* table, const CodedSide& side, int b, int group,
                                              int lane, uint32_t (&pairs)[4][8 / kValueTurns<Shape>]) {
  using V = typename Shape::V;
  constexpr int VBits = Shape::kVBits;
  const int j = lane / 4, t = lane % 4;
  if constexpr (VBits == 8) {
    const uint4 f = V::read(codes, 8 * group + 2 * t, 8 * b + j, t), g = V::read(codes, 8 * group + 2 * t + 1, 8 * b + j, t);
    const uint32_t near[4] = {f.x, f.y, f.z, f.w}, far[4] = {g.x, g.y, g.z, g.w};
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      widen(permute(near[x], far[x], 0x5140u), pairs[x][0], pairs[x][1]);
      widen(permute(near[x], far[x], 0x7362u), pairs[x][2], pairs[x][3]);
    }
  } else {
    const uint4 f = V::read(codes, kValueTurns<Shape> == 2 ? 4 * group + t : t, 8 * b + j, t);
    const uint32_t words[4] = {f.x, f.y, f.z, f.w};
    uint32_t more[4] = {};
    if constexpr (VBits == 3) {
      const uint4 bits = V::read_narrow(codes, t / 2, 8 * b + j);
      const int shift = t % 2 * 4;
      more[0] = bits.x >> shift, more[1] = bits.y >> shift, more[2] = bits.z >> shift, more[3] = bits.w >> shift;
    }
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      if constexpr (Shape::kPairTable && VBits == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          pairs[x][i] = *reinterpret_cast<const uint32_t*>(table + permute(words[x], lane * 4, 0x5504u + 16 * i));
      } else if constexpr (Shape::kPairTable && VBits == 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint2 four = *reinterpret_cast<const uint2*>(table + permute(words[x], lane * 8, 0x5504u + 16 * i));
          pairs[x][i] = four.x, pairs[x][4 + i] = four.y;
        }
      } else if constexpr (Shape::kPairTable) {
        const uint32_t even = nibbles<VBits, 0>(words[x], more[x]), odd = nibbles<VBits, 1>(words[x], more[x]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          pairs[x][i] = *reinterpret_cast<const uint32_t*>(table + permute(even, lane * 4, 0x5504u + 16 * i));
          pairs[x][4 + i] = *reinterpret_cast<const uint32_t*>(table + permute(odd, lane * 4, 0x5504u + 16 * i));
        }
      } else if constexpr (VBits == 4) {
        uint32_t low, high;
        look_up_16(side.table, words[x], low, high);
        widen(low, pairs[x][0], pairs[x][1]);
        widen(high, pairs[x][2], pairs[x][3]);
      } else {
        const uint32_t even = nibbles<VBits, 0>(words[x], more[x]), odd = nibbles<VBits, 1>(words[x], more[x]);
        widen(permute(side.table[0], side.table[1], even), pairs[x][0], pairs[x][1]);
        widen(permute(side.table[0], side.table[1], even >> 16), pairs[x][2], pairs[x][3]);
        widen(permute(side.table[0], side.table[1], odd), pairs[x][4], pairs[x][5]);
        widen(permute(side.table[0], side.table[1], odd >> 16), pairs[x][6], pairs[x][7]);
      }
    }
  }
}

// Adds the values of the tile at `v` to o, by weights of pairs of tokens, which it uses up. Tokens x and x + 1 of half h, for
// coordinates 2 y and 2 y + 1, are the first and second pair of the operands. `load_second_half` brings the second half of the
// codes where a stage holds only one.
template <class Shape, class LoadSecondHalf>
__device__ __forceinline__ void add_values(const uint8_t* v, const uint8_t* table, const CodedSide& side, int lane,
                                           typename Shape::Weights& weights, typename Shape::Values& o,
                                           LoadSecondHalf&& load_second_half) {
  constexpr int U = Shape::kRowBlocks, kTurns = kValueTurns<Shape>;
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    if (Shape::kVHalves == 2 && turn == 1) {
      __syncwarp();
      load_second_half();
      __syncwarp();
    }
#pragma unroll
    for (int b = 0; b < Shape::kD / 32; ++b) {
      uint32_t pairs[4][8 / kTurns];
      decode_values<Shape>(v + Shape::V::kGains, table, side, b, Shape::kVHalves == 2 ? 0 : turn, lane, pairs);
#pragma unroll
      for (int z = 0; z < 4 / kTurns; ++z)
#pragma unroll
        for (int y = 0; y < 2; ++y) {
          const FragmentA a{{pairs[2 * y][2 * z], pairs[2 * y + 1][2 * z], pairs[2 * y][2 * z + 1], pairs[2 * y + 1][2 * z + 1]}};
#pragma unroll
          for (int u = 0; u < U; ++u)
            multiply<__half>(o[u][b][y], a, weights[u][z / 2][z % 2 * 2], weights[u][z / 2][z % 2 * 2 + 1]);
        }
    }
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int x = 0; x < 4; ++x) weights[u][0][x] = weights[u][1][x];
  }
}

}  // namespace weft::cuda
