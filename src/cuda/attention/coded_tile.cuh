// A coded tile (lanes order) in shared memory: copies, reads without bank conflicts, and codes as bytes or f16.
#pragma once

#include "common/lanes_tile.h"
#include "cuda/common/mma.cuh"

namespace weft::cuda {

__device__ inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(selector));
  return x;
}

// Looks up the 8 nibbles of a word in a table of 16 bytes: bytes of the results are in the order of the nibbles.
__device__ inline void look_up_16(const uint32_t (&table)[4], uint32_t word, uint32_t& low, uint32_t& high) {
  const uint32_t shifted = word << 4, index = word & 0x77777777u, rest = index >> 16;
  const uint32_t upper0 = permute(shifted, word, 0xD9C8u), upper1 = permute(shifted, word, 0xFBEAu);  // 0xFF where the code is >= 8
  const uint32_t a0 = permute(table[0], table[1], index), b0 = permute(table[2], table[3], index);
  const uint32_t a1 = permute(table[0], table[1], rest), b1 = permute(table[2], table[3], rest);
  low = (a0 & ~upper0) | (b0 & upper0);
  high = (a1 & ~upper1) | (b1 & upper1);
}

// Bytes n + 128 as f16 n.
__device__ inline void widen(uint32_t bytes, uint32_t& first, uint32_t& second) {
  const __half2 bias = __half2half2(__ushort_as_half(0x6480));                                        // 1152
  const uint32_t a = permute(bytes, 0x64646464u, 0x4140u), b = permute(bytes, 0x64646464u, 0x4342u);  // 1024 + byte
  const __half2 x = __hsub2(*reinterpret_cast<const __half2*>(&a), bias), y = __hsub2(*reinterpret_cast<const __half2*>(&b), bias);
  first = *reinterpret_cast<const uint32_t*>(&x);
  second = *reinterpret_cast<const uint32_t*>(&y);
}

// Bits of the wide plane of a code. Codes of 3 bits have a wide plane of 2 bits, and a narrow plane of 1 bit behind it.
constexpr int wide_bits(int bits) { return bits == 3 ? 2 : bits; }

template <int Bits, int D, KvRole Role>
struct CodedTile {
  static constexpr int kWide = wide_bits(Bits);
  static constexpr int kCodes = static_cast<int>(kTileTokens) * D * Bits / 8, kGains = static_cast<int>(kTileTokens) * 2;
  static constexpr int kBytes = kCodes + kGains, kVectors = kCodes / 16, kWideVectors = D * kWide / 2;
  static constexpr int kGroupVectors = Role == KvRole::k ? 16 : D / 4;
  // Codes are read in vectors of 16 bytes. Lanes t of one access read groups that are kSpread apart. Vectors are permuted by their group so
  // that the lanes access different banks: bits 1 and 2 of a vector's index, which the lanes of an access have in common, are xored
  // with t.
  static constexpr int kSpread = Role == KvRole::v && kWide == 8 ? 2 : 1;

  // Copies vectors [32 First, 32 (First + Count)) of the codes.
  template <int First, int Count>
  __device__ static void copy_codes(uint32_t to, const uint8_t* from, int lane) {
    const uint8_t* mine = from + lane * 16;
#pragma unroll
    for (int i = First; i < First + Count; ++i) {
      const bool wide = 32 * i < kWideVectors;
      const int first = wide ? 0 : kWideVectors, vector = 32 * i - first;  // vector: that of lane 0
      // A group is 16 vectors, or a multiple of the 32 vectors of a warp's copy.
      const int group = kGroupVectors == 16 ? vector / 16 + lane / 16 : vector / kGroupVectors;
      const int place = first + vector + (lane ^ ((group / (wide ? kSpread : 1) & 3) << 1)) - 32 * First;
      cp_async(to + place * 16, mine + 512 * i, true);
    }
  }
  // K: codes, then gains.
  __device__ static void copy(uint32_t to, const uint8_t* from, int lane) {
    copy_codes<0, kVectors / 32>(to, from, lane);
    if (lane < kGains / 16) cp_async(to + kCodes + lane * 16, from + kCodes + lane * 16, true);
  }
  // V: gains, which come with the first half of the codes, then that half; or all codes where `Halves` is 1.
  template <int Halves>
  __device__ static void copy_half(uint32_t to, const uint8_t* from, int half, int lane) {
    if (half == 0) {
      copy_codes<0, kVectors / 32 / Halves>(to + kGains, from, lane);
      if (lane < kGains / 16) cp_async(to + lane * 16, from + kCodes + lane * 16, true);
    } else {
      copy_codes<kVectors / 32 / Halves*(Halves - 1), kVectors / 32 / Halves>(to + kGains, from, lane);
    }
  }
  // V: the vector of K whose tokens belong to half h of V's words, for lane j. A word decodes to tokens x of j = 2 t and 2 t + 1.
  __device__ static int quad(int j, int h) { return kWide == 2 ? j / 2 * 4 + j % 2 * 2 + h : 8 * h + j; }
  // Reads vector `vector` of a group whose index, divided by kSpread, is t modulo 4.
  __device__ static uint4 read(const uint8_t* tile, int group, int vector, int t) {
    return *reinterpret_cast<const uint4*>(tile + (group * kGroupVectors + (vector ^ (t << 1))) * 16);
  }
  __device__ static uint4 read_narrow(const uint8_t* tile, int group, int vector) {
    return *reinterpret_cast<const uint4*>(tile + (kWideVectors + group * kGroupVectors + (vector ^ ((group & 3) << 1))) * 16);
  }
};

// Gains of the four tokens of a vector of K.
__device__ inline void read_gains(const uint8_t* gains, int quad, float (&gain)[4]) {
  const uint2 packed = *reinterpret_cast<const uint2*>(gains + quad * 8);
  const float2 a = unpack<__half>(packed.x), b = unpack<__half>(packed.y);
  gain[0] = a.x, gain[1] = a.y, gain[2] = b.x, gain[3] = b.y;
}

// Fields `Field` and `Field` + 2 of every byte of a word of 2-bit fields, as nibbles. Bits of the narrow plane, if any, go above
// them.
template <int Bits, int Field>
__device__ inline uint32_t nibbles(uint32_t wide, uint32_t narrow) {
  uint32_t index = wide >> 2 * Field & 0x33333333u;
  // Bits Field and Field + 2 of every byte go to bits 2 and 6: one product shifts both.
  if constexpr (Bits == 3) index |= (narrow & 0x05050505u << Field) * (20u >> Field) & 0x44444444u;
  return index;
}

}  // namespace weft::cuda
