// The queries of attention over tiles in lanes order: rotated, in two planes of int8, where the operands of products are read from.
#pragma once

#include "cuda/attention/decode_coded_shape.cuh"

namespace weft::cuda {

// Where q's coordinate c goes: k-step, register, lane t and byte of the B operand.
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

// The rows of every team, and what makes scores of their integer products: see the file of the kernel.
template <class Shape>
struct CodedRows {
  RowTile tile[Shape::kMaxItems];
  int part[Shape::kMaxItems], busy[Shape::kMaxItems];  // of the context; warps that have a tile
  float factor[Shape::kMaxItems][Shape::kRows], offset[Shape::kMaxItems][Shape::kRows], mean[Shape::kMaxItems][Shape::kRows];
};

// Row r, by one warp, from its bits in memory; where `there` is false, a row of zeros.
template <int KBits, class Shape>
__device__ void place_query(const CodedParams& p, int64_t hk, bool there, const uint32_t (&bits)[Shape::kD / 32], int r, int team,
                            uint8_t* planes, CodedRows<Shape>& rows, int lane) {
  constexpr int kOwn = Shape::kD / 32;
  constexpr float kMostWarps = 16256;  // 127 * 128
  const QueryParams& q = p.queries;
  float x[kOwn] = {}, step = 0, inverse = 0, from_mean = 0;
  if (there) {
    from_mean = rotate_query<kOwn>(q, bits, hk, lane, x);
    unsigned bits_of_top = 0;  // of numbers that are not negative, whose order is that of their bits, NaN above all
#pragma unroll
    for (int e = 0; e < kOwn; ++e) bits_of_top = max(bits_of_top, __float_as_uint(fabsf(x[e])));
    const float top = __uint_as_float(__reduce_max_sync(0xffffffffu, bits_of_top));
    from_mean += top * 0.0f;  // NaN where q holds NaN or infinity, and so are its scores then
    step = top * (1 / kMostWarps);
    inverse = step > 0 ? 1 / step : 0.0f;
  }
  int sum = 0;
#pragma unroll
  for (int e = 0; e < kOwn; ++e) {
    const int value = __float2int_rn(x[e] * inverse), low = ((value + 64) & 127) - 64, high = (value - low) >> 7;
    sum += value;
    const QueryPlace at = query_place<KBits>(lane * kOwn + e);
    const auto place = [&](int plane) {
      const int column = Shape::kRows == 4 ? 2 * r + plane : r % 8;
      const int first = Shape::kRows == 4 ? at.step : (plane * Shape::kSteps + at.step) * Shape::kRowBlocks + r / 8;
      return (first * 32 + column * 4 + at.t) * 8 + at.half * 4 + at.byte;
    };
    planes[place(0)] = static_cast<uint8_t>(high);
    planes[place(1)] = static_cast<uint8_t>(low);
  }
  sum = __reduce_add_sync(0xffffffffu, sum);
  if (lane == 0) {
    const float unit = score_unit(q.scale, q.mask.softcap.has_value());
    const float factor = step * p.k.step * unit;
    rows.factor[team][r] = factor;
    rows.offset[team][r] = 0.5f * static_cast<float>(sum) * factor;
    rows.mean[team][r] = from_mean * unit;
  }
}

}  // namespace weft::cuda
