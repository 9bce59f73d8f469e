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

void decode(const Stream& stream, const GatedDeltaRuleDecodeArgs& args, Scratch) {
  launch_recurrent("gated_delta_rule_decode", stream, recurrent_call(args));
}

void replay(const Stream& stream, const GatedDeltaRuleReplayArgs& args, Scratch) {
  launch_recurrent("gated_delta_rule_replay", stream, recurrent_call(args));
}

template <class Args>
Choice recurrent_choice(const char* op, const Args& args) {
  return {std::string("cuda.") + op + "." + recurrent_kernel_name(recurrent_call(args)),
          "rows of states in blocks, read and written once"};
}

Choice decode_choice(const Stream&, const GatedDeltaRuleDecodeArgs& args) {
  return recurrent_choice("gated_delta_rule_decode", args);
}
Choice replay_choice(const Stream&, const GatedDeltaRuleReplayArgs& args) {
  return recurrent_choice("gated_delta_rule_replay", args);
}

}  // namespace

OpRow<GatedDeltaRuleDecodeArgs> gated_delta_rule_decode_row() { return {decode, kAllFloats, nullptr, decode_choice}; }
OpRow<GatedDeltaRuleReplayArgs> gated_delta_rule_replay_row() { return {replay, kAllFloats, nullptr, replay_choice}; }

}  // namespace weft::cuda
