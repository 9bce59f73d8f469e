// What legal arguments of the whole gated delta rule, its replay and its affine maps are.
#include "weft/gated_delta_rule.h"

#include "common/sequences.h"
#include "core/delta_check.h"
#include "core/op_limits.h"

namespace weft {
namespace {

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

bool decay_per_channel(const DeltaGateInputs& gates) { return gates.g.rank == 3 || gates.alpha.rank == 3 || gates.a.rank == 3; }

void check_states(Check& check, const DeltaStates& states) {
  check_slots(check_matrices(check, "states.in", states.in), "states.in", states.in, states.in_slots);
  check_slots(check_matrices(check, "states.out", states.out), "states.out", states.out,
              states.out_slots.present() ? states.out_slots : states.in_slots);
}

// Limits of decode. Replay has the same limits, because it repeats decode.
void check_decode_tokens(Check& check, const Sequences& sequences) {
  if (!check.ok()) return;
  if (sequences.cu_seqlens.present()) {
    check.require(sequences.max_tokens <= kMaxDecodeTokens, "sequences.max_tokens", [&] {
      return "is " + std::to_string(sequences.max_tokens) + ", wanted at most " + std::to_string(kMaxDecodeTokens);
    });
    return;
  }
  const int64_t each = max_tokens(sequences, check.dim("T"));
  check.require(each <= kMaxDecodeTokens, "sequences.count", [&] {
    return "is " + std::to_string(sequences.count) + ", so each sequence has " + std::to_string(each) +
           " of the T=" + std::to_string(check.dim("T")) + " tokens, wanted at most " + std::to_string(kMaxDecodeTokens);
  });
}

std::string legal_decode_tokens() { return "; up to " + std::to_string(kMaxDecodeTokens) + " tokens a sequence"; }

// The matrices of an affine map.
void check_map(Check& check, const char* p_name, const Tensor& p, const char* q_name, const Tensor& q) {
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
  check_matrices(check, "checkpoints", args.checkpoints);
  if (!check.ok()) return;
  const int64_t wanted = max_tokens(args.sequences, check.dim("T")) / args.checkpoint_every;
  check.require(args.checkpoints.size(1) >= wanted, "checkpoints", [&] {
    return "has " + std::to_string(args.checkpoints.size(1)) + " rows per sequence, wanted at least " + std::to_string(wanted);
  });
}

}  // namespace

void check_gates(Check& check, const DeltaGateInputs& gates) {
  const bool raw = gates.a.present() || gates.a_log.present() || gates.dt_bias.present();
  check_one_form(check, {gates.g.present(), gates.alpha.present(), raw}, {"gates.g", "gates.alpha", "gates.a"},
                 "g, alpha and a + a_log + dt_bias");
  check_one_form(check, {gates.beta.present(), gates.b.present()}, {"gates.beta", "gates.b"}, "beta and b");
  check.require(!gates.double_beta || gates.b.present(), "gates.double_beta", "is set, but it doubles sigmoid(b) and b is absent");
}

Status validate(const GatedDeltaRulePrefillArgs& args) {
  Check check("gated_delta_rule_prefill");
  check_states(check.members(args), args.states);
  check_checkpoints(check, args);
  return std::move(check.memory(args)).status();
}

Status validate(const GatedDeltaRuleDecodeArgs& args) {
  Check check("gated_delta_rule_decode");
  check_states(check.members(args), args.states);
  check_decode_tokens(check, args.sequences);
  if (args.record.g.present())
    check.require((args.record.g.rank == 3) == decay_per_channel(args.gates), "record.g", [&] {
      return "is " + shape_text(args.record.g) + ", wanted " + (decay_per_channel(args.gates) ? "[T, Hv, K]" : "[T, Hv]") +
             " like the decay in gates";
    });
  return std::move(check.memory(args)).status();
}

Status validate(const GatedDeltaRuleReplayArgs& args) {
  Check check("gated_delta_rule_replay");
  check.members(args);
  check_decode_tokens(check, args.sequences);
  check_states(check, args.states);
  return std::move(check.memory(args)).status();
}

Status validate(const GatedDeltaRuleSummarizeArgs& args) {
  Check check("gated_delta_rule_summarize");
  check.members(args);
  check_map(check, "p", args.p, "q", args.q);
  return std::move(check.memory(args)).status();
}

Status validate(const GatedDeltaRuleComposeArgs& args) {
  Check check("gated_delta_rule_compose");
  check.members(args);
  check_map(check, "p1", args.p1, "q1", args.q1);
  check_map(check, "p2", args.p2, "q2", args.q2);
  check_map(check, "p", args.p, "q", args.q);
  return std::move(check.memory(args)).status();
}

Status validate(const GatedDeltaRuleApplyArgs& args) {
  Check check("gated_delta_rule_apply");
  check.members(args);
  check_map(check, "p", args.p, "q", args.q);
  check_states(check, args.states);
  return std::move(check.memory(args)).status();
}

std::string legal_shapes(const GatedDeltaRulePrefillArgs&) { return legal_heads(); }
std::string legal_shapes(const GatedDeltaRuleDecodeArgs&) { return legal_heads() + legal_decode_tokens(); }
std::string legal_shapes(const GatedDeltaRuleReplayArgs&) { return legal_heads() + legal_decode_tokens(); }
std::string legal_shapes(const GatedDeltaRuleSummarizeArgs&) { return legal_heads(); }
std::string legal_shapes(const GatedDeltaRuleComposeArgs&) { return legal_heads(); }
std::string legal_shapes(const GatedDeltaRuleApplyArgs&) { return legal_heads(); }

}  // namespace weft
