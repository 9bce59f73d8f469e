// gated_delta_rule_prefill and gated_delta_rule_summarize on vulkan, token by token by the recurrent shader.
#include "vulkan/delta/recurrent.h"
#include "vulkan/table.h"

namespace weft::vulkan {
namespace {

struct Plan {
  RecurrentCall call;
  size_t scratch_bytes = 0;
};

Plan plan_prefill(const Stream&, const GatedDeltaRulePrefillArgs& args) {
  Plan plan{recurrent_call(args)};
  plan.call.checkpoints = args.checkpoints;
  plan.call.checkpoint_every = args.checkpoint_every;
  return plan;
}

Plan plan_summarize(const Stream&, const GatedDeltaRuleSummarizeArgs& args) {
  Plan plan{recurrent_call(args)};
  plan.call.p = args.p;
  plan.call.map_q = args.q;
  return plan;
}

const char* op_of(const GatedDeltaRulePrefillArgs&) { return "gated_delta_rule_prefill"; }
const char* op_of(const GatedDeltaRuleSummarizeArgs&) { return "gated_delta_rule_summarize"; }

template <class Args>
Choice describe(const Stream&, const Args& args, const Plan& plan) {
  Choice choice = describe_recurrent(op_of(args), plan.call);
  choice.speed = Speed::slow;  // token by token
  return choice;
}

template <class Args>
void launch(const Stream& stream, const Args& args, const Plan& plan, Scratch) {
  launch_recurrent(op_of(args), stream, plan.call);
}

}  // namespace

OpEntry<GatedDeltaRulePrefillArgs> gated_delta_rule_prefill_entry() {
  return entry<plan_prefill, describe<GatedDeltaRulePrefillArgs>, launch<GatedDeltaRulePrefillArgs>>(kAllFloats);
}
OpEntry<GatedDeltaRuleSummarizeArgs> gated_delta_rule_summarize_entry() {
  return entry<plan_summarize, describe<GatedDeltaRuleSummarizeArgs>, launch<GatedDeltaRuleSummarizeArgs>>(kAllFloats);
}

}  // namespace weft::vulkan
