// Tensors, indices and sequences lowered for kernels: addresses, dtypes, sizes and strides.
#pragma once

#include "common/sequences.h"
#include "cuda/common/elements.cuh"

namespace weft::cuda {

// What kernels read of a Tensor: the first three dimensions.
struct StridedView {
  void* data = nullptr;
  DType dtype = DType::f32;
  int8_t rank = 0;  // of the tensor; 0: absent
  int64_t sizes[3] = {}, strides[3] = {};

  constexpr bool present() const { return rank > 0; }
  constexpr int64_t size(int dim) const { return sizes[dim]; }
  constexpr int64_t stride(int dim) const { return strides[dim]; }
};
inline StridedView view_of(const Tensor& t) {
  return {t.data, t.dtype, t.rank, {t.sizes[0], t.sizes[1], t.sizes[2]}, {t.strides[0], t.strides[1], t.strides[2]}};
}

__device__ inline float load(const StridedView& t, int64_t i) { return load(t.data, t.dtype, i); }
__device__ inline uint32_t load_bits(const StridedView& t, int64_t i) { return load_bits(t.data, t.dtype, i); }
__device__ inline void store(const StridedView& t, int64_t i, float value) { store(t.data, t.dtype, i, value); }

// A vector of i32 or i64.
struct IndexView {
  const void* data = nullptr;
  int64_t stride = 0;
  bool wide = false;  // i64

  constexpr bool present() const { return data; }
  __device__ int64_t at(int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i * stride] : static_cast<const int32_t*>(data)[i * stride];
  }
};
inline IndexView indices_of(const Tensor& t) {
  return t.present() ? IndexView{t.data, t.strides[0], t.dtype == DType::i64} : IndexView{};
}
// For the templates of src/common.
__device__ inline int64_t index_at(const IndexView& indices, int64_t i) { return indices.at(i); }

struct SequencesView {
  IndexView cu_seqlens;
  int64_t count = 0, max_tokens = 0;
};
inline SequencesView view_of(const Sequences& sequences) {
  return {indices_of(sequences.cu_seqlens), sequences.count, sequences.max_tokens};
}

}  // namespace weft::cuda
