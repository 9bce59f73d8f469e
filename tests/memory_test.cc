// Memory and OwnedKvCache: alignment, growth, arrangement, refusals; tensors made from pointers to const.
#include "weft/memory.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "weft/compressed_attention.h"
#include "weft/delta_preprocess.h"

namespace weft {
namespace {

constexpr Stream kCpu{};

bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kScratchAlignment == 0; }

template <class F>
std::string refusal(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Memory, GrowsAndStaysAligned) {
  Memory memory;
  EXPECT_EQ(memory.bytes(), 0u);
  EXPECT_EQ(memory.at_least(0).data, nullptr);
  const Scratch small = memory.at_least(1000);
  EXPECT_TRUE(aligned(small.data));
  EXPECT_GE(small.bytes, 1000u);
  std::memset(small.data, 1, small.bytes);
  EXPECT_EQ(memory.at_least(10).data, small.data);  // large enough already
  EXPECT_EQ(memory.at_least(10).bytes, small.bytes);
  const Scratch large = memory.at_least(100000);
  EXPECT_TRUE(aligned(large.data));
  EXPECT_GE(large.bytes, 100000u);
  std::memset(large.data, 2, large.bytes);
  const Memory moved = std::move(memory);
  EXPECT_EQ(moved.bytes(), large.bytes);
}

TEST(Memory, KeepsNothingWhereAllocationFails) {
  bool fail = false;
  Memory memory([&](size_t bytes) { return fail ? throw std::bad_alloc() : allocate_host(bytes); });
  memory.at_least(100);
  fail = true;
  EXPECT_THROW(memory.at_least(1000), std::bad_alloc);
  EXPECT_EQ(memory.bytes(), 0u);
  EXPECT_EQ(memory.at_least(0).data, nullptr);
  EXPECT_THROW(allocate_host(std::numeric_limits<size_t>::max()), std::bad_alloc);
#if !WEFT_SANITIZED  // a sanitizer ends the process
  EXPECT_THROW(allocate_host(size_t{1} << 62), std::bad_alloc);
#endif
}

TEST(OwnedKvCache, UsesTilesWhereHeadSizesAllow) {
  for (const char* name : {"4v4", "8v2", "f16", "f32", "bf16v4"}) {
    const KvRecipe recipe = kv_recipe(name, 64, 128);
    for (const Backend backend : {Backend::reference, Backend::cpu, Backend::cuda})
      EXPECT_EQ(fastest_arrangement(recipe, backend).layout, KvLayout::tiles) << name;
    const OwnedKvCache cache(kCpu, recipe, {.kv_heads = 2, .capacity = 65, .blocks = 3});
    EXPECT_EQ(cache.view().tile_order, TileOrder::lanes);
    EXPECT_EQ(cache.view().capacity(), 128);  // whole tiles
    EXPECT_EQ(cache.view().heads(), 2);
    EXPECT_EQ(cache.view().k.codes.size(0), 3);
    EXPECT_GE(static_cast<int64_t>(cache.bytes()), 3 * 2 * 128 * bytes_per_token(recipe));
  }
  const OwnedKvCache rows(kCpu, kv_recipe("4v4", 80, 80), {.kv_heads = 2, .capacity = 65});
  EXPECT_EQ(rows.view().layout, KvLayout::rows);
  EXPECT_EQ(rows.view().capacity(), 65);
  const OwnedKvCache pages(kCpu, kv_recipe("4v4", 80, 80), {.kv_heads = 2, .capacity = 17, .blocks = 4, .kind = CacheKind::paged});
  EXPECT_EQ(pages.view().capacity(), 32);
}

// Every kind of cache and arrangement is one that attention takes, on its own arrays.
TEST(OwnedKvCache, IsWhatAttentionTakes) {
  for (const int64_t head_dim : {64, 80})
    for (const char* name : {"4v4", "f16", "8vf32"})
      for (const CacheKind kind : {CacheKind::linear, CacheKind::ring, CacheKind::paged}) {
        OwnedKvCache owner(kCpu, kv_recipe(name, head_dim, head_dim),
                           {.kv_heads = 2, .capacity = 64, .blocks = 3, .kind = kind, .pinned = kind == CacheKind::ring ? 4 : 0});
        OwnedKvCache cache = std::move(owner);
        std::vector<float> o(static_cast<size_t>(3 * 4 * head_dim));
        const std::vector<float> q(o.size(), 1.0f), k(o.size() / 2, 1.0f);
        const std::vector<int32_t> positions{0, 0, 0}, table{0, 1, 2}, ones{1, 1, 1};
        KvEncodeArgs encode;
        encode.k = encode.v = dense(k.data(), DType::f32, {3, 2, head_dim});
        encode.positions = dense(positions.data(), DType::i32, {3});
        encode.sequences = Sequences::uniform(3);
        encode.cache = cache.view();
        if (kind == CacheKind::paged) encode.cache.page_table = dense(table.data(), DType::i32, {3, 1});
        Memory scratch;
        kv_encode(kCpu, encode, scratch.at_least(scratch_bytes(kCpu, encode)));
        CompressedAttentionArgs args;
        args.queries.q = dense(q.data(), DType::f32, {3, 4, head_dim});
        args.queries.sequences = Sequences::uniform(3);
        args.cache = encode.cache;
        if (kind == CacheKind::paged) {
          EXPECT_TRUE(cache.lengths().empty());
          args.cache.lengths = dense(ones.data(), DType::i32, {3});
        } else {
          ASSERT_EQ(cache.lengths().size(), 3u);
          for (int32_t& length : cache.lengths()) EXPECT_EQ(std::exchange(length, 1), 0);
        }
        args.o = dense(o.data(), DType::f32, {3, 4, head_dim});
        compressed_attention(kCpu, args, scratch.at_least(scratch_bytes(kCpu, args)));
        double error = 0;  // of one token of ones in 4 bits or more
        for (const float x : o) error += (x - 1.0) * (x - 1.0);
        EXPECT_LT(error, 0.04 * static_cast<double>(o.size())) << name << " " << head_dim << " " << static_cast<int>(kind);
      }
}

TEST(OwnedKvCache, RefusesWithASentence) {
  const KvRecipe recipe = kv_recipe("4v4", 64, 64);
  const auto made = [&](const KvCacheSize& size, const Stream& stream = kCpu) {
    return refusal([&] { OwnedKvCache(stream, recipe, size); });
  };
  EXPECT_EQ(made({.kv_heads = 0, .capacity = 64}), "kv_cache: size.kv_heads is 0, wanted 1 to 2147483647");
  EXPECT_EQ(made({.kv_heads = 2, .capacity = 0}), "kv_cache: size.capacity is 0, wanted 1 to 2147483584");
  EXPECT_EQ(made({.kv_heads = 2, .capacity = 64, .blocks = -1}), "kv_cache: size.blocks is -1, wanted 1 to 2147483647");
  EXPECT_EQ(made({.kv_heads = 2, .capacity = 64, .pinned = 1}),
            "kv_cache: size.pinned is 1, wanted 0, since the cache is not a ring");
  EXPECT_EQ(made({.kv_heads = 2147483647, .capacity = 2147483584, .blocks = 2147483647}),
            "kv_cache: size takes more than 2^46 bytes");
  EXPECT_EQ(refusal([&] {
              KvRecipe broken = recipe;
              broken.v.bits = 9;
              OwnedKvCache(kCpu, broken, {.kv_heads = 2, .capacity = 64});
            }),
            "kv_cache: recipe.v has bits 9, wanted 2 to 8");
  const std::string cuda = made({.kv_heads = 2, .capacity = 64}, {.backend = Backend::cuda});
  EXPECT_TRUE(cuda.starts_with("kv_cache: stream ") ||  // no such backend or device here
              cuda == "kv_cache: allocate is absent, wanted a function that allocates memory of the device")
      << cuda;
}

TEST(Dense, PointersToConstAreInputsOnly) {
  const std::vector<float> x(8, 1.0f);
  std::vector<float> y(8);
  static_assert(sizeof(Tensor) == 16 + 2 * 8 * Tensor::kMaxRank);  // read_only takes no room
  EXPECT_TRUE(dense(x.data(), DType::f32, {2, 4}).read_only);
  EXPECT_FALSE(dense(y.data(), DType::f32, {2, 4}).read_only);
  EXPECT_FALSE(dense(nullptr, DType::f32, {0}).read_only);
  L2NormArgs args;
  args.x = dense(x.data(), DType::f32, {2, 4});
  args.y = dense(y.data(), DType::f32, {2, 4});
  l2_norm(kCpu, args);
  EXPECT_NEAR(y[0], 0.5f, 1e-5f);
  args.y = dense(x.data(), DType::f32, {2, 4});
  EXPECT_EQ(validate(args).message, "l2_norm: y is an output, but was made from a pointer to const");
}

}  // namespace
}  // namespace weft
