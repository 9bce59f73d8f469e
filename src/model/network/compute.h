// The arithmetic between Weft's ops: GEMMs with weights, norms, rotary positions, gates and expert routing. One interface for the
// cpu and for GPUs, so that the layers of a model are written once.
//
// Activations are tensors [T, n] or, split into heads, [T, heads, n], in the memory of the stream's device. Rows that enter a GEMM
// have the dtype operand(), all others are f32. Weights are named by their address in model::Weights; a Compute knows where its
// copies are.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/checkpoint/config.h"
#include "model/checkpoint/weights.h"
#include "model/network/device.h"
#include "weft/device.h"
#include "weft/hybrid_state.h"
#include "weft/tensor.h"

namespace weft::model {

// Most rows of a GEMM that fuses a prologue and an epilogue: see Compute::can_fuse.
inline constexpr int64_t kFusedRows = 64;

// Most rows of a step whose GEMMs are so small that launch time dominates and f32 operands cost nothing on a GPU. 0 for models
// whose matrices are too large for that with kFusedRows rows.
inline int64_t exact_tokens(const ModelConfig& config) {
  constexpr int64_t kSmallProduct = int64_t{1} << 25;  // multiplications
  const int64_t outputs = std::max({2 * config.intermediate_size, 2 * config.expert_size, 2 * config.shared_expert_size,
                                    config.conv_channels() + config.linear_value_size() + 2 * config.linear_value_heads,
                                    2 * (config.attention_heads + config.kv_heads) * config.head_dim});
  const int64_t tokens = kSmallProduct / (outputs * config.hidden_size);
  return tokens >= kFusedRows ? tokens : 0;
}

// Most rows of a step: enough to fill the device, few enough that their activations stay small (on a GPU about a gigabyte).
inline int64_t step_tokens(const Stream& stream, const ModelConfig& config) {
  if (stream.backend != Backend::cuda) return 512;
  const int64_t widest =
      std::max({2 * config.intermediate_size, 2 * config.expert_size * config.experts_per_token,
                config.conv_channels() + config.linear_value_size(), 2 * config.attention_heads * config.head_dim});
  return std::clamp<int64_t>((int64_t{1} << 30) / (8 * (widest + config.hidden_size)) / 1024 * 1024, 2048, 32768);
}

// A row of a step whose logits are wanted, and where the host wants them.
struct LogitRow {
  int64_t row = 0;
  float* logits = nullptr;  // [vocab]; null: not wanted
  int32_t* best = nullptr;  // the most probable token; null: not wanted
};

// The k experts of every token, in ascending order.
struct Routing {
  Tensor experts;    // [T, k] i32: expert
  Tensor rows;       // [T, k] i32: row of the token in the rows sorted by expert
  Tensor weights;    // [T, k] f32: weight of the expert's result
  Tensor first_row;  // [E + 1] i32: expert e has the sorted rows [first_row[e], first_row[e + 1]), in the order of tokens
};

// Identifies steps that can share a CUDA graph: steps with equal keys differ only in the contents of their tensors.
struct StepKey {
  int64_t tokens = 0, sequences = 0, decoding = 0, decoded_tokens = 0, longest = 0, table_width = 0, pages = 0;
  std::vector<int64_t> rows;           // whose logits are wanted
  bool best = false;                   // is the most probable token wanted too?
  std::vector<const void*> addresses;  // of tensors outside the workspace
  int64_t workspace = 0;               // Workspace::generation()
  uint64_t state = 0;                  // HybridState::identity()
  bool operator==(const StepKey&) const = default;
};

// The work that Compute::project_fused() does in the same kernel as the GEMM.
struct Fusion {
  // Prologue, on the rows that enter the GEMM: an RMS norm, or a sigmoid gate, or neither.
  const std::vector<float>* norm = nullptr;  // weights of the norm
  float eps = 0;                             // of the norm
  Tensor gate{};                             // [T, heads, D]: x * sigmoid(gate)
  // Epilogue, on the rows that leave the GEMM.
  bool swiglu = false;  // y = silu(a) * b for result rows [a | b]
  bool add = false;     // y += result
};

// Heads [T, heads, D] to be normed and rotated, and the weights of their norm.
struct NormedHeads {
  Tensor heads;
  const std::vector<float>& weight;
};

// How the steps so far ran.
struct StepCounts {
  int64_t steps = 0, replayed = 0;  // all steps; those that replayed a CUDA graph
  int64_t failed_captures = 0;
  std::string why;  // the latest capture failed
};

class Compute {
 public:
  explicit Compute(const Stream& stream) : stream_(stream) {}
  virtual ~Compute() = default;
  Compute(const Compute&) = delete;
  Compute& operator=(const Compute&) = delete;

  const Stream& stream() const { return stream_; }
  const StepCounts& counts() const { return counts_; }
  Place place() const { return stream_.backend == Backend::cuda ? Place::cuda : Place::host; }

  // Dtype of the rows that enter the GEMMs of a step of `tokens` tokens.
  virtual DType operand(const ModelConfig& config, int64_t tokens) const = 0;
  // Dtype of q, k and v of the gated delta rule.
  virtual DType rule_input(const ModelConfig& config, bool prefill) const = 0;
  // Are f32 operands [T, n] split into two f16 numbers each? Then GEMMs need scratch `split`, [2 T, n] f16, for the split operand.
  virtual bool splits_operands() const = 0;
  virtual Schedule schedule() const = 0;                // of the ops
  virtual int64_t logit_rows(int64_t vocab) const = 0;  // most rows of logits that one GEMM computes
  virtual int64_t own_bytes() const = 0;                // of device memory outside the workspace

  // Read-only weights as an input of an op.
  virtual Tensor numbers(const std::vector<float>& values) const = 0;
  virtual Tensor weights(const Tensor& values) const = 0;

  // A step is begin_step(), run() and fetch_logits(), in this order. begin_step() takes the tokens and returns the batch with its
  // tensors in the memory of the stream's device. run() calls `step`, or replays the CUDA graph of a step with the same key;
  // without a key it never replays. fetch_logits() copies the logits to the host where they are not there yet. pretend() stands in
  // for begin_step() in a dry run (see memory.h).
  virtual HybridBatch begin_step(const HybridBatch& batch, const HybridPlan& plan, std::span<const int32_t> tokens) = 0;
  virtual HybridBatch pretend(const HybridBatch& batch, const HybridPlan& plan) const = 0;
  virtual void run(const StepKey* key, const std::function<void()>& step) = 0;
  virtual void fetch_logits(std::span<const LogitRow> wanted, const Tensor& logits, const Tensor& best) = 0;
  // Rows as f32 on the host; valid until the next call.
  virtual const float* rows_on_host(const Tensor& rows) = 0;

  // x[t] = row of the table for token t.
  virtual void embed(const Matrix& table, const Tensor& x) = 0;
  // cosine and sine [T, frequencies] of position * frequency, times the factor; f32, as transformers computes them.
  virtual void rotations(const RopeConfig& rope, const Tensor& positions, const Tensor& cosine, const Tensor& sine) = 0;
  // y = x W^T + bias, or y += x W^T + bias.
  virtual void project(const Projection& projection, const Tensor& x, const Tensor& split, const Tensor& y, bool add) = 0;
  // Can the GEMM of rows x fuse its prologue and epilogue? project_fused() throws Error where the answer is no.
  virtual bool can_fuse(const ModelConfig& config, const Projection& projection, const Tensor& x) const = 0;
  virtual void project_fused(const Projection& projection, const Tensor& x, const Fusion& fusion, const Tensor& y) = 0;
  // Logits of the rows `wanted` from their normed rows x, and the most probable token of each into `best` if that is present. On a
  // device the logits go to `logits`. On the host they go to LogitRow::logits, or to `logits` where that is null.
  virtual void project_head(const Matrix& head, const Tensor& x, const Tensor& split, std::span<const LogitRow> wanted,
                            const Tensor& logits, const Tensor& best) = 0;

  // y = x / sqrt(mean(x^2) + eps) * weight
  virtual void rms_norm(const Tensor& x, const std::vector<float>& weight, float eps, const Tensor& y) = 0;
  // RMS norm and rotary positions of q and k, in place: channels j and j + n are rotated by (cosine, sine)[t, j], j < n.
  virtual void norm_and_rotate(const NormedHeads& q, const NormedHeads& k, float eps, const Tensor& cosine, const Tensor& sine) = 0;
  // y = x * sigmoid(gate), all [T, heads, D]; y may be x.
  virtual void sigmoid_gate(const Tensor& x, const Tensor& gate, const Tensor& y) = 0;
  // y = silu(x[:, 0 .. n)) * x[:, n .. 2n); y may be x's first half.
  virtual void swiglu(const Tensor& x, const Tensor& y) = 0;
  // y += sigmoid(gate[:, 0]) * x
  virtual void add_gated(const Tensor& x, const Tensor& gate, const Tensor& y) = 0;

  // Softmax over all experts, then the k most probable ones. Their weights are divided by their sum if the model says so.
  virtual void route(const ModelConfig& config, const Tensor& logits, const Routing& routing) = 0;
  // to[rows[t, i]] = x[t]
  virtual void gather(const Tensor& x, const Routing& routing, const Tensor& to) = 0;
  // The rows of every expert through the expert's own projection.
  virtual void project_experts(const std::vector<SwigluWeights>& experts, Projection SwigluWeights::*which, const Routing& routing,
                               const Tensor& x, const Tensor& split, const Tensor& y) = 0;
  // x[t] += sum_i weights[t, i] * from[rows[t, i]]
  virtual void scatter(const Tensor& from, const Routing& routing, const Tensor& x) = 0;

 protected:
  Stream stream_;
  StepCounts counts_;
};

// Computes on the cpu with the threads and the instruction set of the stream, also for the reference backend. The results of a
// token do not depend on the other tokens of its step.
std::unique_ptr<Compute> cpu_compute(const Stream& stream);

// Views of a [T, n] tensor: columns [first, first + count), heads `head_stride` columns apart, and rows [first, first + count).
inline Tensor columns_of(const Tensor& rows, int64_t first, int64_t count) {
  Tensor t = rows;
  t.data = static_cast<std::byte*>(t.data) + first * dtype_bytes(t.dtype);
  t.sizes[1] = count;
  return t;
}
inline Tensor heads_of(const Tensor& rows, int64_t first, int64_t heads, int64_t size, int64_t head_stride) {
  Tensor t = columns_of(rows, first, size);
  t.rank = 3;
  t.sizes = {rows.sizes[0], heads, size};
  t.strides = {rows.strides[0], head_stride, 1};
  return t;
}
inline Tensor rows_of(const Tensor& rows, int64_t first, int64_t count) {
  Tensor t = rows;
  t.data = static_cast<std::byte*>(t.data) + first * t.strides[0] * dtype_bytes(t.dtype);
  t.sizes[0] = count;
  return t;
}

}  // namespace weft::model
