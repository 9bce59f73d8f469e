// kv_encode on cuda, tiles of 64 tokens of one head and side: rotated by tensor cores and registers, quantised by a lookup table.
//
// A warp takes 8 rows. Lane 4 j + t holds coordinates D / 2 h + 32 i + 8 t + e, e < 8, of row j. The halves h are rows j and j + 8 of an
// mma by H_16, which covers the bits of t and the lowest two bits of e: its fragments keep every number in the lane that loaded it.
// Butterflies in registers cover the other bits. Signs and H_16 are exact in 16 bits; f32 rows are split into three bf16 parts.
// A code is the number of boundaries below z. Bins of equal width contain at most one boundary each, so that a code takes one lookup and
// one comparison. 4-bit codes of a whole tile in lanes order go from registers to the cache as the words stored there, those of V after
// a transpose among the lanes of 8 tokens. All other codes go to shared memory, a byte each, and 64 tokens are packed together.
// Calls of one token are common too, and cold instructions are slow to fetch: loops that need not be unrolled are not.
#include "cuda/common/mma.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/kv/kv_encode_quantise.cuh"
#include "cuda/kv/kv_encode_tokens.cuh"

namespace weft::cuda {
namespace {

using namespace encode;

struct TileParams : TokenRows {
  TileSide k, v;
  // Heads of both sides are numbered together, those of K first.
  unsigned blocks = 0;              // tiles of a sequence
  unsigned heads = 0, heads_k = 0;  // heads of both sides, and of K: 0 where K is not encoded
  unsigned heads_per_block = 1;     // a block finds the places of its tokens once for several heads

  __device__ const TileSide& side(unsigned head) const { return head < heads_k ? k : v; }
  __device__ unsigned within_side(unsigned head) const { return head < heads_k ? head : head - heads_k; }
};

// The tile and the heads of a block.
struct BlockTile {
  unsigned tile, n, first_head, last_head;

  __device__ __forceinline__ explicit BlockTile(const TileParams& p) {
    unsigned item = blockIdx.x;
    const unsigned groups = (p.heads + p.heads_per_block - 1) / p.heads_per_block, slot = item % groups;
    tile = (item /= groups) % p.blocks;
    n = item / p.blocks;
    // V takes longer than K. Neighbouring blocks, which may share a multiprocessor, take one of either where they can; so do blocks of
    // neighbouring tiles.
    const unsigned group = groups % 2 == 0 ? slot / 2 + (slot + tile) % 2 * (groups / 2) : slot;
    first_head = group * p.heads_per_block;
    last_head = min(first_head + p.heads_per_block, p.heads);
  }
};

// Fills the lookup tables and the sign bits of the block's sides. They depend on nothing that other kernels write.
template <int D>
__device__ __forceinline__ void load_tables(const TileParams& p, const BlockTile& block, uint8_t* bins, uint4 (&flips)[2][D / 8]) {
  if (threadIdx.x < kTile) return;
  const bool any_k = block.first_head < p.heads_k;
  const bool any_v = block.last_head > p.heads_k;
#pragma unroll 1
  for (int s = any_k ? 0 : 1; s < (any_v ? 2 : 1); ++s) {
    const TileSide& own = s == 0 ? p.k : p.v;
    const SideView& side = own.encode.side;
    uint8_t* const to = bins + s * kBinBytes<D>;
    if (own.search == Search::short_bins) {
#pragma unroll 1
      for (int i = threadIdx.x - kTile; i < 64 * kCopies<D>; i += kThreads - kTile)
        reinterpret_cast<ShortBin*>(to)[i] = own.bins[own.below[i / kCopies<D>]];
    } else if (own.search == Search::long_bins) {
#pragma unroll 1
      for (int c = threadIdx.x - kTile; c < 256; c += kThreads - kTile)
        reinterpret_cast<LongBin*>(to)[c] = long_bin(side.codebook, side.bits, own.below[c]);
    }
    if (const int piece = static_cast<int>(kThreads - 1 - threadIdx.x); piece < D / 8) {
      const uint32_t signs = own.encode.rotate.signs[piece / 4] >> (piece % 4 * 8);
      const auto flip = [&](int pair) { return (signs >> 2 * pair & 1) << 15 | (signs >> (2 * pair + 1) & 1) << 31; };
      flips[s][piece] = {flip(0), flip(1), flip(2), flip(3)};
    }
  }
}

// Prefetches the rows of the first head into the L2 before pdl_wait(), if sequences are uniform and begin with a tile. Only f32 rows and
// rows that are mma operands as they are consist of whole pieces of 16 bytes.
template <class Element, int D>
__device__ __forceinline__ void prefetch_first_head(const TileParams& p, const BlockTile& block) {
  const StridedView& x = p.side(block.first_head).encode.x;
  if (!p.sequences.cu_seqlens.present() && threadIdx.x < kTile && block.tile * kTile + threadIdx.x < p.longest &&
      (!std::is_same_v<Element, float> || x.dtype == DType::f32)) {
    const int64_t token = block.n * p.longest + block.tile * kTile + threadIdx.x, head = p.within_side(block.first_head);
    const auto bytes = static_cast<uint32_t>(dtype_bytes(x.dtype));
    prefetch_l2(static_cast<const char*>(x.data) + (token * x.strides[0] + head * x.strides[1]) * bytes, D * bytes);
  }
}

// Loads the lane's share of its row, head after head.
template <class Element, int D>
struct RowLoader {
  LoadedRow<Element, D> row;
  int64_t from = 0;

  __device__ __forceinline__ void load(const TileParams& p, const BlockTile& block, unsigned head, int64_t token, bool there) {
    const StridedView& x = p.side(head).encode.x;
    if (head == block.first_head || head == p.heads_k)
      from = token * x.strides[0] + p.within_side(head) * x.strides[1];
    else
      from += x.strides[1];
    row.load(p.side(head).encode, from, there, threadIdx.x % 4);
  }
};

// A block's share of the tile: row r is token first + r of the sequence, for rows [begin, end).
struct TileRows {
  int first, begin, end;
  __device__ bool has(int row) const { return row >= begin && row < end; }
};

// Where the tokens of a block go.
struct Placement {
  bool aligned;  // all rows lie in order in one tile of the cache
  bool lost;     // a later token overwrites the row of this thread
};

// Writes the places of the block's tokens to `tokens`.
__device__ __forceinline__ Placement place_tokens(const TileParams& p, const BlockTile& block, const TokenRange& range,
                                                  const TileRows& rows, const SequencePositions& all, Positions& positions,
                                                  Tokens& tokens) {
  const int own_row = static_cast<int>(threadIdx.x);
  const bool here = rows.has(own_row);
  const bool suspect = positions.suspect(p.index, all, rows.first + rows.end, here && own_row > rows.begin);
  bool in_order = true, lost = false;
  if (own_row < kTile) {
    const KvLocation place = here ? locate(p.index, block.n, positions.own) : KvLocation{};
    tokens.block[own_row] = place.block;
    tokens.row[own_row] = place.row;
    tokens.key[own_row] = here ? row_key(p.index, positions.own) : -1;
    tokens.token[own_row] = here ? rows.first + own_row : -1;
    if (own_row < 2) tokens.lost[own_row] = 0;
    in_order = !here || (place.block >= 0 && place.row % kTile == own_row && positions.own - positions.low == own_row - rows.begin);
  }
  // Except in a ring, consecutive positions are consecutive rows: pages are whole tiles.
  bool aligned = __syncthreads_and(in_order && !suspect && p.index.kind != CacheKind::ring);
  if (!aligned) {
    if (__syncthreads_or(suspect)) find_lost(p, range, rows.first + rows.begin, tokens);
    lost = own_row < kTile && (tokens.lost[own_row / 32] >> own_row % 32 & 1);
    in_order =
        !here || (!lost && tokens.block[own_row] >= 0 && tokens.block[own_row] == tokens.block[rows.begin] &&
                  tokens.row[own_row] % kTile == own_row && tokens.row[own_row] - tokens.row[rows.begin] == own_row - rows.begin);
    aligned = __syncthreads_and(in_order);
  }
  return {aligned, lost};
}

// Encodes a whole tile of the cache from registers, head after head.
template <class Element, int D>
__device__ __forceinline__ void encode_whole_tile(const TileParams& p, const BlockTile& block, int64_t token, const Tokens& tokens,
                                                  uint8_t* bins, const uint4 (&flips)[2][D / 8], RowLoader<Element, D>& loader) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint8_t* cache_tile = nullptr;
#pragma unroll 1
  for (unsigned head = block.first_head; head < block.last_head; ++head) {
    const bool k = head < p.heads_k;
    const TileSide& own = p.side(head);
    const SideView& side = own.encode.side;
    Row<D> row;
    if (!kShortRow<D>) loader.load(p, block, head, token, true);
    rotate<Element, D>(own.encode, flips[k ? 0 : 1], loader.row, p.within_side(head), lane, row);
    if (kShortRow<D> && head + 1 < block.last_head) loader.load(p, block, head + 1, token, true);  // while this head is quantised
    cache_tile = head == block.first_head || head == p.heads_k
                     ? row_at(side, tokens.block[0], p.within_side(head), tokens.row[0]).codes
                     : cache_tile + side.codes_head;
    encode_words<D>(own, shared_address(bins + (k ? 0 : kBinBytes<D>)), row, cache_tile, warp, lane);
  }
}

// Shared memory through which codes of one head pass.
template <int D>
struct HeadStage {
  RowAt* at;  // [kTile] codes null: not written
  uint8_t* codes;
  float* gains;  // [kTile]
};

template <int D>
__device__ __forceinline__ void quantise_row(const TileSide& own, uint32_t bins, Row<D>& row, const HeadStage<D>& stage, int r) {
  const int lane = threadIdx.x % 32;
  if (own.search == Search::uniform)
    encode_bytes<Search::uniform, D>(own, bins, row, stage.codes, r, lane, stage.gains);
  else if (own.search == Search::short_bins)
    encode_bytes<Search::short_bins, D>(own, bins, row, stage.codes, r, lane, stage.gains);
  else
    encode_bytes<Search::long_bins, D>(own, bins, row, stage.codes, r, lane, stage.gains);
}

template <int D>
__device__ __forceinline__ void write_head(const SideView& side, const HeadStage<D>& stage, bool aligned, const TileRows& rows) {
  if (threadIdx.x < kTile && stage.at[threadIdx.x].codes)
    store(stage.at[threadIdx.x].gains, side.gain, 0, stage.gains[threadIdx.x]);
  if (side.lanes)
    write_lanes<D>(side, stage.at, aligned, rows.begin, rows.end, stage.codes);
  else
    write_rows<D>(side, stage.at, stage.codes);
}

template <class Element, int D>
__global__ void __launch_bounds__(kThreads, 2) encode_tiles(const __grid_constant__ TileParams p) {
  __shared__ Tokens tokens;
  __shared__ RowAt at[2][kTile];  // of this head and the next
  __shared__ __align__(16) uint8_t codes[2][kTile * kCodesRow<D>];
  __shared__ __align__(16) uint8_t bins_room[kBinsRoom<D>];
  __shared__ __align__(16) uint4 flips[2][D / 8];
  __shared__ float gains[2][kTile];
  uint8_t* const bins = bins_in<D>(bins_room);  // of K and V
  const BlockTile block(p);
  load_tables<D>(p, block, bins, flips);
  prefetch_first_head<Element, D>(p, block);
  pdl_wait();
  pdl_launch_dependents();
  const TokenRange range = tokens_of(p.sequences, block.n, p.T, p.longest);
  const int length = static_cast<int>(range.length());
  if (length == 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = 8 * warp + lane / 4;
  RowLoader<Element, D> loader;
  TileRows rows;
  // Where tokens share words, a block takes the tokens of one tile of the cache, assuming consecutive positions from the sequence's first
  // one. The loads below do not wait for that position: they assume that it begins a tile, and are repeated where it does not.
  const bool lanes = p.k.encode.side.lanes || p.v.encode.side.lanes;
  const SequencePositions all(p, range);
  Positions positions;
#pragma unroll 1
  for (int shift = 0;;) {
    rows.first = static_cast<int>(block.tile) * kTile - shift;
    rows.begin = rows.first < 0 ? -rows.first : 0, rows.end = length - rows.first < kTile ? length - rows.first : kTile;
    const int first_position = lanes ? all.at(0) : 0;
    if (rows.begin < rows.end) {
      positions.load(all, rows.first + rows.begin, rows.first + rows.end, rows.first + static_cast<int>(threadIdx.x));
      if (kShortRow<D>) loader.load(p, block, block.first_head, range.begin + rows.first + r, rows.has(r));
    }
    const int wanted = first_position > 0 ? first_position % kTile : 0;
    if (shift == wanted) break;
    shift = wanted;
  }
  if (rows.begin >= rows.end) return;

  const bool work = 8 * warp < rows.end && 8 * warp + 8 > rows.begin, there = rows.has(r);
  const int64_t token = range.begin + rows.first + r;
  const Placement placement = place_tokens(p, block, range, rows, all, positions, tokens);
  const bool direct = (p.k.direct || block.first_head >= p.heads_k) && (p.v.direct || block.last_head <= p.heads_k);
  if (placement.aligned && direct && rows.begin == 0 && rows.end == kTile)
    return encode_whole_tile<Element, D>(p, block, token, tokens, bins, flips, loader);
#pragma unroll 1
  for (unsigned head = block.first_head; head < block.last_head; ++head) {
    const TileSide& own = p.side(head);
    const SideView& side = own.encode.side;
    const int s = head < p.heads_k ? 0 : 1, slot = (head - block.first_head) & 1;
    const HeadStage<D> stage{at[slot], codes[slot], gains[slot]};
    Row<D> row;
    if (!kShortRow<D>) loader.load(p, block, head, token, there);
    if (work) rotate<Element, D>(own.encode, flips[s], loader.row, p.within_side(head), lane, row);
    if (kShortRow<D> && head + 1 < block.last_head) loader.load(p, block, head + 1, token, there);  // while this head is quantised
    if (threadIdx.x < kTile)
      stage.at[threadIdx.x] = tokens.block[threadIdx.x] >= 0 && !placement.lost
                                  ? row_at(side, tokens.block[threadIdx.x], p.within_side(head), tokens.row[threadIdx.x])
                                  : RowAt{};
    if (work) quantise_row<D>(own, shared_address(bins + s * kBinBytes<D>), row, stage, r);
    __syncthreads();
    write_head<D>(side, stage, placement.aligned, rows);
  }
}

using Kernel = void (*)(TileParams);

template <int D>
Kernel kernel_for(bool operand, DType dtype) {
  if (!operand) return encode_tiles<float, D>;
  return dtype == DType::bf16 ? encode_tiles<__nv_bfloat16, D> : encode_tiles<__half, D>;
}

bool fits(const Tensor& x, const KvFormat& format) {
  const int64_t D = format.head_dim;
  return !format.passthrough && format.rotation == Rotation::srht && format.rotation_group == D && format.gain_group == D &&
         (D == 64 || D == 128 || D == 256) && packs_of(x, 4) && search_of(format) != Search::none;
}

// Are its rows mma operands as they are?
bool is_operand(const EncodeSide& side, const Tensor& x) { return x.dtype != DType::f32 && !side.mean.data && packs_of(x, 8); }

}  // namespace

bool launch_encode_tiles(const Stream& stream, const EncodeParams& params, const KvEncodeArgs& args) {
  const KvCache& cache = args.cache;
  const bool k = args.k.present(), v = args.v.present();
  if ((k && !fits(args.k, cache.k.format)) || (v && !fits(args.v, cache.v.format))) return false;
  const auto tile_side = [](const EncodeSide& side, const KvFormat& format) {
    TileSide own{side};
    own.search = format.passthrough ? Search::none : search_of(format);
    own.direct = side.side.lanes && format.bits == 4 && side.rule == GainRule::unbiased && format.gain_dtype == DType::f16;
    if (format.grid_step) own.step = *format.grid_step, own.inverse_step = 1 / own.step;
    if (own.search == Search::short_bins || own.search == Search::long_bins)
      for (int k = 0; k < bins_of(own.search); ++k)
        own.below[k] = static_cast<uint8_t>(BinBoundaries(format.codebook.data(), format.bits, k).below);
    for (int i = 0; own.search == Search::short_bins && i < 1 << format.bits; ++i)
      own.bins[i] = short_bin(format.codebook.data(), format.bits, i);
    return own;
  };
  TileParams p{params, tile_side(params.k, cache.k.format), tile_side(params.v, cache.v.format)};
  p.blocks = static_cast<unsigned>((params.longest + 2 * kTile - 2) / kTile);
  // Sides of one head dim and element type share a launch.
  const bool together = k && v && cache.k.format.head_dim == cache.v.format.head_dim && args.k.dtype == args.v.dtype &&
                        is_operand(params.k, args.k) == is_operand(params.v, args.v);
  const auto heads = static_cast<unsigned>(cache.heads());
  const auto enqueue = [&](const EncodeSide& side, const Tensor& x, unsigned heads_k, unsigned heads_all) {
    p.heads = heads_all, p.heads_k = heads_k;
    const int D = side.side.D;
    const Kernel kernel = D == 64    ? kernel_for<64>(is_operand(side, x), x.dtype)
                          : D == 128 ? kernel_for<128>(is_operand(side, x), x.dtype)
                                     : kernel_for<256>(is_operand(side, x), x.dtype);
    // A block takes several heads when there are more blocks than fit at once, two per multiprocessor.
    const int64_t tiles = params.sequences.count * p.blocks, room = int64_t{2} * facts_of(stream).multiprocessors;
    p.heads_per_block = static_cast<unsigned>(std::clamp<int64_t>(ceil_div(tiles * heads_all, room), 1, heads_all));
    launch_pdl("kv_encode", stream, tiles * ceil_div(heads_all, p.heads_per_block), kThreads, 0, kernel, p);
  };
  if (together) {
    enqueue(params.k, args.k, heads, 2 * heads);
  } else {
    if (k) enqueue(params.k, args.k, heads, heads);
    if (v) enqueue(params.v, args.v, 0, heads);
  }
  return true;
}

}  // namespace weft::cuda
