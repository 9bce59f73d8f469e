// kv_rotate, kv_decode and kv_repack on the cpu backend against the reference, on every instruction set of this machine.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "common/lanes_tile.h"
#include "tests/support/kv_trial.h"

namespace weft {
namespace {

using namespace tests;

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
          // In place, in rows that are not aligned to vectors: the same bits.
          const Tensor apart = memory.make_padded(DType::f32, {2, 3, D}, 3);
          for (int64_t i = 0; i < x.elements(); ++i) {
            const auto offset = [&](const Tensor& t) { return i / (3 * D) * t.strides[0] + i / D % 3 * t.strides[1] + i % D; };
            static_cast<float*>(apart.data)[offset(apart)] = static_cast<const float*>(x.data)[offset(x)];
          }
          kv_rotate(cpu_with(isa), {apart, apart, format, inverse});
          EXPECT_TRUE(cases::same_bits(got, apart)) << D << " " << group << " " << inverse << " " << isa_name(isa);
        }
      }
      ASSERT_TRUE(memory.guards_intact());
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
    for (const auto& [layout, order] : {std::pair{KvLayout::rows, TileOrder::token_major},
                                        {KvLayout::tiles, TileOrder::token_major},
                                        {KvLayout::tiles, TileOrder::lanes}}) {
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
      const Wanted hops[] = {
          as(dense_codes, KvLayout::tiles, TileOrder::lanes),       as(byte_codes, KvLayout::rows, TileOrder::token_major),
          as(dense_codes, KvLayout::tiles, TileOrder::token_major), as(dense_codes, KvLayout::tiles, TileOrder::lanes),
          as(dense_codes, KvLayout::tiles, TileOrder::token_major), as(byte_codes, KvLayout::tiles, TileOrder::token_major),
          as(dense_codes, KvLayout::rows, TileOrder::token_major)};
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

}  // namespace
}  // namespace weft
