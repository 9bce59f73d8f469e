// Device functions that the state scans with wgmma share: pipeline stages, products with registers, output stores.
#pragma once

#include "cuda/common/wgmma.cuh"
#include "cuda/delta/prefill_scan.cuh"

namespace weft::cuda {

// TMA tensor maps with boxes of 64 channels, one head and 64 tokens.
struct TokenTensorMaps {
  CUtensorMap q, k, v, o;  // o only where it has the inputs' dtype
};

inline constexpr int kOutputStages = 3;  // chunks whose outputs may be in flight, one buffer each

#if WEFT_HAS_WGMMA

// The current stage of a pipeline, and the mbarrier parity of the current round through its stages.
template <class Stage>
struct PipelineState {
  int index = 0;
  uint32_t parity = 0;
  __device__ uint32_t offset() const { return static_cast<uint32_t>(index * Stage::kBytes); }
  __device__ void advance() {
    if (++index < Stage::kCount) return;
    index = 0;
    parity ^= 1;
  }
};

// Releases a stage: the warp arrives at its empty barrier; in a cluster pair, at those of both blocks. One lane arrives where only
// wgmma has read the stage, `kFactorLanes` lanes where lanes have read factors. racecheck follows threads: of the lanes that read
// the same factor, which are every fourth, it remembers the last.
inline constexpr int kFactorLanes = 4;
template <int Lanes, bool Pair = false>
__device__ inline void release_stage(uint32_t barrier, int lane) {
  __syncwarp();
  if (lane < 32 - Lanes) return;
  if constexpr (Pair) {
    mbarrier_arrive_cluster(barrier, 0);
    mbarrier_arrive_cluster(barrier, 1);
  } else {
    mbarrier_arrive(barrier);
  }
}

// Starts d = a b: 64 state rows by as many tokens of keys or queries as d has columns.
template <class Half, int KP, int Tiles>
__device__ inline void start_state_reads(float (&d)[Tiles][4], const FragmentA (&a)[KP / 16], uint32_t tokens) {
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

// Starts d += w b over the tokens of w: S += W M or o += R W.
template <class Half, int N, int Pairs>
__device__ inline void start_updates(float (&d)[N][4], const FragmentA (&w)[Pairs], uint32_t b) {
  wgmma_fence();
#pragma unroll
  for (int js = 0; js < Pairs; ++js) wgmma<Half, true>(d, w[js], b + (js * 32 >> 4));
  wgmma_commit();
}

// The state in accumulators rounded to the A operand of the next reads, and decayed for the next update. The registers of an
// operand or an accumulator may not change while a wgmma runs.
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

// Named barriers between a warpgroup, which arrives, and the warp that stores its outputs, which syncs: one per output stage, so
// that no arrival counts for an earlier round.
__device__ inline int store_barrier(int stage, int group) { return 1 + group * kOutputStages + stage; }
__device__ inline void store_barrier_arrive(int barrier) { asm volatile("bar.arrive %0, 160;" ::"r"(barrier) : "memory"); }
__device__ inline void store_barrier_sync(int barrier) { asm volatile("bar.sync %0, 160;" ::"r"(barrier) : "memory"); }

// Stores all outputs but those of the last chunk with TMA, from output_at(stage); by one warp per warpgroup. The warp also arrives
// at a stage's empty barrier. Where outputs lie in the stage itself, it arrives when the stage's outputs are read. Where outputs
// have separate buffers, it arrives when the outputs of the previous chunk are read; a buffer is then free before the next outputs
// are written to it.
template <bool Separate, class OutputAt>
__device__ void store_outputs(const Prefill& p, const TokenTensorMaps& maps, const WorkTile& work, int group,
                              const StageBarriers& barriers, OutputAt&& output_at) {
  const bool first = threadIdx.x % 32 == 0, same_type = p.o.dtype == p.q.dtype;
  const auto release = [&](int stage) {
    if (first) mbarrier_arrive(barriers.empty_of(stage));
  };
  int stage = 0;
  for (int c = 0; c + 1 < work.chunks; ++c) {
    if (Separate) {
      if (first) tma_store_wait_read();
      release(stage);
    }
    store_barrier_sync(store_barrier(stage, group));
    if (first && same_type)
      tma_store(maps.o, work.first_v + group * 64, static_cast<int>(work.hv), static_cast<int>(work.range.begin) + c * kChunk,
                output_at(stage) + group * kPanel);
    if (!Separate) {
      if (first) tma_store_wait_read();
      release(stage);
    }
    if (++stage == kOutputStages) stage = 0;
  }
  if (first) tma_store_wait_read();  // shared memory ends with the block
}

// Stores the outputs of the last chunk, which may be short, in pieces of 16 bytes. The warp has transposed them into columns
// 16 (warp % 4) .. of a panel in shared memory.
__device__ inline void store_last_outputs(const Prefill& p, const WorkTile& work, const unsigned char* panel, int warp, int lane) {
  const StridedView& o = p.o;
  const OutputChunk last(p, work, work.chunks - 1);
  const int row = work.first_v + warp * 16 + lane % 2 * 8;
  for (int token = lane / 2; token < last.length && row < p.V; token += 16)
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(o.data) + last.base + token * o.strides[0] + row) =
        *reinterpret_cast<const uint4*>(panel + Tile64::offset(token, warp % 4 * 2 + lane % 2));
}

#endif  // WEFT_HAS_WGMMA

}  // namespace weft::cuda
