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
bool can_use_chunks(const GatedDeltaRulePrefillArgs& args) { return !why_not_chunks(args); }

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
  p.decay = view_of<2>(gates.g.present() ? gates.g : gates.alpha.present() ? gates.alpha : gates.a);
  p.a_log = view_of<1>(gates.a_log);
  p.dt_bias = view_of<1>(gates.dt_bias);
  p.raw_strength = !gates.beta.present();
  p.strength = view_of<2>(p.raw_strength ? gates.b : gates.beta);
  p.beta_scale = gates.double_beta ? 2.0f : 1.0f;
  return p;
}

Prefill prefill_of(const Stream& stream, const GatedDeltaRulePrefillArgs& args, void* scratch) {
  Prefill p;
  p.q = view_of<2>(args.q), p.k = view_of<2>(args.k), p.v = view_of<2>(args.v), p.o = view_of<2>(args.o);
  p.gates = gates_of(args.gates);
  p.l2_norm = args.l2_norm;
  p.head_map = args.head_map;
  p.sequences = args.sequences;
  p.states = args.states;
  p.checkpoints = view_of<3>(args.checkpoints);
  p.checkpoint_every = args.checkpoint_every;
  p.schedule = args.schedule;
  const RecurrentCall call = common_recurrent_call(args);
  p.T = call.T;
  p.N = call.N;
  p.Hk = call.Hk;
  p.Hv = call.Hv;
  p.K = call.K;
  p.V = call.V;
  p.scale = call.scale;
  p.max_tokens = max_tokens(args.sequences, p.T);
  p.map = chunk_map(args.sequences, p.T, kChunk, scratch);
  p.prepared = static_cast<char*>(scratch) + chunk_map_bytes(args.sequences, p.T, kChunk);
  p.ranges = plan_ranges(stream, p);
  p.ranges.start_states = reinterpret_cast<float*>(p.prepared + prepared_bytes(p));
  p.ranges.transitions = p.ranges.start_states + p.N * p.Hv * (p.ranges.count - 1) * p.V * p.K;
  return p;
}

size_t prefill_scratch(const Stream& stream, const GatedDeltaRulePrefillArgs& args) {
  if (!can_use_chunks(args)) return 0;
  const Prefill p = prefill_of(stream, args, nullptr);
  if (use_fused(stream, p)) return 0;
  return chunk_map_bytes(args.sequences, p.T, kChunk) + prepared_bytes(p) + range_bytes(p, p.ranges);
}

void prefill(const Stream& stream, const GatedDeltaRulePrefillArgs& args, Scratch scratch) {
  if (!can_use_chunks(args)) return launch_recurrent(kOp, stream, recurrent_call(args));
  Prefill p = prefill_of(stream, args, scratch.data);
  if (use_fused(stream, p)) {
    p.map = {};  // its blocks need no chunk map: each counts the chunks of its own sequence
    p.ranges = {};
    return launch_fused(stream, p);
  }
  map_chunks(kOp, stream, p.map);
  if (can_use_wgmma(stream, p)) {
    launch_prepare_wgmma(stream, p);
    if (p.ranges.count > 1) {
      p.ranges.end = 1;
      launch_scan_wgmma(stream, p);
      launch_ranges(stream, p);
      p.ranges.begin = 1, p.ranges.end = p.ranges.count;
    }
    launch_scan_wgmma(stream, p);
  } else {
    launch_prepare_mma(stream, p);
    launch_scan_mma(stream, p);
  }
}

Choice prefill_choice(const Stream& stream, const GatedDeltaRulePrefillArgs& args) {
  if (!can_use_chunks(args))
    return {"cuda.gated_delta_rule_prefill.recurrent",
            std::to_string(recurrent_blocks(recurrent_call(args))) +
                " blocks, token by token in f32; not in chunks: " + why_not_chunks(args)};
  Prefill p = prefill_of(stream, args, nullptr);
  if (p.ranges.count > 1) p.ranges.begin = 1;  // the larger of two scans
  if (use_fused(stream, p)) {
    const ScanPlan plan = fused_plan(p);
    return {std::string("cuda.gated_delta_rule_prefill.") + plan.kernel,
            "chunk 64: " + std::to_string(plan.blocks) + " blocks of " + std::to_string(plan.rows) +
                " state rows, prepare by producer warpgroups of the same block, " + std::to_string(plan.stages) +
                " chunks in flight"};
  }
  const ScanPlan plan = can_use_wgmma(stream, p) ? scan_plan_wgmma(stream, p) : scan_plan_mma(stream, p);
  return {std::string("cuda.gated_delta_rule_prefill.") + plan.kernel,
          "chunk 64: prepare in parallel, then state scan" +
              (plan.ranges > 1 ? " in " + std::to_string(plan.ranges) + " ranges of " + std::to_string(p.ranges.chunks) +
                                     " chunks, the first beside affine maps of the middle ones, then the others at once"
                               : std::string()) +
              ": " + std::to_string(plan.blocks) + " blocks of " + std::to_string(plan.rows) + " state rows, " +
              (plan.cluster > 1 ? "clusters of " + std::to_string(plan.cluster) + " for a head, " : std::string()) +
              std::to_string(plan.stages) + " chunks in flight"};
}

}  // namespace

OpRow<GatedDeltaRulePrefillArgs> gated_delta_rule_prefill_row() {
  return {prefill, kAllFloats, nullptr, prefill_choice, prefill_scratch};
}

}  // namespace weft::cuda
