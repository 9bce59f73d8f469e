// Work items of the tensor-core attention kernels: query rows, a kv head, and a split of the tiles that the rows can see.
#pragma once

#include "cuda/attention/decode_coded.h"

namespace weft::cuda {

// The work item with that number. Grids count in 32 bits, and 64-bit divisions are long pieces of code.
struct BlockItem {
  unsigned row_tile, split, hk, n;
  __device__ BlockItem(unsigned row_tile, unsigned split, unsigned hk, unsigned n)
      : row_tile(row_tile), split(split), hk(hk), n(n) {}
  __device__ BlockItem(const Divisor& row_tiles, const Divisor& splits, const Divisor& heads, unsigned item)
      : row_tile(row_tiles.take(item)), split(splits.take(item)), hk(heads.take(item)), n(item) {}
  __device__ BlockItem(const QueryParams& q, int64_t row_tiles, int64_t splits) {
    unsigned item = blockIdx.x;
    const auto tiles = static_cast<unsigned>(row_tiles), count = static_cast<unsigned>(splits), heads = static_cast<unsigned>(q.Hk);
    row_tile = item % tiles;
    split = (item /= tiles) % count;
    hk = (item /= count) % heads;
    n = item / heads;
  }
};

// Visible ranges of rows: `mine` is that of a lane's row, if the lane has one. Positions that any row of the warp sees lie in
// seen_by_any(); all rows see seen_by_all().
inline constexpr VisibleRange kSeesNothing{0x7fffffff, 0};
__device__ __forceinline__ VisibleRange seen_by_any(const VisibleRange& mine, bool has_row) {
  const bool some = has_row && mine.first < mine.end;
  return {__reduce_min_sync(0xffffffffu, some ? mine.first : 0x7fffffff), __reduce_max_sync(0xffffffffu, some ? mine.end : 0)};
}
__device__ __forceinline__ VisibleRange seen_by_all(const VisibleRange& mine, bool has_row) {
  return {__reduce_max_sync(0xffffffffu, has_row ? mine.first : 0),
          __reduce_min_sync(0xffffffffu, has_row ? mine.end : 0x7fffffff)};
}

// Positions of the tokens in the rows of a sequence's cache; -1 where no live token is.
struct TokenPositions {
  bool exists, wrapped;  // exists: the page is there; wrapped: a ring that has overwritten tokens
  int64_t live;
  RingPositions ring;
  __device__ __forceinline__ int of(int row) const { return !exists || row >= live ? -1 : wrapped ? ring.of(row) : row; }
};

// The tiles of a sequence and kv head, `Tokens` each, and which of them belong to a work item. Pages hold whole tiles.
template <int Tokens>
struct CacheUnits {
  int64_t appended, live, slot;
  unsigned n, hk, tiles_per_page;
  int first_tile = 0, last_tile = 0;
  bool ring, paged;

  __device__ CacheUnits(const QueryParams& q, const BlockItem& item)
      : CacheUnits(q, item, length_at(q, item.n), slot_at(q, item.n)) {}
  // From the length and the slot as they are in memory.
  __device__ CacheUnits(const QueryParams& q, const BlockItem& item, int64_t length, int64_t own_slot) : n(item.n), hk(item.hk) {
    ring = q.index.kind == CacheKind::ring;
    paged = q.index.kind == CacheKind::paged;
    appended = ring ? length : live_tokens(q.index, length);
    live = live_tokens(q.index, appended);
    slot = paged ? 0 : own_slot >= 0 && own_slot < q.index.blocks ? own_slot : -1;
    tiles_per_page = static_cast<unsigned>(q.index.rows / Tokens);
  }
  // As they are in memory, i32. Callers load them early: no instruction waits for them before their first use.
  __device__ static int length_at(const QueryParams& q, unsigned n) { return i32_at(q.index.lengths, n); }
  __device__ static int slot_at(const QueryParams& q, unsigned n) {
    return q.index.kind != CacheKind::paged && q.index.slots.present() ? i32_at(q.index.slots, n) : static_cast<int>(n);
  }
  __device__ static int i32_at(const IndexView& t, unsigned n) { return static_cast<const int32_t*>(t.data)[n * t.stride]; }
  // Takes the item's share of the tiles that hold positions `seen`: `share_of(tiles)` is their number over the splits, rounded up.
  __device__ void take(const BlockItem& item, int64_t splits, const VisibleRange& seen) {
    const auto count = static_cast<unsigned>(splits);
    take(item, seen, [&](unsigned tiles) { return (tiles + count - 1) / count; });
  }
  template <class Share>
  __device__ void take(const BlockItem& item, const VisibleRange& seen, Share&& share_of) {
    const int64_t end_token = ring || seen.end > live ? live : seen.end;
    int64_t begin = ring ? 0 : seen.first / Tokens, end = (end_token + Tokens - 1) / Tokens;
    if (slot < 0 || seen.first >= seen.end || begin > end) begin = end = 0;
    const auto tiles = static_cast<unsigned>(end - begin);
    const unsigned share = share_of(tiles), from = min(item.split * share, tiles);
    first_tile = static_cast<int>(begin + from);
    last_tile = static_cast<int>(begin + min(from + share, tiles));
  }
  __device__ int64_t block_at(const QueryParams& q, unsigned page) const {
    const StridedView& table = q.index.page_table;
    const int64_t block = static_cast<const int32_t*>(table.data)[n * table.strides[0] + page * table.strides[1]];
    return block < q.index.blocks ? block : -1;
  }
  // The block of a tile, as locate() has it for tokens; < 0: the tile does not exist.
  __device__ int64_t block_of(const QueryParams& q, int tile) const {
    return paged ? block_at(q, static_cast<unsigned>(tile) / tiles_per_page) : slot;
  }
  __device__ const uint8_t* source(const CodedSide& side, int tile, int64_t block) const {
    return side.data + block * side.block + hk * side.head + (paged ? tile % tiles_per_page : tile) * side.tile;
  }
  // The same by a divisor that the host has made. Null where the tile does not exist.
  __device__ const uint8_t* find(const QueryParams& q, const Divisor& by_page, const CodedSide& side, int tile) const {
    if (!paged) return side.data + slot * side.block + hk * side.head + static_cast<unsigned>(tile) * side.tile;
    auto page = static_cast<unsigned>(tile);
    const unsigned inside = by_page.take(page);
    const int64_t block = block_at(q, page);
    return block < 0 ? nullptr : side.data + block * side.block + hk * side.head + inside * side.tile;
  }
  __device__ bool exists(const QueryParams& q, const Divisor& by_page, int tile) const {
    return (paged ? block_at(q, by_page.quotient(tile)) : slot) >= 0;
  }
  __device__ __forceinline__ TokenPositions positions(const QueryParams& q, bool tile_exists) const {
    return {tile_exists, ring && appended > q.index.rows, live, RingPositions(q.index, appended)};
  }
};
using CacheTiles = CacheUnits<static_cast<int>(kTileTokens)>;

}  // namespace weft::cuda
