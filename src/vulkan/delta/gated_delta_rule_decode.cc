// gated_delta_rule_decode and gated_delta_rule_replay on vulkan, by the recurrent shader.
#include "vulkan/delta/recurrent.h"
#include "vulkan/table.h"

namespace weft::vulkan {
namespace {

struct Plan {
  RecurrentCall call;
  size_t scratch_bytes = 0;
};

Plan plan_decode(const Stream&, const GatedDeltaRuleDecodeArgs& args) {
  Plan plan{recurrent_call(args)};
  plan.call.record = args.record;
  return plan;
}

Plan plan_replay(const Stream&, const GatedDeltaRuleReplayArgs& args) {
  Plan plan;
  plan.call.k = args.record.k;
  plan.call.v = args.record.delta;
  plan.call.gates.g = args.record.g;
  plan.call.accepted = args.accepted;
  plan.call.sequences = args.sequences;
  plan.call.states = args.states;
  plan.call.head_map = args.head_map;
  return plan;
}

const char* op_of(const GatedDeltaRuleDecodeArgs&) { return "gated_delta_rule_decode"; }
const char* op_of(const GatedDeltaRuleReplayArgs&) { return "gated_delta_rule_replay"; }

template <class Args>
Choice describe(const Stream&, const Args& args, const Plan& plan) {
  return describe_recurrent(op_of(args), plan.call);
}

template <class Args>
void launch(const Stream& stream, const Args& args, const Plan& plan, Scratch) {
  launch_recurrent(op_of(args), stream, plan.call);
}

}  // namespace

OpEntry<GatedDeltaRuleDecodeArgs> gated_delta_rule_decode_entry() {
  return entry<plan_decode, describe<GatedDeltaRuleDecodeArgs>, launch<GatedDeltaRuleDecodeArgs>>(kAllFloats);
}
OpEntry<GatedDeltaRuleReplayArgs> gated_delta_rule_replay_entry() {
  return entry<plan_replay, describe<GatedDeltaRuleReplayArgs>, launch<GatedDeltaRuleReplayArgs>>(kAllFloats);
}

}  // namespace weft::vulkan
