// How attention over tiles in lanes order ends: warps join their sums, blocks of a cluster send theirs to the one that finishes a row,
// and rows are finished or left as partials.
#pragma once

#include "cuda/attention/cluster_send.cuh"
#include "cuda/attention/decode_coded_shape.cuh"
#include "cuda/attention/finish_row.cuh"
#include "cuda/attention/work_split.cuh"

namespace weft::cuda {

// What goes with sums: m, the score that they are relative to, in powers of two, and l, the sum of weights.
template <class Shape>
struct CodedSums {
  float m[Shape::kWarps][Shape::kRows], l[Shape::kWarps][Shape::kRows];
  // Of the parts of rows that this block finishes, of the n-th of them from n times the parts on. There are 2 parts or more.
  float2 parts[Shape::kReceiveRows];
  ReceiveBarrier arrived[Shape::kRows / 2];
};

// Warps that share rows, of which [first, end) had a tile; this is number `mate` of `mates`.
struct ItemWarps {
  int first, end, mate, mates;
};

// Four coordinates of a row of a warp's sums; they change places by the row, so that lanes t meet different banks.
template <class Shape>
__device__ float* warp_sums_at(uint8_t* shared, int warp, int r, int four) {
  const int turn = (Shape::kRows == 4 ? r : r / 2) % 4 * 2;
  return reinterpret_cast<float*>(shared + Shape::kSumsAt + warp * Shape::kSumsStride) + r * Shape::kD + (four ^ turn) * 4;
}

// Floats of a lane that lie together.
template <int N>
__device__ void load_together(const float* from, float (&x)[N]) {
  if constexpr (N == 2) {
    const float2 two = *reinterpret_cast<const float2*>(from);
    x[0] = two.x, x[1] = two.y;
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
  }
}

// Coordinates lane kD / 32 + e of such a row.
template <class Shape>
__device__ void load_warp_sums(uint8_t* shared, int warp, int r, int lane, float (&x)[Shape::kD / 32]) {
  constexpr int kOwn = Shape::kD / 32;
  if constexpr (kOwn == 8) {  // neighbours of four may have changed places
    float four[2][4];
    load_together(warp_sums_at<Shape>(shared, warp, r, 2 * lane), four[0]);
    load_together(warp_sums_at<Shape>(shared, warp, r, 2 * lane + 1), four[1]);
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = four[e / 4][e % 4];
  } else {
    load_together(warp_sums_at<Shape>(shared, warp, r, lane * kOwn / 4) + lane * kOwn % 4, x);
  }
}

// A lane's share of the sums of a part, whose place is that of `parts` above.
template <class Shape>
__device__ float* received_sums_at(uint8_t* shared, int place, int lane) {
  return reinterpret_cast<float*>(shared +
                                  Shape::receive_offset((place * 32 + lane) * (Shape::kD / 32) * static_cast<int>(sizeof(float))));
}

// By one thread: makes ready for the rows that this block finishes, those whose number is that of its part modulo the parts.
template <class Shape>
__device__ void expect_splits(CodedSums<Shape>& sums, int part, int parts) {
#pragma unroll 1
  for (int n = 0; part + n * parts < Shape::kRows; ++n)
    sums.arrived[n].expect(static_cast<unsigned>(parts) * (Shape::kD * sizeof(float) + sizeof(float2)));
}

// Joins the sums of a team's warps, which all threads have left, and hands them on. In a cluster all have met, done with all that parts
// may lie over.
template <class Shape>
__device__ void finish_item(const CodedParams& p, int part, const RowTile& rows, const ItemWarps& team, uint8_t* shared,
                            CodedSums<Shape>& sums, int warp, int lane) {
  constexpr int kOwn = Shape::kD / 32;
  static_assert(Shape::kWarps <= 16 && 2 * Shape::kWarps >= Shape::kRows, "the smallest cluster has a warp for every row");
  const bool cluster = p.finish == CodedFinish::cluster;
  const int parts = static_cast<int>(p.plan.count);
  const int shift = __ffs(parts) - 1;  // of a cluster, whose blocks are 2, 4, 8 or 16
  // A warp for each row, whose lanes hold coordinates lane kOwn + e.
#pragma unroll 1
  for (int r = team.mate; r < rows.rows; r += team.mates) {
    const int own = team.first + lane % 16;
    const float own_m = own < team.end ? sums.m[own][r] : kMasked, own_l = own < team.end ? sums.l[own][r] : 0.0f;
    float top = own_m;
#pragma unroll
    for (int apart = 8; apart > 0; apart /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, apart));
    const float keep = join_factor(own_m, own_l, top);
    float l = keep * own_l, sum[kOwn] = {};
#pragma unroll
    for (int apart = 8; apart > 0; apart /= 2) l += __shfl_xor_sync(0xffffffffu, l, apart);
#pragma unroll 4
    for (int w = 0; w < team.end - team.first; ++w) {
      float x[kOwn];
      load_warp_sums<Shape>(shared, team.first + w, r, lane, x);
      const float factor = __shfl_sync(0xffffffffu, keep, w);
#pragma unroll
      for (int e = 0; e < kOwn; ++e) sum[e] = fmaf(factor, x[e], sum[e]);
    }
    const float m = l != l ? NAN : top;
    if (cluster) {
      const int n = r >> shift, place = (n << shift) + part;
      const auto to = static_cast<unsigned>(r & (parts - 1));
      send_in_cluster(received_sums_at<Shape>(shared, place, lane), sums.arrived[n], to, sum);
      const float both[2] = {m, l};
      if (lane == 0) send_in_cluster(&sums.parts[place], sums.arrived[n], to, both);
      continue;
    }
    const QueryRow row = query_row(rows, p.by_group, r);
    if (p.finish == CodedFinish::block) {
      finish_row<kOwn>(p.merge, row.t, static_cast<unsigned>(row.hq), {natural_max(m), l}, sum, lane);
      continue;
    }
    const PartialsView& out = p.plan.out;
    float* to = out.o + out.o_at(row.t, row.hq, part, lane * kOwn);
    if constexpr (kOwn == 2) {
      *reinterpret_cast<float2*>(to) = {sum[0], sum[1]};
    } else {
#pragma unroll
      for (int e = 0; e < kOwn; e += 4) *reinterpret_cast<float4*>(to + e) = {sum[e], sum[e + 1], sum[e + 2], sum[e + 3]};
    }
    if (lane == 0) {
      out.m[out.m_at(row.t, row.hq, part)] = natural_max(m);
      out.l[out.l_at(row.t, row.hq, part)] = l;
    }
  }
  const int r = part + parts * warp;
  if (!cluster || r >= rows.rows) return;
  sums.arrived[warp].wait();
  // The first lanes have a part each, and so on all over again.
  const float2 own = sums.parts[parts * warp + (lane & (parts - 1))];
  const bool there = own.y != 0 && own.x != kMasked;
  float top = there ? own.x : kMasked, total = 0, sum[kOwn] = {};
#pragma unroll
  for (int apart = 8; apart > 0; apart /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, apart));
  const float keep = there ? exp2_fast(own.x - (top == kMasked ? 0.0f : top)) : 0.0f;
#pragma unroll 4
  for (int i = 0; i < parts; ++i) {
    const float factor = __shfl_sync(0xffffffffu, keep, i), l = __shfl_sync(0xffffffffu, own.y, i);
    float x[kOwn];
    load_together(received_sums_at<Shape>(shared, parts * warp + i, lane), x);
    if (factor != 0) {
      total = fmaf(factor, l, total);
#pragma unroll
      for (int e = 0; e < kOwn; ++e) sum[e] = fmaf(factor, x[e], sum[e]);
    }
  }
  const QueryRow row = query_row(rows, p.by_group, r);
  finish_row<kOwn>(p.merge, row.t, static_cast<unsigned>(row.hq), {natural_max(top), total}, sum, lane);
}

}  // namespace weft::cuda
