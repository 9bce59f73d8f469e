// Reads and writes tensor elements of any float dtype as f32 on the device, one by one or in vector accesses.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/host_device.h"
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

// A raw element and its conversion, separate so that several loads can be in flight before the first conversion.
__device__ inline uint32_t load_bits(const void* data, DType dtype, int64_t i) {
  return dtype == DType::f32 ? static_cast<const uint32_t*>(data)[i] : uint32_t{static_cast<const uint16_t*>(data)[i]};
}
__device__ inline uint32_t load_bits(const Tensor& t, int64_t i) { return load_bits(t.data, t.dtype, i); }
__device__ inline float bits_to_float(uint32_t bits, DType dtype) {
  if (dtype == DType::f32) return __uint_as_float(bits);
  if (dtype == DType::bf16) return __uint_as_float(bits << 16);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

// N elements in one access of N * sizeof(T) <= 16 aligned bytes.
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

// N raw elements as 32-bit words, for kernels that convert them later: N * sizeof(T) is 8 or 16. Accesses are explicit vector accesses,
// because the compiler may split those of a Pack.
template <class T, int N>
struct Words {
  static constexpr int kCount = N * static_cast<int>(sizeof(T)) / 4;
  static_assert(kCount == 2 || kCount == 4);
  uint32_t word[kCount];

  __device__ static Words load(const void* from) {
    Words words;
    if constexpr (kCount == 4) {
      const uint4 x = *static_cast<const uint4*>(from);
      words.word[0] = x.x, words.word[1] = x.y, words.word[2] = x.z, words.word[3] = x.w;
    } else {
      const uint2 x = *static_cast<const uint2*>(from);
      words.word[0] = x.x, words.word[1] = x.y;
    }
    return words;
  }
  __device__ void store(void* to) const {
    const size_t at = __cvta_generic_to_global(to);
    if constexpr (kCount == 4)
      asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                   : "memory");
    else
      asm volatile("st.global.v2.b32 [%0], {%1,%2};" ::"l"(at), "r"(word[0]), "r"(word[1]) : "memory");
  }
  // Evict-first, for data that is not read again soon.
  __device__ void store_streaming(void* to) const {
    if constexpr (kCount == 4)
      __stcs(static_cast<uint4*>(to), uint4{word[0], word[1], word[2], word[3]});
    else
      __stcs(static_cast<uint2*>(to), uint2{word[0], word[1]});
  }
  __device__ float at(int i) const {
    if constexpr (sizeof(T) == 4) return __uint_as_float(word[i]);
    const uint32_t pair = word[i / 2];
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(i % 2 ? pair >> 16 : pair)));
  }
  __device__ static Words of(const float (&in)[N]) {
    Words words;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (sizeof(T) == 4) {
        words.word[i] = __float_as_uint(in[i]);
      } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(in[2 * i], in[2 * i + 1]);
        words.word[i] = *reinterpret_cast<const uint32_t*>(&pair);
      } else {
        const __half2 pair = __floats2half2_rn(in[2 * i], in[2 * i + 1]);
        words.word[i] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
    return words;
  }
};

// Four consecutive elements from element i, aligned to four.
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

// Can rows of `t` be accessed in vectors of `elements` elements: are they aligned to that, and a multiple of it long? (Host.)
inline bool packs_of(const Tensor& t, int64_t elements) {
  if (!t.present() || t.elements() == 0) return true;
  if (reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(elements * dtype_bytes(t.dtype)) != 0) return false;
  for (int d = 0; d + 1 < t.rank; ++d)
    if (t.sizes[static_cast<size_t>(d)] > 1 && t.strides[static_cast<size_t>(d)] % elements != 0) return false;
  return t.size(-1) % elements == 0;
}

}  // namespace weft::cuda
