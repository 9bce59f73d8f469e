// Lookup tables of kv_encode: bins of equal width that name the one decision boundary a number is compared with. See kv_encode_tiles.cu.
#pragma once

#include <cmath>
#include <cstring>

#include "cuda/common/mma.cuh"
#include "cuda/kv/kv_encode.cuh"

namespace weft::cuda::encode {

inline constexpr float kReach = 4.5f;    // bins cover z in [-kReach, kReach]; the outermost ones also cover all that is beyond
inline constexpr float kSlack = 0.125f;  // error of a computed bin index, as a fraction of a bin

// How the level of a number is found: short bins for up to 4 bits, long ones for 5 and 6, arithmetic for uniform codebooks.
enum class Search { none, short_bins, long_bins, uniform };

// Enough for at most one boundary of a Gaussian codebook in each bin.
__host__ __device__ constexpr int bins_of(Search search) { return search == Search::short_bins ? 64 : 256; }
// Rows this short leave registers for the next head's row, and shared memory for aligned bins.
template <int D>
constexpr bool kShortRow = D <= 128;

// Lower edge of bin k of `bins`, moved by `slack` of a bin.
inline float bin_edge(int k, int bins, float slack) {
  return ((static_cast<float>(k) + slack) / (static_cast<float>(bins) - kSlack) - 0.5f) * 2 * kReach;
}

struct alignas(16) LongBin {
  float boundary;   // the next one up, or infinity
  float low, high;  // levels below and above it; their last bits hold their codes
  uint32_t unused;
};
// The boundary is half the sum of the levels, to 1e-6: the tagged levels are chosen for that. Beyond the last boundary both are one level.
struct alignas(8) ShortBin {
  float low, high;
};
// Copies of a short bin, side by side, so that the sixteen lanes that read together use different banks; eight where memory is short.
template <int D>
constexpr int kCopies = D <= 128 ? 16 : 8;

// With short rows, a side's bins begin at a multiple of their size, so that an OR adds an offset to their address.
template <int D>
constexpr int kBinBytes = 64 * kCopies<D>* static_cast<int>(sizeof(ShortBin));
template <int D>
constexpr int kBinsRoom = (kShortRow<D> ? 3 : 2) * kBinBytes<D>;  // of K and V
template <int D>
__device__ inline uint8_t* bins_in(uint8_t* room) {
  return room + (kShortRow<D> ? -shared_address(room) & (kBinBytes<D> - 1) : 0);
}
template <int D>
__device__ inline uint32_t in_bins(uint32_t offset, uint32_t bins) {
  return kShortRow<D> ? offset | bins : offset + bins;
}

// The float nearest to x whose last `bits` bits are `code`: within about a millionth the level, from which the gain is computed.
__device__ inline float tag_level(float x, int code, int bits) {
  const uint32_t b = __float_as_uint(x), sign = b & 0x80000000u, size = b & 0x7fffffffu, all = 1u << bits;
  const auto own = static_cast<uint32_t>(code);
  return __uint_as_float(sign | (size < all ? own : ((size - own + all / 2) & ~(all - 1)) + own));
}

__host__ __device__ inline float boundary_below(const float* codebook, int level) {
  return 0.5f * (codebook[level - 1] + codebook[level]);
}

// How many boundaries lie below bin k, and how many inside it, slack included.
struct BinBoundaries {
  int below = 0, inside = 0;
  BinBoundaries(const float* codebook, int bits, int k) {
    const int bins = bins_of(bits <= 4 ? Search::short_bins : Search::long_bins);
    const float from = k == 0 ? -INFINITY : bin_edge(k, bins, -kSlack);
    const float to = k == bins - 1 ? INFINITY : bin_edge(k + 1, bins, kSlack);
    for (int level = 1; level < 1 << bits; ++level) {
      const float boundary = boundary_below(codebook, level);
      if (boundary < from)
        below = level;
      else if (boundary <= to)
        ++inside;
    }
  }
};

__device__ inline LongBin long_bin(const float* codebook, int bits, int below) {
  const bool last = below + 1 == 1 << bits;
  const int above = last ? below : below + 1;
  return {last ? INFINITY : boundary_below(codebook, above), tag_level(codebook[below], below, bits),
          tag_level(codebook[above], above, bits), 0};
}

// Of the two floats around x whose last `bits` bits are `code`, number `which`.
inline float tag_level_beside(float x, int code, int bits, int which) {
  uint32_t b;
  std::memcpy(&b, &x, sizeof b);
  const uint32_t all = 1u << bits, own = static_cast<uint32_t>(code), low = b & (all - 1);
  b = b - low + own;
  if (which == 1) b = own > low ? b - all : b + all;
  std::memcpy(&x, &b, sizeof b);
  return x;
}
inline ShortBin short_bin(const float* codebook, int bits, int below) {
  const int above = below + 1 == 1 << bits ? below : below + 1;
  const float low = codebook[below], high = codebook[above];
  ShortBin best{};
  double least = INFINITY;
  for (int which = 0; which < 4; ++which) {
    const ShortBin bin{tag_level_beside(low, below, bits, which % 2), tag_level_beside(high, above, bits, which / 2)};
    const double off = std::abs((double{bin.low} + double{bin.high}) - (double{low} + double{high}));
    if (off < least) best = bin, least = off;
  }
  return best;
}

// How a format's levels are found; none: not by these kernels.
inline Search search_of(const KvFormat& format) {
  const float* levels = format.codebook.data();
  if (format.bits >= 7) {
    const int middle = 1 << (format.bits - 1);
    for (int c = 0; c < 1 << format.bits; ++c)
      if (!format.grid_step || std::floor(levels[c] / *format.grid_step) != static_cast<float>(c - middle)) return Search::none;
    return Search::uniform;
  }
  const Search search = format.bits <= 4 ? Search::short_bins : Search::long_bins;
  for (int k = 0; k < bins_of(search); ++k)
    if (BinBoundaries(levels, format.bits, k).inside > 1) return Search::none;
  return search;
}

}  // namespace weft::cuda::encode
