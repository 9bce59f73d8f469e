// gated_delta_rule_decode and gated_delta_rule_replay on the cpu: threads over sequences and value heads.
// clang-format off
#include "cpu/common/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/delta/gated_delta_rule_decode.cc"
#include <hwy/foreach_target.h>
// clang-format on
#include "cpu/delta/recurrent-inl.h"

#if HWY_ONCE

#include <algorithm>
#include <string>

#include "common/conventions.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/scratch.h"
#include "cpu/table.h"

namespace weft::cpu {

HWY_EXPORT(recurrent_step);
HWY_EXPORT(recurrent_step_bytes);

namespace {

// How a call is spread over threads.
struct StepPlan {
  Isa isa = Isa::best;
  Threads threads;  // those that the work is worth
  size_t worker_bytes = 0;
  size_t scratch_bytes = 0;
};

StepPlan plan_steps(const Stream& stream, const Tensor& k, const Tensor& v) {
  StepPlan plan;
  plan.isa = resolve_isa(stream.isa);
  const double operations = 7.0 * static_cast<double>(k.size(0) * v.size(1) * k.size(2) * v.size(2));
  plan.threads = worth_threads(stream, operations);
  plan.worker_bytes = align_scratch(WEFT_KERNEL(plan.isa, recurrent_step_bytes)());
  plan.scratch_bytes = plan.worker_bytes * static_cast<size_t>(thread_count(stream));
  return plan;
}
StepPlan plan_decode(const Stream& stream, const GatedDeltaRuleDecodeArgs& args) { return plan_steps(stream, args.k, args.v); }
StepPlan plan_replay(const Stream& stream, const GatedDeltaRuleReplayArgs& args) {
  return plan_steps(stream, args.record.k, args.record.delta);
}

// Runs a step for every (sequence, value head). tokens(n, range) says how many tokens of a sequence to take; inert(range, hv) is
// called instead for a sequence without slots.
template <class Tokens, class Inert>
void run_steps(const StepPlan& plan, const RecurrentStep& step, const Sequences& sequences, const DeltaStates& states, int64_t T,
               Scratch scratch, Tokens&& tokens, Inert&& inert) {
  const auto kernel = WEFT_KERNEL(plan.isa, recurrent_step);
  parallel_for(plan.threads, sequences.count * step.heads.Hv, [&](int64_t i, int worker) {
    const int64_t n = i / step.heads.Hv, hv = i % step.heads.Hv;
    const TokenRange range = tokens_of(sequences, n, T);
    if (!range.legal) return;
    const StateSlots slots = state_slots(states, n);
    if (slots.inert) return inert(range, hv);
    kernel(step, range.begin, tokens(n, range), hv, slots.in, slots.out,
           static_cast<char*>(scratch.data) + static_cast<size_t>(worker) * plan.worker_bytes);
  });
}

void decode(const Stream&, const GatedDeltaRuleDecodeArgs& args, const StepPlan& plan, Scratch scratch) {
  RecurrentStep step;
  step.q = rows_view(args.q);
  step.k = rows_view(args.k);
  step.v = rows_view(args.v);
  step.o = rows_view(args.o);
  step.gates = gate_view(args.gates);
  step.heads = {args.k.size(1), args.v.size(1), args.k.size(2), args.v.size(2), args.head_map};
  step.scale = scale_or_default(args.scale, args.k.size(2));
  step.l2_norm = args.l2_norm;
  step.record_k = rows_view(args.record.k);
  step.record_delta = rows_view(args.record.delta);
  step.record_g = rows_view(args.record.g);
  step.layout = args.states.layout;
  step.in = state_view(args.states.in, args.states.layout);
  step.out = state_view(args.states.out, args.states.layout);
  run_steps(
      plan, step, args.sequences, args.states, args.k.size(0), scratch, [](int64_t, TokenRange range) { return range.length(); },
      [&](TokenRange range, int64_t hv) { zero_rows(args.o, range, hv, 0, step.heads.V); });
}

void replay(const Stream&, const GatedDeltaRuleReplayArgs& args, const StepPlan& plan, Scratch scratch) {
  RecurrentStep step;
  step.replay = true;
  step.k = rows_view(args.record.k);
  step.v = rows_view(args.record.delta);
  DeltaGateInputs gates;
  gates.g = args.record.g;
  step.gates = gate_view(gates);
  step.heads = {args.record.k.size(1), args.record.delta.size(1), args.record.k.size(2), args.record.delta.size(2), args.head_map};
  step.layout = args.states.layout;
  step.in = state_view(args.states.in, args.states.layout);
  step.out = state_view(args.states.out, args.states.layout);
  run_steps(
      plan, step, args.sequences, args.states, args.record.k.size(0), scratch,
      [&](int64_t n, TokenRange range) { return std::clamp<int64_t>(index_at(args.accepted, n), 0, range.length()); },
      [](TokenRange, int64_t) {});
}

Choice describe_steps(const Stream& stream, const StepPlan& plan, const char* op, int64_t sequences, int64_t Hv) {
  return {std::string("cpu.") + op + ".rows2." + isa_name(plan.isa),
          "up to " + std::to_string(thread_count(stream)) + " threads over " + std::to_string(sequences) + " sequences x " +
              std::to_string(Hv) + " value heads, states read and written once"};
}
Choice describe_decode(const Stream& stream, const GatedDeltaRuleDecodeArgs& args, const StepPlan& plan) {
  return describe_steps(stream, plan, "gated_delta_rule_decode", args.sequences.count, args.v.size(1));
}
Choice describe_replay(const Stream& stream, const GatedDeltaRuleReplayArgs& args, const StepPlan& plan) {
  return describe_steps(stream, plan, "gated_delta_rule_replay", args.sequences.count, args.record.delta.size(1));
}

}  // namespace

OpEntry<GatedDeltaRuleDecodeArgs> gated_delta_rule_decode_entry() {
  return entry<plan_decode, describe_decode, decode>(kAllFloats);
}
OpEntry<GatedDeltaRuleReplayArgs> gated_delta_rule_replay_entry() {
  return entry<plan_replay, describe_replay, replay>(kAllFloats);
}

}  // namespace weft::cpu

#endif  // HWY_ONCE
