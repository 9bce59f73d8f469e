// The rows that kv_encode writes and kv_decode reads: linear, ring, paged, slots, strides, tiles, and repacking between layouts.
#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <vector>

#include "common/bit_pack.h"
#include "common/kv_index.h"
#include "tests/support/kv.h"
#include "weft/kv_codec.h"

namespace weft {
namespace {

using cases::Memory;
using cases::Rng;
using tests::make_cache;

constexpr Stream kReference{Backend::reference};

Tensor as_table(Tensor indices, int64_t rows) {
  indices.rank = 2;
  indices.sizes = {rows, indices.sizes[0] / rows};
  indices.strides = {indices.sizes[1], 1};
  return indices;
}

// A cache of f32 rows of 8, which tests read directly. Each row holds the number of its token.
struct Places {
  Places(CacheKind kind, int64_t blocks, int64_t capacity, int64_t pinned = 0)
      : cache(make_cache(memory, kv_format("f32", 8), kv_format("f32", 8), blocks, 2, capacity)) {
    cache.kind = kind;
    cache.pinned = pinned;
  }
  void encode(const std::vector<int64_t>& positions, const Sequences& sequences) {
    const auto T = static_cast<int64_t>(positions.size());
    const Tensor k = memory.make(DType::f32, {T, 2, 8}), v = memory.make(DType::f32, {T, 2, 8});
    for (int64_t t = 0; t < T; ++t)
      for (int64_t i = 0; i < 16; ++i) {
        cases::set(k, t * 16 + i, static_cast<double>(t));
        cases::set(v, t * 16 + i, static_cast<double>(100 + t));
      }
    kv_encode(kReference, {k, v, memory.indices(positions), sequences, cache});
    EXPECT_TRUE(memory.guards_intact());
  }
  // The token in (block, row), the same in both heads and sides; -1 where nothing was written.
  int64_t token(int64_t block, int64_t row) const {
    std::set<double> seen;
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t j = 0; j < 8; ++j) {
        const double k = cases::get(cache.k.codes, block * cache.k.codes.stride(0) + h * cache.k.codes.stride(1) + row * 8 + j);
        const double v = cases::get(cache.v.codes, block * cache.v.codes.stride(0) + h * cache.v.codes.stride(1) + row * 8 + j);
        seen.insert(std::isnan(k) ? -1 : k);
        seen.insert(std::isnan(v) ? -1 : v - 100);
      }
    EXPECT_EQ(seen.size(), 1u) << block << " " << row;
    return static_cast<int64_t>(*seen.begin());
  }
  std::vector<int64_t> tokens(int64_t block) const {
    std::vector<int64_t> all;
    for (int64_t row = 0; row < cache.capacity(); ++row) all.push_back(token(block, row));
    return all;
  }
  // The first decoded coordinate of K of every token; all coordinates of both heads must be equal.
  std::vector<double> decode(const std::vector<int64_t>& positions, const Sequences& sequences) {
    const auto T = static_cast<int64_t>(positions.size());
    const Tensor k = memory.make(DType::f32, {T, 2, 8});
    kv_decode(kReference, {cache, memory.indices(positions), sequences, KvDomain::original, k, {}});
    std::vector<double> firsts;
    for (int64_t t = 0; t < T; ++t) {
      firsts.push_back(cases::get(k, t * 16));
      for (int64_t i = 1; i < 16 && !std::isnan(firsts.back()); ++i) EXPECT_EQ(cases::get(k, t * 16 + i), firsts.back());
    }
    return firsts;
  }

  Memory memory;
  KvCache cache;
};

using Tokens = std::vector<int64_t>;
using Numbers = std::vector<double>;

TEST(KvPlace, Linear) {
  Places p(CacheKind::linear, 3, 4);
  p.encode({2, 0, 1, 3}, Sequences::uniform(2));  // sequence 0: 2 0, sequence 1: 1 3
  EXPECT_EQ(p.tokens(0), (Tokens{1, -1, 0, -1}));
  EXPECT_EQ(p.tokens(1), (Tokens{-1, 2, -1, 3}));
  EXPECT_EQ(p.tokens(2), (Tokens{-1, -1, -1, -1}));
  EXPECT_EQ(p.decode({0, 2, 3, 1}, Sequences::uniform(2)), (Numbers{1, 0, 3, 2}));
}

TEST(KvPlace, LinearOutOfRangeIsInert) {
  Places p(CacheKind::linear, 1, 4);
  p.encode({-1, 4, 3, 1000000, -2147483648, 2147483647}, Sequences::uniform(1));
  EXPECT_EQ(p.tokens(0), (Tokens{-1, -1, -1, 2}));
  EXPECT_EQ(p.decode({-1, 4, 3, 2147483647}, Sequences::uniform(1)), (Numbers{0, 0, 2, 0}));
}

TEST(KvPlace, SlotsChooseTheBlock) {
  Places p(CacheKind::linear, 3, 2);
  p.cache.slots = p.memory.indices({2, -1, 0, 3});  // sequences 1 and 3 are inert
  p.encode({0, 0, 1, 1}, Sequences::uniform(4));
  EXPECT_EQ(p.tokens(2), (Tokens{0, -1}));
  EXPECT_EQ(p.tokens(1), (Tokens{-1, -1}));
  EXPECT_EQ(p.tokens(0), (Tokens{-1, 2}));
  EXPECT_EQ(p.decode({0, 0, 1, 1}, Sequences::uniform(4)), (Numbers{0, 0, 2, 0}));
}

TEST(KvPlace, MoreSequencesThanBlocksAreInert) {
  Places p(CacheKind::linear, 1, 2);
  p.encode({0, 1}, Sequences::uniform(2));
  EXPECT_EQ(p.tokens(0), (Tokens{0, -1}));
}

TEST(KvPlace, PackedSequences) {
  Places p(CacheKind::linear, 3, 4);
  p.encode({0, 1, 2, 0}, Sequences::packed(p.memory.indices({0, 3, 3, 4}), 3, 3));
  EXPECT_EQ(p.tokens(0), (Tokens{0, 1, 2, -1}));
  EXPECT_EQ(p.tokens(1), (Tokens{-1, -1, -1, -1}));
  EXPECT_EQ(p.tokens(2), (Tokens{3, -1, -1, -1}));
}

TEST(KvPlace, IllegalBoundsAreInertAndNothingIsWrittenForThem) {
  struct Case {
    std::vector<int64_t> bounds;
    Tokens first, second;  // of blocks 0 and 1
  };
  const Case cases[] = {{{0, 3, 2}, {-1, -1}, {-1, -1}}, {{-1, 1, 2}, {-1, -1}, {-1, 1}}, {{0, 1, 5}, {0, -1}, {-1, -1}}};
  for (const Case& c : cases) {
    Places p(CacheKind::linear, 2, 2);
    p.encode({0, 1}, Sequences::packed(p.memory.indices(c.bounds), 2, 3));
    EXPECT_EQ(p.tokens(0), c.first);
    EXPECT_EQ(p.tokens(1), c.second);
    const Numbers got = p.decode({0, 1}, Sequences::packed(p.memory.indices({0, 2, 1}), 2, 1));
    EXPECT_TRUE(std::isnan(got[0]) && std::isnan(got[1])) << "nothing is written for illegal sequences";
  }
  // Longer than max_tokens.
  Places p(CacheKind::linear, 1, 4);
  p.encode({0, 1}, Sequences::packed(p.memory.indices({0, 2}), 1, 1));
  EXPECT_EQ(p.token(0, 0), -1);
}

TEST(KvPlace, RingWithPinnedTokens) {
  Places p(CacheKind::ring, 1, 5, 2);
  p.encode({0, 1, 2, 3, 4, 5, 6}, Sequences::uniform(1));  // 5 and 6 take the rows of 2 and 3
  EXPECT_EQ(p.tokens(0), (Tokens{0, 1, 5, 6, 4}));
  EXPECT_EQ(p.decode({0, 1, 4, 5, 6}, Sequences::uniform(1)), (Numbers{0, 1, 4, 5, 6}));
  EXPECT_EQ(p.decode({-1}, Sequences::uniform(1)), (Numbers{0}));
  p.encode({2147483647}, Sequences::uniform(1));
  EXPECT_EQ(p.token(0, 2 + (2147483647 - 2) % 3), 0);
}

TEST(KvPlace, RingKeepsTheLastOfTokensThatShareARow) {
  Places p(CacheKind::ring, 1, 4);
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < 11; ++i) positions.push_back(i);
  p.encode(positions, Sequences::uniform(1));
  EXPECT_EQ(p.tokens(0), (Tokens{8, 9, 10, 7}));
}

TEST(KvPlace, Paged) {
  Places p(CacheKind::paged, 5, 16);
  // Sequence 0: pages 3, none, 1. Sequence 1: page 4, one beyond the pool, page 0.
  p.cache.page_table = as_table(p.memory.indices({3, -1, 1, 4, 5, 0}), 2);
  p.encode({0, 15, 16, 33, 47, 48, /**/ 1, 31, 32, -1, 2147483647, 5}, Sequences::uniform(2));
  EXPECT_EQ(p.token(3, 0), 0);
  EXPECT_EQ(p.token(3, 15), 1);
  EXPECT_EQ(p.token(1, 1), 3);
  EXPECT_EQ(p.token(1, 15), 4);
  EXPECT_EQ(p.token(4, 1), 6);
  EXPECT_EQ(p.token(4, 5), 11);
  EXPECT_EQ(p.token(0, 0), 8);
  int64_t written = 0;
  for (int64_t block = 0; block < 5; ++block)
    for (int64_t token : p.tokens(block)) written += token >= 0;
  EXPECT_EQ(written, 7);
  EXPECT_EQ(p.decode({0, 16, 47, 48, 1, 31, 32, -1}, Sequences::uniform(2)), (Numbers{0, 0, 4, 0, 6, 0, 8, 0}));
}

TEST(KvPlace, EmptyThingsAreLegal) {
  Places p(CacheKind::linear, 1, 2);
  p.encode({}, Sequences::uniform(1));
  p.encode({}, Sequences::uniform(0));
  p.encode({}, Sequences::packed(p.memory.indices({0, 0}), 1, 0));
  EXPECT_EQ(p.tokens(0), (Tokens{-1, -1}));
  for (CacheKind kind : {CacheKind::linear, CacheKind::ring, CacheKind::paged}) {
    Places none(kind, 0, 0);
    if (kind == CacheKind::paged) none.cache.page_table = as_table(none.memory.indices({0, 1}), 1);
    none.encode({0, 1}, Sequences::uniform(1));
    EXPECT_EQ(none.decode({0, 7}, Sequences::uniform(1)), (Numbers{0, 0}));
  }
}

TEST(KvPlace, AnAbsentSideIsLeftAlone) {
  Memory memory;
  const KvFormat format = kv_format("4", 16);
  const Tensor x = memory.make(DType::f32, {2, 1, 16}), at = memory.indices({0, 1});
  cases::fill(x, 1);
  for (const bool only_k : {true, false}) {
    const KvCache cache = make_cache(memory, format, format, 1, 1, 2);
    kv_encode(kReference, {only_k ? x : Tensor{}, only_k ? Tensor{} : x, at, Sequences::uniform(1), cache});
    const auto untouched = [](const KvSide& side) {
      return cases::get(side.codes, 0) == 255 && std::isnan(cases::get(side.gains, 0));
    };
    EXPECT_EQ(untouched(cache.k), !only_k);
    EXPECT_EQ(untouched(cache.v), only_k);
  }
}

TEST(KvPlace, LiveTokens) {
  Places ring(CacheKind::ring, 1, 5, 2);
  EXPECT_EQ(live_tokens(ring.cache, 3), 3);
  EXPECT_EQ(live_tokens(ring.cache, 9), 5);
  EXPECT_EQ(live_tokens(ring.cache, -4), 0);
  const int64_t kept[] = {0, 1, 6, 7, 8};
  std::set<int64_t> rows;
  for (int64_t j = 0; j < 5; ++j) {
    EXPECT_EQ(live_position(ring.cache, 9, j), kept[j]);
    EXPECT_EQ(live_position(ring.cache, 5, j), j);
    rows.insert(locate(ring.cache, 0, kept[j]).row);
  }
  EXPECT_EQ(rows.size(), 5u) << "every live token has a row of its own";
  Places linear(CacheKind::linear, 1, 5);
  EXPECT_EQ(live_tokens(linear.cache, 9), 5);
  EXPECT_EQ(live_position(linear.cache, 9, 4), 4);
  Places paged(CacheKind::paged, 2, 16);
  paged.cache.page_table = as_table(paged.memory.indices({0, 1, -1}), 1);
  EXPECT_EQ(live_tokens(paged.cache, 47), 47);
  EXPECT_EQ(live_tokens(paged.cache, 99), 48);
  EXPECT_EQ(live_position(paged.cache, 47, 20), 20);
  EXPECT_FALSE(locate(paged.cache, 0, 40).exists());
}

// ---------------------------------------------------------------- bytes

// A cache of the given recipe filled with random rows. With `before`, other rows were written first.
KvCache filled(Memory& memory, const KvRecipe& recipe, KvLayout layout, uint64_t seed, bool before = false) {
  const KvCache cache = make_cache(memory, recipe.k, recipe.v, 2, 2, 128, layout);
  std::vector<int64_t> positions;
  for (int64_t t = 0; t < 256; ++t) positions.push_back((t * 37 + 5) % 128);
  const Tensor at = memory.indices(positions);
  for (int round = before ? 0 : 1; round < 2; ++round) {
    Rng rng(seed + static_cast<uint64_t>(round == 0 ? 99 : 0));
    const Tensor k = memory.make(DType::f32, {256, 2, recipe.k.head_dim}), v = memory.make(DType::f32, {256, 2, recipe.v.head_dim});
    cases::fill_normal(k, rng);
    cases::fill_normal(v, rng);
    kv_encode(kReference, {k, v, at, Sequences::uniform(2), cache});
  }
  EXPECT_TRUE(memory.guards_intact());
  return cache;
}

bool same_sides(const KvCache& a, const KvCache& b) {
  const auto same = [](const KvSide& x, const KvSide& y) {
    return cases::same_bits(x.codes, y.codes) && (!x.gains.present() || cases::same_bits(x.gains, y.gains));
  };
  return same(a.k, b.k) && same(a.v, b.v);
}

KvRecipe with_bytes(KvRecipe recipe) {
  recipe.k.packing = recipe.v.packing = Packing::byte;
  return recipe;
}

TEST(KvBytes, WholeRowsAreOverwritten) {
  // 24 coordinates of 3, 5 or 7 bits leave pad bits; memory starts as ones, then holds another row.
  for (const char* name : {"3v5", "7v2", "f16v6"})
    for (KvLayout layout : {KvLayout::rows, KvLayout::tiles}) {
      Memory memory;
      const KvRecipe recipe = kv_recipe(name, 24, 40, 1);
      EXPECT_TRUE(same_sides(filled(memory, recipe, layout, 1), filled(memory, recipe, layout, 1, true))) << name;
    }
  Memory memory;
  const KvCache cache = filled(memory, kv_recipe("3v3", 24, 24), KvLayout::rows, 3);
  for (int64_t row = 0; row < 512; ++row)  // 72 bits used of 96
    EXPECT_EQ(packed_word(static_cast<const uint8_t*>(cache.k.codes.data) + row * 12, 2) >> 8, 0u);
}

TEST(KvBytes, TilesInTokenMajorOrderAreRowsThenGains) {
  Memory memory;
  for (const char* name : {"3v4", "f16v8"}) {
    const KvRecipe recipe = kv_recipe(name, 40, 64, 2);
    const KvCache rows = filled(memory, recipe, KvLayout::rows, 4), tiles = filled(memory, recipe, KvLayout::tiles, 4);
    for (const auto& [r, t] : {std::pair{&rows.k, &tiles.k}, {&rows.v, &tiles.v}}) {
      const int64_t code = code_bytes(r->format), gain = gain_bytes(r->format), bytes = tile_bytes(r->format);
      for (int64_t i = 0; i < 2 * 2 * 128; ++i) {  // block, head, token
        const auto* tile = static_cast<const uint8_t*>(t->codes.data) + i / 64 * bytes;
        ASSERT_EQ(
            std::memcmp(tile + i % 64 * code, static_cast<const uint8_t*>(r->codes.data) + i * code, static_cast<size_t>(code)), 0);
        if (gain > 0) {
          ASSERT_EQ(std::memcmp(tile + 64 * code + i % 64 * gain, static_cast<const uint8_t*>(r->gains.data) + i * gain,
                                static_cast<size_t>(gain)),
                    0);
        }
      }
    }
  }
}

TEST(KvBytes, StridesOfATokenMajorCache) {
  Memory memory;
  const KvRecipe recipe = kv_recipe("4v2", 64, 64, 3);
  const KvCache plain = filled(memory, recipe, KvLayout::rows, 5);
  KvCache swapped = plain;
  for (Tensor* t : {&swapped.k.codes, &swapped.k.gains, &swapped.v.codes, &swapped.v.gains}) {
    const Tensor memory_order = memory.make(t->dtype, {2, 128, 2, t->size(3)});
    t->data = memory_order.data;
    t->strides = {memory_order.strides[0], memory_order.strides[2], memory_order.strides[1], 1};
  }
  std::vector<int64_t> positions;
  for (int64_t t = 0; t < 256; ++t) positions.push_back((t * 37 + 5) % 128);
  Rng rng(5);
  const Tensor k = memory.make(DType::f32, {256, 2, 64}), v = memory.make(DType::f32, {256, 2, 64}), at = memory.indices(positions);
  cases::fill_normal(k, rng);
  cases::fill_normal(v, rng);
  kv_encode(kReference, {k, v, at, Sequences::uniform(2), swapped});
  EXPECT_TRUE(same_sides(plain, swapped));
  const Tensor a = memory.make(DType::f32, {256, 2, 64}), b = memory.make_padded(DType::f32, {256, 2, 64}, 7);
  kv_decode(kReference, {plain, at, Sequences::uniform(2), KvDomain::original, a, {}});
  kv_decode(kReference, {swapped, at, Sequences::uniform(2), KvDomain::original, b, {}});
  EXPECT_TRUE(cases::same_bits(a, b));
  EXPECT_TRUE(memory.guards_intact());
}

TEST(KvBytes, BytePackingHoldsTheSameCodesAndIgnoresHighBits) {
  Memory memory;
  const KvRecipe recipe = kv_recipe("5v3", 40, 40, 3);
  const KvCache dense_cache = filled(memory, recipe, KvLayout::rows, 6),
                bytes = filled(memory, with_bytes(recipe), KvLayout::rows, 6);
  std::vector<uint8_t> codes(40);
  for (int64_t row = 0; row < 512; ++row) {
    unpack_codes(static_cast<const uint8_t*>(dense_cache.k.codes.data) + row * code_bytes(recipe.k), 40, 5, codes.data());
    ASSERT_EQ(std::memcmp(codes.data(), static_cast<const uint8_t*>(bytes.k.codes.data) + row * 40, 40), 0);
  }
  const Tensor at = memory.indices({0, 1}), a = memory.make(DType::f32, {2, 2, 40}), b = memory.make(DType::f32, {2, 2, 40});
  kv_decode(kReference, {bytes, at, Sequences::uniform(1), KvDomain::original, a, {}});
  for (int64_t i = 0; i < 40; ++i) static_cast<uint8_t*>(bytes.k.codes.data)[i] |= 0xe0;
  kv_decode(kReference, {bytes, at, Sequences::uniform(1), KvDomain::original, b, {}});
  EXPECT_TRUE(cases::same_bits(a, b));
}

// ---------------------------------------------------------------- repack

TEST(KvRepack, ThereAndBackBetweenLayoutsAndPackings) {
  for (const char* name : {"4v4", "3v8", "5vf16", "aura4v2", "f32"}) {
    const KvRecipe dense_recipe = kv_recipe(name, 64, 32, 1), byte_recipe = with_bytes(dense_recipe);
    for (KvLayout from_layout : {KvLayout::rows, KvLayout::tiles})
      for (KvLayout to_layout : {KvLayout::rows, KvLayout::tiles})
        for (const auto& [from, to] :
             {std::pair{&dense_recipe, &dense_recipe}, {&dense_recipe, &byte_recipe}, {&byte_recipe, &dense_recipe}}) {
          Memory memory;
          const KvCache source = filled(memory, *from, from_layout, 7), wanted = filled(memory, *to, to_layout, 7);
          const KvCache target = make_cache(memory, to->k, to->v, 2, 2, 128, to_layout);
          const KvCache back = make_cache(memory, from->k, from->v, 2, 2, 128, from_layout);
          kv_repack(kReference, {source, target});
          EXPECT_TRUE(same_sides(target, wanted)) << name;
          kv_repack(kReference, {target, back});
          EXPECT_TRUE(same_sides(back, source)) << name;
          EXPECT_TRUE(memory.guards_intact());
        }
  }
}

TEST(KvRepack, RowsNeverWrittenAreCopiedBitByBit) {
  // Poisoned gains and passthrough rows are NaNs with all bits set; repacking must not change any bit.
  Memory memory;
  const KvRecipe recipe = kv_recipe("f16v4", 64, 64);
  const KvCache from = make_cache(memory, recipe.k, recipe.v, 1, 1, 64),
                to = make_cache(memory, recipe.k, recipe.v, 1, 1, 64, KvLayout::tiles);
  std::memset(to.k.codes.data, 0, static_cast<size_t>(to.k.codes.elements()));
  std::memset(to.v.codes.data, 0, static_cast<size_t>(to.v.codes.elements()));
  kv_repack(kReference, {from, to});
  for (const Tensor& t : {to.k.codes, to.v.codes})
    for (double byte : cases::values(t)) ASSERT_EQ(byte, 255);
}

TEST(KvRepack, LanesOrderNeedsMultiplesOf32AndDenseCodes) {
  Memory memory;
  const KvRecipe fits = kv_recipe("4v4", 64, 64), narrow = kv_recipe("4v4", 80, 80);
  KvFormat bytes = fits.v;
  bytes.packing = Packing::byte;
  const auto checked = [&](const KvFormat& k, const KvFormat& v) {
    KvCache lanes = make_cache(memory, k, v, 1, 1, 64, KvLayout::tiles);
    lanes.tile_order = TileOrder::lanes;
    return validate(KvRepackArgs{make_cache(memory, k, v, 1, 1, 64), lanes});
  };
  EXPECT_TRUE(checked(fits.k, fits.v));
  EXPECT_TRUE(checked(kv_format("f16", 80), kv_format("f16", 80)));  // a passthrough side has no codes
  EXPECT_EQ(
      checked(narrow.k, fits.v).message,
      "kv_repack: to.k.format has head_dim 80 and dense codes, wanted a multiple of 32 and dense codes for tiles in lanes order");
  EXPECT_EQ(checked(fits.k, bytes).message,
            "kv_repack: to.v.format has head_dim 64 and a byte per code, wanted a multiple of 32 and dense codes for tiles in "
            "lanes order");
  bytes = kv_format("8", 64);
  bytes.packing = Packing::byte;  // the same bytes as dense ones
  EXPECT_TRUE(checked(bytes, bytes));
}

}  // namespace
}  // namespace weft
