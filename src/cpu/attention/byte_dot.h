// What byte dot products take: a block of bytes, four to a lane, and the sizes of the operands that meet it.
#pragma once

#include <cstdint>

namespace weft::cpu {

// Rows that are multiplied together.
inline constexpr int64_t kDotRows = 4;

// What the integers of a row are. Targets with short sums (kShortSums) add products of bytes in 16 bits, which must hold them.
enum class RowInts {
  wide,     // 15 bits: |x| <= 16383
  bytes,    // 8 bits: |x| <= 127; for short sums, x[2 i] and x[2 i + 1] of one sign add up to 128 at most
  weights,  // for short sums alone: x >= 0, and x[j] + x[j + 1] + x[j + 4] + x[j + 5] <= 255 for j = 8 i and 8 i + 2
};
// What rows are scaled to: their largest magnitude, or the largest sum that has to fit, to which rounding adds 1/2 a number. Of weights a
// multiple of 4, so that equal ones stay as they are.
constexpr int32_t operand_max(RowInts ints) { return ints == RowInts::wide ? 16383 : ints == RowInts::bytes ? 127 : 252; }
// 32-bit words that a row of `count` integers becomes.
constexpr int64_t operand_words(int64_t count) { return count / 2; }

struct ByteDots {
  // [quads][lanes][4], each byte 128 more than what it stands for; or codes of 4 or 2 bits, [quads bits / 8][lanes][4], where the
  // quads that share a byte lie in it one after another, the first in the low bits.
  const uint8_t* bytes = nullptr;
  int bits = 8;
  const uint8_t* table = nullptr;  // of codes: 64 bytes, the byte of every code over and over
  int64_t lanes = 0, quads = 0;    // multiples of 16 and of 8
  RowInts ints = RowInts::wide;
  int64_t row_words = 0, out_stride = 0;  // between rows
  // Bytes to bring into the cache on the way: what the next product will read. Null: none.
  const uint8_t* ahead = nullptr;
  int64_t ahead_bytes = 0;
};

}  // namespace weft::cpu
