// gated_delta_rule_decode and gated_delta_rule_replay on cuda, by the recurrent kernels.
#include <string>

#include "cuda/delta/delta_lowering.h"
#include "cuda/table.h"

namespace weft::cuda {
namespace {

RecurrentCall recurrent_call(const GatedDeltaRuleDecodeArgs& args) {
  RecurrentCall call = common_recurrent_call(args);
  call.record = args.record;
  return call;
}

RecurrentCall recurrent_call(const GatedDeltaRuleReplayArgs& args) {
  RecurrentCall call;
  call.k = args.record.k;
  call.v = args.record.delta;
  call.gates.g = args.record.g;
  call.accepted = args.accepted;
  call.sequences = args.sequences;
  call.states = args.states;
  call.head_map = args.head_map;
  return with_sizes(call);
}

const char* op_of(const GatedDeltaRuleDecodeArgs&) { return "gated_delta_rule_decode"; }
const char* op_of(const GatedDeltaRuleReplayArgs&) { return "gated_delta_rule_replay"; }

struct Plan {
  RecurrentCall call;
  size_t scratch_bytes = 0;
};

template <class Args>
Plan plan_recurrent(const Stream&, const Args& args) {
  return {recurrent_call(args)};
}

template <class Args>
Choice describe(const Stream&, const Args& args, const Plan& plan) {
  return {std::string("cuda.") + op_of(args) + "." + recurrent_kernel_name(plan.call),
          "rows of states in blocks, read and written once"};
}

template <class Args>
void launch_planned(const Stream& stream, const Args& args, const Plan& plan, Scratch) {
  launch_recurrent(op_of(args), stream, plan.call);
}

template <class Args>
OpEntry<Args> recurrent_entry() {
  return entry<plan_recurrent<Args>, describe<Args>, launch_planned<Args>>(kAllFloats);
}

}  // namespace

OpEntry<GatedDeltaRuleDecodeArgs> gated_delta_rule_decode_entry() { return recurrent_entry<GatedDeltaRuleDecodeArgs>(); }
OpEntry<GatedDeltaRuleReplayArgs> gated_delta_rule_replay_entry() { return recurrent_entry<GatedDeltaRuleReplayArgs>(); }

}  // namespace weft::cuda
