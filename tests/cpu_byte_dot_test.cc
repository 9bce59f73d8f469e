// Byte dot products and byte tables of the cpu kernels, on every instruction set of this machine, against plain integer loops.
// clang-format off
#include "cpu/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/cpu_byte_dot_test.cc"
#include <hwy/foreach_target.h>
// clang-format on
#include "cpu/attention_integer-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

void dots_of(const ByteDots& p, const int32_t* x, int64_t rows, int32_t* out) {
  uint32_t operands[kDotRows * kMaxHeadDim];
  int32_t sums[kDotRows] = {};
  const int64_t count = 4 * p.quads;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < count; ++i) sums[r] += x[r * count + i];
    make_operands(x + r * count, count, p.planes, operands + r * p.row_words);
  }
  byte_dots(p, operands, sums, rows, out);
}

void levels_of(const SideView& side, const LevelBytes& levels, const uint8_t* tile, int64_t lanes, int64_t quads, uint8_t* out) {
  expand_levels(side, levels, tile, lanes, quads, out);
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <gtest/gtest.h>

#include <vector>

#include "cases/memory.h"
#include "cpu/isa.h"

namespace weft::cpu {

HWY_EXPORT(dots_of);
HWY_EXPORT(levels_of);

namespace {

using cases::Memory;
using cases::Rng;

// Blocks whose guard bands are looked at in the end.
struct Bytes {
  uint8_t* make(int64_t count, Rng& rng) {
    auto* data = static_cast<uint8_t*>(memory.make(DType::u8, {count}).data);
    for (int64_t i = 0; i < count; ++i) data[i] = static_cast<uint8_t>(rng.next() >> 24);
    return data;
  }
  Memory memory;
};

void expect_dots(Isa isa, int64_t lanes, int64_t quads, int64_t rows, int planes, int bits) {
  Rng rng(static_cast<uint64_t>(lanes + 7 * quads + rows));
  Bytes bytes;
  uint8_t* table = bytes.make(64, rng);
  for (int i = 1 << bits; i < 64; ++i) table[i] = table[i - (1 << bits)];
  ByteDots p;
  p.bytes = bytes.make(4 * lanes * quads * bits / 8, rng);
  p.bits = bits;
  p.table = table;
  p.lanes = lanes;
  p.quads = quads;
  p.planes = planes;
  p.row_words = operand_words(4 * quads);
  p.out_stride = lanes + 3;
  std::vector<int32_t> x;
  const int32_t most = operand_max(planes);
  for (int64_t i = 0; i < rows * 4 * quads; ++i) {
    const int64_t pick = rng.integer(0, 9);  // the ends of the range, too
    x.push_back(static_cast<int32_t>(pick == 0 ? most : pick == 1 ? -most : rng.integer(-most, most)));
  }
  const Tensor out = bytes.memory.make(DType::i32, {rows, p.out_stride});
  auto* got = static_cast<int32_t*>(out.data);
  WEFT_KERNEL(isa, dots_of)(p, x.data(), rows, got);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t l = 0; l < lanes; ++l) {
      int64_t want = 0;
      for (int64_t i = 0; i < 4 * quads; ++i) {
        const int64_t c = i / 4, shared = 8 / bits;
        const int code = p.bytes[(c / shared * lanes + l) * 4 + i % 4] >> (bits * (c % shared)) & ((1 << bits) - 1);
        const uint8_t byte = bits < 8 ? table[code] : static_cast<uint8_t>(code);
        want += int64_t{x[static_cast<size_t>(r * 4 * quads + i)]} * (byte - 128);
      }
      ASSERT_EQ(got[r * p.out_stride + l], want) << isa_name(isa) << " lanes " << lanes << " quads " << quads << " rows " << rows
                                                 << " planes " << planes << " bits " << bits << " row " << r << " lane " << l;
    }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t l = lanes; l < p.out_stride; ++l) EXPECT_EQ(got[r * p.out_stride + l], -1) << "past the lanes";
  EXPECT_TRUE(bytes.memory.guards_intact());
}

TEST(ByteDots, AreExactOnEveryTarget) {
  for (Isa isa : available_isas())
    for (int64_t lanes : {16, 32, 64, 96, 128})
      for (int64_t quads : {8, 16, 128})
        for (int64_t rows = 1; rows <= kDotRows; ++rows)
          for (int planes : {1, 2})
            for (int bits : {2, 4, 8}) expect_dots(isa, lanes, quads, rows, planes, bits);
}

TEST(ByteDots, HoldTheLargestSums) {
  // 512 numbers of the largest magnitude against the lowest and the highest byte: just inside 32 bits.
  for (Isa isa : available_isas())
    for (int32_t sign : {-1, 1})
      for (uint8_t byte : {uint8_t{0}, uint8_t{255}}) {
        const std::vector<uint8_t> bytes(16 * 512, byte);
        const std::vector<int32_t> x(512, sign * operand_max(2));
        ByteDots p;
        p.bytes = bytes.data();
        p.lanes = p.out_stride = 16;
        p.quads = 128;
        p.row_words = operand_words(512);
        int32_t out[16];
        WEFT_KERNEL(isa, dots_of)(p, x.data(), 1, out);
        for (int32_t sum : out) EXPECT_EQ(sum, sign * operand_max(2) * 512 * (byte - 128)) << isa_name(isa);
      }
}

TEST(Levels, OfEveryWidthComeOutOfLaneTiles) {
  for (Isa isa : available_isas())
    for (int bits = 2; bits <= 7; ++bits)
      for (KvRole role : {KvRole::k, KvRole::v})
        for (int64_t D : {32, 96, 128}) {
          Rng rng(static_cast<uint64_t>(bits * 100 + D));
          Bytes bytes;
          const KvFormat format = kv_format(std::to_string(bits), D);
          SideView side;
          side.format = &format;
          side.role = role;
          side.storage = KvStorage::lane_tiles;
          side.D = D;
          side.groups = 1;
          side.planes = lane_planes(bits, D);
          const uint8_t* tile = bytes.make(tile_bytes(format), rng);
          const LevelBytes levels = level_bytes(side);
          EXPECT_EQ(levels.step, *format.grid_step);
          const int64_t lanes = role == KvRole::k ? kTileTokens : D, quads = (role == KvRole::k ? D : kTileTokens) / 4;
          auto* got = static_cast<uint8_t*>(bytes.memory.make(DType::u8, {4 * lanes * quads}).data);
          WEFT_KERNEL(isa, levels_of)(side, levels, tile, lanes, quads, got);
          for (int64_t token = 0; token < kTileTokens; ++token)
            for (int64_t d = 0; d < D; ++d) {
              int code = 0;
              for (int i = 0; i < side.planes.count; ++i) {
                const LanePlane& plane = side.planes.plane[i];
                const LaneField at = lane_field(role, plane.width, D, token, d);
                code |= (tile[plane.offset + at.byte] >> at.bit & ((1 << plane.width) - 1)) << plane.shift;
              }
              const int64_t packed = role == KvRole::k ? d : token, lane = role == KvRole::k ? token : d;
              const uint8_t byte = got[(packed / 4 * lanes + lane) * 4 + packed % 4];
              const float level = (static_cast<float>(byte) - 127.5f) * levels.step;
              ASSERT_FLOAT_EQ(level, format.codebook[static_cast<size_t>(code)])
                  << isa_name(isa) << " bits " << bits << " token " << token << " coordinate " << d;
            }
          EXPECT_TRUE(bytes.memory.guards_intact());
        }
}

TEST(Levels, WantAGridAndOneGain) {
  KvFormat format = kv_format("4", 64);
  SideView side;
  side.format = &format;
  side.storage = KvStorage::lane_tiles;
  side.D = 64;
  side.groups = 1;
  EXPECT_GT(level_bytes(side).step, 0);
  side.groups = 2;
  EXPECT_EQ(level_bytes(side).step, 0) << "a gain per group";
  side.groups = 1;
  side.storage = KvStorage::plain_tiles;
  EXPECT_EQ(level_bytes(side).step, 0) << "plain tiles";
  side.storage = KvStorage::lane_tiles;
  format.grid_step.reset();
  EXPECT_EQ(level_bytes(side).step, 0) << "no grid";
  // 7 bits whose levels are not neighbours: no target has a table of 128 entries.
  format = kv_format("7", 64);
  for (size_t i = 0; i < 128; ++i) format.codebook[i] = (static_cast<float>(2 * i) - 128 + 0.5f) * *format.grid_step;
  EXPECT_EQ(level_bytes(side).step, 0) << "7 bits apart";
  // 8 bits, of which two codes share a point: bytes could not be told from codes.
  format = kv_format("8", 64);
  EXPECT_GT(level_bytes(side).step, 0);
  format.codebook[255] = format.codebook[254];
  EXPECT_EQ(level_bytes(side).step, 0) << "8 bits with a point twice";
}

}  // namespace
}  // namespace weft::cpu

#endif  // HWY_ONCE
