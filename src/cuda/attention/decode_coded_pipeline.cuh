// The pipeline of a warp of the coded-tile decode kernel: its tiles, copied ahead of time into stages of shared memory of its own.
#pragma once

#include "cuda/attention/decode_coded_shape.cuh"
#include "cuda/attention/work_split.cuh"

namespace weft::cuda {

// The warps that share a work item: all warps of the block, or half of them where the block has two items.
template <class Shape>
struct ItemWarps {
  bool two_items;
  int count, half, index;  // this is warp `index` of `count`, in that half of the block
  unsigned item;
  bool idle;  // the last block may have no second item

  __device__ __forceinline__ ItemWarps(const CodedParams& p, int warp) {
    two_items = Shape::kMaxItems == 2 && p.items_per_block == 2;
    count = two_items ? Shape::kWarps / 2 : Shape::kWarps;
    half = two_items && warp >= count ? 1 : 0;
    index = warp - half * count;
    item = two_items ? 2 * blockIdx.x + half : blockIdx.x;
    idle = item >= p.items;
  }
  __device__ __forceinline__ int first() const { return half * count; }
};

// Tile i of the warp is tile first_tile + i stride of the cache. Each load is one group of cp.async copies, empty where there is no
// tile, so that the number of groups in flight tells which tiles have arrived.
template <class Shape>
struct CodedPipeline {
  using K = typename Shape::K;
  using V = typename Shape::V;
  const CodedParams& p;
  const CacheTiles& cache;
  uint8_t* stages;
  int first_tile, last_tile, stride, lane;

  __device__ __forceinline__ int tile(int i) const { return first_tile + i * stride; }
  __device__ __forceinline__ uint8_t* k_stage(int i) const { return stages + i % Shape::kKStages * K::kBytes; }
  __device__ __forceinline__ uint8_t* v_stage(int i) const {
    return stages + Shape::kKStages * K::kBytes + i % Shape::kVStages * Shape::kVBytes;
  }
  __device__ __forceinline__ void load_keys(int i) const {
    if (i >= 0 && tile(i) < last_tile)
      if (const uint8_t* from = cache.find(p.queries, p.by_page, p.k, tile(i))) K::copy(shared_address(k_stage(i)), from, lane);
    cp_async_commit();
  }
  // The gains come with the first half of the codes and lie before the codes, where they stay when the second half arrives.
  __device__ __forceinline__ void load_values(int i, int half) const {
    if (i >= 0 && tile(i) < last_tile)
      if (const uint8_t* from = cache.find(p.queries, p.by_page, p.v, tile(i)))
        V::template copy_half<Shape::kVHalves>(shared_address(v_stage(i)), from, half, lane);
    cp_async_commit();
  }
  // Prologue: fills all stages.
  __device__ __forceinline__ void fill() const {
    constexpr int kAhead = Shape::kKStages > Shape::kVStages ? Shape::kKStages : Shape::kVStages;
#pragma unroll 1
    for (int i = -kAhead; i < 0; ++i) {
      load_keys(i + Shape::kKStages);
      load_values(i + Shape::kVStages, 0);
    }
  }
  __device__ __forceinline__ static void wait_keys() {
    cp_async_wait<2 * Shape::kKStages - 1>();
    __syncwarp();
  }
  __device__ __forceinline__ static void wait_values() {
    cp_async_wait<2 * Shape::kVStages - 1>();
    __syncwarp();
  }
};

}  // namespace weft::cuda
