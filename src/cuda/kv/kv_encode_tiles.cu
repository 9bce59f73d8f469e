// kv_encode on cuda, tiles of 64 tokens of one head and side: rotated by tensor cores and registers, coded by a table of cells.
//
// A warp takes 8 rows. Lane 4 j + t holds coordinates D / 2 h + 32 i + 8 t + e, e < 8, of row j; the halves h are rows j and j + 8 of a
// product by H_16, which covers the bits of t and the lowest two of e: its operands keep every number in the lane that loaded it.
// Butterflies in registers cover the other bits. Signs and H_16 are exact in 16 bits; f32 rows are summed of three parts of 8 bits each.
// A code is the number of boundaries below z. Cells of equal width have at most one boundary inside, so that a code is what the cell
// says, and one comparison. Codes of 4 bits for a whole tile in lanes order leave the lanes as the words they are stored in, those of V
// after a transposition among the lanes of 8 tokens; all others go to shared memory, a byte each, and are packed from there, 64 tokens
// together.
// One token is the common case, too, and instructions take long to fetch: straight code is kept short.
#include "cuda/common/mma.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/kv/kv_encode_cells.cuh"
#include "cuda/kv/kv_encode_rotate.cuh"
#include "cuda/kv/kv_encode_tokens.cuh"
#include "cuda/kv/kv_encode_write.cuh"

namespace weft::cuda {
namespace {

using namespace encode;

struct TileSide {
  EncodeSide encode;
  Table table = Table::none;
  bool direct = false;               // codes of a whole tile need no shared memory
  float step = 1, inverse_step = 1;  // uniform
  uint8_t below[256] = {};           // cells: boundaries below each
  ShortCell cells[16] = {};          // the short ones, by boundaries below
};

struct TileParams : TokenRows {
  TileSide k, v;
  unsigned blocks = 0, heads = 0,
           heads_k = 0;  // blocks: of a sequence; heads: of both sides; heads_k: of k, 0 when it is left alone
  unsigned each = 1;     // heads of a block, which share what is found out about its tokens
};

__device__ inline float sum_four(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// What the gain of a row is made of: sums over `unit` times its numbers times sqrt(D).
struct RowSums {
  float yy, yc, unit;
  bool tiny;
};

// As stored_gain() has it, for sums of a row whose gain is yy / yc: quicker, to a few units in the last place.
__device__ inline float stored_quotient(const EncodeSide& p, const RowSums& sums, float inverse_root) {
  const float gain = !sums.tiny && sums.yc > 0 ? __fdividef(sums.yy, sums.yc * sums.unit) * (inverse_root * p.unit) : 0.0f;
  return !isfinite(sums.yy) ? NAN : fminf(gain, p.most);
}

// Codes of the lane's share of a row: put(h, i, e, four of them as bytes, whose upper bits are of no meaning).
template <Table Kind, int D, class Put>
__device__ RowSums quantise(const TileSide& p, uint32_t cells, Row<D>& row, int lane, Put&& put) {
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
    return sum_four((squares[0] + squares[1]) + (squares[2] + squares[3]));
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
  // Numbers are those of y times sqrt(D), which z does not see and the gain takes back.
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
  if constexpr (Kind == Table::uniform) {
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
    // The number of a cell is read off the bits of a float whose last place, of a cell, is what its address is counted in.
    constexpr bool kShort = Kind == Table::short_cells;
    constexpr int kCells = cells_of(Kind), kApart = kShort ? kCopies<D> * static_cast<int>(sizeof(ShortCell)) : sizeof(LongCell);
    constexpr float kOwn = static_cast<float>(kCells) - kSlack, kMagic = 0x1p23f / static_cast<float>(kApart);
    constexpr uint32_t kCellMask = (kCells - 1) * kApart;
    const uint32_t copy = cells + (kShort ? lane % kCopies<D> * sizeof(ShortCell) : 0);
    // Cells of four numbers are on their way while those of the four before are compared.
    [[maybe_unused]] float boundary[2][4];
    float low[2][4], high[2][4];
    const float near = factor * (0.5f / kReach);  // as near as the slack of cells allows
    [[maybe_unused]] const float twice = 2 * factor;
    const auto look_up = [&](int four) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float at = fmaf(__saturatef(fmaf(number(four, e), near, 0.5f)), kOwn, kMagic);
        const uint32_t cell = in_cells<D>(__float_as_uint(at) & kCellMask, copy);
        [[maybe_unused]] uint32_t unused;
        if constexpr (kShort)
          asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=f"(low[four % 2][e]), "=f"(high[four % 2][e]) : "r"(cell));
        else
          asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                       : "=f"(boundary[four % 2][e]), "=f"(low[four % 2][e]), "=f"(high[four % 2][e]), "=r"(unused)
                       : "r"(cell));
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
  return {yy, sum_four(yc[0] + yc[1]), unit, tiny};
}

// The same to shared memory, for row `r`, and its gain.
template <Table Kind, int D>
__device__ void encode_bytes(const TileSide& p, uint32_t cells, Row<D>& row, uint8_t* codes, int r, int lane, float* gains) {
  const EncodeSide& side = p.encode;
  const int bits = side.side.bits, t = lane % 4;
  const uint32_t code_mask = ((1u << bits) - 1) * 0x01010101u;
  const RowSums sums = quantise<Kind, D>(p, cells, row, lane, [&](int h, int i, int e, uint32_t bytes) {
    *reinterpret_cast<uint32_t*>(codes + r * kCodesRow<D> + D / 2 * h + 32 * i + 8 * t + e) = bytes & code_mask;
  });
  float cc = 0;
  if (needs_levels(side.rule)) {
    __syncwarp();
#pragma unroll 1
    for (int c = t; c < D; c += 4) {
      const auto code = static_cast<float>(codes[r * kCodesRow<D> + c]);
      const float level = Kind == Table::uniform ? (code - static_cast<float>(1 << (bits - 1)) + 0.5f) * p.step
                                                 : side.side.codebook[static_cast<int>(code)];
      cc = fmaf(level, level, cc);
    }
    cc = sum_four(cc);
  }
  // Which path a row takes depends on its neighbours; its gain may not.
  if (t == 0)
    gains[r] = p.direct ? stored_quotient(side, sums, rsqrtf(static_cast<float>(D)))
                        : stored_gain(side, sums.yy, cc, sums.yc, D, sums.tiny, sums.unit * sqrtf(static_cast<float>(D)));
}

// The words of a whole tile in lanes order, codes of 4 bits, by a warp for its 8 tokens: from the lanes to where they are stored.
template <int D>
__device__ void encode_words(const TileSide& p, uint32_t cells, Row<D>& row, uint8_t* tile, int warp, int lane) {
  const EncodeSide& side = p.encode;
  const int j = lane / 4, t = lane % 4;
  uint32_t words[2][D / 64];
  const RowSums sums = quantise<Table::short_cells, D>(p, cells, row, lane, [&](int h, int i, int e, uint32_t bytes) {
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
  // Words of K lie token by token, those of V coordinate by coordinate.
  auto* to = reinterpret_cast<uint32_t*>(tile) + (k ? t * kTile + 8 * warp + j : warp * D + 8 * t + j);
  const int half = k ? D / 16 * kTile : D / 2, piece = k ? 4 * kTile : 32;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int i = 0; i < D / 64; ++i) to[h * half + i * piece] = words[h][i];
  if (t == 0)
    reinterpret_cast<__half*>(tile + kTile * D / 2)[8 * warp + j] = __float2half_rn(stored_quotient(side, sums, inverse_root));
}

template <class Element, int D>
__global__ void __launch_bounds__(kThreads, 2) encode_tiles(const __grid_constant__ TileParams p) {
  __shared__ Tokens tokens;
  __shared__ RowAt at[2][kTile];  // codes null: not written. Of this head and the next
  __shared__ __align__(16) uint8_t codes[2][kTile * kCodesRow<D>];
  __shared__ __align__(16) uint8_t cell_room[kCellsRoom<D>];
  __shared__ __align__(16) uint4 flips[2][D / 8];
  __shared__ float gains[2][kTile];
  uint8_t* const cells = cells_in<D>(cell_room);  // of K and V, copies of a cell side by side
  unsigned item = blockIdx.x;
  const unsigned groups = (p.heads + p.each - 1) / p.each, turn = item % groups, tile = (item /= groups) % p.blocks,
                 n = item / p.blocks;
  // V takes longer than K: neighbours, of which a multiprocessor may get two, and those of the next tile have one of either where they can.
  const unsigned group = groups % 2 == 0 ? turn / 2 + (turn + tile) % 2 * (groups / 2) : turn;
  const unsigned first_head = group * p.each, last_head = min(first_head + p.each, p.heads);
  const auto side_of = [&](unsigned both) -> const TileSide& { return both < p.heads_k ? p.k : p.v; };
  // Tables first: they depend on nothing that other kernels write.
  if (threadIdx.x >= kTile) {
    const bool any_k = first_head < p.heads_k;
    const bool any_v = last_head > p.heads_k;
#pragma unroll 1
    for (int s = any_k ? 0 : 1; s < (any_v ? 2 : 1); ++s) {
      const TileSide& own = s == 0 ? p.k : p.v;
      const SideView& side = own.encode.side;
      uint8_t* const to = cells + s * kCellBytes<D>;
      if (own.table == Table::short_cells) {
#pragma unroll 1
        for (int i = threadIdx.x - kTile; i < 64 * kCopies<D>; i += kThreads - kTile)
          reinterpret_cast<ShortCell*>(to)[i] = own.cells[own.below[i / kCopies<D>]];
      } else if (own.table == Table::long_cells) {
#pragma unroll 1
        for (int c = threadIdx.x - kTile; c < 256; c += kThreads - kTile)
          reinterpret_cast<LongCell*>(to)[c] = long_cell(side.codebook, side.bits, own.below[c]);
      }
      if (const int piece = static_cast<int>(kThreads - 1 - threadIdx.x); piece < D / 8) {
        const uint32_t signs = own.encode.rotate.signs[piece / 4] >> (piece % 4 * 8);
        const auto flip = [&](int pair) { return (signs >> 2 * pair & 1) << 15 | (signs >> (2 * pair + 1) & 1) << 31; };
        flips[s][piece] = {flip(0), flip(1), flip(2), flip(3)};
      }
    }
  }
  // Rows of the first head, if sequences are alike and begin with a tile, arrive while this waits. Only rows of f32 and those that are
  // operands as they are lie in whole pieces of 16 bytes.
  if (!p.sequences.cu_seqlens.present() && threadIdx.x < kTile && tile * kTile + threadIdx.x < p.longest &&
      (!std::is_same_v<Element, float> || side_of(first_head).encode.x.dtype == DType::f32)) {
    const bool k = first_head < p.heads_k;
    const Tensor& x = side_of(first_head).encode.x;
    const int64_t token = n * p.longest + tile * kTile + threadIdx.x, head = k ? first_head : first_head - p.heads_k;
    const auto bytes = static_cast<uint32_t>(dtype_bytes(x.dtype));
    prefetch_l2(static_cast<const char*>(x.data) + (token * x.strides[0] + head * x.strides[1]) * bytes, D * bytes);
  }
  pdl_wait();
  pdl_launch_dependents();
  const TokenRange range = tokens_of(p.sequences, n, p.T, p.longest);
  const int length = static_cast<int>(range.length());
  if (length == 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = 8 * warp + lane / 4, own_row = static_cast<int>(threadIdx.x);
  LoadedRow<Element, D> loaded;
  int64_t from = 0;
  int first, begin, end;                                      // token of row 0; rows that are tokens of this block
  const auto load_head = [&](unsigned both, bool is_there) {  // of its side; heads come in turn
    const Tensor& x = side_of(both).encode.x;
    if (both == first_head || both == p.heads_k)
      from = (range.begin + first + r) * x.strides[0] + (both < p.heads_k ? both : both - p.heads_k) * x.strides[1];
    else
      from += x.strides[1];
    loaded.load(side_of(both).encode, from, is_there, lane % 4);
  };
  // Where tokens share words, a block takes those of one tile of the cache, if positions are what they seem from the first. That one is
  // on its way with all that is wanted if it is the first of a tile; if it is not, all is loaded again.
  const bool lanes = p.k.encode.side.lanes || p.v.encode.side.lanes;
  const SequencePositions all(p, range);
  Positions positions;
#pragma unroll 1
  for (int shift = 0;;) {
    first = static_cast<int>(tile) * kTile - shift;
    begin = first < 0 ? -first : 0, end = length - first < kTile ? length - first : kTile;
    const int first_position = lanes ? all.at(0) : 0;
    if (begin < end) {
      positions.load(all, first + begin, first + end, first + own_row);
      if (kRoomy<D>) load_head(first_head, r >= begin && r < end);
    }
    const int wanted = first_position > 0 ? first_position % kTile : 0;
    if (shift == wanted) break;
    shift = wanted;
  }
  if (begin >= end) return;

  const bool work = 8 * warp < end && 8 * warp + 8 > begin, there = r >= begin && r < end;
  const bool here = own_row >= begin && own_row < end;
  const bool suspect = positions.suspect(p.index, all, first + end, here && own_row > begin);
  bool in_order = true, lost = false;
  if (own_row < kTile) {
    const KvLocation place = here ? locate(p.index, n, positions.own) : KvLocation{};
    tokens.block[own_row] = place.block;
    tokens.row[own_row] = place.row;
    tokens.key[own_row] = here ? row_key(p.index, positions.own) : -1;
    tokens.token[own_row] = here ? first + own_row : -1;
    if (own_row < 2) tokens.lost[own_row] = 0;
    in_order = !here || (place.block >= 0 && place.row % kTile == own_row && positions.own - positions.low == own_row - begin);
  }
  // Positions in a row are rows in a row, but for those of a ring: pages are whole tiles.
  bool aligned = __syncthreads_and(in_order && !suspect && p.index.kind != CacheKind::ring);
  if (!aligned) {
    if (__syncthreads_or(suspect)) find_lost(p, range, first + begin, tokens);
    lost = own_row < kTile && (tokens.lost[own_row / 32] >> own_row % 32 & 1);
    in_order = !here || (!lost && tokens.block[own_row] >= 0 && tokens.block[own_row] == tokens.block[begin] &&
                         tokens.row[own_row] % kTile == own_row && tokens.row[own_row] - tokens.row[begin] == own_row - begin);
    aligned = __syncthreads_and(in_order);
  }
  const bool direct = (p.k.direct || first_head >= p.heads_k) && (p.v.direct || last_head <= p.heads_k);
  if (aligned && direct && begin == 0 && end == kTile) {
    uint8_t* cache_tile = nullptr;
#pragma unroll 1
    for (unsigned both = first_head; both < last_head; ++both) {
      const bool k = both < p.heads_k;
      const TileSide& own = side_of(both);
      const SideView& side = own.encode.side;
      Row<D> row;
      if (!kRoomy<D>) load_head(both, true);
      rotate<Element, D>(own.encode, flips[k ? 0 : 1], loaded, k ? both : both - p.heads_k, lane, row);
      if (kRoomy<D> && both + 1 < last_head) load_head(both + 1, true);  // while this one is coded
      cache_tile = both == first_head || both == p.heads_k
                       ? row_at(side, tokens.block[0], k ? both : both - p.heads_k, tokens.row[0]).codes
                       : cache_tile + side.codes_head;
      encode_words<D>(own, shared_address(cells + (k ? 0 : kCellBytes<D>)), row, cache_tile, warp, lane);
    }
    return;
  }
#pragma unroll 1
  for (unsigned both = first_head; both < last_head; ++both) {
    const bool k = both < p.heads_k;
    const TileSide& own = side_of(both);
    const SideView& side = own.encode.side;
    const int s = k ? 0 : 1, slot = (both - first_head) & 1;
    const int64_t head = k ? both : both - p.heads_k;
    Row<D> row;
    if (!kRoomy<D>) load_head(both, there);
    if (work) rotate<Element, D>(own.encode, flips[s], loaded, head, lane, row);
    if (kRoomy<D> && both + 1 < last_head) load_head(both + 1, there);  // while this one is coded
    const uint32_t own_cells = shared_address(cells + s * kCellBytes<D>);
    if (threadIdx.x < kTile)
      at[slot][threadIdx.x] = tokens.block[threadIdx.x] >= 0 && !lost
                                  ? row_at(side, tokens.block[threadIdx.x], head, tokens.row[threadIdx.x])
                                  : RowAt{};
    if (work) {
      if (own.table == Table::uniform)
        encode_bytes<Table::uniform, D>(own, own_cells, row, codes[slot], r, lane, gains[slot]);
      else if (own.table == Table::short_cells)
        encode_bytes<Table::short_cells, D>(own, own_cells, row, codes[slot], r, lane, gains[slot]);
      else
        encode_bytes<Table::long_cells, D>(own, own_cells, row, codes[slot], r, lane, gains[slot]);
    }
    __syncthreads();
    if (threadIdx.x < kTile && at[slot][threadIdx.x].codes)
      store(at[slot][threadIdx.x].gains, side.gain, 0, gains[slot][threadIdx.x]);
    if (side.lanes)
      write_lanes<D>(side, at[slot], aligned, begin, end, codes[slot]);
    else
      write_rows<D>(side, at[slot], codes[slot]);
  }
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
    own.table = format.passthrough ? Table::none : table_of(format);
    own.direct = side.side.lanes && format.bits == 4 && side.rule == GainRule::unbiased && format.gain_dtype == DType::f16;
    if (format.grid_step) own.step = *format.grid_step, own.inverse_step = 1 / own.step;
    if (own.table == Table::short_cells || own.table == Table::long_cells)
      for (int k = 0; k < cells_of(own.table); ++k)
        own.below[k] = static_cast<uint8_t>(CellBoundaries(format.codebook.data(), format.bits, k).below);
    for (int i = 0; own.table == Table::short_cells && i < 1 << format.bits; ++i)
      own.cells[i] = short_cell(format.codebook.data(), format.bits, i);
    return own;
  };
  TileParams p{params, tile_side(params.k, cache.k.format), tile_side(params.v, cache.v.format)};
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
    // A block takes several heads when there are more blocks than fit at once, two on a multiprocessor.
    const int64_t tiles = params.sequences.count * p.blocks, room = int64_t{2} * facts_of(stream).multiprocessors;
    p.each = static_cast<unsigned>(std::clamp<int64_t>(ceil_div(tiles * heads_all, room), 1, heads_all));
    launch_pdl("kv_encode", stream, tiles * ceil_div(heads_all, p.each), kThreads, 0, kernel, p);
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
