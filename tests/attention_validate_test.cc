// Every validation rule of the attention ops, broken once, with the message that refuses it.
#include <gtest/gtest.h>

#include <limits>

#include "tests/support/attention.h"
#include "weft/compressed_attention.h"

namespace weft {
namespace {

using tests::kReference;
using tests::Scene;
using tests::SceneOptions;

// Expects `args` to be refused with exactly this message, which begins with operator and argument.
template <class Args>
void expect_refused(const Args& args, const std::string& op, const std::string& argument, const std::string& what) {
  const Status status = validate(args);
  EXPECT_EQ(status.code, Code::invalid_argument);
  EXPECT_EQ(status.op, op);
  EXPECT_EQ(status.argument, argument);
  EXPECT_EQ(status.message, op + ": " + argument + " " + what);
  EXPECT_EQ(supports(kReference, args).message, status.message);
}

// Legal arguments of all five ops over one scene: T=3, N=2, Hq=4, Hk=2, Dk=64, Dv=128, 64 tokens of capacity.
class AttentionValidate : public testing::Test {
 protected:
  AttentionValidate() : scene(SceneOptions{.Dv = 128, .lengths = {5, 9}, .queries = {2, 1}}) {
    single = scene.args();
    single.sinks = scene.make_sinks();
    scores = {scene.queries, scene.cache, {}, scene.make_scores()};
    values.weights = scene.make_scores();
    values.sequences = scene.queries.sequences;
    values.cache = scene.cache;
    values.o = scene.o;
    partials = {scene.queries, scene.cache, {}, 16, scene.make_partials(PartialLayout::blocks, 4)};
    interleaved = partials;
    interleaved.partials = scene.make_partials(PartialLayout::interleaved, 4);
    merge.partials = partials.partials;
    merge.v_format = scene.cache.v.format;
    merge.kv_heads = 2;
    merge.sinks = single.sinks;
    merge.o = scene.o;
    merge.lse = scene.lse;
  }
  // Breaks the same thing in every op that takes queries.
  template <class Break>
  void expect_refused_queries(Break&& spoil, const std::string& argument, const std::string& what) {
    AttentionScoresArgs a = scores;
    spoil(a);
    expect_refused(a, "attention_scores", argument, what);
    AttentionPartialsArgs b = partials;
    spoil(b);
    expect_refused(b, "attention_partials", argument, what);
    CompressedAttentionArgs c = single;
    spoil(c);
    expect_refused(c, "compressed_attention", argument, what);
  }
  // The same in every op that takes a cache.
  template <class Break>
  void expect_refused_cache(Break&& spoil, const std::string& argument, const std::string& what) {
    expect_refused_queries([&](auto& a) { spoil(a.cache); }, argument, what);
    AttentionValuesArgs a = values;
    spoil(a.cache);
    expect_refused(a, "attention_values", argument, what);
  }
  Tensor floats(std::initializer_list<int64_t> sizes) { return scene.memory.make(DType::f32, sizes); }
  Tensor integers(std::initializer_list<int64_t> sizes) { return scene.memory.make(DType::i32, sizes); }

  Scene scene;
  CompressedAttentionArgs single;
  AttentionScoresArgs scores;
  AttentionValuesArgs values;
  AttentionPartialsArgs partials, interleaved;
  AttentionMergeArgs merge;
};

TEST_F(AttentionValidate, TheSceneIsLegal) {
  EXPECT_EQ(validate(single).message, "");
  EXPECT_EQ(validate(scores).message, "");
  EXPECT_EQ(validate(values).message, "");
  EXPECT_EQ(validate(partials).message, "");
  EXPECT_EQ(validate(interleaved).message, "");
  EXPECT_EQ(validate(merge).message, "");
}

TEST_F(AttentionValidate, RefusedCallsThrowAndWriteNothing) {
  cases::fill(scene.o, 99);
  single.mask.window = 0;
  try {
    compressed_attention(kReference, single);
    FAIL() << "was accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "compressed_attention: mask.window is 0, wanted >= 1");
  }
  for (double value : cases::values(scene.o)) EXPECT_EQ(value, 99);
}

TEST_F(AttentionValidate, Queries) {
  expect_refused_queries([](auto& a) { a.queries.q = {}; }, "queries.q", "is absent, wanted [T, Hq, Dk=64]");
  expect_refused_queries([&](auto& a) { a.queries.q = floats({3, 64}); }, "queries.q", "is [3, 64], wanted [T, Hq, Dk=64]");
  expect_refused_queries([&](auto& a) { a.queries.q = integers({3, 4, 64}); }, "queries.q", "is i32, wanted f32, f16 or bf16");
  expect_refused_queries([&](auto& a) { a.queries.q = floats({3, 4, 128}); }, "queries.q", "is [3, 4, 128], wanted [T, Hq, Dk=64]");
  expect_refused_queries(
      [&](auto& a) {
        a.queries.q = floats({3, 5, 64});
      },
      "queries.q", "has 5 heads, wanted a positive multiple of the cache's 2 KV heads");
  expect_refused_queries(
      [&](auto& a) {
        a.queries.q = floats({3, 0, 64});
      },
      "queries.q", "has 0 heads, wanted a positive multiple of the cache's 2 KV heads");
  expect_refused_queries([&](auto& a) { a.queries.positions = integers({4}); }, "queries.positions", "is [4], wanted [T=3]");
  expect_refused_queries([&](auto& a) { a.queries.positions = floats({3}); }, "queries.positions", "is f32, wanted i32");
  expect_refused_queries([](auto& a) { a.queries.scale = NAN; }, "queries.scale", "is nan, wanted a finite number");
  expect_refused_queries([](auto& a) { a.queries.scale = INFINITY; }, "queries.scale", "is inf, wanted a finite number");
}

TEST_F(AttentionValidate, SevenQueryHeadsOverTwoKvHeads) {
  const std::string what = "has 7 heads, wanted a positive multiple of the cache's 2 KV heads";
  expect_refused_queries([&](auto& a) { a.queries.q = floats({3, 7, 64}); }, "queries.q", what);
  single.queries.q = floats({3, 7, 64});
  single.o = floats({3, 7, 128});
  single.lse = single.sinks = {};
  expect_refused(single, "compressed_attention", "queries.q", what);
}

TEST_F(AttentionValidate, Sequences) {
  expect_refused_queries([](auto& a) { a.queries.sequences = Sequences::uniform(0); }, "queries.sequences.count",
                         "is 0, wanted the number of sequences that the T=3 tokens belong to");
  expect_refused_queries([](auto& a) { a.queries.sequences.count = 1; }, "queries.sequences.count",
                         "is 1, wanted 2, one less than the 3 numbers in cu_seqlens");
  expect_refused_queries([](auto& a) { a.queries.sequences.count = -1; }, "queries.sequences.count", "is -1, wanted 0 to 1048576");
  expect_refused_queries([](auto& a) { a.queries.sequences = Sequences::uniform(2); }, "queries.sequences.count",
                         "is 2, wanted a divisor of T=3, or cu_seqlens for sequences of different lengths");
  expect_refused_queries([&](auto& a) { a.queries.sequences.cu_seqlens = integers({4}); }, "queries.sequences.cu_seqlens",
                         "is [4], wanted [count + 1=3]");
  values.sequences.max_tokens = -1;
  expect_refused(values, "attention_values", "sequences.max_tokens", "is -1, wanted >= 0");
}

TEST_F(AttentionValidate, AForgottenCountIsBlamed) {
  // Without cu_seqlens a count of 1 is legal for any number of tokens: only the sizes of other tensors tell that it was forgotten.
  expect_refused_queries([](auto& a) { a.queries.sequences = {}; }, "queries.sequences.count",
                         "is 1, wanted 2, the number of sequences in cache.lengths");
  expect_refused_queries(
      [&](auto& a) {
        a.queries.sequences = Sequences::uniform(3);
        a.cache.slots = integers({2});
      },
      "queries.sequences.count", "is 3, wanted 2, the number of sequences in cache.slots");
  expect_refused_queries([&](auto& a) { a.cache.slots = integers({3}); }, "cache.slots", "is [3], wanted [N=2]");
}

TEST_F(AttentionValidate, Mask) {
  expect_refused_queries([](auto& a) { a.mask.window = 0; }, "mask.window", "is 0, wanted >= 1");
  expect_refused_queries([](auto& a) { a.mask.window = -7; }, "mask.window", "is -7, wanted >= 1");
  expect_refused_queries([](auto& a) { a.mask.softcap = 0.0f; }, "mask.softcap", "is 0.000000, wanted > 0");
  expect_refused_queries([](auto& a) { a.mask.softcap = -1.0f; }, "mask.softcap", "is -1.000000, wanted > 0");
  expect_refused_queries([](auto& a) { a.mask.softcap = INFINITY; }, "mask.softcap", "is inf, wanted a finite number");
}

TEST_F(AttentionValidate, Cache) {
  expect_refused_cache([](KvCache& c) { c.lengths = {}; }, "cache.lengths", "is absent, wanted [N=2]");
  expect_refused_cache([&](KvCache& c) { c.lengths = integers({3}); }, "cache.lengths", "is [3], wanted [N=2]");
  expect_refused_cache([&](KvCache& c) { c.slots = integers({3}); }, "cache.slots", "is [3], wanted [N=2]");
  expect_refused_cache([](KvCache& c) { c.k.format.bits = 9; }, "cache.k.format", "has bits 9, wanted 2 to 8");
  expect_refused_cache([](KvCache& c) { c.v.format.gain_group = 7; }, "cache.v.format",
                       "has gain_group 7, wanted a divisor of head_dim 128");
  expect_refused_cache([&](KvCache& c) { c.v.gains = {}; }, "cache.v.gains",
                       "is absent, wanted [blocks=2, Hk=2, capacity=64, Dv / gain_group=1]");
  expect_refused_cache(
      [&](KvCache& c) {
        c.k.format.mean = floats({3, 64});
      },
      "cache.k.format.mean", "is [3, 64], wanted [Hk=2, Dk=64]");
  expect_refused_cache([](KvCache& c) { c.kind = CacheKind::paged; }, "cache.page_table", "is absent, wanted [N=2, pages]");
  expect_refused_cache([](KvCache& c) { c.pinned = 1; }, "cache.pinned", "is 1, wanted 0, since the cache is not a ring");
}

TEST_F(AttentionValidate, Enums) {
  expect_refused_cache([](KvCache& c) { c.layout = static_cast<KvLayout>(2); }, "cache.layout", "is 2, wanted 0 to 1");
  expect_refused_cache([](KvCache& c) { c.tile_order = static_cast<TileOrder>(2); }, "cache.tile_order", "is 2, wanted 0 to 1");
  expect_refused_cache([](KvCache& c) { c.kind = static_cast<CacheKind>(3); }, "cache.kind", "is 3, wanted 0 to 2");
  expect_refused_queries([](auto& a) { a.queries.domain = static_cast<KvDomain>(2); }, "queries.domain", "is 2, wanted 0 to 1");
  values.domain = static_cast<KvDomain>(-1);
  expect_refused(values, "attention_values", "domain", "is -1, wanted 0 to 1");
  AttentionMergeArgs merged = merge;
  merged.domain = static_cast<KvDomain>(2);
  expect_refused(merged, "attention_merge", "domain", "is 2, wanted 0 to 1");
  merge.partials.layout = static_cast<PartialLayout>(2);
  expect_refused(merge, "attention_merge", "partials.layout", "is 2, wanted 0 to 1");
  interleaved.partials.layout = static_cast<PartialLayout>(-1);
  expect_refused(interleaved, "attention_partials", "partials.layout", "is -1, wanted 0 to 1");
  CompressedAttentionArgs args = single;
  args.precision = static_cast<Precision>(2);
  expect_refused(args, "compressed_attention", "precision", "is 2, wanted 0 to 1");
  args = single;
  args.schedule = static_cast<Schedule>(2);
  expect_refused(args, "compressed_attention", "schedule", "is 2, wanted 0 to 1");
}

TEST_F(AttentionValidate, PageTablesBelow2To31Pages) {
  Scene paged({.Dv = 128, .lengths = {5, 9}, .queries = {2, 1}, .kind = CacheKind::paged});
  CompressedAttentionArgs args = paged.args();
  EXPECT_TRUE(validate(args).ok());
  args.cache.page_table.sizes[1] = int64_t{1} << 31;
  expect_refused(args, "compressed_attention", "cache.page_table", "is [2, 2147483648], wanted less than 2^31 pages");
}

TEST_F(AttentionValidate, TooManyHeads) {
  // 16385 heads without tokens take no memory.
  expect_refused_queries(
      [](auto& a) {
        a.queries.q = dense(nullptr, DType::f32, {0, (1 << 14) + 1, 64});
        a.queries.sequences = Sequences::uniform(2);
      },
      "queries.q", "has 16385 heads, wanted at most 16384");
  merge.o = dense(nullptr, DType::f32, {0, (1 << 14) + 1, 128});
  merge.lse = merge.sinks = {};
  merge.kv_heads = 1;
  expect_refused(merge, "attention_merge", "o", "has 16385 heads, wanted at most 16384");
}

TEST_F(AttentionValidate, DenseRotations) {
  const Tensor square64 = floats({64, 64}), square128 = floats({128, 128});
  expect_refused_cache(
      [&](KvCache& c) {
        c.k.format.rotation = Rotation::dense;
        c.k.format.dense_rotation = square64;
        c.k.format.dense_rotation.strides[1] = 2;
      },
      "cache.k.format.dense_rotation", "has stride 2 in its last dimension, wanted 1");
  expect_refused_cache(
      [&](KvCache& c) {
        c.v.format.rotation = Rotation::dense;
        c.v.format.dense_rotation = square128;
        c.v.format.dense_rotation.data = nullptr;
      },
      "cache.v.format.dense_rotation", "has no data for its shape [128, 128]");
  merge.v_format.rotation = Rotation::dense;
  merge.v_format.dense_rotation = square128;
  EXPECT_EQ(validate(merge).message, "");
  merge.v_format.dense_rotation.strides[1] = 0;
  expect_refused(merge, "attention_merge", "v_format.dense_rotation", "has stride 0 in its last dimension, wanted 1");
}

TEST_F(AttentionValidate, Scores) {
  scores.scores = {};
  expect_refused(scores, "attention_scores", "scores", "is absent, wanted [T=3, Hq=4, context]");
  scores.scores = floats({3, 5, 64});
  expect_refused(scores, "attention_scores", "scores", "is [3, 5, 64], wanted [T=3, Hq=4, context]");
  scores.scores = floats({3, 4, 0});
  expect_refused(scores, "attention_scores", "scores", "is [3, 4, 0], wanted a context >= 1");
  scores.scores = integers({3, 4, 64});
  expect_refused(scores, "attention_scores", "scores", "is i32, wanted f32, f16 or bf16");
}

TEST_F(AttentionValidate, Values) {
  AttentionValuesArgs args = values;
  args.weights = {};
  expect_refused(args, "attention_values", "weights", "is absent, wanted [T, Hq, context]");
  args.weights = floats({3, 4, 0});
  expect_refused(args, "attention_values", "weights", "is [3, 4, 0], wanted a context >= 1");
  args.weights = floats({3, 3, 64});
  expect_refused(args, "attention_values", "weights", "has 3 heads, wanted a positive multiple of the cache's 2 KV heads");
  args = values;
  args.threshold = NAN;
  expect_refused(args, "attention_values", "threshold", "is nan, wanted a finite number");
  args = values;
  args.o = floats({3, 4, 64});
  expect_refused(args, "attention_values", "o", "is [3, 4, 64], wanted [T=3, Hq=4, Dv=128]");
}

TEST_F(AttentionValidate, BlocksOfTokens) {
  partials.block_tokens = 0;
  expect_refused(partials, "attention_partials", "block_tokens", "is 0, wanted >= 1");
  partials.block_tokens = 15;
  expect_refused(partials, "attention_partials", "partials.count",
                 "is 4, wanted at least 5 blocks of 15 to cover the 64 tokens that a sequence may hold");
  partials.block_tokens = std::numeric_limits<int64_t>::max();
  EXPECT_TRUE(validate(partials).ok());
}

TEST_F(AttentionValidate, BlocksOfAPagedCacheCoverAllPages) {
  Scene paged({.Dv = 128, .lengths = {5, 9}, .queries = {2, 1}, .kind = CacheKind::paged, .capacity = 80});
  const AttentionPartialsArgs args{paged.queries, paged.cache, {}, 16, paged.make_partials(PartialLayout::blocks, 4)};
  expect_refused(args, "attention_partials", "partials.count",
                 "is 4, wanted at least 5 blocks of 16 to cover the 80 tokens that a sequence may hold");
}

TEST_F(AttentionValidate, PartialsInBlocks) {
  const auto both = [&](auto&& spoil, const std::string& argument, const std::string& what) {
    AttentionPartialsArgs a = partials;
    spoil(a.partials);
    expect_refused(a, "attention_partials", argument, what);
    AttentionMergeArgs b = merge;
    spoil(b.partials);
    expect_refused(b, "attention_merge", argument, what);
  };
  both([](auto& p) { p.count = 0; }, "partials.count", "is 0, wanted >= 1");
  both([](auto& p) { p.o = {}; }, "partials.o", "is absent, wanted [T=3, Hq=4, B=4, Dv=128]");
  both([&](auto& p) { p.o = floats({3, 4, 5, 128}); }, "partials.o", "is [3, 4, 5, 128], wanted [T=3, Hq=4, B=4, Dv=128]");
  both([&](auto& p) { p.o = scene.memory.make(DType::bf16, {3, 4, 4, 128}); }, "partials.o", "is bf16, wanted f32");
  both([&](auto& p) { p.m = floats({3, 4}); }, "partials.m", "is [3, 4], wanted [T=3, Hq=4, B=4]");
  both([](auto& p) { p.l = {}; }, "partials.l", "is absent, wanted [T=3, Hq=4, B=4]");
  both([&](auto& p) { p.buffer = floats({10}); }, "partials.buffer", "is given, but layout blocks keeps partials in o, m and l");
}

TEST_F(AttentionValidate, PartialsInterleaved) {
  const auto both = [&](auto&& spoil, const std::string& argument, const std::string& what) {
    AttentionPartialsArgs a = interleaved;
    spoil(a.partials);
    expect_refused(a, "attention_partials", argument, what);
    AttentionMergeArgs b = merge;
    b.partials = interleaved.partials;
    EXPECT_TRUE(validate(b).ok());
    spoil(b.partials);
    expect_refused(b, "attention_merge", argument, what);
  };
  both([](auto& p) { p.buffer = {}; }, "partials.buffer", "is absent, wanted [T Hq B (Dv + 2)]");
  both([&](auto& p) { p.buffer = floats({3, 4}); }, "partials.buffer", "is [3, 4], wanted [T Hq B (Dv + 2)]");
  both([&](auto& p) { p.buffer = floats({6241}); }, "partials.buffer", "has 6241 floats, wanted T Hq B (Dv + 2) = 6240");
  both([](auto& p) { p.count = std::numeric_limits<int64_t>::max(); }, "partials.buffer",
       "has 6240 floats, wanted T Hq B (Dv + 2) = more than 2^63");
  both([&](auto& p) { p.o = floats({1}); }, "partials.o", "is given, but layout interleaved keeps partials in buffer");
  both([&](auto& p) { p.m = floats({1}); }, "partials.m", "is given, but layout interleaved keeps partials in buffer");
  both([&](auto& p) { p.l = floats({1}); }, "partials.l", "is given, but layout interleaved keeps partials in buffer");
}

TEST_F(AttentionValidate, TheOutputIsBlamedWhereThePartialsAgree) {
  merge.lse = merge.sinks = {};
  merge.o = floats({4, 4, 128});
  expect_refused(merge, "attention_merge", "o", "is [4, 4, 128], wanted [T=3, Hq=4, Dv=128]");
}

TEST_F(AttentionValidate, Merge) {
  AttentionMergeArgs args = merge;
  args.v_format.bits = 1;
  expect_refused(args, "attention_merge", "v_format", "has bits 1, wanted 2 to 8");
  args = merge;
  args.v_format.mean = floats({4, 128});
  expect_refused(args, "attention_merge", "v_format.mean", "is [4, 128], wanted [Hk=2, Dv=128]");
  for (int64_t heads : {-1, 0, 3}) {
    args = merge;
    args.kv_heads = heads;
    expect_refused(args, "attention_merge", "kv_heads", "is " + std::to_string(heads) + ", wanted a positive divisor of Hq=4");
  }
}

TEST_F(AttentionValidate, Outputs) {
  const auto both = [&](auto&& spoil, const std::string& argument, const std::string& what) {
    CompressedAttentionArgs a = single;
    spoil(a);
    expect_refused(a, "compressed_attention", argument, what);
    AttentionMergeArgs b = merge;
    spoil(b);
    expect_refused(b, "attention_merge", argument, what);
  };
  both([&](auto& a) { a.lse = floats({3, 2}); }, "lse", "is [3, 2], wanted [T=3, Hq=4]");
  both([&](auto& a) { a.lse = scene.memory.make(DType::f16, {3, 4}); }, "lse", "is f16, wanted f32");
  both([&](auto& a) { a.sinks = floats({2}); }, "sinks", "is [2], wanted [Hq=4]");
  both([&](auto& a) { a.sinks = integers({4}); }, "sinks", "is i32, wanted f32");
  CompressedAttentionArgs wrong = single;
  wrong.o = {};
  expect_refused(wrong, "compressed_attention", "o", "is absent, wanted [T=3, Hq=4, Dv=128]");
  wrong.o = floats({3, 4, 64});
  expect_refused(wrong, "compressed_attention", "o", "is [3, 4, 64], wanted [T=3, Hq=4, Dv=128]");
  merge.o = floats({3, 4, 64});
  expect_refused(merge, "attention_merge", "o", "is [3, 4, 64], wanted [T, Hq, Dv=128]");
}

TEST_F(AttentionValidate, MemoryRules) {
  CompressedAttentionArgs args = single;
  args.queries.q.strides[2] = 2;
  expect_refused(args, "compressed_attention", "queries.q", "has stride 2 in its last dimension, wanted 1");
  args = single;
  args.o.data = scene.cache.v.codes.data;
  expect_refused(args, "compressed_attention", "o", "overlaps cache.v.codes in memory");
  args = single;
  args.o.strides[0] = 0;
  expect_refused(args, "compressed_attention", "o", "is an output whose strides let two indices share an element");
}

TEST_F(AttentionValidate, LanesOrderNeedsMultiplesOf32) {
  Scene tiles({.Dv = 128, .lengths = {5, 9}, .queries = {2, 1}, .layout = KvLayout::tiles});
  CompressedAttentionArgs args = tiles.args();
  args.cache.tile_order = TileOrder::lanes;
  EXPECT_TRUE(supports(kReference, args).ok());
  Scene narrow({.Dv = 80, .lengths = {5, 9}, .queries = {2, 1}, .layout = KvLayout::tiles});
  args = narrow.args();
  EXPECT_TRUE(validate(args).ok());
  args.cache.tile_order = TileOrder::lanes;
  expect_refused(args, "compressed_attention", "cache.v.format",
                 "has head_dim 80 and dense codes, wanted a multiple of 32 and dense codes for tiles in lanes order");
}

}  // namespace
}  // namespace weft
