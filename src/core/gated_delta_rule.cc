// What legal arguments of the whole gated delta rule, its replay and its affine maps are.
#include "weft/gated_delta_rule.h"

#include "common/sequences.h"
#include "core/delta_check.h"

namespace weft {
namespace {

constexpr std::initializer_list<DType> kF32 = {DType::f32};

// Exactly one of the forms must be given; `present` is counted in the order of `names`.
void check_one_form(Check& check, std::initializer_list<bool> present, std::initializer_list<const char*> names,
                    const char* wanted) {
  const char* first = nullptr;
  auto name = names.begin();
  for (bool given : present) {
    if (given && first)
      check.require(false, *name, [&] { return std::string("is given beside ") + first + ", wanted exactly one of " + wanted; });
    if (given && !first) first = *name;
    ++name;
  }
  check.require(first != nullptr, *names.begin(), [&] { return std::string("is absent, wanted exactly one of ") + wanted; });
}

void check_gates(Check& check, const DeltaGateInputs& gates) {
  const bool raw = gates.a.present() || gates.a_log.present() || gates.dt_bias.present();
  check_one_form(check, {gates.g.present(), gates.alpha.present(), raw}, {"gates.g", "gates.alpha", "gates.a"},
                 "g, alpha and a + a_log + dt_bias");
  if (gates.g.present()) check_decay(check, "gates.g", gates.g, kF32);
  if (gates.alpha.present()) check_decay(check, "gates.alpha", gates.alpha, kF32);
  if (raw) {
    check_decay(check, "gates.a", gates.a, kFloatTypes).tensor("gates.a_log", gates.a_log, {"Hv"}, kF32);
    if (gates.a.rank == 3)
      check.tensor("gates.dt_bias", gates.dt_bias, {"Hv", "K"}, kF32);
    else
      check.tensor("gates.dt_bias", gates.dt_bias, {"Hv"}, kF32);
  }
  check_one_form(check, {gates.beta.present(), gates.b.present()}, {"gates.beta", "gates.b"}, "beta and b");
  check.optional_tensor("gates.beta", gates.beta, {"T", "Hv"}, kF32).optional_tensor("gates.b", gates.b, {"T", "Hv"});
  check.require(!gates.double_beta || gates.b.present(), "gates.double_beta", "is set, but it doubles sigmoid(b) and b is absent");
}

bool decay_per_channel(const DeltaGateInputs& gates) { return gates.g.rank == 3 || gates.alpha.rank == 3 || gates.a.rank == 3; }

void check_pool(Check& check, const char* argument, const Tensor& pool, const char* slots, const Tensor& indices,
                StateLayout layout) {
  if (layout == StateLayout::vk)
    check.optional_tensor(argument, pool, {slots, "Hv", "V", "K"});
  else
    check.optional_tensor(argument, pool, {slots, "Hv", "K", "V"});
  check_slots(check_matrices(check, argument, pool), argument, pool, indices);
}

// Letters N, Hv, V and K are bound before.
void check_states(Check& check, const DeltaStates& states) {
  check.known("states.layout", states.layout, StateLayout::kv);
  check.optional_tensor("states.in_slots", states.in_slots, {"N"}, {DType::i32});
  check.optional_tensor("states.out_slots", states.out_slots, {"N"}, {DType::i32});
  check.optional_tensor("states.has_initial", states.has_initial, {"N"}, {DType::i32});
  check_pool(check, "states.in", states.in, "slots", states.in_slots, states.layout);
  check_pool(check, "states.out", states.out, "out slots", states.out_slots.present() ? states.out_slots : states.in_slots,
             states.layout);
}

void check_record(Check& check, const DeltaRecord& record) {
  check.tensor("record.k", record.k, {"T", "Hk", "K"}, kF32).tensor("record.delta", record.delta, {"T", "Hv", "V"}, kF32);
  check_decay(check, "record.g", record.g, kF32);
}

// What decode may be asked, and hence what replay may meet.
void check_decode_tokens(Check& check, const Sequences& sequences) {
  if (!check.ok()) return;
  const int64_t longest = sequences.cu_seqlens.present() ? sequences.max_tokens : max_tokens(sequences, check.dim("T"));
  check.require(longest <= kMaxDecodeTokens, "sequences", [&] {
    return "has up to " + std::to_string(longest) + " tokens per sequence, wanted at most " + std::to_string(kMaxDecodeTokens);
  });
}

void check_head_sizes(Check& check, const char* key, const char* value, HeadMap map) {
  check_head_size(check_head_size(check, key, "K"), value, "V");
  check_heads(check, key, map);
}

// The part that prefill and decode share.
template <class Args>
void check_rule(Check& check, const Args& args) {
  check.tensor("q", args.q, {"T", "Hk", "K"}).tensor("k", args.k, {"T", "Hk", "K"}, {args.q.dtype});
  check.tensor("v", args.v, {"T", "Hv", "V"}, {args.q.dtype});
  check_head_sizes(check, "k", "v", args.head_map);
  check_gates(check, args.gates);
  check.tensor("o", args.o, {"T", "Hv", "V"});
  if (args.scale) check.finite("scale", *args.scale);
  check.sequences("sequences", args.sequences, check.dim("T"));
  check_states(check, args.states);
}

// An affine map of every sequence and head.
void check_map(Check& check, const char* p_name, const Tensor& p, const char* q_name, const Tensor& q) {
  check.tensor(p_name, p, {"N", "Hv", "K", "K"}, kF32).tensor(q_name, q, {"N", "Hv", "V", "K"}, kF32);
  check_matrices(check_matrices(check, p_name, p), q_name, q);
}

void check_checkpoints(Check& check, const GatedDeltaRulePrefillArgs& args) {
  if (!args.checkpoints.present()) {
    check.require(args.checkpoint_every == 0, "checkpoint_every",
                  [&] { return "is " + std::to_string(args.checkpoint_every) + " without checkpoints, wanted 0"; });
    return;
  }
  check.require(args.checkpoint_every > 0 && args.checkpoint_every % kCheckpointUnit == 0, "checkpoint_every", [&] {
    return "is " + std::to_string(args.checkpoint_every) + ", wanted a positive multiple of " + std::to_string(kCheckpointUnit);
  });
  if (args.states.layout == StateLayout::vk)
    check.tensor("checkpoints", args.checkpoints, {"N", "*", "Hv", "V", "K"});
  else
    check.tensor("checkpoints", args.checkpoints, {"N", "*", "Hv", "K", "V"});
  check_matrices(check, "checkpoints", args.checkpoints);
  if (!check.ok()) return;
  const int64_t wanted = max_tokens(args.sequences, check.dim("T")) / args.checkpoint_every;
  check.require(args.checkpoints.size(1) >= wanted, "checkpoints", [&] {
    return "has " + std::to_string(args.checkpoints.size(1)) + " rows per sequence, wanted at least " + std::to_string(wanted);
  });
}

}  // namespace

Status validate(const GatedDeltaRulePrefillArgs& args) {
  Check check("gated_delta_rule_prefill");
  check_rule(check, args);
  check_checkpoints(check, args);
  check.known("schedule", args.schedule, Schedule::invariant);
  return std::move(check.memory(args)).status();
}

Status validate(const GatedDeltaRuleDecodeArgs& args) {
  Check check("gated_delta_rule_decode");
  check_rule(check, args);
  check_decode_tokens(check, args.sequences);
  if (args.record.k.present() || args.record.delta.present() || args.record.g.present()) {
    check_record(check, args.record);
    check.require((args.record.g.rank == 3) == decay_per_channel(args.gates), "record.g", [&] {
      return "is " + shape_text(args.record.g) + ", wanted " + (decay_per_channel(args.gates) ? "[T, Hv, K]" : "[T, Hv]") +
             " like the decay in gates";
    });
  }
  return std::move(check.memory(args)).status();
}

Status validate(const GatedDeltaRuleReplayArgs& args) {
  Check check("gated_delta_rule_replay");
  check_record(check, args.record);
  check_head_sizes(check, "record.k", "record.delta", args.head_map);
  check.sequences("sequences", args.sequences, check.dim("T"));
  check_decode_tokens(check, args.sequences);
  check.tensor("accepted", args.accepted, {"N"}, {DType::i32});
  check.require(args.states.in.present(), "states.in", "is absent, wanted the states before the recorded tokens");
  check.require(args.states.out.present(), "states.out", "is absent, wanted a pool for the states after the accepted tokens");
  check_states(check, args.states);
  return std::move(check.memory(args)).status();
}

Status validate(const GatedDeltaRuleSummarizeArgs& args) {
  Check check("gated_delta_rule_summarize");
  check.tensor("k", args.k, {"T", "Hk", "K"}).tensor("v", args.v, {"T", "Hv", "V"});
  check_head_sizes(check, "k", "v", args.head_map);
  check_gates(check, args.gates);
  check.sequences("sequences", args.sequences, check.dim("T"));
  check_map(check, "p", args.p, "q", args.q);
  return std::move(check.memory(args)).status();
}

Status validate(const GatedDeltaRuleComposeArgs& args) {
  Check check("gated_delta_rule_compose");
  check_map(check, "p1", args.p1, "q1", args.q1);
  check_map(check, "p2", args.p2, "q2", args.q2);
  check_map(check, "p", args.p, "q", args.q);
  check_head_size(check_head_size(check, "p1", "K"), "q1", "V");
  return std::move(check.memory(args)).status();
}

Status validate(const GatedDeltaRuleApplyArgs& args) {
  Check check("gated_delta_rule_apply");
  check_map(check, "p", args.p, "q", args.q);
  check_head_size(check_head_size(check, "p", "K"), "q", "V");
  check.require(args.states.out.present(), "states.out", "is absent, wanted a pool for the mapped states");
  check_states(check, args.states);
  return std::move(check.memory(args)).status();
}

}  // namespace weft
