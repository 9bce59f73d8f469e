// The producer warpgroups of the prefill kernel for tiles of f16 or bf16: keys and values are copied to where wgmma reads them.
//
// Coordinates of values are contiguous there; their products read them transposed. bf16 becomes f16 in shared memory, relative to
// the power of two of the largest number of its tile. That keeps all bits, except those of numbers below 2^-29 of the largest.
// (Weights in bf16 would err by 1e-3; weights as sums of two bf16 would cost half as many products again.)
#pragma once

#include "cuda/attention/prefill_coded.cuh"

namespace weft::cuda::prefill {

#if WEFT_HAS_WGMMA

// The half of a descriptor that depends on the address, for a matrix of rows k whose n are contiguous: blocks of 64 rows of 64 n
// follow one another.
__device__ inline uint32_t transposed_descriptor(uint32_t address) {
  return (address & 0x3ffffu) >> 4 | static_cast<uint32_t>(kTile * 128 >> 4) << 16;
}

#define WEFT_D4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define WEFT_D16(d, i) WEFT_D4(d, i), WEFT_D4(d, i + 1), WEFT_D4(d, i + 2), WEFT_D4(d, i + 3)
#define WEFT_D32(d, i) WEFT_D16(d, i), WEFT_D16(d, i + 4)

// d += a b, b transposed.
__device__ inline void wgmma_transposed(float (&d)[8][4], const FragmentA& a, uint32_t b) {
  asm volatile(
      "{\n.reg .b64 b;\nmov.b64 b, {%36, " WEFT_DESCRIPTOR_REST
      "};\nwgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16"
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "{%32,%33,%34,%35}, b, 1, 1, 1, 1;\n}\n"
      : WEFT_D32(d, 0)
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b));
}
__device__ inline void wgmma_transposed(float (&d)[16][4], const FragmentA& a, uint32_t b) {
  asm volatile(
      "{\n.reg .b64 b;\nmov.b64 b, {%68, " WEFT_DESCRIPTOR_REST
      "};\nwgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16"
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,"
      "%62,%63}, {%64,%65,%66,%67}, b, 1, 1, 1, 1;\n}\n"
      : WEFT_D32(d, 0), WEFT_D32(d, 8)
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b));
}

#undef WEFT_D32
#undef WEFT_D16
#undef WEFT_D4

constexpr int kMinExponent = -120;  // of a tile of bf16: 2^-kMinExponent is finite

// Converts a thread's `Count` pieces of a tile from bf16 to f16. Returns the exponent that they are relative to. `tops`: a word for
// each warp of the warpgroup; `group`: its named barrier.
template <int Count, class Place>
__device__ int to_f16(const Place& place, unsigned* tops, int group, int thread) {
  constexpr uint32_t kMagnitudes = 0x7fff7fffu, kNotFinite = 0x7f80u;
  constexpr int kAtOnce = Count <= 8 ? Count : 4;  // pieces that registers hold: all, or else each is read twice
  uint32_t x[kAtOnce][4];
  const auto read = [&](int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[i][0]), "=r"(x[i][1]), "=r"(x[i][2]), "=r"(x[i][3])
                   : "r"(place(first + i)));
  };
  uint32_t pair = 0;
#pragma unroll 1
  for (int first = 0; first < Count; first += kAtOnce) {
    read(first);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (const uint32_t word : x[i]) pair = __vmaxu2(pair, word & kMagnitudes);
  }
  uint32_t top = max(pair & 0xffffu, pair >> 16);
  if (top >= kNotFinite) {  // NaN and infinity do not count
    top = 0;
#pragma unroll 1
    for (int first = 0; first < Count; first += kAtOnce) {
      if (Count > kAtOnce) read(first);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (const uint32_t word : x[i]) {
          const uint32_t low = word & 0x7fffu, high = word >> 16 & 0x7fffu;
          top = max(top, max(low < kNotFinite ? low : 0u, high < kNotFinite ? high : 0u));
        }
    }
  }
  top = __reduce_max_sync(0xffffffffu, top);
  if (thread % 32 == 0) tops[thread / 32] = top;
  warpgroup_sync(group);
  top = max(max(tops[0], tops[1]), max(tops[2], tops[3]));
  const int exponent = max(static_cast<int>(top >> 7) - 127 - 14, kMinExponent);  // the largest is below 2^15 then
  const float scale = power_of_two(-exponent);
#pragma unroll 1
  for (int first = 0; first < Count; first += kAtOnce) {
    if (Count > kAtOnce) read(first);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (uint32_t& word : x[i])
        word = pack<__half>(__uint_as_float(word << 16) * scale, __uint_as_float(word & 0xffff0000u) * scale);
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(place(first + i)), "r"(x[i][0]), "r"(x[i][1]), "r"(x[i][2]),
                   "r"(x[i][3])
                   : "memory");
    }
  }
  return exponent;
}

// Produces keys, with TileInfo, or values of the block's tiles. Tokens that are not live are zeros.
template <int D>
__device__ void produce_uncompressed(KvRole role, const PrefillParams& p, const CacheTiles& at, const VisibleToAll& all,
                                     const Layout<D>& places, SharedState& share, int thread) {
  using L = Layout<D>;
  constexpr int kPieces = D / 8, kOwn = kTile * kPieces / kGroup;
  const bool keys = role == KvRole::k, wrapped = at.ring && at.appended > p.queries.index.rows;
  const uint32_t base = shared_address(&share);
  const StageBarriers barriers = keys ? keys_barriers(base) : values_barriers(base);
  uint8_t* const stages = keys ? places.keys : places.values;
  const int live = static_cast<int>(at.live);
  if (keys && wrapped && thread == 0) share.ring_positions = RingPositions(p.queries.index, at.appended);
  warpgroup_sync(keys ? 2 : 3);
  // A thread's pieces are kEach tokens apart, at the same place of a row but for the swizzle.
  constexpr int kEach = kGroup / kPieces;
  const int own_token = thread / kPieces, own_piece = thread % kPieces;
  const uint32_t own_place =
      shared_address(stages) + own_piece / 8 * (kTile * 128) + own_token * 128 + (((own_piece ^ own_token) & 7) << 4);
  const auto token_of = [&](int i) { return i * kEach + own_token; };
  const auto place_of = [&](int slot, int i) {
    return (own_place + slot * L::kTileBytes + i * kEach * 128) ^ ((i * kEach & 7) << 4);
  };
  TileIterator iterator(p, at);
  PipelineStage<L::kStages> next{0, keys ? 1u : 0u},
      now;  // in the first round stages of keys are empty; those of values once the queries no longer use them
  int live_next = 0;
  const auto load_next = [&] {
    const bool exists = iterator.exists(at);
    live_next = live_tokens_of(exists, iterator.tile, live);
    if (iterator.tile < at.last_tile) {
      mbarrier_wait(barriers.empty_of(next.slot), next.parity);
      const uint8_t* from = exists ? (keys ? iterator.k : iterator.v) : (keys ? p.k.data : p.v.data);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const bool lives = token_of(i) < live_next;
        cp_async(place_of(next.slot, i), lives ? from + (i * kGroup + thread) * 16 : from, lives);
      }
    }
    cp_async_commit();
    next.next();
    iterator.step(p, at);
  };
  // With three stages, the next tile is loaded before this one has arrived. With two, the other stage is released only after the
  // values of the tile before are summed, which happens while the scores of this tile wait for its own values. The next tile is
  // then loaded as soon as the stage is empty, at the latest after this tile is complete.
  constexpr bool kEarly = L::kStages > 2;
  load_next();
#pragma unroll 1
  for (int tile = at.first_tile; tile < at.last_tile; ++tile, now.next()) {
    const int live_here = live_next;
    bool loaded = kEarly;
    if (kEarly) load_next();
    cp_async_wait<kEarly ? 1 : 0>();
    int exponent = 0;
    if (p.bf16) {
      if (!kEarly && mbarrier_test(barriers.empty_of(next.slot), next.parity)) {
        load_next();
        loaded = true;
      }
      exponent =
          to_f16<kOwn>([&](int i) { return place_of(now.slot, i); }, share.tops[keys ? 0 : 1][now.slot], keys ? 2 : 3, thread);
    }
    const bool hides = live_here < kTile || at.ring || !all.holds(tile);
    if (keys) {
      TileInfo& info = share.info[info_slot(tile)];
      const int position = tile * kTile + thread;
      if (thread < kTile) info.position[thread] = thread >= live_here ? -1 : wrapped ? share.ring_positions.of(position) : position;
      if (thread == kTile) info.v_exponent = 0, info.hides = hides, info.unit = p.unit * power_of_two(exponent);
    } else if (thread == 0) {
      share.exponent[now.slot] = exponent;
    }
    if (!keys && hides) {
      // NaN and infinite values must not reach rows that do not see them: they become zeros, and `bad` names their tokens.
      unsigned* const bad = share.bad[now.slot];
      if (thread < kTile / 32) bad[thread] = 0;
      warpgroup_sync(3);
#pragma unroll 1
      for (int i = 0; i < kOwn; ++i) {
        const uint32_t place = place_of(now.slot, i);
        uint32_t x[4];
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(place));
        bool finite = true;
#pragma unroll
        for (const uint32_t pair : x) finite &= finite_pair<__half>(pair) == 3;
        if (finite) continue;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(place), "r"(0) : "memory");
        atomicOr(bad + token_of(i) / 32, 1u << token_of(i) % 32);
      }
    }
    fence_proxy_async();
    mbarrier_arrive(barriers.full_of(now.slot));
    if (!loaded) load_next();
  }
  cp_async_wait<0>();
}

#endif  // WEFT_HAS_WGMMA

}  // namespace weft::cuda::prefill
