// kv_encode on the cpu backend against the reference, byte by byte, on every instruction set of this machine.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "common/bit_pack.h"
#include "common/lanes_tile.h"
#include "tests/support/kv_trial.h"

namespace weft {
namespace {

using namespace tests;

// Error bound of a gain: f32 arithmetic may round it to either of two neighbours.
double gain_bound(DType dtype) { return dtype == DType::f16 ? 0x1p-10 : dtype == DType::bf16 ? 0x1p-7 : 2e-6; }

::testing::AssertionResult same_side(const KvCache& cache, const KvSide& got, const KvSide& want) {
  const KvFormat& format = want.format;
  const auto* a = static_cast<const uint8_t*>(got.codes.data);
  const auto* b = static_cast<const uint8_t*>(want.codes.data);
  const bool tiles = cache.layout == KvLayout::tiles;
  const int64_t bytes = want.codes.elements() * dtype_bytes(want.codes.dtype);
  const int64_t unit = tiles ? tile_bytes(format) : bytes, codes = tiles ? kTileTokens * code_bytes(format) : bytes;
  const auto same_gains = [&](const Tensor& x, const Tensor& y) {
    for (int64_t i = 0; i < y.elements(); ++i) {
      const double mine = cases::get(x, i), right = cases::get(y, i);
      const bool garbage = std::isnan(mine) && std::isnan(right);
      if (!garbage && !(std::abs(mine - right) <= gain_bound(format.gain_dtype) * std::abs(right))) return false;
    }
    return true;
  };
  for (int64_t first = 0; first < bytes; first += unit) {
    for (int64_t i = first; i < first + codes; ++i)
      if (a[i] != b[i])
        return ::testing::AssertionFailure() << "byte " << i - first << " of unit " << first / std::max<int64_t>(unit, 1) << " is "
                                             << int(a[i]) << ", wanted " << int(b[i]);
    if (tiles && !format.passthrough) {
      const int64_t count = (unit - codes) / dtype_bytes(format.gain_dtype);
      const auto view = [&](const uint8_t* p) {
        return dense(const_cast<uint8_t*>(p) + first + codes, format.gain_dtype, {count});
      };
      if (!same_gains(view(a), view(b))) return ::testing::AssertionFailure() << "gains of tile " << first / unit << " differ";
    }
  }
  if (want.gains.present() && !same_gains(got.gains, want.gains)) return ::testing::AssertionFailure() << "gains differ";
  return ::testing::AssertionSuccess();
}

void expect_reference_bytes(const std::string& name, const Wanted& setup, uint64_t seed = 1) {
  Trial trial(setup, seed);
  const KvCache want = trial.encode(kReference);
  for (Isa isa : cases::usable_isas()) {
    const KvCache got = trial.encode(cpu_with(isa));
    EXPECT_TRUE(same_side(want, got.k, want.k)) << name << " k " << isa_name(isa);
    EXPECT_TRUE(same_side(want, got.v, want.v)) << name << " v " << isa_name(isa);
  }
}

TEST(CpuKvEncode, BytesOfTheReferenceAtEveryBitWidth) {
  for (int bits = 2; bits <= 8; ++bits)
    for (int64_t D : {8, 24, 40, 64, 80, 112, 128, 256}) {
      KvFormat k = kv_format(digit(bits), D, 1), v = kv_format(digit(10 - bits), D, 2);
      expect_reference_bytes("bits " + digit(bits) + " D " + std::to_string(D), {.k = k, .v = v});
      k.packing = v.packing = Packing::byte;
      if (D <= 64) expect_reference_bytes("bytes, bits " + digit(bits) + " D " + std::to_string(D), {.k = k, .v = v});
    }
}

TEST(CpuKvEncode, EveryHeadDim) {
  for (int64_t D = 8; D <= kMaxHeadDim; D += 8)
    expect_reference_bytes("D " + std::to_string(D),
                           {.k = kv_format("4", D, 1), .v = kv_format("3", D, 1), .Hk = 1, .capacity = 8, .lengths = {3}});
}

TEST(CpuKvEncode, Presets) {
  for (const char* name : {"aura2v2", "aura3v4", "aura4v3"})
    for (int64_t D : {8, 64, 128, 512}) {
      const KvRecipe recipe = kv_recipe(name, D, D, 4);
      expect_reference_bytes(name, {.k = recipe.k, .v = recipe.v});
    }
  for (const char* name : {"tq4", "tqhb5", "tqhb6", "tqhb8"})
    for (int64_t D : {256, 512}) {
      const KvRecipe recipe = kv_recipe(name, D, D);
      expect_reference_bytes(name, {.k = recipe.k, .v = recipe.v});
    }
  for (const char* name : {"f32", "f16", "bf16", "f16v4", "3vbf16"})
    for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      const KvRecipe recipe = kv_recipe(name, 40, 96, 1);
      expect_reference_bytes(name, {.k = recipe.k, .v = recipe.v, .dtype = dtype});
    }
}

TEST(CpuKvEncode, GainsRotationsAndMeans) {
  Memory memory;
  Rng rng(2);
  const Tensor mean = memory.make(DType::f32, {2, 48}), matrix = memory.make(DType::f32, {48, 48});
  cases::fill_normal(mean, rng, 0.5);
  // Any matrix will do that keeps rows from becoming zero: nothing here needs it to be orthogonal.
  cases::fill_normal(matrix, rng, 0.1);
  for (GainRule rule : {GainRule::rms, GainRule::matched, GainRule::least_squares, GainRule::unbiased})
    for (GainUnits units : {GainUnits::normal, GainUnits::unit_vector})
      for (int64_t group : {48, 16, 12, 8, 2}) {
        KvFormat k = kv_format("4", 48, 1);
        k.gain_rule = rule;
        k.gain_units = units;
        k.gain_group = group;
        KvFormat v = k;
        k.gain_dtype = DType::f32;
        k.mean = v.mean = mean;
        v.gain_dtype = group == 48 ? DType::bf16 : DType::f16;
        v.rotation = rule == GainRule::rms ? Rotation::none : Rotation::dense;
        v.dense_rotation = matrix;
        expect_reference_bytes("gain group " + std::to_string(group), {.k = k, .v = v, .lengths = {3}});
      }
}

TEST(CpuKvEncode, LayoutsAndKinds) {
  for (int bits = 2; bits <= 8; ++bits)
    for (CacheKind kind : {CacheKind::linear, CacheKind::ring, CacheKind::paged})
      for (const auto& [layout, order] : {std::pair{KvLayout::rows, TileOrder::token_major},
                                          {KvLayout::tiles, TileOrder::token_major},
                                          {KvLayout::tiles, TileOrder::lanes}}) {
        Wanted setup{.k = kv_format(digit(bits), 32, 1),
                     .v = kv_format(digit(bits), 64, 1),
                     .layout = layout,
                     .order = order,
                     .kind = kind,
                     .Hk = 1,
                     .lengths = {70, 0, 34},
                     .start = 50};
        if (kind == CacheKind::ring) setup.capacity = 64, setup.pinned = 3;  // the first sequence laps itself
        expect_reference_bytes("bits " + digit(bits), setup, static_cast<uint64_t>(bits));
      }
  const KvRecipe mixed = kv_recipe("f16v4", 40, 64, 1);
  expect_reference_bytes("mixed",
                         {.k = mixed.k, .v = mixed.v, .layout = KvLayout::tiles, .order = TileOrder::lanes, .lengths = {9}});
}

TEST(CpuKvEncode, LanesLieWhereLaneFieldSays) {
  for (int bits = 2; bits <= 8; ++bits)
    for (Isa isa : cases::usable_isas()) {
      Wanted setup{.k = kv_format(digit(bits), 96, 1), .v = kv_format(digit(bits), 32, 1), .Hk = 1, .lengths = {100}};
      Trial trial(setup, 5, Trial::Rows::any);
      const KvCache rows = trial.encode(cpu_with(isa));
      trial.setup.layout = KvLayout::tiles;
      trial.setup.order = TileOrder::lanes;
      const KvCache lanes = trial.encode(cpu_with(isa));
      for (KvRole role : {KvRole::k, KvRole::v}) {
        const KvSide &row = role == KvRole::k ? rows.k : rows.v, &lane = role == KvRole::k ? lanes.k : lanes.v;
        const int64_t D = row.format.head_dim, block = 1;
        const LanePlanes planes = lane_planes(bits, D);
        int wrong = 0;
        for (int64_t t = 0; t < 100; ++t)
          for (int64_t j = 0; j < D; ++j) {
            const uint8_t* tile =
                static_cast<const uint8_t*>(lane.codes.data) + block * lane.codes.stride(0) + t / 64 * lane.codes.stride(2);
            uint32_t code = 0;
            for (int p = 0; p < planes.count; ++p) {
              const LaneField at = lane_field(role, planes.plane[p].width, D, t % 64, j);
              code |= (tile[planes.plane[p].offset + at.byte] >> at.bit & ((1u << planes.plane[p].width) - 1))
                      << planes.plane[p].shift;
            }
            const uint8_t* bytes =
                static_cast<const uint8_t*>(row.codes.data) + block * row.codes.stride(0) + t * row.codes.stride(2);
            wrong += code != packed_code(bytes, j, bits);
          }
        EXPECT_EQ(wrong, 0) << bits << " " << isa_name(isa);
      }
    }
}

// Runs of tokens and single tokens have code paths of their own, and a row of zeros inside a run has a third.
TEST(CpuKvEncode, OneByOneIsAllAtOnce) {
  const auto expect_same = [](Isa isa, int bits, int64_t D, const Wanted& setup) {
    Trial trial(setup, 6, Trial::Rows::any);
    for (int64_t i = 0; i < setup.Hk * D; ++i) cases::set(trial.v, 40 * setup.Hk * D + i, 0);
    const KvCache all = trial.encode(cpu_with(isa)), single = trial.fresh(setup), chunks = trial.fresh(setup);
    for (int64_t t = 0; t < trial.T; ++t) trial.encode_into(cpu_with(isa), single, t, t + 1);
    for (int64_t t = 0; t < trial.T; t += 13) trial.encode_into(cpu_with(isa), chunks, t, std::min(t + 13, trial.T));
    EXPECT_TRUE(same_bytes(all, single)) << bits << " " << D << " " << isa_name(isa);
    EXPECT_TRUE(same_bytes(all, chunks)) << bits << " " << D << " " << isa_name(isa);
  };
  for (int bits : {2, 3, 4, 5, 7, 8})
    for (Isa isa : cases::usable_isas()) {
      Wanted setup;
      setup.layout = KvLayout::tiles;
      setup.order = TileOrder::lanes;
      setup.lengths = {75};
      setup.start = 9;
      for (int64_t D : {64, 128, 256}) {
        if (D > 64 && (bits != 4 && bits != 8)) continue;
        setup.k = setup.v = kv_format(digit(bits), D, 1);
        setup.dtype = D == 64 ? DType::f32 : D == 128 ? DType::bf16 : DType::f16;
        expect_same(isa, bits, D, setup);
      }
      setup.order = TileOrder::token_major;
      setup.layout = bits % 2 == 0 ? KvLayout::rows : KvLayout::tiles;
      setup.k = setup.v = kv_format(digit(bits), 128, 1);
      expect_same(isa, bits, 128, setup);
    }
}

TEST(CpuKvEncode, BitsDoNotDependOnThreadsOrNeighbours) {
  for (Isa isa : cases::usable_isas()) {
    if (isa == Isa::scalar) continue;  // slow, and split as the others are
    for (TileOrder order : {TileOrder::token_major, TileOrder::lanes}) {
      Wanted setup{.k = kv_format("4", 128, 1),
                   .v = kv_format("3", 128, 1),
                   .layout = KvLayout::tiles,
                   .order = order,
                   .kind = CacheKind::paged,
                   .Hk = 3,
                   .lengths = {300, 7, 91},
                   .start = 5};
      setup.capacity = 320;
      Trial trial(setup, 8, Trial::Rows::any);
      const KvCache want = trial.encode(cpu_with(isa, 1));
      for (int threads : {2, 3, 7}) EXPECT_TRUE(same_bytes(trial.encode(cpu_with(isa, threads)), want)) << threads;
      // The second sequence in a call of its own.
      KvCache alone = trial.fresh(setup);
      KvEncodeArgs args{trial.k, trial.v, trial.positions, Sequences::packed(trial.memory.indices({300, 307}), 1, 300), alone};
      args.cache.page_table.data = static_cast<int32_t*>(alone.page_table.data) + alone.page_table.stride(0);
      args.cache.page_table.sizes[0] = 1;
      kv_encode(cpu_with(isa, 3), args);
      const int64_t block = static_cast<const int32_t*>(args.cache.page_table.data)[0], bytes = want.k.codes.stride(0);
      EXPECT_EQ(std::memcmp(static_cast<uint8_t*>(alone.k.codes.data) + block * bytes,
                            static_cast<uint8_t*>(want.k.codes.data) + block * bytes, static_cast<size_t>(bytes)),
                0);
    }
  }
}

TEST(CpuKvEncode, CodesDifferOnlyAtBoundaries) {
  for (const char* name : {"2", "4", "6", "8", "tq-4", "tqhb-8"})
    for (Isa isa : cases::usable_isas()) {
      const KvFormat format = kv_format(name, 256, 1);
      Trial trial({.k = format, .v = kv_format("f16", 8), .Hk = 4, .capacity = 64, .lengths = {64}}, 9, Trial::Rows::any);
      const KvCache want = trial.encode(kReference), got = trial.encode(cpu_with(isa));
      int64_t different = 0, excused = 0;
      for (int64_t t = 0; t < trial.T; ++t)
        for (int64_t h = 0; h < 4; ++h) {
          const int64_t at = want.k.codes.stride(0) + h * want.k.codes.stride(1) + t * want.k.codes.stride(2);
          const auto *a = static_cast<const uint8_t*>(got.k.codes.data) + at,
                     *b = static_cast<const uint8_t*>(want.k.codes.data) + at;
          if (std::memcmp(a, b, static_cast<size_t>(code_bytes(format))) == 0) continue;
          std::vector<double> x;
          for (int64_t d = 0; d < 256; ++d) x.push_back(cases::get(trial.k, (t * 4 + h) * 256 + d));
          const std::vector<double> z = normalised(format, h, x);
          for (int64_t d = 0; d < 256; ++d) {
            const auto code = [&](const uint8_t* row) {
              return format.packing == Packing::byte ? row[d] : packed_code(row, d, format.bits);
            };
            if (code(a) == code(b)) continue;
            ++different;
            const size_t upper = std::max(code(a), code(b));
            excused +=
                upper - std::min(code(a), code(b)) == 1 && std::abs(z[static_cast<size_t>(d)] - boundary(format, upper)) <= kNear;
          }
        }
      EXPECT_EQ(different, excused) << name << " " << isa_name(isa);
      EXPECT_LE(different, 64 * 4 * 256 / 1000) << name << " " << isa_name(isa);
    }
}

// One coordinate holds the whole norm of a row: the largest magnitude a coordinate can have.
TEST(CpuKvEncode, OutliersInTheRotatedDomain) {
  for (const char* name : {"2", "3", "4", "5"})
    for (int64_t D : {64, 128, 256, 512}) {
      const KvFormat format = kv_format(name, D, 1);
      for (KvLayout layout : {KvLayout::rows, KvLayout::tiles}) {
        Wanted setup{.k = format, .v = format, .layout = layout, .Hk = 1, .lengths = {32}};
        if (layout == KvLayout::tiles) setup.order = TileOrder::lanes;
        Trial trial(setup, 7, Trial::Rows::any);
        const Tensor y = trial.memory.make(DType::f32, {32, 1, D});
        for (int64_t i = 0; i < 32 * D; ++i) cases::set(y, i, i % D != i / D * 5 % D ? 0 : i / D % 2 == 0 ? 1 : -1);
        for (const Tensor& x : {trial.k, trial.v}) kv_rotate(kReference, {y, x, format, true});
        for (Isa isa : cases::usable_isas()) {
          const KvCache cache = trial.encode(cpu_with(isa));
          KvCache rows = cache;
          if (layout == KvLayout::tiles) {
            Wanted as_rows = setup;
            as_rows.layout = KvLayout::rows, as_rows.order = TileOrder::token_major;
            rows = trial.fresh(as_rows);
            kv_repack(kReference, {cache, rows});
          }
          for (const KvSide* side : {&rows.k, &rows.v})
            for (int64_t t = 0; t < 32; ++t) {
              const auto* row = static_cast<const uint8_t*>(side->codes.data) + side->codes.stride(0) + t * side->codes.stride(2);
              const int top = (1 << format.bits) - 1;
              EXPECT_EQ(packed_code(row, t * 5 % D, format.bits), t % 2 == 0 ? top : 0) << name << " " << D << " " << isa_name(isa);
              for (int64_t j = 0; j < D; ++j) {  // the other coordinates are near 0
                if (j == t * 5 % D) continue;
                EXPECT_EQ((packed_code(row, j, format.bits) + 1) / 2, (top + 1) / 4) << name << " " << D << " " << isa_name(isa);
              }
            }
        }
      }
    }
}

TEST(CpuKvEncode, ZeroTinyHugeAndBrokenRows) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (const char* name : {"4", "8", "aura-3"})
    for (GainRule rule : {GainRule::rms, GainRule::matched, GainRule::least_squares, GainRule::unbiased})
      for (int64_t group : {64, 8}) {
        KvFormat format = kv_format(name, 64, 1);
        format.gain_rule = rule;
        format.gain_dtype = DType::f32;
        format.gain_group = group;
        Memory memory;
        Rng rng(4);
        std::vector<std::vector<double>> rows;
        for (double scale : {0.0, 1e-38, 1e-20, 1e-12, 1e-6, 1e6, 1e15, 1e25, 1e37})
          rows.push_back(tests::random_row(rng, 64, scale));
        for (double broken : {kInf, -kInf, std::nan("")}) {
          rows.push_back(tests::random_row(rng, 64));
          rows.back()[5] = broken;
        }
        const auto T = static_cast<int64_t>(rows.size());
        const Tensor x = tests::make_rows(memory, rows);
        std::vector<int64_t> order;
        for (int64_t t = 0; t < T; ++t) order.push_back(t);
        const Tensor at = memory.indices(order);
        const auto encode = [&](const Stream& stream) {
          const KvCache cache = tests::make_cache(memory, format, kv_format("f32", 8), 1, 1, T);
          kv_encode(stream, {x, {}, at, Sequences::uniform(1), cache});
          return cache;
        };
        const KvCache want = encode(kReference);
        for (Isa isa : cases::usable_isas()) {
          const KvCache got = encode(cpu_with(isa));
          for (int64_t t = 0; t < T; ++t)
            for (int64_t i = 0; i < 64 / group; ++i) {
              const double mine = cases::get(got.k.gains, t * (64 / group) + i),
                           right = cases::get(want.k.gains, t * (64 / group) + i);
              const bool same = std::isnan(right) ? std::isnan(mine) : std::abs(mine - right) <= 2e-6 * std::abs(right) + 1e-44;
              EXPECT_TRUE(same) << name << " row " << t << " group " << i << ": " << mine << ", wanted " << right << " "
                                << isa_name(isa);
            }
          EXPECT_TRUE(cases::same_bits(got.k.codes, want.k.codes)) << name << " " << isa_name(isa);
        }
      }
}

TEST(CpuKvEncode, ChoiceNamesKernelAndPlan) {
  Trial trial({.k = kv_format("4", 128, 1), .v = kv_format("4", 128, 1), .Hk = 8, .capacity = 64, .lengths = {64}}, 1,
              Trial::Rows::any);
  const KvEncodeArgs args{trial.k, trial.v, trial.positions, trial.sequences, trial.fresh(trial.setup)};
  for (Isa isa : cases::usable_isas())
    EXPECT_EQ(choose(cpu_with(isa, 2), args).kernel, std::string("cpu.kv_encode.fwht.") + isa_name(isa));
  EXPECT_EQ(choose(cpu_with(Isa::best, 2), args).plan, "2 threads over 1 sequences x 2 sides x 4 groups of heads, tokens in order");
}

}  // namespace
}  // namespace weft
