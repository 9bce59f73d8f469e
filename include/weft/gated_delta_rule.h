// The gated delta rule whole: prefill, decode, replay of recorded tokens, and token ranges as affine maps.
//
// Per sequence and value head, with q^ = scale * q and k^ = k (both l2-normalised first when l2_norm is set, eps 1e-6):
//   D_t = e^(g_t) S_(t-1)                 decay first (per channel of K when g is [T, Hv, K])
//   e_t = beta_t (v_t - D_t k^_t)         the correction, "delta"
//   S_t = D_t + e_t k^_t^T
//   o_t = S_t q^_t                        read after the write
// Legal input: finite, |k^| <= 1.001, 0 <= beta <= 2, g <= 0. Anything else may give poor numbers, never a crash.
// The token (g = 0, beta = 0) leaves the state unchanged: the right padding. 1 <= K, V <= 256; Hv % Hk == 0; T = 0 is legal.
// Alignment, thread-safety and ABI: weft/op.h.
#pragma once

#include <optional>

#include "weft/delta_chunk.h"
#include "weft/op.h"

namespace weft {

inline constexpr int64_t kMaxDecodeTokens = 16;
inline constexpr int64_t kCheckpointUnit = 64;

// Decay and write strength of every token: decay from exactly one of {g, alpha, a + a_log + dt_bias}, strength from exactly one of
// {beta, b}. The raw forms are those of delta_gates.
struct DeltaGateInputs {
  Tensor g;                  // [T, Hv] or [T, Hv, K] f32: natural log of the decay, <= 0
  Tensor alpha;              // [T, Hv] or [T, Hv, K] f32: the decay itself, in [0, 1]
  Tensor a;                  // [T, Hv] or [T, Hv, K]
  Tensor a_log;              // [Hv] f32
  Tensor dt_bias;            // [Hv] or [Hv, K] f32
  Tensor beta;               // [T, Hv] f32
  Tensor b;                  // [T, Hv]
  bool double_beta = false;  // with b: beta = 2 sigmoid(b)
};

// Where recurrent states live. A pool is [slots, Hv, V, K] (StateLayout::vk) or [slots, Hv, K, V] (::kv), f32, f16 or bf16, any
// slot and head stride, the matrix itself dense. `in` and `out` may be the same memory when every sequence's out slot is its own in
// slot or is read by no sequence of the call; two sequences must not share an out slot.
// An empty sequence hands its initial state on; without slot indices a pool needs a slot for every sequence.
struct DeltaStates {
  Tensor in;           // absent: every sequence starts from zeros
  Tensor out;          // absent: final states are not written (a verify step)
  Tensor in_slots;     // [N] i32; absent: sequence n uses slot n. < 0 or out of range: the sequence is inert (o = 0, nothing else)
  Tensor out_slots;    // [N] i32; absent: as in_slots. < 0 or out of range: that sequence's state is not written
  Tensor has_initial;  // [N] i32, optional: 0 = start from zeros whatever the slot holds
  StateLayout layout = StateLayout::vk;
};

// What replay needs of each token, f32: the key as used (normalised), the correction e_t and the log decay.
struct DeltaRecord {
  Tensor k;      // [T, Hk, K] f32
  Tensor delta;  // [T, Hv, V] f32
  Tensor g;      // [T, Hv] or [T, Hv, K] f32
};

// The whole rule over any number of tokens, in chunks. The matrices of checkpoints are dense, as those of states are.
struct GatedDeltaRulePrefillArgs {
  Tensor q;  // [T, Hk, K], any strides over T and heads (a view into a packed [q|k|v] row is fine)
  Tensor k;  // [T, Hk, K], dtype of q
  Tensor v;  // [T, Hv, V], dtype of q
  DeltaGateInputs gates;
  Tensor o;                    // [T, Hv, V], out, f32, f16 or bf16
  std::optional<float> scale;  // default K^-1/2
  bool l2_norm = false;
  HeadMap head_map = HeadMap::grouped;
  Sequences sequences;
  DeltaStates states;
  Tensor checkpoints;  // [N, >= max_tokens / every, Hv, V, K] (or K, V), optional, out: state after every, 2 every, ... tokens
  int64_t checkpoint_every = 0;  // a positive multiple of kCheckpointUnit when checkpoints is present, else 0
  // fastest may cut a long sequence of few heads into ranges of tokens (the plan says so); the bits then depend on where the call begins.
  // invariant: prefill(a) and then prefill(b) leave the bits of prefill(a + b) where a is a multiple of 64 tokens.
  Schedule schedule = Schedule::fastest;
};
WEFT_OP(gated_delta_rule_prefill, GatedDeltaRulePrefillArgs);

// 1..16 tokens per sequence, token by token; every state is read once and written once. Reads the state as it is before the call
// even when in and out are the same slot.
struct GatedDeltaRuleDecodeArgs {
  Tensor q;  // [T, Hk, K]
  Tensor k;  // [T, Hk, K], dtype of q
  Tensor v;  // [T, Hv, V], dtype of q
  DeltaGateInputs gates;
  Tensor o;                    // [T, Hv, V], out
  std::optional<float> scale;  // default K^-1/2
  bool l2_norm = false;
  HeadMap head_map = HeadMap::grouped;
  Sequences sequences;  // max_tokens <= kMaxDecodeTokens
  DeltaStates states;
  DeltaRecord record;  // optional, out: all three members or none
};
WEFT_OP(gated_delta_rule_decode, GatedDeltaRuleDecodeArgs);

// Folds the first accepted[n] recorded tokens of each sequence onto its state, by the same operations in the same order as decode:
// with f32 states the result is bit-equal to having decoded only those tokens.
struct GatedDeltaRuleReplayArgs {
  DeltaRecord record;
  Tensor accepted;  // [N] i32, clamped to 0 .. tokens of the sequence
  HeadMap head_map = HeadMap::grouped;
  Sequences sequences;  // as in the recorded call
  DeltaStates states;   // in and out required
};
WEFT_OP(gated_delta_rule_replay, GatedDeltaRuleReplayArgs);

// A token range as the affine map S -> S p + q, exact in real arithmetic. Each sequence of the call is one range. The matrices of maps
// are dense, as those of states are.
struct GatedDeltaRuleSummarizeArgs {
  Tensor k;  // [T, Hk, K]
  Tensor v;  // [T, Hv, V]
  DeltaGateInputs gates;
  bool l2_norm = false;
  HeadMap head_map = HeadMap::grouped;
  Sequences sequences;
  Tensor p;  // [N, Hv, K, K] f32, out
  Tensor q;  // [N, Hv, V, K] f32, out
};
WEFT_OP(gated_delta_rule_summarize, GatedDeltaRuleSummarizeArgs);

// (earlier, then later) as one map: p = p1 p2, q = q1 p2 + q2. The outputs may not overlap the inputs.
struct GatedDeltaRuleComposeArgs {
  Tensor p1, q1;  // earlier: [N, Hv, K, K], [N, Hv, V, K] f32
  Tensor p2, q2;  // later
  Tensor p, q;    // out
};
WEFT_OP(gated_delta_rule_compose, GatedDeltaRuleComposeArgs);

// S_out = S_in p + q for the states of N sequences.
struct GatedDeltaRuleApplyArgs {
  Tensor p;            // [N, Hv, K, K] f32
  Tensor q;            // [N, Hv, V, K] f32
  DeltaStates states;  // out required; in absent: zeros. in and out may be the same slot
};
WEFT_OP(gated_delta_rule_apply, GatedDeltaRuleApplyArgs);

}  // namespace weft
