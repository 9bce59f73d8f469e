// The GGUF block formats of 32 numbers: how they lie in bytes, and their values.
//
// A block begins with its scale d, an f16. A value is d * code, or d * code + m with a minimum m. Every product of a scale and a code is
// exact in f32, so values have the same bits whether or not a compiler fuses the addition.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/half.h"

// Inlined into kernels, which are compiled for the instruction set of the machine.
#define WEFT_BLOCK_INLINE __attribute__((always_inline)) inline

namespace weft {

WEFT_BLOCK_INLINE float block_f16(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return f16_to_f32(bits);
}
WEFT_BLOCK_INLINE uint32_t block_u32(const uint8_t* at) {
  uint32_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return bits;
}

struct BlockQ80 {
  static constexpr int64_t kNumbers = 32, kBytes = 34;
  static WEFT_BLOCK_INLINE void widen(const uint8_t* __restrict block, float* __restrict to) {
    const float d = block_f16(block);
    for (int i = 0; i < 32; ++i) to[i] = d * static_cast<float>(static_cast<int8_t>(block[2 + i]));
  }
};

// The low half of byte i of the codes is number i, the high half is number i + 16.
struct BlockQ40 {
  static constexpr int64_t kNumbers = 32, kBytes = 18;
  static WEFT_BLOCK_INLINE void widen(const uint8_t* __restrict block, float* __restrict to) {
    const float d = block_f16(block);
    for (int i = 0; i < 16; ++i) {
      const int code = block[2 + i];
      to[i] = d * static_cast<float>((code & 15) - 8);
      to[i + 16] = d * static_cast<float>((code >> 4) - 8);
    }
  }
};

struct BlockQ41 {
  static constexpr int64_t kNumbers = 32, kBytes = 20;
  static WEFT_BLOCK_INLINE void widen(const uint8_t* __restrict block, float* __restrict to) {
    const float d = block_f16(block), m = block_f16(block + 2);
    for (int i = 0; i < 16; ++i) {
      const int code = block[4 + i];
      to[i] = d * static_cast<float>(code & 15) + m;
      to[i + 16] = d * static_cast<float>(code >> 4) + m;
    }
  }
};

// Bit i of a 32-bit word is the fifth bit of code i.
struct BlockQ50 {
  static constexpr int64_t kNumbers = 32, kBytes = 22;
  static WEFT_BLOCK_INLINE void widen(const uint8_t* __restrict block, float* __restrict to) {
    const float d = block_f16(block);
    const uint32_t high = block_u32(block + 2);
    for (uint32_t i = 0; i < 16; ++i) {
      const uint32_t code = block[6 + i];
      to[i] = d * static_cast<float>(static_cast<int>((code & 15) | (high >> i & 1) << 4) - 16);
      to[i + 16] = d * static_cast<float>(static_cast<int>(code >> 4 | (high >> (i + 16) & 1) << 4) - 16);
    }
  }
};

struct BlockQ51 {
  static constexpr int64_t kNumbers = 32, kBytes = 24;
  static WEFT_BLOCK_INLINE void widen(const uint8_t* __restrict block, float* __restrict to) {
    const float d = block_f16(block), m = block_f16(block + 2);
    const uint32_t high = block_u32(block + 4);
    for (uint32_t i = 0; i < 16; ++i) {
      const uint32_t code = block[8 + i];
      to[i] = d * static_cast<float>(static_cast<int>((code & 15) | (high >> i & 1) << 4)) + m;
      to[i + 16] = d * static_cast<float>(static_cast<int>(code >> 4 | (high >> (i + 16) & 1) << 4)) + m;
    }
  }
};

}  // namespace weft
