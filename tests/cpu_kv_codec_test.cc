// The KV codec on the cpu backend against the reference, byte by byte, on every instruction set of this machine.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "cases/verify.h"
#include "shared/bit_pack.h"
#include "shared/kv_index.h"
#include "shared/lanes_tile.h"
#include "tests/support/kv.h"

namespace weft {
namespace {

using cases::Memory;
using cases::Rng;

constexpr Stream kReference{Backend::reference};

Stream cpu_with(Isa isa, int threads = 1) {
  Stream stream;
  stream.isa = isa;
  stream.threads = threads;
  return stream;
}

// What a cache is made of, and the tokens that go into it.
struct Wanted {
  KvFormat k, v;
  KvLayout layout = KvLayout::rows;
  TileOrder order = TileOrder::plain;
  CacheKind kind = CacheKind::linear;
  int64_t Hk = 2, capacity = 128, pinned = 0;
  std::vector<int64_t> lengths = {5};  // new tokens of each sequence
  int64_t start = 0;                   // position of the first
  DType dtype = DType::f32;
};

// Numbers of a row in the units of the codebook, by the reference.
std::vector<double> normalised(const KvFormat& format, int64_t head, const std::vector<double>& x) {
  Memory memory;
  const int64_t D = format.head_dim, g = format.gain_group;
  const Tensor row = memory.make(DType::f32, {1, 1, D}), y = memory.make(DType::f32, {1, 1, D});
  for (int64_t d = 0; d < D; ++d)
    cases::set(row, d, x[static_cast<size_t>(d)] - (format.mean.present() ? cases::get(format.mean, head * D + d) : 0));
  kv_rotate(kReference, {row, y, format, false});
  std::vector<double> z = cases::values(y);
  for (size_t first = 0; first < z.size(); first += static_cast<size_t>(g)) {
    double sum = 0;
    for (size_t i = first; i < first + static_cast<size_t>(g); ++i) sum += z[i] * z[i];
    const double factor = sum > 0 ? std::sqrt(static_cast<double>(g) / sum) : 0;
    for (size_t i = first; i < first + static_cast<size_t>(g); ++i) z[i] *= factor;
  }
  return z;
}

double boundary(const KvFormat& format, size_t upper) {
  return static_cast<double>(0.5f * (format.codebook[upper - 1] + format.codebook[upper]));
}

// Within 1e-6 of a boundary f32 cannot tell which code is right.
constexpr double kNear = 1e-6;
bool near_a_boundary(const KvFormat& format, double z, double margin) {
  for (size_t i = 1; i < size_t{1} << format.bits; ++i)
    if (std::abs(z - boundary(format, i)) <= margin) return true;
  return false;
}

// Tokens and caches of a setup. Every cache begins as the same garbage, so that a bit written astray shows.
class Trial {
 public:
  enum class Rows { clear, any };  // clear: no coordinate near a boundary, so that codes must be equal

  Trial(const Wanted& wanted, uint64_t seed, Rows rows = Rows::clear) : setup(wanted), rng_(seed) {
    std::vector<int64_t> bounds = {0}, at;
    for (int64_t length : setup.lengths) {
      for (int64_t i = 0; i < length; ++i) at.push_back(setup.start + i);
      bounds.push_back(bounds.back() + length);
      longest_ = std::max(longest_, length);
    }
    N = static_cast<int64_t>(setup.lengths.size());
    T = bounds.back();
    sequences = Sequences::packed(memory.indices(bounds), N, longest_);
    positions = memory.indices(at);
    k = make_rows(setup.k, rows);
    v = make_rows(setup.v, rows);
  }

  KvCache fresh(const Wanted& as) {
    const int64_t page = as.kind == CacheKind::paged ? (as.layout == KvLayout::tiles ? 64 : 16) : as.capacity;
    const int64_t pages = as.capacity / page, blocks = N * pages + 1;
    KvCache cache = tests::make_cache(memory, as.k, as.v, blocks, as.Hk, page, as.layout);
    cache.tile_order = as.order;
    cache.kind = as.kind;
    cache.pinned = as.pinned;
    std::vector<int64_t> table;  // blocks of a sequence lie apart, backwards
    for (int64_t n = 0; n < N; ++n)
      for (int64_t p = 0; p < pages; ++p) table.push_back(blocks - 1 - (p * N + n));
    const Tensor indices = memory.indices(table);
    if (as.kind == CacheKind::paged) {
      cache.page_table = dense(indices.data, DType::i32, {N, pages});
    } else {
      cache.slots = indices;
    }
    for (const Tensor& t : {cache.k.codes, cache.k.gains, cache.v.codes, cache.v.gains})
      for (int64_t i = 0; i < t.elements() * dtype_bytes(t.dtype); ++i)
        static_cast<uint8_t*>(t.data)[i] = static_cast<uint8_t>(i * 131 + 17);
    return cache;
  }

  KvCache encode(const Stream& stream) { return encode(stream, 0, T); }
  KvCache encode(const Stream& stream, int64_t first, int64_t last) {
    KvCache cache = fresh(setup);
    encode_into(stream, cache, first, last);
    return cache;
  }
  void encode_into(const Stream& stream, const KvCache& cache, int64_t first, int64_t last) {
    KvEncodeArgs args{k, v, positions, sequences, cache};
    if (first != 0 || last != T) {  // some tokens of the only sequence
      for (Tensor* t : {&args.k, &args.v, &args.positions}) {
        t->data = static_cast<uint8_t*>(t->data) + first * t->stride(0) * dtype_bytes(t->dtype);
        t->sizes[0] = last - first;
      }
      args.sequences = Sequences::uniform(1);
    }
    EXPECT_EQ(scratch_bytes(stream, args), 0u);  // and hence none is lent
    kv_encode(stream, args);
    EXPECT_TRUE(memory.guards_intact());
  }

  Wanted setup;
  Memory memory;
  int64_t N = 0, T = 0;
  Sequences sequences;
  Tensor positions, k, v;

 private:
  Tensor make_rows(const KvFormat& format, Rows rows) {
    const int64_t D = format.head_dim;
    const Tensor x = memory.make(setup.dtype, {T, setup.Hk, D});
    for (int64_t t = 0; t < T; ++t)
      for (int64_t h = 0; h < setup.Hk; ++h)
        for (bool again = true; again;) {
          std::vector<double> row;
          const double scale = std::exp(rng_.uniform(-2, 2));
          for (int64_t d = 0; d < D; ++d) {
            cases::set(x, (t * setup.Hk + h) * D + d, scale * rng_.normal());
            row.push_back(cases::get(x, (t * setup.Hk + h) * D + d));
          }
          again = false;
          if (rows == Rows::any || format.passthrough) continue;
          for (double z : normalised(format, h, row)) again |= near_a_boundary(format, z, 1.5 * kNear);
        }
    return x;
  }

  Rng rng_;
  int64_t longest_ = 0;
};

// Gains are rounded numbers that f32 arithmetic may put on either side.
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

bool same_bytes(const KvCache& a, const KvCache& b) {
  return cases::same_bits(a.k.codes, b.k.codes) && cases::same_bits(a.v.codes, b.v.codes) &&
         cases::same_bits(a.k.gains, b.k.gains) && cases::same_bits(a.v.gains, b.v.gains);
}

std::string digit(int bits) { return std::to_string(bits); }

// ---- kv_rotate

TEST(CpuKvRotate, EveryHeadDimAndGroup) {
  Rng rng(3);
  for (int64_t D = 8; D <= kMaxHeadDim; D += 8) {
    KvFormat format = kv_format("4", D, 5);
    std::vector<int64_t> groups = {format.rotation_group};
    for (int64_t n : {1, 2, 4, 8, 12, 20, 24, 28, 40, 48, 56})
      if (D % n == 0 && D <= 280) groups.push_back(n);
    for (int64_t group : groups) {
      format.rotation_group = group;
      Memory memory;
      const Tensor x = memory.make(DType::f32, {2, 3, D});
      cases::fill_normal(x, rng);
      for (bool inverse : {false, true}) {
        const Tensor want = memory.make(DType::f32, {2, 3, D});
        kv_rotate(kReference, {x, want, format, inverse});
        for (Isa isa : cases::usable_isas()) {
          const Tensor got = memory.make(DType::f32, {2, 3, D});
          kv_rotate(cpu_with(isa), {x, got, format, inverse});
          EXPECT_LE(cases::relative_rms(got, want), 5e-7) << D << " " << group << " " << inverse << " " << isa_name(isa);
        }
      }
      ASSERT_TRUE(memory.guards_intact());
    }
  }
}

// ---- kv_encode

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
  // Any matrix that does not lose rows will do: nothing here asks that it be orthogonal.
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
      for (const auto& [layout, order] : {std::pair{KvLayout::rows, TileOrder::plain},
                                          {KvLayout::tiles, TileOrder::plain},
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

// Long runs of tokens take another way than single ones; a row of zeros in between takes a third.
TEST(CpuKvEncode, OneByOneIsAllAtOnce) {
  const auto expect_same = [](Isa isa, int bits, int64_t D, const Wanted& setup) {
    Trial trial(setup, 6, Trial::Rows::any);
    for (int64_t i = 0; i < setup.Hk * D; ++i) cases::set(trial.v, 40 * setup.Hk * D + i, 0);
    const KvCache all = trial.encode(cpu_with(isa)), single = trial.fresh(setup), pieces = trial.fresh(setup);
    for (int64_t t = 0; t < trial.T; ++t) trial.encode_into(cpu_with(isa), single, t, t + 1);
    for (int64_t t = 0; t < trial.T; t += 13) trial.encode_into(cpu_with(isa), pieces, t, std::min(t + 13, trial.T));
    EXPECT_TRUE(same_bytes(all, single)) << bits << " " << D << " " << isa_name(isa);
    EXPECT_TRUE(same_bytes(all, pieces)) << bits << " " << D << " " << isa_name(isa);
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
      setup.order = TileOrder::plain;
      setup.layout = bits % 2 == 0 ? KvLayout::rows : KvLayout::tiles;
      setup.k = setup.v = kv_format(digit(bits), 128, 1);
      expect_same(isa, bits, 128, setup);
    }
}

TEST(CpuKvEncode, BitsDoNotDependOnThreadsOrNeighbours) {
  for (Isa isa : cases::usable_isas()) {
    if (isa == Isa::scalar) continue;  // slow, and split as the others are
    for (TileOrder order : {TileOrder::plain, TileOrder::lanes}) {
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
      // The second sequence alone.
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

// One coordinate holds nearly all of a row: as far from the middle as a coordinate can be.
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
            Wanted plain = setup;
            plain.layout = KvLayout::rows, plain.order = TileOrder::plain;
            rows = trial.fresh(plain);
            kv_repack(kReference, {cache, rows});
          }
          for (const KvSide* side : {&rows.k, &rows.v})
            for (int64_t t = 0; t < 32; ++t) {
              const auto* row = static_cast<const uint8_t*>(side->codes.data) + side->codes.stride(0) + t * side->codes.stride(2);
              const int top = (1 << format.bits) - 1;
              EXPECT_EQ(packed_code(row, t * 5 % D, format.bits), t % 2 == 0 ? top : 0) << name << " " << D << " " << isa_name(isa);
              for (int64_t j = 0; j < D; ++j) {  // the others are around 0
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

// ---- kv_decode

TEST(CpuKvDecode, EveryFormatAndLayout) {
  std::vector<std::pair<KvFormat, KvFormat>> pairs;
  for (int bits = 2; bits <= 8; ++bits) pairs.emplace_back(kv_format(digit(bits), 96, 1), kv_format(digit(bits), 32, 2));
  for (const char* name : {"aura3v4", "f16v3", "8vbf16", "f32"})
    pairs.emplace_back(kv_recipe(name, 64, 64, 1).k, kv_recipe(name, 64, 64, 1).v);
  for (const char* name : {"tq4", "tqhb6", "tqhb8"}) pairs.emplace_back(kv_recipe(name, 256, 512).k, kv_recipe(name, 256, 512).v);
  pairs.emplace_back(kv_format("5", 40, 1), kv_format("3", 24, 1));
  KvFormat grouped = kv_format("4", 64, 1);
  grouped.gain_group = 8;
  pairs.emplace_back(grouped, grouped);
  for (const auto& [k, v] : pairs)
    for (const auto& [layout, order] :
         {std::pair{KvLayout::rows, TileOrder::plain}, {KvLayout::tiles, TileOrder::plain}, {KvLayout::tiles, TileOrder::lanes}}) {
      if (order == TileOrder::lanes && !(lanes_fit(k) && lanes_fit(v))) continue;
      Trial trial({.k = k, .v = v, .layout = layout, .order = order, .kind = CacheKind::paged, .lengths = {70}}, 3,
                  Trial::Rows::any);
      const KvCache cache = trial.encode(kReference);
      std::vector<int64_t> wanted = {0, 5, 6, 7, -1, 130, 69, 3, 2};
      for (int64_t t = 10; t < 60; ++t) wanted.push_back(t);
      const Tensor at = trial.memory.indices(wanted);
      const auto T = static_cast<int64_t>(wanted.size());
      for (KvDomain domain : {KvDomain::rotated, KvDomain::original}) {
        const auto decode = [&](const Stream& stream) {
          const Tensor dk = trial.memory.make(DType::f32, {T, 2, cache.k.format.head_dim}),
                       dv = trial.memory.make(DType::f32, {T, 2, cache.v.format.head_dim});
          kv_decode(stream, {cache, at, Sequences::uniform(1), domain, dk, dv});
          return std::pair{dk, dv};
        };
        const auto want = decode(kReference);
        for (Isa isa : cases::usable_isas()) {
          const auto got = decode(cpu_with(isa));
          EXPECT_LE(cases::relative_rms(got.first, want.first), 5e-7) << k.id << " " << isa_name(isa);
          EXPECT_LE(cases::relative_rms(got.second, want.second), 5e-7) << v.id << " " << isa_name(isa);
        }
      }
      EXPECT_TRUE(trial.memory.guards_intact());
    }
}

// ---- kv_repack

TEST(CpuKvRepack, RoundTripsAreExactAndTheBytesOfTheReference) {
  for (int bits = 2; bits <= 8; ++bits)
    for (int64_t D : {64, 96}) {
      const KvFormat dense_codes = kv_format(digit(bits), D, 1);
      KvFormat byte_codes = dense_codes;
      byte_codes.packing = Packing::byte;
      const auto as = [&](const KvFormat& format, KvLayout layout, TileOrder order) {
        return Wanted{.k = format, .v = format, .layout = layout, .order = order};
      };
      const Wanted hops[] = {as(dense_codes, KvLayout::tiles, TileOrder::lanes), as(byte_codes, KvLayout::rows, TileOrder::plain),
                             as(dense_codes, KvLayout::tiles, TileOrder::plain), as(dense_codes, KvLayout::tiles, TileOrder::lanes),
                             as(dense_codes, KvLayout::tiles, TileOrder::plain), as(byte_codes, KvLayout::tiles, TileOrder::plain),
                             as(dense_codes, KvLayout::rows, TileOrder::plain)};
      Trial trial({.k = dense_codes, .v = dense_codes, .lengths = {100}}, 4, Trial::Rows::any);
      const KvCache start = trial.encode(kReference);
      std::vector<KvCache> want = {start};
      for (const Wanted& hop : hops) {
        want.push_back(trial.fresh(hop));
        kv_repack(kReference, {want[want.size() - 2], want.back()});
      }
      for (Isa isa : cases::usable_isas()) {
        KvCache from = start;
        for (size_t i = 0; i < std::size(hops); ++i) {
          const KvCache to = trial.fresh(hops[i]);
          kv_repack(cpu_with(isa, 2), {from, to});
          EXPECT_TRUE(same_bytes(to, want[i + 1])) << "hop " << i << " " << bits << " " << D << " " << isa_name(isa);
          from = to;
        }
        EXPECT_TRUE(same_bytes(from, start)) << bits << " " << D << " " << isa_name(isa);
      }
      EXPECT_TRUE(trial.memory.guards_intact());
    }
}

TEST(CpuKvRepack, PadBitsAndPassthrough) {
  for (Isa isa : cases::usable_isas()) {
    Trial trial({.k = kv_format("3", 40, 1), .v = kv_format("bf16", 40), .kind = CacheKind::paged, .lengths = {1}}, 4,
                Trial::Rows::any);
    Wanted rows = trial.setup, tiles = trial.setup;
    rows.kind = tiles.kind = CacheKind::linear;
    tiles.layout = KvLayout::tiles;
    const KvCache from = trial.fresh(rows), to = trial.fresh(tiles), want = trial.fresh(tiles);  // garbage in the pad bits
    kv_repack(cpu_with(isa), {from, to});
    kv_repack(kReference, {from, want});
    EXPECT_TRUE(same_bytes(to, want)) << isa_name(isa);
    EXPECT_TRUE(trial.memory.guards_intact());
  }
}

TEST(CpuKvCodec, ChoiceNamesKernelAndPlan) {
  Trial trial({.k = kv_format("4", 128, 1), .v = kv_format("4", 128, 1), .Hk = 8, .capacity = 64, .lengths = {64}}, 1,
              Trial::Rows::any);
  const KvEncodeArgs args{trial.k, trial.v, trial.positions, trial.sequences, trial.fresh(trial.setup)};
  for (Isa isa : cases::usable_isas())
    EXPECT_EQ(choose(cpu_with(isa, 2), args).kernel, std::string("cpu.kv_encode.fwht.") + isa_name(isa));
  EXPECT_EQ(choose(cpu_with(Isa::best, 2), args).plan, "2 threads over 1 sequences x 2 sides x 4 groups of heads, tokens in order");
}

}  // namespace
}  // namespace weft
