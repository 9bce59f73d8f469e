// Second formulations of the gated delta rule, and what its bit-equality laws are checked with.
#pragma once

#include "cases/delta_inputs.h"
#include "cases/problem.h"

namespace weft::cases {

// The arguments of a call with sequence n alone.
template <class Args>
Args alone(const Args& args, const Tokens& tokens, int64_t n) {
  const int64_t T = args.o.size(0);
  Args one = mapped(args, [&](Tensor t) {
    // Tensors over tokens have T rows and are cut. [N] and pool tensors are handled below; a_log and dt_bias stay whole.
    const bool over_tokens = t.present() && t.rank >= 2 && t.size(0) == T && t.data != args.states.in.data &&
                             t.data != args.states.out.data && t.data != args.gates.dt_bias.data;
    return over_tokens ? rows_of(t, tokens.begin(n), tokens.length(n)) : t;
  });
  one.sequences = Sequences::uniform(1);
  const auto own = [&](const Tensor& slots) { return slots.present() ? rows_of(slots, n, 1) : slots; };
  one.states = args.states;
  one.states.in_slots = own(args.states.in_slots);
  one.states.out_slots = own(args.states.out_slots);
  one.states.has_initial = own(args.states.has_initial);
  if (!args.states.in_slots.present() && args.states.in.present()) one.states.in = rows_of(args.states.in, n, 1);
  if (!args.states.in_slots.present() && args.states.out.present()) one.states.out = rows_of(args.states.out, n, 1);
  return one;
}

// Outputs of a prefill or decode against those of the chunk stages in sequence.
Findings by_chunk_stages(const DeltaInputs& in, const DeltaStates& given, std::optional<float> scale, const Tensor& o,
                         const DeltaStates& result, double o_bound, double state_bound);

// Final states against `want`, dense [N, Hv, V, K], over the sequences n that have an output slot and for which writes(n) holds.
Finding compare_states(const char* name, const DeltaStates& states, const Tensor& want, double bound,
                       const std::function<bool(int64_t)>& writes);

// q and k as the rule uses them: normalised when l2_norm is set.
Tensor normalised(Memory& memory, const Tensor& x, bool l2_norm);

}  // namespace weft::cases
