// Who computes what lies between Weft's ops: products with weights, norms, rotary positions, gates and routing, behind one face, so that
// the layers of a model are written once.
//
// Rows are tensors [T, n] or, cut into heads, [T, heads, n] where the stream computes. Those that enter a product have the dtype
// operand(), all others are f32. Weights are named by their place in model::Weights; a Compute knows where its copies are.
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

// Rows up to which the products of a step are so small that f32 operands cost nothing: their time is that of launching them. 0 for models
// whose matrices are larger than that even in a short step.
inline int64_t exact_tokens(const ModelConfig& config) {
  constexpr int64_t kSmallProduct = int64_t{1} << 25;  // multiplications
  const int64_t outputs = std::max({2 * config.intermediate_size, 2 * config.expert_size, 2 * config.shared_expert_size,
                                    config.conv_channels() + config.linear_value_size() + 2 * config.linear_value_heads,
                                    2 * (config.attention_heads + config.kv_heads) * config.head_dim});
  const int64_t tokens = kSmallProduct / (outputs * config.hidden_size);
  return tokens >= kFusedRows ? tokens : 0;
}

// Rows that a step takes at most: enough to fill the machine, few enough that their activations stay small (on a GPU: about a gigabyte).
inline int64_t step_tokens(const Stream& stream, const ModelConfig& config) {
  if (stream.backend != Backend::cuda) return 512;
  const int64_t widest =
      std::max({2 * config.intermediate_size, 2 * config.expert_size * config.experts_per_token,
                config.conv_channels() + config.linear_value_size(), 2 * config.attention_heads * config.head_dim});
  return std::clamp<int64_t>((int64_t{1} << 30) / (8 * (widest + config.hidden_size)) / 1024 * 1024, 2048, 32768);
}

// Rows of a step that want logits, and where they go on the host.
struct LogitRow {
  int64_t row = 0;
  float* logits = nullptr;  // [vocab], or none wanted
  int32_t* best = nullptr;  // the most probable token, or none wanted
};

// The experts of every token, k each in ascending order: which, in which row of those sorted by expert, and how much each counts.
struct Routing {
  Tensor experts, rows;  // [T, k] i32
  Tensor weights;        // [T, k] f32
  Tensor first_row;      // [E + 1] i32: rows of expert e are first_row[e] up to first_row[e + 1], tokens in order
};

// What a step is, as far as replaying it goes: two steps of equal keys differ in the contents of their tensors alone.
struct StepKey {
  int64_t tokens = 0, sequences = 0, decoding = 0, decoded_tokens = 0, longest = 0, table_width = 0, pages = 0;
  std::vector<int64_t> rows;           // that want logits
  bool best = false;                   // and the best of them
  std::vector<const void*> addresses;  // of tensors that are not the workspace's
  int64_t workspace = 0;               // its generation
  uint64_t state = 0;                  // its identity
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

// How steps were run so far.
struct StepCounts {
  int64_t steps = 0, replayed = 0;
  int64_t failed_captures = 0;
  std::string why;  // the latest of those failed
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

  // Of rows that enter the products of a step of so many tokens.
  virtual DType operand(const ModelConfig& config, int64_t tokens) const = 0;
  virtual DType rule_input(const ModelConfig& config, bool prefill) const = 0;  // of q, k and v of the gated delta rule
  // Are operands of f32 cut into two f16 numbers? Then products want room for [2 T, n] of them beside such an operand [T, n].
  virtual bool halves() const = 0;
  virtual Schedule schedule() const = 0;                // of the ops
  virtual int64_t logit_rows(int64_t vocab) const = 0;  // rows of logits that a product gives at most
  virtual int64_t own_bytes() const = 0;                // of memory beside the workspace, where the stream computes

  // Read-only weights as an op's input.
  virtual Tensor numbers(const std::vector<float>& values) const = 0;
  virtual Tensor weights(const Tensor& values) const = 0;

  // Before a step: its tokens, and the batch's tensors where the stream computes. Then the step itself, or a replay of one with the same
  // key (none: it is like no other). After it: the logits that are not there yet.
  virtual HybridBatch take(const HybridBatch& batch, const HybridPlan& plan, std::span<const int32_t> tokens) = 0;
  virtual HybridBatch pretend(const HybridBatch& batch, const HybridPlan& plan) const = 0;
  virtual void run(const StepKey* key, const std::function<void()>& step) = 0;
  virtual void give_logits(std::span<const LogitRow> wanted, const Tensor& logits, const Tensor& best) = 0;
  // Rows as floats on the host, until the next call.
  virtual const float* look(const Tensor& rows) = 0;

  // x = rows of the table, those of the tokens.
  virtual void embed(const Matrix& table, const Tensor& x) = 0;
  // Angles as transformers computes them, in f32: position * frequency, then cosine and sine times the factor. [T, frequencies]
  virtual void rotations(const RopeConfig& rope, const Tensor& positions, const Tensor& cosine, const Tensor& sine) = 0;
  // y = x W^T + bias, or y += that.
  virtual void project(const Projection& projection, const Tensor& x, const Tensor& room, const Tensor& y, bool add) = 0;
  // Can the GEMM of rows x fuse its prologue and epilogue? project_fused() throws Error where the answer is no.
  virtual bool can_fuse(const ModelConfig& config, const Projection& projection, const Tensor& x) const = 0;
  virtual void project_fused(const Projection& projection, const Tensor& x, const Fusion& fusion, const Tensor& y) = 0;
  // Logits of `wanted` from their normed rows, and the best of each into `best` where that is present: to where they are wanted on the
  // host (into `logits` those that are wanted nowhere), or into `logits` on a device.
  virtual void project_head(const Matrix& head, const Tensor& x, const Tensor& room, std::span<const LogitRow> wanted,
                            const Tensor& logits, const Tensor& best) = 0;

  // y = x / sqrt(mean(x^2) + eps) * weight
  virtual void rms_norm(const Tensor& x, const std::vector<float>& weight, float eps, const Tensor& y) = 0;
  // Both, in place: channel j turns with channel j + n by (cosine, sine)[t, j], j < n.
  virtual void norm_and_rotate(const NormedHeads& q, const NormedHeads& k, float eps, const Tensor& cosine, const Tensor& sine) = 0;
  // y = x * sigmoid(gate), all [T, heads, D]; y may be x.
  virtual void sigmoid_gate(const Tensor& x, const Tensor& gate, const Tensor& y) = 0;
  // y = silu(x[:, 0 .. n)) * x[:, n .. 2n); y may be x's first half.
  virtual void swiglu(const Tensor& x, const Tensor& y) = 0;
  // y += sigmoid(gate[:, 0]) * x
  virtual void add_gated(const Tensor& x, const Tensor& gate, const Tensor& y) = 0;

  // Softmax over all experts, the k most probable of them, their weights divided by their sum if the model says so.
  virtual void route(const ModelConfig& config, const Tensor& logits, const Routing& routing) = 0;
  // to[rows[t, i]] = x[t]
  virtual void gather(const Tensor& x, const Routing& routing, const Tensor& to) = 0;
  // Every expert's rows through its own product.
  virtual void project_experts(const std::vector<SwigluWeights>& experts, Projection SwigluWeights::*which, const Routing& routing,
                               const Tensor& x, const Tensor& room, const Tensor& y) = 0;
  // x[t] += sum_i weights[t, i] * from[rows[t, i]]
  virtual void scatter(const Tensor& from, const Routing& routing, const Tensor& x) = 0;

 protected:
  Stream stream_;
  StepCounts counts_;
};

// On the cpu, with the threads and instruction set of the stream; also for the reference backend. A token's numbers do not depend on
// the other tokens of its step.
std::unique_ptr<Compute> cpu_compute(const Stream& stream);

// Row views of a [T, n] tensor: columns [first, first + count), and those cut into heads `head_stride` apart.
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
