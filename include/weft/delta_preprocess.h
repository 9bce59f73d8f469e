/// The preprocessing of a gated delta layer: gates, short convolution, l2 norm, and the gated RMS norm after it.
/// @file
///
/// Floating tensors are f32, f16 or bf16, each independently, unless a comment fixes the dtype. Arithmetic is f32 (double on the
/// reference backend), with one rounding at the store. T = 0 is legal everywhere.
/// Alignment, thread-safety and ABI: weft/op.h.
#pragma once

#include <optional>

#include "weft/op.h"

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {

/// Arguments of delta_gates(): decay and write strength from raw projections.
///
///     g    = -exp(a_log) * softplus(a + dt_bias)     natural log of the decay, <= 0; softplus(x) = log1p(e^x), or x for x > 20
///     beta = sigmoid(b), doubled by double_beta      a doubled beta allows negative eigenvalues
///
/// With a decay per channel (KDA), a is [T, Hv, K], dt_bias [Hv, K] and g [T, Hv, K].
struct DeltaGatesArgs {
  Tensor a;                  ///< [T, Hv] or [T, Hv, K]
  Tensor b;                  ///< [T, Hv], or absent together with beta
  Tensor a_log;              ///< [Hv] f32
  Tensor dt_bias;            ///< [Hv] or [Hv, K] f32
  Tensor g;                  ///< [T, Hv] or [T, Hv, K] f32, out
  Tensor beta;               ///< [T, Hv] f32, out
  bool double_beta = false;  ///< beta = 2 sigmoid(b)
};
WEFT_OP(delta_gates, DeltaGatesArgs);

/// The function at the end of a convolution.
enum class Activation {
  none,  ///< the sum itself
  silu,  ///< x sigmoid(x)
};

/// Arguments of short_conv(): a causal depthwise convolution over time. For channel c of one sequence:
///
///     ext    = [history (W-1 rows) | x]
///     y[t,c] = activation(bias[c] + sum_m weight[c,m] * ext[t+m, c])      the last tap multiplies the current token
///
/// The state of a slot holds the L most recent inputs, oldest first, newest in row L-1. The history is rows offset .. offset+W-2,
/// with offset = L-(W-1) unless state_offsets says otherwise. To roll back r tokens, set offset = L-(W-1)-r; nothing is copied. The
/// call writes back the last L rows of [state rows up to the end of the history | x], with zeros where these are fewer than L.
/// x and state_in may have any strides, over channels too: a view of [channel][time] memory needs no copy. cuda refuses such a view.
/// Slots obey the rule of DeltaStates: two sequences must not share an out slot, and the out slot of a sequence must not be the in
/// slot of another.
struct ShortConvArgs {
  Tensor x;                                  ///< [T, C], any strides
  Tensor weight;                             ///< [C, W], 2 <= W <= 8
  Tensor bias;                               ///< [C], optional
  Tensor y;                                  ///< [T, C], out; may be x itself
  Activation activation = Activation::silu;  ///< the function at the end
  Sequences sequences;                       ///< how the T tokens belong to sequences
  Tensor state_in;                           ///< [slots, L, C], L >= W-1, any strides; absent: the history is zero
  Tensor state_out;                          ///< [slots, L, C], out; absent: not written. May be state_in itself
  Tensor state_in_slots;   ///< [N] i32; absent: sequence n uses slot n. < 0 or out of range: inert (y = 0, state untouched)
  Tensor state_out_slots;  ///< [N] i32; absent: as state_in_slots. < 0 or out of range: the state of that sequence is not written
  Tensor state_offsets;    ///< [N] i32, optional: the first history row, clamped to 0 .. L-(W-1)
  Tensor has_initial;      ///< [N] i32, optional: 0 = start from zeros, whatever the slot holds
};
WEFT_OP(short_conv, ShortConvArgs);

/// Arguments of l2_norm(): y = x / sqrt(sum x^2 + eps) over the last dimension.
struct L2NormArgs {
  Tensor x;           ///< [..., D], rank 1 to 5
  Tensor y;           ///< as x, out; may be x itself
  float eps = 1e-6f;  ///< >= 0
};
WEFT_OP(l2_norm, L2NormArgs);

/// The function that a gate is passed through.
enum class Gate {
  silu,     ///< z sigmoid(z)
  sigmoid,  ///< 1 / (1 + e^-z)
};

/// Arguments of gated_rms_norm(): y = weight * x / sqrt(mean x^2 + eps) * gate(z), over the last dimension. The norm comes before
/// the gate, and the weight has no offset.
struct GatedRmsNormArgs {
  Tensor x;                ///< [T, H, D]
  Tensor z;                ///< [T, H, D], what the gate is made of
  Tensor weight;           ///< [D]
  Tensor y;                ///< [T, H, D], out; may be x or z itself
  float eps = 1e-6f;       ///< >= 0
  Gate gate = Gate::silu;  ///< the function of z
};
WEFT_OP(gated_rms_norm, GatedRmsNormArgs);

}  // namespace weft
#pragma GCC visibility pop
