// Where a token of a sequence lives in a KvCache, and which tokens are live: the one reading that all backends share.
//
// Host code asks about a KvCache. Device code cannot hold one and asks about its lowered form (cuda/kv/cache_index.cuh): every function
// takes both.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/sequences.h"
#include "weft/kv_codec.h"

namespace weft {

inline int64_t blocks_of(const KvCache& cache) { return cache.k.codes.size(0); }

// A row of the cache. Token rows of all heads share it. block < 0: there is no such row, the token is inert.
struct KvLocation {
  int64_t block = -1;
  int64_t row = -1;
  WEFT_HOST_DEVICE bool exists() const { return block >= 0; }
};

// Row of a position in a ring of `capacity` rows whose first `pinned` are never overwritten. Wants 0 <= pinned < capacity.
WEFT_HOST_DEVICE inline int64_t ring_row(int64_t position, int64_t capacity, int64_t pinned) {
  return position < pinned ? position : pinned + (position - pinned) % (capacity - pinned);
}

// Tokens that a sequence can hold at once.
WEFT_EXEC_UNCHECKED template <class Cache>
WEFT_HOST_DEVICE int64_t sequence_capacity(const Cache& cache) {
  return cache.kind == CacheKind::paged ? cache.page_table.size(1) * cache.capacity() : cache.capacity();
}

// Block and row of a position of sequence n. Nowhere when the position is negative or beyond the cache, or when the slot or page is
// out of range. A ring has a row for every position >= 0, whether or not a newer token has taken it since.
WEFT_EXEC_UNCHECKED template <class Cache>
WEFT_HOST_DEVICE KvLocation locate(const Cache& cache, int64_t n, int64_t position) {
  const int64_t blocks = blocks_of(cache), capacity = cache.capacity();
  if (position < 0 || capacity <= 0) return {};
  KvLocation at;
  if (cache.kind == CacheKind::paged) {
    const int64_t page = position / capacity;
    if (page >= cache.page_table.size(1)) return {};
    const auto& table = cache.page_table;
    at.block = static_cast<const int32_t*>(table.data)[n * table.stride(0) + page * table.stride(1)];
    at.row = position % capacity;
  } else {
    if (cache.kind == CacheKind::linear && position >= capacity) return {};
    at.block = slot_of(cache.slots, n, blocks);
    at.row = cache.kind == CacheKind::ring ? ring_row(position, capacity, cache.pinned) : position;
  }
  return at.block >= 0 && at.block < blocks ? at : KvLocation{};
}

// Live tokens of a sequence to which `length` tokens have been appended. Tokens on missing pages count, though locate() finds no row for them.
WEFT_EXEC_UNCHECKED template <class Cache>
WEFT_HOST_DEVICE int64_t live_tokens(const Cache& cache, int64_t length) {
  const int64_t most = sequence_capacity(cache);
  return length < 0 ? 0 : length < most ? length : most;
}

// Position of live token j, oldest first: a ring keeps [0, pinned) and the newest capacity - pinned of the rest.
WEFT_EXEC_UNCHECKED template <class Cache>
WEFT_HOST_DEVICE int64_t live_position(const Cache& cache, int64_t length, int64_t j) {
  const bool wrapped = cache.kind == CacheKind::ring && length > cache.capacity();
  return wrapped && j >= cache.pinned ? length - cache.capacity() + j : j;
}

}  // namespace weft
