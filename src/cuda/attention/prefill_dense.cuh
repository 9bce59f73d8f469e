// The dense prefill kernel: parameters, shared memory, and the producer warpgroup.
//
// One thread of the producer warpgroup issues TMA loads. Its other warps repair tiles on the edge of what the rows see, see repair_tile().
#pragma once

#include "cuda/attention/prefill_dense.h"
#include "cuda/attention/prefill_dense_wgmma.cuh"
#include "cuda/attention/prefill_query.cuh"
#include "cuda/attention/work_split.cuh"

namespace weft::cuda::dense {

using prefill::power_of_two;

constexpr int kGroup = 128, kConsumers = 2 * kGroup, kThreads = kConsumers + kGroup;
constexpr int kStages = 2;
constexpr int kPageUnit = 16;  // tokens: pages hold a multiple of these

// Tokens of a tile: heads of 256 leave registers and shared memory for fewer.
__host__ __device__ constexpr int tile_tokens(int D) { return D > 128 ? 80 : 160; }

// Exponents of values in scratch: any finite gain, and any finite number less 15, is below 2^kHighestExponent.
constexpr int kLowestExponent = -60, kHighestExponent = 126;
// A power of two, or 0 where floats have none so small. e <= 127.
__device__ __forceinline__ float power_of_two_or_zero(int e) { return e < -126 ? 0.0f : power_of_two(e); }

// What scratch holds of a tile of decoded keys and values besides them.
template <int Tokens>
struct alignas(16) TileRecord {
  float gain[Tokens];  // what sums of keys are multiplied by, in gain_place() order
  int exponent;        // values are relative to 2^exponent
  int unused[3];
};
// Gains of the tokens 8 a + 2 t + e of 16 that a lane needs lie together.
__host__ __device__ constexpr int gain_place(int token) {
  return (token & ~15) + token % 8 / 2 * 4 + token / 8 % 2 * 2 + token % 2;
}

struct DenseParams {
  QueryParams queries;
  PartialsPlan plan;
  MergeParams merge;  // if `finishes`
  bool finishes = false, wide_stores = false;
  const float2* row_scales = nullptr;  // [Hk, T group]: what sums of a row are multiplied by, and what K's mean adds to its scores
  const uint8_t* records = nullptr;    // TileRecords, if keys and values are in scratch
  int first_pair = 0, pairs = 0;       // pairs n Hk + hk of this launch
  int pairs_at_once = 1;               // pairs whose keys and values share the L2
  int row_tiles = 0, scratch_tiles = 0, least_rows = 0;
  int step = 0;  // tokens that share a page, of a tile
  Divisor page_rows;
  float unit = 1, v_unit = 1;  // make sums of queries times keys scores (without the sign), and sums of values outputs
};

struct DenseMaps {
  CUtensorMap q, k, v;  // boxes of 64 elements and 128 rows, or `step` or a tile of tokens
};

// The work of a block. The tiles of rows of a group of pairs run together: they read the same keys and values. Among them the last rows
// start first, which see the most tokens.
struct DenseItem {
  unsigned pair, row_tile, split;  // pair: of this launch
  __device__ explicit DenseItem(const DenseParams& p) {
    const auto splits = static_cast<unsigned>(p.plan.splits), row_tiles = static_cast<unsigned>(p.row_tiles);
    const unsigned each = static_cast<unsigned>(p.pairs_at_once), of_group = each * row_tiles * splits,
                   group = blockIdx.x / of_group;
    unsigned rest = blockIdx.x % of_group;
    const unsigned here = min(each, static_cast<unsigned>(p.pairs) - group * each);
    split = rest % splits;
    rest /= splits;
    pair = group * each + rest % here;
    row_tile = row_tiles - 1 - rest / here;
  }
};

// The first tile of a sequence that its queries can see. Scratch begins with it.
__device__ inline int first_visible_tile(const QueryParams& q, const TokenRange& range, int64_t appended, int tokens) {
  if (q.index.kind == CacheKind::ring || q.mask.window == 0 || !q.mask.causal || q.queries.positions.present()) return 0;
  const int64_t first = appended - range.length() - q.mask.window + 1;
  return first > 0 ? static_cast<int>(first / tokens) : 0;
}

// Shared memory of a block, and what orders accesses:
// - TMA writes a stage after a wait at its `empty` mbarrier, at which every consumer warp arrives once its products have read the stage.
// - A stage is read after a wait at its `full` mbarrier, which counts the bytes of TMA. Values that are repaired count at `raw` instead,
//   and the repairing warps arrive at `full`.
// - `hides` and `record` follow keys; `position` and `bad` follow values: consumers read them before they release the stage.
template <int D>
struct DenseShared {
  static constexpr int kTile = tile_tokens(D);
  alignas(16) TileRecord<kTile> record[kStages];
  int position[kStages][kTile];  // of tiles that hide; -1: no token
  unsigned bad[kStages][8];      // bits of tokens with NaN or infinite values, of tiles that hide
  int hides[kStages];            // some row of the block does not see some token
  int bounds[4][4];
  RowTile rows;  // read again at the end of the block: it takes no registers until then
  RingPositions ring;
  alignas(8) uint64_t q_full, k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages], v_raw[kStages];
};

template <int D>
struct DenseLayout {
  static constexpr int kTile = tile_tokens(D), kPanel = kTile * 128, kTileBytes = kTile * D * 2;
  static constexpr int kQueryPanel = kDenseRows * 128;
  static constexpr int kQueries = 0, kKeys = kDenseRows * D * 2, kValues = kKeys + kStages * kTileBytes,
                       kShare = kValues + kStages * kTileBytes, kBytes = kShare + static_cast<int>(sizeof(DenseShared<D>));
  static_assert(kBytes <= 227 << 10);
};

#if WEFT_HAS_WGMMA

// A stage of a pipeline, and the parity of the round.
struct Stage {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    slot ^= 1;
    parity ^= slot == 0;
  }
};

template <int D>
struct Barriers {
  uint32_t share;
  __device__ explicit Barriers(const DenseShared<D>& at) : share(shared_address(&at)) {}
  __device__ uint32_t q_full() const { return share + static_cast<uint32_t>(offsetof(DenseShared<D>, q_full)); }
  __device__ uint32_t k_full(int i) const { return share + static_cast<uint32_t>(offsetof(DenseShared<D>, k_full)) + i * 8; }
  __device__ uint32_t k_empty(int i) const { return share + static_cast<uint32_t>(offsetof(DenseShared<D>, k_empty)) + i * 8; }
  __device__ uint32_t v_full(int i) const { return share + static_cast<uint32_t>(offsetof(DenseShared<D>, v_full)) + i * 8; }
  __device__ uint32_t v_empty(int i) const { return share + static_cast<uint32_t>(offsetof(DenseShared<D>, v_empty)) + i * 8; }
  __device__ uint32_t v_raw(int i) const { return share + static_cast<uint32_t>(offsetof(DenseShared<D>, v_raw)) + i * 8; }
  __device__ void init() const {
    mbarrier_init(q_full(), 1);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(k_full(i), 1);
      mbarrier_init(v_full(i), 1);
      mbarrier_init(v_raw(i), 1);
      mbarrier_init(k_empty(i), kConsumers / 32);
      mbarrier_init(v_empty(i), kConsumers / 32);
    }
    fence_proxy_async();
  }
};

// Tiles of a block as its producers see them.
template <int D>
struct Tiles {
  static constexpr int kTile = tile_tokens(D);
  const DenseParams& p;
  const CacheUnits<kTile>& at;
  VisibleRange all;  // positions that every row of the block sees
  unsigned pair;     // of this launch
  int first_scratch;

  // The block of a row of the sequence; < 0: the row does not exist.
  __device__ __forceinline__ int block_of(int row) const {
    if (row >= at.live) return -1;
    return static_cast<int>(at.paged ? at.block_at(p.queries, p.page_rows.quotient(static_cast<unsigned>(row))) : at.slot);
  }
  // Does some row of the block not see some token of the tile?
  __device__ __forceinline__ bool hides(int tile) const {
    const int first = tile * kTile, end = first + kTile;
    bool hidden = at.ring || first < all.first || end > all.end || end > at.live;
    if (at.paged)
      for (int row = first; row < end; row += p.step) hidden |= block_of(row) < 0;
    return hidden;
  }
  // TMA loads of keys or values of a tile.
  template <bool Coded>
  __device__ __forceinline__ void load(const CUtensorMap& map, uint32_t to, int tile, uint32_t barrier) const {
    if constexpr (Coded) {
#pragma unroll 1
      for (int panel = 0; panel < D / 64; ++panel)
        tma_load(to + panel * (kTile * 128), map, panel * 64, (tile - first_scratch) * kTile, static_cast<int>(pair), 0, barrier);
    } else {
#pragma unroll 1
      for (int row = 0; row < kTile; row += p.step) {
        const int first = tile * kTile + row, block = block_of(first);
        const int inside =
            at.paged ? first - static_cast<int>(p.page_rows.quotient(static_cast<unsigned>(first)) * p.page_rows.by) : first;
#pragma unroll 1
        for (int panel = 0; panel < D / 64; ++panel)
          tma_load(to + panel * (kTile * 128) + row * 128, map, panel * 64, inside, static_cast<int>(at.hk), block, barrier);
      }
    }
  }
};

// Loads queries and all tiles of the block; by one thread. Boxes outside the tensors are zeros and count all of their bytes.
template <int D, bool Coded>
__device__ void load_tiles(const DenseParams& p, const DenseMaps& maps, const Tiles<D>& tiles, int64_t query_row, uint8_t* shared,
                           DenseShared<D>& share) {
  using L = DenseLayout<D>;
  if (tiles.at.first_tile >= tiles.at.last_tile) return;
  const Barriers<D> barriers(share);
  const uint32_t base = shared_address(shared);
  mbarrier_arrive_expect_tx(barriers.q_full(), kDenseRows * D * 2);
#pragma unroll 1
  for (int panel = 0; panel < D / 64; ++panel)
    tma_load(base + L::kQueries + panel * L::kQueryPanel, maps.q, panel * 64, static_cast<int>(query_row),
             static_cast<int>(tiles.at.hk), 0, barriers.q_full());
  Stage stage;
#pragma unroll 1
  for (int tile = tiles.at.first_tile; tile < tiles.at.last_tile; ++tile, stage.next()) {
    const int slot = stage.slot;
    const bool hides = tiles.hides(tile);
    mbarrier_wait(barriers.k_empty(slot), stage.parity ^ 1);
    share.hides[slot] = hides;
    mbarrier_arrive_expect_tx(barriers.k_full(slot), L::kTileBytes + (Coded ? sizeof(TileRecord<L::kTile>) : 0));
    if constexpr (Coded)
      tma_load_bulk(
          shared_address(&share.record[slot]),
          p.records + (int64_t{tiles.pair} * p.scratch_tiles + (tile - tiles.first_scratch)) * sizeof(TileRecord<L::kTile>),
          sizeof(TileRecord<L::kTile>), barriers.k_full(slot));
    tiles.template load<Coded>(maps.k, base + L::kKeys + slot * L::kTileBytes, tile, barriers.k_full(slot));
    mbarrier_wait(barriers.v_empty(slot), stage.parity ^ 1);
    const uint32_t full = hides ? barriers.v_raw(slot) : barriers.v_full(slot);
    mbarrier_arrive_expect_tx(full, L::kTileBytes);
    tiles.template load<Coded>(maps.v, base + L::kValues + slot * L::kTileBytes, tile, full);
  }
}

constexpr int kRepairers = kGroup - 32;  // threads
__device__ inline void repairers_sync() { asm volatile("bar.sync 7, %0;" ::"n"(kRepairers) : "memory"); }

// Values of a tile in the cache itself: those of tokens that do not exist become zeros, since stale memory may hold NaN. So do values
// of tokens with NaN or infinity, which must not reach rows that do not see the token: `bad` names these tokens.
template <int D>
__device__ __forceinline__ void repair_values(const uint32_t values, const int (&position)[tile_tokens(D)], unsigned (&bad)[8],
                                              int thread) {
  constexpr int kTile = tile_tokens(D), kPieces = kTile * D / 8;
#pragma unroll 1
  for (int i = thread; i < kPieces; i += kRepairers) {
    const int token = i / 8 % kTile;
    const uint32_t place = values + i * 16;
    const uint4 x = load_shared(place);
    const bool finite =
        (finite_pair<__half>(x.x) & finite_pair<__half>(x.y) & finite_pair<__half>(x.z) & finite_pair<__half>(x.w)) == 3;
    const bool exists = position[token] >= 0;
    if (finite && exists) continue;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(place), "r"(0) : "memory");
    if (exists) atomicOr(bad + token / 32, 1u << token % 32);
  }
}

// Writes the positions of tiles that hide tokens, and repairs their values; by three warps.
template <int D, bool Coded>
__device__ void repair_tiles(const DenseParams& p, const Tiles<D>& tiles, uint8_t* shared, DenseShared<D>& share, int thread) {
  using L = DenseLayout<D>;
  const auto& at = tiles.at;
  const Barriers<D> barriers(share);
  const bool wrapped = at.ring && at.appended > p.queries.index.rows;
  if (wrapped && thread == 0) share.ring = RingPositions(p.queries.index, at.appended);
  repairers_sync();
  uint32_t parities = 0;
  int slot = 0;
#pragma unroll 1
  for (int tile = at.first_tile; tile < at.last_tile; ++tile, slot ^= 1) {
    if (!tiles.hides(tile)) continue;
    mbarrier_wait(barriers.v_raw(slot), parities >> slot & 1);
    parities ^= 1u << slot;
#pragma unroll 1
    for (int token = thread; token < L::kTile; token += kRepairers) {
      const int row = tile * L::kTile + token;
      share.position[slot][token] = tiles.block_of(row) < 0 ? -1 : wrapped ? share.ring.of(row) : row;
    }
    if (thread < 8) share.bad[slot][thread] = 0;
    if constexpr (!Coded) {
      repairers_sync();
      repair_values<D>(shared_address(shared) + L::kValues + slot * L::kTileBytes, share.position[slot], share.bad[slot], thread);
      fence_proxy_async();
    }
    repairers_sync();
    if (thread == 0) mbarrier_arrive(barriers.v_full(slot));
  }
}

#endif  // WEFT_HAS_WGMMA

}  // namespace weft::cuda::dense
