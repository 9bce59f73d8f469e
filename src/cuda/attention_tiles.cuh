// How blocks of tensor-core kernels share the work: query rows, heads and parts of the tiles, or other units of tokens, that rows can see.
#pragma once

#include "cuda/attention_lanes.h"

namespace weft::cuda {

// A block's place in the grid: divisions of 64 bits are long pieces of code, a grid counts in 32.
struct BlockItem {
  unsigned row_tile, part, hk, n;
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

  __device__ CacheUnits(const QueryParams& q, const BlockItem& item) : n(item.n), hk(item.hk) {
    ring = q.index.kind == CacheKind::ring;
    paged = q.index.kind == CacheKind::paged;
    appended = appended_tokens(q.index, n);
    live = live_tokens(q.index, appended);
    slot = paged ? 0 : slot_of(q.index.slots, n, q.index.blocks);
    tiles_per_page = static_cast<unsigned>(q.index.rows / Tokens);
  }
  // An equal share of the tiles that hold positions [first_seen, end_seen).
  __device__ void take(const BlockItem& item, int64_t parts, int first_seen, int end_seen) {
    const int64_t end_token = ring || end_seen > live ? live : end_seen;
    int64_t begin = ring ? 0 : first_seen / Tokens, end = (end_token + Tokens - 1) / Tokens;
    if (slot < 0 || first_seen >= end_seen || begin > end) begin = end = 0;
    const auto tiles = static_cast<unsigned>(end - begin), count = static_cast<unsigned>(parts);
    const unsigned share = (tiles + count - 1) / count, from = min(item.part * share, tiles);
    first_tile = static_cast<int>(begin + from);
    last_tile = static_cast<int>(begin + min(from + share, tiles));
  }
  // As locate() has it, by tile; < 0: not there.
  __device__ int64_t block_of(const QueryParams& q, int tile) const {
    if (!paged) return slot;
    const Tensor& table = q.index.page_table;
    const int64_t block = static_cast<const int32_t*>(table.data)[n * table.strides[0] + tile / tiles_per_page * table.strides[1]];
    return block < q.index.blocks ? block : -1;
  }
  __device__ const uint8_t* source(const LanesSide& side, int tile, int64_t block) const {
    return side.data + block * side.block + hk * side.head + (paged ? tile % tiles_per_page : tile) * side.tile;
  }
};
using CacheTiles = CacheUnits<static_cast<int>(kTileTokens)>;

}  // namespace weft::cuda
