// The weights of a model on a device: see weights.h.
#include "model/network/cuda/weights.h"

#include <algorithm>

#include "core/check.h"
#include "cuda/runner.h"
#include "model/network/cuda/activations.h"

namespace weft::model {
namespace {

constexpr const char* kOp = "model";
constexpr float kWeightScale = 16;      // see weights.h
constexpr int64_t kStaging = 32 << 20;  // bytes of the staging buffer

}  // namespace

DeviceWeights::DeviceWeights(const ModelConfig& config, const Weights& weights, bool exact)
    : exact_(exact || exact_tokens(config) > 0) {
  uintptr_t cursor = Block::kPretended;
  arena_ = Block::pretend(0, cursor);
  place(config, weights);
}

DeviceWeights::DeviceWeights(const Stream& stream, const ModelConfig& config, const Weights& weights, bool exact)
    : stream_(&stream), exact_(exact || exact_tokens(config) > 0), device_(stream.device) {
  if (Status status = weft::cuda::check_stream(stream, kOp); !status) throw Error(std::move(status));
  arena_ = Block::allocate(static_cast<size_t>(DeviceWeights(config, weights, exact).bytes()), Place::cuda, stream.device);
  const weft::cuda::OnDevice on(stream.device, kOp);
  place(config, weights);
  weft::cuda::check(cudaStreamSynchronize(weft::cuda::queue_of(stream)), kOp, "weights");
  staging_ = Block();
  stream_ = nullptr;
}

void DeviceWeights::place(const ModelConfig& config, const Weights& weights) {
  add(weights.embedding);
  if (weights.head.data != weights.embedding.data) add(weights.head);
  add(weights.final_norm);
  std::vector<float> frequencies(config.rope.frequencies.begin(), config.rope.frequencies.end());
  frequencies_ = numbers_to_device(frequencies);
  for (const LayerWeights& layer : weights.layers) place_layer(layer);
}

void DeviceWeights::place_layer(const LayerWeights& layer) {
  add(layer.mixer_norm);
  add(layer.feed_forward_norm);
  if (const auto* delta = std::get_if<DeltaWeights>(&layer.mixer)) {
    add(delta->input);
    add(delta->conv);
    add(delta->a_log);
    add(delta->dt_bias);
    add(delta->norm);
    add(delta->output);
  } else {
    const auto& attention = std::get<AttentionWeights>(layer.mixer);
    add(attention.input);
    add(attention.q_norm);
    add(attention.k_norm);
    add(attention.output);
  }
  const auto swiglu = [&](const SwigluWeights& w) {
    add(w.input);
    add(w.down, true);
  };
  if (const auto* dense = std::get_if<SwigluWeights>(&layer.feed_forward)) return swiglu(*dense);
  const auto& experts = std::get<ExpertWeights>(layer.feed_forward);
  add(experts.router);
  std::vector<const Projection*> inputs, downs;
  for (const SwigluWeights& expert : experts.experts) {
    inputs.push_back(&expert.input);
    downs.push_back(&expert.down);
  }
  add(inputs, false);
  add(downs, true);
  swiglu(experts.shared);
  add(experts.shared_gate);
}

std::byte* DeviceWeights::reserve(int64_t bytes, bool contiguous) {
  constexpr auto kStep = static_cast<int64_t>(kScratchAlignment);
  if (!contiguous) bytes_ = (bytes_ + kStep - 1) / kStep * kStep;
  std::byte* at = arena_.data() + bytes_;
  bytes_ += bytes;
  return at;
}

void DeviceWeights::add(std::span<const Projection* const> projections, bool hidden) {
  const auto place_all = [&](bool residual) {
    for (const Projection* projection : projections) {
      const int64_t cols = projection->parts.front().w.cols;
      std::byte* to = reserve(projection->outputs * cols * dtype_bytes(DType::f16), projection != projections.front());
      if (stream_)
        for (const ProjectionPart& part : projection->parts)
          send(part.w, residual, to + part.column * cols * dtype_bytes(DType::f16));
      if (residual)
        matrices_[projection].low = to;
      else
        matrices_[projection] = {to,     nullptr, projection->outputs, cols, (hidden ? 1 / cuda::kHiddenScale : 1) / kWeightScale,
                                 nullptr};
    }
  };
  place_all(false);
  const bool any_residual = std::any_of(projections.begin(), projections.end(), [&](const Projection* projection) {
    return std::any_of(projection->parts.begin(), projection->parts.end(),
                       [&](const ProjectionPart& part) { return keeps_residual(part.w); });
  });
  if (any_residual) place_all(true);
  for (const Projection* projection : projections)
    if (!projection->bias.empty()) matrices_[projection].bias = numbers_to_device(projection->bias);
}

void DeviceWeights::add(const Matrix& matrix) {
  const int64_t bytes = matrix.rows * matrix.cols * dtype_bytes(DType::f16);
  std::byte *to = reserve(bytes), *low = keeps_residual(matrix) ? reserve(bytes) : nullptr;
  if (stream_) send(matrix, false, to);
  if (stream_ && low) send(matrix, true, low);
  matrices_[matrix.data] = {to, low, matrix.rows, matrix.cols, 1 / kWeightScale, nullptr};
}

void DeviceWeights::add(const std::vector<float>& values) { vectors_[&values] = numbers_to_device(values); }

const float* DeviceWeights::numbers_to_device(const std::vector<float>& values) {
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(float));
  std::byte* to = reserve(bytes);
  if (stream_) copy_bytes(to, values.data(), static_cast<size_t>(bytes));
  return reinterpret_cast<const float*>(to);
}

void DeviceWeights::add(const Tensor& values) {
  const int64_t bytes = values.elements() * dtype_bytes(values.dtype);
  Tensor there = values;
  there.data = reserve(bytes);
  there.place = Place::cuda;
  there.device = static_cast<int8_t>(device_);
  if (stream_) copy_bytes(there.data, values.data, static_cast<size_t>(bytes));
  tensors_[values.data] = there;
}

// 16-bit numbers are copied to their destination and converted in place. Others go through the staging buffer.
void DeviceWeights::send(const Matrix& from, bool residual, std::byte* to) {
  const int64_t count = from.rows * from.cols;
  const cudaStream_t queue = weft::cuda::queue_of(*stream_);
  const auto put = [&](void* there, const void* here, int64_t bytes) {
    weft::cuda::check(cudaMemcpyAsync(there, here, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, queue), kOp, "weights");
  };
  if (weight_layout(from.type).block > 1) return send_blocks(from, residual, to);
  const DType dtype = *weight_dtype(from.type);
  if (dtype_bytes(dtype) == dtype_bytes(DType::f16)) {
    if (residual) {  // f16 and bf16 weights have none
      weft::cuda::check(cudaMemsetAsync(to, 0, static_cast<size_t>(from.bytes()), queue), kOp, "weights");
      return;
    }
    put(to, from.data, from.bytes());
    cuda::convert(*stream_, to, dtype, count, kWeightScale, false, to);
    return;
  }
  if (!staging_.data()) staging_ = Block::allocate(kStaging, Place::cuda, device_);
  const int64_t most = kStaging / dtype_bytes(dtype);
  for (int64_t i = 0; i < count; i += most) {
    const int64_t some = std::min(most, count - i);
    put(staging_.data(), static_cast<const std::byte*>(from.data) + i * dtype_bytes(dtype), some * dtype_bytes(dtype));
    cuda::convert(*stream_, staging_.data(), dtype, some, kWeightScale, residual, to + i * dtype_bytes(DType::f16));
  }
}

// Blocks are widened to f32 on the host, as many as the staging buffer holds.
void DeviceWeights::send_blocks(const Matrix& from, bool residual, std::byte* to) {
  const cudaStream_t queue = weft::cuda::queue_of(*stream_);
  if (!staging_.data()) staging_ = Block::allocate(kStaging, Place::cuda, device_);
  const int64_t count = from.rows * from.cols, block = weight_layout(from.type).block;
  const int64_t most = kStaging / dtype_bytes(DType::f32) / block * block;
  std::vector<float> widened(static_cast<size_t>(std::min(most, count)));
  for (int64_t i = 0; i < count; i += most) {
    const int64_t some = std::min(most, count - i);
    widen(from.type, from.data, i, some, widened.data());
    weft::cuda::check(
        cudaMemcpyAsync(staging_.data(), widened.data(), static_cast<size_t>(some) * sizeof(float), cudaMemcpyHostToDevice, queue),
        kOp, "weights");
    cuda::convert(*stream_, staging_.data(), DType::f32, some, kWeightScale, residual, to + i * dtype_bytes(DType::f16));
    weft::cuda::check(cudaStreamSynchronize(queue), kOp, "weights");  // before the buffer is written again
  }
}

std::shared_ptr<const DeviceWeights> upload_weights(const Stream& stream, const ModelConfig& config, const Weights& weights,
                                                    bool exact) {
  return std::make_shared<const DeviceWeights>(stream, config, weights, exact);
}

int64_t device_weight_bytes(const ModelConfig& config, const Weights& weights, bool exact) {
  return DeviceWeights(config, weights, exact).bytes();
}

}  // namespace weft::model
