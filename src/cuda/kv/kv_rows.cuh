// Which rows of a cache a call encodes or decodes: its tokens, their positions and where the cache stores them.
#pragma once

#include "cuda/kv/kv_side.cuh"

namespace weft::cuda {

// The KvIndex of a cache lowered for kernels: what the templates of common/kv_index.h read.
struct CacheIndex {
  CacheKind kind = CacheKind::linear;
  int64_t blocks = 0, rows = 0, pinned = 0;  // rows: of a block
  IndexView slots;
  StridedView page_table;
  WEFT_HOST_DEVICE int64_t capacity() const { return rows; }
};
WEFT_HOST_DEVICE inline int64_t blocks_of(const CacheIndex& index) { return index.blocks; }
inline CacheIndex cache_index(const KvCache& cache) {
  return {cache.kind, blocks_of(cache), cache.capacity(), cache.pinned, indices_of(cache.slots), view_of(cache.page_table)};
}

struct TokenRows {
  IndexView positions;
  SequencesView sequences;
  CacheIndex index;
  int64_t T = 0, longest = 0;  // longest: max_tokens()
};

template <class Args>
TokenRows token_rows(const Args& args) {
  const int64_t T = args.positions.size(0);
  return {indices_of(args.positions), view_of(args.sequences), cache_index(args.cache), T, max_tokens(args.sequences, T)};
}

}  // namespace weft::cuda
