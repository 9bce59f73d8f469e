// gated_delta_rule_prefill on cuda: chunked on tensor cores where the call allows it, otherwise recurrent (token by token).
#include "cuda/common/elements.cuh"
#include "cuda/delta/delta_lowering.h"
#include "cuda/delta/gate_math.cuh"
#include "cuda/delta/prefill.cuh"
#include "cuda/table.h"

namespace weft::cuda {
namespace {

constexpr const char* kOp = "gated_delta_rule_prefill";
constexpr int64_t kMostKeys = 128;  // the accumulators of a warp hold 16 state rows of so many channels

// Why a call cannot run in chunks on tensor cores, as text for the plan; null when it can.
const char* why_not_chunks(const GatedDeltaRulePrefillArgs& args) {
  if (args.q.dtype == DType::f32) return "inputs are f32";
  if (args.k.size(2) > kMostKeys) return "keys have more than 128 channels";
  if (per_channel(args.gates)) return "decays are per channel";
  for (const Tensor* t : {&args.q, &args.k, &args.v, &args.o})
    if (!packs_of(*t, 8)) return "rows are not aligned to 16 bytes";
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

GateParams gates_of(const DeltaGateInputs& gates) {
  GateParams p;
  p.decay_form = gates.a.present() ? DecayForm::raw : gates.alpha.present() ? DecayForm::linear : DecayForm::log;
  p.decay = view_of(gates.g.present() ? gates.g : gates.alpha.present() ? gates.alpha : gates.a);
  p.a_log = view_of(gates.a_log);
  p.dt_bias = view_of(gates.dt_bias);
  p.raw_strength = !gates.beta.present();
  p.strength = view_of(p.raw_strength ? gates.b : gates.beta);
  p.beta_scale = gates.double_beta ? 2.0f : 1.0f;
  return p;
}

// What the kernels read, without addresses in scratch.
Prefill lowered(const GatedDeltaRulePrefillArgs& args) {
  Prefill p;
  p.q = view_of(args.q), p.k = view_of(args.k), p.v = view_of(args.v), p.o = view_of(args.o);
  p.gates = gates_of(args.gates);
  p.l2_norm = args.l2_norm;
  p.head_map = args.head_map;
  p.sequences = view_of(args.sequences);
  p.states = view_of(args.states);
  p.checkpoints = view_of(args.checkpoints);
  p.checkpoint_every = args.checkpoint_every;
  p.schedule = args.schedule;
  p.T = args.k.size(0), p.N = args.sequences.count;
  p.Hk = args.k.size(1), p.Hv = args.v.size(1);
  p.K = args.k.size(2), p.V = args.v.size(2);
  p.scale = scale_or_default(args.scale, p.K);
  p.max_tokens = max_tokens(args.sequences, p.T);
  return p;
}

// Kernels of a call: the recurrent one; prepare and state scan in one kernel; or prepare, then the scan by wgmma or mma.
enum class Kernels { recurrent, fused, wgmma, mma };
struct Plan {
  Kernels kernels = Kernels::recurrent;
  RecurrentCall recurrent;
  const char* why_recurrent = nullptr;
  Prefill p;             // but for `recurrent`; addresses in scratch are set at the launch
  size_t map_bytes = 0;  // scratch: chunk map, prepared chunks, states and maps of ranges
  size_t scratch_bytes = 0;
};

Plan plan_prefill(const Stream& stream, const GatedDeltaRulePrefillArgs& args) {
  Plan plan;
  const auto recurrent = [&](const char* why) {
    plan.recurrent = recurrent_call(args);
    plan.why_recurrent = why;
    return plan;
  };
  if (const char* why = why_not_chunks(args)) return recurrent(why);
  Prefill& p = plan.p;
  p = lowered(args);
  p.map = chunk_map(args.sequences, p.T, kChunk, nullptr);
  p.ranges = plan_ranges(stream, p);
  if (use_fused(stream, p)) {
    p.map = {};  // its blocks need no chunk map: each counts the chunks of its own sequence
    p.ranges = {};
    plan.kernels = Kernels::fused;
    return plan;
  }
  const bool wgmma = can_use_wgmma(stream, p);
  if (!wgmma && !can_use_mma(stream, p)) return recurrent("the device has too little shared memory");
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
    return {name + "recurrent", std::to_string(recurrent_blocks(plan.recurrent)) +
                                    " blocks, token by token in f32; not in chunks: " + plan.why_recurrent};
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

}  // namespace

OpEntry<GatedDeltaRulePrefillArgs> gated_delta_rule_prefill_entry() {
  return entry<plan_prefill, describe, launch_prefill>(kAllFloats);
}

}  // namespace weft::cuda
