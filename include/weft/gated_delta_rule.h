/// The gated delta rule: prefill, decode, replay of recorded tokens, and token ranges as affine maps.
/// @file
///
/// Per sequence and value head, with q^ = scale * q and k^ = k (both l2-normalised first when l2_norm is set, eps 1e-6):
///
///     D_t = e^(g_t) S_(t-1)                 the decay comes first (per channel of K when g is [T, Hv, K])
///     e_t = beta_t (v_t - D_t k^_t)         the correction, "delta"
///     S_t = D_t + e_t k^_t^T
///     o_t = S_t q^_t                        read after the write
///
/// Legal input is finite, with |k^| <= 1.001, 0 <= beta <= 2 and g <= 0. Other input may give poor numbers, but never a crash.
/// The token (g = 0, beta = 0) leaves the state unchanged, which makes it the right padding.
/// 1 <= K, V <= kMaxDeltaHeadSize; Hv % Hk == 0; T = 0 is legal.
///
/// On cuda, the `staged` kernels of prefill and summarize split f32 inputs into two bf16 numbers for their products. Results then err by
/// about 5e-6 of their RMS, and by up to 6e-6 sqrt(T) where keys correlate, beta is near 2 and nothing decays. `recurrent` kernels (choose()
/// tells) compute in f32: decode and replay, prefill of up to 8 tokens a sequence, summarize with decays per channel. With f16 inputs,
/// corrections v - S k^ and states beyond 65504 overflow; bf16 and f32 inputs have the range of f32.
/// Alignment, thread-safety and ABI: weft/op.h.
#pragma once

#include <optional>

#include "weft/delta_chunk.h"
#include "weft/op.h"

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {

/// The most tokens per sequence that gated_delta_rule_decode() takes.
inline constexpr int64_t kMaxDecodeTokens = 16;
/// Checkpoints lie a multiple of so many tokens apart.
inline constexpr int64_t kCheckpointUnit = 64;

/// Decay and write strength of every token. The decay comes from exactly one of {g, alpha, a + a_log + dt_bias}, the strength from
/// exactly one of {beta, b}. The raw forms are those of DeltaGatesArgs.
struct DeltaGateInputs {
  Tensor g;                  ///< [T, Hv] or [T, Hv, K] f32: the natural log of the decay, <= 0
  Tensor alpha;              ///< [T, Hv] or [T, Hv, K] f32: the decay itself, in [0, 1]
  Tensor a;                  ///< [T, Hv] or [T, Hv, K]
  Tensor a_log;              ///< [Hv] f32
  Tensor dt_bias;            ///< [Hv] or [Hv, K] f32
  Tensor beta;               ///< [T, Hv] f32
  Tensor b;                  ///< [T, Hv]
  bool double_beta = false;  ///< with b: beta = 2 sigmoid(b)
};

/// Where recurrent states live. A pool is [slots, Hv, V, K] (StateLayout::vk) or [slots, Hv, K, V] (StateLayout::kv), f32, f16 or
/// bf16, with any slot and head stride; the matrix itself is dense.
///
/// `in` and `out` may be the same memory when the out slot of every sequence is its own in slot, or a slot that no sequence of the
/// call reads. Two sequences must not share an out slot. The out state of an empty sequence is its initial state. Without slot
/// indices, a pool needs a slot for every sequence.
struct DeltaStates {
  Tensor in;         ///< absent: every sequence starts from zeros
  Tensor out;        ///< out; absent: final states are not written (a verify step). May be `in` itself
  Tensor in_slots;   ///< [N] i32; absent: sequence n uses slot n. < 0 or out of range: the sequence is inert (o = 0, nothing else)
  Tensor out_slots;  ///< [N] i32; absent: as in_slots. < 0 or out of range: the state of that sequence is not written
  Tensor has_initial;                    ///< [N] i32, optional: 0 = start from zeros, whatever the slot holds
  StateLayout layout = StateLayout::vk;  ///< how the matrices of both pools are stored
};

/// What gated_delta_rule_replay() needs of each token.
struct DeltaRecord {
  Tensor k;      ///< [T, Hk, K] f32: the key as used, normalised
  Tensor delta;  ///< [T, Hv, V] f32: the correction e_t
  Tensor g;      ///< [T, Hv] or [T, Hv, K] f32: the natural log of the decay
};

/// Arguments of gated_delta_rule_prefill(): the rule over any number of tokens, in chunks.
struct GatedDeltaRulePrefillArgs {
  Tensor q;                    ///< [T, Hk, K], any strides over tokens and heads (a view into a packed [q|k|v] row is fine)
  Tensor k;                    ///< [T, Hk, K], dtype of q
  Tensor v;                    ///< [T, Hv, V], dtype of q
  DeltaGateInputs gates;       ///< decay and write strength
  Tensor o;                    ///< [T, Hv, V], out, f32, f16 or bf16
  std::optional<float> scale;  ///< default K^-1/2
  bool l2_norm = false;        ///< normalise q and k first
  HeadMap head_map = HeadMap::grouped;  ///< which key head a value head reads
  Sequences sequences;                  ///< how the T tokens belong to sequences
  DeltaStates states;                   ///< initial and final states
  /// [N, >= max_tokens / every, Hv, V, K] (or K, V), optional, out: the state after every, 2 every, ... tokens. The matrices are
  /// dense.
  Tensor checkpoints;
  int64_t checkpoint_every = 0;  ///< a positive multiple of kCheckpointUnit when checkpoints is present, else 0
  /// fastest may cut a long sequence of few heads into ranges of tokens (the plan says so). The bits then depend on where the call
  /// begins. invariant: prefill(a) and then prefill(b) leave the bits of prefill(a + b) where a is a multiple of 64 tokens.
  Schedule schedule = Schedule::fastest;
};
WEFT_OP(gated_delta_rule_prefill, GatedDeltaRulePrefillArgs);

/// Arguments of gated_delta_rule_decode(): the rule over 1 to 16 tokens per sequence, token by token. Every state is read once and
/// written once. The call reads the state as it is before the call, also where in and out are the same slot.
struct GatedDeltaRuleDecodeArgs {
  Tensor q;                             ///< [T, Hk, K]
  Tensor k;                             ///< [T, Hk, K], dtype of q
  Tensor v;                             ///< [T, Hv, V], dtype of q
  DeltaGateInputs gates;                ///< decay and write strength
  Tensor o;                             ///< [T, Hv, V], out
  std::optional<float> scale;           ///< default K^-1/2
  bool l2_norm = false;                 ///< normalise q and k first
  HeadMap head_map = HeadMap::grouped;  ///< which key head a value head reads
  Sequences sequences;                  ///< at most kMaxDecodeTokens tokens each
  DeltaStates states;                   ///< initial and final states
  DeltaRecord record;                   ///< optional, out: all three members or none
};
WEFT_OP(gated_delta_rule_decode, GatedDeltaRuleDecodeArgs);

/// Arguments of gated_delta_rule_replay(): applies the first accepted[n] recorded tokens of each sequence to its state. The
/// operations and their order are those of decode, so with f32 states the result is bit-equal to having decoded only those tokens.
struct GatedDeltaRuleReplayArgs {
  DeltaRecord record;                   ///< what decode recorded
  Tensor accepted;                      ///< [N] i32, clamped to 0 .. tokens of the sequence
  HeadMap head_map = HeadMap::grouped;  ///< which key head a value head reads
  Sequences sequences;                  ///< as in the recorded call
  DeltaStates states;                   ///< in and out are required
};
WEFT_OP(gated_delta_rule_replay, GatedDeltaRuleReplayArgs);

/// Arguments of gated_delta_rule_summarize(): a token range as the affine map S -> S p + q, exact in real arithmetic. Each sequence
/// of the call is one range. The matrices of maps are dense.
struct GatedDeltaRuleSummarizeArgs {
  Tensor k;                             ///< [T, Hk, K]
  Tensor v;                             ///< [T, Hv, V], dtype of k
  DeltaGateInputs gates;                ///< decay and write strength
  bool l2_norm = false;                 ///< normalise k first
  HeadMap head_map = HeadMap::grouped;  ///< which key head a value head reads
  Sequences sequences;                  ///< how the T tokens belong to ranges
  Tensor p;                             ///< [N, Hv, K, K] f32, out
  Tensor q;                             ///< [N, Hv, V, K] f32, out
};
WEFT_OP(gated_delta_rule_summarize, GatedDeltaRuleSummarizeArgs);

/// Arguments of gated_delta_rule_compose(): an earlier and a later map as one, p = p1 p2 and q = q1 p2 + q2. The outputs may not
/// overlap the inputs.
struct GatedDeltaRuleComposeArgs {
  Tensor p1;  ///< [N, Hv, K, K] f32, of the earlier range
  Tensor q1;  ///< [N, Hv, V, K] f32, of the earlier range
  Tensor p2;  ///< [N, Hv, K, K] f32, of the later range
  Tensor q2;  ///< [N, Hv, V, K] f32, of the later range
  Tensor p;   ///< [N, Hv, K, K] f32, out
  Tensor q;   ///< [N, Hv, V, K] f32, out
};
WEFT_OP(gated_delta_rule_compose, GatedDeltaRuleComposeArgs);

/// Arguments of gated_delta_rule_apply(): S_out = S_in p + q for the states of N sequences.
struct GatedDeltaRuleApplyArgs {
  Tensor p;            ///< [N, Hv, K, K] f32
  Tensor q;            ///< [N, Hv, V, K] f32
  DeltaStates states;  ///< out is required; in absent: zeros. In and out may be the same slot
};
WEFT_OP(gated_delta_rule_apply, GatedDeltaRuleApplyArgs);

}  // namespace weft
#pragma GCC visibility pop
