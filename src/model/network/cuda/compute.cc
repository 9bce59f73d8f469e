// The Compute of a GPU: see model/network/compute.h.
//
// All work is enqueued on the stream. Of a step, only fetch_logits() synchronises, apart from buffers that grow. The indices of a
// batch and its tokens are uploaded in one copy. When a step comes a second time with the same key, it is captured in a CUDA graph,
// which later steps with that key replay: they differ only in the contents of their tensors. A capture fails if another thread of
// the process synchronises the device meanwhile. The failure is counted with its reason, and the step runs without a graph.
#include <algorithm>
#include <array>
#include <cstring>
#include <deque>

#include "common/half.h"
#include "core/check.h"
#include "cuda/runner.h"
#include "model/network/cuda/activations.h"
#include "model/network/cuda/gemm.h"
#include "model/network/cuda/weights.h"

namespace weft::model {
namespace {

constexpr const char* kOp = "model";
constexpr size_t kMostGraphs = 16;
constexpr int kMostCaptures = 3;           // attempts to capture a step that fails
constexpr int64_t kLogitBytes = 64 << 20;  // of logits that one GEMM computes
constexpr int64_t kBatchBytes = 1 << 20;   // initial size of the buffer for a batch

using weft::cuda::check;
using weft::cuda::OnDevice;

// Pinned host memory, for asynchronous copies.
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
      bytes_ = 0;
      check(cudaMallocHost(&data_, bytes), kOp, "host memory");
      bytes_ = bytes;
    }
    return static_cast<std::byte*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Owners of CUDA handles.
template <auto Destroy>
struct Destroyer {
  template <class T>
  void operator()(T* handle) const {
    Destroy(handle);
  }
};
template <class Handle, auto Destroy>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroyer<Destroy>>;
using Event = Owned<cudaEvent_t, cudaEventDestroy>;
using Queue = Owned<cudaStream_t, cudaStreamDestroy>;
using GraphExec = Owned<cudaGraphExec_t, cudaGraphExecDestroy>;

Event make_event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), kOp, "stream");
  return Event(event);
}
Queue make_queue() {
  cudaStream_t queue = nullptr;
  check(cudaStreamCreateWithFlags(&queue, cudaStreamNonBlocking), kOp, "stream");
  return Queue(queue);
}

// A staging buffer for the upload of a batch. Two alternate: one is written while the copy from the other may still run.
struct Upload {
  Pinned host;
  Event done;
};

struct Graph {
  StepKey key;
  GraphExec exec;    // null: the step was seen once, or its captures failed
  int failures = 0;  // of captures
};

// All tensors of a batch, in a fixed order.
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
    capturing_ = make_queue();
    done_ = make_event();
    for (Upload& upload : uploads_) upload.done = make_event();
  }

  // Waits for work that is still running, through an event, because the queue may have been destroyed.
  ~CudaCompute() override {
    if (done_) cudaEventSynchronize(done_.get());
  }

  DType operand(const ModelConfig& config, int64_t tokens) const override {
    return exact_ || tokens <= exact_tokens(config) ? DType::f32 : DType::f16;
  }
  bool splits_operands() const override { return true; }
  // The fastest prefill kernels need 16-bit inputs. Small states are fast enough with f32 inputs.
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

  HybridBatch begin_step(const HybridBatch& batch, const HybridPlan& plan, std::span<const int32_t> tokens) override {
    const OnDevice on(stream_.device, kOp);
    HybridBatch out = batch;
    widen(out, plan);
    // Tokens first, then the tensors, each aligned to 256 bytes.
    const auto padded = [](int64_t count) { return (count * 4 + 255) / 256 * 256; };
    int64_t bytes = padded(static_cast<int64_t>(tokens.size()));
    for (const Tensor* t : tensors_of(out))
      if (t->present()) bytes += padded(t->elements());
    Upload& upload = uploads_[turn_ = 1 - turn_];
    check(cudaEventSynchronize(upload.done.get()), kOp, "batch");
    std::byte* host = upload.host.grow(static_cast<size_t>(bytes));
    if (batch_.bytes() < static_cast<size_t>(bytes)) {
      check(cudaStreamSynchronize(queue()), kOp, "batch");  // a running step may still read the old buffer
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
      const int64_t bytes_of = padded(to[i]->elements());
      *to[i] = placed(*to[i]);
      to[i]->data = batch_.data() + at;
      at += bytes_of;
    }
    check(cudaMemcpyAsync(batch_.data(), host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, queue()), kOp, "batch");
    check(cudaEventRecord(upload.done.get(), queue()), kOp, "batch");
    return out;
  }

  void run(const StepKey* key, const std::function<void()>& step) override {
    const OnDevice on(stream_.device, kOp);
    const RecordAtEnd recorded{done_.get(), queue()};
    ++counts_.steps;
    if (!key) return step();
    auto known = std::find_if(graphs_.begin(), graphs_.end(), [&](const Graph& graph) { return graph.key == *key; });
    if (known == graphs_.end()) {
      step();
      if (graphs_.size() == kMostGraphs) graphs_.pop_back();
      graphs_.push_front({*key, nullptr});
      return;
    }
    if (!known->exec && known->failures < kMostCaptures) capture(*known, step);
    std::rotate(graphs_.begin(), known, known + 1);
    const Graph& graph = graphs_.front();
    if (!graph.exec) return step();
    check(cudaGraphLaunch(graph.exec.get(), queue()), kOp, "graph");
    ++counts_.replayed;
  }

  void fetch_logits(std::span<const LogitRow> wanted, const Tensor& logits, const Tensor& best) override {
    const OnDevice on(stream_.device, kOp);
    const bool any_logits = std::any_of(wanted.begin(), wanted.end(), [](const LogitRow& row) { return row.logits != nullptr; });
    const size_t row = static_cast<size_t>(logits.sizes[1]) * sizeof(float), bytes = any_logits ? row * wanted.size() : 0;
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

  const float* rows_on_host(const Tensor& rows) override {
    const auto count = static_cast<size_t>(rows.elements());
    std::vector<uint16_t> f16(rows.dtype == DType::f16 ? count : 0);
    host_rows_.resize(count);
    copy_bytes(f16.empty() ? static_cast<void*>(host_rows_.data()) : f16.data(), rows.data,
               count * static_cast<size_t>(dtype_bytes(rows.dtype)));
    std::transform(f16.begin(), f16.end(), host_rows_.begin(), f16_to_f32);
    return host_rows_.data();
  }

  void embed(const Matrix& table, const Tensor& x) override { cuda::embed(stream_, weights_->matrix(table), tokens_, x); }
  void rotations(const RopeConfig& rope, const Tensor& positions, const Tensor& cosine, const Tensor& sine) override {
    cuda::rotations(stream_, weights_->frequencies(), static_cast<float>(rope.factor), positions, cosine, sine);
  }
  void project(const Projection& projection, const Tensor& x, const Tensor& split, const Tensor& y, bool add) override {
    const cuda::DeviceMatrix& w = weights_->matrix(projection);
    multiply(w, x, split, y, add);
    if (w.bias) cuda::add_bias(stream_, y, w.bias);
  }
  bool can_fuse(const ModelConfig& config, const Projection& projection, const Tensor& x) const override {
    const bool low = std::any_of(projection.parts.begin(), projection.parts.end(),
                                 [](const ProjectionPart& part) { return has_residual(part.w.type); });
    return operand(config, x.sizes[0]) == DType::f32 && cuda::can_fuse(stream_, x, true, low);
  }
  void project_fused(const Projection& projection, const Tensor& x, const Fusion& fusion, const Tensor& y) override {
    const cuda::DeviceMatrix& w = weights_->matrix(projection);
    if (!cuda::can_fuse(stream_, x, fusion.swiglu, w.low))
      throw Error(
          fail(Code::unsupported, kOp, "fusion", "is not available for these rows, wanted rows for which can_fuse() is true"));
    cuda::multiply_fused(
        stream_, w, x,
        {fusion.norm ? weights_->numbers(*fusion.norm) : nullptr, fusion.eps, fusion.gate, w.bias, fusion.swiglu, fusion.add}, y);
  }
  void project_head(const Matrix& head, const Tensor& x, const Tensor& split, std::span<const LogitRow>, const Tensor& logits,
                    const Tensor& best) override {
    multiply(weights_->matrix(head), x, split, logits, false);
    if (best.present()) cuda::best_of(stream_, logits, best);
  }
  void rms_norm(const Tensor& x, const std::vector<float>& weight, float eps, const Tensor& y) override {
    cuda::rms_norm(stream_, x, weights_->numbers(weight), eps, y);
  }
  void norm_and_rotate(const NormedHeads& q, const NormedHeads& k, float eps, const Tensor& cosine, const Tensor& sine) override {
    cuda::norm_and_rotate(stream_, q.heads, weights_->numbers(q.weight), k.heads, weights_->numbers(k.weight), eps, cosine, sine);
  }
  void sigmoid_gate(const Tensor& x, const Tensor& gate, const Tensor& y) override { cuda::sigmoid_gate(stream_, x, gate, y); }
  void swiglu(const Tensor& x, const Tensor& y) override { cuda::swiglu(stream_, x, y); }
  void add_gated(const Tensor& x, const Tensor& gate, const Tensor& y) override { cuda::add_gated(stream_, x, gate, y); }
  void route(const ModelConfig& config, const Tensor& logits, const Routing& routing) override {
    cuda::route(stream_, config.experts_per_token, config.normalize_expert_weights, logits, routing);
  }
  void gather(const Tensor& x, const Routing& routing, const Tensor& to) override { cuda::gather(stream_, x, routing, to); }
  void project_experts(const std::vector<SwigluWeights>& experts, Projection SwigluWeights::*which, const Routing& routing,
                       const Tensor& x, const Tensor& split, const Tensor& y) override {
    multiply(weights_->experts(experts, which), x, split, y, false, &routing);
  }
  void scatter(const Tensor& from, const Routing& routing, const Tensor& x) override { cuda::scatter(stream_, from, routing, x); }

 private:
  cudaStream_t queue() const { return weft::cuda::queue_of(stream_); }
  // An address for a dry run, apart from those of pretended states and workspaces.
  void* pretended(const Tensor& t) const {
    return Block::pretend(static_cast<size_t>(t.elements() * dtype_bytes(t.dtype)), pretended_).data();
  }

  Tensor placed(Tensor t) const {
    t.place = Place::cuda;
    t.device = static_cast<int8_t>(stream_.device);
    return t;
  }
  // Makes the page table as wide as the capacity needs, so that the key of a step stays the same while sequences grow.
  static void widen(HybridBatch& batch, const HybridPlan& plan) {
    const int64_t pages = (plan.capacity + kPageTokens - 1) / kPageTokens;
    batch.page_table.sizes[1] = std::max(batch.page_table.sizes[1], pages);
    batch.page_table.strides[0] = batch.page_table.sizes[1];
  }
  // Copies rows of indices; where rows of `like` are longer, they are padded with -1.
  static void fill(std::byte* to, const Tensor& from, const Tensor& like) {
    const int64_t rows = from.rank == 2 ? from.sizes[0] : 1, have = from.rank == 2 ? from.sizes[1] : from.sizes[0];
    const int64_t want = like.rank == 2 ? like.sizes[1] : like.sizes[0];
    auto* out = reinterpret_cast<int32_t*>(to);
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(static_cast<const int32_t*>(from.data) + r * have, have, out + r * want);
      std::fill(out + r * want + have, out + (r + 1) * want, -1);
    }
  }

  void multiply(const cuda::DeviceMatrix& w, const Tensor& x, const Tensor& split, const Tensor& y, bool add,
                const Routing* routing = nullptr) {
    if (x.sizes[0] == 0) return;
    if (x.dtype == DType::f16) return multiply_f16(w, x, y, add, routing);
    if (!routing && cuda::can_fuse(stream_, x, false, w.low)) return cuda::multiply_fused(stream_, w, x, {.add = add}, y);
    const int64_t T = x.sizes[0];
    cuda::split(stream_, x, split);
    multiply_f16(w, rows_of(split, 0, T), y, add, routing);
    multiply_f16(w, rows_of(split, T, T), y, true, routing);
    if (!w.low) return;
    cuda::DeviceMatrix low = w;
    low.data = w.low;
    multiply_f16(low, rows_of(split, 0, T), y, true, routing);
  }
  // The same with an f16 operand.
  void multiply_f16(const cuda::DeviceMatrix& w, const Tensor& x, const Tensor& y, bool add, const Routing* routing) {
    if (routing) return cuda::multiply_tiles(stream_, w, x, y, add, routing);
    if (!cuda::Blas::fits(w, x, y)) return cuda::multiply_tiles(stream_, w, x, y, add);
    if (x.sizes[0] <= cuda::kFewRows) return cuda::multiply_few(stream_, w, x, y, add);
    blas_->multiply(stream_, w, x, y, add, workspace_.data());
  }

  // Records the event when a step ends, also by an exception.
  struct RecordAtEnd {
    cudaEvent_t event;
    cudaStream_t queue;
    ~RecordAtEnd() { cudaEventRecord(event, queue); }
  };

  // Captures on a stream of its own, which can be used again whatever happens.
  void capture(Graph& graph, const std::function<void()>& step) {
    void* const before = stream_.queue;
    cudaGraph_t captured = nullptr;
    try {
      const CapturesAlone alone;
      check(cudaStreamBeginCapture(capturing_.get(), cudaStreamCaptureModeRelaxed), kOp, "graph");
      stream_.queue = capturing_.get();
      try {
        step();
      } catch (...) {
        cudaStreamEndCapture(capturing_.get(), &captured);
        throw;
      }
      check(cudaStreamEndCapture(capturing_.get(), &captured), kOp, "graph");
      cudaGraphExec_t exec = nullptr;
      check(cudaGraphInstantiate(&exec, captured, 0), kOp, "graph");
      graph.exec.reset(exec);
    } catch (const std::exception& error) {
      ++graph.failures;
      ++counts_.failed_captures;
      counts_.why = error.what();
    }
    stream_.queue = before;
    if (captured) cudaGraphDestroy(captured);
    cudaGetLastError();
  }

  std::shared_ptr<const DeviceWeights> weights_;
  bool exact_;
  std::unique_ptr<cuda::Blas> blas_;
  Block workspace_, batch_;
  Queue capturing_;
  Event done_;  // recorded after the latest step
  std::array<Upload, 2> uploads_;
  size_t turn_ = 0;
  const int32_t* tokens_ = nullptr;
  std::deque<Graph> graphs_;  // most recently used first
  Pinned logits_;
  std::vector<float> host_rows_;
  mutable uintptr_t pretended_ = Block::kPretended << 22;
};

}  // namespace

std::unique_ptr<Compute> cuda_compute(const Stream& stream, std::shared_ptr<const DeviceWeights> weights, bool exact) {
  return std::make_unique<CudaCompute>(stream, std::move(weights), exact);
}

}  // namespace weft::model
