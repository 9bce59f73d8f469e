// The small ops round a gated delta rule: gates, short convolution, l2 norm, gated RMS norm.
//
// Floating tensors are f32, f16 or bf16, each independently, unless a comment fixes the dtype. Arithmetic is f32 (double on the
// reference), with one rounding at the store. T = 0 is legal everywhere.
// Alignment, thread-safety and ABI: weft/op.h.
#pragma once

#include <optional>

#include "weft/op.h"

namespace weft {

// g = -exp(A_log) * softplus(a + dt_bias)   natural-log decay, <= 0;  softplus(x) = log1p(e^x), or x for x > 20
// beta = sigmoid(b), doubled when double_beta (negative eigenvalues allowed)
// With a per-channel decay (KDA) a is [T, Hv, K], dt_bias [Hv, K] and g [T, Hv, K].
struct DeltaGatesArgs {
  Tensor a;        // [T, Hv] or [T, Hv, K]
  Tensor b;        // [T, Hv], or absent together with beta
  Tensor a_log;    // [Hv] f32
  Tensor dt_bias;  // [Hv] or [Hv, K] f32
  Tensor g;        // [T, Hv] or [T, Hv, K] f32, out
  Tensor beta;     // [T, Hv] f32, out
  bool double_beta = false;
};
WEFT_OP(delta_gates, DeltaGatesArgs);

enum class Activation { none, silu };

// Causal depthwise convolution over time, one channel c of one sequence:
//   ext = [history (W-1 rows) | x],  y[t,c] = act(bias[c] + sum_m weight[c,m] * ext[t+m, c])      (last tap: the current token)
// The state of a slot holds the L most recent inputs, oldest first, newest in row L-1. History is rows offset .. offset+W-2,
// offset = L-(W-1) unless state_offsets says otherwise: rolling back r tokens is offset = L-(W-1)-r, with no copy. Written back are
// the last L rows of [state rows before and including the history | x], zeros where that is shorter than L.
// Slots obey the rule of DeltaStates: two sequences must not share an out slot, and no sequence's out slot is another one's in slot.
struct ShortConvArgs {
  Tensor x;       // [T, C], any row stride
  Tensor weight;  // [C, W], 2 <= W <= 8
  Tensor bias;    // [C], optional
  Tensor y;       // [T, C] out; may be x itself (in place)
  Activation activation = Activation::silu;
  Sequences sequences;
  Tensor state_in;         // [slots, L, C], L >= W-1; absent: history is zero
  Tensor state_out;        // [slots, L, C]; absent: not written. May be state_in itself
  Tensor state_in_slots;   // [N] i32; absent: sequence n uses slot n. < 0 or out of range: inert (y = 0, state untouched)
  Tensor state_out_slots;  // [N] i32; absent: as state_in_slots. < 0 or out of range: that sequence's state is not written
  Tensor state_offsets;    // [N] i32, optional: first history row, clamped to 0 .. L-(W-1)
  Tensor has_initial;      // [N] i32, optional: 0 = start from zeros whatever the slot holds
};
WEFT_OP(short_conv, ShortConvArgs);

// y = x / sqrt(sum x^2 + eps) over the last dimension.
struct L2NormArgs {
  Tensor x;  // [..., D], rank 1..5
  Tensor y;  // as x; may be x itself
  float eps = 1e-6f;
};
WEFT_OP(l2_norm, L2NormArgs);

enum class Gate { silu, sigmoid };

// y = weight * x / sqrt(mean x^2 + eps) * act(z), over the last dimension; norm before gate, weight without offset.
struct GatedRmsNormArgs {
  Tensor x;       // [T, H, D]
  Tensor z;       // [T, H, D]
  Tensor weight;  // [D]
  Tensor y;       // [T, H, D]; may be x or z itself
  float eps = 1e-6f;
  Gate gate = Gate::silu;
};
WEFT_OP(gated_rms_norm, GatedRmsNormArgs);

}  // namespace weft
