// The dense bit stream of codes: published words, every width and head size, and buffers that end where the row ends.
#include "common/bit_pack.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "cases/memory.h"

namespace weft {
namespace {

TEST(BitPack, PublishedThreeBitWords) {
  std::vector<uint8_t> codes(32), row(12);
  for (size_t j = 0; j < codes.size(); ++j) codes[j] = static_cast<uint8_t>(j % 8);
  pack_codes(codes.data(), 32, 3, row.data());
  EXPECT_EQ(packed_word(row.data(), 0), 0x88fac688u);
  EXPECT_EQ(packed_word(row.data(), 1), 0xc688fac6u);
  EXPECT_EQ(packed_word(row.data(), 2), 0xfac688fau);
}

TEST(BitPack, CodesCrossWordsAsTheFormatSays) {
  // Coordinate 10 of a 3-bit row has two bits at the top of word 0 and one at the bottom of word 1; coordinate 21 one and two.
  for (const auto& [j, first, second] : {std::tuple{10, 0xc0000000u, 0x1u}, std::tuple{21, 0x80000000u, 0x3u}}) {
    std::vector<uint8_t> codes(32, 0), row(12);
    codes[static_cast<size_t>(j)] = 7;
    pack_codes(codes.data(), 32, 3, row.data());
    EXPECT_EQ(packed_word(row.data(), j / 11), first) << j;
    EXPECT_EQ(packed_word(row.data(), j / 11 + 1), second) << j;
  }
}

// By the definition: code j owns bits [j b, (j + 1) b) of the row.
TEST(BitPack, EveryWidthAndSize) {
  cases::Rng rng(1);
  for (int bits = 2; bits <= 8; ++bits)
    for (int64_t d = 8; d <= 512; d += 8) {
      const int64_t bytes = packed_bytes(d, bits);
      ASSERT_EQ(bytes, (d * bits + 31) / 32 * 4);
      // Two rows in a heap block of exactly their size: reading or writing past the last row is out of bounds.
      const std::unique_ptr<uint8_t[]> block(new uint8_t[static_cast<size_t>(2 * bytes)]);
      std::fill_n(block.get(), 2 * bytes, uint8_t{0xff});
      uint8_t* row = block.get() + bytes;
      std::vector<uint8_t> codes(static_cast<size_t>(d)), back(codes.size());
      for (uint8_t& code : codes) code = static_cast<uint8_t>(rng.integer(0, (1 << bits) - 1));
      pack_codes(codes.data(), d, bits, row);
      for (int64_t p = 0; p < bytes * 8; ++p) {
        const int bit = packed_word(row, p / 32) >> (p % 32) & 1;
        const int wanted = p < d * bits ? codes[static_cast<size_t>(p / bits)] >> (p % bits) & 1 : 0;  // pad bits are zero
        ASSERT_EQ(bit, wanted) << "bits " << bits << " d " << d << " bit " << p;
      }
      unpack_codes(row, d, bits, back.data());
      ASSERT_EQ(back, codes);
      for (int64_t i = 0; i < bytes; ++i) ASSERT_EQ(block[static_cast<size_t>(i)], 0xff) << "the row before was touched";
    }
}

TEST(BitPack, FourBitsAreNibblesLowFirst) {
  const uint8_t codes[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  uint8_t row[4];
  pack_codes(codes, 8, 4, row);
  EXPECT_EQ(row[0], 0x21);
  EXPECT_EQ(row[3], 0x87);
}

}  // namespace
}  // namespace weft
