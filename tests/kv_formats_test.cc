// Presets of KV formats: published tables and signs, distortion of every table, sizes, names, refusals, and same_codes.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cases/memory.h"
#include "weft/kv_codec.h"

namespace weft {
namespace {

// ---------------------------------------------------------------- tables

double pdf(double x) { return std::isinf(x) ? 0 : std::exp(-x * x / 2) / std::sqrt(2 * M_PI); }
double tail(double x) { return std::erfc(x / std::sqrt(2.0)) / 2; }

// Moments of N(0,1) between a and b.
struct Cell {
  double mass, first, second;
  Cell(double a, double b)
      : mass(a >= 0 ? tail(a) - tail(b) : tail(-b) - tail(-a)),
        first(pdf(a) - pdf(b)),
        second(mass + (std::isinf(a) ? 0 : a * pdf(a)) - (std::isinf(b) ? 0 : b * pdf(b))) {}
};

template <class F>
void for_each_cell(const std::vector<double>& levels, F&& visit) {
  for (size_t i = 0; i < levels.size(); ++i)
    visit(i, Cell(i == 0 ? -INFINITY : (levels[i - 1] + levels[i]) / 2,
                  i + 1 == levels.size() ? INFINITY : (levels[i] + levels[i + 1]) / 2));
}

// Mean squared error of N(0,1) coordinates, the integral in closed form.
double distortion(const std::vector<double>& levels) {
  double sum = 0;
  for_each_cell(levels,
                [&](size_t i, const Cell& c) { sum += c.second - 2 * levels[i] * c.first + levels[i] * levels[i] * c.mass; });
  return sum;
}

std::vector<double> levels_of(const KvFormat& format) {
  return {format.codebook.begin(), format.codebook.begin() + (1 << format.bits)};
}

// The least distortion of 2^bits levels, by Lloyd's iteration: every level becomes the mean of its cell until none moves.
double least_distortion(int bits) {
  std::vector<double> levels;
  const int count = 1 << bits;
  for (int i = 0; i < count; ++i) levels.push_back(3.0 * (2 * i + 1 - count) / count);
  double moved = 1;
  for (int sweep = 0; sweep < 200000 && moved > 1e-12; ++sweep) {
    std::vector<double> next(levels.size());
    for_each_cell(levels, [&](size_t i, const Cell& c) { next[i] = c.first / c.mass; });
    moved = 0;
    for (size_t i = 0; i < levels.size(); ++i) moved = std::max(moved, std::fabs(next[i] - levels[i]));
    levels = next;
  }
  EXPECT_LE(moved, 1e-12);
  return distortion(levels);
}

TEST(KvTables, LeastDistortionIsThePublishedOne) {
  // The values of cases/golden/lloyd_max.json, solved with 50 digits by another method.
  const double published[] = {.11748184782932929, .03454776078850373, .009501008008191886, .0025046683556747993,
                              6.442396653172622e-4};
  for (int bits = 2; bits <= 6; ++bits) EXPECT_NEAR(least_distortion(bits) / published[bits - 2], 1, 1e-10) << bits;
}

TEST(KvTables, OwnTablesAreNearTheOptimum) {
  const double allowed[] = {.001, .001, .001, .005, .025};
  for (int bits = 2; bits <= 6; ++bits) {
    const double ratio = distortion(levels_of(kv_format(std::to_string(bits), 128))) / least_distortion(bits);
    EXPECT_GE(ratio, 1) << bits;
    EXPECT_LE(ratio, 1 + allowed[bits - 2]) << bits;
  }
  // Uniform tables: no other step does better.
  for (int bits = 7; bits <= 8; ++bits) {
    const std::vector<double> levels = levels_of(kv_format(std::to_string(bits), 128));
    for (double factor : {0.999, 1.001}) {
      std::vector<double> other = levels;
      for (double& level : other) level *= factor;
      EXPECT_LT(distortion(levels), distortion(other)) << bits;
    }
  }
}

TEST(KvTables, OwnTablesLieOnTheHalfIntegerGrid) {
  for (int bits = 2; bits <= 8; ++bits) {
    const KvFormat format = kv_format(std::to_string(bits), 64);
    ASSERT_TRUE(format.grid_step);
    const int count = 1 << bits;
    for (int i = 0; i < count; ++i) {
      const float level = format.codebook[static_cast<size_t>(i)];
      const double n = std::floor(level / *format.grid_step);
      EXPECT_FLOAT_EQ(level, static_cast<float>((n + 0.5) * *format.grid_step));
      EXPECT_GE(n, -128);
      EXPECT_LE(n, 127);
      if (bits != 6) {
        EXPECT_EQ(level, -format.codebook[static_cast<size_t>(count - 1 - i)]) << "symmetric";
      }
      if (bits >= 7) {
        EXPECT_EQ(n, i - count / 2);
      }
    }
  }
}

TEST(KvTables, ImportedTablesHaveThePublishedDistortion) {
  EXPECT_NEAR(distortion(levels_of(kv_format("aura-2", 128))) / .117482, 1, 1e-4);
  EXPECT_NEAR(distortion(levels_of(kv_format("aura-3", 128))) / .034570, 1, 1e-4);
  EXPECT_NEAR(distortion(levels_of(kv_format("aura-4", 128))) / .020273, 1, 1e-4);
  EXPECT_NEAR(distortion(levels_of(kv_format("tq-4", 256))) / .0095010, 1, 1e-4);
  EXPECT_NEAR(distortion(levels_of(kv_format("tqhb-5", 256))) / 2.5047e-3, 1, 1e-4);
  EXPECT_NEAR(distortion(levels_of(kv_format("tqhb-6", 256))) / 6.4865e-4, 1, 1e-4);
  EXPECT_NEAR(distortion(levels_of(kv_format("tqhb-8", 256))) / 6.2743e-5, 1, 1e-4);
}

TEST(KvTables, AuraIsInUnitsOfN01AtEveryHeadSize) {
  for (int64_t d : {64, 128, 512}) EXPECT_NEAR(kv_format("aura-4", d).codebook[15], .173926 * std::sqrt(128), 1e-6);
}

// ---------------------------------------------------------------- signs and rotation sizes

std::vector<int> bytes_of(const SignBits& signs, size_t count) {
  std::vector<int> bytes;
  for (size_t i = 0; i < count; ++i) bytes.push_back(signs[i / 4] >> (8 * (i % 4)) & 0xff);
  return bytes;
}

TEST(KvSigns, PublishedSeeds) {
  EXPECT_EQ(bytes_of(srht_signs(0, 128), 16),
            (std::vector<int>{0x99, 0x2f, 0x1c, 0xd9, 0x3f, 0x14, 0x02, 0xf3, 0xef, 0x8c, 0x59, 0x9a, 0x45, 0x02, 0x8d, 0xee}));
  EXPECT_EQ(bytes_of(srht_signs(1, 128), 16),
            (std::vector<int>{0x9b, 0x4d, 0x84, 0x6e, 0xe9, 0x50, 0xa5, 0x3f, 0x19, 0xa8, 0x22, 0x49, 0x14, 0x4b, 0x6a, 0x13}));
  EXPECT_EQ(bytes_of(srht_signs(2, 128), 16),
            (std::vector<int>{0x39, 0xc8, 0x6a, 0xf7, 0x35, 0xb7, 0xe8, 0x2c, 0x67, 0x37, 0xbc, 0x0a, 0x3e, 0xa4, 0x15, 0x0d}));
}

TEST(KvSigns, ShorterHeadsUseTheSameBeginningAndNothingBeyond) {
  const SignBits all = srht_signs(7, 512), some = srht_signs(7, 40);
  EXPECT_EQ(some[0], all[0]);
  EXPECT_EQ(some[1], all[1] & 0xff);
  for (size_t i = 2; i < some.size(); ++i) EXPECT_EQ(some[i], 0u);
}

TEST(KvSigns, TqTable) {
  const std::vector<int> bytes = bytes_of(kv_format("tq-4", 512, 99).signs, 64);
  EXPECT_EQ(bytes[0], 0xa7);
  EXPECT_EQ(bytes[31], 0xdb);
  EXPECT_EQ(bytes[32], 0xd3);
  EXPECT_EQ(bytes[63], 0x85);
  const SignBits half = kv_format("tqhb-8", 256).signs;
  EXPECT_EQ(bytes_of(half, 32), std::vector<int>(bytes.begin(), bytes.begin() + 32));
  EXPECT_EQ(half[8], 0u);
}

TEST(KvSigns, LargestHadamardOrder) {
  const std::pair<int64_t, int64_t> wanted[] = {{8, 8},     {24, 24},   {40, 40},   {48, 48},  {56, 56},   {64, 64},  {72, 24},
                                                {80, 80},   {88, 8},    {96, 96},   {104, 8},  {112, 112}, {120, 40}, {128, 128},
                                                {192, 192}, {200, 40},  {224, 224}, {240, 80}, {256, 256}, {264, 24}, {320, 320},
                                                {384, 384}, {448, 448}, {480, 160}, {504, 56}, {512, 512}};
  for (const auto& [d, n] : wanted) EXPECT_EQ(largest_hadamard_order(d), n) << d;
}

// ---------------------------------------------------------------- sizes

TEST(KvSizes, BytesPerTokenOfEveryRecipe) {
  struct Row {
    const char* name;
    int64_t with_16_bit_gains;
  };
  const Row rows[] = {{"2v2", 68},  {"3v2", 84},  {"3v3", 100}, {"4v2", 100}, {"4v3", 116}, {"4v4", 132}, {"5v5", 164},
                      {"6v4", 164}, {"8v2", 164}, {"8v3", 180}, {"6v6", 196}, {"8v4", 196}, {"8v8", 260}};
  for (const Row& row : rows) {
    KvRecipe recipe = kv_recipe(row.name, 128, 128);
    EXPECT_EQ(bytes_per_token(recipe), row.with_16_bit_gains) << row.name;
    recipe.k.gain_dtype = recipe.v.gain_dtype = DType::f32;
    EXPECT_EQ(bytes_per_token(recipe), row.with_16_bit_gains + 4) << row.name;
  }
  EXPECT_EQ(bytes_per_token(kv_recipe("f16", 128, 128)), 512);
  EXPECT_EQ(bytes_per_token(kv_recipe("bf16", 128, 64)), 384);
  EXPECT_EQ(bytes_per_token(kv_recipe("f32", 128, 128)), 1024);
  EXPECT_EQ(bytes_per_token(kv_recipe("f16v4", 128, 128)), 256 + 66);
  EXPECT_EQ(bytes_per_token(kv_recipe("4v4", 64, 64)), 68);
  EXPECT_EQ(bytes_per_token(kv_recipe("4v2", 64, 64)), 52);
  EXPECT_EQ(bytes_per_token(kv_recipe("aura4v4", 128, 128)), 136);
  EXPECT_EQ(bytes_per_token(kv_recipe("aura4v2", 64, 64)), 56);
  EXPECT_EQ(bytes_per_token(kv_recipe("tq4", 256, 256)), 264);
  for (const char* name : {"tqhb5", "tqhb6", "tqhb8"}) {
    EXPECT_EQ(bytes_per_token(kv_recipe(name, 256, 256)), 520) << name;
    EXPECT_EQ(bytes_per_token(kv_recipe(name, 512, 512)), 1040) << name;
  }
}

TEST(KvSizes, RowsAreWholeWordsAndTilesWholeLines) {
  for (int bits = 2; bits <= 8; ++bits)
    for (int64_t d = 8; d <= kMaxHeadDim; d += 8) {
      const KvFormat format = kv_format(std::to_string(bits), d);
      EXPECT_EQ(code_bytes(format), (d * bits + 31) / 32 * 4);
      EXPECT_EQ(gain_bytes(format), 2);
      EXPECT_EQ(tile_bytes(format), 64 * (code_bytes(format) + 2));
      EXPECT_EQ(tile_bytes(format) % kTileAlignment, 0);
    }
  EXPECT_EQ(gain_bytes(kv_format("tq-4", 512)), 8);
  EXPECT_EQ(gain_bytes(kv_format("f16", 128)), 0);
  EXPECT_EQ(tile_bytes(kv_format("f16", 80)), 64 * 160);
}

// ---------------------------------------------------------------- names

TEST(KvNames, EveryPresetIsConsistentAndItsIdIsAName) {
  for (const char* side : {"2", "3", "4", "5", "6", "7", "8", "f32", "f16", "bf16", "aura-2", "aura-3", "aura-4", "tq-4", "tqhb-5",
                           "tqhb-6", "tqhb-8"}) {
    const KvFormat format = kv_format(side, 256, 5);
    EXPECT_TRUE(validate(format, "test", "format")) << validate(format, "test", "format").message;
    EXPECT_EQ(format.id, std::string(side).size() == 1 ? "weft1-" + std::string(side) : side);
    EXPECT_TRUE(same_codes(format, kv_format(format.id, 256, 5))) << side;
  }
  for (int64_t d = 8; d <= kMaxHeadDim; d += 8) EXPECT_TRUE(validate(kv_format("4", d), "test", "format")) << d;
}

TEST(KvNames, Recipes) {
  const std::pair<const char*, const char*> ids[] = {{"4v4", "weft1-4v4"},       {"8v3", "weft1-8v3"},    {"f16v4", "weft1-f16v4"},
                                                     {"4vbf16", "weft1-4vbf16"}, {"f16", "f16"},          {"f32vf16", "f32vf16"},
                                                     {"f16vf16", "f16"},         {"aura4v2", "aura-4v2"}, {"tq4", "tq-4"},
                                                     {"tqhb5", "tqhb-5"},        {"tqhb6", "tqhb-6"},     {"tqhb8", "tqhb-8"}};
  for (const auto& [name, id] : ids) {
    const KvRecipe recipe = kv_recipe(name, 256, 512, 3);
    EXPECT_EQ(recipe.id, id);
    EXPECT_EQ(recipe.k.head_dim, 256);
    EXPECT_EQ(recipe.v.head_dim, 512);
    const KvRecipe again = kv_recipe(recipe.id, 256, 512, 3);
    EXPECT_EQ(again.id, id);
    EXPECT_TRUE(same_codes(recipe.k, again.k) && same_codes(recipe.v, again.v)) << name;
  }
  const KvRecipe mixed = kv_recipe("8v3", 128, 128);
  EXPECT_EQ(mixed.k.bits, 8);
  EXPECT_EQ(mixed.v.bits, 3);
  EXPECT_EQ(kv_recipe("aura4v2", 64, 64).v.bits, 2);
  EXPECT_EQ(kv_recipe("f16v4", 64, 64).k.passthrough, DType::f16);
}

TEST(KvNames, WhatEachFamilyIs) {
  const KvFormat own = kv_format("4", 96, 11);
  EXPECT_EQ(own.rotation_group, 96);
  EXPECT_EQ(own.gain_group, 96);
  EXPECT_EQ(own.gain_rule, GainRule::unbiased);
  EXPECT_EQ(own.gain_units, GainUnits::normal);
  EXPECT_EQ(own.gain_dtype, DType::f16);
  EXPECT_EQ(own.signs, srht_signs(11, 96));
  EXPECT_EQ(own.seed, 11u);
  const KvFormat aura = kv_format("aura-3", 64, 2);
  EXPECT_EQ(aura.gain_rule, GainRule::matched);
  EXPECT_EQ(aura.gain_units, GainUnits::unit_vector);
  EXPECT_EQ(aura.gain_dtype, DType::f32);
  EXPECT_EQ(aura.tiny_norm, 1e-8f);
  EXPECT_FALSE(aura.grid_step);
  EXPECT_EQ(kv_format("tq-4", 256).gain_units, GainUnits::unit_vector);
  const KvFormat half = kv_format("tqhb-6", 512);
  EXPECT_EQ(half.gain_units, GainUnits::normal);
  EXPECT_EQ(half.rotation_group, 512);
  EXPECT_EQ(half.gain_group, 256);
  EXPECT_EQ(half.packing, Packing::byte);
  EXPECT_EQ(half.gain_rule, GainRule::rms);
}

template <class F>
std::string refusal(F&& make, const char* op, const char* argument) {
  try {
    make();
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code, Code::invalid_argument);
    EXPECT_EQ(error.status().op, op);
    EXPECT_EQ(error.status().argument, argument);
    return error.what();
  }
  ADD_FAILURE() << "not refused";
  return {};
}

TEST(KvNames, Refusals) {
  for (const char* side :
       {"", "1", "9", "44", "f8", "aura-5", "aura-8", "aura4", "tq-3", "tqhb-7", "weft1-9", "weft1-f16", "weft2-4"})
    refusal([&] { kv_format(side, 256); }, "kv_format", "side");
  for (const char* name : {"", "4", "v", "4v", "v4", "4v9", "4v4v4", "aura", "aura4", "aura4v8", "auraf16v4", "tq", "tq5", "tqhb4",
                           "tq4v4", "weft1-f16", "8V4", "-4v4"})
    refusal([&] { kv_recipe(name, 256, 256); }, "kv_recipe", "name");
  for (int64_t d : {-8, 0, 4, 12, 520, 1024}) {
    refusal([&] { kv_format("4", d); }, "kv_format", "head_dim");
    refusal([&] { kv_recipe("f16", d, d); }, "kv_recipe", "head_dim");
  }
  for (int64_t d : {80, 96, 192}) refusal([&] { kv_format("aura-4", d); }, "kv_format", "head_dim");
  for (int64_t d : {64, 128, 384}) refusal([&] { kv_format("tq-4", d); }, "kv_format", "head_dim");
  EXPECT_EQ(refusal([] { kv_format("tq-4", 128); }, "kv_format", "head_dim"), "kv_format: head_dim is 128, TQ wants 256 or 512");
  EXPECT_EQ(refusal([] { kv_format("4", 100); }, "kv_format", "head_dim"),
            "kv_format: head_dim is 100, wanted a multiple of 8 from 8 to 512");
  EXPECT_EQ(refusal([] { kv_format("aura-4", 96); }, "kv_format", "head_dim"),
            "kv_format: head_dim is 96, AURA wants a power of two");
  EXPECT_EQ(refusal([] { kv_recipe("aura4v2", 64, 192); }, "kv_recipe", "head_dim"),
            "kv_recipe: head_dim is 192, AURA wants a power of two");
  EXPECT_EQ(refusal([] { kv_format("f8", 64); }, "kv_format", "side"),
            "kv_format: side is \"f8\", wanted 2 to 8, f32, f16, bf16, aura-2 to aura-4, tq-4, tqhb-5, tqhb-6 or tqhb-8");
  EXPECT_EQ(refusal([] { kv_recipe("4v9", 64, 64); }, "kv_recipe", "name"),
            "kv_recipe: name is \"4v9\", wanted <k>v<v> with 2 to 8, f32, f16 or bf16 on each side (8v4, f16v4), f32, f16 or bf16 "
            "for both, "
            "aura<k>v<v> of 2 to 4, tq4, tqhb5, tqhb6 or tqhb8");
  refusal([] { kv_recipe("4v4", 128, 100); }, "kv_recipe", "head_dim");
}

TEST(KvNames, AuraWithATableOfOnesOwn) {
  std::vector<float> levels;
  for (int i = 0; i < 256; ++i) levels.push_back(0.03f * (static_cast<float>(i) - 127.5f));
  const KvFormat six = aura_format(6, 128, 4, levels.data());
  EXPECT_EQ(six.id, "aura-6-custom");
  EXPECT_EQ(six.bits, 6);
  EXPECT_EQ(six.codebook[63], levels[63]);
  EXPECT_EQ(six.codebook[64], 0);
  EXPECT_EQ(aura_format(8, 64, 0, levels.data()).codebook[255], levels[255]);
  const KvFormat published = kv_format("aura-3", 64, 4);
  const KvFormat again = aura_format(3, 64, 4, published.codebook.data());
  EXPECT_EQ(again.id, "aura-3");
  EXPECT_TRUE(same_codes(published, again));
  refusal([&] { aura_format(1, 64, 0, levels.data()); }, "aura_format", "bits");
  EXPECT_EQ(refusal([&] { aura_format(9, 64, 0, levels.data()); }, "aura_format", "bits"), "aura_format: bits is 9, wanted 2 to 8");
  EXPECT_EQ(refusal([&] { aura_format(4, 64, 0, nullptr); }, "aura_format", "levels"),
            "aura_format: levels is null, wanted 16 ascending numbers");
  EXPECT_EQ(refusal([&] { aura_format(8, 64, 0, nullptr); }, "aura_format", "levels"),
            "aura_format: levels is null, wanted 256 ascending numbers");
  EXPECT_EQ(refusal([&] { aura_format(4, 96, 0, levels.data()); }, "aura_format", "head_dim"),
            "aura_format: head_dim is 96, AURA wants a power of two");
  levels[5] = levels[4];
  EXPECT_EQ(refusal([&] { aura_format(4, 64, 0, levels.data()); }, "aura_format", "levels"),
            "aura_format: levels has a codebook whose level 5 is not above level 4");
}

// ---------------------------------------------------------------- same_codes

TEST(KvSameCodes, PackingRuleNameAndUnusedSignsDoNotMatter) {
  const KvFormat format = kv_format("4", 128, 1);
  KvFormat other = format;
  other.packing = Packing::byte;
  other.gain_rule = GainRule::matched;
  other.id = "another";
  other.seed = 77;
  other.grid_step.reset();
  other.tiny_norm = 0;
  other.signs[4] = 1;  // coordinate 128
  other.codebook[16] = 9;
  EXPECT_TRUE(same_codes(format, other));
}

TEST(KvSameCodes, EverythingElseDoes) {
  const KvFormat format = kv_format("4", 128, 1);
  float storage[128 * 128];
  const auto differs = [&](auto&& change) {
    KvFormat other = format;
    change(other);
    EXPECT_FALSE(same_codes(format, other));
    EXPECT_FALSE(same_codes(other, format));
  };
  differs([](KvFormat& f) { f = kv_format("5", 128, 1); });
  differs([](KvFormat& f) { f = kv_format("4", 128, 2); });
  differs([](KvFormat& f) { f.head_dim = 64; });
  differs([](KvFormat& f) { f.rotation = Rotation::none; });
  differs([](KvFormat& f) { f.rotation_group = 64; });
  differs([](KvFormat& f) { f.signs[3] ^= 1; });
  differs([](KvFormat& f) { f.gain_group = 64; });
  differs([](KvFormat& f) { f.gain_dtype = DType::bf16; });
  differs([](KvFormat& f) { f.gain_units = GainUnits::unit_vector; });
  differs([](KvFormat& f) { f.codebook[15] += 1; });
  differs([](KvFormat& f) { f.passthrough = DType::f16; });
  differs([&](KvFormat& f) { f.mean = dense(storage, DType::f32, {2, 128}); });
  KvFormat a = format;
  a.rotation = Rotation::dense;
  a.dense_rotation = dense(storage, DType::f32, {128, 128});
  KvFormat b = a;
  EXPECT_TRUE(same_codes(a, b));
  b.dense_rotation.data = storage + 1;
  EXPECT_FALSE(same_codes(a, b));
  EXPECT_TRUE(same_codes(kv_format("f16", 64), kv_format("f16", 64, 9)));
  EXPECT_FALSE(same_codes(kv_format("f16", 64), kv_format("bf16", 64)));
  EXPECT_FALSE(same_codes(kv_format("f16", 64), kv_format("f16", 128)));
}

}  // namespace
}  // namespace weft
