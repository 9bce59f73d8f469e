// gated_delta_rule_prefill on cuda: chunked on tensor cores, except calls of few tokens, which are recurrent (token by token).
#include <cmath>

#include "cuda/common/elements.cuh"
#include "cuda/delta/delta_lowering.h"
#include "cuda/delta/gate_math.cuh"
#include "cuda/delta/prefill_lowering.h"
#include "cuda/table.h"

namespace weft::cuda {
namespace {

constexpr const char* kOp = "gated_delta_rule_prefill";
constexpr int64_t kMostKeys = 128;  // the accumulators of a warp hold 16 state rows of so many channels
// Scales of the queries that f16 holds, with room for the products that they scale.
constexpr float kLeastHalfScale = 0x1p-10f, kMostHalfScale = 16;

// Why the kernels for 16-bit rows and decays per head cannot take a call, as text for the plan; null when they can.
const char* why_staged(const GatedDeltaRulePrefillArgs& args) {
  if (args.q.dtype == DType::f32) return "inputs are f32";
  if (args.k.size(2) > kMostKeys) return "keys have more than 128 channels";
  if (per_channel(args.gates)) return "decays are per channel";
  if (const float scale = std::abs(scale_or_default(args.scale, args.k.size(2)));
      args.q.dtype == DType::f16 && !(scale >= kLeastHalfScale && scale <= kMostHalfScale))
    return "scaled scores may leave the range of f16";
  for (const Tensor* t : {&args.q, &args.k, &args.v, &args.o}) {
    // packs_of() ignores the stride of a single token. The kernel of a sequence must not depend on whether it is alone, though.
    const bool as_in_a_batch = args.schedule != Schedule::invariant || t->strides[0] % 8 == 0;
    if (!packs_of(*t, 8) || !as_in_a_batch) return "rows are not aligned to 16 bytes";
  }
  return nullptr;
}

RecurrentCall recurrent_call(const GatedDeltaRulePrefillArgs& args) {
  RecurrentCall call = common_recurrent_call(args);
  call.checkpoints = args.checkpoints;
  call.checkpoint_every = args.checkpoint_every;
  return call;
}

size_t prepared_bytes(const Prefill& p) {
  return static_cast<size_t>(p.map.rows * p.Hv) * (p.K <= 64 ? PreparedChunk<64>::kBytes : PreparedChunk<128>::kBytes);
}

// Kernels of a call: the recurrent one; prepare and state scan in one kernel; or prepare, then the scan by wgmma or mma, or by the staged
// kernels, which take every call.
enum class Kernels { recurrent, fused, wgmma, mma, staged };
struct Plan {
  Kernels kernels = Kernels::recurrent;
  RecurrentCall recurrent;
  const char* why = nullptr;  // why the call is recurrent or staged
  Prefill p;                  // fused, wgmma, mma; addresses in scratch are set at the launch
  StagedCall staged;
  size_t map_bytes = 0;  // scratch: chunk map, prepared chunks, states and maps of ranges
  size_t scratch_bytes = 0;
};

Plan recurrent_plan(const GatedDeltaRulePrefillArgs& args, const char* why) {
  Plan plan;
  plan.recurrent = recurrent_call(args);
  plan.why = why;
  return plan;
}

Plan staged_or_recurrent(const Stream& stream, const GatedDeltaRulePrefillArgs& args, const char* why) {
  Plan plan;
  plan.staged = plan_staged(stream, args, args.schedule == Schedule::invariant);
  if (plan.staged.why_not) return recurrent_plan(args, plan.staged.why_not);
  plan.kernels = Kernels::staged;
  plan.why = why;
  plan.scratch_bytes = plan.staged.scratch_bytes;
  return plan;
}

Plan plan_prefill(const Stream& stream, const GatedDeltaRulePrefillArgs& args) {
  if (const char* why = why_staged(args)) return staged_or_recurrent(stream, args, why);
  Plan plan;
  Prefill& p = plan.p;
  p = lowered(args);
  p.ranges = plan_ranges(stream, p);
  if (use_fused(stream, p)) {
    p.map = {};  // its blocks need no chunk map: each counts the chunks of its own sequence
    p.ranges = {};
    plan.kernels = Kernels::fused;
    return plan;
  }
  const bool wgmma = can_use_wgmma(stream, p);
  if (!wgmma && !can_use_mma(stream, p)) return recurrent_plan(args, "the device has too little shared memory");
  plan.kernels = wgmma ? Kernels::wgmma : Kernels::mma;
  plan.map_bytes = chunk_map_bytes(args.sequences, p.T, kChunk);
  plan.scratch_bytes = plan.map_bytes + prepared_bytes(p) + range_bytes(p, p.ranges);
  return plan;
}

// The planned parameters with addresses in scratch.
Prefill placed(const GatedDeltaRulePrefillArgs& args, const Plan& plan, void* scratch) {
  Prefill p = plan.p;
  p.map = chunk_map(args.sequences, p.T, kChunk, scratch);
  p.prepared = static_cast<char*>(scratch) + plan.map_bytes;
  p.ranges.start_states = reinterpret_cast<float*>(p.prepared + prepared_bytes(p));
  p.ranges.transitions = p.ranges.start_states + p.N * p.Hv * (p.ranges.count - 1) * p.V * p.K;
  return p;
}

void launch_prefill(const Stream& stream, const GatedDeltaRulePrefillArgs& args, const Plan& plan, Scratch scratch) {
  if (plan.kernels == Kernels::recurrent) return launch_recurrent(kOp, stream, plan.recurrent);
  if (plan.kernels == Kernels::fused) return launch_fused(stream, plan.p);
  if (plan.kernels == Kernels::staged) return launch_staged(kOp, stream, args.sequences, plan.staged, scratch);
  Prefill p = placed(args, plan, scratch.data);
  map_chunks(kOp, stream, p.map);
  if (plan.kernels == Kernels::mma) {
    launch_prepare_mma(stream, p);
    return launch_scan_mma(stream, p);
  }
  launch_prepare_wgmma(stream, p);
  if (p.ranges.count > 1) {
    p.ranges.end = 1;
    launch_scan_wgmma(stream, p);
    launch_ranges(stream, p);
    p.ranges.begin = 1, p.ranges.end = p.ranges.count;
  }
  launch_scan_wgmma(stream, p);
}

Choice describe(const Stream& stream, const GatedDeltaRulePrefillArgs&, const Plan& plan) {
  const std::string name = "cuda.gated_delta_rule_prefill.";
  if (plan.kernels == Kernels::recurrent)
    return {name + "recurrent",
            std::to_string(recurrent_blocks(plan.recurrent)) + " blocks, token by token in f32; not in chunks: " + plan.why};
  if (plan.kernels == Kernels::staged) return {name + "staged", staged_text(plan.staged) + "; " + plan.why};
  if (plan.kernels == Kernels::fused) {
    const ScanPlan scan = fused_plan(plan.p);
    return {name + scan.kernel, "chunk 64: " + std::to_string(scan.blocks) + " blocks of " + std::to_string(scan.rows) +
                                    " state rows, prepare by producer warpgroups of the same block, " +
                                    std::to_string(scan.stages) + " chunks in flight"};
  }
  Prefill p = plan.p;
  if (p.ranges.count > 1) p.ranges.begin = 1;  // the larger of two scans
  const ScanPlan scan = plan.kernels == Kernels::wgmma ? scan_plan_wgmma(stream, p) : scan_plan_mma(stream, p);
  return {name + scan.kernel,
          "chunk 64: prepare in parallel, then state scan" +
              (scan.ranges > 1 ? " in " + std::to_string(scan.ranges) + " ranges of " + std::to_string(p.ranges.chunks) +
                                     " chunks, the first beside affine maps of the middle ones, then the others at once"
                               : std::string()) +
              ": " + std::to_string(scan.blocks) + " blocks of " + std::to_string(scan.rows) + " state rows, " +
              (scan.cluster > 1 ? "clusters of " + std::to_string(scan.cluster) + " for a head, " : std::string()) +
              (scan.stages == 1 ? "half a chunk in flight" : std::to_string(scan.stages) + " chunks in flight")};
}

// The recurrent kernel is the right one for as few tokens as a decode step has.
Choice describe_with_speed(const Stream& stream, const GatedDeltaRulePrefillArgs& args, const Plan& plan) {
  Choice choice = describe(stream, args, plan);
  const bool few = max_tokens(args.sequences, args.q.size(0)) <= kMaxDecodeTokens;
  if (plan.kernels == Kernels::recurrent && !few) choice.speed = Speed::slow;
  if (plan.kernels == Kernels::mma) choice.speed = Speed::portable;
  return choice;
}

}  // namespace

OpEntry<GatedDeltaRulePrefillArgs> gated_delta_rule_prefill_entry() {
  return entry<plan_prefill, describe_with_speed, launch_prefill>(kAllFloats);
}

}  // namespace weft::cuda
