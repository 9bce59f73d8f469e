/// Softmax attention over a compressed KV cache: scores, values, split-KV partials, their merge, and the single call.
/// @file
///
/// For query row (t, hq) at position P of sequence n, with KV head hq / (Hq / Hk) and the live tokens j of the cache (positions
/// p_j):
///
///     s_j = scale <q, k^_j>,  then s_j = softcap tanh(s_j / softcap) if softcap,  then -inf where the mask forbids j
///     allowed: (not causal or p_j <= P) and (no window or p_j + window > P)
///     o   = sum_j e^(s_j) v^_j / (sum_j e^(s_j) + e^(sink_hq) if sinks)
///     lse = log of that denominator;   o = 0, lse = -inf if it is 0
///
/// Live tokens are ordered oldest first. Linear and paged caches have j = p_j; a ring keeps [0, pinned) and the newest capacity -
/// pinned of the rest. The window counts positions, for pinned tokens too. Tokens on a missing page are masked. Lengths are clamped
/// to what the cache holds. A sequence without a slot or with length 0 has no tokens: o = 0, and lse is the sink or -inf. An op
/// with a `context` dimension covers the oldest `context` live tokens.
///
/// q may come rotated (AttentionQueries::domain). The library applies `scale` exactly once, in either domain. Dk and Dv may differ.
///
/// A partial is (o, m, l) in f32 over a set of tokens, in the rotated domain of V:
///
///     m = max s_j,   l = sum e^(s_j - m),   o = sum e^(s_j - m) y^_j;   the empty set is (0, -inf, 0)
///
/// o and l are relative to the stored, rounded m. The merge adds the mean of V, so partials never contain it. The mean of K is in
/// every score.
/// Alignment, thread-safety and ABI: weft/op.h.
#pragma once

#include <optional>

#include "weft/kv_codec.h"
#include "weft/op.h"

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {

/// Which tokens a query may see, and how scores are shaped.
struct AttentionMask {
  bool causal = true;             ///< a query sees no token after its own position
  std::optional<int64_t> window;  ///< >= 1: the newest tokens that a query sees, itself included
  std::optional<float> softcap;   ///< > 0: scores are bounded by softcap tanh(s / softcap)
};

/// How exactly the cpu backend multiplies where it computes with integers: over a K side whose format has a grid_step.
///
/// | backend   | what it does with Precision |
/// |---|---|
/// | reference | nothing: all arithmetic is double |
/// | cpu       | integer kernels follow it; float kernels (no grid_step) ignore it |
/// | cuda      | nothing: scores are always exact in the sense of exact_scores, up to the 16-bit products below |
///
/// cuda on Hopper computes prompts over K on the int8 grid, and over tiles of f16 or bf16, with products of 16-bit floats. They carry
/// 11 bits of q and of the weights. Values of V lose some of those bits in tiles that follow a tile with values 2^24 times as large,
/// whatever weight the large values have.
enum class Precision {
  /// q and the weights are two int8 planes each: about 15 bits, relative to the largest number of a query's row. Outliers, which a
  /// rotation spreads, leave fewer bits to the other numbers. Rows of nothing but numbers below 2^-110 count as 0.
  exact_scores,
  /// q and the weights are one int8 plane each: 8 bits, and with AVX2 or AVX-512 without VNNI what sums of 16 bits allow of them.
  /// The error is 1 to 3 %, more where scores pass 10, and without VNNI more where two neighbours in q outweigh all other numbers.
  fast,
};

/// The queries of a call.
struct AttentionQueries {
  Tensor q;             ///< [T, Hq, Dk]
  Tensor positions;     ///< [T] i32; absent: the queries of sequence n are its last tokens, at positions lengths[n] - tokens + i
  Sequences sequences;  ///< how the T queries belong to sequences
  KvDomain domain = KvDomain::original;  ///< rotated: the caller has already applied the rotation of K
  std::optional<float> scale;            ///< default Dk^-1/2
};

/// Arguments of attention_scores(): scores[t, hq, j] = s_j; -inf where masked and for j beyond the live tokens.
struct AttentionScoresArgs {
  AttentionQueries queries;  ///< the queries
  KvCache cache;             ///< its K side is read; both sides must be there
  AttentionMask mask;        ///< which tokens a query may see
  Tensor scores;             ///< [T, Hq, context], f32, f16 or bf16, out
};
WEFT_OP(attention_scores, AttentionScoresArgs);

/// Arguments of attention_values(): o[t, hq] = the sum of weights[t, hq, j] v^_j over the live tokens j with a weight >= threshold.
/// The weights are not renormalised.
struct AttentionValuesArgs {
  Tensor weights;                        ///< [T, Hq, context], f32, f16 or bf16; columns beyond the live tokens are not read
  Sequences sequences;                   ///< how the T queries belong to sequences
  KvCache cache;                         ///< its V side is read; both sides must be there
  std::optional<float> threshold;        ///< absent: every token counts
  KvDomain domain = KvDomain::original;  ///< of o; rotated leaves the mean of V out
  Tensor o;                              ///< [T, Hq, Dv], out
};
WEFT_OP(attention_values, AttentionValuesArgs);

/// How partials lie in memory. Readers of both treat l = 0 as empty.
enum class PartialLayout {
  /// o [T, Hq, B, Dv], m and l [T, Hq, B].
  blocks,
  /// One buffer for rows = T Hq rows, row r = t Hq + hq, of B Dv + 2 B floats each: o at 4 (r Dv/4 B + j/4 B + b) + j % 4, then
  /// from float rows Dv B on (l, m) pairs at 2 (r B + b). An m at or below -FLT_MAX / 2 is empty too.
  interleaved,
};

/// Split-KV partials of every query row.
struct AttentionPartials {
  PartialLayout layout = PartialLayout::blocks;  ///< which of the tensors below are used
  int64_t count = 0;                             ///< B, the number of blocks of each row
  Tensor o;                                      ///< blocks: [T, Hq, B, Dv] f32
  Tensor m;                                      ///< blocks: [T, Hq, B] f32
  Tensor l;                                      ///< blocks: [T, Hq, B] f32
  Tensor buffer;                                 ///< interleaved: [T * Hq * B * (Dv + 2)] f32
};

/// Arguments of attention_partials(): block b covers the live tokens [b * block_tokens, (b + 1) * block_tokens). Every block of
/// every live row is written, empty ones as (0, -inf, 0).
struct AttentionPartialsArgs {
  AttentionQueries queries;    ///< the queries
  KvCache cache;               ///< the keys and values
  AttentionMask mask;          ///< which tokens a query may see
  int64_t block_tokens = 0;    ///< >= 1; partials.count * block_tokens must cover the capacity of the cache
  AttentionPartials partials;  ///< out
};
WEFT_OP(attention_partials, AttentionPartialsArgs);

/// Arguments of attention_merge(): merges the blocks of each row, adds the sink once and the mean of V, and rotates back.
struct AttentionMergeArgs {
  AttentionPartials partials;            ///< what is merged
  KvFormat v_format;                     ///< whose rotation is undone and whose mean is added
  KvDomain domain = KvDomain::original;  ///< of o; rotated: o stays rotated and without the mean
  Tensor sinks;                          ///< [Hq] f32, optional: a natural-log logit per head, not scaled
  int64_t kv_heads = 1;                  ///< Hk, to find the mean of a query head
  Tensor o;                              ///< [T, Hq, Dv], out
  Tensor lse;                            ///< [T, Hq] f32, optional, out
};
WEFT_OP(attention_merge, AttentionMergeArgs);

/// Arguments of compressed_attention(): any number of queries over any cache. The op chooses its own split.
struct CompressedAttentionArgs {
  AttentionQueries queries;                       ///< the queries
  KvCache cache;                                  ///< the keys and values
  AttentionMask mask;                             ///< which tokens a query may see
  Tensor sinks;                                   ///< [Hq] f32, optional: a natural-log logit per head, not scaled
  Precision precision = Precision::exact_scores;  ///< how exactly integers multiply
  Schedule schedule = Schedule::fastest;          ///< what the split may depend on
  Tensor o;                                       ///< [T, Hq, Dv], out
  Tensor lse;                                     ///< [T, Hq] f32, optional, out
};
WEFT_OP(compressed_attention, CompressedAttentionArgs);

}  // namespace weft
#pragma GCC visibility pop
