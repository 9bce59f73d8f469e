// Rows of kv_encode in the registers of four lanes each, and their rotation by mma and butterflies: see kv_encode_tiles.cu.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/kv/kv_encode.cuh"

namespace weft::cuda::encode {

// Columns 8 n to 8 n + 7 of H_16 as the B operand of an mma. kv_encode_tiles.cu explains the order of rows and columns.
template <class Half>
__device__ inline uint2 hadamard_operand(int lane, int n) {
  const int column = lane / 4 / 2 * 4 + n * 2 + lane / 4 % 2, row = lane % 4 * 4;
  const auto sign = [&](int k) { return __popc((row + k) & column) & 1 ? -1.0f : 1.0f; };
  return {pack<Half>(sign(0), sign(1)), pack<Half>(sign(2), sign(3))};
}

// A lane's share of a row: v[h][i][e] is coordinate D / 2 h + 32 i + 8 t + e.
template <int D>
struct Row {
  static constexpr int kPieces = D / 64;
  float v[2][kPieces][8];
};

// The raw elements of a row of 16 bits, in the same order, loaded ahead of the rotation; zeros where the row does not exist. f32 rows are
// loaded when they are rotated.
template <class Element, int D>
struct LoadedRow {
  uint4 x[2][D / 64];
  __device__ void load(const EncodeSide& p, int64_t from, bool there, int t) {
    const auto* at = reinterpret_cast<const uint4*>(static_cast<const Element*>(p.x.data) + from) + t;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < D / 64; ++i) x[h][i] = there ? at[D / 16 * h + 4 * i] : uint4{};
  }
};
template <int D>
struct LoadedRow<float, D> {
  int64_t from;
  bool there;
  __device__ void load(const EncodeSide&, int64_t at, bool is, int) { from = at, there = is; }
};

// Rotates a row, without the factor D^-1/2. `flips` holds the SRHT signs as sign bits of pairs of 16-bit elements.
template <class Element, int D>
__device__ void rotate(const EncodeSide& p, const uint4* flips, const LoadedRow<Element, D>& loaded, int64_t head, int lane,
                       Row<D>& row) {
  using R = Row<D>;
  constexpr bool kSplit = std::is_same_v<Element, float>;
  using Half = std::conditional_t<kSplit, __nv_bfloat16, Element>;
  const int t = lane % 4;
  const uint2 right[2] = {hadamard_operand<Half>(lane, 0), hadamard_operand<Half>(lane, 1)};
  const auto first = [&](int h, int i) { return D / 2 * h + 32 * i + 8 * t; };
  if constexpr (kSplit) {
    const float* mean = p.mean.data ? p.mean.data + head * p.mean.head : nullptr;
#pragma unroll
    for (int i = 0; i < R::kPieces; ++i) {
      float x[2][8] = {};
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (loaded.there) {
          const int c = first(h, i);
          float four[4];
#pragma unroll
          for (int e = 0; e < 8; e += 4) {
            load4(p.x.data, p.x.dtype, loaded.from + c + e, four);
#pragma unroll
            for (int f = 0; f < 4; ++f) {
              const float value = mean ? four[f] - mean[c + e + f] : four[f];
              x[h][e + f] = p.rotate.signs[c / 32] >> (c % 32 + e + f) & 1 ? -value : value;
            }
          }
        }
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        float c[2][4] = {};
#pragma unroll
        for (int part = 0; part < 3; ++part) {
          FragmentA a;
#pragma unroll
          for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
              float &x0 = x[h][high * 4 + pair * 2], &x1 = x[h][high * 4 + pair * 2 + 1];
              a.x[h + 2 * pair] = pack<Half>(x0, x1);
              const float2 taken = unpack<Half>(a.x[h + 2 * pair]);
              x0 -= taken.x, x1 -= taken.y;
            }
          multiply<Half>(c[0], a, right[0].x, right[0].y);
          multiply<Half>(c[1], a, right[1].x, right[1].y);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) row.v[e / 2][i][high * 4 + n * 2 + e % 2] = c[n][e];
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < R::kPieces; ++i) {
      uint4 x[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 flip = flips[first(h, i) / 8];
        x[h] = loaded.x[h][i];
        x[h].x ^= flip.x, x[h].y ^= flip.y, x[h].z ^= flip.z, x[h].w ^= flip.w;
      }
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        const uint4 &a = x[0], &b = x[1];
        const FragmentA left = high ? FragmentA{{a.z, b.z, a.w, b.w}} : FragmentA{{a.x, b.x, a.y, b.y}};
        float c[2][4] = {};
        multiply<Half>(c[0], left, right[0].x, right[0].y);
        multiply<Half>(c[1], left, right[1].x, right[1].y);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) row.v[e / 2][i][high * 4 + n * 2 + e % 2] = c[n][e];
      }
    }
  }
  const auto butterfly = [](float& low, float& high) {
    const float sum = low + high;
    high = low - high;
    low = sum;
  };
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int i = 0; i < R::kPieces; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) butterfly(row.v[h][i][e], row.v[h][i][e + 4]);
#pragma unroll
    for (int half = 1; half < R::kPieces; half *= 2)
#pragma unroll
      for (int i = 0; i < R::kPieces; ++i)
        if (!(i & half))
#pragma unroll
          for (int e = 0; e < 8; ++e) butterfly(row.v[h][i][e], row.v[h][i + half][e]);
  }
#pragma unroll
  for (int i = 0; i < R::kPieces; ++i)
#pragma unroll
    for (int e = 0; e < 8; ++e) butterfly(row.v[0][i][e], row.v[1][i][e]);
}

}  // namespace weft::cuda::encode
