// Codes of a row as bytes: the dense little-endian bit stream in 32-bit words, and a byte each.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace weft {

// Bytes of `count` codes of `bits` bits in whole 32-bit words.
constexpr int64_t packed_bytes(int64_t count, int bits) { return (count * bits + 31) / 32 * 4; }

// Word w of a row; rows may lie at any byte.
WEFT_HOST_DEVICE inline uint32_t packed_word(const uint8_t* row, int64_t w) {
  const uint8_t* p = row + 4 * w;
  return static_cast<uint32_t>(p[0]) | static_cast<uint32_t>(p[1]) << 8 | static_cast<uint32_t>(p[2]) << 16 |
         static_cast<uint32_t>(p[3]) << 24;
}

// Code j of a dense row: bits [j b, (j + 1) b). Touches the next word only when the code spills into it, so that the last row of a
// buffer may end at the buffer's end.
WEFT_HOST_DEVICE inline uint32_t packed_code(const uint8_t* row, int64_t j, int bits) {
  const int64_t w = j * bits / 32;
  const int shift = static_cast<int>(j * bits % 32);
  uint32_t code = packed_word(row, w) >> shift;
  if (shift + bits > 32) code |= packed_word(row, w + 1) << (32 - shift);
  return code & ((1u << bits) - 1);
}

// Writes `count` codes as a dense row: every byte of packed_bytes(count, bits), pad bits zero.
inline void pack_codes(const uint8_t* codes, int64_t count, int bits, uint8_t* row) {
  uint64_t window = 0;
  int filled = 0;
  uint8_t* end = row + packed_bytes(count, bits);
  for (int64_t j = 0; j < count; ++j) {
    window |= static_cast<uint64_t>(codes[j]) << filled;
    for (filled += bits; filled >= 8; filled -= 8, window >>= 8) *row++ = static_cast<uint8_t>(window);
  }
  for (; row < end; window >>= 8) *row++ = static_cast<uint8_t>(window);
}

inline void unpack_codes(const uint8_t* row, int64_t count, int bits, uint8_t* codes) {
  for (int64_t j = 0; j < count; ++j) codes[j] = static_cast<uint8_t>(packed_code(row, j, bits));
}

}  // namespace weft
