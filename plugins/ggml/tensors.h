// Strides of ggml tensors in Weft's terms: ggml lists sizes from the innermost dimension and counts strides in bytes.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "ggml.h"
#include "weft/tensor.h"

namespace weft_ggml {

constexpr size_t kFloat = sizeof(float);

// Is it an f32 tensor whose strides are whole numbers of floats?
inline bool is_f32(const ggml_tensor* t) {
  if (!t || t->type != GGML_TYPE_F32 || t->view_offs % kFloat != 0) return false;
  for (size_t stride : t->nb)
    if (stride % kFloat != 0) return false;
  return true;
}

inline int64_t stride(const ggml_tensor* t, int dim) { return static_cast<int64_t>(t->nb[dim] / kFloat); }

// A stand-in address for the nth tensor of a node that has no memory yet. The addresses are so far apart that no tensors overlap.
inline float* pretended(uintptr_t n) { return reinterpret_cast<float*>(n << 48); }

// A strided f32 view.
inline weft::Tensor view(float* data, std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides) {
  weft::Tensor made;
  made.data = data;
  made.dtype = weft::DType::f32;
  for (int64_t size : sizes) made.sizes[static_cast<size_t>(made.rank++)] = size;
  size_t dim = 0;
  for (int64_t step : strides) made.strides[dim++] = step;
  return made;
}

}  // namespace weft_ggml
