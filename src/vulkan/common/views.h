// Tensors, indices and sequences lowered for shaders: the structs of views.glsl, member by member.
#pragma once

#include "common/sequences.h"
#include "weft/tensor.h"

namespace weft::vulkan {

struct View {
  uint64_t data = 0;
  uint32_t dtype = 0, rank = 0;
  int64_t sizes[5] = {}, strides[5] = {};
};
inline View view_of(const Tensor& t) {
  View view{reinterpret_cast<uint64_t>(t.data), static_cast<uint32_t>(t.dtype), static_cast<uint32_t>(t.rank)};
  for (size_t d = 0; d < 5; ++d) {
    view.sizes[d] = t.sizes[d];
    view.strides[d] = t.strides[d];
  }
  return view;
}

struct Indices {
  uint64_t data = 0;
  int64_t stride = 0;
  uint32_t wide = 0, there = 0;
};
inline Indices indices_of(const Tensor& t) {
  if (!t.present()) return {};
  return {reinterpret_cast<uint64_t>(t.data), t.strides[0], t.dtype == DType::i64, 1};
}

struct SequencesView {
  Indices cu_seqlens;
  int64_t count = 0, max_tokens = 0, each = 0, tokens = 0;
};
inline SequencesView view_of(const Sequences& sequences, int64_t tokens) {
  return {indices_of(sequences.cu_seqlens), sequences.count, sequences.max_tokens, max_tokens(sequences, tokens), tokens};
}

// May shaders access groups of four elements of the last dimension? Only strides decide, not sizes: so the bits of a row do not
// depend on the number of rows.
inline bool packs_of_four(const Tensor& t) {
  if (!t.present()) return true;
  const int64_t bytes = dtype_bytes(t.dtype);
  if (reinterpret_cast<uint64_t>(t.data) % static_cast<uint64_t>(4 * bytes) != 0 || t.size(-1) % 4 != 0) return false;
  for (int d = 0; d + 1 < t.rank; ++d)
    if (t.stride(d) % 4 != 0) return false;
  return t.stride(-1) == 1;
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace weft::vulkan
