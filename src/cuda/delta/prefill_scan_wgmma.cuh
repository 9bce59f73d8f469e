// What the passes by warpgroup products share: barriers of stages, and products with a state or corrections in registers.
#pragma once

#include "cuda/common/wgmma.cuh"
#include "cuda/delta/prefill_scan.cuh"

namespace weft::cuda {

// Tokens as boxes of 64 channels, one head and 64 tokens.
struct TokenMaps {
  CUtensorMap q, k, v, o;  // o only where it has the dtype of the others
};

inline constexpr int kOutputStages = 3;  // chunks whose outputs may be on their way, in as many places

#if WEFT_HAS_WGMMA

// A ring's stages and how often it went round.
template <class Stage>
struct Ring {
  int slot = 0;
  uint32_t parity = 0;
  __device__ uint32_t offset() const { return static_cast<uint32_t>(slot * Stage::kBytes); }
  __device__ void advance() {
    if (++slot < Stage::kCount) return;
    slot = 0;
    parity ^= 1;
  }
};

// A warp arrives at a barrier, in a pair at that of either block: it is done with what lies in a stage. One lane does so for all where only
// products have read it, `kFactorLanes` where lanes have read factors: racecheck follows threads, and of those that read the same factor,
// every fourth lane, it remembers the last.
inline constexpr int kFactorLanes = 4;
template <int Lanes, bool Pair = false>
__device__ inline void leave_stage(uint32_t barrier, int lane) {
  __syncwarp();
  if (lane < 32 - Lanes) return;
  if constexpr (Pair) {
    mbarrier_arrive_cluster(barrier, 0);
    mbarrier_arrive_cluster(barrier, 1);
  } else {
    mbarrier_arrive(barrier);
  }
}

// A value that the compiler keeps instead of deriving it again where it is used.
__device__ inline uint32_t kept(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// d = a b, 64 rows by as many tokens of keys or queries as d has columns.
template <class Half, int KP, int Tiles>
__device__ inline void start_reads(float (&d)[Tiles][4], const FragmentA (&a)[KP / 16], uint32_t tokens) {
  wgmma_fence();
#pragma unroll
  for (int ks = 0; ks < KP / 16; ++ks) {
    const uint32_t b = tokens + ((ks / 4 * kPanel + ks % 4 * 32) >> 4);
    if (ks == 0)
      wgmma<Half, false>(d, a[ks], b);
    else
      wgmma<Half, true>(d, a[ks], b);
  }
  wgmma_commit();
}

// d += w b, over the tokens of a chunk.
template <class Half, int N, int Pairs>
__device__ inline void start_writes(float (&d)[N][4], const FragmentA (&w)[Pairs], uint32_t b) {
  wgmma_fence();
#pragma unroll
  for (int js = 0; js < Pairs; ++js) wgmma<Half, true>(d, w[js], b + (js * 32 >> 4));
  wgmma_commit();
}

// The state in accumulators as the next chunk's operand, and as what the chunk adds to: its registers may not change while a product
// runs.
template <class Half, int KP>
__device__ inline void round_state(const float (&state)[KP / 8][4], FragmentA (&rounded)[KP / 16]) {
#pragma unroll
  for (int ks = 0; ks < KP / 16; ++ks) rounded[ks] = operand<Half>(state[2 * ks], state[2 * ks + 1]);
}
template <int KP>
__device__ inline void decay_state(float (&state)[KP / 8][4], float decay) {
#pragma unroll
  for (int nt = 0; nt < KP / 8; ++nt)
#pragma unroll
    for (int e = 0; e < 4; ++e) state[nt][e] *= decay;
}
template <class Half, int KP>
__device__ inline void round_and_decay(float (&state)[KP / 8][4], float decay, FragmentA (&rounded)[KP / 16]) {
  round_state<Half, KP>(state, rounded);
  decay_state<KP>(state, decay);
}

// Where a warpgroup meets the warp that stores its outputs: one place for every stage, so that nobody comes a round early.
__device__ inline int store_barrier(int stage, int group) { return 1 + group * kOutputStages + stage; }
__device__ inline void arrive_at(int barrier) { asm volatile("bar.arrive %0, 160;" ::"r"(barrier) : "memory"); }
__device__ inline void meet_at(int barrier) { asm volatile("bar.sync %0, 160;" ::"r"(barrier) : "memory"); }

// By one warp for every warpgroup: all outputs but those of the last chunk, from place(stage). A stage is free for the chunk three
// further when its own outputs are gone or, where they lie aside of the stages, when those of the chunk before are: then the place that
// they took is free as well before outputs come there again.
template <bool Aside, class Place>
__device__ void store_all(const Prefill& p, const TokenMaps& maps, const Lane& at, int group, const StageBarriers& barriers,
                          Place&& place) {
  const bool first = threadIdx.x % 32 == 0, same_type = p.args.o.dtype == p.args.q.dtype;
  const auto release = [&](int slot) {
    if (first) mbarrier_arrive(barriers.empty_of(slot));
  };
  int slot = 0;
  for (int c = 0; c + 1 < at.chunks; ++c) {
    if (Aside) {
      if (first) tma_store_wait_read();
      release(slot);
    }
    meet_at(store_barrier(slot, group));
    if (first && same_type)
      tma_store(maps.o, at.first_v + group * 64, static_cast<int>(at.hv), static_cast<int>(at.range.begin) + c * kChunk,
                place(slot) + group * kPanel);
    if (!Aside) {
      if (first) tma_store_wait_read();
      release(slot);
    }
    if (++slot == kOutputStages) slot = 0;
  }
  if (first) tma_store_wait_read();  // from memory that ends with the block
}

// The outputs of the last chunk, which may be short, from a panel in shared memory where the warp has turned them: columns 16 (warp % 4)
// on of 64, in pieces of 16 bytes.
__device__ inline void store_last(const Prefill& p, const Lane& at, const unsigned char* panel, int warp, int lane) {
  const Tensor& o = p.args.o;
  const OutputPlace last(p, at, at.chunks - 1);
  const int row = at.first_v + warp * 16 + lane % 2 * 8;
  for (int token = lane / 2; token < last.length && row < p.V; token += 16)
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(o.data) + last.base + token * o.strides[0] + row) =
        *reinterpret_cast<const uint4*>(panel + Tile<kChunk>::offset(token, warp % 4 * 2 + lane % 2));
}

#endif  // WEFT_HAS_WGMMA

}  // namespace weft::cuda
