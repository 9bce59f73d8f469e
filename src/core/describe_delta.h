// The argument structs of the delta ops, member by member: see describe.h. The rules between members are in delta_check.h.
#pragma once

#include "core/describe.h"
#include "weft/delta_preprocess.h"
#include "weft/gated_delta_rule.h"

namespace weft {

template <>
struct EnumValues<Activation> {
  static constexpr auto kTable =
      enum_table<Activation>("WEFT_ACTIVATION_", {{Activation::silu, "silu"}, {Activation::none, "none"}});
};
template <>
struct EnumValues<Gate> {
  static constexpr auto kTable = enum_table<Gate>("WEFT_GATE_", {{Gate::silu, "silu"}, {Gate::sigmoid, "sigmoid"}});
};
template <>
struct EnumValues<HeadMap> {
  static constexpr auto kTable = enum_table<HeadMap>("WEFT_HEAD_MAP_", {{HeadMap::grouped, "grouped"}, {HeadMap::tiled, "tiled"}});
};
template <>
struct EnumValues<StateLayout> {
  static constexpr auto kTable = enum_table<StateLayout>("WEFT_STATE_LAYOUT_", {{StateLayout::vk, "vk"}, {StateLayout::kv, "kv"}});
};
// A log decay, decay or prefix sum: one number per head, or per channel of K where the tensor has rank 3.
constexpr TensorRule decay_rule(const Tensor& t, DTypes dtypes = kF32Type, Role role = Role::in, bool optional = false) {
  return {.shape = shape<"T", "Hv">,
          .dtypes = dtypes,
          .role = role,
          .optional = optional,
          .other = shape<"T", "Hv", "K">,
          .takes_other = t.rank == 3};
}
inline constexpr ScalarRule kChunkRule{.legal = "16, 32 or 64", .required = true};
inline constexpr ScalarRule kKeyScale{.fallback = "K^-1/2"};

// --- weft/delta_preprocess.h ----------------------------------------------------------------------------------------------------

template <DescribedAs<DeltaGatesArgs> A, class V>
void describe(A& a, V&& v) {
  const bool per_channel = a.a.rank == 3;
  const auto decay = [&](DTypes dtypes, Role role) {
    return TensorRule{
        .shape = shape<"T", "Hv">, .dtypes = dtypes, .role = role, .other = shape<"T", "Hv", "K">, .takes_other = per_channel};
  };
  v.tensor(WEFT_MEMBER(a), decay(kFloatTypes, Role::in));
  v.tensor(WEFT_MEMBER(b), {.shape = shape<"T", "Hv">, .optional = true});
  v.tensor(WEFT_MEMBER(a_log), {.shape = shape<"Hv">, .dtypes = kF32Type});
  v.tensor(WEFT_MEMBER(dt_bias), {.shape = shape<"Hv">, .dtypes = kF32Type, .other = shape<"Hv", "K">, .takes_other = per_channel});
  v.tensor(WEFT_MEMBER(g), decay(kF32Type, Role::out));
  v.tensor(WEFT_MEMBER(beta), {.shape = shape<"T", "Hv">, .dtypes = kF32Type, .role = Role::out, .optional = true});
  v.scalar(WEFT_MEMBER(double_beta), {});
}

template <DescribedAs<ShortConvArgs> A, class V>
void describe(A& a, V&& v) {
  constexpr TensorRule kIndices{.shape = shape<"N">, .dtypes = kI32Type, .optional = true};
  v.tensor(WEFT_MEMBER(x), {.shape = shape<"T", "C">, .any_strides = true});
  v.tensor(WEFT_MEMBER(weight), {.shape = shape<"C", "W">});
  v.rule([](auto& check) { check_taps(check); });
  v.tensor(WEFT_MEMBER(bias), {.shape = shape<"C">, .optional = true});
  v.tensor(WEFT_MEMBER(y), {.shape = shape<"T", "C">, .role = Role::out, .may_be = {&a.x}});
  v.scalar(WEFT_MEMBER(activation), {});
  v.group(WEFT_MEMBER(sequences));
  v.tensor(WEFT_MEMBER(state_in), {.shape = shape<"slots", "L", "C">, .optional = true, .any_strides = true});
  v.tensor(WEFT_MEMBER(state_out),
           {.shape = shape<"out slots", "L", "C">, .role = Role::out, .optional = true, .may_be = {&a.state_in}});
  v.tensor(WEFT_MEMBER(state_in_slots), kIndices);
  v.tensor(WEFT_MEMBER(state_out_slots), kIndices);
  v.tensor(WEFT_MEMBER(state_offsets), kIndices);
  v.tensor(WEFT_MEMBER(has_initial), kIndices);
}

template <DescribedAs<L2NormArgs> A, class V>
void describe(A& a, V&& v) {
  v.tensor(WEFT_MEMBER(x), {.shape = shape<"...", "D">});
  v.tensor(WEFT_MEMBER(y), {.shape = shape<"...", "D">, .role = Role::out, .may_be = {&a.x}});
  v.scalar(WEFT_OPTION(eps), kAtLeast0);
}

template <DescribedAs<GatedRmsNormArgs> A, class V>
void describe(A& a, V&& v) {
  v.tensor(WEFT_MEMBER(x), {.shape = shape<"T", "H", "D">});
  v.tensor(WEFT_MEMBER(z), {.shape = shape<"T", "H", "D">});
  v.tensor(WEFT_MEMBER(weight), {.shape = shape<"D">});
  v.tensor(WEFT_MEMBER(y), {.shape = shape<"T", "H", "D">, .role = Role::out, .may_be = {&a.x, &a.z}});
  v.scalar(WEFT_OPTION(eps), kAtLeast0);
  v.scalar(WEFT_MEMBER(gate), {});
}

// --- weft/delta_chunk.h ---------------------------------------------------------------------------------------------------------

template <DescribedAs<ChunkCumsumArgs> A, class V>
void describe(A& a, V&& v) {
  v.tensor(WEFT_MEMBER(g), decay_rule(a.g));
  TensorRule sums = decay_rule(a.g, kF32Type, Role::out);
  sums.may_be[0] = &a.g;
  v.tensor(WEFT_MEMBER(g_cumsum), sums);
  v.group(WEFT_MEMBER(sequences));
  v.scalar(WEFT_MEMBER(chunk), kChunkRule);
}

template <DescribedAs<ChunkKktArgs> A, class V>
void describe(A& a, V&& v) {
  v.tensor(WEFT_MEMBER(k), {.shape = shape<"T", "Hk", "K">});
  v.tensor(WEFT_MEMBER(beta), {.shape = shape<"T", "Hv">, .dtypes = kF32Type});
  v.rule([](auto& check) { check_head_size(check, "k", "K"); });
  v.tensor(WEFT_MEMBER(g_cumsum), decay_rule(a.g_cumsum));
  v.tensor(WEFT_MEMBER(a), {.shape = shape<"T", "Hv", "C">, .dtypes = kF32Type, .role = Role::out});
  v.group(WEFT_MEMBER(sequences));
  v.scalar(WEFT_MEMBER(chunk), kChunkRule);
  v.scalar(WEFT_MEMBER(head_map), {});
  v.rule([](auto& check) { check_heads(check, "k", "beta"); });
}

template <DescribedAs<ChunkTriInverseArgs> A, class V>
void describe(A& a, V&& v) {
  v.tensor(WEFT_MEMBER(a), {.shape = shape<"T", "Hv", "C">, .dtypes = kF32Type});
  v.tensor(WEFT_MEMBER(a_inv), {.shape = shape<"T", "Hv", "C">, .dtypes = kF32Type, .role = Role::out, .may_be = {&a.a}});
  v.group(WEFT_MEMBER(sequences));
  v.scalar(WEFT_MEMBER(chunk), kChunkRule);
}

template <DescribedAs<ChunkWuArgs> A, class V>
void describe(A& a, V&& v) {
  v.tensor(WEFT_MEMBER(k), {.shape = shape<"T", "Hk", "K">});
  v.tensor(WEFT_MEMBER(v), {.shape = shape<"T", "Hv", "V">});
  v.rule([](auto& check) { check_head_sizes(check, "k", "v"); });
  v.tensor(WEFT_MEMBER(beta), {.shape = shape<"T", "Hv">, .dtypes = kF32Type});
  v.tensor(WEFT_MEMBER(g_cumsum), decay_rule(a.g_cumsum));
  v.tensor(WEFT_MEMBER(a_inv), {.shape = shape<"T", "Hv", "C">, .dtypes = kF32Type});
  v.tensor(WEFT_MEMBER(w), {.shape = shape<"T", "Hv", "K">, .role = Role::out});
  v.tensor(WEFT_MEMBER(u), {.shape = shape<"T", "Hv", "V">, .role = Role::out});
  v.group(WEFT_MEMBER(sequences));
  v.scalar(WEFT_MEMBER(chunk), kChunkRule);
  v.scalar(WEFT_MEMBER(head_map), {});
  v.rule([](auto& check) { check_heads(check, "k", "v"); });
}

template <DescribedAs<ChunkStateArgs> A, class V>
void describe(A& a, V&& v) {
  v.tensor(WEFT_MEMBER(k), {.shape = shape<"T", "Hk", "K">});
  v.tensor(WEFT_MEMBER(w), {.shape = shape<"T", "Hv", "K">});
  v.tensor(WEFT_MEMBER(u), {.shape = shape<"T", "Hv", "V">});
  v.rule([](auto& check) { check_head_sizes(check, "k", "u"); });
  v.tensor(WEFT_MEMBER(g_cumsum), decay_rule(a.g_cumsum));
  v.group(WEFT_MEMBER(sequences));
  v.tensor(WEFT_MEMBER(state_in), {.shape = shape<"N", "Hv", "V", "K">, .optional = true});
  v.tensor(WEFT_MEMBER(h), {.shape = shape<">= max_chunks", "Hv", "V", "K">, .role = Role::out});
  v.tensor(WEFT_MEMBER(v_new), {.shape = shape<"T", "Hv", "V">, .role = Role::out});
  v.tensor(WEFT_MEMBER(state_out),
           {.shape = shape<"N", "Hv", "V", "K">, .role = Role::out, .optional = true, .may_be = {&a.state_in}});
  v.scalar(WEFT_MEMBER(chunk), kChunkRule);
  v.scalar(WEFT_MEMBER(head_map), {});
  v.rule([](auto& check) { check_heads(check, "k", "u"); });
}

template <DescribedAs<ChunkOutputArgs> A, class V>
void describe(A& a, V&& v) {
  v.tensor(WEFT_MEMBER(q), {.shape = shape<"T", "Hk", "K">});
  v.tensor(WEFT_MEMBER(k), {.shape = shape<"T", "Hk", "K">});
  v.tensor(WEFT_MEMBER(v_new), {.shape = shape<"T", "Hv", "V">});
  v.rule([](auto& check) { check_head_sizes(check, "k", "v_new"); });
  v.tensor(WEFT_MEMBER(h), {.shape = shape<">= max_chunks", "Hv", "V", "K">});
  v.tensor(WEFT_MEMBER(g_cumsum), decay_rule(a.g_cumsum));
  v.tensor(WEFT_MEMBER(o), {.shape = shape<"T", "Hv", "V">, .role = Role::out});
  v.scalar(WEFT_OPTION(scale), kKeyScale);
  v.group(WEFT_MEMBER(sequences));
  v.scalar(WEFT_MEMBER(chunk), kChunkRule);
  v.scalar(WEFT_MEMBER(head_map), {});
  v.rule([](auto& check) { check_heads(check, "k", "v_new"); });
}

// --- weft/gated_delta_rule.h ----------------------------------------------------------------------------------------------------

template <DescribedAs<DeltaGateInputs> A, class V>
void describe(A& a, V&& v) {
  const bool raw = a.a.present() || a.a_log.present() || a.dt_bias.present();
  v.rule([&](auto& check) { check_gates(check, a); });
  v.tensor(WEFT_MEMBER(g), decay_rule(a.g, kF32Type, Role::in, true));
  v.tensor(WEFT_MEMBER(alpha), decay_rule(a.alpha, kF32Type, Role::in, true));
  v.tensor(WEFT_MEMBER(a), decay_rule(a.a, kFloatTypes, Role::in, !raw));
  v.tensor(WEFT_MEMBER(a_log), {.shape = shape<"Hv">, .dtypes = kF32Type, .optional = !raw});
  v.tensor(WEFT_MEMBER(dt_bias),
           {.shape = shape<"Hv">, .dtypes = kF32Type, .optional = !raw, .other = shape<"Hv", "K">, .takes_other = a.a.rank == 3});
  v.tensor(WEFT_MEMBER(beta), {.shape = shape<"T", "Hv">, .dtypes = kF32Type, .optional = true});
  v.tensor(WEFT_MEMBER(b), {.shape = shape<"T", "Hv">, .optional = true});
  v.scalar(WEFT_MEMBER(double_beta), {});
}

// Which pools of states an op cannot do without.
struct StatesUse {
  bool in = false, out = false;
};

template <DescribedAs<DeltaStates> A, class V>
void describe(A& a, V&& v, StatesUse required = {}) {
  constexpr TensorRule kIndices{.shape = shape<"N">, .dtypes = kI32Type, .optional = true};
  const bool kv = a.layout == StateLayout::kv;
  v.scalar(WEFT_MEMBER(layout), {});
  v.tensor(WEFT_MEMBER(in_slots), kIndices);
  v.tensor(WEFT_MEMBER(out_slots), kIndices);
  v.tensor(WEFT_MEMBER(has_initial), kIndices);
  v.tensor(WEFT_MEMBER(in), {.shape = shape<"slots", "Hv", "V", "K">,
                             .optional = !required.in,
                             .other = shape<"slots", "Hv", "K", "V">,
                             .takes_other = kv});
  v.tensor(WEFT_MEMBER(out), {.shape = shape<"out slots", "Hv", "V", "K">,
                              .role = Role::out,
                              .optional = !required.out,
                              .other = shape<"out slots", "Hv", "K", "V">,
                              .takes_other = kv,
                              .may_be = {&a.in}});
}

// The three tensors go together: an optional record has all of them or none.
template <DescribedAs<DeltaRecord> A, class V>
void describe(A& a, V&& v, Role role, bool optional) {
  const bool absent = optional && !a.k.present() && !a.delta.present() && !a.g.present();
  v.tensor(WEFT_MEMBER(k), {.shape = shape<"T", "Hk", "K">, .dtypes = kF32Type, .role = role, .optional = absent});
  v.tensor(WEFT_MEMBER(delta), {.shape = shape<"T", "Hv", "V">, .dtypes = kF32Type, .role = role, .optional = absent});
  v.tensor(WEFT_MEMBER(g), decay_rule(a.g, kF32Type, role, absent));
}

// The members that prefill and decode share.
template <class A, class V>
void describe_rule(A& a, V&& v) {
  v.tensor(WEFT_MEMBER(q), {.shape = shape<"T", "Hk", "K">});
  v.tensor(WEFT_MEMBER(k), {.shape = shape<"T", "Hk", "K">, .dtype_of = &a.q});
  v.tensor(WEFT_MEMBER(v), {.shape = shape<"T", "Hv", "V">, .dtype_of = &a.q});
  v.rule([](auto& check) { check_head_sizes(check, "k", "v"); });
  v.group(WEFT_MEMBER(gates));
  v.tensor(WEFT_MEMBER(o), {.shape = shape<"T", "Hv", "V">, .role = Role::out});
  v.scalar(WEFT_OPTION(scale), kKeyScale);
  v.scalar(WEFT_MEMBER(l2_norm), {});
  v.scalar(WEFT_MEMBER(head_map), {});
  v.group(WEFT_MEMBER(sequences));
  v.group(WEFT_MEMBER(states));
  v.rule([](auto& check) { check_heads(check, "k", "v"); });
}

template <DescribedAs<GatedDeltaRulePrefillArgs> A, class V>
void describe(A& a, V&& v) {
  describe_rule(a, v);
  v.tensor(WEFT_MEMBER(checkpoints), {.shape = shape<"N", ">= max_tokens / checkpoint_every", "Hv", "V", "K">,
                                      .role = Role::out,
                                      .optional = true,
                                      .other = shape<"N", ">= max_tokens / checkpoint_every", "Hv", "K", "V">,
                                      .takes_other = a.states.layout == StateLayout::kv});
  static_assert(kCheckpointUnit == 64, "the words below");
  v.scalar(WEFT_MEMBER(checkpoint_every), {.legal = "a positive multiple of 64 with checkpoints, else 0"});
  v.scalar(WEFT_MEMBER(schedule), {});
}

template <DescribedAs<GatedDeltaRuleDecodeArgs> A, class V>
void describe(A& a, V&& v) {
  describe_rule(a, v);
  v.group(WEFT_MEMBER(record), Role::out, true);
}

template <DescribedAs<GatedDeltaRuleReplayArgs> A, class V>
void describe(A& a, V&& v) {
  v.group(WEFT_MEMBER(record), Role::in, false);
  v.rule([](auto& check) { check_head_sizes(check, "record.k", "record.delta"); });
  v.scalar(WEFT_MEMBER(head_map), {});
  v.group(WEFT_MEMBER(sequences));
  v.tensor(WEFT_MEMBER(accepted), {.shape = shape<"N">, .dtypes = kI32Type});
  v.group(WEFT_MEMBER(states), StatesUse{.in = true, .out = true});
  v.rule([](auto& check) { check_heads(check, "record.k", "record.delta"); });
}

template <DescribedAs<GatedDeltaRuleSummarizeArgs> A, class V>
void describe(A& a, V&& v) {
  v.tensor(WEFT_MEMBER(k), {.shape = shape<"T", "Hk", "K">});
  v.tensor(WEFT_MEMBER(v), {.shape = shape<"T", "Hv", "V">, .dtype_of = &a.k});
  v.rule([](auto& check) { check_head_sizes(check, "k", "v"); });
  v.group(WEFT_MEMBER(gates));
  v.scalar(WEFT_MEMBER(l2_norm), {});
  v.scalar(WEFT_MEMBER(head_map), {});
  v.group(WEFT_MEMBER(sequences));
  v.tensor(WEFT_MEMBER(p), {.shape = shape<"N", "Hv", "K", "K">, .dtypes = kF32Type, .role = Role::out});
  v.tensor(WEFT_MEMBER(q), {.shape = shape<"N", "Hv", "V", "K">, .dtypes = kF32Type, .role = Role::out});
  v.rule([](auto& check) { check_heads(check, "k", "v"); });
}

template <DescribedAs<GatedDeltaRuleComposeArgs> A, class V>
void describe(A& a, V&& v) {
  constexpr TensorRule kP{.shape = shape<"N", "Hv", "K", "K">, .dtypes = kF32Type};
  constexpr TensorRule kQ{.shape = shape<"N", "Hv", "V", "K">, .dtypes = kF32Type};
  v.tensor(WEFT_MEMBER(p1), kP);
  v.tensor(WEFT_MEMBER(q1), kQ);
  v.rule([](auto& check) { check_head_size(check_head_size(check, "p1", "K"), "q1", "V"); });
  v.tensor(WEFT_MEMBER(p2), kP);
  v.tensor(WEFT_MEMBER(q2), kQ);
  v.tensor(WEFT_MEMBER(p), {.shape = kP.shape, .dtypes = kF32Type, .role = Role::out});
  v.tensor(WEFT_MEMBER(q), {.shape = kQ.shape, .dtypes = kF32Type, .role = Role::out});
}

template <DescribedAs<GatedDeltaRuleApplyArgs> A, class V>
void describe(A& a, V&& v) {
  v.tensor(WEFT_MEMBER(p), {.shape = shape<"N", "Hv", "K", "K">, .dtypes = kF32Type});
  v.tensor(WEFT_MEMBER(q), {.shape = shape<"N", "Hv", "V", "K">, .dtypes = kF32Type});
  v.rule([](auto& check) { check_head_size(check_head_size(check, "p", "K"), "q", "V"); });
  v.group(WEFT_MEMBER(states), StatesUse{.in = false, .out = true});
}

}  // namespace weft
