// The GGUF block formats of 256 numbers: how they lie in bytes, and their values.
//
// A block has a scale d in f16 and groups of 16 or 32 numbers with small scales of their own. A value is (d * scale) * code, or
// (d * scale) * code - (dmin * minimum). All products are exact in f32: d has 11 bits, a scale up to 7, a code up to 6.
#pragma once

#include <cstdint>

#include "common/blocks_32.h"

namespace weft {

// The eight scales and minima, 6 bits each, that Q4_K and Q5_K pack into 12 bytes.
struct GroupScales {
  uint8_t scale[8], minimum[8];

  explicit WEFT_BLOCK_INLINE GroupScales(const uint8_t* packed) {
    for (int i = 0; i < 4; ++i) {
      scale[i] = packed[i] & 63;
      minimum[i] = packed[i + 4] & 63;
      scale[i + 4] = static_cast<uint8_t>((packed[i + 8] & 15) | (packed[i] >> 6) << 4);
      minimum[i + 4] = static_cast<uint8_t>(packed[i + 8] >> 4 | (packed[i + 4] >> 6) << 4);
    }
  }
};

// 8 groups of 32. Of 32 bytes of codes, the low halves are a group, the high halves are the next.
struct BlockQ4K {
  static constexpr int64_t kNumbers = 256, kBytes = 144;
  static WEFT_BLOCK_INLINE void widen(const uint8_t* __restrict block, float* __restrict to) {
    const float d = block_f16(block), dmin = block_f16(block + 2);
    const GroupScales groups(block + 4);
    const uint8_t* codes = block + 16;
    for (int pair = 0; pair < 4; ++pair, codes += 32, to += 64) {
      const float low = d * static_cast<float>(groups.scale[2 * pair]), high = d * static_cast<float>(groups.scale[2 * pair + 1]);
      const float low_min = dmin * static_cast<float>(groups.minimum[2 * pair]),
                  high_min = dmin * static_cast<float>(groups.minimum[2 * pair + 1]);
      for (int i = 0; i < 32; ++i) {
        to[i] = low * static_cast<float>(codes[i] & 15) - low_min;
        to[i + 32] = high * static_cast<float>(codes[i] >> 4) - high_min;
      }
    }
  }
};

// As Q4_K, with the fifth bit of code i of group g in bit g of byte i of a plane of 32 bytes.
struct BlockQ5K {
  static constexpr int64_t kNumbers = 256, kBytes = 176;
  static WEFT_BLOCK_INLINE void widen(const uint8_t* __restrict block, float* __restrict to) {
    const float d = block_f16(block), dmin = block_f16(block + 2);
    const GroupScales groups(block + 4);
    const uint8_t *plane = block + 16, *codes = block + 48;
    for (int pair = 0; pair < 4; ++pair, codes += 32, to += 64) {
      const float low = d * static_cast<float>(groups.scale[2 * pair]), high = d * static_cast<float>(groups.scale[2 * pair + 1]);
      const float low_min = dmin * static_cast<float>(groups.minimum[2 * pair]),
                  high_min = dmin * static_cast<float>(groups.minimum[2 * pair + 1]);
      for (int i = 0; i < 32; ++i) {
        const int bits = plane[i] >> (2 * pair);
        to[i] = low * static_cast<float>((codes[i] & 15) | (bits & 1) << 4) - low_min;
        to[i + 32] = high * static_cast<float>(codes[i] >> 4 | (bits >> 1 & 1) << 4) - high_min;
      }
    }
  }
};

// 16 groups of 16 with signed 8-bit scales. Each half of 128 numbers has 64 bytes with the low 4 bits of its codes and 32 bytes with
// the high 2 bits.
struct BlockQ6K {
  static constexpr int64_t kNumbers = 256, kBytes = 210;
  static WEFT_BLOCK_INLINE void widen(const uint8_t* __restrict block, float* __restrict to) {
    const uint8_t *low = block, *high = block + 128, *scales = block + 192;
    const float d = block_f16(block + 208);
    for (int half = 0; half < 2; ++half, low += 64, high += 32, scales += 8, to += 128)
      for (int quarter = 0; quarter < 4; ++quarter)
        for (int group = 0; group < 2; ++group) {
          const float scale = d * static_cast<float>(static_cast<int8_t>(scales[2 * quarter + group]));
          for (int i = 16 * group; i < 16 * group + 16; ++i) {
            const int code = (low[32 * (quarter & 1) + i] >> (quarter & 2 ? 4 : 0) & 15) | (high[i] >> (2 * quarter) & 3) << 4;
            to[32 * quarter + i] = scale * static_cast<float>(code - 32);
          }
        }
  }
};

}  // namespace weft
