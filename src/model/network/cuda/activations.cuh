// Device functions that the row kernels and the fused GEMM share.
#pragma once

namespace weft::model::cuda {

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }
__device__ inline float swish(float gate, float up) { return gate * sigmoid(gate) * up; }

// Clamps to the largest finite f16 number.
__device__ inline float clamp_to_f16(float x) { return fminf(fmaxf(x, -65504.0f), 65504.0f); }

__device__ inline float sum_warp(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

}  // namespace weft::model::cuda
