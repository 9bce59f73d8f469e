// GEMMs with f32 sums: y = alpha x w^T, or y += alpha x w^T. f16 operands use cuBLASLt, or kernels of this folder for a few rows,
// for shapes that cuBLASLt does not support, and for experts, whose row counts are known on the device only. A few short rows of
// f32 use the fused GEMM.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>

#include "model/network/compute.h"

namespace weft::model::cuda {

// A weight matrix [rows, cols] on the device: alpha * (data + low), both f16. alpha also undoes the scale of the operand
// (kHiddenScale). `low` holds what f16 leaves of f32 weights; null: nothing.
struct DeviceMatrix {
  const void* data = nullptr;
  const void* low = nullptr;
  int64_t rows = 0, cols = 0;
  float alpha = 1;
  const float* bias = nullptr;
};

// At most kFewRows rows: weights are read once, at the bandwidth of memory.
inline constexpr int64_t kFewRows = 4;
void multiply_few(const Stream& stream, const DeviceMatrix& w, const Tensor& x, const Tensor& y, bool add);
// Any shape. With `routing`, the rows of expert e times matrix e of the contiguous matrices at w.data.
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
// Are the rows x f32, at most kFusedRows, and so short that 16 of them and 16 rows of weights fit into shared memory? `low`: the
// weights have a DeviceMatrix::low. multiply_fused() takes such rows only.
bool can_fuse(const Stream& stream, const Tensor& x, bool swiglu, bool low);
void multiply_fused(const Stream& stream, const DeviceMatrix& w, const Tensor& x, const DeviceFusion& fusion, const Tensor& y);

// cuBLASLt, loaded by the first constructor call: programs that run no model on a GPU do not need the library. Not thread-safe.
class Blas {
 public:
  static constexpr size_t kWorkspace = 32 << 20;

  explicit Blas(int device);
  ~Blas();
  Blas(const Blas&) = delete;
  Blas& operator=(const Blas&) = delete;

  // Does cuBLASLt support the shape? Rows must be multiples of 16 bytes.
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
