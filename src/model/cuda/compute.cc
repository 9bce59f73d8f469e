// A step's arithmetic on a GPU: see model/compute.h.
//
// Everything is asked of the stream's queue and nothing waits for it but give_logits(). The numbers of a batch and its tokens go up in one
// copy. A step that comes a second time with the same key is captured in a graph, from then on replayed: such a step differs from the
// first in the contents of its tensors alone.
#include <algorithm>
#include <array>
#include <cstring>
#include <deque>

#include "core/check.h"
#include "cuda/device.h"
#include "model/cuda/products.h"
#include "model/cuda/rows.h"
#include "model/cuda/weights.h"
#include "shared/half.h"

namespace weft::model {
namespace {

constexpr const char* kOp = "model";
constexpr size_t kMostGraphs = 16;
constexpr int64_t kLogitBytes = 64 << 20;  // of rows that are given at a time
constexpr int64_t kBatchBytes = 1 << 20;   // of a batch's numbers, to begin with

using weft::cuda::check;
using weft::cuda::OnDevice;

// Host memory that a device copies from and to while the host goes on.
class Pinned {
 public:
  Pinned() = default;
  ~Pinned() {
    if (data_) cudaFreeHost(data_);
  }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  std::byte* grow(size_t bytes) {
    if (bytes_ < bytes) {
      if (data_) check(cudaFreeHost(data_), kOp, "host memory");
      data_ = nullptr;
      check(cudaMallocHost(&data_, bytes), kOp, "host memory");
      bytes_ = bytes;
    }
    return static_cast<std::byte*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// A batch's numbers on their way up, two of them in turn: the next is written while the last is read.
struct Upload {
  Pinned host;
  cudaEvent_t done = nullptr;
};

struct Graph {
  StepKey key;
  cudaGraphExec_t exec = nullptr;
};

// Every tensor of a batch, in an order of its own.
template <class Batch>
auto tensors_of(Batch& batch) {
  return std::array{&batch.sequences.cu_seqlens, &batch.slots,   &batch.in_slots,  &batch.out_slots, &batch.window_offsets,
                    &batch.has_initial,          &batch.lengths, &batch.positions, &batch.page_table};
}

class CudaCompute final : public Compute {
 public:
  CudaCompute(const Stream& stream, std::shared_ptr<const DeviceWeights> weights, bool exact)
      : Compute(stream), weights_(std::move(weights)), exact_(exact) {
    if (Status status = weft::cuda::check_stream(stream, kOp); !status) throw Error(std::move(status));
    if (!weights_) return;
    const OnDevice on(stream.device, kOp);
    blas_ = std::make_unique<cuda::Blas>(stream.device);
    workspace_ = Block::allocate(cuda::Blas::kWorkspace, Place::cuda, stream.device);
    batch_ = Block::allocate(kBatchBytes, Place::cuda, stream.device);
    check(cudaStreamCreateWithFlags(&capturing_, cudaStreamNonBlocking), kOp, "stream");
    for (Upload& upload : uploads_) check(cudaEventCreateWithFlags(&upload.done, cudaEventDisableTiming), kOp, "stream");
  }

  ~CudaCompute() override {
    if (!weights_) return;
    cudaStreamSynchronize(weft::cuda::queue_of(stream_));
    for (const Graph& graph : graphs_)
      if (graph.exec) cudaGraphExecDestroy(graph.exec);
    for (const Upload& upload : uploads_)
      if (upload.done) cudaEventDestroy(upload.done);
    if (capturing_) cudaStreamDestroy(capturing_);
  }

  DType operand() const override { return exact_ ? DType::f32 : DType::f16; }
  bool halves() const override { return exact_; }
  // Chunks on tensor cores want 16 bits; states of few numbers are as well off token by token, in f32.
  DType rule_input(const ModelConfig& config, bool prefill) const override {
    constexpr int64_t kSmallState = 64 * 64;
    return !exact_ && prefill && config.linear_key_head_dim * config.linear_value_head_dim >= kSmallState ? DType::f16 : DType::f32;
  }
  Schedule schedule() const override { return Schedule::fastest; }
  int64_t logit_rows(int64_t vocab) const override { return std::max<int64_t>(1, kLogitBytes / (4 * vocab)); }
  int64_t own_bytes() const override { return static_cast<int64_t>(cuda::Blas::kWorkspace) + kBatchBytes; }

  Tensor numbers(const std::vector<float>& values) const override {
    Tensor t = dense(nullptr, DType::f32, {static_cast<int64_t>(values.size())}, Place::cuda, stream_.device);
    t.data = weights_ ? const_cast<float*>(weights_->numbers(values)) : pretended(t);  // NOLINT: ops do not write their inputs
    return t;
  }
  Tensor weights(const Tensor& values) const override {
    if (weights_) return weights_->tensor(values);
    Tensor t = values;
    t.data = pretended(t);
    return placed(t);
  }

  HybridBatch pretend(const HybridBatch& batch, const HybridPlan& plan) const override {
    HybridBatch out = batch;
    for (Tensor* t : tensors_of(out)) *t = placed(*t);
    widen(out, plan);
    return out;
  }

  HybridBatch take(const HybridBatch& batch, const HybridPlan& plan, std::span<const int32_t> tokens) override {
    const OnDevice on(stream_.device, kOp);
    HybridBatch out = batch;
    widen(out, plan);
    // Tokens first, then the tensors, each at a multiple of the alignment.
    const auto padded = [](int64_t count) { return (count * 4 + 255) / 256 * 256; };
    int64_t bytes = padded(static_cast<int64_t>(tokens.size()));
    for (const Tensor* t : tensors_of(out))
      if (t->present()) bytes += padded(t->elements());
    Upload& upload = uploads_[turn_ = 1 - turn_];
    check(cudaEventSynchronize(upload.done), kOp, "batch");
    std::byte* host = upload.host.grow(static_cast<size_t>(bytes));
    if (batch_.bytes() < static_cast<size_t>(bytes)) {
      check(cudaStreamSynchronize(queue()), kOp, "batch");  // a step may be reading the old one
      batch_ = Block();
      batch_ = Block::allocate(static_cast<size_t>(2 * bytes), Place::cuda, stream_.device);
    }
    std::memcpy(host, tokens.data(), tokens.size() * sizeof(int32_t));
    tokens_ = reinterpret_cast<const int32_t*>(batch_.data());
    int64_t at = padded(static_cast<int64_t>(tokens.size()));
    const auto from = tensors_of(batch);
    const auto to = tensors_of(out);
    for (size_t i = 0; i < to.size(); ++i) {
      if (!to[i]->present()) continue;
      fill(host + at, *from[i], *to[i]);
      const int64_t room = padded(to[i]->elements());
      *to[i] = placed(*to[i]);
      to[i]->data = batch_.data() + at;
      at += room;
    }
    check(cudaMemcpyAsync(batch_.data(), host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, queue()), kOp, "batch");
    check(cudaEventRecord(upload.done, queue()), kOp, "batch");
    return out;
  }

  void run(const StepKey& key, const std::function<void()>& step) override {
    const OnDevice on(stream_.device, kOp);
    const auto known = std::find_if(graphs_.begin(), graphs_.end(), [&](const Graph& graph) { return graph.key == key; });
    if (known == graphs_.end()) {
      step();
      if (graphs_.size() == kMostGraphs) {
        if (graphs_.back().exec) cudaGraphExecDestroy(graphs_.back().exec);
        graphs_.pop_back();
      }
      graphs_.push_front({key, nullptr});
      return;
    }
    if (!known->exec) known->exec = capture(step);
    std::rotate(graphs_.begin(), known, known + 1);
    check(cudaGraphLaunch(graphs_.front().exec, queue()), kOp, "graph");
  }

  void give_logits(std::span<const LogitRow> wanted, const Tensor& logits, const Tensor& best) override {
    const OnDevice on(stream_.device, kOp);
    const bool seen = std::any_of(wanted.begin(), wanted.end(), [](const LogitRow& row) { return row.logits != nullptr; });
    const size_t row = static_cast<size_t>(logits.sizes[1]) * sizeof(float), bytes = seen ? row * wanted.size() : 0;
    const size_t best_bytes = best.present() ? wanted.size() * sizeof(int32_t) : 0;
    std::byte* host = logits_.grow(bytes + best_bytes);
    const auto fetch = [&](std::byte* to, const Tensor& from, size_t count) {
      if (count > 0) check(cudaMemcpyAsync(to, from.data, count, cudaMemcpyDeviceToHost, queue()), kOp, "logits");
    };
    fetch(host, logits, bytes);
    fetch(host + bytes, best, best_bytes);
    check(cudaStreamSynchronize(queue()), kOp, "logits");
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (wanted[i].logits) std::memcpy(wanted[i].logits, host + i * row, row);
      if (wanted[i].best) std::memcpy(wanted[i].best, host + bytes + i * sizeof(int32_t), sizeof(int32_t));
    }
  }

  const float* look(const Tensor& rows) override {
    const auto count = static_cast<size_t>(rows.elements());
    std::vector<uint16_t> halves(rows.dtype == DType::f16 ? count : 0);
    seen_.resize(count);
    copy_bytes(halves.empty() ? static_cast<void*>(seen_.data()) : halves.data(), rows.data,
               count * static_cast<size_t>(dtype_bytes(rows.dtype)));
    std::transform(halves.begin(), halves.end(), seen_.begin(), f16_to_f32);
    return seen_.data();
  }

  void embed(const Matrix& table, const Tensor& x) override { cuda::embed(stream_, weights_->matrix(table), tokens_, x); }
  void rotations(const RopeConfig& rope, const Tensor& positions, const Tensor& cosine, const Tensor& sine) override {
    cuda::rotations(stream_, weights_->frequencies(), static_cast<float>(rope.factor), positions, cosine, sine);
  }
  void project(const Projection& projection, const Tensor& x, const Tensor& room, const Tensor& y, bool add) override {
    const cuda::DeviceMatrix& w = weights_->matrix(projection);
    multiply(w, x, room, y, add);
    if (w.bias) cuda::add_bias(stream_, y, w.bias);
  }
  void project_head(const Matrix& head, const Tensor& x, const Tensor& room, std::span<const LogitRow>, const Tensor& logits,
                    const Tensor& best) override {
    multiply(weights_->matrix(head), x, room, logits, false);
    if (best.present()) cuda::best_of(stream_, logits, best);
  }
  void rms_norm(const Tensor& x, const std::vector<float>& weight, float eps, const Tensor& y) override {
    cuda::rms_norm(stream_, x, weights_->numbers(weight), eps, y);
  }
  void norm_and_rotate(const Tensor& heads, const std::vector<float>& weight, float eps, const Tensor& cosine,
                       const Tensor& sine) override {
    cuda::norm_and_rotate(stream_, heads, weights_->numbers(weight), eps, cosine, sine);
  }
  void sigmoid_gate(const Tensor& x, const Tensor& gate, const Tensor& y) override { cuda::sigmoid_gate(stream_, x, gate, y); }
  void swiglu(const Tensor& x, const Tensor& y) override { cuda::swiglu(stream_, x, y); }
  void add_gated(const Tensor& x, const Tensor& gate, const Tensor& y) override { cuda::add_gated(stream_, x, gate, y); }
  void route(const ModelConfig& config, const Tensor& logits, const Routing& routing) override {
    cuda::route(stream_, config.experts_per_token, config.normalize_expert_weights, logits, routing);
  }
  void gather(const Tensor& x, const Routing& routing, const Tensor& to) override { cuda::gather(stream_, x, routing, to); }
  void project_experts(const std::vector<SwigluWeights>& experts, Projection SwigluWeights::*which, const Routing& routing,
                       const Tensor& x, const Tensor& room, const Tensor& y) override {
    multiply(weights_->experts(experts, which), x, room, y, false, &routing);
  }
  void scatter(const Tensor& from, const Routing& routing, const Tensor& x) override { cuda::scatter(stream_, from, routing, x); }

 private:
  cudaStream_t queue() const { return weft::cuda::queue_of(stream_); }
  // An address that is not followed, far from those of pretended states and workspaces.
  void* pretended(const Tensor& t) const {
    return Block::pretend(static_cast<size_t>(t.elements() * dtype_bytes(t.dtype)), pretended_).data();
  }

  Tensor placed(Tensor t) const {
    t.place = Place::cuda;
    t.device = static_cast<int8_t>(stream_.device);
    return t;
  }
  // Tables are as wide as the capacity wants, so that steps stay alike while sequences grow.
  static void widen(HybridBatch& batch, const HybridPlan& plan) {
    const int64_t pages = (plan.capacity + kPageTokens - 1) / kPageTokens;
    batch.page_table.sizes[1] = std::max(batch.page_table.sizes[1], pages);
    batch.page_table.strides[0] = batch.page_table.sizes[1];
  }
  // Rows of numbers, padded with -1 where the copy is wider.
  static void fill(std::byte* to, const Tensor& from, const Tensor& like) {
    const int64_t rows = from.rank == 2 ? from.sizes[0] : 1, have = from.rank == 2 ? from.sizes[1] : from.sizes[0];
    const int64_t want = like.rank == 2 ? like.sizes[1] : like.sizes[0];
    auto* out = reinterpret_cast<int32_t*>(to);
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(static_cast<const int32_t*>(from.data) + r * have, have, out + r * want);
      std::fill(out + r * want + have, out + (r + 1) * want, -1);
    }
  }

  void multiply(const cuda::DeviceMatrix& w, const Tensor& x, const Tensor& room, const Tensor& y, bool add,
                const Routing* routing = nullptr) {
    if (x.sizes[0] == 0) return;
    if (!exact_) return multiply_halves(w, x, y, add, routing);
    const int64_t T = x.sizes[0];
    cuda::split(stream_, x, room);
    multiply_halves(w, rows_of(room, 0, T), y, add, routing);
    multiply_halves(w, rows_of(room, T, T), y, true, routing);
    if (!w.low) return;
    cuda::DeviceMatrix low = w;
    low.data = w.low;
    multiply_halves(low, rows_of(room, 0, T), y, true, routing);
  }
  // With an operand of f16.
  void multiply_halves(const cuda::DeviceMatrix& w, const Tensor& x, const Tensor& y, bool add, const Routing* routing) {
    if (routing) return cuda::multiply_tiles(stream_, w, x, y, add, routing);
    if (!cuda::Blas::fits(w, x, y)) return cuda::multiply_tiles(stream_, w, x, y, add);
    if (x.sizes[0] <= cuda::kFewRows) return cuda::multiply_few(stream_, w, x, y, add);
    blas_->multiply(stream_, w, x, y, add, workspace_.data());
  }

  cudaGraphExec_t capture(const std::function<void()>& step) {
    void* const before = stream_.queue;
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(capturing_, cudaStreamCaptureModeRelaxed), kOp, "graph");
    stream_.queue = capturing_;
    try {
      step();
    } catch (...) {
      stream_.queue = before;
      cudaStreamEndCapture(capturing_, &graph);
      if (graph) cudaGraphDestroy(graph);
      cudaGetLastError();
      throw;
    }
    stream_.queue = before;
    check(cudaStreamEndCapture(capturing_, &graph), kOp, "graph");
    cudaGraphExec_t exec = nullptr;
    const cudaError_t error = cudaGraphInstantiate(&exec, graph, 0);
    cudaGraphDestroy(graph);
    check(error, kOp, "graph");
    return exec;
  }

  std::shared_ptr<const DeviceWeights> weights_;
  bool exact_;
  std::unique_ptr<cuda::Blas> blas_;
  Block workspace_, batch_;
  cudaStream_t capturing_ = nullptr;
  std::array<Upload, 2> uploads_;
  size_t turn_ = 0;
  const int32_t* tokens_ = nullptr;
  std::deque<Graph> graphs_;  // latest first; without exec: seen once
  Pinned logits_;
  std::vector<float> seen_;
  mutable uintptr_t pretended_ = Block::kPretended << 22;
};

}  // namespace

std::unique_ptr<Compute> cuda_compute(const Stream& stream, std::shared_ptr<const DeviceWeights> weights, bool exact) {
  return std::make_unique<CudaCompute>(stream, std::move(weights), exact);
}

}  // namespace weft::model
