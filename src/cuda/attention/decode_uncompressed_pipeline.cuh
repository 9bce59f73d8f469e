// What uncompressed decode kernels read, how they divide shared memory, and the pipeline of each of their warps.
#pragma once

#include "cuda/attention/decode_uncompressed.h"
#include "cuda/attention/work_split.cuh"
#include "cuda/common/mma.cuh"

namespace weft::cuda {

struct UncompressedSide : SideAddresses {  // tile: 64 rows
  int64_t row = 0;                         // stride in bytes
};

struct UncompressedParams {
  QueryParams queries;
  UncompressedSide k, v;
  PartialsPlan plan;
  int64_t row_tiles = 0, most_rows = 0;  // most_rows: sequences with more query rows are skipped
  int planes = 1;                        // 16-bit numbers that a query's number is the sum of
};

template <class Element, int D>
struct UncompressedShape {
  using Half = Element;
  using Stage = Tile<D>;
  using Cache = CacheUnits<kUncompressedTokens>;
  static constexpr int kD = D, kWarps = kUncompressedWarps, kRows = kUncompressedRows, kTokens = kUncompressedTokens;
  static constexpr int kSteps = D / 16, kRowBlocks = kRows / 8;
  static constexpr int kStageBytes = kTokens * D * 2;                   // keys or values of 16 tokens
  static constexpr int kStages = (24 << 10) / kStageBytes;              // of a warp
  static constexpr int kPlanes = std::is_same_v<Half, __half> ? 2 : 3;  // of q, at most
  static constexpr int kQueryBytes = kPlanes * kSteps * kRowBlocks * 256;
  static constexpr int kMergeRow = D + 4;  // floats between rows: lanes of an access use different banks
  static constexpr int kMergeBytes = kWarps * kRows * kMergeRow * static_cast<int>(sizeof(float));  // lies over the stages
  static constexpr int kStagesBytes = kWarps * kStages * kStageBytes;
  static constexpr int kSharedBytes = kQueryBytes + (kStagesBytes > kMergeBytes ? kStagesBytes : kMergeBytes);
  // Registers of a lane: scores of tokens g and g + 8 for rows 2 t and 2 t + 1; sums of coordinates 16 m + g and 16 m + g + 8 for
  // the same rows.
  using Scores = float[kRowBlocks][4];
  using Values = float[kRowBlocks][D / 16][4];
  __device__ static int lane_row(int u, int e, int t) { return 8 * u + 2 * t + e; }
};

// Loads the units of 16 tokens of a warp, every kWarps-th of the item's: the keys of a unit, then its values, then the keys of the
// next unit. Each load is one group of cp.async copies, empty behind the last unit.
template <class Shape>
struct UncompressedPipeline {
  using Stage = typename Shape::Stage;
  // Pieces of a row; tokens that one copy of a warp covers; copies of a load.
  static constexpr int kPieces = Stage::kPieces, kAtOnce = 32 / kPieces, kCopies = Shape::kTokens / kAtOnce;
  const UncompressedParams& p;
  const typename Shape::Cache& cache;
  uint8_t* stages;
  int first_unit, last_unit, live, token, piece;  // token, piece: what this lane copies, of the first copy
  int next_unit, next_stage = 0, block, block_after;
  uint32_t missing = 0;  // bit i: unit i of the warp, modulo 32, has no page
  bool values_next = false;
  int read_stage = 0;

  __device__ __forceinline__ UncompressedPipeline(const UncompressedParams& params, const typename Shape::Cache& tokens,
                                                  uint8_t* shared, int warp, int lane)
      : p(params), cache(tokens) {
    stages = shared + Shape::kQueryBytes + warp * (Shape::kStages * Shape::kStageBytes);
    first_unit = cache.first_tile + warp, last_unit = cache.last_tile, live = static_cast<int>(cache.live);
    token = lane / kPieces, piece = lane % kPieces;
    next_unit = first_unit;
    block = block_of(next_unit), block_after = block_of(next_unit + Shape::kWarps);
  }
  __device__ __forceinline__ int unit(int i) const { return first_unit + i * Shape::kWarps; }
  __device__ __forceinline__ bool exists(int i) const { return !(missing >> i % 32 & 1); }
  __device__ __forceinline__ int block_of(int unit) const {
    return unit < last_unit ? static_cast<int>(cache.block_of(p.queries, unit)) : -1;
  }
  // The lane's piece of copy c, from the beginning of the stage.
  __device__ __forceinline__ uint32_t own_offset(int c) const { return Stage::offset(c * kAtOnce + token, piece); }

  __device__ __forceinline__ void load_next() {
    if (next_unit < last_unit) {
      const UncompressedSide& side = values_next ? p.v : p.k;
      const int alive = block >= 0 ? live - next_unit * Shape::kTokens : 0;
      const unsigned row = (cache.paged ? next_unit % cache.tiles_per_page : static_cast<unsigned>(next_unit)) * Shape::kTokens;
      const uint8_t* from = side.data + piece * 16;
      if (alive > 0)
        from += block * side.block + cache.hk * side.head + row / kTileTokens * side.tile + (row % kTileTokens + token) * side.row;
      const uint32_t to = shared_address(stages + next_stage * Shape::kStageBytes);
      const int64_t step = kAtOnce * side.row;
#pragma unroll 4
      for (int c = 0; c < kCopies; ++c) {
        const bool lives = c * kAtOnce + token < alive;
        cp_async(to + own_offset(c), lives ? from + c * step : side.data, lives);
      }
    }
    cp_async_commit();
    if (++next_stage == Shape::kStages) next_stage = 0;
    if (values_next) {
      next_unit += Shape::kWarps;
      block = block_after;
      block_after = block_of(next_unit + Shape::kWarps);
    } else {
      const uint32_t bit = 1u << ((next_unit - first_unit) / Shape::kWarps % 32);
      missing = block < 0 ? missing | bit : missing & ~bit;
    }
    values_next = !values_next;
  }
  // Prologue: fills all stages.
  __device__ __forceinline__ void fill() {
#pragma unroll 1
    for (int i = 0; i < Shape::kStages; ++i) load_next();
  }
  // Waits for the oldest load and returns the address of its stage.
  __device__ __forceinline__ uint32_t wait_next() {
    cp_async_wait<Shape::kStages - 1>();
    __syncwarp();
    const uint32_t at = shared_address(stages + read_stage * Shape::kStageBytes);
    if (++read_stage == Shape::kStages) read_stage = 0;
    return at;
  }
};

}  // namespace weft::cuda
