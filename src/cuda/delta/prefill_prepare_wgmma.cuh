// Device functions that prefill_prepare_wgmma.cu and the producer of the fused kernel share.
#pragma once

#include <type_traits>

#include "cuda/common/wgmma.cuh"
#include "cuda/delta/prefill_prepare.cuh"

namespace weft::cuda {

#if WEFT_HAS_WGMMA

// Starts d = rows k^T, 64 rows by as many keys as d has columns, from smem descriptors.
template <class Half, int KP, int Tiles>
__device__ void start_scores(float (&d)[Tiles][4], uint32_t rows, uint32_t k) {
  wgmma_fence();
#pragma unroll
  for (int ks = 0; ks < KP / 16; ++ks) {
    const uint32_t step = (ks / 4 * kPanel + ks % 4 * 32) >> 4;
    if (ks == 0)
      wgmma_shared<Half, false>(d, rows + step, k + step);
    else
      wgmma_shared<Half, true>(d, rows + step, k + step);
  }
  wgmma_commit();
}

// K K^T below the diagonal blocks is stored divided by this: normalised on one side only, products of long keys would overflow f16.
template <class Half>
constexpr float kGramScale = std::is_same_v<Half, __half> ? 16.0f : 1.0f;

// c += a b of split operands, 16 x 16 x 16, in registers. The product of the low halves is below f32 precision.
template <class Half>
__device__ void multiply_split(float (&c)[2][4], const FragmentA& high, const FragmentA& low, const uint32_t (&b_high)[4],
                               const uint32_t (&b_low)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) multiply<Half>(c[i], high, b_low[2 * i], b_low[2 * i + 1]);
#pragma unroll
  for (int i = 0; i < 2; ++i) multiply<Half>(c[i], low, b_high[2 * i], b_high[2 * i + 1]);
#pragma unroll
  for (int i = 0; i < 2; ++i) multiply<Half>(c[i], high, b_high[2 * i], b_high[2 * i + 1]);
}

#endif  // WEFT_HAS_WGMMA

}  // namespace weft::cuda
