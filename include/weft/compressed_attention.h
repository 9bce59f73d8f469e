// Softmax attention over a compressed KV cache: scores, values, split partials, their merge, and the single call.
//
// For query row (t, hq) at position P of sequence n, with kv head hq / (Hq / Hk) and the live tokens j of the cache (positions p_j):
//   s_j = scale <q, k^_j>,  then s_j = softcap tanh(s_j / softcap) if softcap,  then -inf where the mask forbids j
//   allowed: (not causal or p_j <= P) and (no window or p_j + window > P)
//   o = sum_j e^(s_j) v^_j / (sum_j e^(s_j) + e^(sink_hq) if sinks),   lse = log of that denominator;   o = 0, lse = -inf if it is 0
// Live tokens are ordered oldest first: linear and paged j = p_j; a ring keeps [0, pinned) and the newest capacity - pinned of the rest.
// The window counts positions, for pinned tokens too. Tokens on a missing page are masked. lengths are clamped to what the cache holds;
// a sequence without slot or with length 0 has no tokens: o = 0, lse = the sink or -inf. An op with a `context` dimension covers the
// oldest `context` live tokens.
// q may come rotated (AttentionQueries::domain); `scale` is applied by the library, exactly once, in either case. Dk and Dv may differ.
// A partial is (o, m, l) over a set of tokens: m = max s_j, l = sum e^(s_j - m), o = sum e^(s_j - m) y^_j (V's rotated domain), f32;
// the empty set is (0, -inf, 0); o and l are relative to the stored, rounded m. A V mean is added by the merge, so partials never
// contain it; a K mean is in every score.
// Alignment, thread-safety and ABI: weft/op.h.
#pragma once

#include <optional>

#include "weft/kv_codec.h"
#include "weft/op.h"

namespace weft {

// Which tokens a query may see, and how scores are shaped.
struct AttentionMask {
  bool causal = true;
  std::optional<int64_t> window;  // >= 1: newest tokens a query sees, itself included
  std::optional<float> softcap;   // > 0
};

// exact_scores keeps about 15 bits of q and of the weights on integer paths, relative to the largest number of a query's row: outliers,
// which a rotation spreads, leave less to the others, and rows of nothing but numbers below 2^-110 count as 0. fast keeps 8 bits, AVX2 and
// AVX-512 without VNNI what sums of 16 bits allow of them (an error of 1 to 3 %, more where scores pass 10, and without VNNI where two
// neighbours in q outweigh all others). Float paths ignore it. On Hopper, prompts over tiles (coded, f16 or bf16) go through products of
// 16-bit floats, which carry 11 bits of q and of the weights. Over bf16, values of V in tiles that follow a tile with values 2^24 times
// as large lose some of theirs, whatever weight the large ones have.
enum class Precision { exact_scores, fast };

// The queries of a call.
struct AttentionQueries {
  Tensor q;          // [T, Hq, Dk]
  Tensor positions;  // [T] i32; absent: the queries of sequence n are its last tokens, positions lengths[n] - tokens + i
  Sequences sequences;
  KvDomain domain = KvDomain::original;  // rotated: the caller has applied K's rotation already
  std::optional<float> scale;            // default Dk^-1/2
};

// scores[t, hq, j] = s_j; -inf where masked and for j beyond the live tokens.
struct AttentionScoresArgs {
  AttentionQueries queries;
  KvCache cache;  // the K side is read; both must be there
  AttentionMask mask;
  Tensor scores;  // [T, Hq, context], f32, f16 or bf16, out
};
WEFT_OP(attention_scores, AttentionScoresArgs);

// o[t, hq] = sum over live tokens j with weights[t, hq, j] >= threshold of weights * v^_j. No renormalisation.
struct AttentionValuesArgs {
  Tensor weights;  // [T, Hq, context], f32, f16 or bf16; columns beyond the live tokens are not read
  Sequences sequences;
  KvCache cache;                         // the V side is read; both must be there
  std::optional<float> threshold;        // absent: every token counts
  KvDomain domain = KvDomain::original;  // of o; rotated leaves the V mean out
  Tensor o;                              // [T, Hq, Dv], out
};
WEFT_OP(attention_values, AttentionValuesArgs);

// blocks: o [T, Hq, B, Dv], m and l [T, Hq, B]. interleaved: one buffer of rows (B Dv + 2 B) floats, rows = T Hq, row r = t Hq + hq:
// o at 4 (r Dv/4 B + j/4 B + b) + j % 4, then from float rows Dv B on (l, m) pairs at 2 (r B + b). Readers of both treat l = 0 as
// empty; in interleaved an m at or below -FLT_MAX / 2 is empty too.
enum class PartialLayout { blocks, interleaved };

struct AttentionPartials {
  PartialLayout layout = PartialLayout::blocks;
  int64_t count = 0;  // B, the number of blocks of each row
  Tensor o, m, l;     // blocks, f32
  Tensor buffer;      // interleaved: [T * Hq * B * (Dv + 2)] f32
};

// Block b covers live tokens [b * block_tokens, (b + 1) * block_tokens). Every block of every live row is written, empty ones as identity.
struct AttentionPartialsArgs {
  AttentionQueries queries;
  KvCache cache;
  AttentionMask mask;
  int64_t block_tokens = 0;    // > 0; count * block_tokens must cover the cache's capacity
  AttentionPartials partials;  // out
};
WEFT_OP(attention_partials, AttentionPartialsArgs);

// Merges the blocks of each row, adds the sink once and the V mean, and undoes V's rotation.
struct AttentionMergeArgs {
  AttentionPartials partials;
  KvFormat v_format;                     // rotation and mean to undo
  KvDomain domain = KvDomain::original;  // of o; rotated: no undo, no mean
  Tensor sinks;                          // [Hq] f32, optional, natural-log logit, not scaled
  int64_t kv_heads = 1;                  // Hk, to find the mean of a query head
  Tensor o;                              // [T, Hq, Dv], out
  Tensor lse;                            // [T, Hq] f32, optional, out
};
WEFT_OP(attention_merge, AttentionMergeArgs);

// The whole: any number of queries over any cache; chooses its own split.
struct CompressedAttentionArgs {
  AttentionQueries queries;
  KvCache cache;
  AttentionMask mask;
  Tensor sinks;  // [Hq] f32, optional
  Precision precision = Precision::exact_scores;
  Schedule schedule = Schedule::fastest;
  Tensor counters;  // cuda, optional: [>= T * Hq] i32 zeroed once, left zeroed; saves a launch
  Tensor o;         // [T, Hq, Dv], out
  Tensor lse;       // [T, Hq] f32, optional, out
};
WEFT_OP(compressed_attention, CompressedAttentionArgs);

}  // namespace weft
