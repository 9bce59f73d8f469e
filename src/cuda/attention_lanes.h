// Attention over tiles in lanes order on tensor cores: which caches it takes, and its launch.
#pragma once

#include "cuda/attention_parts.cuh"

namespace weft::cuda {

// The kernel for a cache and so many query rows of a sequence and kv head: how many of them a block takes, and the tiles that its warps
// work on at once. rows = 0: none reads such a cache. Lane tiles, grid tables of 2 to 4 or 8 bits, one f16 gain for each row, D = 64,
// 128, 256.
struct LanesFit {
  int rows = 0, warps = 0;
};
LanesFit lanes_fit_of(const KvCache& cache, int64_t rows);

// Partials of equal shares of the tiles of every sequence.
void launch_lanes(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache, const PartialsPlan& plan);

}  // namespace weft::cuda
