// What the passes by warpgroup products share: barriers of stages, and products with a state or corrections in registers.
#pragma once

#include "cuda/prefill_pass.cuh"
#include "cuda/wgmma.cuh"

namespace weft::cuda {

// Tokens as boxes of 64 channels, one head and 64 tokens.
struct TokenMaps {
  CUtensorMap q, k, v, o;  // o only where it has the dtype of the others
};

#if WEFT_HAS_WGMMA

// A value that the compiler keeps instead of deriving it again where it is used.
__device__ inline uint32_t kept(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// d = a b, 64 rows by 64 tokens of keys or queries.
template <class Half, int KP>
__device__ inline void start_reads(float (&d)[8][4], const FragmentA (&a)[KP / 16], uint32_t tokens) {
  wgmma_fence();
#pragma unroll
  for (int ks = 0; ks < KP / 16; ++ks) {
    const uint32_t b = tokens + ((ks / 4 * kPanel + ks % 4 * 32) >> 4);
    if (ks == 0)
      wgmma<Half, false>(d, a[ks], b);
    else
      wgmma<Half, true>(d, a[ks], b);
  }
  wgmma_commit();
}

// d += w b, over the tokens of a chunk.
template <class Half, int N>
__device__ inline void start_writes(float (&d)[N][4], const FragmentA (&w)[4], uint32_t b) {
  wgmma_fence();
#pragma unroll
  for (int js = 0; js < 4; ++js) wgmma<Half, true>(d, w[js], b + (js * 32 >> 4));
  wgmma_commit();
}

// The state in accumulators as the next chunk's operand, and as what the chunk adds to: its registers may not change while a product
// runs.
template <class Half, int KP>
__device__ inline void round_and_decay(float (&state)[KP / 8][4], float decay, FragmentA (&rounded)[KP / 16]) {
#pragma unroll
  for (int ks = 0; ks < KP / 16; ++ks) rounded[ks] = operand<Half>(state[2 * ks], state[2 * ks + 1]);
#pragma unroll
  for (int nt = 0; nt < KP / 8; ++nt)
#pragma unroll
    for (int e = 0; e < 4; ++e) state[nt][e] *= decay;
}

#endif  // WEFT_HAS_WGMMA

}  // namespace weft::cuda
