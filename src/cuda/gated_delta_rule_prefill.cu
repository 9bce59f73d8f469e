// gated_delta_rule_prefill on cuda: chunks on tensor cores where the shape allows, else token by token.
#include <cmath>

#include "cuda/delta_step.cuh"
#include "cuda/elements.cuh"
#include "cuda/gate_math.cuh"
#include "cuda/prefill.cuh"
#include "cuda/table.h"

namespace weft::cuda {
namespace {

constexpr const char* kOp = "gated_delta_rule_prefill";
constexpr int64_t kMostKeys = 128;  // channels whose state rows fit in the registers of a warp

// 16-bit inputs in rows of whole 16-byte pieces, one decay per head.
bool takes_chunks(const GatedDeltaRulePrefillArgs& args) {
  const auto pieces = [](const Tensor& t) { return packs_of(t, 8); };
  return args.q.dtype != DType::f32 && args.k.size(2) <= kMostKeys && !per_channel(args.gates) && pieces(args.q) &&
         pieces(args.k) && pieces(args.v) && pieces(args.o);
}

DeltaStep step_of(const GatedDeltaRulePrefillArgs& args) {
  DeltaStep step;
  step.q = args.q;
  step.k = args.k;
  step.v = args.v;
  step.o = args.o;
  step.gates = args.gates;
  step.sequences = args.sequences;
  step.states = args.states;
  step.checkpoints = args.checkpoints;
  step.checkpoint_every = args.checkpoint_every;
  step.scale = args.scale.value_or(1.0f / std::sqrt(static_cast<float>(args.k.size(2))));
  step.l2_norm = args.l2_norm;
  step.head_map = args.head_map;
  step.T = args.k.size(0);
  step.N = args.sequences.count;
  step.Hk = args.k.size(1);
  step.Hv = args.v.size(1);
  step.K = args.k.size(2);
  step.V = args.v.size(2);
  return step;
}

Prefill prefill_of(const GatedDeltaRulePrefillArgs& args, void* scratch) {
  Prefill p;
  p.args = args;
  p.T = args.k.size(0);
  p.N = args.sequences.count;
  p.Hk = args.k.size(1);
  p.Hv = args.v.size(1);
  p.K = args.k.size(2);
  p.V = args.v.size(2);
  p.scale = args.scale.value_or(1.0f / std::sqrt(static_cast<float>(p.K)));
  p.each = max_tokens(args.sequences, p.T);
  p.map = chunk_map(args.sequences, p.T, kChunk, scratch);
  p.units = static_cast<char*>(scratch) + chunk_map_bytes(args.sequences, p.T, kChunk);
  return p;
}

size_t prefill_scratch(const Stream&, const GatedDeltaRulePrefillArgs& args) {
  if (!takes_chunks(args)) return 0;
  const int64_t units = max_chunks(args.k.size(0), args.sequences, kChunk) * args.v.size(1);
  return chunk_map_bytes(args.sequences, args.k.size(0), kChunk) +
         static_cast<size_t>(units) * (args.k.size(2) <= 64 ? Unit<64>::kBytes : Unit<128>::kBytes);
}

void prefill(const Stream& stream, const GatedDeltaRulePrefillArgs& args, Scratch scratch) {
  if (!takes_chunks(args)) return launch_step(kOp, stream, step_of(args));
  const Prefill p = prefill_of(args, scratch.data);
  map_chunks(kOp, stream, p.map);
  if (takes_wgmma(stream, p)) {
    launch_wgmma_prepare(stream, p);
    launch_wgmma_pass(stream, p);
  } else {
    launch_mma_prepare(stream, p);
    launch_mma_pass(stream, p);
  }
}

Choice prefill_choice(const Stream& stream, const GatedDeltaRulePrefillArgs& args) {
  if (!takes_chunks(args))
    return {"cuda.gated_delta_rule_prefill.step", std::to_string(step_blocks(step_of(args))) + " blocks, token by token in f32"};
  const Prefill p = prefill_of(args, nullptr);
  const PassPlan plan = takes_wgmma(stream, p) ? wgmma_plan(stream, p) : mma_plan(stream, p);
  return {std::string("cuda.gated_delta_rule_prefill.") + plan.kernel,
          "chunk 64: inverses chunk by chunk in parallel, then " + std::to_string(plan.blocks) + " blocks of " +
              std::to_string(plan.rows) + " state rows, " + std::to_string(plan.stages) + " chunks in flight"};
}

}  // namespace

OpRow<GatedDeltaRulePrefillArgs> gated_delta_rule_prefill_row() {
  return {prefill, kAllFloats, nullptr, prefill_choice, prefill_scratch};
}

}  // namespace weft::cuda
