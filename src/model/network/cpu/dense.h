// Dense layers: y = x W^T, with weights left in the dtype of their file and where they are mapped.
//
// Every y[m, n] is computed by the same operations in the same order, whatever M, the other tasks and the threads are: K in blocks of
// 1024, within a block one sum per vector lane, the lanes added up, the blocks added up. So a token's numbers do not depend on its batch.
// They do depend on the instruction set, whose vectors have different numbers of lanes.
#pragma once

#include <cstdint>
#include <span>

#include "weft/device.h"
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

// y[m, 0 .. w.rows) = x[m, :] w^T for m in [0, M), or added to what is there.
struct DenseTask {
  Matrix w;
  const float* x = nullptr;  // [M, w.cols], rows x_stride apart
  int64_t x_stride = 0;
  int64_t M = 0;
  float* y = nullptr;  // [M, w.rows], rows y_stride apart; overlaps no x
  int64_t y_stride = 0;
  bool add = false;
};

// All tasks at once, on the cpu with the threads and instruction set of the stream.
void dense(const Stream& stream, std::span<const DenseTask> tasks);

}  // namespace weft::model
