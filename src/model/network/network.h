// One step of a hybrid model: the activations of new tokens through all layers. The memory of the mixers is a HybridState.
//
// The mixers are Weft's ops; a Compute (model/network/compute.h) does the arithmetic between them. The residual stream is f32.
#pragma once

#include <chrono>
#include <functional>
#include <span>

#include "core/run.h"
#include "model/network/compute.h"
#include "model/state/memory.h"
#include "weft/hybrid_state.h"

namespace weft::model {

// Seconds that the calling thread spent in steps. On a GPU that is the time of launches.
struct StepTimes {
  double dense = 0;   // GEMMs
  double mixers = 0;  // Weft's ops
  double other = 0;   // norms, rotary positions, activations, routing
};

// Activation buffers and op scratch of a step. They grow to what the largest step so far needed.
class Workspace {
 public:
  enum Buffer {
    x,
    normed,
    wide,
    convolved,
    mixed,
    operand,
    split_operand,
    cosine,
    sine,
    router,
    chosen,
    expert_rows,
    expert_weights,
    first_rows,
    gathered,
    experts,
    experts_out,
    head,
    logits,
    best,
    buffer_count
  };

  // A pretended workspace is for dry runs (see memory.h): it counts bytes and has no memory.
  explicit Workspace(bool pretended = false, Place place = Place::host, int device = 0)
      : pretended_(pretended), place_(place), device_(device) {}
  bool pretended() const { return pretended_; }
  // Dense [rows, width].
  Tensor get(Buffer buffer, int64_t rows, int64_t width, DType dtype = DType::f32) {
    return dense(grow(buffers_[buffer], static_cast<size_t>(rows * width * dtype_bytes(dtype))), dtype, {rows, width}, place_,
                 device_);
  }
  Scratch scratch(size_t bytes) { return {grow(scratch_, bytes), bytes}; }
  int64_t bytes() const;
  // Changes whenever a buffer moves.
  int64_t generation() const { return generation_; }

 private:
  std::byte* grow(Block& block, size_t bytes);

  bool pretended_;
  Place place_;
  int device_;
  int64_t generation_ = 0;
  uintptr_t cursor_ = Block::kPretended << 21;  // far from a pretended state
  Block buffers_[buffer_count], scratch_;
};

// Called with rows [T, H] after the embedding (layer -1), after every layer, and after the final norm (layer = number of layers).
using Observer = std::function<void(int64_t layer, const float* rows)>;

// What the layers of a step share.
struct Step {
  const ModelConfig& config;
  Compute& compute;
  Workspace& memory;
  const HybridState& state;
  HybridBatch batch;
  StepTimes times{};

  int64_t tokens() const { return batch.tokens; }
  bool pretended() const { return memory.pretended(); }
  DType operand() const { return compute.operand(config, tokens()); }
  float eps() const { return static_cast<float>(config.rms_norm_eps); }

  // Rows like `in_place` with the given dtype: `in_place` itself if it has that dtype, else a buffer.
  Tensor as(DType dtype, Workspace::Buffer buffer, const Tensor& in_place) {
    return in_place.dtype == dtype ? in_place : memory.get(buffer, in_place.sizes[0], in_place.sizes[1], dtype);
  }

  // y = x W^T + bias, or y += x W^T + bias.
  void project(const Projection& projection, const Tensor& x, const Tensor& y, bool add = false) {
    const Tensor split = split_buffer(x);
    timed(times.dense, [&] { compute.project(projection, x, split, y, add); });
  }
  // Scratch for the split operand of x; empty where Compute does not split operands or x is f16.
  Tensor split_buffer(const Tensor& x) {
    return compute.splits_operands() && x.dtype == DType::f32
               ? memory.get(Workspace::split_operand, 2 * x.sizes[0], x.sizes[1], DType::f16)
               : Tensor{};
  }
  // y = rms_norm(x) W^T + bias.
  void project_normed(const std::vector<float>& weight, const Projection& projection, const Tensor& x, const Tensor& y) {
    const Tensor normed = memory.get(Workspace::normed, tokens(), config.hidden_size, operand());
    const Tensor split = split_buffer(normed);
    if (compute.can_fuse(config, projection, x)) return project_fused(projection, x, {.norm = &weight, .eps = eps()}, y);
    norm(x, weight, normed);
    timed(times.dense, [&] { compute.project(projection, normed, split, y, false); });
  }
  void project_fused(const Projection& projection, const Tensor& x, const Fusion& fusion, const Tensor& y) {
    timed(times.dense, [&] { compute.project_fused(projection, x, fusion, y); });
  }
  void norm(const Tensor& x, const std::vector<float>& weight, const Tensor& y) {
    other([&] { compute.rms_norm(x, weight, eps(), y); });
  }

  // Runs the op of `args` with scratch from the workspace. A dry run only asks how much scratch that is.
  template <class Args>
  void op(const Args& args) {
    if (pretended()) memory.scratch(scratch_bytes(compute.stream(), args));
    timed(times.mixers, [&] { run_lending(compute.stream(), args, [&](size_t bytes) { return memory.scratch(bytes); }); });
  }

  // Calls work() and adds its time to `sum`. In a dry run work() is not called, because there is no memory.
  template <class F>
  void timed(double& sum, F&& work) {
    if (pretended()) return;
    const auto begin = std::chrono::steady_clock::now();
    work();
    sum += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  template <class F>
  void other(F&& work) {
    timed(times.other, work);
  }
};

// x [T, H] += mixer(rms_norm(x)) or feed_forward(rms_norm(x)).
void delta_layer(Step& step, int64_t layer, const DeltaWeights& weights, const std::vector<float>& norm, const Tensor& x);
void attention_layer(Step& step, int64_t layer, const AttentionWeights& weights, const std::vector<float>& norm, const Tensor& x);
void swiglu_layer(Step& step, const SwigluWeights& weights, int64_t size, const std::vector<float>& norm, const Tensor& x);
void expert_layer(Step& step, const ExpertWeights& weights, const std::vector<float>& norm, const Tensor& x);

// Runs a whole step: tokens [T] through all layers, and the logits of the rows `wanted`.
void run_step(Step& step, const Weights& weights, std::span<const int32_t> tokens, std::span<const LogitRow> wanted,
              const Observer& observer = {});

}  // namespace weft::model
