// The weights of a model on a device.
//
// Matrices are stored as f16, times 16. With this scale, every bf16 weight of at least 4.8e-7 in magnitude is exact, and so is
// every f16 weight up to 4094. A GEMM of f16 operands is 8 times as precise as one of bf16 operands, at the same speed. For f32
// weights, the residuals that f16 leaves are kept in a second matrix, if GEMMs are to be exact or if that costs nothing
// (exact_tokens() in model/network/compute.h). The parts of a projection form one matrix, and the matrices of a layer's experts are
// contiguous.
// Blocks are treated as f32 weights.
#pragma once

#include <span>
#include <unordered_map>

#include "model/checkpoint/config.h"
#include "model/checkpoint/weights.h"
#include "model/network/cuda/gemm.h"
#include "model/state/memory.h"

namespace weft::model {

// Does f16 round these weights?
inline bool has_residual(WeightType type) { return weight_dtype(type).value_or(DType::f32) == DType::f32; }

class DeviceWeights {
 public:
  DeviceWeights(const Stream& stream, const ModelConfig& config, const Weights& weights, bool exact);
  // Only counts bytes.
  DeviceWeights(const ModelConfig& config, const Weights& weights, bool exact);

  int64_t bytes() const { return bytes_; }
  // Weights are found by their address on the host, so the host weights must outlive this object.
  const cuda::DeviceMatrix& matrix(const Projection& projection) const { return matrices_.at(&projection); }
  const cuda::DeviceMatrix& matrix(const Matrix& matrix) const { return matrices_.at(matrix.data); }
  // The matrix of a layer's first expert; those of the others follow it in memory.
  const cuda::DeviceMatrix& experts(const std::vector<SwigluWeights>& experts, Projection SwigluWeights::*which) const {
    return matrices_.at(&(experts.front().*which));
  }
  const float* numbers(const std::vector<float>& values) const { return vectors_.at(&values); }
  Tensor tensor(const Tensor& values) const { return tensors_.at(values.data); }
  const float* frequencies() const { return frequencies_; }

 private:
  void place(const ModelConfig& config, const Weights& weights);
  void place_layer(const LayerWeights& layer);
  // Reserves bytes of the arena, aligned unless they must be contiguous with the bytes reserved before.
  std::byte* reserve(int64_t bytes, bool contiguous = false);
  // Adds projections that are contiguous in memory. hidden: their operand is the result of swiglu().
  void add(std::span<const Projection* const> projections, bool hidden);
  void add(const Projection& projection, bool hidden = false) {
    const Projection* const one = &projection;
    add(std::span(&one, 1), hidden);
  }
  void add(const Matrix& matrix);
  void add(const std::vector<float>& values);
  void add(const Tensor& values);
  const float* numbers_to_device(const std::vector<float>& values);
  void send(const Matrix& from, bool residual, std::byte* to);
  void send_blocks(const Matrix& from, bool residual, std::byte* to);
  bool keeps_residual(const Matrix& matrix) const { return exact_ && has_residual(matrix.type); }

  const Stream* stream_ = nullptr;  // set during the upload; null in a dry run
  bool exact_;
  int device_ = 0;
  int64_t bytes_ = 0;
  Block arena_, staging_;
  std::unordered_map<const void*, cuda::DeviceMatrix> matrices_;
  std::unordered_map<const void*, const float*> vectors_;
  std::unordered_map<const void*, Tensor> tensors_;
  const float* frequencies_ = nullptr;
};

}  // namespace weft::model
