// Matrix: a view of the weights of a dense layer, in the type and at the address of the mapped file.
#pragma once

#include <cstdint>

#include "model/checkpoint/weight_type.h"

namespace weft::model {

// A view of [rows, cols] weights, rows contiguous.
struct Matrix {
  const void* data = nullptr;
  WeightType type = WeightType::f32;  // data of a float type is aligned to its elements; block types need no alignment
  int64_t rows = 0, cols = 0;         // cols > 0, a multiple of the block size

  int64_t row_bytes() const { return weight_bytes(type, cols); }
  int64_t bytes() const { return rows * row_bytes(); }
  Matrix slice(int64_t first, int64_t count) const {
    return {static_cast<const char*>(data) + first * row_bytes(), type, count, cols};
  }
};

}  // namespace weft::model
