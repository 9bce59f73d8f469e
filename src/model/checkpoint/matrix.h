// Matrix: a view of the weights of a dense layer, in the dtype and at the address of the mapped file.
#pragma once

#include <cstdint>

#include "weft/tensor.h"

namespace weft::model {

// A view of [rows, cols] weights, rows contiguous.
struct Matrix {
  const void* data = nullptr;
  DType dtype = DType::f32;    // f32, f16 or bf16; data is aligned to it
  int64_t rows = 0, cols = 0;  // cols > 0

  int64_t bytes() const { return rows * cols * dtype_bytes(dtype); }
  Matrix slice(int64_t first, int64_t count) const {
    return {static_cast<const char*>(data) + first * cols * dtype_bytes(dtype), dtype, count, cols};
  }
};

}  // namespace weft::model
