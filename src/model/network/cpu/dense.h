// GEMMs of dense layers on the cpu: y = x W^T, with weights in the type and at the address of the mapped file. Weights in blocks are
// widened to f32 a tile of 8 rows at a time.
//
// Every y[m, n] is computed by the same operations in the same order, whatever M, the other tasks and the threads are: K in blocks
// of 1024, within a block one sum per vector lane, then the lanes are added, then the blocks. So the results of a token do not
// depend on its batch. They do depend on the instruction set, because the number of lanes differs.
#pragma once

#include <cstdint>
#include <span>

#include "model/checkpoint/matrix.h"
#include "weft/device.h"

namespace weft::model {

// y[m, 0 .. w.rows) = x[m, :] w^T for m in [0, M); with `add`, y += x w^T.
struct DenseTask {
  Matrix w;
  const float* x = nullptr;  // [M, w.cols], rows x_stride apart
  int64_t x_stride = 0;
  int64_t M = 0;
  float* y = nullptr;  // [M, w.rows], rows y_stride apart; overlaps no x
  int64_t y_stride = 0;
  bool add = false;
};

// Runs all tasks together with the threads and the instruction set of the stream.
void dense(const Stream& stream, std::span<const DenseTask> tasks);

}  // namespace weft::model
