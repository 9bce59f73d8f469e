// Attention over tiles in lanes order on tensor cores: which caches it takes, and its launch.
#pragma once

#include "cuda/attention_parts.cuh"

namespace weft::cuda {

// Does the tensor-core kernel read such a cache? Lane tiles, grid tables of 2, 4 or 8 bits, one f16 gain for each row, D = 64, 128, 256.
bool lanes_kernel_fits(const KvCache& cache);

// Tiles that the warps of a block work on at once: what splitting a sequence into parts costs.
int lanes_kernel_warps(const KvCache& cache);

// Partials of equal shares of the tiles of every sequence.
void launch_lanes(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache, const PartialsPlan& plan);

}  // namespace weft::cuda
