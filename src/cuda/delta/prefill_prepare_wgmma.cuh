// What the kernels share that prepare chunks by Hopper's warpgroup products, before the pass (prefill_prepare_wgmma.cu) and beside
// it (prefill_fused_producer.cuh).
#pragma once

#include <type_traits>

#include "cuda/common/wgmma.cuh"
#include "cuda/delta/prefill_prepare.cuh"

namespace weft::cuda {

#if WEFT_HAS_WGMMA

// d = rows k^T, 64 by 64 or fewer.
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

// The unit of K K^T below the diagonal blocks: normed on one side only, long keys would be beyond f16.
template <class Half>
constexpr float kKeyUnit = std::is_same_v<Half, __half> ? 16.0f : 1.0f;

// c += a b for operands in two parts, 16 x 16 x 16; the product of both low parts is beyond f32.
template <class Half>
__device__ void multiply_parts(float (&c)[2][4], const FragmentA& high, const FragmentA& low, const uint32_t (&b_high)[4],
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
