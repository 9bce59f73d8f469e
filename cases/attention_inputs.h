// Queries over a filled cache from options, and attention written out directly over decoded rows.
#pragma once

#include <vector>

#include "cases/delta_inputs.h"
#include "cases/kv_inputs.h"
#include "weft/compressed_attention.h"

namespace weft::cases {

// Options: T (queries of each sequence), N, lens, Hq, context (tokens in the cache of each sequence) or lengths=100:0:7, dtype (of q),
// positions=last|spread, q=original|rotated, scale, causal=1, window, softcap, and those of a cache.
struct AttentionSetting {
  Tokens tokens;
  std::vector<int64_t> lengths;
  int64_t Hq = 0, T = 0;
  DType dtype = DType::f32;
  KvSetting kv;
  AttentionQueries queries;
  AttentionMask mask;
  bool integer_scores = false;  // a backend may use integer dot products

  // Pairs of (query, token) that attention looks at, over all query heads: for counting work.
  double pairs() const;
  double live() const;  // tokens in all caches
};
AttentionSetting make_attention(Options& options, Memory& memory, Rng& rng);

// s_j of every (query row, live token), by the header's formulas on rows that kv_decode gives: [T][Hq][live of its sequence].
std::vector<std::vector<std::vector<double>>> direct_scores(const AttentionSetting& s, const AttentionQueries& queries);
// Decoded rows of the live tokens of sequence n, oldest first, original domain: [live, Hk, Dk or Dv] f32.
Tensor decoded(Memory& memory, const AttentionSetting& s, int64_t n, bool values);

}  // namespace weft::cases
