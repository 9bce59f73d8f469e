// The producer warpgroups of the prefill kernel for coded tiles: they decode keys and values to f16 in shared memory.
//
// Bytes of two codes are looked up as pairs of f16 in a table in shared memory. Every lane has a copy of the table in banks of its
// own. Entries are 256 bytes apart and the table lies at a multiple of 64 KiB, so that a byte and a lane make an address without
// arithmetic. The entries of values follow those of keys. A lane of the warpgroup for keys has one token, a lane of that for values
// one coordinate, so that words are read and pieces are written without bank conflicts.
#pragma once

#include <cstddef>

#include "cuda/attention/coded_tile.cuh"
#include "cuda/attention/prefill_query.cuh"
#include "cuda/attention/work_split.cuh"
#include "cuda/common/wgmma.cuh"

namespace weft::cuda::prefill {

constexpr int kTile = static_cast<int>(kTileTokens), kGroup = 128;  // kGroup: threads of a warpgroup
// Pipeline stages of either side, at most, and tiles whose TileInfo is kept.
constexpr int kMostStages = 3, kInfoSlots = 4;
constexpr int kTableBytes = 256 * 256, kGainBytes = 2 * kTile;

// Where code i ends up when words of codes of `bits` bits are looked up field by field.
__device__ inline int packed_place(int bits, int i) {
  if (bits >= 8) return i;
  if (bits == 4) return (i & ~7) + i % 4 * 2 + i / 4 % 2;
  const int field = i / 4 % 4;
  return (i & ~15) + field % 2 * 8 + i % 4 * 2 + field / 2;
}

__device__ inline __half2 as_half2(uint32_t x) { return *reinterpret_cast<const __half2*>(&x); }
__device__ inline uint32_t as_bits(__half2 x) { return *reinterpret_cast<const uint32_t*>(&x); }
__device__ inline uint32_t times(uint32_t x, uint32_t gains) { return as_bits(__hmul2(as_half2(x), as_half2(gains))); }

struct PrefillParams {
  QueryParams queries;
  CodedSide k, v;
  PartialsPlan plan;
  int64_t row_tiles = 0;
  int k_bits = 4, v_bits = 4;
  int k_bytes = 0, v_bytes = 0;  // of a tile
  float unit = 1;                // the factor that makes a sum of queries times levels a score, without its sign: see score_unit()
};

// Shared memory: the stages of decoded keys, then the table at its multiple of 64 KiB, then the stages of decoded values, where
// queries lie before the first values.
template <int D>
struct Layout {
  static constexpr int kTileBytes = kTile * D * 2, kStages = kMostStages;
  static constexpr int kQueryRow = D * 2 + 16;                   // bytes: ldmatrix reads 8 rows from different banks
  static constexpr int kTableAt = 1 << 16, kReserved = 1 << 10;  // addresses; the first kReserved bytes are not the block's
  uint8_t *keys, *table, *values, *queries;
  __device__ Layout(const PrefillParams& p, uint8_t* shared) {
    keys = shared;
    table = shared + (kTableAt - (shared_address(shared) & 0xffffu));
    values = table + table_bytes(p);
    queries = values;
  }
  __host__ __device__ static int table_bytes(const PrefillParams& p) { return p.k_bits <= 4 || p.v_bits <= 4 ? kTableBytes : 0; }
  static int shared(const PrefillParams& p) { return kTableAt - kReserved + table_bytes(p) + kStages * kTileBytes; }
};

// Where the TileInfo of a tile is.
__device__ inline uint32_t info_slot(int tile) { return static_cast<uint32_t>(tile) % kInfoSlots; }

// What consumers read of a tile besides decoded keys and values.
struct alignas(16) TileInfo {
  int position[kTile];        // of the token in each row of keys; -1: no token
  float gain[4][20];          // what sums are multiplied by; those of lane t lie together, in banks of their own
  alignas(8) int v_exponent;  // of the largest gain of values
  int hides;                  // some row of the block does not see some token
  __device__ static int gain_place(int row) { return row % 8 / 2 * 20 + row / 8 * 2 + row % 2; }
};

// Positions that every row of the block sees.
struct VisibleToAll {
  int first, end;
  __device__ bool holds(int tile) const { return tile * kTile >= first && (tile + 1) * kTile <= end; }
};

// Static shared memory of a block, and what orders accesses:
// - A stage is written after a wait at its `empty` mbarrier, at which every consumer warp arrives once its products have read the
//   stage.
// - A stage is read after a wait at its `full` mbarrier, at which every writing thread arrives after its writes and a proxy fence,
//   which makes the writes visible to wgmma.
// - TileInfo follows keys: consumers read it before they release the stage; producers write it again four tiles later.
// - Queries use the stages of values before the first arrival at their `empty` mbarriers.
// - Gains of values belong to one warp; ring positions belong to the warpgroup for keys.
// (compute-sanitizer's racecheck follows neither these mbarriers nor the reads of wgmma: what it reports here are pairs that the
// mbarriers order.)
struct SharedState {
  TileInfo info[kInfoSlots];
  __align__(16) uint16_t v_gains[kGroup / 32][kTile];  // a copy for each warp, in the order of rows of keys
  uint64_t k_full[kMostStages], k_empty[kMostStages], v_full[kMostStages], v_empty[kMostStages];
  RingPositions ring_positions;
};

#if WEFT_HAS_WGMMA

__device__ inline StageBarriers keys_barriers(uint32_t share) {
  return {share + static_cast<uint32_t>(offsetof(SharedState, k_full)),
          share + static_cast<uint32_t>(offsetof(SharedState, k_empty))};
}
__device__ inline StageBarriers values_barriers(uint32_t share) {
  return {share + static_cast<uint32_t>(offsetof(SharedState, v_full)),
          share + static_cast<uint32_t>(offsetof(SharedState, v_empty))};
}

// A number that is the same in all lanes, kept in a register. Without the shuffle the compiler computes addresses and thread
// numbers again and again.
__device__ inline uint32_t uniform(uint32_t x) { return __shfl_sync(0xffffffffu, x, 0); }

__device__ inline void store_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// A stage of a pipeline of `Count` stages, and the parity of the round.
template <int Count>
struct PipelineStage {
  int slot = 0;
  uint32_t parity = 0;
  __device__ void next() {
    if (++slot == Count) slot = 0, parity ^= 1;
  }
};

// Looks up eight codes, the nibbles of `word`; `place` is the address of the lane's first entry.
__device__ inline void look_up_pairs(uint32_t (&x)[4], uint32_t word, uint32_t place) {
#pragma unroll
  for (int i = 0; i < 4; ++i) asm("ld.shared.u32 %0, [%1];" : "=r"(x[i]) : "r"(permute(word, place, 0x7604u + 16 * i)));
}
__device__ inline uint4 times(const uint32_t (&x)[4], const uint4& gains) {
  return {times(x[0], gains.x), times(x[1], gains.y), times(x[2], gains.z), times(x[3], gains.w)};
}
struct NoGains {};
__device__ inline uint4 times(const uint32_t (&x)[4], const NoGains&) { return {x[0], x[1], x[2], x[3]}; }

// Eight codes of 8 bits: bytes n + 128 to f16 n + 1/2.
__device__ inline void widen_bytes(uint32_t (&x)[4], uint32_t low, uint32_t high) {
  const __half2 half = __half2half2(__ushort_as_half(0x3800));
  widen(low, x[0], x[1]);
  widen(high, x[2], x[3]);
#pragma unroll
  for (uint32_t& y : x) y = as_bits(__hadd2(as_half2(y), half));
}

// The codes of one row as they are in memory: `Count` pieces of eight codes, from piece `first` on. Words are `Spread` words apart;
// codes of 3 bits have a narrow plane after them. Pieces are loaded one at a time, each for the next tile as soon as it is used for
// this one.
template <int Bits, int Spread, int Count>
struct RawRow {
  static constexpr int kWords = Bits == 8 ? 2 * Count : Bits == 4 ? Count : Count / 2;
  uint32_t word[kWords], narrow[Bits == 3 ? kWords : 1];
  __device__ void load(const uint32_t* words, int D, int first, int i) {
    if constexpr (Bits == 8) {
      word[2 * i] = words[(2 * first + 2 * i) * Spread];
      word[2 * i + 1] = words[(2 * first + 2 * i + 1) * Spread];
    } else if constexpr (Bits == 4) {
      word[i] = words[(first + i) * Spread];
    } else if (i % 2 == 1) {
      word[i / 2] = words[(first + i) / 2 * Spread];
      if constexpr (Bits == 3) narrow[i / 2] = words[kTile * D * 2 / 32 + (first + i) / 4 * Spread];
    }
  }
  __device__ void load(const uint32_t* words, int D, int first) {
#pragma unroll
    for (int i = 0; i < Count; ++i) load(words, D, first, i);
  }
};

// Decodes that row to f16, times `gains(piece)`, into row `row` of the tile at `to`. `next`: the same row of the next tile, or
// null.
template <int Bits, int Spread, int Count, class Gains>
__device__ void decode_row(RawRow<Bits, Spread, Count>& raw, const uint32_t* next, int D, uint32_t place, int first, uint32_t to,
                           int row, Gains&& gains) {
  // `first` is a multiple of Count, which is 4 or 8: the index of a piece uses bits that are 0 in `first`.
  const uint32_t start = to + first / 8 * (kTile * 128) + row * 128 + (((first ^ row) & 7) << 4);
  const auto put = [&](int i, const uint4& x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(start ^ (i << 4)), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
  };
  const auto look_up = [&](uint32_t(&x)[4], int i) {
    if constexpr (Bits == 8) {
      widen_bytes(x, raw.word[2 * i], raw.word[2 * i + 1]);
    } else if constexpr (Bits == 4) {
      look_up_pairs(x, raw.word[i], place);
    } else {
      const uint32_t word = raw.word[i / 2], more = Bits == 3 ? raw.narrow[Bits == 3 ? i / 2 : 0] >> (i / 2 % 2 * 4) : 0;
      look_up_pairs(x, i % 2 ? nibbles<Bits, 1>(word, more) : nibbles<Bits, 0>(word, more), place);
    }
    if (next) raw.load(next, D, first, i);
  };
  // Software pipeline: a piece is looked up, and its gains are loaded, while pieces before it are multiplied and stored.
  constexpr int kAhead = 3;
  uint32_t x[kAhead][4];
  decltype(gains(0)) gain[2];
#pragma unroll
  for (int i = 0; i < Count + kAhead - 1; ++i) {
    if (i > 0 && i <= Count) gain[(i - 1) % 2] = gains(first + i - 1);
    if (i < Count) look_up(x[i % kAhead], i);
    if (const int done = i - (kAhead - 1); done >= 0) put(done, times(x[done % kAhead], gain[done % 2]));
  }
}

// Gains of tokens 2 lane and 2 lane + 1 of a tile, as two f16 in one register, and the largest of the tile.
struct GainPairs {
  uint32_t pair, top;  // top: largest bits of a magnitude, over the whole tile
  __device__ explicit GainPairs(uint32_t bits) : pair(bits) {
    top = __reduce_max_sync(0xffffffffu, max(bits & 0x7fffu, bits >> 16 & 0x7fffu));
  }
  __device__ bool finite() const { return top < 0x7c00u; }
  // Smallest e with gains <= 2^e, but at least -14, the exponent of the smallest normal number.
  __device__ int exponent() const { return max(static_cast<int>(top + 0x3ffu >> 10) - 15, -14); }
  // 2^-e, twice.
  __device__ static uint32_t inverse(int e) {
    const uint32_t bits = e <= 14 ? (15 - e) << 10 : 0x400 >> (e - 14);
    return bits | bits << 16;
  }
};
// The pair with zeros where bit 0 or bit 1 of `keep` is not set.
__device__ inline uint32_t kept(uint32_t pair, uint32_t keep) {
  return (keep & 1 ? pair & 0xffffu : 0u) | (keep & 2 ? pair & 0xffff0000u : 0u);
}
__device__ inline uint32_t live_pair(int live_here, int lane) {
  return (2 * lane < live_here ? 1u : 0u) | (2 * lane + 1 < live_here ? 2u : 0u);
}

// Fills the table of pairs of levels of both sides, by `threads` threads.
__device__ inline void fill_table(const PrefillParams& p, uint8_t* table, int thread, int threads) {
#pragma unroll 1
  for (int item = thread; item < 256 * 2; item += threads) {
    const int entry = item / 2;
    const CodedSide& side = item % 2 ? p.v : p.k;
    const uint32_t pair = static_cast<uint32_t>(side.halves[entry % 16]) | static_cast<uint32_t>(side.halves[entry / 16]) << 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) reinterpret_cast<uint4*>(table + item * 128)[(i + thread) % 8] = {pair, pair, pair, pair};
  }
}

// Iterates over the tiles of a block. The block of the next page is loaded a page ahead.
struct TileIterator {
  const uint8_t *k, *v;        // addresses of the tile
  int tile, block, next = -1;  // block < 0: the tile does not exist
  unsigned inside = 0, page = 0;
  __device__ TileIterator(const PrefillParams& p, const CacheTiles& at) : tile(at.first_tile) {
    block = static_cast<int>(at.slot);
    if (at.paged && tile < at.last_tile) {
      page = static_cast<unsigned>(tile) / at.tiles_per_page;
      inside = static_cast<unsigned>(tile) % at.tiles_per_page;
      block = static_cast<int>(at.block_of(p.queries, tile));
      look_ahead(p, at);
    }
    enter(p, at);
  }
  __device__ void look_ahead(const PrefillParams& p, const CacheTiles& at) {
    const int64_t first = (int64_t{page} + 1) * at.tiles_per_page;
    next = first < at.last_tile ? static_cast<int>(at.block_of(p.queries, static_cast<int>(first))) : -1;
  }
  __device__ void enter(const PrefillParams& p, const CacheTiles& at) {
    k = at.source(p.k, tile, block);
    v = at.source(p.v, tile, block);
  }
  __device__ void step(const PrefillParams& p, const CacheTiles& at) {
    ++tile;
    k += p.k.tile;
    v += p.v.tile;
    if (at.paged && ++inside == at.tiles_per_page) {
      inside = 0;
      ++page;
      block = next;
      look_ahead(p, at);
      enter(p, at);
    }
  }
  __device__ bool exists(const CacheTiles& at) const { return tile < at.last_tile && block >= 0; }
};
// Live tokens of a tile, which come first.
__device__ inline int live_tokens_of(bool exists, int tile, int live) { return exists ? min(live - tile * kTile, kTile) : 0; }

// Produces keys and TileInfo of the block's tiles. A NaN or infinite gain of a value makes its key NaN and is taken out of the
// values, so that it reaches only rows that see the token. Tokens that are not live have position -1.
template <int Bits, int D>
__device__ void produce_keys(const PrefillParams& p, const CacheTiles& at, const VisibleToAll& all, const Layout<D>& places,
                             SharedState& share, int thread) {
  using L = Layout<D>;
  const int warp = thread / 32, lane = thread % 32, token = warp % 2 * 32 + lane, row = packed_place(p.v_bits, token);
  const int first = warp / 2 * (D / 16), live = static_cast<int>(at.live);
  const bool wrapped = at.ring && at.appended > p.queries.index.rows;
  if (wrapped && thread == 0) share.ring_positions = RingPositions(p.queries.index, at.appended);
  warpgroup_sync(2);
  const uint32_t base = uniform(shared_address(&share)), stages = uniform(shared_address(places.keys)),
                 table = uniform(shared_address(places.table)) + lane * 4;
  const StageBarriers barriers = keys_barriers(base);
  const uint32_t role = uniform(warp / 2);  // 0: writes positions, 1: the rest of TileInfo
  // A tile is loaded while the tile before it is decoded.
  constexpr int kCodes = kTile * D * Bits / 8;
  uint32_t k_pair = 0, v_pair = 0;
  bool exists = false;
  TileIterator iterator(p, at);
  const int v_gains = p.v_bytes - kGainBytes + 4 * lane;
  const auto load_gains = [&]() -> const uint32_t* {  // returns where the codes are, or null
    exists = iterator.exists(at);
    if (!exists) return nullptr;
    k_pair = *reinterpret_cast<const uint32_t*>(iterator.k + kCodes + 4 * lane);
    v_pair = *reinterpret_cast<const uint32_t*>(iterator.v + v_gains);
    return reinterpret_cast<const uint32_t*>(iterator.k) + token;
  };
  RawRow<Bits, kTile, D / 16> codes{};
  if (const uint32_t* from = load_gains()) codes.load(from, D, first);
  PipelineStage<L::kStages> stage{0, 1};  // all stages are empty in the first round
#pragma unroll 1
  for (int tile = at.first_tile; tile < at.last_tile; ++tile, stage.next()) {
    const int live_here = live_tokens_of(exists, tile, live);
    uint32_t gains = k_pair;
    GainPairs v(v_pair);
    if (live_here < kTile || !v.finite() || __any_sync(0xffffffffu, finite_pair<__half>(gains) != 3)) {
      // NaN and infinity do not take part in the largest gain; the gain of their key becomes NaN.
      const uint32_t lives = live_pair(live_here, lane), v_bad = lives & ~finite_pair<__half>(v_pair),
                     bad = v_bad | (lives & ~finite_pair<__half>(gains));
      gains = kept(gains, lives & ~bad) | (bad & 1 ? 0x7fffu : 0u) | (bad & 2 ? 0x7fff0000u : 0u);
      v = GainPairs(kept(v_pair, lives & ~v_bad));
    }
    const float2 own = unpack<__half>(__shfl_sync(0xffffffffu, gains, token / 2));
    iterator.step(p, at);
    const uint32_t* from = load_gains();
    mbarrier_wait(barriers.empty_of(stage.slot), stage.parity);
    const uint32_t info = base + offsetof(SharedState, info) + info_slot(tile) * sizeof(TileInfo);
    if (role == 0) {
      const int position = tile * kTile + token;
      store_shared(info + offsetof(TileInfo, position) + row * 4,
                   static_cast<uint32_t>(token >= live_here ? -1
                                         : wrapped          ? share.ring_positions.of(position)
                                                            : position));
    } else {
      store_shared(info + offsetof(TileInfo, gain) + TileInfo::gain_place(row) * 4,
                   __float_as_uint((token % 2 ? own.y : own.x) * p.unit));
      if (token == 0) {
        store_shared(info + offsetof(TileInfo, v_exponent), static_cast<uint32_t>(v.exponent()));
        store_shared(info + offsetof(TileInfo, hides), live_here < kTile || at.ring || !all.holds(tile));
      }
    }
    decode_row(codes, from, D, table, first, stages + stage.slot * L::kTileBytes, row, [](int) { return NoGains{}; });
    fence_proxy_async();
    mbarrier_arrive(barriers.full_of(stage.slot));
  }
}

// Produces values of the block's tiles: a row of tokens for every coordinate.
template <int Bits, int D>
__device__ void produce_values(const PrefillParams& p, const CacheTiles& at, const Layout<D>& places, SharedState& share,
                               int thread) {
  using L = Layout<D>;
  constexpr int kCount = 8 * D / kGroup;  // pieces of a thread
  const int warp = thread / 32, lane = thread % 32, coordinate = thread % D, first = thread / D * kCount;
  const int live = static_cast<int>(at.live);
  const uint32_t base = uniform(shared_address(&share)), stages = uniform(shared_address(places.values)),
                 table = uniform(shared_address(places.table)) + 128 + lane * 4;
  const StageBarriers barriers = values_barriers(base);
  const uint32_t own = base + offsetof(SharedState, v_gains) + uniform(warp) * static_cast<uint32_t>(sizeof share.v_gains[0]);
  const uint32_t to[2] = {own + 2 * packed_place(Bits, 2 * lane), own + 2 * packed_place(Bits, 2 * lane + 1)};
  constexpr int kCodes = kTile * D * Bits / 8;
  uint32_t pair = 0;
  bool exists = false;
  TileIterator iterator(p, at);
  const auto load_gains = [&]() -> const uint32_t* {
    exists = iterator.exists(at);
    if (!exists) return nullptr;
    pair = *reinterpret_cast<const uint32_t*>(iterator.v + kCodes + 4 * lane);
    return reinterpret_cast<const uint32_t*>(iterator.v) + coordinate;
  };
  RawRow<Bits, D, kCount> codes{};
  if (const uint32_t* from = load_gains()) codes.load(from, D, first);
  PipelineStage<L::kStages> stage;  // the first round waits until the queries have left the stages
#pragma unroll 1
  for (int tile = at.first_tile; tile < at.last_tile; ++tile, stage.next()) {
    const int live_here = live_tokens_of(exists, tile, live);
    GainPairs gains(pair);
    if (live_here < kTile || !gains.finite()) gains = GainPairs(kept(pair, live_pair(live_here, lane) & finite_pair<__half>(pair)));
    iterator.step(p, at);
    const uint32_t* from = load_gains();
    const uint32_t scaled = times(gains.pair, GainPairs::inverse(gains.exponent()));
    __syncwarp();  // all lanes have read the gains of the tile before
#pragma unroll
    for (int e = 0; e < 2; ++e)
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(to[e]), "h"(static_cast<uint16_t>(scaled >> 16 * e)) : "memory");
    __syncwarp();
    mbarrier_wait(barriers.empty_of(stage.slot), stage.parity);
    decode_row(codes, from, D, table, first, stages + stage.slot * L::kTileBytes, coordinate, [&](int piece) {
      uint4 x;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(own + piece * 16));
      return x;
    });
    fence_proxy_async();
    mbarrier_arrive(barriers.full_of(stage.slot));
  }
}

// Dispatches a producer warpgroup by the bits of its side.
template <int D>
__device__ void produce(KvRole role, const PrefillParams& p, const CacheTiles& at, const VisibleToAll& all, const Layout<D>& places,
                        SharedState& share, int thread) {
  const auto run = [&]<int Bits>() {
    if (role == KvRole::k)
      produce_keys<Bits, D>(p, at, all, places, share, thread);
    else
      produce_values<Bits, D>(p, at, places, share, thread);
  };
  switch (role == KvRole::k ? p.k_bits : p.v_bits) {
    case 2: run.template operator()<2>(); break;
    case 3: run.template operator()<3>(); break;
    case 4: run.template operator()<4>(); break;
    default: run.template operator()<8>();
  }
}

#endif  // WEFT_HAS_WGMMA

}  // namespace weft::cuda::prefill
