// Device functions of the staged prefill's prepare kernel for f32 inputs: T, M and R from L and P in f32. See prefill_staged.cuh.
//
// With correlated keys and beta near 2, sums over T nearly cancel, and an error of L grows with the number of tokens. Two bf16 numbers, with
// an error of 4e-6, are too few there. T is therefore solved in f32, and products take three bf16 numbers of each operand.
#pragma once

#include "cuda/delta/prefill_staged_operands.cuh"

namespace weft::cuda {

inline constexpr int kExactParts = 3;
inline constexpr int kExactPitch = kChunk + 4;  // rows of 16 bytes more than a multiple of 128 have no bank conflicts

// Solves column j of (I + diag(beta) L) T = diag(beta) by forward substitution, and stores it as row j of `tt`; by thread j. Row m of `lt` is
// column m of L.
__device__ __forceinline__ void solve_column(const float (*lt)[kExactPitch], const float* beta, float (*tt)[kExactPitch], int j) {
  float* const mine = tt[j];
  const int first = j / 32 * 32;  // the warp's columns are 0 above
#pragma unroll 1
  for (int row = 0; row < kChunk; row += kBlock) {
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) x[i] = 0.0f;
#pragma unroll 1
    for (int m = first; m < row; m += 4) {
      const float4 four = *reinterpret_cast<const float4*>(&mine[m]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float factor = e == 0 ? four.x : e == 1 ? four.y : e == 2 ? four.z : four.w;
#pragma unroll
        for (int i = 0; i < kBlock; i += 4) {
          const float4 l = *reinterpret_cast<const float4*>(&lt[m + e][row + i]);
          x[i] = fmaf(l.x, factor, x[i]);
          x[i + 1] = fmaf(l.y, factor, x[i + 1]);
          x[i + 2] = fmaf(l.z, factor, x[i + 2]);
          x[i + 3] = fmaf(l.w, factor, x[i + 3]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kBlock; ++m) {
      x[m] = beta[row + m] * ((row + m == j ? 1.0f : 0.0f) - x[m]);
#pragma unroll
      for (int i = m / 4 * 4; i < kBlock; i += 4) {
        const float4 l = *reinterpret_cast<const float4*>(&lt[row + m][row + i]);
        if (i > m) x[i] = fmaf(l.x, x[m], x[i]);
        if (i + 1 > m) x[i + 1] = fmaf(l.y, x[m], x[i + 1]);
        if (i + 2 > m) x[i + 2] = fmaf(l.z, x[m], x[i + 2]);
        if (i + 3 > m) x[i + 3] = fmaf(l.w, x[m], x[i + 3]);
      }
    }
#pragma unroll
    for (int i = 0; i < kBlock; i += 4) *reinterpret_cast<float4*>(&mine[row + i]) = float4{x[i], x[i + 1], x[i + 2], x[i + 3]};
  }
}

// c[nt] += left right, with right operands of two numbers each: right[nt][part].
__device__ __forceinline__ void multiply_exact(float (&c)[4], const Operand<kExactParts>& left, const uint32_t (&low)[kExactParts],
                                               const uint32_t (&high)[kExactParts]) {
#pragma unroll
  for (int order = kExactParts - 1; order >= 0; --order)
#pragma unroll
    for (int i = 0; i <= order; ++i) multiply<Split>(c, left.part[i], low[order - i], high[order - i]);
}

// M = T^T keys for 16 channels, keys[token][channel].
__device__ __forceinline__ void write_m_exact(const float (*tt)[kExactPitch], const float* keys, int pitch, char* m_at, int matrix,
                                              int group, int lane) {
  const int g = lane / 4, t = lane % 4;
  uint32_t low[kBlocks][2][kExactParts], high[kBlocks][2][kExactParts];
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
#pragma unroll
    for (int nt = 0; nt < 2; ++nt) {
      const float* at = keys + (n * kBlock + 2 * t) * pitch + group * 16 + nt * 8 + g;
      split_pair<kExactParts>(at[0], at[pitch], low[n][nt]);
      split_pair<kExactParts>(at[8 * pitch], at[9 * pitch], high[n][nt]);
    }
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    float sum[2][4] = {};
#pragma unroll
    for (int n = m; n < kBlocks; ++n) {
      Operand<kExactParts> a;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = *reinterpret_cast<const float2*>(&tt[m * kBlock + g + i % 2 * 8][n * kBlock + 2 * t + i / 2 * 8]);
        uint32_t parts[kExactParts];
        split_pair<kExactParts>(x.x, x.y, parts);
#pragma unroll
        for (int part = 0; part < kExactParts; ++part) a.part[part].x[i] = parts[part];
      }
#pragma unroll
      for (int nt = 0; nt < 2; ++nt) multiply_exact(sum[nt], a, low[n][nt], high[n][nt]);
    }
#pragma unroll
    for (int nt = 0; nt < 2; ++nt)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        store_pair(m_at + group / 4 * kPanel, matrix, 2, false, Tile64::offset(m * kBlock + g + 8 * h, group % 4 * 2 + nt) + t * 4,
                   sum[nt][2 * h], sum[nt][2 * h + 1]);
  }
}

// Block row a of R = P T, on and below the diagonal block.
__device__ __forceinline__ void write_r_exact(const float (*tt)[kExactPitch], const Rows& rows, char* r, const Scores& scores) {
  Operand<kExactParts> p[kBlocks];
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t parts[kExactParts];
      split_pair<kExactParts>(scores.p[n][i / 2][i % 2 * 2], scores.p[n][i / 2][i % 2 * 2 + 1], parts);
#pragma unroll
      for (int part = 0; part < kExactParts; ++part) p[n].part[part].x[i] = parts[part];
    }
#pragma unroll
  for (int column = 0; column < kBlocks; ++column) {
    if (column > rows.a) break;
    const int b = rows.a - column;
    float sum[2][4] = {};
#pragma unroll
    for (int n = 0; n <= column; ++n)
#pragma unroll
      for (int nt = 0; nt < 2; ++nt) {
        const float* at = &tt[b * kBlock + nt * 8 + rows.g][(rows.a - n) * kBlock + 2 * rows.t];
        uint32_t low[kExactParts], high[kExactParts];
        split_pair<kExactParts>(at[0], at[1], low);
        split_pair<kExactParts>(at[8], at[9], high);
        multiply_exact(sum[nt], p[n], low, high);
      }
#pragma unroll
    for (int nt = 0; nt < 2; ++nt)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        store_pair(r, kPanel, 2, false, Tile64::offset(rows.a * kBlock + rows.g + 8 * h, b * 2 + nt) + rows.t * 4, sum[nt][2 * h],
                   sum[nt][2 * h + 1]);
  }
}

}  // namespace weft::cuda
