// The feed-forward part of a layer: SwiGLU, or a mixture of experts with a shared expert.
#include "model/network/network.h"

namespace weft::model {
namespace {

// silu(gate) * up of rows [gate | up], in the dtype of a GEMM operand.
Tensor activate(Step& step, const Tensor& wide) {
  const Tensor hidden = step.as(step.operand(), Workspace::operand, columns_of(wide, 0, wide.sizes[1] / 2));
  step.other([&] { step.compute.swiglu(wide, hidden); });
  return hidden;
}

}  // namespace

void swiglu_layer(Step& step, const SwigluWeights& weights, int64_t size, const std::vector<float>& norm, const Tensor& x) {
  const Tensor wide = step.memory.get(Workspace::wide, step.tokens(), 2 * size);
  if (step.compute.can_fuse(step.config, weights.input, x)) {
    const Tensor hidden = columns_of(wide, 0, size);
    step.project_fused(weights.input, x, {.norm = &norm, .eps = step.eps(), .swiglu = true}, hidden);
    return step.project(weights.down, hidden, x, true);
  }
  step.project_normed(norm, weights.input, x, wide);
  step.project(weights.down, activate(step, wide), x, true);
}

void expert_layer(Step& step, const ExpertWeights& weights, const std::vector<float>& norm, const Tensor& x) {
  const ModelConfig& c = step.config;
  const int64_t T = step.tokens(), H = c.hidden_size, E = c.experts, k = c.experts_per_token, rows = T * k;
  Workspace& memory = step.memory;
  const Tensor normed = memory.get(Workspace::normed, T, H, step.operand());
  step.norm(x, norm, normed);
  const Tensor logits = memory.get(Workspace::router, T, E);
  Routing routing;
  routing.experts = memory.get(Workspace::chosen, T, k, DType::i32);
  routing.rows = memory.get(Workspace::expert_rows, T, k, DType::i32);
  routing.weights = memory.get(Workspace::expert_weights, T, k);
  routing.first_row = memory.get(Workspace::first_rows, 1, E + 1, DType::i32);
  const Tensor gathered = memory.get(Workspace::gathered, rows, H, step.operand());
  const Tensor wide = memory.get(Workspace::experts, rows, 2 * c.expert_size);
  const Tensor out = memory.get(Workspace::experts_out, rows, H);
  step.project(weights.router, normed, logits);
  step.other([&] {
    step.compute.route(c, logits, routing);
    step.compute.gather(normed, routing, gathered);
  });
  const auto project = [&](Projection SwigluWeights::*which, const Tensor& from, const Tensor& to) {
    const Tensor split = step.split_buffer(from);
    step.timed(step.times.dense, [&] { step.compute.project_experts(weights.experts, which, routing, from, split, to); });
  };
  project(&SwigluWeights::input, gathered, wide);
  project(&SwigluWeights::down, activate(step, wide), out);
  step.other([&] { step.compute.scatter(out, routing, x); });

  const Tensor shared_wide = memory.get(Workspace::wide, T, 2 * c.shared_expert_size);
  const Tensor shared = memory.get(Workspace::mixed, T, H), gate = memory.get(Workspace::router, T, 1);
  step.project(weights.shared.input, normed, shared_wide);
  step.project(weights.shared.down, activate(step, shared_wide), shared);
  step.project(weights.shared_gate, normed, gate);
  step.other([&] { step.compute.add_gated(shared, gate, x); });
}

}  // namespace weft::model
