// delta_gates, l2_norm and gated_rms_norm on vulkan: lowers arguments for delta_gates.comp and row_norm.comp.
#include <algorithm>

#include "vulkan/common/recorder.h"
#include "vulkan/common/views.h"
#include "vulkan/table.h"

namespace weft::vulkan {
namespace {

constexpr int64_t kThreads = 128;  // of a workgroup of both shaders

struct GatesParams {
  View a, a_log, dt_bias, b, g, beta;
  int64_t total = 0, channels = 1;
  uint32_t double_beta = 0, pad = 0;
};

void delta_gates(const Stream& stream, const DeltaGatesArgs& args) {
  const int64_t channels = args.a.rank == 3 ? args.a.size(2) : 1;
  const int64_t total = args.a.size(0) * args.a.size(1) * std::max<int64_t>(channels, 1);
  const GatesParams params{
      view_of(args.a), view_of(args.a_log), view_of(args.dt_bias), view_of(args.b), view_of(args.g), view_of(args.beta), total,
      channels,        args.double_beta};
  dispatch("delta_gates", stream, {"delta_gates"}, params, ceil_div(total, kThreads));
}

struct NormParams {
  View x, z, weight, y;
  int64_t rows = 0;
  float eps = 0;
  uint32_t sigmoid_gate = 0;
};

struct NormPlan {
  NormParams params;
  bool gated = false, packed = false;
  size_t scratch_bytes = 0;
};

NormPlan plan_norm(const Tensor& x, const Tensor& z, const Tensor& weight, const Tensor& y, float eps, bool sigmoid_gate) {
  const int64_t D = x.size(-1), rows = D > 0 ? x.elements() / D : 0;
  return {{view_of(x), view_of(z), view_of(weight), view_of(y), rows, eps, sigmoid_gate},
          z.present(),
          packs_of_four(x) && packs_of_four(y)};
}
NormPlan plan_l2_norm(const Stream&, const L2NormArgs& args) { return plan_norm(args.x, {}, {}, args.y, args.eps, false); }
NormPlan plan_gated_rms_norm(const Stream&, const GatedRmsNormArgs& args) {
  return plan_norm(args.x, args.z, args.weight, args.y, args.eps, args.gate == Gate::sigmoid);
}

Choice describe_norm(const char* op, const NormPlan& plan) {
  return {std::string("vulkan.") + op + (plan.packed ? ".packs" : ".elements"),
          std::to_string(kLanes) + " lanes per row, " + (plan.packed ? "four elements" : "one element") + " per access",
          plan.packed ? Speed::fast : Speed::portable};
}

void launch_norm(const char* op, const Stream& stream, const NormPlan& plan) {
  dispatch(op, stream, {"row_norm", {plan.gated, plan.packed}}, plan.params, ceil_div(plan.params.rows * kLanes, kThreads));
}

Choice describe_l2_norm(const Stream&, const L2NormArgs&, const NormPlan& plan) { return describe_norm("l2_norm", plan); }
Choice describe_gated_rms_norm(const Stream&, const GatedRmsNormArgs&, const NormPlan& plan) {
  return describe_norm("gated_rms_norm", plan);
}
void l2_norm(const Stream& stream, const L2NormArgs&, const NormPlan& plan, Scratch) { launch_norm("l2_norm", stream, plan); }
void gated_rms_norm(const Stream& stream, const GatedRmsNormArgs&, const NormPlan& plan, Scratch) {
  launch_norm("gated_rms_norm", stream, plan);
}

}  // namespace

OpEntry<DeltaGatesArgs> delta_gates_entry() { return entry<delta_gates>(kAllFloats); }
OpEntry<L2NormArgs> l2_norm_entry() { return entry<plan_l2_norm, describe_l2_norm, l2_norm>(kAllFloats); }
OpEntry<GatedRmsNormArgs> gated_rms_norm_entry() {
  return entry<plan_gated_rms_norm, describe_gated_rms_norm, gated_rms_norm>(kAllFloats);
}

}  // namespace weft::vulkan
