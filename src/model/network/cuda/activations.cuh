// Arithmetic that the kernels of rows and those of short products share.
#pragma once

namespace weft::model::cuda {

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }
__device__ inline float swish(float gate, float up) { return gate * sigmoid(gate) * up; }

// f16 has no room for what passes 65504: it stays there.
__device__ inline float in_half(float x) { return fminf(fmaxf(x, -65504.0f), 65504.0f); }

__device__ inline float sum_warp(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

}  // namespace weft::model::cuda
