// Queries over a filled cache from options, with a direct computation of scores over decoded rows.
#pragma once

#include <vector>

#include "cases/delta_inputs.h"
#include "cases/kv_inputs.h"
#include "weft/compressed_attention.h"

namespace weft::cases {

// Options: T (queries of each sequence), N, lens, Hq, context (tokens in the cache of each sequence) or lengths=100:0:7, dtype (of
// q), positions=last|spread, q=original|rotated, scale, causal=1, window, softcap, and those of a cache.
struct AttentionSetting {
  Tokens tokens;
  std::vector<int64_t> lengths;
  int64_t Hq = 0, T = 0;
  DType dtype = DType::f32;
  KvSetting kv;
  AttentionQueries queries;
  AttentionMask mask;
  bool integer_scores = false;  // a backend may use integer dot products

  // (query, token) pairs under the mask, over all query heads: what FLOPs are counted from.
  double pairs() const;
  double live() const;  // live tokens of all sequences
};
AttentionSetting make_attention(Options& options, Memory& memory, Rng& rng);

// Scores s_j by the formulas of weft/compressed_attention.h, over rows that kv_decode gives: [T][Hq][live tokens of the sequence].
std::vector<std::vector<std::vector<double>>> direct_scores(const AttentionSetting& s, const AttentionQueries& queries);
// Decoded rows of the live tokens of sequence n, oldest first, original domain: [live, Hk, Dk or Dv] f32.
Tensor decoded(Memory& memory, const AttentionSetting& s, int64_t n, bool values);

}  // namespace weft::cases
