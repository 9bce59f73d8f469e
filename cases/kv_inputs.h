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

// A side by name. Options (with prefix "k" or "v"): kbits=2..8, f16, bf16, f32, aura-3, tqhb-8, ... as kv_format names them;
// kmean=1; and for both sides at once rotation=preset|none|dense, gain=preset|rms|matched|least_squares|unbiased,
// gain_type=preset|f32|f16|bf16, gain_group=0 (preset), packing=preset|dense|byte, seed.
KvFormat make_format(Options& options, Memory& memory, Rng& rng, char side, int64_t Hk, int64_t D);

// Options: D (or Dk and Dv), Hk, recipe=4v4 (instead of kbits and vbits), cache=linear|ring|paged, layout=rows|tiles,
// order=plain|lanes, capacity (rows of a sequence or ring), page (rows of a page), pinned, slots=plain|permuted|inert,
// major=head|token. Rows without a token hold poison: NaN gains and values.
struct KvSetting {
  int64_t N = 0, Hk = 0, Dk = 0, Dv = 0;
  KvCache cache;
};
// A cache that `tokens` tokens of each of N sequences fit in, empty.
KvSetting make_cache(Options& options, Memory& memory, Rng& rng, int64_t N, int64_t tokens);
// Random codes, gains and values in the rows of the live tokens of sequences that have seen lengths[n] tokens; sets cache.lengths.
void fill_cache(KvSetting& setting, Memory& memory, Rng& rng, const std::vector<int64_t>& lengths);

// Tensors of a cache that hold tokens.
std::vector<Tensor> storage_of(const KvCache& cache);

// A dense rows copy of a cache, in `memory`.
KvCache as_rows(Memory& memory, const KvCache& cache);
// Codes of a row (or, of a passthrough side, nothing) and its gains as numbers, from a cache in rows.
struct RowContent {
  std::vector<uint8_t> codes;
  std::vector<double> gains, values;
};
RowContent row_content(const KvSide& side, int64_t block, int64_t head, int64_t row);
// y^ by the header's formula, from such a row.
std::vector<double> decoded_row(const KvFormat& format, const RowContent& row);

// An encoded cache against another (codes and gains), or, without it, against the formulas of the header. Codes may differ only where
// a coordinate is too near a boundary for f32 to tell.
Findings compare_encoded(const Tokens& tokens, const KvEncodeArgs& got, const KvEncodeArgs* want);

double cache_bytes(const KvCache& cache, double tokens);  // of so many tokens, K and V, all heads

}  // namespace weft::cases
