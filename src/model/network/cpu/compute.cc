// The Compute of the cpu: see model/network/compute.h. GEMMs are in dense.h, everything else in activations.h.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/check.h"
#include "model/network/compute.h"
#include "model/network/cpu/activations.h"
#include "model/network/cpu/dense.h"

namespace weft::model {
namespace {

StridedRows rows(const Tensor& t) { return {static_cast<float*>(t.data), t.strides[0]}; }
int32_t* indices(const Tensor& t) { return static_cast<int32_t*>(t.data); }

struct ExpertChoice {
  int64_t expert;
  float weight;
};

// The experts of one token: softmax over all experts, the k most probable ones in ascending order.
std::vector<ExpertChoice> choose_experts(const ModelConfig& c, const float* logits) {
  std::vector<float> p(logits, logits + c.experts);
  const float top = *std::max_element(p.begin(), p.end());
  float sum = 0;
  for (float& v : p) {
    const float e = std::exp(v - top);
    v = std::isnan(e) ? 0 : e;  // NaN would break the strict order that the sort below needs
    sum += v;
  }
  std::vector<int64_t> order(p.size());
  std::iota(order.begin(), order.end(), 0);
  const auto chosen = order.begin() + c.experts_per_token;
  std::partial_sort(order.begin(), chosen, order.end(), [&](int64_t a, int64_t b) {
    const float pa = p[static_cast<size_t>(a)], pb = p[static_cast<size_t>(b)];
    return pa != pb ? pa > pb : a < b;
  });
  std::sort(order.begin(), chosen);
  std::vector<ExpertChoice> choices;
  float of_chosen = 0;
  for (auto e = order.begin(); e != chosen; ++e) {
    choices.push_back({*e, p[static_cast<size_t>(*e)] / sum});
    of_chosen += choices.back().weight;
  }
  if (c.normalize_expert_weights)
    for (ExpertChoice& choice : choices) choice.weight /= of_chosen;
  return choices;
}

// The most probable token, the first of equal ones. NaN is never chosen.
int32_t best_of(const float* logits, int64_t count) {
  int64_t best = 0;
  for (int64_t i = 1; i < count; ++i)
    if (logits[i] > logits[best] || (std::isnan(logits[best]) && !std::isnan(logits[i]))) best = i;
  return static_cast<int32_t>(best);
}

class CpuCompute final : public Compute {
 public:
  using Compute::Compute;

  DType operand(const ModelConfig&, int64_t) const override { return DType::f32; }
  DType rule_input(const ModelConfig&, bool) const override { return DType::f32; }
  bool splits_operands() const override { return false; }
  Schedule schedule() const override { return Schedule::invariant; }
  int64_t logit_rows(int64_t) const override { return std::numeric_limits<int32_t>::max(); }
  int64_t own_bytes() const override { return 0; }

  Tensor numbers(const std::vector<float>& values) const override {
    return weft::dense(const_cast<float*>(values.data()), DType::f32, {static_cast<int64_t>(values.size())});  // NOLINT
  }
  Tensor weights(const Tensor& values) const override { return values; }

  HybridBatch begin_step(const HybridBatch& batch, const HybridPlan&, std::span<const int32_t> tokens) override {
    tokens_ = tokens;
    return batch;
  }
  HybridBatch pretend(const HybridBatch& batch, const HybridPlan&) const override { return batch; }
  void run(const StepKey*, const std::function<void()>& step) override {
    step();
    ++counts_.steps;
  }
  void fetch_logits(std::span<const LogitRow>, const Tensor&, const Tensor&) override {}
  const float* rows_on_host(const Tensor& values) override { return static_cast<const float*>(values.data); }

  void embed(const Matrix& table, const Tensor& x) override {
    for (size_t t = 0; t < tokens_.size(); ++t)
      widen(table.type, table.data, tokens_[t] * table.cols, table.cols,
            static_cast<float*>(x.data) + static_cast<int64_t>(t) * x.strides[0]);
  }

  void rotations(const RopeConfig& rope, const Tensor& positions, const Tensor& cosine, const Tensor& sine) override {
    const auto factor = static_cast<float>(rope.factor);
    const int64_t half = cosine.sizes[1];
    for (int64_t t = 0; t < cosine.sizes[0]; ++t)
      for (int64_t j = 0; j < half; ++j) {
        const float angle =
            static_cast<float>(indices(positions)[t]) * static_cast<float>(rope.frequencies[static_cast<size_t>(j)]);
        static_cast<float*>(cosine.data)[t * half + j] = std::cos(angle) * factor;
        static_cast<float*>(sine.data)[t * half + j] = std::sin(angle) * factor;
      }
  }

  void project(const Projection& projection, const Tensor& x, const Tensor&, const Tensor& y, bool add) override {
    std::vector<DenseTask> tasks;
    tasks.reserve(projection.parts.size());
    add_tasks(tasks, projection, x.sizes[0], rows(x), rows(y), add);
    dense(stream(), tasks);
    if (!projection.bias.empty()) add_bias(stream(), x.sizes[0], projection.outputs, rows(y), projection.bias.data());
  }

  bool can_fuse(const ModelConfig&, const Projection&, const Tensor&) const override { return false; }
  void project_fused(const Projection&, const Tensor&, const Fusion&, const Tensor&) override {
    throw Error(
        fail(Code::unsupported, "model", "fusion", "is not available on the cpu, wanted project() and separate operations"));
  }

  // Rows whose logits are contiguous in memory are one task.
  void project_head(const Matrix& head, const Tensor& x, const Tensor&, std::span<const LogitRow> wanted, const Tensor& logits,
                    const Tensor&) override {
    const auto to = [&](size_t i) {
      return wanted[i].logits ? wanted[i].logits : rows(logits).data + static_cast<int64_t>(i) * logits.strides[0];
    };
    std::vector<DenseTask> tasks;
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (!tasks.empty() && to(i) == tasks.back().y + tasks.back().M * head.rows)
        ++tasks.back().M;
      else
        tasks.push_back({head, rows(x).data + static_cast<int64_t>(i) * x.strides[0], x.strides[0], 1, to(i), head.rows, false});
    }
    dense(stream(), tasks);
    for (size_t i = 0; i < wanted.size(); ++i)
      if (wanted[i].best) *wanted[i].best = best_of(to(i), head.rows);
  }

  void rms_norm(const Tensor& x, const std::vector<float>& weight, float eps, const Tensor& y) override {
    model::rms_norm(stream(), x.sizes[0], x.sizes[1], rows(x), weight.data(), eps, rows(y));
  }

  void norm_and_rotate(const NormedHeads& q, const NormedHeads& k, float eps, const Tensor& cosine, const Tensor& sine) override {
    for (const NormedHeads* which : {&q, &k}) {
      HeadRotation rotation;
      rotation.x = rows(which->heads);
      rotation.tokens = which->heads.sizes[0];
      rotation.heads = which->heads.sizes[1];
      rotation.head_stride = which->heads.strides[1];
      rotation.size = which->heads.sizes[2];
      rotation.weight = which->weight.data();
      rotation.eps = eps;
      rotation.cosine = static_cast<const float*>(cosine.data);
      rotation.sine = static_cast<const float*>(sine.data);
      rotation.half = cosine.sizes[1];
      model::norm_and_rotate(stream(), rotation);
    }
  }

  void sigmoid_gate(const Tensor& x, const Tensor& gate, const Tensor& y) override {
    model::sigmoid_gate(stream(), x.sizes[0], x.sizes[1], x.sizes[2], {rows(x), x.strides[1]}, {rows(gate), gate.strides[1]},
                        {rows(y), y.strides[1]});
  }

  void swiglu(const Tensor& x, const Tensor& y) override { model::swiglu(stream(), y.sizes[0], y.sizes[1], rows(x), rows(y)); }

  void add_gated(const Tensor& x, const Tensor& gate, const Tensor& y) override {
    model::add_gated(stream(), x.sizes[0], x.sizes[1], rows(x), rows(gate), rows(y));
  }

  void route(const ModelConfig& config, const Tensor& logits, const Routing& routing) override {
    const int64_t T = logits.sizes[0], k = config.experts_per_token;
    int32_t* first = indices(routing.first_row);
    std::fill_n(first, config.experts + 1, 0);
    for (int64_t t = 0; t < T; ++t) {
      const std::vector<ExpertChoice> chosen = choose_experts(config, rows(logits).data + t * logits.strides[0]);
      for (int64_t i = 0; i < k; ++i) {
        indices(routing.experts)[t * k + i] = static_cast<int32_t>(chosen[static_cast<size_t>(i)].expert);
        static_cast<float*>(routing.weights.data)[t * k + i] = chosen[static_cast<size_t>(i)].weight;
        ++first[chosen[static_cast<size_t>(i)].expert + 1];
      }
    }
    std::partial_sum(first, first + config.experts + 1, first);
    std::vector<int32_t> next(first, first + config.experts);
    for (int64_t i = 0; i < T * k; ++i) indices(routing.rows)[i] = next[static_cast<size_t>(indices(routing.experts)[i])]++;
  }

  void gather(const Tensor& x, const Routing& routing, const Tensor& to) override {
    const int64_t k = routing.rows.sizes[1];
    for (int64_t i = 0; i < x.sizes[0] * k; ++i)
      std::copy_n(rows(x).data + i / k * x.strides[0], x.sizes[1], rows(to).data + indices(routing.rows)[i] * to.strides[0]);
  }

  void project_experts(const std::vector<SwigluWeights>& experts, Projection SwigluWeights::*which, const Routing& routing,
                       const Tensor& x, const Tensor&, const Tensor& y) override {
    std::vector<DenseTask> tasks;
    const int32_t* first = indices(routing.first_row);
    for (size_t e = 0; e < experts.size(); ++e) {
      const int64_t count = first[e + 1] - first[e];
      if (count > 0)
        add_tasks(tasks, experts[e].*which, count, rows(rows_of(x, first[e], count)), rows(rows_of(y, first[e], count)), false);
    }
    dense(stream(), tasks);
  }

  void scatter(const Tensor& from, const Routing& routing, const Tensor& x) override {
    const int64_t k = routing.rows.sizes[1];
    for (int64_t i = 0; i < x.sizes[0] * k; ++i)
      add_scaled(stream(), x.sizes[1], rows(from).data + indices(routing.rows)[i] * from.strides[0],
                 static_cast<const float*>(routing.weights.data)[i], rows(x).data + i / k * x.strides[0]);
  }

 private:
  static void add_tasks(std::vector<DenseTask>& tasks, const Projection& projection, int64_t count, StridedRows x, StridedRows y,
                        bool add) {
    for (const ProjectionPart& part : projection.parts)
      tasks.push_back({part.w, x.data, x.stride, count, y.data + part.column, y.stride, add});
  }

  std::span<const int32_t> tokens_;
};

}  // namespace

std::unique_ptr<Compute> cpu_compute(const Stream& stream) { return std::make_unique<CpuCompute>(stream); }

}  // namespace weft::model
