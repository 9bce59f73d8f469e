// Tiles of f16 or bf16 as they are, for prefill.cu: keys and values are copied to where warpgroup products take them. Values lie
// there with their coordinates contiguous; their products read them transposed.
//
// bf16 becomes f16 there, without the power of two of the largest of its tile: that leaves all of its bits, but of what is 2^-29 of the
// largest. (Weights in bf16 would err by 1e-3, and in two parts cost half as many products again.)
#pragma once

#include "cuda/attention/prefill_coded.cuh"

namespace weft::cuda::prefill {

#if WEFT_HAS_WGMMA

// A matrix of rows k with n contiguous, 64 n of 64 rows after another: the half of its descriptor that depends on the address.
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

constexpr int kMinExponent = -120;  // a scale's inverse is a number, too

// A thread's `Count` pieces of a tile from bf16 to f16; `tops`: a word for each warp of the warpgroup, which meets as `group`. The power
// of two that is left out.
template <int Count, class Place>
__device__ int to_f16(const Place& place, unsigned* tops, int group, int thread) {
  constexpr uint32_t kMagnitudes = 0x7fff7fffu, kNoNumber = 0x7f80u;
  constexpr int kAtOnce = Count <= 8 ? Count : 4;  // what registers hold: all, or else they are read twice
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
  if (top >= kNoNumber) {  // what is no number has no say
    top = 0;
#pragma unroll 1
    for (int first = 0; first < Count; first += kAtOnce) {
      if (Count > kAtOnce) read(first);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (const uint32_t word : x[i]) {
          const uint32_t low = word & 0x7fffu, high = word >> 16 & 0x7fffu;
          top = max(top, max(low < kNoNumber ? low : 0u, high < kNoNumber ? high : 0u));
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

// Keys or values of the block's tiles; tokens that do not live are zeros.
template <int D>
__device__ void produce_uncompressed(KvRole role, const PrefillParams& p, const CacheTiles& at, const VisibleToAll& all,
                                     const Layout<D>& places, SharedState& share, int thread) {
  using L = Layout<D>;
  constexpr int kPieces = D / 8, kOwn = kTile * kPieces / kGroup;
  const bool keys = role == KvRole::k, wrapped = at.ring && at.appended > p.queries.index.rows;
  const uint32_t base = shared_address(&share);
  const StageBarriers barriers = keys ? keys_barriers(base) : values_barriers(base);
  uint8_t* const ring = keys ? places.keys : places.values;
  const int live = static_cast<int>(at.live);
  if (keys && wrapped && thread == 0) share.ring_positions = RingPositions(p.queries.index, at.appended);
  warpgroup_sync(keys ? 2 : 3);
  // A thread's pieces are kEach tokens apart, at the same place of a row but for the permutation.
  constexpr int kEach = kGroup / kPieces;
  const int own_token = thread / kPieces, own_piece = thread % kPieces;
  const uint32_t own_place =
      shared_address(ring) + own_piece / 8 * (kTile * 128) + own_token * 128 + (((own_piece ^ own_token) & 7) << 4);
  const auto token_of = [&](int i) { return i * kEach + own_token; };
  const auto place_of = [&](int slot, int i) {
    return (own_place + slot * L::kTileBytes + i * kEach * 128) ^ ((i * kEach & 7) << 4);
  };
  TileIterator walk(p, at);
  PipelineStage<L::kStages> next{0, keys ? 1u : 0u},
      now;  // the first round finds places of keys free, those of values when the queries have left
  int alive_next = 0;
  const auto ask = [&] {
    const bool there = walk.there(at);
    alive_next = alive_of(there, walk.tile, live);
    if (walk.tile < at.last_tile) {
      mbarrier_wait(barriers.empty_of(next.slot), next.parity);
      const uint8_t* from = there ? (keys ? walk.k : walk.v) : (keys ? p.k.data : p.v.data);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const bool lives = token_of(i) < alive_next;
        cp_async(place_of(next.slot, i), lives ? from + (i * kGroup + thread) * 16 : from, lives);
      }
    }
    cp_async_commit();
    next.next();
    walk.step(p, at);
  };
  // The next tile is asked for before this one has come, or where there are but two places when it has, at the latest: the other one is
  // free only after the tile before, whose values are summed while this one's scores wait for its own.
  constexpr bool kEarly = L::kStages > 2;
  ask();
#pragma unroll 1
  for (int tile = at.first_tile; tile < at.last_tile; ++tile, now.next()) {
    const int alive = alive_next;
    bool asked = kEarly;
    if (kEarly) ask();
    cp_async_wait<kEarly ? 1 : 0>();
    int exponent = 0;
    if (p.bf16) {
      if (!kEarly && mbarrier_test(barriers.empty_of(next.slot), next.parity)) {
        ask();
        asked = true;
      }
      exponent =
          to_f16<kOwn>([&](int i) { return place_of(now.slot, i); }, share.tops[keys ? 0 : 1][now.slot], keys ? 2 : 3, thread);
    }
    const bool hides = alive < kTile || at.ring || !all.holds(tile);
    if (keys) {
      TileInfo& facts = share.info[info_slot(tile)];
      const int position = tile * kTile + thread;
      if (thread < kTile) facts.position[thread] = thread >= alive ? -1 : wrapped ? share.ring_positions.of(position) : position;
      if (thread == kTile) facts.v_exponent = 0, facts.hides = hides, facts.unit = p.unit * power_of_two(exponent);
    } else if (thread == 0) {
      share.exponent[now.slot] = exponent;
    }
    if (!keys && hides) {
      // Values that are no numbers must not reach those who do not see them: they are taken out, and their tokens named.
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
    if (!asked) ask();
  }
  cp_async_wait<0>();
}

#endif  // WEFT_HAS_WGMMA

}  // namespace weft::cuda::prefill
