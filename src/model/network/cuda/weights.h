// The weights of a model on a device.
//
// Matrices are f16, sixteen times as large as they should be: then every bf16 number of 4.8e-7 or more is what it was, and so is every f16
// number of a checkpoint that does not pass 4094. With operands of f16, too, a product is 8 times as exact as one of bf16 operands would be,
// at the same speed. What f16 leaves of the f32 numbers of a checkpoint is kept in a second matrix where products are to be exact, or cost
// nothing (exact_tokens() in model/network/compute.h).
// The parts of a projection are one matrix, the matrices of a layer's experts lie one after another.
#pragma once

#include <span>
#include <unordered_map>

#include "model/checkpoint/config.h"
#include "model/checkpoint/weights.h"
#include "model/network/cuda/gemm.h"
#include "model/network/memory.h"

namespace weft::model {

class DeviceWeights {
 public:
  DeviceWeights(const Stream& stream, const ModelConfig& config, const Weights& weights, bool exact);
  // Counts bytes alone.
  DeviceWeights(const ModelConfig& config, const Weights& weights, bool exact);

  int64_t bytes() const { return bytes_; }
  // By where they are on the host: weights must outlive this.
  const cuda::DeviceMatrix& matrix(const Projection& projection) const { return matrices_.at(&projection); }
  const cuda::DeviceMatrix& matrix(const Matrix& matrix) const { return matrices_.at(matrix.data); }
  // The first of a layer's experts, whose others follow.
  const cuda::DeviceMatrix& experts(const std::vector<SwigluWeights>& experts, Projection SwigluWeights::*which) const {
    return matrices_.at(&(experts.front().*which));
  }
  const float* numbers(const std::vector<float>& values) const { return vectors_.at(&values); }
  Tensor tensor(const Tensor& values) const { return tensors_.at(values.data); }
  const float* frequencies() const { return frequencies_; }

 private:
  void place(const ModelConfig& config, const Weights& weights);
  void place_layer(const LayerWeights& layer);
  // At a multiple of the alignment, unless it follows what came before.
  std::byte* room(int64_t bytes, bool follows = false);
  // Projections that follow each other. hidden: their operand is what swiglu() writes.
  void add(std::span<const Projection* const> projections, bool hidden);
  void add(const Projection& projection, bool hidden = false) {
    const Projection* const one = &projection;
    add(std::span(&one, 1), hidden);
  }
  void add(const Matrix& matrix);
  void add(const std::vector<float>& values);
  void add(const Tensor& values);
  const float* numbers_to_device(const std::vector<float>& values);
  void send(const Matrix& from, bool rest, std::byte* to);
  bool keeps_rest(const Matrix& matrix) const { return exact_ && matrix.dtype == DType::f32; }

  const Stream* stream_ = nullptr;  // while weights are sent
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
