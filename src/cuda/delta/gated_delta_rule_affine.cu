// gated_delta_rule_summarize, _compose and _apply on cuda: token ranges as affine maps, in f32.
#include "cuda/delta/delta_lowering.h"
#include "cuda/delta/prefill_lowering.h"
#include "cuda/delta/states_view.cuh"
#include "cuda/table.h"

namespace weft::cuda {
namespace {

constexpr int kThreads = 256, kRows = 16;  // a thread per column, kRows rows per block
static_assert(kThreads >= kMaxDeltaHeadSize);

// out = x p + y for [rows, K] matrices of every sequence and head; absent x and y are zeros. With `slots`, x and out are state pools and
// `states` says which slots.
struct AffineParams {
  StridedView x, p, y, out;
  StatesView states;
  bool slots = false;
  int64_t N = 0, Hv = 0, rows = 0, K = 0;
};

__global__ void __launch_bounds__(kThreads) affine_kernel(const __grid_constant__ AffineParams a) {
  __shared__ float x[kRows][kMaxDeltaHeadSize];
  const int K = static_cast<int>(a.K), column = threadIdx.x;
  const int64_t row_blocks = (a.rows + kRows - 1) / kRows, block = blockIdx.x;
  const int64_t first = block % row_blocks * kRows, hv = block / row_blocks % a.Hv, n = block / row_blocks / a.Hv;
  const StateSlots slots = a.slots ? state_slots(a.states, n) : StateSlots{false, n, n};
  if (slots.inert || slots.out < 0) return;
  const StateLayout layout = a.slots ? a.states.layout : StateLayout::vk;
  const auto element = [&](int64_t row, int64_t c) { return layout == StateLayout::vk ? row * K + c : c * a.rows + row; };
  for (int r = 0; r < kRows; ++r) {
    const bool there = column < K && first + r < a.rows && slots.in >= 0 && a.x.present();
    if (column < K)
      x[r][column] = there ? load(a.x, slots.in * a.x.strides[0] + hv * a.x.strides[1] + element(first + r, column)) : 0.0f;
  }
  __syncthreads();
  if (column >= K) return;
  float sums[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool there = a.y.present() && first + r < a.rows;
    sums[r] = there ? load(a.y, n * a.y.strides[0] + hv * a.y.strides[1] + (first + r) * K + column) : 0.0f;
  }
  const float* p = static_cast<const float*>(a.p.data) + n * a.p.strides[0] + hv * a.p.strides[1];
  for (int m = 0; m < K; ++m) {
    const float factor = p[int64_t{m} * K + column];
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] = fmaf(x[r][m], factor, sums[r]);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    if (first + r < a.rows)
      store(a.out, slots.out * a.out.strides[0] + hv * a.out.strides[1] + element(first + r, column), sums[r]);
}

void launch_affine(const char* op, const Stream& stream, const AffineParams& a) {
  launch(op, stream, ceil_div(a.rows, kRows) * a.Hv * a.N, kThreads, 0, affine_kernel, a);
}

constexpr const char* kSummarize = "gated_delta_rule_summarize";

StagedCall plan_summary(const Stream& stream, const GatedDeltaRuleSummarizeArgs& args) {
  StagedCall call = plan_staged(stream, args, false);
  // The bar of p is relative to the product of the decays. Two bf16 numbers hold it with a decay per head only.
  if (args.k.dtype == DType::f32 && per_channel(args.gates)) call.why_not = "f32 inputs with decays per channel";
  if (call.why_not) call.scratch_bytes = 0;
  return call;
}

Choice describe_summary(const Stream&, const GatedDeltaRuleSummarizeArgs&, const StagedCall& call) {
  const std::string name = "cuda.gated_delta_rule_summarize.";
  if (call.why_not)
    return {name + "recurrent", std::string("token by token in f32; not in chunks: ") + call.why_not,
            call.params.p.max_tokens > kMaxDecodeTokens ? Speed::slow : Speed::fast};
  return {name + "staged", staged_text(call)};
}

void launch_summary(const Stream& stream, const GatedDeltaRuleSummarizeArgs& args, const StagedCall& planned, Scratch scratch) {
  if (!planned.why_not) return launch_staged(kSummarize, stream, args.sequences, planned, scratch);
  RecurrentCall call = common_recurrent_call(args);
  call.p = args.p;
  call.map_q = args.q;
  launch_recurrent(kSummarize, stream, call);
}

void compose(const Stream& stream, const GatedDeltaRuleComposeArgs& args) {
  const int64_t N = args.q1.size(0), Hv = args.q1.size(1), V = args.q1.size(2), K = args.q1.size(3);
  launch_affine("gated_delta_rule_compose", stream,
                {view_of(args.p1), view_of(args.p2), {}, view_of(args.p), {}, false, N, Hv, K, K});
  launch_affine("gated_delta_rule_compose", stream,
                {view_of(args.q1), view_of(args.p2), view_of(args.q2), view_of(args.q), {}, false, N, Hv, V, K});
}

void apply(const Stream& stream, const GatedDeltaRuleApplyArgs& args) {
  const int64_t N = args.q.size(0), Hv = args.q.size(1), V = args.q.size(2), K = args.q.size(3);
  launch_affine("gated_delta_rule_apply", stream,
                {view_of(args.states.in), view_of(args.p), view_of(args.q), view_of(args.states.out), view_of(args.states), true, N,
                 Hv, V, K});
}

}  // namespace

OpEntry<GatedDeltaRuleSummarizeArgs> gated_delta_rule_summarize_entry() {
  return entry<plan_summary, describe_summary, launch_summary>(kAllFloats);
}
OpEntry<GatedDeltaRuleComposeArgs> gated_delta_rule_compose_entry() { return entry<compose>(kOnlyF32); }
OpEntry<GatedDeltaRuleApplyArgs> gated_delta_rule_apply_entry() { return entry<apply>(kAllFloats); }

}  // namespace weft::cuda
