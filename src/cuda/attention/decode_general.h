// The general decode kernel, on tensor cores for nearly every cache: which caches it reads, and its launch.
#pragma once

#include "cuda/attention/attention_partials.cuh"

namespace weft::cuda {

// Warps of a block, and tokens of a unit of a warp; pages hold a multiple of those tokens.
inline constexpr int kGeneralWarps = 8, kGeneralTokens = 16;

// The kernel for a cache and that many query rows of a sequence and kv head. rows = 0: the kernel does not read the cache.
// It reads both layouts, both tile orders, and any format whose gains cover a row, or half a row that is a multiple of 64; rows
// and strides must be multiples of 4 bytes.
struct GeneralFit {
  int rows = 0;                                // query rows of a block
  int blocks = 1;                              // that a multiprocessor holds
  int kernel = 0, piece_bytes = 0, slots = 0;  // which kernel, and how it divides shared memory
};
GeneralFit general_fit(const Stream& stream, const KvCache& cache, int64_t rows);

// Partials of equal splits of the tokens of every sequence that has at most `most_rows` query rows for a kv head. `fit`: of the cache, with
// rows.
void launch_decode_general(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache,
                           const PartialsPlan& plan, const GeneralFit& fit, int64_t most_rows);

}  // namespace weft::cuda
