// kv_encode on cuda, tiles of 64 tokens of one head and side: rotated by tensor cores and registers, coded by a table of cells.
//
// A lane 4 j + t holds coordinates 32 i + 8 t + e, e < 8, of rows j and j + 8 (at D = 256: of row j, i below and from 4). A product by
// H_16 covers the bits of t and the lowest two of e: its operands keep every number in the lane that loaded it. Butterflies in registers
// cover the other bits. Signs and H_16 are exact in 16 bits; f32 rows are summed of three parts of 8 bits each.
// A code is the number of boundaries below z. Cells of equal width have at most one boundary inside, so that a code is what the cell
// says, and one comparison. Codes go to shared memory, a byte each, and are packed from there, 64 tokens together.
#include "cuda/kv_encode.cuh"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"

namespace weft::cuda {
namespace {

constexpr int kTile = static_cast<int>(kTileTokens);
constexpr float kReach = 4.5f;  // cells cover z in [-kReach, kReach], the outermost all that is beyond
constexpr float kSlack = 0.125f;  // of a cell: as exact as its number is found

// Cells for a table of `bits`: narrow enough for the boundaries of Gaussian codebooks.
__host__ __device__ constexpr int cells_for(int bits) { return bits <= 4 ? 64 : 256; }

// Lower edge of cell k of `cells`, moved by `slack` of a cell.
__host__ __device__ inline float cell_edge(int k, int cells, float slack) {
  return ((static_cast<float>(k) + slack) / (static_cast<float>(cells) - kSlack) - 0.5f) * 2 * kReach;
}

struct Cell {
  float boundary;  // the one inside, or infinity
  int below;       // boundaries below the cell
};

__host__ __device__ inline float boundary_below(const float* codebook, int level) {
  return 0.5f * (codebook[level - 1] + codebook[level]);
}

// How many boundaries lie in cell k, with slack; `cell` is right for up to one.
__host__ __device__ inline int make_cell(const float* codebook, int bits, int k, int cells, Cell& cell) {
  const float from = k == 0 ? -INFINITY : cell_edge(k, cells, -kSlack);
  const float to = k == cells - 1 ? INFINITY : cell_edge(k + 1, cells, kSlack);
  int inside = 0;
  cell = {INFINITY, 0};
  for (int level = 1; level < 1 << bits; ++level) {
    const float boundary = boundary_below(codebook, level);
    if (boundary < from) {
      cell.below = level;
    } else if (boundary <= to) {
      cell.boundary = boundary;
      ++inside;
    }
  }
  return inside;
}

// Kinds of tables.
enum class Table { none, cells, uniform };

Table table_of(const KvFormat& format) {
  const float* levels = format.codebook.data();
  if (format.bits >= 7) {
    const int middle = 1 << (format.bits - 1);
    for (int c = 0; c < 1 << format.bits; ++c)
      if (!format.grid_step || std::floor(levels[c] / *format.grid_step) != static_cast<float>(c - middle)) return Table::none;
    return Table::uniform;
  }
  const int cells = cells_for(format.bits);
  for (int k = 0; k < cells; ++k)
    if (Cell cell; make_cell(levels, format.bits, k, cells, cell) > 1) return Table::none;
  return Table::cells;
}

struct TileSide {
  EncodeSide encode;
  bool uniform = false;
  float step = 1;  // uniform
};

struct TileParams {
  TileSide k, v;
  Tensor positions;
  Sequences sequences;
  KvIndex index;
  int64_t T = 0, longest = 0;
  unsigned blocks = 0, heads = 0, heads_k = 0;  // blocks: of a sequence; heads: of both sides; heads_k: of k, 0 when it is left alone
};

// A block's tokens.
struct Tokens {
  KvLocation at[kTile];  // nowhere: not written
  int64_t key[kTile];
  int token[kTile];  // of the sequence, -1: none
  unsigned lost[2];  // bits of rows that a later token takes
};

// Marks the rows of the block that a later token of the sequence takes. Positions that grow rule that out at a glance.
__device__ void find_lost(const TileParams& p, const TokenRange& range, int first, int last, Tokens& tokens) {
  const bool ring = p.index.kind == CacheKind::ring;
  const int64_t around = ring ? p.index.rows - p.index.pinned : INT64_MAX;
  const int64_t low = index_at(p.positions, range.begin + first), high = index_at(p.positions, range.begin + last - 1);
  bool suspect = high - low >= around;
  for (int64_t i = first + threadIdx.x; i < range.length(); i += blockDim.x) {
    const int64_t position = index_at(p.positions, range.begin + i);
    if (i < last)
      suspect |= i > first && position <= index_at(p.positions, range.begin + i - 1);
    else
      suspect |= (position >= low && position <= high) || position - low >= around || (ring && high - position >= around);
  }
  if (!__syncthreads_or(suspect)) return;
  for (int64_t i = first + 1 + threadIdx.x; i < range.length(); i += blockDim.x) {
    const int64_t key = row_key(p.index, index_at(p.positions, range.begin + i));
    for (int r = 0; r < kTile; ++r)
      if (key >= 0 && tokens.key[r] == key && tokens.token[r] < i) atomicOr(&tokens.lost[r / 32], 1u << r % 32);
  }
  __syncthreads();
}

// Signs of H_16 as 16-bit ones, for columns 8 n .. of the B operand: see the file's head for the numbering.
template <class Half>
__device__ uint2 hadamard_operand(int lane, int n) {
  const int column = lane / 4 / 2 * 4 + n * 2 + lane / 4 % 2, row = lane % 4 * 4;
  const auto sign = [&](int k) { return __popc((row + k) & column) & 1 ? -1.0f : 1.0f; };
  return {pack<Half>(sign(0), sign(1)), pack<Half>(sign(2), sign(3))};
}

// Rows as the lanes hold them: v[h][i][e].
template <int D>
struct Rows {
  static constexpr int kPieces = (D < 128 ? D : 128) / 32, kEach = D <= 128 ? 2 : 1;  // kEach: rows of a lane
  static constexpr int kWarps = kTile / 8 / kEach, kThreads = 32 * kWarps;
  float v[2][kPieces][8];
};

// Loads and rotates, without the factor D^-1/2. row[h]: the token's first element, or null: zeros.
template <class Element, int D>
__device__ void rotate(const EncodeSide& p, const int64_t (&from)[2], const bool (&there)[2], int64_t head, int lane, Rows<D>& rows) {
  using R = Rows<D>;
  constexpr bool kSplit = std::is_same_v<Element, float>;
  using Half = std::conditional_t<kSplit, __nv_bfloat16, Element>;
  const int t = lane % 4;
  const uint2 right[2] = {hadamard_operand<Half>(lane, 0), hadamard_operand<Half>(lane, 1)};
  const auto first = [&](int h, int i) { return (D == 256 ? 128 * h : 0) + 32 * i + 8 * t; };
  if constexpr (kSplit) {
    const float* mean = p.mean.data ? p.mean.data + head * p.mean.head : nullptr;
#pragma unroll
    for (int i = 0; i < R::kPieces; ++i) {
      float x[2][8] = {};
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (there[h]) {
          const int c = first(h, i);
          float four[4];
#pragma unroll
          for (int e = 0; e < 8; e += 4) {
            load4(p.x.data, p.x.dtype, from[h] + c + e, four);
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
          for (int e = 0; e < 4; ++e) rows.v[e / 2][i][high * 4 + n * 2 + e % 2] = c[n][e];
      }
    }
  } else {
    uint4 x[2][R::kPieces];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < R::kPieces; ++i) {
        x[h][i] = uint4{};
        if (there[h]) x[h][i] = *reinterpret_cast<const uint4*>(static_cast<const Element*>(p.x.data) + from[h] + first(h, i));
      }
#pragma unroll
    for (int i = 0; i < R::kPieces; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t signs = p.rotate.signs[first(h, i) / 32] >> (8 * t);
        const auto flip = [&](int pair) { return (signs >> 2 * pair & 1) << 15 | (signs >> (2 * pair + 1) & 1) << 31; };
        x[h][i].x ^= flip(0), x[h][i].y ^= flip(1), x[h][i].z ^= flip(2), x[h][i].w ^= flip(3);
      }
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        const uint4 &a = x[0][i], &b = x[1][i];
        const FragmentA left = high ? FragmentA{{a.z, b.z, a.w, b.w}} : FragmentA{{a.x, b.x, a.y, b.y}};
        float c[2][4] = {};
        multiply<Half>(c[0], left, right[0].x, right[0].y);
        multiply<Half>(c[1], left, right[1].x, right[1].y);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) rows.v[e / 2][i][high * 4 + n * 2 + e % 2] = c[n][e];
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
      for (int e = 0; e < 4; ++e) butterfly(rows.v[h][i][e], rows.v[h][i][e + 4]);
#pragma unroll
    for (int half = 1; half < R::kPieces; half *= 2)
#pragma unroll
      for (int i = 0; i < R::kPieces; ++i)
        if (!(i & half))
#pragma unroll
          for (int e = 0; e < 8; ++e) butterfly(rows.v[h][i][e], rows.v[h][i + half][e]);
  }
  if constexpr (D == 256)
#pragma unroll
    for (int i = 0; i < R::kPieces; ++i)
#pragma unroll
      for (int e = 0; e < 8; ++e) butterfly(rows.v[0][i][e], rows.v[1][i][e]);
}

__device__ inline float sum_four(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Codes in shared memory, a byte each: by rows, or by coordinates where tokens share words. Strides keep banks apart.
template <int D>
struct Codes {
  static constexpr int kRow = D + 4, kColumn = kTile + 4;
  static constexpr int kBytes = kTile * kRow > D * kColumn ? kTile * kRow : D * kColumn;
};

// Codes of the lane's rows, whose numbers become codes; returns the gains.
template <int D>
__device__ void quantise(const TileSide& p, const Cell* cells, const float* levels, Rows<D>& rows, uint8_t* codes, bool by_coordinate,
                         int first_row, int lane, float* gains) {
  using R = Rows<D>;
  const EncodeSide& side = p.encode;
  const int bits = side.side.bits, t = lane % 4;
  const float own = static_cast<float>(cells_for(bits)) - kSlack;
  const uint32_t cell_mask = static_cast<uint32_t>(cells_for(bits) - 1) << 3;
  const float inverse_step = 1 / p.step, middle = static_cast<float>(1 << (bits - 1));
  const auto* cell_bytes = reinterpret_cast<const char*>(cells);
#pragma unroll
  for (int s = 0; s < R::kEach; ++s) {
    constexpr int kHalves = 3 - R::kEach;
    float yy = 0;
    const auto squares = [&] {
      float sum = 0;
#pragma unroll
      for (int h = s; h < s + kHalves; ++h)
#pragma unroll
        for (int i = 0; i < R::kPieces; ++i)
#pragma unroll
          for (int e = 0; e < 8; ++e) sum = fmaf(rows.v[h][i][e], rows.v[h][i][e], sum);
      return sum_four(sum);
    };
    yy = squares();
    float unit = 1;
    if (__any_sync(0xffffffffu, !(yy > 0x1p-60f && yy < 0x1p100f))) {
      float top = 0;
#pragma unroll
      for (int h = s; h < s + kHalves; ++h)
#pragma unroll
        for (int i = 0; i < R::kPieces; ++i)
#pragma unroll
          for (int e = 0; e < 8; ++e) top = fmaxf(top, fabsf(rows.v[h][i][e]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      unit = unit_for(top);
#pragma unroll
      for (int h = s; h < s + kHalves; ++h)
#pragma unroll
        for (int i = 0; i < R::kPieces; ++i)
#pragma unroll
          for (int e = 0; e < 8; ++e) rows.v[h][i][e] *= unit;
      yy = squares();
    }
    // Numbers are those of y times sqrt(D), which z does not see and the gain takes back.
    const float root = sqrtf(static_cast<float>(D)), norm = sqrtf(yy);
    const bool tiny = norm / root / unit <= side.tiny;
    const float factor = tiny ? 0.0f : root / norm;
    float cc = 0, yc = 0;
    const int row = first_row + 8 * s + lane / 4;
#pragma unroll
    for (int h = s; h < s + kHalves; ++h)
#pragma unroll
      for (int i = 0; i < R::kPieces; ++i) {
        uint32_t packed[2] = {};
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const float y = rows.v[h][i][e], z = y * factor;
          int code;
          float level;
          if (p.uniform) {
            const float number = fminf(fmaxf(ceilf(z * inverse_step) + (middle - 1), 0.0f), 2 * middle - 1);
            code = static_cast<int>(number);
            level = (number - middle + 0.5f) * p.step;
          } else {
            const float at = fmaf(__saturatef(fmaf(z, 0.5f / kReach, 0.5f)), own, 0x1p20f);  // eighths of cells
            const Cell cell = *reinterpret_cast<const Cell*>(cell_bytes + (__float_as_uint(at) & cell_mask));
            code = cell.below + (z > cell.boundary ? 1 : 0);
            level = levels[code];
          }
          cc = fmaf(level, level, cc);
          yc = fmaf(y, level, yc);
          packed[e / 4] |= static_cast<uint32_t>(code) << (e % 4 * 8);
        }
        const int c = (D == 256 ? 128 * h : 0) + 32 * i + 8 * t;
        if (by_coordinate) {
#pragma unroll
          for (int e = 0; e < 8; ++e)
            codes[(c + e) * Codes<D>::kColumn + row] = static_cast<uint8_t>(packed[e / 4] >> (e % 4 * 8));
        } else {
          auto* words = reinterpret_cast<uint32_t*>(codes + row * Codes<D>::kRow + c);
          words[0] = packed[0], words[1] = packed[1];
        }
      }
    yc = sum_four(yc);
    if (side.rule == GainRule::matched || side.rule == GainRule::least_squares) cc = sum_four(cc);
    if (t == 0) gains[row] = stored_gain(side, yy, cc, yc, D, tiny, unit * root);
  }
}

// A word of a plane from the four-byte words of codes it is made of.
__device__ inline uint32_t plane_word(const LanePlane& plane, const uint8_t* codes) {
  const uint32_t mask = ((1u << plane.width) - 1) * 0x01010101u;
  uint32_t word = 0;
  for (int s = 0; s < 8 / plane.width; ++s)
    word |= (reinterpret_cast<const uint32_t*>(codes)[s] >> plane.shift & mask) << (plane.width * s);
  return word;
}

// Writes the block's codes in lanes order. Whole words where all of their tokens are here; else only the tokens' own bits change.
template <int D>
__device__ void write_lanes(const SideView& side, int64_t head, const Tokens& tokens, bool aligned, int begin, int end,
                            const uint8_t* codes) {
  constexpr int kThreads = Rows<D>::kThreads;
  for (int plane_index = 0; plane_index < side.planes.count; ++plane_index) {
    const LanePlane& plane = side.planes.plane[plane_index];
    const int w = plane.width, packed = 32 / w;  // tokens or coordinates of a word
    if (side.role == KvRole::k) {
      for (int item = threadIdx.x; item < kTile * D / packed; item += kThreads) {
        const int r = item % kTile, group = item / kTile;
        const KvLocation& at = tokens.at[r];
        if (!at.exists()) continue;
        uint8_t* tile = row_at(side, at.block, head, at.row).codes + plane.offset;
        reinterpret_cast<uint32_t*>(tile)[group * kTile + at.row % kTile] = plane_word(plane, codes + r * Codes<D>::kRow + packed * group);
      }
    } else if (aligned) {
      uint8_t* tile = row_at(side, tokens.at[begin].block, head, tokens.at[begin].row).codes + plane.offset;
      for (int item = threadIdx.x; item < kTile * D / packed; item += kThreads) {
        const int c = item % D, first = item / D * packed;
        if (first >= end || first + packed <= begin) continue;
        const uint32_t word = plane_word(plane, codes + c * Codes<D>::kColumn + first);
        auto* to = reinterpret_cast<unsigned*>(tile) + item;
        if (first >= begin && first + packed <= end) {
          *to = word;
          continue;
        }
        uint32_t mask = 0;
        for (int f = 0; f < packed; ++f)
          if (first + f >= begin && first + f < end) mask |= ((1u << w) - 1) << (f % 4 * 8 + f / 4 * w);
        if (const uint32_t change = (__ldcg(to) ^ word) & mask) atomicXor(to, change);
      }
    } else {
      for (int item = threadIdx.x; item < kTile * D; item += kThreads) {
        const int r = item / D, c = item % D;
        const KvLocation& at = tokens.at[r];
        if (!at.exists()) continue;
        uint8_t* tile = row_at(side, at.block, head, at.row).codes + plane.offset;
        const LaneField field = lane_field(side.role, w, D, at.row % kTile, c);
        auto* to = reinterpret_cast<unsigned*>(tile + (field.byte & ~int64_t{3}));
        const int shift = static_cast<int>(field.byte & 3) * 8 + field.bit;
        const uint32_t mask = (1u << w) - 1, wanted = (codes[c * Codes<D>::kColumn + r] >> plane.shift & mask) << shift;
        if (const uint32_t change = (__ldcg(to) ^ wanted) & (mask << shift)) atomicXor(to, change);
      }
    }
  }
}

template <int D>
__device__ void write_rows(const SideView& side, int64_t head, const Tokens& tokens, const uint8_t* codes) {
  constexpr int kThreads = Rows<D>::kThreads;
  const bool nibbles = side.bits == 4 && !side.bytes_each && side.words, bytes = (side.bits == 8 || side.bytes_each) && side.words;
  if (nibbles || bytes) {
    const int each = nibbles ? 8 : 4;  // codes of a word
    for (int item = threadIdx.x; item < kTile * D / each; item += kThreads) {
      const int r = item / (D / each), u = item % (D / each);
      const KvLocation& at = tokens.at[r];
      if (!at.exists()) continue;
      const auto* from = reinterpret_cast<const uint32_t*>(codes + r * Codes<D>::kRow + each * u);
      uint32_t word = from[0];
      if (nibbles) word = __byte_perm(word | word >> 4, from[1] | from[1] >> 4, 0x6420);
      reinterpret_cast<uint32_t*>(row_at(side, at.block, head, at.row).codes)[u] = word;
    }
    return;
  }
  for (int r = threadIdx.x / 32; r < kTile; r += kThreads / 32)
    if (const KvLocation& at = tokens.at[r]; at.exists())
      write_codes(side, row_at(side, at.block, head, at.row), codes + r * Codes<D>::kRow, threadIdx.x % 32);
}

template <class Element, int D>
__global__ void __launch_bounds__(Rows<D>::kThreads) encode_tiles(const __grid_constant__ TileParams p) {
  using R = Rows<D>;
  __shared__ Tokens tokens;
  __shared__ __align__(16) uint8_t codes[Codes<D>::kBytes];
  __shared__ __align__(8) Cell cells[256];
  __shared__ float levels[64], gains[kTile];
  unsigned item = blockIdx.x;
  const unsigned both = item % p.heads, tile = (item /= p.heads) % p.blocks, n = item / p.blocks;
  const bool k = both < p.heads_k;
  const TileSide& own = k ? p.k : p.v;
  const SideView& side = own.encode.side;
  const int64_t head = k ? both : both - p.heads_k;
  const TokenRange range = tokens_of(p.sequences, n, p.T, p.longest);
  const int length = static_cast<int>(range.length());
  if (length == 0) return;
  const bool by_coordinate = side.lanes && side.role == KvRole::v;
  // Where tokens share words, a block takes those of one tile of the cache, if positions are what they seem from the first.
  const int64_t first_position = index_at(p.positions, range.begin);
  const int shift = side.lanes && first_position > 0 ? static_cast<int>(first_position % kTile) : 0;
  const int first = static_cast<int>(tile) * kTile - shift;  // token of row 0
  const int begin = first < 0 ? -first : 0, end = length - first < kTile ? length - first : kTile;
  if (begin >= end) return;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = 8 * R::kEach * warp;
  Rows<D> rows;
  const bool work = row < end && row + 8 * R::kEach > begin;
  if (work) {
    int64_t from[2];
    bool there[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row + (R::kEach == 2 ? 8 * h : 0) + lane / 4;
      there[h] = r >= begin && r < end;
      from[h] = (range.begin + first + r) * own.encode.x.strides[0] + head * own.encode.x.strides[1];
    }
    rotate<Element, D>(own.encode, from, there, head, lane, rows);
  }
  if (threadIdx.x < kTile) {
    const int r = threadIdx.x;
    const bool here = r >= begin && r < end;
    const int64_t position = here ? index_at(p.positions, range.begin + first + r) : -1;
    tokens.at[r] = here ? locate(p.index, n, position) : KvLocation{};
    tokens.key[r] = here ? row_key(p.index, position) : -1;
    tokens.token[r] = here ? first + r : -1;
    if (r < 2) tokens.lost[r] = 0;
  }
  if (!own.uniform) {
    for (int c = threadIdx.x; c < cells_for(side.bits); c += R::kThreads)
      make_cell(side.codebook, side.bits, c, cells_for(side.bits), cells[c]);
    if (threadIdx.x < 1u << side.bits) levels[threadIdx.x] = side.codebook[threadIdx.x];
  }
  __syncthreads();
  find_lost(p, range, first + begin, first + end, tokens);
  bool in_order = true, lost = false;
  if (threadIdx.x < kTile) {
    const int r = threadIdx.x;
    lost = tokens.lost[r / 32] >> r % 32 & 1;
    const KvLocation mine = tokens.at[r], origin = tokens.at[begin];
    if (r >= begin && r < end)
      in_order = !lost && mine.exists() && mine.block == origin.block && mine.row % kTile == r && mine.row - origin.row == r - begin;
  }
  if (work) quantise<D>(own, cells, levels, rows, codes, by_coordinate, row, lane, gains);
  const bool aligned = __syncthreads_and(in_order);
  if (lost) tokens.at[threadIdx.x] = {};
  if (!aligned) __syncthreads();
  if (threadIdx.x < kTile)
    if (const KvLocation& at = tokens.at[threadIdx.x]; at.exists())
      store(row_at(side, at.block, head, at.row).gains, side.gain, 0, gains[threadIdx.x]);
  if (side.lanes)
    write_lanes<D>(side, head, tokens, aligned, begin, end, codes);
  else
    write_rows<D>(side, head, tokens, codes);
}

using Kernel = void (*)(TileParams);

template <int D>
Kernel kernel_for(bool whole, DType dtype) {
  if (!whole) return encode_tiles<float, D>;
  return dtype == DType::bf16 ? encode_tiles<__nv_bfloat16, D> : encode_tiles<__half, D>;
}

bool fits(const EncodeSide& side, const KvFormat& format) {
  const int64_t D = format.head_dim;
  return !format.passthrough && format.rotation == Rotation::srht && format.rotation_group == D && format.gain_group == D &&
         (D == 64 || D == 128 || D == 256) && packs_of(side.x, 4) && table_of(format) != Table::none;
}

// May its rows be operands as they are?
bool whole(const EncodeSide& side) { return side.x.dtype != DType::f32 && !side.mean.data && packs_of(side.x, 8); }

}  // namespace

bool launch_encode_tiles(const Stream& stream, const EncodeParams& params, const KvCache& cache) {
  const bool k = params.k.x.present(), v = params.v.x.present();
  if ((k && !fits(params.k, cache.k.format)) || (v && !fits(params.v, cache.v.format))) return false;
  const auto tile_side = [](const EncodeSide& side, const KvFormat& format) {
    TileSide own{side};
    own.uniform = format.bits >= 7;
    if (format.grid_step) own.step = *format.grid_step;
    return own;
  };
  TileParams p{tile_side(params.k, cache.k.format), tile_side(params.v, cache.v.format), params.positions, params.sequences,
               params.index,                        params.T,                            params.longest};
  p.blocks = static_cast<unsigned>((params.longest + 2 * kTile - 2) / kTile);
  // Sides of one head dim and element type share a launch.
  const bool together = k && v && cache.k.format.head_dim == cache.v.format.head_dim && params.k.x.dtype == params.v.x.dtype &&
                        whole(params.k) == whole(params.v);
  const auto heads = static_cast<unsigned>(cache.heads());
  const auto enqueue = [&](const EncodeSide& side, unsigned heads_k, unsigned heads_all) {
    p.heads = heads_all, p.heads_k = heads_k;
    const int D = side.side.D;
    const Kernel kernel = D == 64    ? kernel_for<64>(whole(side), side.x.dtype)
                          : D == 128 ? kernel_for<128>(whole(side), side.x.dtype)
                                     : kernel_for<256>(whole(side), side.x.dtype);
    launch("kv_encode", stream, params.sequences.count * p.blocks * heads_all, D == 256 ? Rows<256>::kThreads : Rows<128>::kThreads, 0,
           kernel, p);
  };
  if (together) {
    enqueue(params.k, heads, 2 * heads);
  } else {
    if (k) enqueue(params.k, heads, heads);
    if (v) enqueue(params.v, 0, heads);
  }
  return true;
}

}  // namespace weft::cuda
