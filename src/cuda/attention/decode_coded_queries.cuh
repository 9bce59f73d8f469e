// The queries of the coded-tile decode kernel: rotated, and stored as two int8 planes in mma fragments.
#pragma once

#include "cuda/attention/decode_coded_shape.cuh"

namespace weft::cuda {

// Where coordinate c of q goes: k-step, register, lane t and byte of the B operand.
struct QueryPlace {
  int step, half, t, byte;
};
template <int KBits>
__device__ inline QueryPlace query_place(int c) {
  if constexpr (KBits == 8) return {c / 32, c / 16 % 2, c / 4 % 4, c % 4};
  const int group = c / (32 / wide_bits(KBits)), i = c % 4, s = c / 4 % (8 / wide_bits(KBits));
  if constexpr (KBits == 4) return {group / 4, i / 2, group % 4, i % 2 * 2 + s};
  return {group / 4 * 2 + s % 2, i / 2, group % 4, i % 2 * 2 + s / 2};
}

// The rows of the block's items in shared memory. A score is (integer sum * factor + offset) * gain + mean.
template <class Shape>
struct CodedRows {
  RowTile tile[Shape::kMaxItems];
  int split[Shape::kMaxItems], busy_warps[Shape::kMaxItems];  // busy_warps: warps of the item that have a tile
  float factor[Shape::kMaxItems][Shape::kRows], offset[Shape::kMaxItems][Shape::kRows], mean[Shape::kMaxItems][Shape::kRows];
};

// The same for the rows of a lane.
template <class Shape>
struct LaneScales {
  float factor[Shape::kRowBlocks][Shape::kRowsPerLane], offset[Shape::kRowBlocks][Shape::kRowsPerLane];
  float mean[Shape::kRowBlocks][Shape::kRowsPerLane];
  __device__ __forceinline__ LaneScales(const CodedRows<Shape>& rows, int half, int lane) {
#pragma unroll
    for (int u = 0; u < Shape::kRowBlocks; ++u)
#pragma unroll
      for (int e = 0; e < Shape::kRowsPerLane; ++e) {
        const int r = Shape::lane_row(u, e, lane % 4);
        factor[u][e] = rows.factor[half][r];
        offset[u][e] = rows.offset[half][r];
        mean[u][e] = rows.mean[half][r];
      }
  }
};

// Writes row r of the item of that half of the block, by one warp, from the row's bits in memory. A row that does not exist is
// zeros.
template <class Shape>
__device__ void place_query(const CodedParams& p, int64_t hk, bool exists, const uint32_t (&bits)[Shape::kD / 32], int r, int half,
                            uint8_t* fragments, CodedRows<Shape>& rows, int lane) {
  constexpr int kOwn = Shape::kD / 32;
  constexpr float kMost = 16256;  // 127 * 128
  const QueryParams& q = p.queries;
  float x[kOwn] = {}, step = 0, inverse = 0, from_mean = 0;
  if (exists) {
    from_mean = rotate_query<kOwn>(q, bits, hk, lane, x);
    unsigned top_bits = 0;  // the bits of floats that are not negative are in the order of the floats, with NaN above all
#pragma unroll
    for (int e = 0; e < kOwn; ++e) top_bits = max(top_bits, __float_as_uint(fabsf(x[e])));
    const float top = __uint_as_float(__reduce_max_sync(0xffffffffu, top_bits));
    from_mean += top * 0.0f;  // NaN if q holds NaN or infinity, which makes all scores of the row NaN
    step = top * (1 / kMost);
    inverse = step > 0 ? 1 / step : 0.0f;
  }
  int sum = 0;
#pragma unroll
  for (int e = 0; e < kOwn; ++e) {
    const int value = __float2int_rn(x[e] * inverse), low = ((value + 64) & 127) - 64, high = (value - low) >> 7;
    sum += value;
    const QueryPlace at = query_place<Shape::kKBits>(lane * kOwn + e);
    const auto offset = [&](int plane) {
      const int column = Shape::kRows == 4 ? 2 * r + plane : r % 8;
      const int first = Shape::kRows == 4 ? at.step : (plane * Shape::kSteps + at.step) * Shape::kRowBlocks + r / 8;
      return (first * 32 + column * 4 + at.t) * 8 + at.half * 4 + at.byte;
    };
    fragments[offset(0)] = static_cast<uint8_t>(high);
    fragments[offset(1)] = static_cast<uint8_t>(low);
  }
  sum = __reduce_add_sync(0xffffffffu, sum);
  if (lane == 0) {
    const float unit = score_unit(q.scale, q.mask.has_softcap());
    const float factor = step * p.k.step * unit;
    rows.factor[half][r] = factor;
    rows.offset[half][r] = 0.5f * static_cast<float>(sum) * factor;
    rows.mean[half][r] = from_mean * unit;
  }
}

}  // namespace weft::cuda
