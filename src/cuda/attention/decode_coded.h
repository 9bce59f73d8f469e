// Coded-tile decode kernels: which caches they read, and their launch.
#pragma once

#include "cuda/attention/attention_partials.cuh"

namespace weft::cuda {

// Where the tiles of a side lie, or its rows where the cache has no tiles.
struct SideAddresses {
  const uint8_t* data = nullptr;
  int64_t block = 0, head = 0, tile = 0;  // strides in bytes
};
inline SideAddresses side_addresses(const KvSide& side) {
  const Tensor& codes = side.codes;
  const int64_t bytes = dtype_bytes(codes.dtype);
  return {static_cast<const uint8_t*>(codes.data), codes.stride(0) * bytes, codes.stride(1) * bytes, codes.stride(2) * bytes};
}

// A side whose levels lie on the int8 grid, as kernels for coded tiles read it.
struct CodedSide : SideAddresses {
  uint32_t table[4] = {};    // K: n as int8; V: n + 128
  uint16_t halves[16] = {};  // V, at most 4 bits: n + 1/2 as f16
  float step = 1;            // of levels, in the gain's units
};

// Can kernels for coded tiles read the cache? They want tiles in lanes order, grid tables, one f16 gain for each row, and K rotated
// by signs and Hadamard if at all.
bool coded_tile_cache(const KvCache& cache);
// The table holds n + bias for level (n + 1/2) step.
CodedSide coded_side(const KvSide& side, int bias);

// The kernel for a cache and that many query rows of a sequence and kv head. rows = 0: no kernel reads the cache. There are kernels
// for grid tables of 2 to 4 or 8 bits and D = 64, 128, 256.
struct CodedFit {
  int rows = 0, warps = 0, max_items = 1;  // query rows of a work item, warps of a block, most items of a block
};
CodedFit coded_fit(const Stream& stream, const KvCache& cache, int64_t rows);

// How many clusters of `blocks` blocks of that kernel the device holds at once; 0 where there are no clusters.
int coded_cluster_room(const Stream& stream, const KvCache& cache, int64_t rows, int blocks);

// Who merges the splits of a row into its output: the merge kernel, launched afterwards; the block itself, where a row has one split;
// or the cluster, which has one block per split.
enum class CodedFinish { merge_kernel, block, cluster };

struct CodedLaunch {
  int64_t choose_rows = 0;  // the kernel is chosen for this many query rows
  int64_t most_rows = 0;    // sequences with more query rows are skipped
  int items_per_block = 1;
  CodedFinish finish = CodedFinish::merge_kernel;
};

// Computes equal splits of the tiles of every sequence that has at most `most_rows` query rows for a kv head: their partials, or,
// as `how.finish` says, the result of `merge`.
void launch_decode_coded(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache,
                         const PartialsPlan& plan, const CodedLaunch& how, const MergeParams& merge);

}  // namespace weft::cuda
