// One step of a hybrid model: rows of token activations through all layers, with the mixers' memory in a HybridState.
//
// The mixers are Weft's ops; matrix products, norms and gates between them are model/dense.h and model/rows.h. Activations are f32.
#pragma once

#include <chrono>
#include <functional>
#include <span>

#include "model/config.h"
#include "model/memory.h"
#include "model/rows.h"
#include "model/weights.h"
#include "weft/hybrid_state.h"

namespace weft::model {

// Where the time of steps went, in seconds.
struct StepTimes {
  double dense = 0;   // matrix products
  double mixers = 0;  // Weft's ops
  double other = 0;   // norms, rotary positions, activations, routing
};

// Buffers of a step, as large as the largest step so far.
class Workspace {
 public:
  enum Buffer { x, normed, wide, mixed, cosine, sine, router, gathered, experts, experts_out, head, buffer_count };

  // A pretended workspace counts bytes and has addresses that must not be followed.
  explicit Workspace(bool pretended = false) : pretended_(pretended) {}
  bool pretended() const { return pretended_; }
  float* get(Buffer buffer, int64_t numbers) {
    return reinterpret_cast<float*>(grow(buffers_[buffer], static_cast<size_t>(numbers) * 4));
  }
  Scratch scratch(size_t bytes) { return {grow(scratch_, bytes), bytes}; }
  int64_t bytes() const;

 private:
  std::byte* grow(Block& block, size_t bytes);

  bool pretended_;
  uintptr_t cursor_ = Block::kPretended << 21;  // far from a pretended state
  Block buffers_[buffer_count], scratch_;
};

// Called after the embedding (-1), after every layer (0 ...) and after the final norm (number of layers) with the rows [T, H].
using Observer = std::function<void(int64_t layer, const float* rows)>;

// Everything that a step's layers share.
struct Step {
  const ModelConfig& config;
  Stream stream;
  Workspace& memory;
  const HybridState& state;
  HybridBatch batch;
  StepTimes times{};

  int64_t tokens() const { return batch.tokens; }
  bool pretended() const { return memory.pretended(); }

  // y = x W^T + bias, or y += that.
  void project(const Projection& projection, int64_t rows, Rows x, Rows y, bool add = false);
  void project_all(std::span<const DenseTask> tasks);

  // An op with scratch of the workspace.
  template <class Args>
  void op(void (*launch)(const Stream&, const Args&, Scratch), const Args& args) {
    const size_t bytes = scratch_bytes(stream, args);
    const Scratch scratch = memory.scratch(bytes);
    timed(times.mixers, [&] { launch(stream, args, scratch); });
  }

  // Runs something that touches memory, unless that is pretended, and adds its time to `sum`.
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

// x [T, H] += mixer or feed-forward of normed [T, H].
void delta_layer(Step& step, int64_t layer, const DeltaWeights& weights, Rows normed, Rows x);
void attention_layer(Step& step, int64_t layer, const AttentionWeights& weights, Rows normed, Rows x);
void swiglu_layer(Step& step, const SwigluWeights& weights, int64_t size, Rows normed, Rows x);
void expert_layer(Step& step, const ExpertWeights& weights, Rows normed, Rows x);

// Which rows of a step want logits, and where they go.
struct LogitRow {
  int64_t row = 0;
  float* logits = nullptr;  // [vocab]
};

// The whole step: tokens [T] through all layers; logits of the rows asked for.
void run_step(Step& step, const Weights& weights, std::span<const int32_t> tokens, std::span<const LogitRow> wanted,
              const Observer& observer = {});

}  // namespace weft::model
