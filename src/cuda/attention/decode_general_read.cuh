// Staged pieces of a side to registers: codes from bit streams and planes, and levels of codes.
#pragma once

#include "cuda/attention/coded_tile.cuh"
#include "cuda/attention/decode_general_params.cuh"
#include "cuda/common/mma.cuh"

namespace weft::cuda {

__device__ __forceinline__ uint32_t word_at(const uint8_t* from) { return *reinterpret_cast<const uint32_t*>(from); }
__device__ __forceinline__ uint4 four_words_at(const uint8_t* from) { return *reinterpret_cast<const uint4*>(from); }

// Eight codes, 0 to 3 in `low` and 4 to 7 in `high`, a field each. Codes of 4 bits and less are all in `low`, too.
struct Codes {
  uint32_t low, high;
};

// From bit `bit` of a bit stream. Reads up to 12 bytes from the word of that bit on.
__device__ __forceinline__ Codes codes_at(const uint8_t* row, int bit, int field) {
  const uint8_t* words = row + (bit >> 5) * 4;
  const uint32_t a = word_at(words), b = word_at(words + 4), first = __funnelshift_r(a, b, bit);
  if (field <= 4) return {first, first >> 4 * field};
  return {first, __funnelshift_rc(first, __funnelshift_r(b, word_at(words + 8), bit), 4 * field)};
}

// K in lanes order, coordinates 32 chunk + 8 t and up of a token; fields of a byte. `coordinates`: of the piece.
__device__ __forceinline__ Codes key_lanes_at(int bits, const uint8_t* piece, int coordinates, int chunk, int token, int t) {
  Codes codes{0, 0};
  const uint8_t* from = piece + token * 4;
  if (bits & 8) return {word_at(from + (8 * chunk + 2 * t) * 64), word_at(from + (8 * chunk + 2 * t + 1) * 64)};
  if (bits & 4) {
    const uint32_t x = word_at(from + (4 * chunk + t) * 64);
    codes.low = x & 0x0f0f0f0fu, codes.high = x >> 4 & 0x0f0f0f0fu;
    from += coordinates * 8;
  }
  if (bits & 2) {
    const uint32_t x = word_at(from + (2 * chunk + t / 2) * 64) >> t % 2 * 4;
    codes.low |= (x & 0x03030303u) << (bits & 4), codes.high |= (x >> 2 & 0x03030303u) << (bits & 4);
    from += coordinates * 4;
  }
  if (bits & 1) {
    const uint32_t x = word_at(from + chunk * 64) >> 2 * t;
    codes.low |= (x & 0x01010101u) << (bits & 6), codes.high |= (x >> 1 & 0x01010101u) << (bits & 6);
  }
  return codes;
}

// V in lanes order, coordinates `first` to first + 3 of the piece: a word for each, whose bytes are the codes of tokens 4 t to
// 4 t + 3. `odd`: the unit is the second half of its 32 tokens.
__device__ __forceinline__ void value_lanes_at(int bits, const uint8_t* piece, int coordinates, int first, int t, bool odd,
                                               uint32_t (&codes)[4]) {
  const int group = 4 * coordinates + 16;
  const uint8_t* from = piece + first * 4;
  const auto words = [](const uint4& x, uint32_t(&y)[4]) { y[0] = x.x, y[1] = x.y, y[2] = x.z, y[3] = x.w; };
  uint32_t x[4];
  if (bits & 8) return words(four_words_at(from + t * group), codes);
#pragma unroll
  for (uint32_t& code : codes) code = 0;
  if (bits & 4) {
    words(four_words_at(from + t / 2 * group), x);
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = x[i] >> t % 2 * 4 & 0x0f0f0f0fu;
    from += 2 * group;
  }
  if (bits & 2) {
    words(four_words_at(from), x);
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] |= (x[i] >> 2 * t & 0x03030303u) << (bits & 4);
    from += group;
  }
  if (bits & 1) {
    words(four_words_at(from), x);
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] |= (x[i] >> (t + (odd ? 4 : 0)) & 0x01010101u) << (bits & 6);
  }
}

// The levels of a side, as a lane looks codes up.
template <SideKind Kind, bool Bytes>  // Bytes: codes are bytes
struct LevelReader {
  uint32_t table;                // its address in shared memory
  uint32_t place, mask, points;  // place: of the lane within an entry; points: 1024 and half the number of codes, as f16
  int field;

  __device__ __forceinline__ LevelReader(const GeneralSide& side, KvRole role, uint32_t address, int lane) {
    table = address;
    field = Bytes ? 8 : side.field;
    if constexpr (Kind == SideKind::pairs) {
      place = lane * 4;
      mask = ((1u << 2 * side.bits) - 1) * kPairStride;
    } else if constexpr (Kind == SideKind::linear) {
      place = 0;
      mask = (1u << side.bits) - 1;
      points = (0x6400u + (1u << (side.bits - 1))) * 0x10001u;
    } else {
      place = opaque(lane * 4 + (role == KvRole::v ? 128 : 0));
      mask = ((1u << side.bits) - 1) * kLevelStride;
    }
  }
  __device__ __forceinline__ uint32_t entry(uint32_t at) const { return load_shared_word(table + at); }
  // The entry of field i of `codes`.
  __device__ __forceinline__ uint32_t level(uint32_t codes, int i) const {
    if constexpr (Bytes) return entry(permute(codes, place, 0x5504u + 16 * i));
    const uint32_t shifted = i == 0 ? codes << 8 : __funnelshift_l(codes, codes, 8 - i * field & 31);
    return entry((shifted & mask) | place);
  }
  // Two neighbouring codes, fields 2 i and 2 i + 1 of `codes`, as a pair of f16.
  __device__ __forceinline__ uint32_t pair(uint32_t codes, int i) const {
    if constexpr (Kind == SideKind::pairs) {
      const uint32_t shifted = i == 0 ? codes << 7 : __funnelshift_l(codes, codes, 7 - 2 * i * field & 31);
      return entry((shifted & mask) | place);
    } else if constexpr (Kind == SideKind::linear) {
      uint32_t x;  // 1024 + code
      if constexpr (Bytes) {
        x = permute(codes, 0x64646464u, i == 0 ? 0x4140u : 0x4342u);
      } else {
        const uint32_t two = codes >> 2 * i * field, first = (two & mask) | 0x64006400u;
        x = ((two << (16 - field)) & mask << 16) | first;
      }
      const __half2 n = __hsub2(*reinterpret_cast<const __half2*>(&x), *reinterpret_cast<const __half2*>(&points));
      const __half2 y = __hadd2(n, __half2half2(__ushort_as_half(0x3800)));  // and a half
      return *reinterpret_cast<const uint32_t*>(&y);
    } else {
      return permute(level(codes, 2 * i), level(codes, 2 * i + 1), 0x5410u);
    }
  }
};

// The lower, or upper, halves of two words.
__device__ __forceinline__ uint32_t lower_halves(uint32_t a, uint32_t b) { return permute(a, b, 0x5410u); }
__device__ __forceinline__ uint32_t upper_halves(uint32_t a, uint32_t b) { return permute(a, b, 0x7632u); }

// Bytes from coordinate to coordinate of an uncompressed side.
template <SideKind Kind>
inline constexpr int kElementBytes = Kind == SideKind::f32 ? 4 : 2;

// Coordinates `first` to first + count - 1 of an uncompressed row, 8 at most, as words; what follows them in the row if `Rest`,
// else zeros.
template <SideKind Kind, bool Rest>
__device__ __forceinline__ void row_words(const uint8_t* row, int first, int count, uint32_t (&x)[2 * kElementBytes<Kind>]) {
  constexpr int kWords = 2 * kElementBytes<Kind>;
  const uint8_t* from = row + first * kElementBytes<Kind>;
  if (count == 8) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 four = four_words_at(from + i * 4);
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
    return;
  }
  if constexpr (Kind == SideKind::f32) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) x[i] = Rest || i < count ? word_at(from + i * 4) : 0;
  } else if constexpr (!Rest) {  // an even count at an even coordinate
#pragma unroll
    for (int i = 0; i < kWords; ++i) x[i] = 2 * i < count ? word_at(from + i * 4) : 0;
  } else {
    const uint8_t* words = row + first / 2 * 4;
    uint32_t next = word_at(words);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t here = next;
      next = word_at(words + 4 * i + 4);
      x[i] = __funnelshift_r(here, next, first % 2 * 16);
    }
  }
}

}  // namespace weft::cuda
