// Tiles in lanes order to f16 in shared memory, as warpgroup products take them: see attention_prefill.cu.
#pragma once

#include "cuda/lane_tile.cuh"

namespace weft::cuda::prefill {

constexpr int kTile = static_cast<int>(kTileTokens), kProducers = 128;

// Where index i of those that share words of `bits` ends up when words are looked up field by field.
__device__ inline int packed_place(int bits, int i) {
  if (bits == 8) return i;
  if (bits == 4) return (i & ~7) + i % 4 * 2 + i / 4 % 2;
  const int field = i / 4 % 4;
  return (i & ~15) + field % 2 * 8 + i % 4 * 2 + field / 2;
}

__device__ inline __half2 as_half2(uint32_t x) { return *reinterpret_cast<const __half2*>(&x); }
__device__ inline uint32_t as_bits(__half2 x) { return *reinterpret_cast<const uint32_t*>(&x); }

// Bytes n + 128 as f16 n + 1/2, times gains.
__device__ inline void levels_of(uint32_t bytes, uint32_t gain0, uint32_t gain1, uint32_t& first, uint32_t& second) {
  const __half2 half = __half2half2(__ushort_as_half(0x3800));
  widen(bytes, first, second);
  first = as_bits(__hmul2(__hadd2(as_half2(first), half), as_half2(gain0)));
  second = as_bits(__hmul2(__hadd2(as_half2(second), half), as_half2(gain1)));
}

__device__ inline uint4 levels_of_eight(uint32_t low, uint32_t high, const uint4& gains) {
  uint4 x;
  levels_of(low, gains.x, gains.y, x.x, x.y);
  levels_of(high, gains.z, gains.w, x.z, x.w);
  return x;
}

// Eight codes of 4 bits.
__device__ inline uint4 decode_nibbles(const uint32_t (&table)[4], uint32_t word, const uint4& gains) {
  uint32_t low, high;
  look_up_16(table, word, low, high);
  return levels_of_eight(low, high, gains);
}

// Fields `Field` and `Field` + 2 of a word of 2-bit fields, with bits of the narrow plane.
template <int Bits, int Field>
__device__ inline uint4 decode_fields(const uint32_t (&table)[4], uint32_t word, uint32_t narrow, const uint4& gains) {
  const uint32_t index = nibbles<Bits, Field>(word, narrow);
  return levels_of_eight(permute(table[0], table[1], index), permute(table[0], table[1], index >> 16), gains);
}

// A raw tile in shared memory: 16-byte pieces of codes, of which lanes read eight groups side by side.
template <KvRole Role, int D>
struct RawSide {
  static constexpr int kGroupPieces = Role == KvRole::k ? 16 : D / 4;
  __device__ static void copy(uint32_t to, const uint8_t* from, int bits, int thread) {
    const int wide = D * wide_bits(bits) / 2, all = D * bits / 2;
    for (int piece = thread; piece < all; piece += kProducers) {
      const int inside = piece < wide ? piece : piece - wide, group = inside / kGroupPieces;
      copy_async(to + (piece ^ (group & 7)) * 16, from + piece * 16, true);
    }
    if (thread < 8) copy_async(to + (all + thread) * 16, from + (all + thread) * 16, true);
  }
  __device__ static uint4 read(const uint8_t* raw, int group, int piece, int first = 0) {
    return *reinterpret_cast<const uint4*>(raw + (first + ((group * kGroupPieces + piece) ^ (group & 7))) * 16);
  }
};

__device__ inline uint32_t word_of(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// Keys of one tile; `gains` are those of its tokens, twice each.
template <int Bits, int D>
__device__ void decode_keys(const uint8_t* raw, const uint32_t (&table)[4], const uint32_t* gains, int v_bits, uint8_t* to,
                            int thread) {
  using Raw = RawSide<KvRole::k, D>;
  constexpr int kColumns = Bits == 4 || Bits == 8 ? D / 8 : D / 16, kAcross = kColumns < 8 ? kColumns : 8;
#pragma unroll 1
  for (int item = thread; item < kColumns * 16; item += kProducers) {
    const int piece = item / kAcross % 16, column = item % kAcross + item / (kAcross * 16) * kAcross;
    const uint4 own = *reinterpret_cast<const uint4*>(gains + 4 * piece);
    uint4 words = Raw::read(raw, Bits == 8 ? 2 * column : column, piece), more{};
    if constexpr (Bits == 8) more = Raw::read(raw, 2 * column + 1, piece);
    if constexpr (Bits == 3) more = Raw::read(raw, column / 2, piece, D);
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int row = packed_place(v_bits, 4 * piece + x);
      const uint32_t gain = word_of(own, x);
      const uint4 same{gain, gain, gain, gain};
      const auto put = [&](int chunk, const uint4& eight) {
        *reinterpret_cast<uint4*>(to + chunk / 8 * (kTile * 128) + row * 128 + (((chunk & 7) ^ (row & 7)) << 4)) = eight;
      };
      if constexpr (Bits == 4) put(column, decode_nibbles(table, word_of(words, x), same));
      if constexpr (Bits == 8) put(column, levels_of_eight(word_of(words, x), word_of(more, x), same));
      if constexpr (Bits <= 3) {
        const uint32_t narrow = word_of(more, x) >> (column % 2 * 4);
        put(2 * column, decode_fields<Bits, 0>(table, word_of(words, x), narrow, same));
        put(2 * column + 1, decode_fields<Bits, 1>(table, word_of(words, x), narrow, same));
      }
    }
  }
}

// Values, a row of tokens for every coordinate; `gains` are f16 in the order of rows of keys.
template <int Bits, int D>
__device__ void decode_values(const uint8_t* raw, const uint32_t (&table)[4], const uint8_t* gains, uint8_t* to, int thread) {
  using Raw = RawSide<KvRole::v, D>;
  constexpr int kColumns = Bits == 4 || Bits == 8 ? 8 : 4;
  const int column = thread % kColumns;
  const auto* own = reinterpret_cast<const uint4*>(gains);
  const uint4 gain0 = own[kColumns == 8 ? column : 2 * column], gain1 = own[kColumns == 8 ? column : 2 * column + 1];
#pragma unroll 1
  for (int piece = thread / kColumns; piece < D / 4; piece += kProducers / kColumns) {
    uint4 words = Raw::read(raw, Bits == 8 ? 2 * column : column, piece), more{};
    if constexpr (Bits == 8) more = Raw::read(raw, 2 * column + 1, piece);
    if constexpr (Bits == 3) more = Raw::read(raw, column / 2, piece, D);
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int row = 4 * piece + x;
      const auto put = [&](int chunk, const uint4& eight) {
        *reinterpret_cast<uint4*>(to + row * 128 + ((chunk ^ (row & 7)) << 4)) = eight;
      };
      if constexpr (Bits == 4) put(column, decode_nibbles(table, word_of(words, x), gain0));
      if constexpr (Bits == 8) put(column, levels_of_eight(word_of(words, x), word_of(more, x), gain0));
      if constexpr (Bits <= 3) {
        const uint32_t narrow = word_of(more, x) >> (column % 2 * 4);
        put(2 * column, decode_fields<Bits, 0>(table, word_of(words, x), narrow, gain0));
        put(2 * column + 1, decode_fields<Bits, 1>(table, word_of(words, x), narrow, gain1));
      }
    }
  }
}

}  // namespace weft::cuda::prefill
