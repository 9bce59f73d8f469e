// Quantising rows of kv_encode: levels by lookup or arithmetic, sums for the gain, and codes as bytes or as words of a tile.
#pragma once

#include "cuda/kv/kv_encode_bins.cuh"
#include "cuda/kv/kv_encode_rotate.cuh"
#include "cuda/kv/kv_encode_write.cuh"

namespace weft::cuda::encode {

struct TileSide {
  EncodeSide encode;
  Search search = Search::none;
  bool direct = false;               // codes of a whole tile need no shared memory
  float step = 1, inverse_step = 1;  // of a uniform codebook
  uint8_t below[256] = {};           // by bin: boundaries below it
  ShortBin bins[16] = {};            // short bins, by boundaries below
};

__device__ inline float sum_four_lanes(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The sums that the gain of a row is computed from. They are taken over `unit` times sqrt(D) times its numbers.
struct RowSums {
  float yy, yc, unit;
  bool tiny;
};

// stored_gain() for the unbiased rule, yy / yc: faster, and equal to a few units in the last place.
__device__ inline float stored_unbiased_gain(const EncodeSide& p, const RowSums& sums, float inverse_root) {
  const float gain = !sums.tiny && sums.yc > 0 ? __fdividef(sums.yy, sums.yc * sums.unit) * (inverse_root * p.unit) : 0.0f;
  return !isfinite(sums.yy) ? NAN : fminf(gain, p.most);
}

// Quantises the lane's share of a row. put(h, i, e, bytes) gets four codes as bytes, whose upper bits are undefined.
template <Search Kind, int D, class Put>
__device__ RowSums quantise(const TileSide& p, uint32_t bins, Row<D>& row, int lane, Put&& put) {
  using R = Row<D>;
  const EncodeSide& side = p.encode;
  const auto each = [&](auto&& visit) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < R::kPieces; ++i)
#pragma unroll
        for (int e = 0; e < 8; ++e) visit(row.v[h][i][e], e);
  };
  const auto sum_squares = [&] {
    float squares[4] = {};
    each([&](float y, int e) { squares[e % 4] = fmaf(y, y, squares[e % 4]); });
    return sum_four_lanes((squares[0] + squares[1]) + (squares[2] + squares[3]));
  };
  float yy = sum_squares(), unit = 1;
  if (__any_sync(0xffffffffu, !(yy > 0x1p-60f && yy < 0x1p100f))) {
    float top = 0;
    each([&](float y, int) { top = fmaxf(top, fabsf(y)); });
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    unit = unit_for(fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2)));
    each([&](float& y, int) { y *= unit; });
    yy = sum_squares();
  }
  // The numbers of a row are y times sqrt(D): z does not depend on the factor, and the gain divides it out.
  const float root = sqrtf(static_cast<float>(D)), inverse = rsqrtf(yy);
  const bool tiny = yy == 0 || yy * inverse <= side.tiny * root * unit;
  const float factor = tiny ? 0.0f : root * inverse;
  float yc[2] = {};
  const auto number = [&](int four, int e) -> float& {
    return row.v[four / (2 * R::kPieces)][four / 2 % R::kPieces][four % 2 * 4 + e];
  };
  const auto put_four = [&](int four, const uint32_t(&code)[4]) {
    put(four / (2 * R::kPieces), four / 2 % R::kPieces, four % 2 * 4,
        __byte_perm(__byte_perm(code[0], code[1], 0x0040), __byte_perm(code[2], code[3], 0x0040), 0x5410));
  };
  constexpr int kFours = 4 * R::kPieces;
  if constexpr (Kind == Search::uniform) {
    const float inverse_step = p.inverse_step, middle = static_cast<float>(1 << (side.side.bits - 1));
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
      uint32_t code[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float y = number(four, e), z = y * factor;
        const float rank = fminf(fmaxf(ceilf(z * inverse_step) + (middle - 1), 0.0f), 2 * middle - 1);
        code[e] = static_cast<uint32_t>(rank);
        yc[e % 2] = fmaf(y, (rank - middle + 0.5f) * p.step, yc[e % 2]);
      }
      put_four(four, code);
    }
  } else {
    // The offset of a bin is read off the bits of a float, kMagic plus the bin's index: the last place of that float is 1 / kStride of a
    // bin, so that the masked bits are the index times kStride, in bytes.
    constexpr bool kShort = Kind == Search::short_bins;
    constexpr int kBins = bins_of(Kind), kStride = kShort ? kCopies<D> * static_cast<int>(sizeof(ShortBin)) : sizeof(LongBin);
    constexpr float kWidth = static_cast<float>(kBins) - kSlack, kMagic = 0x1p23f / static_cast<float>(kStride);
    constexpr uint32_t kOffsetMask = (kBins - 1) * kStride;
    const uint32_t copy = bins + (kShort ? lane % kCopies<D> * sizeof(ShortBin) : 0);
    // Bins of four numbers are loaded while the four numbers before them are compared.
    [[maybe_unused]] float boundary[2][4];
    float low[2][4], high[2][4];
    const float to_unit = factor * (0.5f / kReach);  // exact enough for the slack of bins
    [[maybe_unused]] const float twice = 2 * factor;
    const auto look_up = [&](int four) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float at = fmaf(__saturatef(fmaf(number(four, e), to_unit, 0.5f)), kWidth, kMagic);
        const uint32_t bin = in_bins<D>(__float_as_uint(at) & kOffsetMask, copy);
        [[maybe_unused]] uint32_t unused;
        if constexpr (kShort)
          asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=f"(low[four % 2][e]), "=f"(high[four % 2][e]) : "r"(bin));
        else
          asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                       : "=f"(boundary[four % 2][e]), "=f"(low[four % 2][e]), "=f"(high[four % 2][e]), "=r"(unused)
                       : "r"(bin));
      }
    };
    look_up(0);
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
      if (four + 1 < kFours) look_up(four + 1);
      uint32_t code[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float y = number(four, e), below = low[four % 2][e], above = high[four % 2][e];
        const bool passed = kShort ? fmaf(y, twice, -below) > above : y * factor > boundary[four % 2][e];
        const float level = passed ? above : below;
        code[e] = __float_as_uint(level);
        yc[e % 2] = fmaf(y, level, yc[e % 2]);
      }
      put_four(four, code);
    }
  }
  return {yy, sum_four_lanes(yc[0] + yc[1]), unit, tiny};
}

// Quantises row `r` into shared memory, a byte per code, and its gain.
template <Search Kind, int D>
__device__ void encode_bytes(const TileSide& p, uint32_t bins, Row<D>& row, uint8_t* codes, int r, int lane, float* gains) {
  const EncodeSide& side = p.encode;
  const int bits = side.side.bits, t = lane % 4;
  const uint32_t code_mask = ((1u << bits) - 1) * 0x01010101u;
  const RowSums sums = quantise<Kind, D>(p, bins, row, lane, [&](int h, int i, int e, uint32_t bytes) {
    *reinterpret_cast<uint32_t*>(codes + r * kCodesRow<D> + D / 2 * h + 32 * i + 8 * t + e) = bytes & code_mask;
  });
  float cc = 0;
  if (needs_levels(side.rule)) {
    __syncwarp();
#pragma unroll 1
    for (int c = t; c < D; c += 4) {
      const auto code = static_cast<float>(codes[r * kCodesRow<D> + c]);
      const float level = Kind == Search::uniform ? (code - static_cast<float>(1 << (bits - 1)) + 0.5f) * p.step
                                                  : side.side.codebook[static_cast<int>(code)];
      cc = fmaf(level, level, cc);
    }
    cc = sum_four_lanes(cc);
  }
  // Whether a row takes this path or encode_words() depends on its neighbours. Its gain must not: both paths use the same formula.
  if (t == 0)
    gains[r] = p.direct ? stored_unbiased_gain(side, sums, rsqrtf(static_cast<float>(D)))
                        : stored_gain(side, sums.yy, cc, sums.yc, D, sums.tiny, sums.unit * sqrtf(static_cast<float>(D)));
}

// Quantises a warp's 8 tokens of a whole tile in lanes order, codes of 4 bits, from registers straight to the cache.
template <int D>
__device__ void encode_words(const TileSide& p, uint32_t bins, Row<D>& row, uint8_t* tile, int warp, int lane) {
  const EncodeSide& side = p.encode;
  const int j = lane / 4, t = lane % 4;
  uint32_t words[2][D / 64];
  const RowSums sums = quantise<Search::short_bins, D>(p, bins, row, lane, [&](int h, int i, int e, uint32_t bytes) {
    if (e == 0)
      words[h][i] = bytes & 0x0f0f0f0fu;
    else
      words[h][i] |= (bytes & 0x0f0f0f0fu) << 4;
  });
  const float inverse_root = rsqrtf(static_cast<float>(D));
  const bool k = side.side.role == KvRole::k;
  if (!k) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < D / 64; ++i) words[h][i] = transpose_nibbles(words[h][i], lane);
  }
  // A word of K holds codes of one token, a word of V codes of one coordinate.
  auto* to = reinterpret_cast<uint32_t*>(tile) + (k ? t * kTile + 8 * warp + j : warp * D + 8 * t + j);
  const int half = k ? D / 16 * kTile : D / 2, piece = k ? 4 * kTile : 32;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int i = 0; i < D / 64; ++i) to[h * half + i * piece] = words[h][i];
  if (t == 0)
    reinterpret_cast<__half*>(tile + kTile * D / 2)[8 * warp + j] = __float2half_rn(stored_unbiased_gain(side, sums, inverse_root));
}

}  // namespace weft::cuda::encode
