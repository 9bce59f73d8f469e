// HybridState: capacity, growing and freed pages, the tensors of batches, planned bytes, and refusals.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <set>

#include "tests/support/complaint.h"
#include "weft/hybrid_state.h"

namespace {

using namespace weft;

HybridPlan plan(int64_t sequences = 2, int64_t capacity = 1000, const char* kv = "8v4", int64_t head_dim = 64) {
  HybridPlan p;
  p.sequences = sequences;
  p.capacity = capacity;
  p.layers.emplace_back(DeltaMemory{4, 24, 16, 160, 4});
  p.layers.emplace_back(AttentionMemory::for_cpu(3, kv_recipe(kv, head_dim, head_dim)));
  p.layers.emplace_back(AttentionMemory::for_cpu(1, kv_recipe("f16", head_dim, head_dim)));
  return p;
}

std::vector<int32_t> indices(const Tensor& t) {
  const auto* p = static_cast<const int32_t*>(t.data);
  return {p, p + t.elements()};
}

HybridBatch append(HybridState& state, std::vector<SequenceTokens> parts) { return state.append(parts); }

TEST(HybridState, LayoutFollowsTheFormats) {
  const auto layout = [](const char* kv, int64_t d) { return AttentionMemory::for_cpu(1, kv_recipe(kv, d, d)).layout; };
  EXPECT_EQ(layout("8v4", 64), KvLayout::tiles);
  EXPECT_EQ(layout("f16", 40), KvLayout::tiles);
  EXPECT_EQ(layout("8v4", 40), KvLayout::rows);
  EXPECT_EQ(layout("f16v4", 40), KvLayout::rows);
}

TEST(HybridState, BytesAreExactlyThePlanned) {
  for (const char* kv : {"f16", "f32", "8v4", "3v3"})
    for (int64_t d : {40, 64})
      for (int64_t tokens : {1, 63, 64, 65, 1000}) {
        const HybridPlan p = plan(2, 1000, kv, d);
        HybridState state = HybridState::create(p);
        EXPECT_EQ(state.bytes().kv, 0);
        append(state, {{0, tokens}, {1, tokens}});
        const HybridBytes want = hybrid_bytes(p, tokens), got = state.bytes();
        EXPECT_EQ(got.recurrent, want.recurrent);
        EXPECT_EQ(got.windows, want.windows);
        EXPECT_EQ(got.kv, want.kv) << kv << " " << d << " " << tokens;
        EXPECT_EQ(want.recurrent, 2 * 4 * 24 * 16 * 4);
        EXPECT_EQ(want.windows, 2 * 3 * 160 * 4);
        const int64_t pages = (tokens + kPageTokens - 1) / kPageTokens;
        EXPECT_EQ(want.kv, 2 * pages * kPageTokens * kv_bytes_per_token(p)) << kv << " " << d << " " << tokens;
      }
}

TEST(HybridState, BatchNamesSlotsPositionsAndPages) {
  HybridState state = HybridState::create(plan(3));
  HybridBatch batch = append(state, {{2, 70}, {0, 1}});
  EXPECT_EQ(batch.tokens, 71);
  EXPECT_EQ(indices(batch.slots), (std::vector<int32_t>{2, 0}));
  EXPECT_EQ(indices(batch.has_initial), (std::vector<int32_t>{0, 0}));
  EXPECT_EQ(indices(batch.lengths), (std::vector<int32_t>{70, 1}));
  EXPECT_EQ(indices(batch.sequences.cu_seqlens), (std::vector<int32_t>{0, 70, 71}));
  EXPECT_EQ(batch.sequences.max_tokens, 70);
  EXPECT_EQ(indices(batch.page_table), (std::vector<int32_t>{0, 1, 2, -1}));
  batch = append(state, {{0, 2}, {2, 1}, {1, 0}});
  EXPECT_EQ(indices(batch.positions), (std::vector<int32_t>{1, 2, 70}));
  EXPECT_EQ(indices(batch.has_initial), (std::vector<int32_t>{1, 1, 0}));
  EXPECT_EQ(indices(batch.lengths), (std::vector<int32_t>{3, 71, 0}));
  EXPECT_EQ(state.tokens(0), 3);
  EXPECT_EQ(state.tokens(1), 0);
  EXPECT_EQ(state.tokens(2), 71);
  const HybridBatch part = batch.slice(1, 1);
  EXPECT_EQ(indices(part.slots), (std::vector<int32_t>{2}));
  EXPECT_EQ(indices(part.sequences.cu_seqlens), (std::vector<int32_t>{2, 3}));
  EXPECT_EQ(indices(part.page_table), (std::vector<int32_t>{0, 1}));
}

TEST(HybridState, PagesOfAForgottenSequenceAreUsedAgain) {
  HybridState state = HybridState::create(plan(2));
  append(state, {{0, 500}});
  const int64_t before = state.bytes().kv;
  for (int i = 0; i < 20; ++i) {
    state.reset(0);
    EXPECT_EQ(state.tokens(0), 0);
    const HybridBatch batch = append(state, {{0, 500}});
    EXPECT_EQ(indices(batch.has_initial).front(), 0);
  }
  EXPECT_EQ(state.bytes().kv, before);
}

TEST(HybridState, NoPageHasTwoOwners) {
  HybridState state = HybridState::create(plan(4, 2000));
  for (int round = 0; round < 30; ++round) {
    if (round % 5 == 4) state.reset(round % 4);
    const HybridBatch batch = append(state, {{0, round % 90}, {1, 17}, {2, 64}, {3, round}});
    std::multiset<int32_t> owned;
    for (int32_t page : indices(batch.page_table))
      if (page >= 0) owned.insert(page);
    for (int32_t page : owned) EXPECT_EQ(owned.count(page), 1u);
    const KvCache cache = state.cache(1, batch);
    for (int32_t page : owned) EXPECT_LT(page, cache.k.codes.size(0));
  }
}

TEST(HybridState, GrowingKeepsWhatPagesHold) {
  HybridState state = HybridState::create(plan(1, 100000));
  HybridBatch batch = append(state, {{0, 64}});
  Tensor codes = state.cache(1, batch).k.codes;
  std::memset(codes.data, 0x5A, static_cast<size_t>(codes.stride(0)));
  for (int i = 0; i < 50; ++i) batch = append(state, {{0, 640}});
  codes = state.cache(1, batch).k.codes;
  EXPECT_GE(codes.size(0), 501);
  for (int64_t i = 0; i < codes.stride(0); ++i) ASSERT_EQ(static_cast<uint8_t*>(codes.data)[i], 0x5A) << i;
}

TEST(HybridState, PretendedStatesTakeNoMemory) {
  HybridPlan p = plan(1 << 16, 1 << 30, "f32", 512);  // many terabytes
  HybridState state = HybridState::pretend(p);
  const HybridBatch batch = append(state, {{7, 1 << 20}});
  EXPECT_GT(hybrid_bytes(p, 1 << 30).total(), int64_t{1} << 50);
  EXPECT_EQ(batch.page_table.size(1), (1 << 20) / 64);
}

TEST(HybridState, RefusesWithASentenceAndChangesNothing) {
  HybridState state = HybridState::create(plan(2, 100));
  append(state, {{0, 90}});
  EXPECT_EQ(complaint([&] { append(state, {{2, 1}}); }), "hybrid_state: sequence is 2, wanted 0 to 1");
  EXPECT_EQ(complaint([&] { append(state, {{-1, 1}}); }), "hybrid_state: sequence is -1, wanted 0 to 1");
  EXPECT_EQ(complaint([&] { append(state, {{1, 1}, {1, 1}}); }), "hybrid_state: sequence is 1 twice, wanted once");
  EXPECT_EQ(complaint([&] {
              append(state, {{1, 5}, {0, 11}});
            }),
            "hybrid_state: tokens is 11 for sequence 0, wanted 0 to 10 (the capacity is 100)");
  EXPECT_EQ(complaint([&] {
              append(state, {{1, -3}});
            }),
            "hybrid_state: tokens is -3 for sequence 1, wanted 0 to 100 (the capacity is 100)");
  EXPECT_EQ(complaint([&] { state.reset(5); }), "hybrid_state: sequence is 5, wanted 0 to 1");
  EXPECT_EQ(complaint([&] { (void)state.tokens(-2); }), "hybrid_state: sequence is -2, wanted 0 to 1");
  const HybridBatch batch = append(state, {{0, 0}});
  EXPECT_EQ(complaint([&] { (void)state.window(99); }), "hybrid_state: layer is 99, wanted 0 to 2");
  EXPECT_EQ(complaint([&] { (void)state.cache(-1, batch); }), "hybrid_state: layer is -1, wanted 0 to 2");
  EXPECT_EQ(complaint([&] { (void)state.record(99, batch); }), "hybrid_state: layer is 99, wanted 0 to 2");
  EXPECT_EQ(complaint([&] { (void)state.replay(3); }), "hybrid_state: layer is 3, wanted 0 to 2");
  EXPECT_EQ(complaint([&] { (void)state.recurrent(1, batch); }), "hybrid_state: layer 1 is attention, wanted a gated delta layer");
  EXPECT_EQ(complaint([&] { (void)state.record(2, batch); }), "hybrid_state: layer 2 is attention, wanted a gated delta layer");
  EXPECT_EQ(complaint([&] { (void)state.cache(0, batch); }), "hybrid_state: layer 0 is gated delta, wanted an attention layer");
  EXPECT_EQ(state.tokens(0), 90);
  EXPECT_EQ(state.tokens(1), 0);
}

// Products of sizes that are legal one by one: none overflows, and plans beyond any memory are refused.
TEST(HybridState, PlansBeyond2To60BytesAreRefused) {
  HybridPlan p;
  p.sequences = 1 << 20;
  p.capacity = std::numeric_limits<int32_t>::max();
  p.layers.emplace_back(AttentionMemory{1 << 20, kv_recipe("f32", 512, 512), KvLayout::rows, TileOrder::token_major});
  EXPECT_EQ(validate(p).message,
            "hybrid_state: plan takes more than 2^60 bytes when all of its 1048576 sequences hold 2147483647 tokens, wanted at "
            "most that");
  EXPECT_EQ(hybrid_bytes(p, p.capacity).kv, (int64_t{1} << 60) + 1);
  p.layers.assign(3, p.layers.front());
  EXPECT_EQ(hybrid_bytes(p, p.capacity).kv, (int64_t{1} << 60) + 1);
  EXPECT_EQ(hybrid_bytes(p, INT64_MAX).kv, (int64_t{1} << 60) + 1);
  EXPECT_EQ(hybrid_bytes(plan(), INT64_MAX).kv, (int64_t{1} << 60) + 1);
  EXPECT_EQ(hybrid_bytes(plan(), -1000).kv, 0);
  EXPECT_EQ(hybrid_bytes(plan(), INT64_MIN).kv, 0);
  // 2^12 bytes per token and head: exactly 2^60 bytes, one page more, and one page of many layers more.
  p.layers.resize(1);
  p.capacity = int64_t{1} << 28;
  std::get<AttentionMemory>(p.layers[0]).kv_heads = 1;
  EXPECT_EQ(hybrid_bytes(p, p.capacity).kv, int64_t{1} << 60);
  EXPECT_TRUE(validate(p).ok()) << validate(p).message;
  ++p.capacity;
  EXPECT_FALSE(validate(p).ok());
  --p.capacity;
  p.layers.emplace_back(DeltaMemory{1, 1, 1, 1, 2});
  EXPECT_FALSE(validate(p).ok());
  // The same for recurrent states and records.
  p.layers.assign(1 << 12, DeltaMemory{1 << 20, 256, 256, 1 << 20, 8, 1 << 20});
  p.capacity = 1;
  for (int64_t rollback : {0, 16}) {
    p.rollback = rollback;
    EXPECT_FALSE(validate(p).ok());
    EXPECT_EQ(hybrid_bytes(p, 1).recurrent, (int64_t{1} << 60) + 1);
  }
}

TEST(HybridState, RefusesPlansThatMakeNoSense) {
  const auto said = [](auto change) {
    HybridPlan p = plan();
    change(p);
    return complaint([&] { HybridState::create(p); });
  };
  EXPECT_EQ(said([](HybridPlan&) {}), "none");
  EXPECT_EQ(said([](HybridPlan& p) { p.sequences = 0; }), "hybrid_state: plan.sequences is 0, wanted 1 to 1048576");
  EXPECT_EQ(said([](HybridPlan& p) { p.capacity = 0; }), "hybrid_state: plan.capacity is 0, wanted 1 to 2147483647");
  EXPECT_EQ(said([](HybridPlan& p) { p.layers.clear(); }), "hybrid_state: plan.layers.size() is 0, wanted 1 to 65536");
  EXPECT_EQ(said([](HybridPlan& p) { std::get<DeltaMemory>(p.layers[0]).width = 9; }), "hybrid_state: width is 9, wanted 2 to 8");
  EXPECT_EQ(said([](HybridPlan& p) { std::get<DeltaMemory>(p.layers[0]).key_dim = 0; }),
            "hybrid_state: key_dim is 0, wanted 1 to 256");
  EXPECT_EQ(said([](HybridPlan& p) { std::get<AttentionMemory>(p.layers[1]).kv_heads = 0; }),
            "hybrid_state: kv_heads is 0, wanted 1 to 1048576");
  EXPECT_EQ(said([](HybridPlan& p) { std::get<AttentionMemory>(p.layers[1]).layout = static_cast<KvLayout>(9); }),
            "hybrid_state: layout is 9, wanted 0 to 1");
  EXPECT_EQ(said([](HybridPlan& p) { std::get<AttentionMemory>(p.layers[1]).tile_order = static_cast<TileOrder>(7); }),
            "hybrid_state: tile_order is 7, wanted 0 to 1");
  float numbers[5 * 64] = {};
  const auto with_mean = [&](int64_t heads, Place place = Place::host) {
    return said([&](HybridPlan& p) {
      std::get<AttentionMemory>(p.layers[1]).recipe.v.mean = dense(numbers, DType::f32, {heads, 64}, place);
    });
  };
  EXPECT_EQ(with_mean(3), "none");
  EXPECT_EQ(with_mean(5), "hybrid_state: recipe.v has mean [5, 64], wanted [kv_heads=3, 64]");
  EXPECT_EQ(with_mean(3, Place::cuda),
            "hybrid_state: recipe.v has a mean or dense_rotation that lives elsewhere than the pools of the plan");
  EXPECT_NE(said([](HybridPlan& p) { std::get<AttentionMemory>(p.layers[1]).recipe.k.bits = 11; }), "none");
  EXPECT_NE(said([](HybridPlan& p) {
              auto& memory = std::get<AttentionMemory>(p.layers[1]);
              memory.recipe = kv_recipe("8v4", 40, 40);
            }),
            "none");
}

}  // namespace
