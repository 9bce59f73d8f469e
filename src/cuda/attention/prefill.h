// The coded prefill kernel on Hopper (attention of many query rows over coded tiles): which calls it takes, and its launch.
#pragma once

#include "common/uncompressed_tiles.h"
#include "cuda/attention/decode_coded.h"

namespace weft::cuda {

inline constexpr int kPrefillRows = 128;  // query rows of a block

// Coded tiles with grid tables of 2, 3, 4 or 8 bits on either side and D = 64 or 128; on a device and in a build that has wgmma.
bool prefill_takes(const Stream& stream, const KvCache& cache);

// Partials of equal splits of the tiles of every sequence that has at least kPromptRows query rows for a kv head.
void launch_prefill(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache,
                    const PartialsPlan& plan);

}  // namespace weft::cuda
