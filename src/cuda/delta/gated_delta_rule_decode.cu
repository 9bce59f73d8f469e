// gated_delta_rule_decode and gated_delta_rule_replay on cuda: what they ask of recurrent.cuh.
#include <string>

#include "cuda/delta/delta_lowering.h"
#include "cuda/table.h"

namespace weft::cuda {
namespace {

DeltaStep walk_of(const GatedDeltaRuleDecodeArgs& args) {
  DeltaStep step = step_of(args);
  step.record = args.record;
  return step;
}

DeltaStep walk_of(const GatedDeltaRuleReplayArgs& args) {
  DeltaStep step;
  step.k = args.record.k;
  step.v = args.record.delta;
  step.gates.g = args.record.g;
  step.accepted = args.accepted;
  step.sequences = args.sequences;
  step.states = args.states;
  step.head_map = args.head_map;
  return sized(step);
}

void decode(const Stream& stream, const GatedDeltaRuleDecodeArgs& args, Scratch) {
  launch_step("gated_delta_rule_decode", stream, walk_of(args));
}

void replay(const Stream& stream, const GatedDeltaRuleReplayArgs& args, Scratch) {
  launch_step("gated_delta_rule_replay", stream, walk_of(args));
}

template <class Args>
Choice step_choice(const char* op, const Args& args) {
  return {std::string("cuda.") + op + "." + step_kernel(walk_of(args)), "rows of states in blocks, read and written once"};
}

Choice decode_choice(const Stream&, const GatedDeltaRuleDecodeArgs& args) { return step_choice("gated_delta_rule_decode", args); }
Choice replay_choice(const Stream&, const GatedDeltaRuleReplayArgs& args) { return step_choice("gated_delta_rule_replay", args); }

}  // namespace

OpEntry<GatedDeltaRuleDecodeArgs> gated_delta_rule_decode_entry() { return {decode, kAllFloats, nullptr, decode_choice}; }
OpEntry<GatedDeltaRuleReplayArgs> gated_delta_rule_replay_entry() { return {replay, kAllFloats, nullptr, replay_choice}; }

}  // namespace weft::cuda
