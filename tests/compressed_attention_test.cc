// compressed_attention, attention_scores and attention_values on the reference: dense softmax, properties and corner cases.
#include "weft/compressed_attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "tests/support/attention.h"

namespace weft {
namespace {

using cases::get;
using cases::values;
using tests::Dense;
using tests::expect_close;
using tests::kNone;
using tests::kReference;
using tests::Scene;
using tests::SceneOptions;

// o and lse of a scene against dense softmax.
void expect_dense(Scene& scene, const CompressedAttentionArgs& args) {
  const Dense want = scene.dense(args);
  expect_close(scene.run(args), want.o);
  expect_close(values(args.lse), want.lse);
}
void expect_dense(const SceneOptions& options) {
  Scene scene(options);
  expect_dense(scene, scene.args());
}

TEST(CompressedAttention, EveryHeadDimWithOtherValueDim) {
  const int64_t dims[] = {8, 24, 64, 80, 96, 112, 128, 192, 256, 512};
  for (size_t i = 0; i < std::size(dims); ++i) {
    SCOPED_TRACE(dims[i]);
    expect_dense({.Dk = dims[i], .Dv = dims[(i + 3) % std::size(dims)], .lengths = {19}, .queries = {2}});
  }
}

TEST(CompressedAttention, EveryPairOfBits) {
  for (int k = 2; k <= 8; ++k)
    for (int v = 2; v <= 8; ++v) {
      const std::string recipe = std::to_string(k) + "v" + std::to_string(v);
      SCOPED_TRACE(recipe);
      expect_dense({.recipe = recipe, .Dk = 16, .Dv = 24, .lengths = {9}, .capacity = 16});
    }
}

TEST(CompressedAttention, PassthroughAndMixedRecipes) {
  for (const char* recipe : {"f32", "f16", "bf16", "f16v4", "8v4", "bf16v2", "4vf32", "f32v8", "aura4v2", "aura3v3"}) {
    SCOPED_TRACE(recipe);
    expect_dense({.recipe = recipe, .Dk = 64, .Dv = 128, .queries = {3}});
  }
  for (const char* recipe : {"tq4", "tqhb5", "tqhb6", "tqhb8"}) {
    SCOPED_TRACE(recipe);
    expect_dense({.recipe = recipe, .Dk = 512, .Dv = 256, .lengths = {11}, .capacity = 16});
  }
}

TEST(CompressedAttention, DenseAndAbsentRotations) {
  cases::Memory memory;
  const int64_t D = 24;
  const Tensor reflection = memory.make(DType::f32, {D, D});  // I - 2 u u^T / |u|^2, |u|^2 = 250
  for (int64_t i = 0; i < D; ++i)
    for (int64_t j = 0; j < D; ++j)
      cases::set(reflection, i * D + j, (i == j) - 2.0 / 250 * static_cast<double>((i % 5 + 1) * (j % 5 + 1)));
  KvFormat dense = kv_format("4", D), none = kv_format("5", D);
  dense.rotation = Rotation::dense;
  dense.dense_rotation = reflection;
  none.rotation = Rotation::none;
  for (const auto& [k, v] : {std::pair{dense, none}, std::pair{none, dense}, std::pair{dense, dense}}) {
    Scene scene({.Dk = D, .Dv = D, .k_mean = true, .v_mean = true}, k, v);
    expect_dense(scene, scene.args());
  }
}

TEST(CompressedAttention, MeansOfBothSides) {
  for (const char* recipe : {"4v4", "3v8", "f16v4", "4vf16"})
    for (bool sinks : {false, true}) {
      SCOPED_TRACE(recipe);
      Scene scene({.recipe = recipe, .queries = {3}, .k_mean = true, .v_mean = true});
      CompressedAttentionArgs args = scene.args();
      if (sinks) args.sinks = scene.make_sinks();
      args.mask.softcap = 3.0f;
      expect_dense(scene, args);
    }
}

TEST(CompressedAttention, QueriesMayComeRotated) {
  for (bool mean : {false, true}) {
    Scene scene({.Dk = 80, .queries = {3}, .k_mean = mean, .v_mean = mean});
    CompressedAttentionArgs args = scene.args();
    const Dense want = scene.dense(args);
    const Tensor rotated = scene.memory.make(DType::f32, {scene.T, 4, 80});
    kv_rotate(kReference, {scene.queries.q, rotated, scene.cache.k.format, false});
    args.queries.q = rotated;
    args.queries.domain = KvDomain::rotated;
    expect_close(scene.run(args), want.o);
    expect_close(values(args.lse), want.lse);
  }
}

TEST(CompressedAttention, ScaleIsAppliedOnce) {
  Scene scene({.recipe = "8v8"});
  CompressedAttentionArgs args = scene.args();
  args.queries.scale = 0.3f;
  expect_dense(scene, args);
  args.queries.scale = 1 / std::sqrt(64.0f);
  const std::vector<double> explicit_scale = scene.run(args);
  args.queries.scale.reset();
  EXPECT_EQ(scene.run(args), explicit_scale);
}

TEST(CompressedAttention, SoftcapBoundsEveryScore) {
  Scene scene({.recipe = "f32", .queries = {2}});
  CompressedAttentionArgs args = scene.args();
  args.mask.softcap = 0.5f;
  args.queries.scale = 4.0f;
  expect_dense(scene, args);
  const Tensor scores = scene.make_scores();
  attention_scores(kReference, {args.queries, args.cache, args.mask, scores});
  for (double s : values(scores)) EXPECT_LE(s, 0.5);
}

TEST(CompressedAttention, CausalWithFullSightIsNonCausal) {
  Scene scene({.queries = {1}});
  CompressedAttentionArgs args = scene.args();
  const std::vector<double> causal = scene.run(args);
  args.mask.causal = false;
  EXPECT_EQ(scene.run(args), causal);
  args.queries.positions = scene.memory.indices({2});  // non-causal: the position does not matter
  EXPECT_EQ(scene.run(args), causal);
  args.mask.causal = true;
  EXPECT_NE(scene.run(args), causal);
  expect_dense(scene, args);
}

TEST(CompressedAttention, Window) {
  Scene scene({.lengths = {37}, .queries = {5}, .v_mean = true});
  CompressedAttentionArgs args = scene.args();
  const std::vector<double> full = scene.run(args);
  for (int64_t window : {int64_t{37}, int64_t{38}, int64_t{1} << 31, std::numeric_limits<int64_t>::max()}) {
    args.mask.window = window;
    EXPECT_EQ(scene.run(args), full);
  }
  for (int64_t window : {1, 2, 7, 36}) {
    args.mask.window = window;
    expect_dense(scene, args);
    EXPECT_NE(values(scene.o), full);
  }
  args.mask.causal = false;  // a window alone bounds the past only
  args.mask.window = 3;
  expect_dense(scene, args);
  args.mask.window = std::numeric_limits<int64_t>::max();
  args.queries.positions = scene.memory.indices({-1, -2, 0, 1, std::numeric_limits<int32_t>::min()});
  expect_dense(scene, args);
}

TEST(CompressedAttention, WindowOfOneReturnsTheTokenItself) {
  Scene scene({.Hq = 2, .Hk = 2, .queries = {1}});
  CompressedAttentionArgs args = scene.args();
  args.mask.window = 1;
  scene.run(args);
  const Tensor v = scene.memory.make(DType::f32, {1, 2, 64});
  kv_decode(kReference, {scene.cache, scene.memory.indices({36}), Sequences::uniform(1), KvDomain::original, {}, v});
  EXPECT_LE(cases::relative_rms(scene.o, v), 1e-7);
}

TEST(CompressedAttention, Sinks) {
  Scene scene({.queries = {2}});
  CompressedAttentionArgs args = scene.args();
  const std::vector<double> without = scene.run(args), lse = values(scene.lse);
  args.sinks = scene.memory.make(DType::f32, {4});
  cases::fill(args.sinks, kNone);
  EXPECT_EQ(scene.run(args), without);
  EXPECT_EQ(values(scene.lse), lse);
  args.sinks = scene.make_sinks();
  expect_dense(scene, args);
  EXPECT_NE(values(scene.o), without);
  args.queries.scale = 0.01f;  // the sink is not scaled
  expect_dense(scene, args);
}

TEST(CompressedAttention, HugeSinksAndScoresStayFinite) {
  Scene scene({.recipe = "f32"});
  CompressedAttentionArgs args = scene.args();
  args.queries.scale = 1000.0f;
  args.sinks = scene.memory.make(DType::f32, {4});
  for (double sink : {-1e30, 1e30}) {
    cases::fill(args.sinks, sink);
    expect_dense(scene, args);
  }
}

TEST(CompressedAttention, NoTokens) {
  Scene scene({.lengths = {0, 5, 0}, .queries = {2, 1, 1}, .v_mean = true});
  CompressedAttentionArgs args = scene.args();
  args.queries.positions = scene.memory.indices({0, 1, 4, 0});
  expect_dense(scene, args);
  for (int64_t t : {0, 1, 3})
    for (int64_t h = 0; h < 4; ++h) {
      EXPECT_EQ(get(scene.lse, t * 4 + h), kNone);
      for (int64_t d = 0; d < 64; ++d) EXPECT_EQ(get(scene.o, (t * 4 + h) * 64 + d), 0);
    }
  args.sinks = scene.make_sinks();
  scene.run(args);
  EXPECT_EQ(get(scene.lse, 0), get(args.sinks, 0));
  EXPECT_EQ(get(scene.o, 0), 0);
}

TEST(CompressedAttention, PositionOfTheRingDoesNotMatter) {
  for (int64_t pinned : {0, 5}) {
    std::vector<double> first;
    for (int64_t total : {24, 25, 31, 43, 48, 1000}) {
      SCOPED_TRACE(total);
      SceneOptions options{.lengths = {total}, .kind = CacheKind::ring, .capacity = 24, .pinned = pinned};
      Scene scene(options);
      expect_dense(scene, scene.args());
      if (first.empty()) first = values(scene.o);
      EXPECT_EQ(values(scene.o), first);
    }
  }
}

TEST(CompressedAttention, RingMasksByPosition) {
  for (int64_t total : {3, 17, 24, 61})
    for (int64_t pinned : {0, 4}) {
      SCOPED_TRACE(total);
      Scene scene({.lengths = {total}, .queries = {3}, .kind = CacheKind::ring, .capacity = 24, .pinned = pinned});
      CompressedAttentionArgs args = scene.args();
      expect_dense(scene, args);
      args.mask.window = 9;
      expect_dense(scene, args);
    }
}

TEST(CompressedAttention, StorageDoesNotMatter) {
  const SceneOptions linear{
      .recipe = "3v5", .lengths = {100, 33, 0, 128}, .queries = {2, 1, 1, 3}, .capacity = 128, .k_mean = true, .v_mean = true};
  Scene plain(linear);
  expect_dense(plain, plain.args());
  std::vector<SceneOptions> others(6, linear);
  others[0].token_major = true;
  others[1].kind = CacheKind::paged;
  others[2].kind = CacheKind::paged, others[2].page = 48, others[2].token_major = true;
  others[3].layout = KvLayout::tiles;
  others[4].kind = CacheKind::paged, others[4].page = 64, others[4].layout = KvLayout::tiles;
  others[5].kind = CacheKind::ring, others[5].pinned = 3, others[5].layout = KvLayout::tiles;
  for (size_t i = 0; i < others.size(); ++i) {
    SCOPED_TRACE(i);
    Scene scene(others[i]);
    EXPECT_EQ(scene.run(scene.args()), values(plain.o));
    EXPECT_EQ(values(scene.lse), values(plain.lse));
  }
}

TEST(CompressedAttention, RowsBeyondTheLengthAreNeverRead) {
  for (const char* recipe : {"4v4", "f32", "bf16v6"}) {
    Scene tight({.recipe = recipe, .lengths = {37}, .capacity = 37}), roomy({.recipe = recipe, .lengths = {37}, .capacity = 80});
    EXPECT_EQ(roomy.run(roomy.args()), tight.run(tight.args()));
  }
}

TEST(CompressedAttention, MaskedTokensMayHoldAnything) {
  Scene scene({.recipe = "f32", .lengths = {20}, .queries = {1}});
  CompressedAttentionArgs args = scene.args();
  args.queries.positions = scene.memory.indices({9});
  args.mask.window = 4;
  const std::vector<double> clean = scene.run(args);
  for (const KvSide* side : {&scene.cache.k, &scene.cache.v})
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t row : {5, 10, 19}) cases::set(side->codes, (h * 64 + row) * 64, NAN);
  EXPECT_EQ(scene.run(args), clean);
  cases::set(scene.cache.k.codes, 9 * 64, NAN);  // NaN in a visible token reaches the query heads of its kv head only
  scene.run(args);
  EXPECT_TRUE(std::isnan(get(scene.o, 0)));
  EXPECT_FALSE(std::isnan(get(scene.o, 2 * 64)));
}

TEST(CompressedAttention, GroupedHeadsAreRepeatedHeads) {
  Scene grouped({.Hq = 6, .Hk = 2, .queries = {2}, .k_mean = true, .v_mean = true});
  grouped.run(grouped.args());
  CompressedAttentionArgs args = grouped.args();
  const auto repeat = [&](const Tensor& t, int dim) {  // head h of the copy is head h / 3
    Tensor wide = t;
    std::vector<int64_t> sizes(t.sizes.begin(), t.sizes.begin() + t.rank);
    sizes[static_cast<size_t>(dim)] = 6;
    wide = grouped.memory.make(t.dtype, sizes);
    const int64_t inner = t.stride(dim) * dtype_bytes(t.dtype);
    for (int64_t h = 0; h < 6; ++h)
      std::memcpy(static_cast<char*>(wide.data) + h * inner, static_cast<const char*>(t.data) + h / 3 * inner,
                  static_cast<size_t>(inner));
    return wide;
  };
  for (KvSide* side : {&args.cache.k, &args.cache.v}) {
    side->codes = repeat(side->codes, 1);
    side->gains = repeat(side->gains, 1);
    side->format.mean = repeat(side->format.mean, 0);
  }
  args.o = grouped.make_o();
  compressed_attention(kReference, args);
  EXPECT_TRUE(cases::same_bits(args.o, grouped.o));
}

TEST(CompressedAttention, PrefillIsItsQueriesOneByOne) {
  Scene all({.lengths = {40, 23}, .queries = {7, 4}});
  CompressedAttentionArgs args = all.args();
  args.mask.window = 30;
  all.run(args);
  expect_dense(all, args);
  const std::vector<double> together = values(all.o), lse = values(all.lse);
  args.queries.positions = all.memory.indices({33, 34, 35, 36, 37, 38, 39, 19, 20, 21, 22});
  EXPECT_EQ(all.run(args), together);  // the defaults of absent positions
  for (int64_t t = 0; t < 11; ++t) {
    CompressedAttentionArgs one = args;
    for (Tensor* tensor : {&one.queries.q, &one.queries.positions, &one.o, &one.lse}) {
      tensor->data = static_cast<char*>(tensor->data) + t * tensor->strides[0] * dtype_bytes(tensor->dtype);
      tensor->sizes[0] = 1;
    }
    one.queries.sequences = Sequences::packed(all.memory.indices({0, t < 7, 1}), 2, 1);
    cases::fill(one.o, 99);
    compressed_attention(kReference, one);
  }
  EXPECT_EQ(values(all.o), together);
  EXPECT_EQ(values(all.lse), lse);
}

TEST(CompressedAttention, NothingToDo) {
  Scene no_queries({.queries = {0}}), no_sequences({.lengths = {}, .queries = {}});
  compressed_attention(kReference, no_queries.args());
  compressed_attention(kReference, no_sequences.args());
  EXPECT_TRUE(no_queries.memory.guards_intact());
}

TEST(CompressedAttention, ZeroQueriesAverage) {
  Scene scene({.recipe = "f32", .lengths = {8}});
  cases::fill(scene.queries.q, 0);
  expect_dense(scene, scene.args());
  for (double lse : values(scene.lse)) EXPECT_FLOAT_EQ(static_cast<float>(lse), std::log(8.0f));
}

TEST(CompressedAttention, ZeroRowsWeighAsTokens) {
  Scene scene({.lengths = {6}});
  const Tensor zeros = scene.memory.make(DType::f32, {6, 2, 64});
  cases::fill(zeros, 0);
  kv_encode(kReference, {zeros, zeros, scene.memory.indices({0, 1, 2, 3, 4, 5}), scene.only(0, 6), scene.cache});
  for (double value : scene.run(scene.args())) EXPECT_EQ(value, 0);
  for (double lse : values(scene.lse)) EXPECT_FLOAT_EQ(static_cast<float>(lse), std::log(6.0f));
}

TEST(CompressedAttention, InertSequences) {
  Scene scene({.lengths = {20, 20, 20}, .queries = {1, 1, 1}});
  CompressedAttentionArgs args = scene.args();
  const std::vector<double> whole = scene.run(args);
  const int64_t row = 4 * 64;
  args.cache.slots = scene.memory.indices({-1, 1, 3});  // no slot, its own, beyond the pool
  scene.run(args);
  for (int64_t i = 0; i < 3 * row; ++i) EXPECT_EQ(get(scene.o, i), i / row == 1 ? whole[static_cast<size_t>(i)] : 0);
  EXPECT_EQ(get(scene.lse, 0), kNone);
  args = scene.args();
  cases::fill(scene.o, 99);
  args.queries.sequences.cu_seqlens = scene.memory.indices({0, 1, 4, 3});  // beyond T, then decreasing
  scene.run(args);
  for (int64_t i = 0; i < 3 * row; ++i) EXPECT_EQ(get(scene.o, i), i < row ? whole[static_cast<size_t>(i)] : 99);
  EXPECT_TRUE(scene.memory.guards_intact());
}

TEST(CompressedAttention, LengthsAreClampedToTheCache) {
  for (CacheKind kind : {CacheKind::linear, CacheKind::paged}) {
    Scene scene({.lengths = {32}, .queries = {2}, .kind = kind, .capacity = 32});
    CompressedAttentionArgs args = scene.args();
    const std::vector<double> full = scene.run(args);
    args.cache.lengths = scene.memory.indices({std::numeric_limits<int32_t>::max()});
    EXPECT_EQ(scene.run(args), full);
    args.cache.lengths = scene.memory.indices({std::numeric_limits<int32_t>::min()});
    for (double value : scene.run(args)) EXPECT_EQ(value, 0);
  }
}

TEST(CompressedAttention, TokensOnMissingPagesAreNotThere) {
  Scene scene({.lengths = {37}, .kind = CacheKind::paged, .capacity = 48, .page = 16});
  CompressedAttentionArgs args = scene.args();
  args.mask.window = 37 - 16;
  const std::vector<double> without_first_page = scene.run(args);
  args.mask.window.reset();
  EXPECT_NE(scene.run(args), without_first_page);
  for (int64_t page : {-1, 1000}) {
    cases::set(args.cache.page_table, 0, static_cast<double>(page));
    EXPECT_EQ(scene.run(args), without_first_page);
  }
}

TEST(CompressedAttention, NarrowTypesRoundOnce) {
  for (DType dtype : {DType::f16, DType::bf16}) {
    Scene scene({.queries = {2}, .q_dtype = dtype, .o_dtype = dtype});
    scene.run(scene.args());
    CompressedAttentionArgs wide = scene.args();
    wide.o = scene.memory.make(DType::f32, {2, 4, 64});
    expect_dense(scene, wide);
    const Tensor rounded = scene.make_o();
    cases::copy(wide.o, rounded);
    EXPECT_TRUE(cases::same_bits(scene.o, rounded));
  }
}

TEST(CompressedAttention, StridedQueriesAndOutputs) {
  Scene scene({.queries = {3}});
  const std::vector<double> want = scene.run(scene.args());
  CompressedAttentionArgs args = scene.args();
  args.queries.q = scene.memory.make_padded(DType::f32, {3, 4, 64}, 5);
  args.o = scene.memory.make_padded(DType::f32, {3, 4, 64}, 9);
  cases::copy(scene.queries.q, args.queries.q);
  EXPECT_EQ(scene.run(args), want);
}

// Softmax over each row of scores, as a caller of attention_scores and attention_values would compute it.
void softmax(const Tensor& scores) {
  const int64_t columns = scores.size(2);
  for (int64_t r = 0; r < scores.size(0) * scores.size(1); ++r) {
    double top = kNone, sum = 0;
    for (int64_t j = 0; j < columns; ++j) top = std::max(top, get(scores, r * columns + j));
    for (int64_t j = 0; j < columns; ++j) sum += std::exp(get(scores, r * columns + j) - top);
    for (int64_t j = 0; j < columns; ++j) cases::set(scores, r * columns + j, std::exp(get(scores, r * columns + j) - top) / sum);
  }
}

TEST(AttentionScores, AreTheDenseOnes) {
  for (CacheKind kind : {CacheKind::linear, CacheKind::ring, CacheKind::paged}) {
    Scene scene({.lengths = {37, 90}, .queries = {3, 2}, .kind = kind, .capacity = 96, .k_mean = true});
    CompressedAttentionArgs args = scene.args();
    args.mask.window = 30;
    const Tensor scores = scene.make_scores();
    attention_scores(kReference, {args.queries, args.cache, args.mask, scores});
    expect_close(values(scores), scene.dense(args).scores);
    const Tensor half = scene.make_scores(DType::f16);
    attention_scores(kReference, {args.queries, args.cache, args.mask, half});
    EXPECT_LE(cases::relative_rms(half, scores), 0x1p-11);
  }
}

TEST(AttentionScores, ContextMayBeWiderOrNarrowerThanTheCache) {
  Scene scene({.lengths = {20}, .capacity = 32});
  const Tensor usual = scene.make_scores();
  attention_scores(kReference, {scene.queries, scene.cache, {}, usual});
  for (int64_t context : {1, 7, 33, 40}) {
    const Tensor scores = scene.memory.make(DType::f32, {1, 4, context});
    attention_scores(kReference, {scene.queries, scene.cache, {}, scores});
    for (int64_t h = 0; h < 4; ++h)
      for (int64_t j = 0; j < context; ++j) EXPECT_EQ(get(scores, h * context + j), j < 20 ? get(usual, h * 32 + j) : kNone);
  }
  EXPECT_TRUE(scene.memory.guards_intact());
}

TEST(AttentionValues, ScoresSoftmaxAndValuesAreTheSingleCall) {
  for (KvDomain domain : {KvDomain::original, KvDomain::rotated}) {
    Scene scene({.recipe = "4v3", .lengths = {37, 5}, .queries = {3, 1}, .v_mean = domain == KvDomain::original});
    CompressedAttentionArgs args = scene.args();
    const std::vector<double> want = scene.run(args);
    const Tensor weights = scene.make_scores(), o = scene.make_o();
    attention_scores(kReference, {args.queries, args.cache, args.mask, weights});
    softmax(weights);
    attention_values(kReference, {weights, args.queries.sequences, args.cache, std::nullopt, domain, o});
    if (domain == KvDomain::rotated) kv_rotate(kReference, {o, o, args.cache.v.format, true});
    expect_close(values(o), want);
    EXPECT_TRUE(scene.memory.guards_intact());
  }
}

TEST(AttentionValues, RotatedOutputLeavesTheMeanOut) {
  SceneOptions options{.queries = {2}};
  Scene without(options);
  const Tensor weights = without.make_scores(), plain = without.make_o();
  cases::fill(weights, 0.25);
  attention_values(kReference, {weights, without.queries.sequences, without.cache, {}, KvDomain::rotated, plain});
  KvCache cache = without.cache;  // the same codes, read with a mean
  cache.v.format.mean = without.memory.make(DType::f32, {2, 64});
  cases::fill(cache.v.format.mean, 3);
  const Tensor o = without.make_o(), original = without.make_o();
  attention_values(kReference, {weights, without.queries.sequences, cache, {}, KvDomain::rotated, o});
  EXPECT_TRUE(cases::same_bits(o, plain));
  attention_values(kReference, {weights, without.queries.sequences, cache, {}, KvDomain::original, original});
  kv_rotate(kReference, {plain, o, cache.v.format, true});
  for (int64_t i = 0; i < 2 * 4 * 64; ++i) EXPECT_NEAR(get(original, i), get(o, i) + 3 * 0.25 * 37, 1e-4);  // of about 28
}

TEST(AttentionValues, ThresholdDropsWithoutRenormalising) {
  Scene scene({.Hq = 2, .Hk = 2, .lengths = {4}, .v_mean = true});
  const Tensor weights = scene.make_scores(), kept = scene.make_scores(), o = scene.make_o(), want = scene.make_o();
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t j = 0; j < 4; ++j) {  // 0.1, 0.2, 0.3, 0.4; columns beyond the live tokens stay NaN
      cases::set(weights, h * 64 + j, 0.1 * static_cast<double>(j + 1));
      cases::set(kept, h * 64 + j, j >= 2 ? 0.1 * static_cast<double>(j + 1) : 0);
    }
  attention_values(kReference, {weights, scene.queries.sequences, scene.cache, 0.3f, KvDomain::original, o});
  attention_values(kReference, {kept, scene.queries.sequences, scene.cache, std::nullopt, KvDomain::original, want});
  EXPECT_TRUE(cases::same_bits(o, want));
  attention_values(kReference, {weights, scene.queries.sequences, scene.cache, 0.0f, KvDomain::original, o});
  attention_values(kReference, {weights, scene.queries.sequences, scene.cache, std::nullopt, KvDomain::original, want});
  EXPECT_TRUE(cases::same_bits(o, want));
  for (double value : values(o)) EXPECT_TRUE(std::isfinite(value));
}

TEST(AttentionValues, WeightsMayHaveFewerColumnsThanTokens) {
  Scene scene({.lengths = {20}, .v_mean = true});
  const Tensor narrow = scene.memory.make(DType::f32, {1, 4, 7}), wide = scene.make_scores();
  cases::fill(narrow, 0.5);
  for (int64_t h = 0; h < 4; ++h)
    for (int64_t j = 0; j < 64; ++j) cases::set(wide, h * 64 + j, j < 7 ? 0.5 : 0);
  const Tensor o = scene.make_o(), want = scene.make_o();
  attention_values(kReference, {narrow, scene.queries.sequences, scene.cache, {}, KvDomain::original, o});
  attention_values(kReference, {wide, scene.queries.sequences, scene.cache, {}, KvDomain::original, want});
  EXPECT_TRUE(cases::same_bits(o, want));
}

TEST(AttentionValues, TokensOnMissingPagesAreNotThere) {
  Scene scene({.lengths = {37}, .kind = CacheKind::paged, .capacity = 48, .v_mean = true});
  const Tensor weights = scene.make_scores(), o = scene.make_o(), want = scene.make_o();
  for (int64_t i = 0; i < 4 * 48; ++i) cases::set(weights, i, i % 48 < 16 ? 0 : 0.1);
  attention_values(kReference, {weights, scene.queries.sequences, scene.cache, {}, KvDomain::original, want});
  cases::fill(weights, 0.1);
  cases::set(scene.cache.page_table, 0, -1);
  attention_values(kReference, {weights, scene.queries.sequences, scene.cache, {}, KvDomain::original, o});
  EXPECT_TRUE(cases::same_bits(o, want));
}

TEST(AttentionValues, InertSequencesAndNoTokens) {
  Scene scene({.lengths = {0, 20}, .queries = {1, 1}});
  const Tensor weights = scene.make_scores(), o = scene.make_o();
  cases::fill(weights, 1);
  cases::fill(o, 99);
  Sequences sequences = scene.queries.sequences;
  sequences.cu_seqlens = scene.memory.indices({0, 1, 7});
  attention_values(kReference, {weights, sequences, scene.cache, {}, KvDomain::original, o});
  for (int64_t i = 0; i < 2 * 4 * 64; ++i) EXPECT_EQ(get(o, i), i < 4 * 64 ? 0 : 99);
}

}  // namespace
}  // namespace weft
