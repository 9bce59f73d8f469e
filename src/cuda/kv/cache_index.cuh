// Where the rows of a cache are, lowered for kernels: what the templates of common/kv_index.h read.
#pragma once

#include "common/kv_index.h"
#include "cuda/common/views.cuh"

namespace weft::cuda {

struct CacheIndex {
  CacheKind kind = CacheKind::linear;
  int64_t blocks = 0, rows = 0, pinned = 0;  // rows: of a block
  IndexView slots, lengths;
  StridedView page_table;
  WEFT_HOST_DEVICE int64_t capacity() const { return rows; }
};
WEFT_HOST_DEVICE inline int64_t blocks_of(const CacheIndex& index) { return index.blocks; }
inline CacheIndex cache_index(const KvCache& cache) {
  return {cache.kind,
          blocks_of(cache),
          cache.capacity(),
          cache.pinned,
          indices_of(cache.slots),
          indices_of(cache.lengths),
          view_of(cache.page_table)};
}

}  // namespace weft::cuda
