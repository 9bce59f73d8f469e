// Device functions that the prepare kernels share: loads of rows and gates, and the inverse X. See prefill.cuh.
//
// X is computed in 4 x 4 blocks of 16 x 16 tokens. One warp computes block column b and holds it transposed in accumulators, from
// the diagonal block down. With L = tril_{-1}(beta_i rk_i rk_j k_i.k_j):  X_ab^T = -(sum_{b <= m < a} X_mb^T L_am^T) X_aa^T.
//
// A split operand is a number as the sum of two 16-bit numbers, its high and its low half.
#pragma once

#include <cstddef>

#include "common/conventions.h"
#include "cuda/common/elements.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/delta/gate_math.cuh"
#include "cuda/delta/prefill.cuh"

namespace weft::cuda {

inline constexpr int kPrepareThreads = 128, kBlock = 16, kBlocks = kChunk / kBlock;
inline constexpr int kGateBatch = kPrepareThreads / 32;  // value heads whose gates are loaded together, one per warp
inline constexpr int kDiagonalPitch = kBlock;
inline constexpr int kBlockElements = kBlock * kBlock, kBlockBytes = kBlockElements * 2;
inline constexpr int kInverseBytes = 2 * kBlocks * kBlockBytes;  // diagonal blocks of X, split
inline constexpr float kLog2e = 1.4426950408889634f;
// A decay below this is 0 in f32. Unlike minus infinity, the number can be subtracted from itself.
inline constexpr float kMinLogDecay = -300.0f;

using Tile16 = Tile<kBlock>;

// Blocks of K K^T below the diagonal blocks: six.
inline constexpr int kLowerBlocks = kBlocks * (kBlocks - 1) / 2;
__device__ constexpr int lower_block(int row, int column) { return row * (row - 1) / 2 + column; }

__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Loads the rows of a chunk of keys or queries with cp.async, into panels of 64 channels.
template <int KP>
__device__ inline void load_rows(const StridedView& t, const Chunk& chunk, int64_t head, int K, uint16_t* tile) {
  const uint32_t base = shared_address(tile);
  constexpr int kPieces = KP / 8;
  const int piece = threadIdx.x % kPieces, length = chunk.length();
  const uint16_t* from = static_cast<const uint16_t*>(t.data) + chunk.begin * t.strides[0] + head * t.strides[1] + piece * 8;
  const uint32_t to = base + (piece / 8) * (kChunk * 128);
#pragma unroll 4
  for (int row = threadIdx.x / kPieces; row < kChunk; row += kPrepareThreads / kPieces) {
    const bool there = row < length && piece * 8 < K;
    cp_async(to + Tile64::offset(row, piece % 8), there ? from + row * t.strides[0] : static_cast<const uint16_t*>(t.data), there);
  }
}

// Writes two neighbours as split numbers, `at` bytes from the beginning of `high` and `low`.
template <class Half>
__device__ inline void store_split(uint16_t* high, uint16_t* low, uint32_t at, float x, float y) {
  const uint32_t pair = pack<Half>(x, y);
  const float2 whole = unpack<Half>(pair);
  *reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(high) + at) = pair;
  *reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(low) + at) = pack<Half>(x - whole.x, y - whole.y);
}

// Stores neighbours (i, c), (i, c + 1) of K K^T, with c / 16 <= i / 16: diagonal blocks in f32, the blocks below split.
template <class Half, class Shared>
__device__ inline void store_kk(Shared& s, int i, int c, float x, float y) {
  if (i / kBlock == c / kBlock) {
    *reinterpret_cast<float2*>(&s.diagonal[i][c % kBlock]) = float2{x, y};
    return;
  }
  const uint32_t block = static_cast<uint32_t>(lower_block(i / kBlock, c / kBlock)) * kBlockBytes;
  store_split<Half>(s.kk[0], s.kk[1], block + Tile16::offset(i % kBlock, c % kBlock / 8) + c % 8 * 2, x, y);
}

// Gates of a chunk and value head as loaded, before any conversion waits for the loads: `Each` tokens per lane of a warp.
template <int Each = 2>
struct RawGates {
  uint32_t decays[Each], strengths[Each];
  float a_log = 0, bias = 0;

  __device__ void load(const GateParams& gates, const Chunk& chunk, int64_t hv, int lane) {
    const StridedView &decay = gates.decay, &strength = gates.strength;
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      const int64_t t = min(chunk.begin + lane * Each + i, chunk.end - 1);
      decays[i] = load_bits(decay, t * decay.strides[0] + hv * decay.strides[1]);
      strengths[i] = load_bits(strength, t * strength.strides[0] + hv * strength.strides[1]);
    }
    if (gates.decay_form != DecayForm::raw) return;
    a_log = cuda::load(gates.a_log.data, gates.a_log.dtype, hv * gates.a_log.strides[0]);
    bias = cuda::load(gates.dt_bias.data, gates.dt_bias.dtype, hv * gates.dt_bias.strides[0]);
  }
};

// Computes the prefix sums G of the log decay, in base 2, and the write strengths beta of a value head; by one warp.
template <int Each>
__device__ inline void finish_gates(float* G, float* beta, const GateParams& gates, const Chunk& chunk, int lane,
                                    const RawGates<Each>& in) {
  float g[Each], upto = 0;
#pragma unroll
  for (int i = 0; i < Each; ++i) {
    const int row = lane * Each + i;
    const bool there = row < chunk.length();
    const float x = bits_to_float(in.decays[i], gates.decay.dtype), y = bits_to_float(in.strengths[i], gates.strength.dtype);
    const float log = gates.decay_form == DecayForm::raw      ? log_decay(x, in.a_log, in.bias)
                      : gates.decay_form == DecayForm::linear ? logf(x)
                                                              : x;
    g[i] = there ? fmaxf(log, kMinLogDecay) : 0.0f;
    upto += g[i];
    beta[row] = !there ? 0.0f : gates.raw_strength ? gates.beta_scale * sigmoid(y) : y;
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, upto, step);
    if (lane >= step) upto += other;
  }
#pragma unroll
  for (int i = Each - 1; i >= 0; --i) {
    G[lane * Each + i] = upto * kLog2e;
    upto -= g[i];
  }
}

__device__ inline void read_gates(float* G, float* beta, const GateParams& gates, const Chunk& chunk, int64_t hv, int lane) {
  RawGates<> in;
  in.load(gates, chunk, hv, lane);
  finish_gates(G, beta, gates, chunk, lane, in);
}

// Forward substitution step: the dot product of the first `count` elements of a row and of x.
__device__ inline float dot_prefix(const float* row, const float (&x)[kBlock], int count) {
  float even = 0, odd = 0;
#pragma unroll
  for (int m = 0; m < count; m += 4) {
    const float4 four = *reinterpret_cast<const float4*>(row + m);
    even = fmaf(four.x, x[m], even);
    if (m + 1 < count) odd = fmaf(four.y, x[m + 1], odd);
    if (m + 2 < count) even = fmaf(four.z, x[m + 2], even);
    if (m + 3 < count) odd = fmaf(four.w, x[m + 3], odd);
  }
  return even + odd;
}

// Writes eight neighbours as split numbers.
template <class Half>
__device__ inline void store_eight(char* high_at, char* low_at, const float* x) {
  uint32_t high[4], low[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    high[i] = pack<Half>(x[2 * i], x[2 * i + 1]);
    const float2 whole = unpack<Half>(high[i]);
    low[i] = pack<Half>(x[2 * i] - whole.x, x[2 * i + 1] - whole.y);
  }
  *reinterpret_cast<uint4*>(high_at) = uint4{high[0], high[1], high[2], high[3]};
  *reinterpret_cast<uint4*>(low_at) = uint4{low[0], low[1], low[2], low[3]};
}

// Inverts a diagonal block by forward substitution in f32, one lane per column. `inverse` receives the blocks one after another,
// split.
template <class Half, class Shared>
__device__ inline void invert_diagonal(const Shared& s, char* inverse, const float* beta, int block, int column) {
  const int first = block * kBlock;
  // The swizzle of Tile16 alternates between two addresses every four rows.
  char* const to[2] = {inverse + block * kBlockBytes + Tile16::offset(0, column / 8) + column % 8 * 2,
                       inverse + block * kBlockBytes + Tile16::offset(4, column / 8) - 4 * Tile16::kRowBytes + column % 8 * 2};
  float x[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    x[i] = (i == column ? 1.0f : 0.0f) - beta[first + i] * dot_prefix(s.diagonal[first + i], x, i);
    const Half high = from_float<Half>(x[i]);
    char* const at = to[i / 4 % 2] + i * Tile16::kRowBytes;
    *reinterpret_cast<Half*>(at) = high;
    *reinterpret_cast<Half*>(at + kInverseBytes / 2) = from_float<Half>(x[i] - to_float(high));
  }
}

// c += a b of split operands, 16 x 16 x 16, with b in shared memory. The product of the low halves is below f32 precision.
template <class Half>
__device__ inline void multiply_split_smem(float (&c)[2][4], const FragmentA& high, const FragmentA& low, uint32_t b_high,
                                           uint32_t b_low) {
  uint32_t b[4];
  ldmatrix(b, b_low);
  multiply<Half>(c[0], high, b[0], b[1]);
  multiply<Half>(c[1], high, b[2], b[3]);
  ldmatrix(b, b_high);
  multiply<Half>(c[0], low, b[0], b[1]);
  multiply<Half>(c[1], low, b[2], b[3]);
  multiply<Half>(c[0], high, b[0], b[1]);
  multiply<Half>(c[1], high, b[2], b[3]);
}

// Block column b of X, transposed: x[n] has 16 columns of X as rows, by the 16 tokens of block b + n.
struct Column {
  float x[kBlocks][2][4];
  FragmentA high[kBlocks], low[kBlocks];
};

template <class Half, class Shared>
__device__ inline void invert_column(const Shared& s, const char* inverse_of, const float* beta, int b, int lane, Column& column) {
  const LdmatrixLane at(lane);
  const int t = lane % 4;
  const uint32_t b_offset = Tile16::offset(at.row(), at.piece()),
                 kk[2] = {shared_address(s.kk[0]) + b_offset, shared_address(s.kk[1]) + b_offset};
  const uint32_t inverse = shared_address(inverse_of);
  {
    const uint32_t from = inverse + b * kBlockBytes + Tile16::offset(at.across_piece() * 8 + at.r, at.matrix & 1);
    ldmatrix_trans(column.high[0].x, from);
    ldmatrix_trans(column.low[0].x, from + kInverseBytes / 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 high = unpack<Half>(column.high[0].x[i]), low = unpack<Half>(column.low[0].x[i]);
      column.x[0][i / 2][i % 2 * 2] = high.x + low.x;
      column.x[0][i / 2][i % 2 * 2 + 1] = high.y + low.y;
    }
  }
#pragma unroll
  for (int n = 1; n < kBlocks; ++n) {
    if (b + n >= kBlocks) break;
    const int a = b + n;
    const uint32_t row = static_cast<uint32_t>(lower_block(a, b)) * kBlockBytes;
    float sum[2][4] = {};
#pragma unroll
    for (int m = 0; m < n; ++m)
      multiply_split_smem<Half>(sum, column.high[m], column.low[m], kk[0] + row + m * kBlockBytes, kk[1] + row + m * kBlockBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 strength = *reinterpret_cast<const float2*>(&beta[a * kBlock + half * 8 + 2 * t]);
      sum[half][0] *= -strength.x;
      sum[half][1] *= -strength.y;
      sum[half][2] *= -strength.x;
      sum[half][3] *= -strength.y;
    }
    FragmentA high, low;
    split<Half>(sum[0], sum[1], high, low);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) column.x[n][i][e] = 0.0f;
    multiply_split_smem<Half>(column.x[n], high, low, inverse + b_offset + a * kBlockBytes,
                              inverse + b_offset + a * kBlockBytes + kInverseBytes / 2);
    split<Half>(column.x[n][0], column.x[n][1], column.high[n], column.low[n]);
  }
}

// Writes the factors a_i, c_i and, for i = 0, e^(G_C) of a chunk and value head.
__device__ inline void write_factors(const Prefill& p, char* factors_at, const float* G, const float* rk, const float* rq, int i) {
  float* factors = reinterpret_cast<float*>(factors_at);
  const float decay = exp2_approx(G[i]);
  factors[i] = decay * rk[i];
  factors[kChunk + i] = p.scale * rq[i] * decay;
  if (i == 0) factors[2 * kChunk] = exp2_approx(G[kChunk - 1]);
}

}  // namespace weft::cuda
