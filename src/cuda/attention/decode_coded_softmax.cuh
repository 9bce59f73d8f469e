// The softmax of the coded-tile decode kernel: from the scores of a tile to weights that carry V's gains, and the sums of a warp.
#pragma once

#include "cuda/attention/decode_coded_pipeline.cuh"
#include "cuda/attention/decode_coded_tile.cuh"

namespace weft::cuda {

// The sums of a lane over all tiles of its warp.
template <class Shape>
struct CodedAccumulators {
  typename Shape::Values o = {};
  RunningSoftmax softmax[Shape::kRowBlocks][Shape::kRowsPerLane];
  float sum_weights[Shape::kRowBlocks][Shape::kRowsPerLane] = {};  // with gains; where V's tables hold only n
};

// Tiles of which every row sees every token.
struct UnmaskedTiles {
  int first, end;
  __device__ __forceinline__ UnmaskedTiles(const QueryParams& q, const CacheTiles& cache, const VisibleRange& all) {
    constexpr int kTokens = static_cast<int>(kTileTokens);
    first = all.first / kTokens + (all.first % kTokens != 0);  // rounded up without overflow: positions use all of int
    end = cache.ring || q.mask.has_softcap() ? 0 : static_cast<int>(min(static_cast<int64_t>(all.end), cache.live) / kTokens);
  }
  __device__ __forceinline__ bool holds(int tile) const { return tile >= first && tile < end; }
};

template <class Shape>
struct TileMask {
  bool exists[2] = {true, true};            // tokens 2 lane and 2 lane + 1
  uint32_t hidden[Shape::kRowBlocks] = {};  // bit 8 h + 2 x + e: row e does not see token x of piece h
};

// Softcap and mask of a tile that is not wholly visible. `mine` is what row `lane` sees.
template <class Shape>
__device__ __forceinline__ void mask_scores(const QueryParams& q, const TokenPositions& positions, int tile,
                                            const VisibleRange& mine, int lane, typename Shape::Scores& s, TileMask<Shape>& mask) {
  constexpr int U = Shape::kRowBlocks, E = Shape::kRowsPerLane;
  const int j = lane / 4, t = lane % 4, first_token = tile * static_cast<int>(kTileTokens);
  mask.exists[0] = positions.of(first_token + 2 * lane) >= 0;
  mask.exists[1] = positions.of(first_token + 2 * lane + 1) >= 0;
  int at[2][4];
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int x = 0; x < 4; ++x) at[h][x] = positions.of(first_token + 4 * Shape::V::quad(j, h) + x);
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int e = 0; e < E; ++e) {
      const int row = Shape::lane_row(u, e, t);
      const VisibleRange seen{__shfl_sync(0xffffffffu, mine.first, row), __shfl_sync(0xffffffffu, mine.end, row)};
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          float& score = s[u][h][x][e];
          if (q.mask.has_softcap()) score = softcap_fast(score, q.mask.softcap) * kLog2e;
          if (seen.hides(at[h][x])) {
            score = kMasked;
            mask.hidden[u] |= 1u << (h * 8 + x * 2 + e);
          }
        }
    }
}

// Weights carry V's gains relative to a power of two that no gain of the warp's tiles so far exceeds.
struct GainScale {
  static constexpr float kFull = 0x1p9f;  // the weight of the largest gain: small weights stay clear of f16's underflow
  float top = 0, unit = 0;                // that power of two, and kFull over it

  // Raises `top` to the gains of the tokens that exist. Returns what sums must be multiplied by.
  __device__ __forceinline__ float raise(const uint8_t* gains, const bool (&exists)[2], int lane) {
    const float2 own = unpack<__half>(*reinterpret_cast<const uint32_t*>(gains + lane * 4));
    const float most = fmaxf(exists[0] ? fabsf(own.x) : 0.0f, exists[1] ? fabsf(own.y) : 0.0f);
    float rescale = 1;
    if (__any_sync(0xffffffffu, most > top)) {
      const float raised = exp2f(ceilf(log2f(fmaxf(max_warp(most), 0x1p-24f))));
      if (raised > top) {
        rescale = top / raised;
        top = raised;
        unit = kFull / raised;
      }
    }
    return rescale;
  }
  // The gains of a lane's tokens: gain[h][x] is that of token x of piece quad(j, h).
  template <class Shape>
  __device__ __forceinline__ void read(const uint8_t* gains, int lane, float (&gain)[2][4]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      read_gains(gains, Shape::V::quad(lane / 4, h), gain[h]);
#pragma unroll
      for (int x = 0; x < 4; ++x) gain[h][x] *= unit;
    }
  }
};

// Raises the running maxima where scores exceed them by more than the threshold, or gains have grown: all sums follow.
template <class Shape>
__device__ __forceinline__ void rescale_sums(const typename Shape::Scores& s, float gain_rescale, CodedAccumulators<Shape>& sums) {
  constexpr int U = Shape::kRowBlocks, E = Shape::kRowsPerLane;
  bool exceeded = gain_rescale != 1.0f;
  float top[U][E];
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int e = 0; e < E; ++e) {
      top[u][e] = kMasked;
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int x = 0; x < 4; ++x) top[u][e] = fmaxf(top[u][e], s[u][h][x][e]);
      exceeded |= sums.softmax[u][e].exceeded_by(top[u][e]);
    }
  if (!__any_sync(0xffffffffu, exceeded)) return;
#pragma unroll
  for (int u = 0; u < U; ++u) {
    float rescale[E];
#pragma unroll
    for (int e = 0; e < E; ++e) {
      rescale[e] = gain_rescale;
      sums.softmax[u][e].raise(max_over_lanes<4, 32>(top[u][e]), rescale[e]);
      sums.sum_weights[u][e] *= rescale[e];
    }
#pragma unroll
    for (int b = 0; b < Shape::kD / 32; ++b)
#pragma unroll
      for (int y = 0; y < 2; ++y)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums.o[u][b][y][c] *= rescale[E == 1 ? 0 : c % 2];
  }
}

// The B operands of the product with V: pairs of tokens of a query row, as f16.
template <class Shape>
__device__ __forceinline__ void transpose_weights(const float (&s)[2][4][Shape::kRowsPerLane], int lane,
                                                  uint32_t (&weights)[2][4]) {
  const bool even = lane / 4 % 2 == 0;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      if constexpr (Shape::kRowsPerLane == 2) {
        weights[h][x] = transpose(pack<__half>(s[h][x][0], s[h][x][1]));
      } else if (x % 2 == 0) {
        // Column 2 r takes tokens x of row r, column 2 r + 1 tokens x + 1; their sums are added at the end.
        const uint32_t both = transpose(pack<__half>(s[h][x][0], s[h][x + 1][0]));
        weights[h][x] = even ? both : 0u;
        weights[h][x + 1] = even ? 0u : both;
      }
    }
}

// Scores to weights, which carry the gains, and their sums. Uses up the scores.
template <class Shape>
__device__ __forceinline__ void weigh_tokens(const TileMask<Shape>& mask, const float (&gain)[2][4], int lane,
                                             typename Shape::Scores& s, CodedAccumulators<Shape>& sums,
                                             typename Shape::Weights& weights) {
  constexpr int U = Shape::kRowBlocks, E = Shape::kRowsPerLane;
#pragma unroll
  for (int u = 0; u < U; ++u) {
    float reference[E];
#pragma unroll
    for (int e = 0; e < E; ++e) reference[e] = sums.softmax[u][e].reference();
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int x = 0; x < 4; ++x)
#pragma unroll
        for (int e = 0; e < E; ++e) s[u][h][x][e] = add_weight(s[u][h][x][e] - reference[e], sums.softmax[u][e].sum) * gain[h][x];
    if (mask.hidden[u]) {  // the gain of a hidden token may be NaN or infinite
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int x = 0; x < 4; ++x)
#pragma unroll
          for (int e = 0; e < E; ++e)
            if (mask.hidden[u] >> (h * 8 + x * 2 + e) & 1) s[u][h][x][e] = 0;
    }
    if constexpr (!Shape::kPairTable) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int x = 0; x < 4; ++x)
#pragma unroll
          for (int e = 0; e < E; ++e) sums.sum_weights[u][e] += s[u][h][x][e];
    }
    transpose_weights<Shape>(s[u], lane, weights[u]);
  }
}

}  // namespace weft::cuda
