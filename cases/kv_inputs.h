// Compressed KV caches from options: formats, layouts, kinds, and random content.
#pragma once

#include <string>
#include <vector>

#include "cases/delta_inputs.h"
#include "cases/memory.h"
#include "cases/options.h"
#include "cases/problem.h"
#include "weft/kv_codec.h"

namespace weft::cases {

// The format of one side. Options with the prefix of the side ("k" or "v"): kbits=2..8, f16, bf16, f32, aura-3, tqhb-8, ... as
// kv_format names them; kmean=1. Options of both sides: rotation=preset|none|dense, gain=preset|rms|matched|least_squares|unbiased,
// gain_type=preset|f32|f16|bf16, gain_group=0 (preset), packing=preset|dense|byte, seed.
KvFormat make_format(Options& options, Memory& memory, Rng& rng, char side, int64_t Hk, int64_t D);

// Options: D (or Dk and Dv), Hk, recipe=4v4 (instead of kbits and vbits), cache=linear|ring|paged, layout=rows|tiles,
// order=plain|lanes, capacity (rows of a sequence or ring), page (rows of a page), pinned, slots=plain|permuted|inert,
// major=head|token, last_v (numbers of V of the newest token, or its gains, are times 2^last_v). Rows without a token hold poison: NaN gains and values.
struct KvSetting {
  int64_t N = 0, Hk = 0, Dk = 0, Dv = 0;
  double last_v = 1;  // factor of the newest token's V
  KvCache cache;
};
// An empty cache with room for `tokens` tokens of each of N sequences.
KvSetting make_cache(Options& options, Memory& memory, Rng& rng, int64_t N, int64_t tokens);
// Fills the rows of live tokens with random codes, gains and values, and sets cache.lengths. Sequence n has seen lengths[n] tokens.
void fill_cache(KvSetting& setting, Memory& memory, Rng& rng, const std::vector<int64_t>& lengths);

// The tensors of codes and gains.
std::vector<Tensor> storage_of(const KvCache& cache);

// A dense copy of a cache in layout `rows`, in `memory`.
KvCache as_rows(Memory& memory, const KvCache& cache);
// One row of a cache in layout `rows`: codes and gains, or values of a passthrough side.
struct RowContent {
  std::vector<uint8_t> codes;
  std::vector<double> gains, values;
};
RowContent row_content(const KvSide& side, int64_t block, int64_t head, int64_t row);
// y^ of a row, by the formula of weft/kv_codec.h.
std::vector<double> decoded_row(const KvFormat& format, const RowContent& row);

// Codes and gains of an encoded cache against those of `want`, or, where `want` is null, against the formulas of weft/kv_codec.h.
// Codes may differ only where a coordinate lies too near a boundary for f32 to decide.
Findings compare_encoded(const Tokens& tokens, const KvEncodeArgs& got, const KvEncodeArgs* want);

double cache_bytes(const KvCache& cache, double tokens);  // bytes of `tokens` tokens: K and V, all heads

}  // namespace weft::cases
