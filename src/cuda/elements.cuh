// Reading and writing tensor elements as f32 on the device, one by one or four at a time, whatever their dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "shared/anywhere.h"
#include "weft/tensor.h"

namespace weft::cuda {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

__device__ inline float load(const void* data, DType dtype, int64_t i) {
  if (dtype == DType::f32) return static_cast<const float*>(data)[i];
  if (dtype == DType::bf16) return to_float(static_cast<const __nv_bfloat16*>(data)[i]);
  return to_float(static_cast<const __half*>(data)[i]);
}

__device__ inline void store(void* data, DType dtype, int64_t i, float value) {
  if (dtype == DType::f32)
    static_cast<float*>(data)[i] = value;
  else if (dtype == DType::bf16)
    static_cast<__nv_bfloat16*>(data)[i] = from_float<__nv_bfloat16>(value);
  else
    static_cast<__half*>(data)[i] = from_float<__half>(value);
}

__device__ inline float load(const Tensor& t, int64_t i) { return load(t.data, t.dtype, i); }
__device__ inline void store(const Tensor& t, int64_t i, float value) { store(t.data, t.dtype, i, value); }

// An element as it lies in memory, and what it means: several can be on their way before the first is looked at.
__device__ inline uint32_t load_bits(const Tensor& t, int64_t i) {
  return t.dtype == DType::f32 ? static_cast<const uint32_t*>(t.data)[i] : uint32_t{static_cast<const uint16_t*>(t.data)[i]};
}
__device__ inline float meaning(uint32_t bits, DType dtype) {
  if (dtype == DType::f32) return __uint_as_float(bits);
  if (dtype == DType::bf16) return __uint_as_float(bits << 16);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

// N elements in one access: N * sizeof(T) bytes, at most 16, aligned.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T x[N];
};

template <class T, int N>
__device__ inline void load_pack(const T* data, float (&out)[N]) {
  const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(data);
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = to_float(pack.x[i]);
}

template <class T, int N>
__device__ inline void store_pack(T* data, const float (&in)[N]) {
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.x[i] = from_float<T>(in[i]);
  *reinterpret_cast<Pack<T, N>*>(data) = pack;
}

// Four neighbours from element i, aligned to four.
__device__ inline void load4(const void* data, DType dtype, int64_t i, float (&out)[4]) {
  if (dtype == DType::f32)
    load_pack<float, 4>(static_cast<const float*>(data) + i, out);
  else if (dtype == DType::bf16)
    load_pack<__nv_bfloat16, 4>(static_cast<const __nv_bfloat16*>(data) + i, out);
  else
    load_pack<__half, 4>(static_cast<const __half*>(data) + i, out);
}

__device__ inline void store4(void* data, DType dtype, int64_t i, const float (&in)[4]) {
  if (dtype == DType::f32)
    store_pack<float, 4>(static_cast<float*>(data) + i, in);
  else if (dtype == DType::bf16)
    store_pack<__nv_bfloat16, 4>(static_cast<__nv_bfloat16*>(data) + i, in);
  else
    store_pack<__half, 4>(static_cast<__half*>(data) + i, in);
}

// Do rows of `t` begin at multiples of `elements` elements, so that packs of that many can be read? (Host.)
inline bool packs_of(const Tensor& t, int64_t elements) {
  if (!t.present() || t.elements() == 0) return true;
  if (reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(elements * dtype_bytes(t.dtype)) != 0) return false;
  for (int d = 0; d + 1 < t.rank; ++d)
    if (t.sizes[static_cast<size_t>(d)] > 1 && t.strides[static_cast<size_t>(d)] % elements != 0) return false;
  return t.size(-1) % elements == 0;
}

}  // namespace weft::cuda
