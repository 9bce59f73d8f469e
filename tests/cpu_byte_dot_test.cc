// Byte dot products and byte tables of the cpu kernels on every instruction set of this machine, against scalar integer loops.
// clang-format off
#include "cpu/common/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/cpu_byte_dot_test.cc"
#include <hwy/foreach_target.h>
// clang-format on
#include "cpu/attention/attention_integer-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

void dots_of(const ByteDots& p, const int32_t* x, int64_t rows, int32_t* out) {
  uint32_t operands[kDotRows * kMaxHeadDim];
  int32_t sums[kDotRows] = {};
  const int64_t count = 4 * p.quads;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < count; ++i) sums[r] += x[r * count + i];
    make_operands(x + r * count, count, p.ints, operands + r * p.row_words);
  }
  byte_dots(p, operands, sums, rows, out);
}

bool short_sums() { return kShortSums; }

float query_ints(RowInts ints, const float* q, int64_t count, int32_t* out) {
  int32_t sum;
  return to_integers(q, count, ints, out, sum);
}

// 64 weights quantised as in Precision::fast; returns the value of one unit.
float weight_ints(const float* weights, int32_t* out) {
  AttentionCall call;
  call.ints = RowInts::bytes;
  call.v_levels.step = 1;
  QueryRowState rows;
  rows.slots[0] = {0, kTileTokens};
  HWY_ALIGN float p[kTileTokens];
  HWY_ALIGN float gains[kTileTokens];
  HWY_ALIGN int32_t integers[kTileTokens];
  uint32_t operands[operand_words(kTileTokens)];
  std::copy_n(weights, kTileTokens, p);
  std::fill_n(gains, kTileTokens, 1.0f);
  integer_weights<1, kShortSums>(call, rows, 0, p, gains, true, integers, operands);
  std::copy_n(integers, kTileTokens, out);
  return rows.w_unit[0] / call.v_levels.step;
}

void levels_of(const SideView& side, const LevelBytes& levels, const uint8_t* tile, int64_t lanes, int64_t quads, uint8_t* out) {
  expand_levels(side, levels, tile, lanes, quads, out);
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <numeric>
#include <vector>

#include "cases/memory.h"
#include "cpu/common/isa.h"

namespace weft::cpu {

HWY_EXPORT(dots_of);
HWY_EXPORT(short_sums);
HWY_EXPORT(query_ints);
HWY_EXPORT(weight_ints);
HWY_EXPORT(levels_of);

namespace {

using cases::Memory;
using cases::Rng;

// Buffers of random bytes, with guard bands.
struct Bytes {
  uint8_t* make(int64_t count, Rng& rng) {
    auto* data = static_cast<uint8_t*>(memory.make(DType::u8, {count}).data);
    for (int64_t i = 0; i < count; ++i) data[i] = static_cast<uint8_t>(rng.next() >> 24);
    return data;
  }
  Memory memory;
};

// Random integers within the range of RowInts; a fifth of them are the extremes.
std::vector<int32_t> row_ints(RowInts ints, bool short_sums, int64_t count, Rng& rng) {
  std::vector<int32_t> x;
  const bool weights = ints == RowInts::weights;
  const int64_t most = weights ? 255 : operand_max(ints);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t pick = rng.integer(0, 9);
    x.push_back(static_cast<int32_t>(pick == 0 ? most : pick == 1 ? -most : rng.integer(-most, most)));
  }
  const auto limit = [&](std::initializer_list<size_t> together, int32_t left) {
    for (size_t i : together) left -= x[i] = std::min(x[i], left);
  };
  for (size_t i = 0; i < x.size(); i += 8) {
    if (weights) {
      for (size_t j = i; j < i + 8; ++j) x[j] = std::abs(x[j]);
      for (size_t j : {i, i + 2}) limit({j + 4, j, j + 5, j + 1}, 255);
    }
    for (size_t j = i; j < i + 8 && short_sums && ints == RowInts::bytes; j += 2)
      if (x[j] * x[j + 1] > 0 && std::abs(x[j] + x[j + 1]) > 128) x[j] = (x[j] > 0 ? 128 : -128) - x[j + 1];
  }
  return x;
}

const char* name_of(RowInts ints) { return ints == RowInts::wide ? "wide" : ints == RowInts::bytes ? "bytes" : "weights"; }

std::vector<RowInts> kinds_of(Isa isa) {
  if (WEFT_KERNEL(isa, short_sums)()) return {RowInts::wide, RowInts::bytes, RowInts::weights};
  return {RowInts::wide, RowInts::bytes};
}

void expect_dots(Isa isa, int64_t lanes, int64_t quads, int64_t rows, RowInts ints, int bits) {
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
  p.ints = ints;
  p.row_words = operand_words(4 * quads);
  p.out_stride = lanes + 3;
  const std::vector<int32_t> x = row_ints(ints, WEFT_KERNEL(isa, short_sums)(), rows * 4 * quads, rng);
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
                                                 << " " << name_of(ints) << " bits " << bits << " row " << r << " lane " << l;
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
          for (RowInts ints : kinds_of(isa))
            for (int bits : {2, 4, 8}) expect_dots(isa, lanes, quads, rows, ints, bits);
}

// Eight integers, repeated to 512, with the lowest and the highest byte.
void expect_sums(Isa isa, RowInts ints, const std::array<int32_t, 8>& eight) {
  for (uint8_t byte : {uint8_t{0}, uint8_t{255}}) {
    const std::vector<uint8_t> bytes(16 * 512, byte);
    std::vector<int32_t> x;
    while (x.size() < 512) x.insert(x.end(), eight.begin(), eight.end());
    ByteDots p;
    p.bytes = bytes.data();
    p.ints = ints;
    p.lanes = p.out_stride = 16;
    p.quads = 128;
    p.row_words = operand_words(512);
    int32_t out[16];
    WEFT_KERNEL(isa, dots_of)(p, x.data(), 1, out);
    const int32_t want = std::accumulate(x.begin(), x.end(), 0) * (byte - 128);
    for (int32_t sum : out) EXPECT_EQ(sum, want) << isa_name(isa) << " " << name_of(ints) << " from " << eight[0];
  }
}

TEST(ByteDots, HoldTheLargestSums) {
  for (Isa isa : available_isas()) {
    for (int32_t sign : {-1, 1}) {
      const auto all = [&](int32_t n) { return std::array<int32_t, 8>{n, n, n, n, n, n, n, n}; };
      expect_sums(isa, RowInts::wide, all(sign * 16383));  // just inside 32 bits
      // Just inside 16 bits, where sums are short.
      expect_sums(isa, RowInts::bytes, all(sign * 64));
      expect_sums(isa, RowInts::bytes, {127 * sign, sign, sign, 127 * sign, 127, -127, -127, 127});
    }
    if (!WEFT_KERNEL(isa, short_sums)()) continue;
    expect_sums(isa, RowInts::weights, {64, 64, 64, 64, 64, 63, 63, 64});
    expect_sums(isa, RowInts::weights, {255, 0, 0, 0, 0, 0, 0, 255});
    expect_sums(isa, RowInts::weights, {0, 127, 128, 0, 128, 0, 0, 127});
  }
}

// The integers of queries are in range. With short sums, so are the sums of two neighbours of one sign.
TEST(ByteDots, FitIntegersOfQueries) {
  for (Isa isa : available_isas()) {
    const bool short_sums = WEFT_KERNEL(isa, short_sums)();
    Rng rng(7);
    for (int trial = 0; trial < 200; ++trial) {
      float q[64];
      const double one = rng.normal();
      for (float& x : q) x = static_cast<float>(trial % 2 ? one * (rng.integer(0, 1) ? 1 : -1) : rng.normal());
      int32_t x[64];
      WEFT_KERNEL(isa, query_ints)(RowInts::bytes, q, 64, x);
      int32_t top = 0, pairs = 0;
      for (int i = 0; i < 64; i += 2) {
        top = std::max({top, std::abs(x[i]), std::abs(x[i + 1])});
        pairs = std::max({pairs, std::max(x[i], 0) + std::max(x[i + 1], 0), std::max(-x[i], 0) + std::max(-x[i + 1], 0)});
      }
      // The range is used in full: rounding moves a sum of two by at most 1.
      EXPECT_LE(top, 127) << isa_name(isa);
      EXPECT_LE(short_sums ? pairs : 0, 128) << isa_name(isa);
      EXPECT_GE(short_sums ? pairs : top, short_sums ? 126 : 127) << isa_name(isa);
    }
  }
}

TEST(ByteDots, FitIntegersOfWeights) {
  for (Isa isa : available_isas()) {
    const bool short_sums = WEFT_KERNEL(isa, short_sums)();
    Rng rng(8);
    for (int trial = 0; trial < 200; ++trial) {
      float w[kTileTokens];  // from all equal to one that outweighs all others
      for (float& x : w) x = static_cast<float>(std::exp(trial % 10 * rng.normal()));
      int32_t x[kTileTokens];
      WEFT_KERNEL(isa, weight_ints)(w, x);
      int32_t top = 0, fours = 0;
      for (int i = 0; i < kTileTokens; i += 8)
        for (int j : {i, i + 2}) {
          fours = std::max(fours, x[j] + x[j + 1] + x[j + 4] + x[j + 5]);
          top = std::max({top, x[j], x[j + 1], x[j + 4], x[j + 5]});
        }
      EXPECT_GE(*std::min_element(x, x + kTileTokens), 0) << isa_name(isa);
      // Rounding moves a sum of four by at most 2.
      EXPECT_LE(short_sums ? fours : top, short_sums ? 255 : 127) << isa_name(isa);
      EXPECT_GE(short_sums ? fours : top, short_sums ? 250 : 127) << isa_name(isa);
    }
  }
}

TEST(ByteDots, IntegersOfEqualWeightsAreExact) {
  for (Isa isa : available_isas()) {
    float w[kTileTokens];
    int32_t x[kTileTokens];
    std::fill_n(w, kTileTokens, 0.75f);
    const float unit = WEFT_KERNEL(isa, weight_ints)(w, x);
    for (int32_t integer : x) EXPECT_FLOAT_EQ(unit * static_cast<float>(integer), 0.75f) << isa_name(isa);
  }
}

// Values whose sums overflow f32.
TEST(ByteDots, IntegersOfTheLargestNumbers) {
  constexpr float kLarge = 3e38f;
  for (Isa isa : available_isas()) {
    float large[kTileTokens];
    int32_t x[kTileTokens];
    std::fill_n(large, kTileTokens, kLarge);
    const float q_unit = WEFT_KERNEL(isa, query_ints)(RowInts::bytes, large, kTileTokens, x);
    for (int32_t integer : x) EXPECT_NEAR(q_unit * static_cast<float>(integer) / kLarge, 1, 0.01) << isa_name(isa);
    const float w_unit = WEFT_KERNEL(isa, weight_ints)(large, x);
    for (int32_t integer : x) EXPECT_NEAR(w_unit * static_cast<float>(integer) / kLarge, 1, 0.01) << isa_name(isa);
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
  side.storage = KvStorage::token_major_tiles;
  EXPECT_EQ(level_bytes(side).step, 0) << "token-major tiles";
  side.storage = KvStorage::lane_tiles;
  format.grid_step.reset();
  EXPECT_EQ(level_bytes(side).step, 0) << "no grid";
  // 7 bits whose levels are not neighbours: no target has a table of 128 entries.
  format = kv_format("7", 64);
  for (size_t i = 0; i < 128; ++i) format.codebook[i] = (static_cast<float>(2 * i) - 128 + 0.5f) * *format.grid_step;
  EXPECT_EQ(level_bytes(side).step, 0) << "7 bits apart";
  // 8 bits where two codes share a grid point: codes are then not their own bytes.
  format = kv_format("8", 64);
  EXPECT_GT(level_bytes(side).step, 0);
  format.codebook[255] = format.codebook[254];
  EXPECT_EQ(level_bytes(side).step, 0) << "8 bits with a point twice";
}

}  // namespace
}  // namespace weft::cpu

#endif  // HWY_ONCE
