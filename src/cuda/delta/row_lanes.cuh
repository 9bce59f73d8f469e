// Sums over the eight lanes that share a row of a state, in the one order that all kernels of the gated delta rule use.
#pragma once

#include "common/conventions.h"

namespace weft::cuda {

inline constexpr int kLanes = 8;  // per row

__device__ inline float sum_row(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  x += __shfl_xor_sync(0xffffffffu, x, 2);
  return x + __shfl_xor_sync(0xffffffffu, x, 4);
}

// The same for several rows, interleaved.
template <int R>
__device__ inline void sum_rows(float (&x)[R]) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2)
#pragma unroll
    for (int r = 0; r < R; ++r) x[r] += __shfl_xor_sync(0xffffffffu, x[r], step);
}

// 1 / sqrt(sum x^2 + kKeyNormEps) of a key or query spread over the lanes of a row.
template <int E>
__device__ inline float inverse_norm(const float (&x)[E]) {
  float sum = 0;
#pragma unroll
  for (int e = 0; e < E; ++e) sum = fmaf(x[e], x[e], sum);
  float root;  // exact to two units in the last place; kKeyNormEps keeps the sum above the denormals that ftz flushes
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(sum_row(sum) + kKeyNormEps<float>));
  return root;
}

}  // namespace weft::cuda
