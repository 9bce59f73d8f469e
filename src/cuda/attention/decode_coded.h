// Attention over tiles in lanes order on tensor cores: which caches it takes, and its launch.
#pragma once

#include "cuda/attention/attention_partials.cuh"

namespace weft::cuda {

// Where the tiles of a side lie, or its rows instead of tiles.
struct SideAddresses {
  const uint8_t* data = nullptr;
  int64_t block = 0, head = 0, tile = 0;  // strides in bytes
};
inline SideAddresses side_addresses(const KvSide& side) {
  const Tensor& codes = side.codes;
  const int64_t bytes = dtype_bytes(codes.dtype);
  return {static_cast<const uint8_t*>(codes.data), codes.stride(0) * bytes, codes.stride(1) * bytes, codes.stride(2) * bytes};
}

// A side whose levels lie on the int8 grid, as kernels for tiles in lanes order see it.
struct CodedSide : SideAddresses {
  uint32_t table[4] = {};    // K: n as int8; V: n + 128
  uint16_t halves[16] = {};  // V: n + 1/2 as f16, of at most 4 bits
  float step = 1;            // of levels, with the gain's units
};

// Can such kernels read the cache: lane tiles, grid tables, one f16 gain for each row, K rotated by signs and Hadamard if at all?
bool coded_tile_cache(const KvCache& cache);
// n + bias is what the table gets of level (n + 1/2) step.
CodedSide coded_side(const KvSide& side, int bias);

// The kernel for a cache and so many query rows of a sequence and kv head: how many of them a team of its warps takes, the tiles that its
// warps work on at once, and the teams that they can be divided into. rows = 0: none reads such a cache. Lane tiles, grid tables of 2 to 4 or 8 bits, one f16 gain for each row, D = 64, 128, 256.
struct CodedFit {
  int rows = 0, warps = 0, max_items = 1;
};
CodedFit coded_fit(const Stream& stream, const KvCache& cache, int64_t rows);

// Clusters of so many blocks of that kernel that the device has room for at once; 0 where there are no clusters.
int coded_cluster_room(const Stream& stream, const KvCache& cache, int64_t rows, int blocks);

// Who turns partials into output: a kernel of its own, later; the block, where a row has but one; the cluster, whose blocks are its parts.
enum class CodedFinish { merge_kernel, block, cluster };

struct CodedLaunch {
  int64_t choose_rows = 0, most_rows = 0;  // the kernel is that for choose_rows; sequences with more than most_rows are left alone
  int items_per_block = 1;                 // of a block
  CodedFinish finish = CodedFinish::merge_kernel;
};

// Partials of equal shares of the tiles of every sequence that has at most `most_rows` query rows for a kv head, or `merge` done, too.
void launch_decode_coded(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache,
                         const PartialsPlan& plan, const CodedLaunch& how, const MergeParams& merge);

}  // namespace weft::cuda
