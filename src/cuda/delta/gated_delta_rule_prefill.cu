// gated_delta_rule_prefill on cuda: chunks on tensor cores where the shape allows, else token by token.
#include "cuda/common/elements.cuh"
#include "cuda/delta/delta_lowering.h"
#include "cuda/delta/gate_math.cuh"
#include "cuda/delta/prefill.cuh"
#include "cuda/table.h"

namespace weft::cuda {
namespace {

constexpr const char* kOp = "gated_delta_rule_prefill";
constexpr int64_t kMostKeys = 128;  // channels whose state rows fit in the registers of a warp

// What keeps a call from chunks on tensor cores, for people; null: nothing does.
const char* why_not_chunks(const GatedDeltaRulePrefillArgs& args) {
  if (args.q.dtype == DType::f32) return "inputs are f32";
  if (args.k.size(2) > kMostKeys) return "keys have more than 128 channels";
  if (per_channel(args.gates)) return "decays are per channel";
  for (const Tensor* t : {&args.q, &args.k, &args.v, &args.o})
    if (!packs_of(*t, 8)) return "rows are not whole pieces of 16 bytes";
  return nullptr;
}
bool takes_chunks(const GatedDeltaRulePrefillArgs& args) { return !why_not_chunks(args); }

RecurrentCall recurrent_call(const GatedDeltaRulePrefillArgs& args) {
  RecurrentCall step = common_recurrent_call(args);
  step.checkpoints = args.checkpoints;
  step.checkpoint_every = args.checkpoint_every;
  return step;
}

size_t unit_bytes(const Prefill& p) {
  return static_cast<size_t>(p.map.rows * p.Hv) * (p.K <= 64 ? Unit<64>::kBytes : Unit<128>::kBytes);
}

Prefill prefill_of(const Stream& stream, const GatedDeltaRulePrefillArgs& args, void* scratch) {
  Prefill p;
  p.args = args;
  const RecurrentCall step = common_recurrent_call(args);
  p.T = step.T;
  p.N = step.N;
  p.Hk = step.Hk;
  p.Hv = step.Hv;
  p.K = step.K;
  p.V = step.V;
  p.scale = step.scale;
  p.each = max_tokens(args.sequences, p.T);
  p.map = chunk_map(args.sequences, p.T, kChunk, scratch);
  p.units = static_cast<char*>(scratch) + chunk_map_bytes(args.sequences, p.T, kChunk);
  p.ranges = ranges_of(stream, p);
  p.ranges.starts = reinterpret_cast<float*>(p.units + unit_bytes(p));
  p.ranges.maps = p.ranges.starts + p.N * p.Hv * (p.ranges.count - 1) * p.V * p.K;
  return p;
}

size_t prefill_scratch(const Stream& stream, const GatedDeltaRulePrefillArgs& args) {
  if (!takes_chunks(args)) return 0;
  const Prefill p = prefill_of(stream, args, nullptr);
  if (takes_fused(stream, p)) return 0;
  return chunk_map_bytes(args.sequences, p.T, kChunk) + unit_bytes(p) + range_bytes(p, p.ranges);
}

void prefill(const Stream& stream, const GatedDeltaRulePrefillArgs& args, Scratch scratch) {
  if (!takes_chunks(args)) return launch_recurrent(kOp, stream, recurrent_call(args));
  Prefill p = prefill_of(stream, args, scratch.data);
  if (takes_fused(stream, p)) {
    p.map = {};  // its blocks count the chunks of their own sequence only
    p.ranges = {};
    return launch_fused(stream, p);
  }
  map_chunks(kOp, stream, p.map);
  if (takes_wgmma(stream, p)) {
    launch_wgmma_prepare(stream, p);
    if (p.ranges.count > 1) {
      p.ranges.end = 1;
      launch_wgmma_pass(stream, p);
      launch_ranges(stream, p);
      p.ranges.begin = 1, p.ranges.end = p.ranges.count;
    }
    launch_wgmma_pass(stream, p);
  } else {
    launch_mma_prepare(stream, p);
    launch_mma_pass(stream, p);
  }
}

Choice prefill_choice(const Stream& stream, const GatedDeltaRulePrefillArgs& args) {
  if (!takes_chunks(args))
    return {"cuda.gated_delta_rule_prefill.recurrent", std::to_string(recurrent_blocks(recurrent_call(args))) +
                                                           " blocks, token by token in f32; not in chunks, " +
                                                           why_not_chunks(args)};
  Prefill p = prefill_of(stream, args, nullptr);
  if (p.ranges.count > 1) p.ranges.begin = 1;  // of two passes the larger
  if (takes_fused(stream, p)) {
    const PassPlan plan = fused_plan(p);
    return {std::string("cuda.gated_delta_rule_prefill.") + plan.kernel,
            "chunk 64: " + std::to_string(plan.blocks) + " blocks of " + std::to_string(plan.rows) +
                " state rows, which prepare the next chunk beside the walk, " + std::to_string(plan.stages) + " chunks in flight"};
  }
  const PassPlan plan = takes_wgmma(stream, p) ? wgmma_plan(stream, p) : mma_plan(stream, p);
  return {std::string("cuda.gated_delta_rule_prefill.") + plan.kernel,
          "chunk 64: inverses chunk by chunk in parallel, then " +
              (plan.ranges > 1 ? std::to_string(plan.ranges) + " ranges of " + std::to_string(p.ranges.chunks) +
                                     " chunks, the first beside maps of those up to the last, then "
                               : std::string()) +
              std::to_string(plan.blocks) + " blocks of " + std::to_string(plan.rows) + " state rows, " +
              (plan.cluster > 1 ? "clusters of " + std::to_string(plan.cluster) + " for a head, " : std::string()) +
              std::to_string(plan.stages) + " chunks in flight"};
}

}  // namespace

OpRow<GatedDeltaRulePrefillArgs> gated_delta_rule_prefill_row() {
  return {prefill, kAllFloats, nullptr, prefill_choice, prefill_scratch};
}

}  // namespace weft::cuda
