// Cells of equal width that tell which boundary of a table a number is to be compared with: see kv_encode_tiles.cu.
#pragma once

#include <cmath>
#include <cstring>

#include "cuda/common/mma.cuh"
#include "cuda/kv/kv_encode.cuh"

namespace weft::cuda::encode {

inline constexpr float kReach = 4.5f;    // cells cover z in [-kReach, kReach], the outermost all that is beyond
inline constexpr float kSlack = 0.125f;  // of a cell: as exact as its number is found

// Kinds of tables: cells of up to 4 bits are short ones, of 5 and 6 long ones; uniform tables need none.
enum class Table { none, short_cells, long_cells, uniform };

// Narrow enough for the boundaries of Gaussian codebooks.
__host__ __device__ constexpr int cells_of(Table table) { return table == Table::short_cells ? 64 : 256; }
// Is there room for more than the least: a row ahead of its turn, for one?
template <int D>
constexpr bool kRoomy = D <= 128;

// Lower edge of cell k of `cells`, moved by `slack` of a cell.
inline float cell_edge(int k, int cells, float slack) {
  return ((static_cast<float>(k) + slack) / (static_cast<float>(cells) - kSlack) - 0.5f) * 2 * kReach;
}

struct alignas(16) LongCell {
  float boundary;   // the next one up, or infinity
  float low, high;  // levels below and above it; their codes are in the last bits
  uint32_t unused;
};
// The boundary is half the sum: the last bits of the two are such that it is, to 1e-6. Beyond the last boundary there is but one level.
struct alignas(8) ShortCell {
  float low, high;
};
// Lanes that read short cells together, sixteen of them, have copies in banks of their own where there is room.
template <int D>
constexpr int kCopies = D <= 128 ? 16 : 8;

// Where there is room for it, a side's cells lie at an address that is a multiple of their size: an offset joins it with its mask.
template <int D>
constexpr int kCellBytes = 64 * kCopies<D>* static_cast<int>(sizeof(ShortCell));
template <int D>
constexpr int kCellsRoom = (kRoomy<D> ? 3 : 2) * kCellBytes<D>;  // of K and V
template <int D>
__device__ inline uint8_t* cells_in(uint8_t* room) {
  return room + (kRoomy<D> ? -shared_address(room) & (kCellBytes<D> - 1) : 0);
}
template <int D>
__device__ inline uint32_t in_cells(uint32_t offset, uint32_t cells) {
  return kRoomy<D> ? offset | cells : offset + cells;
}

// The float next to x whose last `bits` bits are `code`: to a millionth or so, the level that the gain is made of.
__device__ inline float marked(float x, int code, int bits) {
  const uint32_t b = __float_as_uint(x), sign = b & 0x80000000u, size = b & 0x7fffffffu, all = 1u << bits;
  const auto own = static_cast<uint32_t>(code);
  return __uint_as_float(sign | (size < all ? own : ((size - own + all / 2) & ~(all - 1)) + own));
}

__host__ __device__ inline float boundary_below(const float* codebook, int level) {
  return 0.5f * (codebook[level - 1] + codebook[level]);
}

// How many boundaries lie below cell k, and how many inside, with slack.
struct CellBoundaries {
  int below = 0, inside = 0;
  CellBoundaries(const float* codebook, int bits, int k) {
    const int cells = cells_of(bits <= 4 ? Table::short_cells : Table::long_cells);
    const float from = k == 0 ? -INFINITY : cell_edge(k, cells, -kSlack);
    const float to = k == cells - 1 ? INFINITY : cell_edge(k + 1, cells, kSlack);
    for (int level = 1; level < 1 << bits; ++level) {
      const float boundary = boundary_below(codebook, level);
      if (boundary < from)
        below = level;
      else if (boundary <= to)
        ++inside;
    }
  }
};

__device__ inline LongCell long_cell(const float* codebook, int bits, int below) {
  const bool last = below + 1 == 1 << bits;
  const int above = last ? below : below + 1;
  return {last ? INFINITY : boundary_below(codebook, above), marked(codebook[below], below, bits),
          marked(codebook[above], above, bits), 0};
}

// Of the floats on either side of x whose last `bits` bits are `code`, number `which`.
inline float marked_beside(float x, int code, int bits, int which) {
  uint32_t b;
  std::memcpy(&b, &x, sizeof b);
  const uint32_t all = 1u << bits, own = static_cast<uint32_t>(code), low = b & (all - 1);
  b = b - low + own;
  if (which == 1) b = own > low ? b - all : b + all;
  std::memcpy(&x, &b, sizeof b);
  return x;
}
inline ShortCell short_cell(const float* codebook, int bits, int below) {
  const int above = below + 1 == 1 << bits ? below : below + 1;
  const float low = codebook[below], high = codebook[above];
  ShortCell best{};
  double least = INFINITY;
  for (int which = 0; which < 4; ++which) {
    const ShortCell cell{marked_beside(low, below, bits, which % 2), marked_beside(high, above, bits, which / 2)};
    const double off = std::abs((double{cell.low} + double{cell.high}) - (double{low} + double{high}));
    if (off < least) best = cell, least = off;
  }
  return best;
}

inline Table table_of(const KvFormat& format) {
  const float* levels = format.codebook.data();
  if (format.bits >= 7) {
    const int middle = 1 << (format.bits - 1);
    for (int c = 0; c < 1 << format.bits; ++c)
      if (!format.grid_step || std::floor(levels[c] / *format.grid_step) != static_cast<float>(c - middle)) return Table::none;
    return Table::uniform;
  }
  const Table table = format.bits <= 4 ? Table::short_cells : Table::long_cells;
  for (int k = 0; k < cells_of(table); ++k)
    if (CellBoundaries(levels, format.bits, k).inside > 1) return Table::none;
  return table;
}

}  // namespace weft::cuda::encode
