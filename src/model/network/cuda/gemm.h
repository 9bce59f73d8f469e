// Matrix products with f32 sums, y = alpha x w^T or y += that. Of f16 operands: cuBLASLt for many rows, kernels of our own for a few rows,
// for shapes that it does not take, and for experts, whose rows only the device knows. Of f32 operands: a few short rows.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>

#include "model/network/compute.h"

namespace weft::model::cuda {

// A matrix [rows, cols] of f16 on the device; what it means is alpha times that (with the scale of its operand), and where there is
// `low`, times the sum of both.
struct DeviceMatrix {
  const void* data = nullptr;
  const void* low = nullptr;
  int64_t rows = 0, cols = 0;
  float alpha = 1;
  const float* bias = nullptr;
};

// Rows of at most kFewRows: weights are read once, at the speed of memory.
inline constexpr int64_t kFewRows = 4;
void multiply_few(const Stream& stream, const DeviceMatrix& w, const Tensor& x, const Tensor& y, bool add);
// Any shape. With `routing`, rows of expert e times matrix e of those that follow each other at w.data.
void multiply_tiles(const Stream& stream, const DeviceMatrix& w, const Tensor& x, const Tensor& y, bool add,
                    const Routing* routing = nullptr);

// Prologue and epilogue of a fused GEMM, on the device: see Fusion in model/network/compute.h.
struct DeviceFusion {
  const float* norm = nullptr;
  float eps = 0;
  Tensor gate{};
  const float* bias = nullptr;
  bool swiglu = false, add = false;
};
// Are the rows x f32, at most kFusedRows, and so short that 16 of them and 16 rows of weights fit into shared memory? `low`: the weights
// have a DeviceMatrix::low. multiply_fused() takes such rows only.
bool can_fuse(const Stream& stream, const Tensor& x, bool swiglu, bool low);
void multiply_fused(const Stream& stream, const DeviceMatrix& w, const Tensor& x, const DeviceFusion& fusion, const Tensor& y);

// cuBLASLt, loaded when the first one is made: programs that never multiply on a GPU need no such library. Not thread-safe.
class Blas {
 public:
  static constexpr size_t kWorkspace = 32 << 20;

  explicit Blas(int device);
  ~Blas();
  Blas(const Blas&) = delete;
  Blas& operator=(const Blas&) = delete;

  // Does it take the shape: rows of whole 16-byte pieces?
  static bool fits(const DeviceMatrix& w, const Tensor& x, const Tensor& y);
  void multiply(const Stream& stream, const DeviceMatrix& w, const Tensor& x, const Tensor& y, bool add, void* workspace);

 private:
  struct Library;
  struct Plan;
  static const Library& library();
  const Plan& plan(const DeviceMatrix& w, const Tensor& x, const Tensor& y);

  void* handle_ = nullptr;
  std::map<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>, std::unique_ptr<Plan>> plans_;
};

}  // namespace weft::model::cuda
