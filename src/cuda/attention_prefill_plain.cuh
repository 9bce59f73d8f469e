// Tiles of f16 as they are, for attention_prefill.cu: keys and values are copied to where warpgroup products take them, nothing is decoded.
// Values lie there with their coordinates contiguous; their products read them transposed.
#pragma once

#include "cuda/attention_prefill_decode.cuh"

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

// Keys or values of the block's tiles; tokens that do not live are zeros.
template <int D>
__device__ void produce_plain(KvRole role, const PrefillParams& p, const CacheTiles& at, const SeenByAll& all,
                              const Layout<D>& places, Share& share, int thread) {
  using L = Layout<D>;
  constexpr int kPieces = D / 8, kOwn = kTile * kPieces / kGroup;
  const bool keys = role == KvRole::k, wrapped = at.ring && at.appended > p.queries.index.rows;
  const uint32_t base = shared_address(&share);
  const StageBarriers barriers = keys ? keys_barriers(base) : values_barriers(base);
  uint8_t* const ring = keys ? places.keys : places.values;
  const int live = static_cast<int>(at.live);
  if (keys && wrapped && thread == 0) share.around = RingPositions(p.queries.index, at.appended);
  meet(keys ? 2 : 3);
  const auto token_of = [&](int i) { return (i * kGroup + thread) / kPieces; };
  const auto place_of = [&](int slot, int i) {
    const int token = token_of(i), piece = thread % kPieces;
    return shared_address(ring + slot * L::kSide) + piece / 8 * (kTile * 128) + token * 128 + (((piece ^ token) & 7) << 4);
  };
  TileWalk walk(p, at);
  RingPlace<L::kStages> next{0, keys ? 1u : 0u},
      now;  // the first round finds places of keys free, those of values when the queries have left
  int alive_next = 0;
  const auto ask = [&] {
    const bool there = walk.there(at);
    alive_next = alive_of(there, walk.tile, live);
    if (walk.tile < at.last_tile) {
      barrier_wait(barriers.empty_of(next.slot), next.parity);
      const uint8_t* from = there ? (keys ? walk.k : walk.v) : (keys ? p.k.data : p.v.data);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const bool lives = token_of(i) < alive_next;
        copy_async(place_of(next.slot, i), lives ? from + (i * kGroup + thread) * 16 : from, lives);
      }
    }
    commit_copies();
    next.next();
    walk.step(p, at);
  };
  // The next tile is asked for before this one has come, or where there are but two places when it has: the other one is free only
  // after the tile before, whose values are summed while this one's scores wait for its own.
  constexpr bool kEarly = L::kStages > 2;
  ask();
#pragma unroll 1
  for (int tile = at.first_tile; tile < at.last_tile; ++tile, now.next()) {
    const int alive = alive_next;
    if (kEarly) ask();
    wait_copies<kEarly ? 1 : 0>();
    const bool hides = alive < kTile || at.ring || !all.holds(tile);
    if (keys) {
      TileFacts& facts = share.facts[facts_place(tile)];
      const int position = tile * kTile + thread;
      if (thread < kTile) facts.position[thread] = thread >= alive ? -1 : wrapped ? share.around.of(position) : position;
      if (thread == kTile) facts.v_exponent = 0, facts.hides = hides;
    } else if (hides) {
      // Values that are no numbers must not reach those who do not see them: they are taken out, and their tokens named.
      unsigned* const bad = share.bad[now.slot];
      if (thread < kTile / 32) bad[thread] = 0;
      meet(3);
#pragma unroll 1
      for (int i = 0; i < kOwn; ++i) {
        const uint32_t place = place_of(now.slot, i);
        uint32_t x[4];
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(place));
        bool finite = true;
#pragma unroll
        for (const uint32_t pair : x) finite &= finite_pair(pair) == 3;
        if (finite) continue;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(place), "r"(0) : "memory");
        atomicOr(bad + token_of(i) / 32, 1u << token_of(i) % 32);
      }
    }
    fence_async();
    barrier_arrive(barriers.full_of(now.slot));
    if (!kEarly) ask();
  }
  wait_copies<0>();
}

#endif  // WEFT_HAS_WGMMA

}  // namespace weft::cuda::prefill
