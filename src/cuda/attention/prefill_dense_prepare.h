// What kernels before the dense prefill kernel leave for it in scratch: f16 queries, keys and values.
#pragma once

#include "cuda/attention/prefill_dense.h"

namespace weft::cuda {

struct DensePrepared {
  uint8_t* queries = nullptr;                  // [Hk, T group, D] f16
  float2* row_scales = nullptr;                // [Hk, T group]
  uint8_t *keys = nullptr, *values = nullptr;  // [pairs, tiles tile, D] f16
  uint8_t* records = nullptr;                  // [pairs, tiles] TileRecord
};

// The steps of levels: scratch holds n + 1/2 of sides on a grid.
float key_step(const KvFormat& format);
float value_step(const KvFormat& format);

// Rotates and rounds the queries. Rows outside f16's range are relative to a power of two of their own.
void launch_prepare_queries(const char* op, const Stream& stream, const QueryParams& queries, const DensePrepared& prepared, int D);

// Decodes keys and values of `pairs` pairs of a sequence and kv head. `unit` makes sums of queries times n + 1/2 times gain scores.
void launch_prepare_cache(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache,
                          const DensePrepared& prepared, const DensePlan& plan, int first_pair, int pairs, float unit);

}  // namespace weft::cuda
