// Query rows of the prefill kernels: f16 numbers, relative to a power of two where f16 would not hold them.
#pragma once

#include "cuda/attention/attention.cuh"

namespace weft::cuda::prefill {

// Smallest e with gain <= 2^e, of a positive number.
__device__ inline int exponent_above(uint32_t bits) { return static_cast<int>((bits + 0x7fffffu) >> 23) - 127; }
__device__ inline float power_of_two(int e) { return __uint_as_float(static_cast<uint32_t>(e + 127) << 23); }

// Rows whose largest number lies between these powers of two are f16 as they are.
constexpr int kMinQueryExponent = -8, kMaxQueryExponent = 15;

// Makes a rotated row relative to `unit`, by one warp whose lanes hold E coordinates each. Returns `from_mean`, what K's mean adds to
// unscaled scores, or NaN if the row holds NaN or infinity, which makes all its scores NaN. Larger sums must be larger scores: a
// negative sign of the scale goes to q.
template <int E>
__device__ __forceinline__ float fit_query(float scale, float from_mean, float (&x)[E], float& unit) {
  float top = 0, bad = 0;
#pragma unroll
  for (int e = 0; e < E; ++e) {
    top = fmaxf(top, fabsf(x[e]));
    bad += x[e] * 0.0f;
  }
  from_mean += sum_warp(bad);
  top = max_warp(top);
  const int exponent = min(max(exponent_above(__float_as_uint(top)), -100), 100);
  const bool fits = top == 0 || (exponent >= kMinQueryExponent && exponent <= kMaxQueryExponent);
  if (!fits) unit = power_of_two(exponent);
  const float down = copysignf(fits ? 1.0f : power_of_two(-exponent), scale);
#pragma unroll
  for (int e = 0; e < E; ++e) x[e] *= down;
  return from_mean;
}

}  // namespace weft::cuda::prefill
