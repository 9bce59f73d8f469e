// Kernels before the dense prefill kernel: keys and values as f16 in scratch.
#include "cuda/attention/prefill_dense_prepare.h"

#include <cmath>

#include "cuda/attention/coded_tile.cuh"
#include "cuda/attention/prefill_dense.cuh"
#include "cuda/common/pdl.cuh"

namespace weft::cuda {
namespace {

using namespace dense;
using prefill::exponent_above;

constexpr int kWarps = 8;
constexpr uint32_t kAll = 0xffffffffu;

struct CacheParams {
  QueryParams queries;
  SideView k, v;
  float k_grid = 0, v_grid = 0;  // steps of the grids; 0: levels are used as they are
  uint8_t *keys = nullptr, *values = nullptr, *records = nullptr;
  int first_pair = 0, tiles = 0, least_rows = 0, D = 0, tile = 0;
  float unit = 1;
};

constexpr int kMostTile = tile_tokens(64), kUnits = kMostTile / kPageUnit;  // kUnits: of 16 tokens

// The tile of a block, and what its warps share.
struct SharedTile {
  int block[kUnits], row[kUnits];         // of the first token of 16, in the cache; block < 0: it does not exist
  alignas(4) uint16_t v_gain[kMostTile];  // relative to the power of two of the tile
  bool bad[kMostTile];                    // a gain or a number of the value is not finite
  int top[kWarps];
};
struct TileWork {
  int64_t n, hk, at;  // at: the tile's number in scratch
  int live;           // tokens of the tile that exist, if their pages do
};

// Finds the tile and its rows. Returns false if there is nothing to do.
__device__ inline bool find_tile(const CacheParams& p, SharedTile& share, TileWork& work) {
  const QueryParams& q = p.queries;
  const unsigned heads = static_cast<unsigned>(q.Hk), tiles = static_cast<unsigned>(p.tiles), own = blockIdx.x / tiles,
                 pair = own + static_cast<unsigned>(p.first_pair);
  work = {pair / heads, pair % heads, static_cast<int64_t>(blockIdx.x), 0};
  const TokenRange range = tokens_of(q.queries.sequences, work.n, q.T, q.longest);
  if (range.length() * q.group < p.least_rows) return false;
  const CacheUnits<kPageUnit> at(q, BlockItem(0, 0, pair % heads, pair / heads));
  const int64_t tile = first_visible_tile(q, range, at.appended, p.tile) + blockIdx.x % tiles, first = tile * p.tile;
  if (first >= at.live || at.slot < 0) return false;
  work.live = static_cast<int>(min(at.live - first, int64_t{p.tile}));
  if (const int unit = static_cast<int>(threadIdx.x); unit < p.tile / kPageUnit) {
    const int64_t row = first + unit * kPageUnit;
    share.block[unit] = row < at.live ? static_cast<int>(at.block_of(q, static_cast<int>(row / kPageUnit))) : -1;
    share.row[unit] = static_cast<int>(at.paged ? row % q.index.rows : row);
  }
  return true;
}

__device__ inline bool token_exists(const SharedTile& share, const TileWork& work, int token) {
  return token < work.live && share.block[token / kPageUnit] >= 0;
}
__device__ inline RowAt token_at(const SharedTile& share, const SideView& side, const TileWork& work, int token) {
  return row_at(side, share.block[token / kPageUnit], work.hk, share.row[token / kPageUnit] + token % kPageUnit);
}

// n + 1/2 of a level on a grid, or the level itself.
__device__ inline float grid_level(const SideView& side, float step, int code) {
  const float level = side.codebook[code];
  return step > 0 ? floorf(level / step) + 0.5f : level;
}

// The largest number of a block's threads.
__device__ inline int max_block(SharedTile& share, int x) {
  x = __reduce_max_sync(kAll, x);
  if (threadIdx.x % 32 == 0) share.top[threadIdx.x / 32] = x;
  __syncthreads();
  for (const int other : share.top) x = max(x, other);
  return x;
}

// --- sides of coded tiles, word by word -----------------------------------------------------------------------------------------

// 16 codes of 2 to 4 bits: `table` has pairs of levels for bytes of two codes. x: the levels, in order.
template <int Bits>
__device__ __forceinline__ void levels_of(const uint32_t* table, uint32_t first, uint32_t second, uint32_t (&x)[8]) {
  uint32_t a[4], b[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a[i] = table[first >> 8 * i & 255];
    b[i] = table[second >> 8 * i & 255];
  }
  // Words of 4 bits hold eight codes each; the others have codes 0..3 and 8..11 in the first word, 4..7 and 12..15 in the second.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t a_low = permute(a[2 * i], a[2 * i + 1], 0x5410u), a_high = permute(a[2 * i], a[2 * i + 1], 0x7632u);
    const uint32_t b_low = permute(b[2 * i], b[2 * i + 1], 0x5410u), b_high = permute(b[2 * i], b[2 * i + 1], 0x7632u);
    x[i] = a_low;
    x[2 + i] = Bits == 4 ? a_high : b_low;
    x[4 + i] = Bits == 4 ? b_low : a_high;
    x[6 + i] = b_high;
  }
}

// The levels of 16 codes in a lane of a tile. `words`: the tile; `stride`: words of a vector group; `lane`: the word of a group;
// `group`: of 16 codes; `narrow`: words before the plane of one bit.
template <int Bits>
__device__ __forceinline__ void levels_at(const uint32_t* table, const uint32_t* words, int stride, int lane, int group, int narrow,
                                          uint32_t (&x)[8]) {
  if constexpr (Bits == 8) {  // bytes are n + 128
    const __half2 half = __half2half2(__ushort_as_half(0x3800));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      widen(words[(4 * group + i) * stride + lane], x[2 * i], x[2 * i + 1]);
#pragma unroll
      for (int j = 2 * i; j < 2 * i + 2; ++j) {
        const __half2 y = __hadd2(*reinterpret_cast<const __half2*>(&x[j]), half);
        x[j] = *reinterpret_cast<const uint32_t*>(&y);
      }
    }
  } else if constexpr (Bits == 4) {
    levels_of<4>(table, words[2 * group * stride + lane], words[(2 * group + 1) * stride + lane], x);
  } else {
    const uint32_t word = words[group * stride + lane],
                   more = Bits == 3 ? words[narrow + group / 2 * stride + lane] >> (group % 2 * 4) : 0;
    levels_of<Bits>(table, nibbles<Bits, 0>(word, more), nibbles<Bits, 1>(word, more), x);
  }
}

__device__ inline const uint32_t* tile_words(const SharedTile& share, const SideView& side, const TileWork& work, int unit) {
  return reinterpret_cast<const uint32_t*>(row_at(side, share.block[unit], work.hk, share.row[unit]).codes);
}

// A warp decodes keys of 16 tokens and 64 coordinates: a lane has a token of 8 and 16 coordinates. Lanes exchange halves, so that two
// lanes write 32 contiguous bytes.
template <int Bits>
__device__ __forceinline__ void decode_keys(const CacheParams& p, const SharedTile& share, const TileWork& work,
                                            const uint32_t* table, int unit, int panel, int lane) {
  const bool exists = share.block[unit] >= 0;
  const uint32_t* const words = exists ? tile_words(share, p.k, work, unit) : nullptr;
  const int odd = lane & 1, group = panel * 4 + lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = unit * kPageUnit + half * 8 + lane / 4,
              inside = (share.row[unit] + half * 8 + lane / 4) % static_cast<int>(kTileTokens);
    uint32_t x[8] = {};
    if (exists)
      levels_at<Bits>(table, words, static_cast<int>(kTileTokens), inside, group, static_cast<int>(kTileTokens) * p.D * 2 / 32, x);
    uint32_t other[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) other[i] = __shfl_xor_sync(kAll, odd ? x[i] : x[4 + i], 1);
    uint8_t* const row = p.keys + ((work.at * p.tile + token) * p.D + (group & ~1) * 16) * 2 + odd * 16;
    *reinterpret_cast<uint4*>(row) = odd ? uint4{other[0], other[1], other[2], other[3]} : uint4{x[0], x[1], x[2], x[3]};
    *reinterpret_cast<uint4*>(row + 32) = odd ? uint4{x[4], x[5], x[6], x[7]} : uint4{other[0], other[1], other[2], other[3]};
  }
}

// A warp decodes values of 16 tokens and 64 coordinates: a lane has all tokens of two coordinates.
template <int Bits>
__device__ __forceinline__ void decode_values(const CacheParams& p, const SharedTile& share, const TileWork& work,
                                              const uint32_t* table, int unit, int panel, int lane) {
  uint32_t x[2][8] = {};
  const int column = panel * 64 + 2 * lane;
  if (share.block[unit] >= 0) {
    const uint32_t* const words = tile_words(share, p.v, work, unit);
    const int group = share.row[unit] / kPageUnit % (static_cast<int>(kTileTokens) / kPageUnit);
#pragma unroll
    for (int c = 0; c < 2; ++c)
      levels_at<Bits>(table, words, p.D, column + c, group, static_cast<int>(kTileTokens) * p.D * 2 / 32, x[c]);
  }
  auto* const to = reinterpret_cast<uint32_t*>(p.values) + ((work.at * p.tile + unit * kPageUnit) * p.D + column) / 2;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const __half2 gains = *reinterpret_cast<const __half2*>(share.v_gain + unit * kPageUnit + 2 * i);
    const uint32_t first = permute(x[0][i], x[1][i], 0x5410u), second = permute(x[0][i], x[1][i], 0x7632u);
    const __half2 low = __hmul2(*reinterpret_cast<const __half2*>(&first), __low2half2(gains)),
                  high = __hmul2(*reinterpret_cast<const __half2*>(&second), __high2half2(gains));
    to[i * p.D] = *reinterpret_cast<const uint32_t*>(&low);
    to[i * p.D + p.D / 2] = *reinterpret_cast<const uint32_t*>(&high);
  }
}

template <class Run>
__device__ __forceinline__ void with_bits(int bits, Run&& run) {
  switch (bits) {
    case 2: return run.template operator()<2>();
    case 3: return run.template operator()<3>();
    case 4: return run.template operator()<4>();
    default: run.template operator()<8>();
  }
}

// A block decodes a tile of coded tiles in lanes order, with 2, 3, 4 or 8 bits on either side. A NaN or infinite gain of a value makes
// its key NaN and is taken out of the values, so that it reaches only rows that see the token.
__global__ void __launch_bounds__(32 * kWarps) prefill_decode_tiles_kernel(const __grid_constant__ CacheParams p) {
  __shared__ SharedTile share;
  __shared__ uint32_t table[2][256];
  pdl_wait();
  pdl_launch_dependents();
  TileWork work;
  if (!find_tile(p, share, work)) return;
  for (int i = static_cast<int>(threadIdx.x); i < 512; i += 32 * kWarps) {
    const SideView& side = i < 256 ? p.k : p.v;
    const float step = i < 256 ? p.k_grid : p.v_grid;
    const int most = (1 << min(side.bits, 4)) - 1;
    table[i / 256][i % 256] = pack<__half>(grid_level(side, step, i & 15 & most), grid_level(side, step, i / 16 & 15 & most));
  }
  __syncthreads();
  const int token = static_cast<int>(threadIdx.x);
  uint32_t k_gain = 0, v_gain = 0;
  if (token < p.tile && token_exists(share, work, token)) {
    k_gain = *reinterpret_cast<const uint16_t*>(token_at(share, p.k, work, token).gains);
    v_gain = *reinterpret_cast<const uint16_t*>(token_at(share, p.v, work, token).gains);
  }
  const bool bad = (v_gain & 0x7c00u) == 0x7c00u;
  if (bad) v_gain = 0;
  // Smallest e with gains <= 2^e, but at least -14, the exponent of the smallest normal number.
  const int top = max_block(share, static_cast<int>(v_gain & 0x7fffu)), exponent = max((top + 0x3ff >> 10) - 15, -14);
  auto& record = reinterpret_cast<float*>(p.records + work.at * (p.tile + 4) * 4)[0];
  if (token < p.tile) {
    const float gain = __half2float(__ushort_as_half(static_cast<unsigned short>(k_gain)));
    (&record)[gain_place(token)] = bad || !isfinite(gain) ? NAN : gain * p.unit;
    const float value = __half2float(__ushort_as_half(static_cast<unsigned short>(v_gain))) * power_of_two(-exponent);
    share.v_gain[token] = __half_as_ushort(__float2half_rn(value));
  }
  if (token == 0) reinterpret_cast<int*>(&record)[p.tile] = exponent;
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32), panels = p.D / 64,
            items = p.tile / kPageUnit * panels;
#pragma unroll 1
  for (int item = warp; item < items; item += kWarps) {
    const int unit = item / panels, panel = item % panels;
    with_bits(p.k.bits, [&]<int Bits>() { decode_keys<Bits>(p, share, work, table[0], unit, panel, lane); });
    with_bits(p.v.bits, [&]<int Bits>() { decode_values<Bits>(p, share, work, table[1], unit, panel, lane); });
  }
}

// --- any sides ----------------------------------------------------------------------------------------------------------------

// A code, as code_at() has it, in 32 bits.
__device__ inline uint32_t code_of(const SideView& s, const RowAt& at, int j) {
  if (!s.lanes) return code_at(s, at, j);
  uint32_t code = 0;
#pragma unroll 1
  for (int i = 0; i < s.planes.count; ++i) {
    const LanePlane& plane = s.planes.plane[i];
    const int packed = s.role == KvRole::k ? j : at.token, spread = s.role == KvRole::k ? at.token : j;
    const int bits = 31 - __clz(plane.width), lanes = s.role == KvRole::k ? static_cast<int>(kTileTokens) : s.D;
    const int group = packed >> (5 - bits), inside = packed & (32 >> bits) - 1;
    const uint8_t byte = at.codes[static_cast<int>(plane.offset) + (group * lanes + spread) * 4 + (inside & 3)];
    code |= (byte >> (inside >> 2 << bits) & (1u << plane.width) - 1) << plane.shift;
  }
  return code;
}

// Coordinate j of a row in the units of scratch, without gains: n + 1/2, a level, or the number itself.
__device__ inline float number_of(const SideView& s, const RowAt& at, const float* levels, int j) {
  return s.passthrough ? load(at.codes, s.value, j) : levels[code_of(s, at, j)];
}
// NaN and infinity do not count.
__device__ inline float finite_magnitude(float x) {
  const float magnitude = fabsf(x);
  return magnitude < INFINITY ? magnitude : 0.0f;
}

// What the numbers of a row are multiplied by: keys of a passthrough side a power of two, for which the gain makes up.
__device__ inline float measure_key(const CacheParams& p, const RowAt& at, float& gain, int lane) {
  if (!p.k.passthrough) {
    const float own = load(at.gains, p.k.gain, 0);
    gain = isfinite(own) ? own * p.unit : NAN;
    return 1;
  }
  float top = 0;
  for (int j = lane; j < p.k.D; j += 32) top = fmaxf(top, finite_magnitude(load(at.codes, p.k.value, j)));
  const int exponent = min(max(exponent_above(__float_as_uint(max_warp(top))), -100), 100);
  gain = power_of_two(exponent) * p.unit;
  return power_of_two(-exponent);
}

// The largest gain of a row of values, or its largest number; `bad`: one of them is not finite.
__device__ inline float measure_value(const SideView& v, const RowAt& at, bool& bad, int lane) {
  float top = 0;
  bool finite = true;
  const int count = v.passthrough ? v.D : v.D / v.gain_group;
  for (int j = lane; j < count; j += 32) {
    const float x = v.passthrough ? load(at.codes, v.value, j) : load(at.gains, v.gain, j);
    finite &= isfinite(x) != 0;
    top = fmaxf(top, finite_magnitude(x));
  }
  bad = !__all_sync(kAll, finite);
  return max_warp(top);
}

// Writes a row of keys or values of `D` numbers to scratch, by one warp, padded with zeros.
template <class Number>
__device__ inline void write_row(uint8_t* to, int D, int pitch, int lane, Number&& number) {
  for (int j = 2 * lane; j < pitch; j += 64)
    reinterpret_cast<uint32_t*>(to)[j / 2] = j < D ? pack<__half>(number(j), number(j + 1)) : 0u;
}

// A block decodes a tile of a cache of any formats and layout: a warp takes row after row.
__global__ void __launch_bounds__(32 * kWarps) prefill_decode_any_kernel(const __grid_constant__ CacheParams p) {
  __shared__ SharedTile share;
  __shared__ float levels[2][256];
  pdl_wait();
  pdl_launch_dependents();
  TileWork work;
  if (!find_tile(p, share, work)) return;
  for (int i = static_cast<int>(threadIdx.x); i < 512; i += 32 * kWarps) {
    const SideView& side = i < 256 ? p.k : p.v;
    if (!side.passthrough && i % 256 < 1 << side.bits)
      levels[i / 256][i % 256] = grid_level(side, i < 256 ? p.k_grid : p.v_grid, i % 256);
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  float top = 0;
#pragma unroll 1
  for (int token = warp; token < p.tile; token += kWarps) {
    bool bad = false;
    if (token_exists(share, work, token)) top = fmaxf(top, measure_value(p.v, token_at(share, p.v, work, token), bad, lane));
    if (lane == 0) share.bad[token] = bad;
  }
  // Numbers of a passthrough side are below 2^15 in scratch; gains of a coded side are at most 1.
  const int largest = max_block(share, __float_as_int(top)),
            above = exponent_above(static_cast<uint32_t>(largest)) - (p.v.passthrough ? 15 : 0);
  const int exponent = largest == 0 ? kLowestExponent : min(max(above, kLowestExponent), kHighestExponent);
  const float down = power_of_two(-exponent);
  float* const record = reinterpret_cast<float*>(p.records + work.at * (p.tile + 4) * 4);
  if (threadIdx.x == 0) reinterpret_cast<int*>(record)[p.tile] = exponent;
#pragma unroll 1
  for (int token = warp; token < p.tile; token += kWarps) {
    const int64_t row = (work.at * p.tile + token) * p.D * 2;
    const bool exists = token_exists(share, work, token), bad = share.bad[token];
    float gain = 0;
    if (!exists) {
      write_row(p.keys + row, 0, p.D, lane, [](int) { return 0.0f; });
      write_row(p.values + row, 0, p.D, lane, [](int) { return 0.0f; });
    } else {
      const RowAt k = token_at(share, p.k, work, token), v = token_at(share, p.v, work, token);
      const float factor = measure_key(p, k, gain, lane);
      write_row(p.keys + row, p.k.D, p.D, lane, [&](int j) { return number_of(p.k, k, levels[0], j) * factor; });
      write_row(p.values + row, bad ? 0 : p.v.D, p.D, lane, [&](int j) {
        const float own = p.v.passthrough ? down : load(v.gains, p.v.gain, j / p.v.gain_group) * down;
        return number_of(p.v, v, levels[1], j) * own;
      });
    }
    if (lane == 0) record[gain_place(token)] = bad ? NAN : gain;
  }
}

float step_of(const KvFormat& format) { return format.passthrough || !format.grid_step ? 0.0f : *format.grid_step; }

bool words_decode(const KvCache& cache) {
  const auto fits = [](const KvFormat& format) {
    return !format.passthrough && (format.bits <= 4 || format.bits == 8) &&
           (format.head_dim == 64 || format.head_dim == 128 || format.head_dim == 256);
  };
  return coded_tile_cache(cache) && fits(cache.k.format) && fits(cache.v.format);
}

float step_with_units(const KvFormat& format) {
  if (format.passthrough) return 1;
  const float step = format.grid_step ? *format.grid_step : 1.0f;
  return format.gain_units == GainUnits::unit_vector ? step / std::sqrt(static_cast<float>(format.gain_group)) : step;
}

}  // namespace

float key_step(const KvFormat& format) { return step_with_units(format); }
float value_step(const KvFormat& format) { return step_with_units(format); }

void launch_prepare_cache(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache,
                          const DensePrepared& prepared, const DensePlan& plan, int first_pair, int pairs, float unit) {
  CacheParams p{queries, side_view(cache, KvRole::k), side_view(cache, KvRole::v), step_of(cache.k.format),
                step_of(cache.v.format)};
  p.keys = prepared.keys;
  p.values = prepared.values;
  p.records = prepared.records;
  p.first_pair = first_pair;
  p.tiles = static_cast<int>(plan.tiles);
  p.least_rows = static_cast<int>(plan.least_rows);
  p.D = plan.D;
  p.tile = plan.tile;
  p.unit = unit;
  launch_pdl(op, stream, int64_t{pairs} * plan.tiles, 32 * kWarps, 0,
             words_decode(cache) ? prefill_decode_tiles_kernel : prefill_decode_any_kernel, p);
}

}  // namespace weft::cuda
