// A tile in lanes order and the query rows of a warp: its scores by integer products, its values' sums by f16 ones.
#pragma once

#include "cuda/attention/decode_coded_shape.cuh"

namespace weft::cuda {

// What makes scores of integer products, of the rows of a lane.
template <class Shape>
struct LaneScales {
  float factor[Shape::kRowBlocks][Shape::kRowsPerLane], offset[Shape::kRowBlocks][Shape::kRowsPerLane],
      mean[Shape::kRowBlocks][Shape::kRowsPerLane];
};

// The pairs of levels that the bytes of V stand for, by all warps: see CodedShape.
template <int VBits, class Shape>
__device__ void fill_pairs(const CodedSide& side, uint8_t* table, int warp, int lane) {
  const auto pair = [&](int low, int high) {
    return static_cast<uint32_t>(side.halves[low]) | static_cast<uint32_t>(side.halves[high]) << 16;
  };
#pragma unroll 1
  for (int high = warp; high < 16; high += Shape::kWarps) {
#pragma unroll
    for (int low = 0; low < 16; ++low) {
      uint8_t* entry = table + (high * 16 + low) * 256;
      if constexpr (VBits == 2)
        reinterpret_cast<uint2*>(entry)[lane] = {pair(low & 3, high & 3), pair(low >> 2, high >> 2)};
      else
        reinterpret_cast<uint32_t*>(entry)[lane] = pair(low, high);
    }
  }
}

// Scores of the tile at `k`, s[u][h][x][e] that of token x of piece quad(j, h) for row e of the lane's rows u, from the queries at
// `fragments`.
template <int KBits, int VBits, int D, int Rows, class Shape = CodedShape<KBits, VBits, D, Rows>>
__device__ void score_keys(const uint8_t* k, const CodedSide& side, const uint2* fragments, const LaneScales<Shape>& rows, int lane,
                           float (&s)[Shape::kRowBlocks][2][4][Shape::kRowsPerLane]) {
  using K = typename Shape::K;
  using V = typename Shape::V;
  constexpr int kSteps = Shape::kSteps, U = Shape::kRowBlocks, E = Shape::kRowsPerLane;
  const int j = lane / 4, t = lane % 4;
  const auto fragment = [&](int plane, int step, int u) { return fragments[((plane * kSteps + step) * U + u) * 32]; };
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int high[U][2][4] = {}, low[U][2][4] = {};  // 4 rows have both in `high`
    const int quad = V::quad(j, h);
    const auto step_of = [&](int step, const uint32_t(&b0)[4], const uint32_t(&b1)[4]) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const uint2 q_high = fragment(0, step, u);
        uint2 q_low = q_high;
        if constexpr (Rows != 4) q_low = fragment(1, step, u);
#pragma unroll
        for (int y = 0; y < 2; ++y) {
          const FragmentA a{{b0[2 * y], b0[2 * y + 1], b1[2 * y], b1[2 * y + 1]}};
          multiply_bytes(high[u][y], a, q_high);
          if constexpr (Rows != 4) multiply_bytes(low[u][y], a, q_low);
        }
      }
    };
    if constexpr (K::kWide == 2) {
#pragma unroll 1
      for (int pair = 0; pair < kSteps / 2; ++pair) {
        const uint4 four = K::read(k, 4 * pair + t, quad, t);
        const uint32_t words[4] = {four.x, four.y, four.z, four.w};
        uint32_t more[4] = {};
        if constexpr (KBits == 3) {
          const uint4 bits = K::read_narrow(k, 2 * pair + t / 2, quad);
          const int shift = t % 2 * 4;
          more[0] = bits.x >> shift, more[1] = bits.y >> shift, more[2] = bits.z >> shift, more[3] = bits.w >> shift;
        }
        uint32_t even0[4], even1[4], odd0[4], odd1[4];
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          const uint32_t even = nibbles<KBits, 0>(words[x], more[x]), odd = nibbles<KBits, 1>(words[x], more[x]);
          even0[x] = permute(side.table[0], side.table[1], even);
          even1[x] = permute(side.table[0], side.table[1], even >> 16);
          odd0[x] = permute(side.table[0], side.table[1], odd);
          odd1[x] = permute(side.table[0], side.table[1], odd >> 16);
        }
        step_of(2 * pair, even0, even1);
        step_of(2 * pair + 1, odd0, odd1);
      }
    } else {
#pragma unroll kSteps <= 4 ? kSteps : 2
      for (int step = 0; step < kSteps; ++step) {
        uint32_t b0[4], b1[4];
        if constexpr (KBits == 4) {
          const uint4 four = K::read(k, 4 * step + t, quad, t);
          look_up_16(side.table, four.x, b0[0], b1[0]);
          look_up_16(side.table, four.y, b0[1], b1[1]);
          look_up_16(side.table, four.z, b0[2], b1[2]);
          look_up_16(side.table, four.w, b0[3], b1[3]);
        } else {
          const uint4 x = K::read(k, 8 * step + t, quad, t), y = K::read(k, 8 * step + 4 + t, quad, t);
          constexpr uint32_t kFlip = 0x80808080u;
          b0[0] = x.x ^ kFlip, b0[1] = x.y ^ kFlip, b0[2] = x.z ^ kFlip, b0[3] = x.w ^ kFlip;
          b1[0] = y.x ^ kFlip, b1[1] = y.y ^ kFlip, b1[2] = y.z ^ kFlip, b1[3] = y.w ^ kFlip;
        }
        step_of(step, b0, b1);
      }
    }
    float gain[4];
    read_gains(k + K::kCodes, quad, gain);
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int x = 0; x < 4; ++x)
#pragma unroll
        for (int e = 0; e < E; ++e) {
          const int c = x % 2 * 2 + e;
          const auto value = static_cast<float>(high[u][x / 2][c] * 128 + (Rows == 4 ? high[u][x / 2][c + 1] : low[u][x / 2][c]));
          s[u][h][x][e] = fmaf(fmaf(value, rows.factor[u][e], rows.offset[u][e]), gain[x], rows.mean[u][e]);
        }
  }
}

// Adds values of the tile at `v` to o, by weights of pairs of tokens, which it uses up. Tokens x and x + 1 of half h, for coordinates 2 y
// and 2 y + 1, are the first and second pair of the operands. The halves take turns where a word of V holds but one; `second_half`
// brings the codes of the second where there is room for but one of them.
template <int KBits, int VBits, int D, int Rows, class SecondHalf, class Shape = CodedShape<KBits, VBits, D, Rows>>
__device__ void add_values(const uint8_t* v, const uint8_t* table, const CodedSide& side, int lane,
                           uint32_t (&weights)[Shape::kRowBlocks][2][4], float (&o)[Shape::kRowBlocks][D / 32][2][4],
                           SecondHalf&& second_half) {
  using V = typename Shape::V;
  constexpr int U = Shape::kRowBlocks;
  const int j = lane / 4, t = lane % 4;
  constexpr int kTurns = V::kWide == 2 ? 1 : 2;
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    if (Shape::kVHalves == 2 && turn == 1) {
      __syncwarp();
      second_half();
      __syncwarp();
    }
    const uint8_t* codes = v + V::kGains;
    const int group = Shape::kVHalves == 2 ? 0 : turn;  // of halves here
#pragma unroll
    for (int b = 0; b < D / 32; ++b) {
      uint32_t pairs[4][8 / kTurns];  // coordinate, then pairs of tokens as f16
      if constexpr (VBits == 8) {
        const uint4 f = V::read(codes, 8 * group + 2 * t, 8 * b + j, t), g = V::read(codes, 8 * group + 2 * t + 1, 8 * b + j, t);
        const uint32_t near[4] = {f.x, f.y, f.z, f.w}, far[4] = {g.x, g.y, g.z, g.w};
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          widen(permute(near[x], far[x], 0x5140u), pairs[x][0], pairs[x][1]);
          widen(permute(near[x], far[x], 0x7362u), pairs[x][2], pairs[x][3]);
        }
      } else {
        const uint4 f = V::read(codes, kTurns == 2 ? 4 * group + t : t, 8 * b + j, t);
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
