// The epilogue of the coded-tile decode kernel: warps merge their sums, and rows are finished or written as partials.
#pragma once

#include "cuda/attention/cluster_send.cuh"
#include "cuda/attention/decode_coded_softmax.cuh"
#include "cuda/attention/finish_row.cuh"

namespace weft::cuda {

// What belongs to the sums of a block's warps: m, the maximum that a sum is relative to, in powers of two, and l, the sum of
// weights.
template <class Shape>
struct CodedSums {
  float m[Shape::kWarps][Shape::kRows], l[Shape::kWarps][Shape::kRows];
  // (m, l) of all splits of the rows that this block finishes; those of its n-th row begin at n times the splits. There are 2
  // splits or more.
  float2 received[Shape::kReceiveRows];
  ReceiveBarrier arrived[Shape::kRows / 2];
};

// Address of a float4 of a row of a warp's sums. The float4 of a row are permuted by row, so that lanes t access different banks.
template <class Shape>
__device__ float* warp_sums_at(uint8_t* shared, int warp, int r, int index) {
  const int swizzle = (Shape::kRows == 4 ? r : r / 2) % 4 * 2;
  return reinterpret_cast<float*>(shared + Shape::kSumsAt + warp * Shape::kSumsStride) + r * Shape::kD + (index ^ swizzle) * 4;
}

// The sums of a lane, joined over the lanes that share a row, to shared memory. `unit`: what makes them values of V.
template <class Shape>
__device__ __forceinline__ void store_warp_sums(CodedAccumulators<Shape>& sums, float unit, uint8_t* shared,
                                                CodedSums<Shape>& block_sums, int warp, int lane) {
  constexpr int U = Shape::kRowBlocks, E = Shape::kRowsPerLane;
  const int j = lane / 4, t = lane % 4;
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int e = 0; e < E; ++e) {
      RunningSoftmax& softmax = sums.softmax[u][e];
      softmax.sum = sum_over_lanes<4, 32>(softmax.sum);
      if constexpr (!Shape::kPairTable) sums.sum_weights[u][e] = sum_over_lanes<4, 32>(sums.sum_weights[u][e]);
      const int r = Shape::lane_row(u, e, t);
      if (j == 0) block_sums.m[warp][r] = softmax.max, block_sums.l[warp][r] = softmax.sum;
      const float half = 0.5f * sums.sum_weights[u][e];
      const auto sum = [&](int b, int y, int c) {
        const float(&o)[4] = sums.o[u][b][y];
        return ((E == 1 ? o[2 * c] + o[2 * c + 1] : o[2 * c + e]) + half) * unit;
      };
#pragma unroll
      for (int b = 0; b < Shape::kD / 32; ++b)
        *reinterpret_cast<float4*>(warp_sums_at<Shape>(shared, warp, r, 8 * b + j)) = {sum(b, 0, 0), sum(b, 0, 1), sum(b, 1, 0),
                                                                                       sum(b, 1, 1)};
    }
}

// N neighbouring floats.
template <int N>
__device__ void load_together(const float* from, float (&x)[N]) {
  if constexpr (N == 2) {
    const float2 two = *reinterpret_cast<const float2*>(from);
    x[0] = two.x, x[1] = two.y;
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(from + i);
      x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
    }
  }
}

// Coordinates lane kD / 32 + e of a row of a warp's sums.
template <class Shape>
__device__ void load_warp_sums(uint8_t* shared, int warp, int r, int lane, float (&x)[Shape::kD / 32]) {
  constexpr int kOwn = Shape::kD / 32;
  if constexpr (kOwn == 8) {  // two float4, which the permutation may have exchanged
    float pair[2][4];
    load_together(warp_sums_at<Shape>(shared, warp, r, 2 * lane), pair[0]);
    load_together(warp_sums_at<Shape>(shared, warp, r, 2 * lane + 1), pair[1]);
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = pair[e / 4][e % 4];
  } else {
    load_together(warp_sums_at<Shape>(shared, warp, r, lane * kOwn / 4) + lane * kOwn % 4, x);
  }
}

// A lane's coordinates of the received sums with that index in CodedSums::received.
template <class Shape>
__device__ float* received_sums_at(uint8_t* shared, int index, int lane) {
  const int byte = (index * 32 + lane) * (Shape::kD / 32) * static_cast<int>(sizeof(float));
  return reinterpret_cast<float*>(shared + Shape::receive_offset(byte));
}

// By one thread: prepares to receive the rows that this block finishes. Row r is finished by the block whose split is r modulo the
// splits.
template <class Shape>
__device__ void expect_splits(CodedSums<Shape>& sums, int split, int splits) {
#pragma unroll 1
  for (int n = 0; split + n * splits < Shape::kRows; ++n)
    sums.arrived[n].expect(static_cast<unsigned>(splits) * (Shape::kD * sizeof(float) + sizeof(float2)));
}

// A row of the sums of several warps, or splits. Lanes hold coordinates lane N + e.
template <int N>
struct MergedRow {
  float m, l, sum[N] = {};
};

// Row r, summed over the item's warps [first, first + busy).
template <class Shape>
__device__ __forceinline__ MergedRow<Shape::kD / 32> merge_warps(uint8_t* shared, const CodedSums<Shape>& sums, int first, int busy,
                                                                 int r, int lane) {
  constexpr int kOwn = Shape::kD / 32;
  MergedRow<kOwn> row;
  const int own = first + lane % 16;
  const float own_m = own < first + busy ? sums.m[own][r] : kMasked, own_l = own < first + busy ? sums.l[own][r] : 0.0f;
  float top = own_m;
#pragma unroll
  for (int apart = 8; apart > 0; apart /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, apart));
  const float keep = join_factor(own_m, own_l, top);
  row.l = keep * own_l;
#pragma unroll
  for (int apart = 8; apart > 0; apart /= 2) row.l += __shfl_xor_sync(0xffffffffu, row.l, apart);
#pragma unroll 4
  for (int w = 0; w < busy; ++w) {
    float x[kOwn];
    load_warp_sums<Shape>(shared, first + w, r, lane, x);
    const float factor = __shfl_sync(0xffffffffu, keep, w);
#pragma unroll
    for (int e = 0; e < kOwn; ++e) row.sum[e] = fmaf(factor, x[e], row.sum[e]);
  }
  row.m = row.l != row.l ? NAN : top;
  return row;
}

// Row r to the block of the cluster that finishes it.
template <class Shape>
__device__ __forceinline__ void send_row(const MergedRow<Shape::kD / 32>& row, uint8_t* shared, CodedSums<Shape>& sums, int split,
                                         int splits, int r, int lane) {
  const int shift = __ffs(splits) - 1;  // a cluster has 2, 4, 8 or 16 blocks
  const int n = r >> shift, index = (n << shift) + split;
  const auto to = static_cast<unsigned>(r & (splits - 1));
  send_in_cluster(received_sums_at<Shape>(shared, index, lane), sums.arrived[n], to, row.sum);
  const float both[2] = {row.m, row.l};
  if (lane == 0) send_in_cluster(&sums.received[index], sums.arrived[n], to, both);
}

// The n-th row that this block finishes, merged over all splits in their order once all have arrived.
template <class Shape>
__device__ __forceinline__ MergedRow<Shape::kD / 32> merge_splits(uint8_t* shared, CodedSums<Shape>& sums, int splits, int n,
                                                                  int lane) {
  constexpr int kOwn = Shape::kD / 32;
  MergedRow<kOwn> row;
  sums.arrived[n].wait();
  // The first lanes have one split each, as have the next lanes, and so on.
  const float2 own = sums.received[splits * n + (lane & (splits - 1))];
  const bool some = own.y != 0 && own.x != kMasked;
  row.m = some ? own.x : kMasked;
  row.l = 0;
#pragma unroll
  for (int apart = 8; apart > 0; apart /= 2) row.m = fmaxf(row.m, __shfl_xor_sync(0xffffffffu, row.m, apart));
  const float keep = some ? exp2_fast(own.x - (row.m == kMasked ? 0.0f : row.m)) : 0.0f;
#pragma unroll 4
  for (int i = 0; i < splits; ++i) {
    const float factor = __shfl_sync(0xffffffffu, keep, i), l = __shfl_sync(0xffffffffu, own.y, i);
    float x[kOwn];
    load_together(received_sums_at<Shape>(shared, splits * n + i, lane), x);
    if (factor != 0) {
      row.l = fmaf(factor, l, row.l);
#pragma unroll
      for (int e = 0; e < kOwn; ++e) row.sum[e] = fmaf(factor, x[e], row.sum[e]);
    }
  }
  return row;
}

template <int N>
__device__ __forceinline__ void write_partial(const PartialsView& out, const QueryRow& at, int split, const MergedRow<N>& row,
                                              int lane) {
  float* to = out.o + out.o_at(at.t, at.hq, split, lane * N);
  if constexpr (N == 2) {
    *reinterpret_cast<float2*>(to) = {row.sum[0], row.sum[1]};
  } else {
#pragma unroll
    for (int e = 0; e < N; e += 4)
      *reinterpret_cast<float4*>(to + e) = {row.sum[e], row.sum[e + 1], row.sum[e + 2], row.sum[e + 3]};
  }
  if (lane == 0) {
    out.m[out.m_at(at.t, at.hq, split)] = natural_max(row.m);
    out.l[out.l_at(at.t, at.hq, split)] = row.l;
  }
}

// Merges the sums of an item's warps, which all threads have stored: rows are finished, sent to the block that finishes them, or
// written as partials. In a cluster, the memory of received sums is free in all blocks.
template <class Shape>
__device__ __forceinline__ void finish_item(const CodedParams& p, int split, const RowTile& rows, const ItemWarps<Shape>& warps,
                                            int busy_warps, uint8_t* shared, CodedSums<Shape>& sums, int warp, int lane) {
  constexpr int kOwn = Shape::kD / 32;
  static_assert(Shape::kWarps <= 16 && 2 * Shape::kWarps >= Shape::kRows, "the smallest cluster has a warp for every row");
  const bool cluster = p.finish == CodedFinish::cluster;
  const int splits = static_cast<int>(p.plan.splits);
#pragma unroll 1
  for (int r = warps.index; r < rows.rows; r += warps.count) {  // a warp for each row
    MergedRow<kOwn> row = merge_warps<Shape>(shared, sums, warps.first(), busy_warps, r, lane);
    if (cluster) {
      send_row<Shape>(row, shared, sums, split, splits, r, lane);
      continue;
    }
    const QueryRow at = query_row(rows, p.by_group, r);
    if (p.finish == CodedFinish::block)
      finish_row<kOwn>(p.merge, at.t, static_cast<unsigned>(at.hq), {natural_max(row.m), row.l}, row.sum, lane);
    else
      write_partial(p.plan.out, at, split, row, lane);
  }
  const int r = split + splits * warp;
  if (!cluster || r >= rows.rows) return;
  MergedRow<kOwn> row = merge_splits<Shape>(shared, sums, splits, warp, lane);
  const QueryRow at = query_row(rows, p.by_group, r);
  finish_row<kOwn>(p.merge, at.t, static_cast<unsigned>(at.hq), {natural_max(row.m), row.l}, row.sum, lane);
}

}  // namespace weft::cuda
