// Arguments of byte dot products: a block of bytes, four to a 32-bit lane, and the operands it is multiplied by.
#pragma once

#include <cstdint>

namespace weft::cpu {

// Rows multiplied together.
inline constexpr int64_t kDotRows = 4;

// Ranges of a row's integers x. Targets with short sums (kShortSums) add products of bytes in 16 bits, which must not overflow.
enum class RowInts {
  wide,     // 15 bits: |x| <= 16383
  bytes,    // 8 bits: |x| <= 127; for short sums, x[2 i] and x[2 i + 1] of one sign sum to at most 128
  weights,  // short sums only: x >= 0, and x[j] + x[j + 1] + x[j + 4] + x[j + 5] <= 255 for j = 8 i and 8 i + 2
};
// What rows are scaled to: their largest magnitude, or the largest sum that must fit after rounding has added 1/2 to each of its
// terms. For weights it is a multiple of 4, so that four equal weights are not rounded.
constexpr int32_t operand_max(RowInts ints) { return ints == RowInts::wide ? 16383 : ints == RowInts::bytes ? 127 : 252; }
// 32-bit words of the operands of `count` integers.
constexpr int64_t operand_words(int64_t count) { return count / 2; }

struct ByteDots {
  // bits = 8: [quads][lanes][4], each byte the value plus 128. bits = 4 or 2: codes, [quads * bits / 8][lanes][4], where each byte
  // holds one code of 8 / bits successive quads, the first in the low bits.
  const uint8_t* bytes = nullptr;
  int bits = 8;
  const uint8_t* table = nullptr;  // bits < 8: the byte of every code, repeated to 64 bytes
  int64_t lanes = 0, quads = 0;    // multiples of 16 and of 8
  RowInts ints = RowInts::wide;
  int64_t row_words = 0, out_stride = 0;  // strides of rows of operands and of out
  // Bytes to prefetch meanwhile, which the next product will read. Null: none.
  const uint8_t* prefetch = nullptr;
  int64_t prefetch_bytes = 0;
};

}  // namespace weft::cpu
