// gated_delta_rule_decode and gated_delta_rule_replay on cuda: what they ask of delta_step.cuh.
#include <cmath>
#include <string>

#include "cuda/delta_step.cuh"
#include "cuda/table.h"

namespace weft::cuda {
namespace {

DeltaStep step_of(const GatedDeltaRuleDecodeArgs& args) {
  DeltaStep step;
  step.q = args.q;
  step.k = args.k;
  step.v = args.v;
  step.o = args.o;
  step.gates = args.gates;
  step.sequences = args.sequences;
  step.states = args.states;
  step.record = args.record;
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

DeltaStep step_of(const GatedDeltaRuleReplayArgs& args) {
  DeltaStep step;
  step.k = args.record.k;
  step.v = args.record.delta;
  step.gates.g = args.record.g;
  step.accepted = args.accepted;
  step.sequences = args.sequences;
  step.states = args.states;
  step.head_map = args.head_map;
  step.T = args.record.k.size(0);
  step.N = args.sequences.count;
  step.Hk = args.record.k.size(1);
  step.Hv = args.record.delta.size(1);
  step.K = args.record.k.size(2);
  step.V = args.record.delta.size(2);
  return step;
}

void decode(const Stream& stream, const GatedDeltaRuleDecodeArgs& args, Scratch) {
  launch_step("gated_delta_rule_decode", stream, step_of(args));
}

void replay(const Stream& stream, const GatedDeltaRuleReplayArgs& args, Scratch) {
  launch_step("gated_delta_rule_replay", stream, step_of(args));
}

template <class Args>
Choice step_choice(const char* op, const Args& args) {
  return {std::string("cuda.") + op + ".step", std::to_string(step_blocks(step_of(args))) + " blocks of " +
                                                   std::to_string(kBlockRows) + " state rows in registers, read and written once"};
}

Choice decode_choice(const Stream&, const GatedDeltaRuleDecodeArgs& args) { return step_choice("gated_delta_rule_decode", args); }
Choice replay_choice(const Stream&, const GatedDeltaRuleReplayArgs& args) { return step_choice("gated_delta_rule_replay", args); }

}  // namespace

OpRow<GatedDeltaRuleDecodeArgs> gated_delta_rule_decode_row() { return {decode, kAllFloats, nullptr, decode_choice}; }
OpRow<GatedDeltaRuleReplayArgs> gated_delta_rule_replay_row() { return {replay, kAllFloats, nullptr, replay_choice}; }

}  // namespace weft::cuda
