// Tensor maps of TMA: boxes of 16-bit elements in shared memory with wgmma's 128-byte swizzle.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "weft/tensor.h"

namespace weft::cuda {

// The driver's function that encodes tensor maps; null when there is none.
using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);
TensorMapEncoder tensor_map_encoder();

// Rows of `elements` 16-bit elements in three more dimensions, innermost first: rows of a matrix, and two outer dimensions. A box has 64
// elements of `box_rows` rows. Strides are in bytes, multiples of 16; what lies outside the sizes reads as zeros.
struct MatrixOfRows {
  DType dtype = DType::f16;
  const void* data = nullptr;
  int64_t elements = 0, rows = 0, heads = 1, blocks = 1;
  int64_t row_stride = 0, head_stride = 0, block_stride = 0;
  int box_rows = 64;
};
CUtensorMap tensor_map(const char* op, const char* argument, const MatrixOfRows& matrix);

}  // namespace weft::cuda
