// Reading and writing tensor elements as doubles, whatever their dtype: all the reference knows of memory.
#pragma once

#include <cstdint>
#include <vector>

#include "common/half.h"
#include "weft/tensor.h"

namespace weft::reference {

inline double load(const Tensor& t, int64_t offset) {
  switch (t.dtype) {
    case DType::f32: return static_cast<const float*>(t.data)[offset];
    case DType::f16: return f16_to_f32(static_cast<const uint16_t*>(t.data)[offset]);
    case DType::bf16: return bf16_to_f32(static_cast<const uint16_t*>(t.data)[offset]);
    case DType::i32: return static_cast<const int32_t*>(t.data)[offset];
    case DType::i64: return static_cast<double>(static_cast<const int64_t*>(t.data)[offset]);
    case DType::u32: return static_cast<const uint32_t*>(t.data)[offset];
    case DType::u8: return static_cast<const uint8_t*>(t.data)[offset];
  }
  return 0;
}

inline void store(const Tensor& t, int64_t offset, double value) {
  const float rounded = static_cast<float>(value);
  switch (t.dtype) {
    case DType::f32: static_cast<float*>(t.data)[offset] = rounded; break;
    case DType::f16: static_cast<uint16_t*>(t.data)[offset] = f32_to_f16(rounded); break;
    case DType::bf16: static_cast<uint16_t*>(t.data)[offset] = f32_to_bf16(rounded); break;
    default: break;  // no op writes floats into integers
  }
}

// Offset of t[i...], leading indices; the rest are 0.
template <class... I>
int64_t at(const Tensor& t, I... i) {
  int64_t offset = 0;
  int dim = 0;
  ((offset += static_cast<int64_t>(i) * t.strides[dim++]), ...);
  return offset;
}

// The row t[i..., :] (or the matrix of the remaining dimensions, dense) as doubles.
template <class... I>
std::vector<double> load_row(const Tensor& t, I... i) {
  const int64_t base = at(t, i...);
  std::vector<double> row(static_cast<size_t>(t.size(-1)));
  for (size_t j = 0; j < row.size(); ++j) row[j] = load(t, base + static_cast<int64_t>(j));
  return row;
}

template <class... I>
void store_row(const Tensor& t, const std::vector<double>& row, I... i) {
  const int64_t base = at(t, i...);
  for (size_t j = 0; j < row.size(); ++j) store(t, base + static_cast<int64_t>(j), row[j]);
}

}  // namespace weft::reference
