// Attention of many query rows over tiles in lanes order by Hopper's warpgroup products: which calls it takes, and its launch.
#pragma once

#include "common/uncompressed_tiles.h"
#include "cuda/attention/decode_coded.h"

namespace weft::cuda {

// Query rows of a block.
inline constexpr int kPrefillRows = 128;

// Lane tiles with grid tables of 2, 3, 4 or 8 bits on either side, D = 64 or 128, or tiles of f16 or bf16 on both, D = 256, too, on a device
// and in a build that has the instructions.
bool prefill_takes(const Stream& stream, const KvCache& cache);

// Partials of equal shares of the tiles of every sequence that has at least kPromptRows rows.
void launch_prefill(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache,
                    const PartialsPlan& plan);

}  // namespace weft::cuda
