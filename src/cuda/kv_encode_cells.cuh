// Cells of equal width that tell which boundary of a table a number is to be compared with: see kv_encode_tiles.cu.
#pragma once

#include "cuda/kv_encode.cuh"
#include "cuda/mma.cuh"

namespace weft::cuda::encode {

inline constexpr float kReach = 4.5f;    // cells cover z in [-kReach, kReach], the outermost all that is beyond
inline constexpr float kSlack = 0.125f;  // of a cell: as exact as its number is found

// Cells for a table of `bits`: narrow enough for the boundaries of Gaussian codebooks. Lanes that read together, eight of them, have
// copies in banks of their own where there is room.
__host__ __device__ constexpr int cells_for(int bits) { return bits <= 4 ? 64 : 256; }
template <int D>
__device__ constexpr int copies_for(int bits) {
  return bits <= 4 && D <= 128 ? 8 : 1;
}
template <int D>
constexpr int kCellRoom = D <= 128 ? 512 : 256;
// Is there room for more than the least: a row ahead of its turn, for one?
template <int D>
constexpr bool kRoomy = D <= 128;

// Lower edge of cell k of `cells`, moved by `slack` of a cell.
inline float cell_edge(int k, int cells, float slack) {
  return ((static_cast<float>(k) + slack) / (static_cast<float>(cells) - kSlack) - 0.5f) * 2 * kReach;
}

struct alignas(16) Cell {
  float boundary;   // the next one up, or infinity
  float low, high;  // levels below and above it; their codes are in the last bits
  uint32_t unused;
};

// Where there is room for it, a side's cells lie at an address that is a multiple of their size: an offset joins it with its mask.
template <int D>
constexpr int kCellBytes = kCellRoom<D>* static_cast<int>(sizeof(Cell));
template <int D>
constexpr int kCellsRoom = (kRoomy<D> ? 3 : 2) * kCellBytes<D>;  // of K and V
template <int D>
__device__ inline Cell* cells_in(uint8_t* room) {
  return reinterpret_cast<Cell*>(room + (kRoomy<D> ? -shared_address(room) & (kCellBytes<D> - 1) : 0));
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
    const int cells = cells_for(bits);
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

__device__ inline Cell make_cell(const float* codebook, int bits, int below) {
  const bool last = below + 1 == 1 << bits;
  const int above = last ? below : below + 1;
  return {last ? INFINITY : boundary_below(codebook, above), marked(codebook[below], below, bits),
          marked(codebook[above], above, bits), 0};
}

// Kinds of tables.
enum class Table { none, cells, uniform };

inline Table table_of(const KvFormat& format) {
  const float* levels = format.codebook.data();
  if (format.bits >= 7) {
    const int middle = 1 << (format.bits - 1);
    for (int c = 0; c < 1 << format.bits; ++c)
      if (!format.grid_step || std::floor(levels[c] / *format.grid_step) != static_cast<float>(c - middle)) return Table::none;
    return Table::uniform;
  }
  const int cells = cells_for(format.bits);
  for (int k = 0; k < cells; ++k)
    if (CellBoundaries(levels, format.bits, k).inside > 1) return Table::none;
  return Table::cells;
}

}  // namespace weft::cuda::encode
