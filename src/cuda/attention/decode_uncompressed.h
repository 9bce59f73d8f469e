// Attention of few query rows over f16 or bf16 as they are, on tensor cores: which caches it takes, and its launch.
#pragma once

#include "cuda/attention/attention_partials.cuh"

namespace weft::cuda {

// Query rows of a block, its warps, and tokens of a warp's turn; pages hold a multiple of those.
inline constexpr int kUncompressedRows = 16, kUncompressedWarps = 8, kUncompressedTokens = 16;

// K and V alike, f16 or bf16, rows or tiles that lie on 16 bytes, D = 64, 128, 256, on a device with shared memory enough.
bool decode_uncompressed_takes(const Stream& stream, const KvCache& cache);

// Partials of equal shares of the tokens of every sequence that has at most `most_rows` query rows for a kv head.
void launch_decode_uncompressed(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache,
                                const PartialsPlan& plan, int64_t most_rows);

}  // namespace weft::cuda
