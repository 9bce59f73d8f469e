// How blocks of tensor-core kernels share the work: query rows, heads and parts of the tiles, or other units of tokens, that rows can see.
#pragma once

#include "cuda/attention/decode_coded.h"

namespace weft::cuda {

// A block's place in the grid: divisions of 64 bits are long pieces of code, a grid counts in 32.
struct BlockItem {
  unsigned row_tile, part, hk, n;
  __device__ BlockItem(const Divisor& row_tiles, const Divisor& parts, const Divisor& heads, unsigned item)
      : row_tile(row_tiles.take(item)), part(parts.take(item)), hk(heads.take(item)), n(item) {}
  __device__ BlockItem(const QueryParams& q, int64_t row_tiles, int64_t parts) {
    unsigned item = blockIdx.x;
    const auto tiles = static_cast<unsigned>(row_tiles), count = static_cast<unsigned>(parts), heads = static_cast<unsigned>(q.Hk);
    row_tile = item % tiles;
    part = (item /= tiles) % count;
    hk = (item /= count) % heads;
    n = item / heads;
  }
};

// The tiles of a sequence and kv head, `Tokens` each, and which of them are a block's. Pages hold whole tiles.
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
  // As they are in memory, i32: nothing waits for them before they are looked at.
  __device__ static int length_at(const QueryParams& q, unsigned n) { return i32_at(q.index.lengths, n); }
  __device__ static int slot_at(const QueryParams& q, unsigned n) {
    return q.index.kind != CacheKind::paged && q.index.slots.present() ? i32_at(q.index.slots, n) : static_cast<int>(n);
  }
  __device__ static int i32_at(const Tensor& t, unsigned n) { return static_cast<const int32_t*>(t.data)[n * t.strides[0]]; }
  // An equal share of the tiles that hold positions [first_seen, end_seen): `share(tiles)` is their number over the parts, rounded up.
  __device__ void take(const BlockItem& item, int64_t parts, int first_seen, int end_seen) {
    const auto count = static_cast<unsigned>(parts);
    take(item, first_seen, end_seen, [&](unsigned tiles) { return (tiles + count - 1) / count; });
  }
  template <class Share>
  __device__ void take(const BlockItem& item, int first_seen, int end_seen, Share&& share_of) {
    const int64_t end_token = ring || end_seen > live ? live : end_seen;
    int64_t begin = ring ? 0 : first_seen / Tokens, end = (end_token + Tokens - 1) / Tokens;
    if (slot < 0 || first_seen >= end_seen || begin > end) begin = end = 0;
    const auto tiles = static_cast<unsigned>(end - begin);
    const unsigned share = share_of(tiles), from = min(item.part * share, tiles);
    first_tile = static_cast<int>(begin + from);
    last_tile = static_cast<int>(begin + min(from + share, tiles));
  }
  __device__ int64_t block_at(const QueryParams& q, unsigned page) const {
    const Tensor& table = q.index.page_table;
    const int64_t block = static_cast<const int32_t*>(table.data)[n * table.strides[0] + page * table.strides[1]];
    return block < q.index.blocks ? block : -1;
  }
  // As locate() has it, by tile; < 0: not there.
  __device__ int64_t block_of(const QueryParams& q, int tile) const {
    return paged ? block_at(q, static_cast<unsigned>(tile) / tiles_per_page) : slot;
  }
  __device__ const uint8_t* source(const CodedSide& side, int tile, int64_t block) const {
    return side.data + block * side.block + hk * side.head + (paged ? tile % tiles_per_page : tile) * side.tile;
  }
  // The same by a divisor that the host has made. Null where the tile is not there.
  __device__ const uint8_t* find(const QueryParams& q, const Divisor& by_page, const CodedSide& side, int tile) const {
    if (!paged) return side.data + slot * side.block + hk * side.head + static_cast<unsigned>(tile) * side.tile;
    auto page = static_cast<unsigned>(tile);
    const unsigned inside = by_page.take(page);
    const int64_t block = block_at(q, page);
    return block < 0 ? nullptr : side.data + block * side.block + hk * side.head + inside * side.tile;
  }
  __device__ bool there(const QueryParams& q, const Divisor& by_page, int tile) const {
    return (paged ? block_at(q, by_page.quotient(tile)) : slot) >= 0;
  }
};
using CacheTiles = CacheUnits<static_cast<int>(kTileTokens)>;

}  // namespace weft::cuda
