// What the attention kernels share: lowered arguments of the queries, query rows of a kv head, and what a row sees.
//
// The query rows of a sequence and kv head are numbered r = i (Hq / Hk) + g, where i is the query token and g the head within the
// group. A block takes several rows, so that it decodes a key or value once for the whole group and for several query tokens.
#pragma once

#include "common/attention_mask.h"
#include "common/conventions.h"
#include "common/partials.h"
#include "cuda/attention/online_softmax.cuh"
#include "cuda/common/divisor.cuh"
#include "cuda/kv/cache_index.cuh"
#include "cuda/kv/kv_side.cuh"

namespace weft::cuda {

inline constexpr int kRows = 16;  // query rows of a block of the f32 kernels

// AttentionMask lowered for kernels. 0 stands for no window and for no softcap.
struct MaskView {
  bool causal = true;
  float softcap = 0;
  int64_t window = 0;
  constexpr bool has_softcap() const { return softcap > 0; }
};
inline MaskView view_of(const AttentionMask& mask) { return {mask.causal, mask.softcap.value_or(0), mask.window.value_or(0)}; }

// AttentionQueries lowered for kernels: what query_position() reads, and the rows of q.
struct QueriesView {
  StridedView q;
  IndexView positions;
  SequencesView sequences;
  KvDomain domain = KvDomain::original;
};
inline QueriesView view_of(const AttentionQueries& queries) {
  return {view_of(queries.q), indices_of(queries.positions), view_of(queries.sequences), queries.domain};
}

struct QueryParams {
  QueriesView queries;
  MaskView mask;
  CacheIndex index;
  RotateView k_rotate;
  MeanView k_mean;
  float scale = 1;
  int64_t T = 0, longest = 0, Hk = 0, group = 1;  // longest: max_tokens()
  int64_t row_tiles = 0;                          // the most that a sequence and kv head can have
};

inline QueryParams query_params(const AttentionQueries& queries, const KvCache& cache, const AttentionMask& mask) {
  QueryParams p;
  p.queries = view_of(queries);
  p.mask = view_of(mask);
  p.index = cache_index(cache);
  p.k_rotate = rotate_view(cache.k.format);
  p.k_mean = mean_view(cache.k.format);
  p.T = queries.q.size(0);
  p.longest = max_tokens(queries.sequences, p.T);
  p.Hk = cache.heads();
  p.group = queries.q.size(1) / p.Hk;
  p.scale = scale_or_default(queries.scale, queries.q.size(2));
  p.row_tiles = (p.longest * p.group + kRows - 1) / kRows;
  return p;
}

// Rows [first, first + rows) of a sequence and kv head.
struct RowTile {
  int64_t n, hk, first;
  int rows;  // 0: no work
  TokenRange range;
};

__device__ inline RowTile row_tile(const SequencesView& sequences, int64_t T, int64_t longest, int64_t group, int64_t n, int64_t hk,
                                   int64_t tile, int most = kRows) {
  RowTile rows{n, hk, tile * most, 0, tokens_of(sequences, n, T, longest)};
  const int64_t all = rows.range.length() * group;
  if (rows.first < all) rows.rows = static_cast<int>(all - rows.first < most ? all - rows.first : most);
  return rows;
}

struct QueryRow {
  int64_t t, hq;
};
__device__ inline QueryRow query_row(const RowTile& tile, int64_t group, int r) {
  // 32 bits suffice: 2^32 query rows exceed any device's memory.
  const auto row = static_cast<uint32_t>(tile.first + r), heads = static_cast<uint32_t>(group);
  return {tile.range.begin + row / heads, tile.hk * group + row % heads};
}
__device__ inline QueryRow query_row(const RowTile& tile, const Divisor& group, int r) {
  auto row = static_cast<unsigned>(tile.first + r);
  const unsigned head = group.take(row);
  return {tile.range.begin + row, tile.hk * group.by + head};
}

// Writes the rotated query row to `x`, by one warp. Returns what K's mean adds to its unscaled scores. `spare` has 2 D floats.
__device__ inline float load_query(const QueryParams& p, const QueryRow& row, int64_t hk, float* x, float* spare, int lane) {
  const int D = p.k_rotate.D;
  const StridedView& q = p.queries.q;
  const bool rotated = p.queries.domain == KvDomain::rotated;
  for (int j = lane; j < D; j += 32) x[j] = load(q, row.t * q.strides[0] + row.hq * q.strides[1] + j);
  __syncwarp();
  float from_mean = 0;
  if (p.k_mean.data) {
    const float* mean = p.k_mean.data + hk * p.k_mean.head;
    for (int j = lane; j < D; j += 32) spare[j] = mean[j];
    __syncwarp();
    if (rotated) rotate_row(p.k_rotate, false, spare, spare + D, lane);
    for (int j = lane; j < D; j += 32) from_mean = fmaf(x[j], spare[j], from_mean);
    from_mean = sum_warp(from_mean);
    __syncwarp();
  }
  if (!rotated) rotate_row(p.k_rotate, false, x, spare, lane);
  return from_mean;
}

// Positions that the row of query token t sees.
__device__ inline VisibleRange seen_by(const QueryParams& p, const RowTile& tile, int64_t appended, int64_t t) {
  const VisiblePositions seen = visible_positions(p.mask.causal, p.mask.window, query_position(p.queries, tile.range, appended, t));
  constexpr int64_t kMost = 0x7fffffff;
  return {static_cast<int>(seen.first < 0       ? 0
                           : seen.first < kMost ? seen.first
                                                : kMost),
          static_cast<int>(seen.end < 0       ? 0
                           : seen.end < kMost ? seen.end
                                              : kMost)};
}

__device__ inline float softcapped(float score, const MaskView& mask) {
  return mask.has_softcap() ? mask.softcap * tanhf(score / mask.softcap) : score;
}

// Split `split` of `splits` of `count` tokens, in whole units.
struct Span {
  int64_t begin, end;
};
__device__ inline Span split_of(int64_t count, int64_t split, int64_t splits, int64_t unit) {
  const int64_t units = (count + unit - 1) / unit, each = (units + splits - 1) / splits * unit;
  const int64_t begin = split * each < count ? split * each : count;
  return {begin, begin + each < count ? begin + each : count};
}

// Positions of the rows of a ring that has overwritten tokens; in 32 bits, as positions are.
struct RingPositions {
  int pinned, ring, lost, oldest;  // positions pinned .. pinned + lost - 1 are overwritten; the next is in row pinned + oldest
  RingPositions() = default;
  __device__ RingPositions(const CacheIndex& index, int64_t appended) {
    pinned = static_cast<int>(index.pinned);
    ring = static_cast<int>(index.rows) - pinned;
    lost = static_cast<int>(appended - index.rows);
    oldest = lost % ring;
  }
  __device__ int of(int row) const {
    if (row < pinned) return row;
    const int ahead = row - pinned - oldest;
    return pinned + lost + (ahead < 0 ? ahead + ring : ahead);
  }
};

// A query row as it is in memory: coordinates lane E + e.
template <int E>
__device__ inline void load_query_bits(const StridedView& q, const QueryRow& row, int lane, uint32_t (&bits)[E]) {
  const int64_t from = row.t * q.strides[0] + row.hq * q.strides[1] + lane * E;
#pragma unroll
  for (int e = 0; e < E; ++e) bits[e] = load_bits(q, from + e);
}

// Rotates that row to `x`, by one warp. Returns what K's mean adds to its unscaled scores.
template <int E>
__device__ inline float rotate_query(const QueryParams& p, const uint32_t (&bits)[E], int64_t hk, int lane, float (&x)[E]) {
  const bool rotated = p.queries.domain == KvDomain::rotated;
#pragma unroll
  for (int e = 0; e < E; ++e) x[e] = bits_to_float(bits[e], p.queries.q.dtype);
  const uint32_t signs = p.k_rotate.signs[lane * E / 32] >> lane * E % 32;
  const auto rotate = [&](float(&y)[E]) {
    if (p.k_rotate.rotation == Rotation::none) return;
#pragma unroll
    for (int e = 0; e < E; ++e) y[e] *= signs >> e & 1 ? -p.k_rotate.scale : p.k_rotate.scale;
    butterflies<E>(y, p.k_rotate.run, lane);
  };
  float from_mean = 0;
  if (p.k_mean.data) {
    float mean[E];
#pragma unroll
    for (int e = 0; e < E; ++e) mean[e] = p.k_mean.data[hk * p.k_mean.head + lane * E + e];
    if (rotated) rotate(mean);
#pragma unroll
    for (int e = 0; e < E; ++e) from_mean = fmaf(x[e], mean[e], from_mean);
    from_mean = sum_warp(from_mean);
  }
  if (!rotated) rotate(x);
  return from_mean;
}

}  // namespace weft::cuda
