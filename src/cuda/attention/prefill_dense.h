// The dense prefill on Hopper (attention of many query rows over f16 keys and values): which calls it takes, its scratch, its launches.
//
// TMA loads keys and values in f16 from the cache itself, or from a copy in scratch that a kernel before it decodes: coded sides of any
// bits and layout, and bf16. Queries are rotated and rounded to f16 in scratch, too.
#pragma once

#include "common/uncompressed_tiles.h"
#include "cuda/attention/attention_partials.cuh"
#include "cuda/attention/decode_coded.h"

namespace weft::cuda {

inline constexpr int kDenseRows = 128;  // query rows of a block

// K on the int8 grid with one gain for each row, and V in any format, with heads up to 256; or tiles of f16 or bf16 on both sides. On a
// device and in a build that has wgmma and TMA.
bool prefill_dense_takes(const Stream& stream, const KvCache& cache, int64_t query_rows);

// What is decided once per call.
struct DensePlan {
  bool direct = false;                        // TMA reads the cache itself
  int D = 0, tile = 0;                        // head size of the kernel, and tokens of its tiles
  int64_t tiles = 0;                          // of a sequence, which its queries can see together
  int64_t pairs = 0;                          // pairs of a sequence and kv head in a launch: scratch holds their tiles
  bool finishes = false;                      // blocks write the output: no merge
  int64_t least_rows = 0;                     // sequences with fewer query rows for a kv head are skipped
  size_t query_bytes = 0, scratch_bytes = 0;  // scratch_bytes: of queries, keys and values
};
// `reach`: tokens of a sequence that its queries can see together; `query_rows`: of all sequences and one kv head. The caller decides
// finishes and least_rows.
DensePlan plan_prefill_dense(const KvCache& cache, int64_t sequences, int64_t reach, int64_t query_rows);

// Can a block finish its rows, if it has all of their tokens?
bool prefill_dense_can_finish(const KvCache& cache);

// Partials of equal splits of the tiles that a block of rows can see; or, if the plan finishes, the results of `merge`.
void launch_prefill_dense(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache,
                          const PartialsPlan& partials, const DensePlan& plan, const MergeParams& merge, void* scratch);

}  // namespace weft::cuda
