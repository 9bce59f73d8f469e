// Rules of a KvCache that the codec and attention share.
#pragma once

#include "core/check.h"
#include "weft/kv_codec.h"

namespace weft {

// What sentences call the parts of a cache: the names that tensors_of() gives them.
struct KvSideNames {
  const char *format, *codes, *gains, *mean;
};
struct KvCacheNames {
  KvSideNames k, v;
  const char *layout, *tile_order, *kind, *pinned;
};
inline constexpr KvCacheNames kCacheNames{{"cache.k.format", "cache.k.codes", "cache.k.gains", "cache.k.format.mean"},
                                          {"cache.v.format", "cache.v.codes", "cache.v.gains", "cache.v.format.mean"},
                                          "cache.layout",
                                          "cache.tile_order",
                                          "cache.kind",
                                          "cache.pinned"};

// Formats, shapes and alignment of both sides, how rows lie, and `pinned`. Binds blocks, Hk, Dk, Dv, and capacity (rows) or tiles.
void check_kv_storage(Check& check, const char* op, const KvCache& cache, const KvCacheNames& names = kCacheNames);

// How sequences find their rows: slots, page table and lengths against N, which must be bound.
enum class Lengths { optional, wanted };
void check_kv_sequences(Check& check, const KvCache& cache, Lengths lengths);

}  // namespace weft
