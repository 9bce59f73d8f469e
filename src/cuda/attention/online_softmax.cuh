// The online softmax of the tensor-core attention kernels: mask, running maximum with lazy rescale, exponentials and row sums.
//
// Scores are in powers of two: natural scores times log2 e. A thread keeps a RunningSoftmax for each of its query rows. The maximum
// is the same in all lanes that share a row; the sum covers the tokens of this lane only, and lanes add their sums at the end.
// NaN scores do not take part in the maximum. They reach the sum and the values through their weights.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/host_device.h"

namespace weft::cuda {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kMasked = -INFINITY;  // score of a token that a row must not see; maximum of a row that has seen no token
// Lazy rescale threshold: sums are rescaled once a score exceeds the running maximum by 2^kLazyRescale. Until then weights exceed
// 1.
inline constexpr float kLazyRescale = 6;

// The factor of <q, k> that makes it a score. A softcap takes natural scores: with one, log2 e is applied after the cap.
WEFT_HOST_DEVICE constexpr float score_unit(float scale, bool softcap) { return softcap ? scale : scale * kLog2e; }

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The smaller number; NaN if one of them is NaN.
__device__ __forceinline__ float min_or_nan(float x, float y) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(y));
  return least;
}

// cap tanh(score / cap), with an error of about a millionth of the cap; NaN of NaN. `inverse`: kTwoLog2e / cap.
inline constexpr float kTwoLog2e = 2.885390081777927f;
__device__ __forceinline__ float softcap_fast(float score, float cap, float inverse) {
  return cap - __fdividef(2 * cap, exp2_fast(min_or_nan(score * inverse, 80.0f)) + 1);
}
__device__ __forceinline__ float softcap_fast(float score, float cap) { return softcap_fast(score, cap, kTwoLog2e / cap); }

// Positions [first, end) that a query row sees, in 32 bits. A token that does not exist has position -1.
struct VisibleRange {
  int first, end;
  __device__ __forceinline__ bool hides(int position) const { return position < 0 || position < first || position >= end; }
};

// The maximum, or the sum, over the lanes whose numbers differ in bits First, 2 First, ... below End.
template <int First, int End>
__device__ __forceinline__ float max_over_lanes(float x) {
#pragma unroll
  for (int apart = First; apart < End; apart *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, apart));
  return x;
}
template <int First, int End>
__device__ __forceinline__ float sum_over_lanes(float x) {
#pragma unroll
  for (int apart = First; apart < End; apart *= 2) x += __shfl_xor_sync(0xffffffffu, x, apart);
  return x;
}

struct RunningSoftmax {
  float max = kMasked, sum = 0;

  // What exponents are relative to.
  __device__ __forceinline__ float reference() const { return max == kMasked ? 0.0f : max; }
  // Must sums be rescaled for a score of `top`?
  __device__ __forceinline__ bool exceeded_by(float top) const { return top > max + kLazyRescale; }
  // Raises the maximum to `top` if that is larger, and multiplies the sum, and `scale`, by what that takes.
  __device__ __forceinline__ void raise(float top, float& scale) {
    if (top > max) {
      const float keep = exp2_fast(max - top);
      sum *= keep;
      scale *= keep;
      max = top;
    }
  }
  // The same for scores that are relative to reference() already. Returns what they must be lowered by.
  __device__ __forceinline__ float raise_relative(float top, float& scale) {
    const bool none = max == kMasked;
    const float old = none ? kMasked : 0.0f;
    if (!(top > old)) return 0;
    const float keep = exp2_fast(old - top);
    scale *= keep;
    sum *= keep;
    max = none ? top : max + top;
    return top;
  }
};

// The weight of a token, which it adds to `sum`.
__device__ __forceinline__ float add_weight(float exponent, float& sum) {
  const float weight = exp2_fast(exponent);
  sum += weight;
  return weight;
}

// What the sums of a warp are multiplied by when they join sums relative to `top`. A warp that has met nothing but NaN spreads NaN.
__device__ __forceinline__ float join_factor(float max, float sum, float top) {
  return max == kMasked ? (sum == sum ? 0.0f : NAN) : exp2_fast(max - top);
}

// m of a partial or of a row: the maximum in natural units, less the 2^offset that weights were multiplied by.
__device__ __forceinline__ float natural_max(float max, float offset = 0) { return (max - offset) / kLog2e; }

}  // namespace weft::cuda
