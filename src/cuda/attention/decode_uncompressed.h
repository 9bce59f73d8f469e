// Uncompressed decode kernels (f16 and bf16 caches): which caches they read, and their launch.
#pragma once

#include "cuda/attention/attention_partials.cuh"

namespace weft::cuda {

// Query rows of a block, its warps, and tokens of a unit of a warp; pages hold a multiple of those tokens.
inline constexpr int kUncompressedRows = 16, kUncompressedWarps = 8, kUncompressedTokens = 16;

// K and V of the same type, f16 or bf16, in rows or tiles aligned to 16 bytes, D = 64, 128, 256, on a device with enough shared
// memory.
bool decode_uncompressed_takes(const Stream& stream, const KvCache& cache);

// Partials of equal splits of the tokens of every sequence that has at most `most_rows` query rows for a kv head.
void launch_decode_uncompressed(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache,
                                const PartialsPlan& plan, int64_t most_rows);

}  // namespace weft::cuda
