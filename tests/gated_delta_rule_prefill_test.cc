// gated_delta_rule_prefill on the reference: closed forms, and the recurrence over lengths, heads, sizes, gates and keys.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/delta.h"

namespace weft::tests {
namespace {

using cases::get;

// All sequences of a problem against the independent recurrence, from their initial states.
void expect_prefill(const DeltaOptions& options, double bound = kFourRoundings) {
  DeltaProblem p(options);
  gated_delta_rule_prefill(kReference, p.prefill());
  for (int64_t n = 0; n < p.sequences.count; ++n) p.expect_recurrence(n, p.out, n, false, bound, bound);
  EXPECT_TRUE(p.memory.guards_intact());
  EXPECT_TRUE(all_nan(rows_of(p.o, p.tokens, p.o.size(0))));
}

TEST(PrefillClosedForm, OneHotKeysStoreTheirValues) {
  DeltaProblem p({.lengths = {6}, .K = 6, .V = 3, .g_low = 0, .g_high = 0, .beta_low = 1, .beta_high = 1, .keys = Keys::one_hot});
  GatedDeltaRulePrefillArgs args = p.prefill();
  args.states.in = Tensor{};
  args.scale = 1.0f;
  gated_delta_rule_prefill(kReference, args);
  for (int64_t r = 0; r < 3; ++r)
    for (int64_t t = 0; t < 6; ++t) {
      EXPECT_EQ(state_at(p.out, StateLayout::vk, 0, 0, r, t), get(p.v, t * 3 + r));
      double sum = 0;  // o_t reads the columns written so far, its own included
      for (int64_t c = 0; c <= t; ++c) sum += get(p.q, t * 6 + c) * get(p.v, c * 3 + r);
      EXPECT_EQ(get(p.o, t * 3 + r), static_cast<float>(sum));
    }
}

TEST(PrefillClosedForm, NoOpTokensLeaveTheStateAlone) {
  DeltaProblem p({.lengths = {70}, .Hv = 2, .g_low = 0, .beta_high = 0});
  gated_delta_rule_prefill(kReference, p.prefill());
  EXPECT_TRUE(cases::same_bits(p.out, p.in));
  for (int64_t t = 0; t < 70; ++t)
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t r = 0; r < 8; ++r) {
        double sum = 0;
        for (int64_t c = 0; c < 16; ++c) sum += state_at(p.in, StateLayout::vk, 0, h, r, c) * get(p.q, t * 16 + c) / 4;
        EXPECT_NEAR(get(p.o, (t * 2 + h) * 8 + r), sum, kUnit * std::abs(sum) + 1e-15);
      }
}

TEST(PrefillClosedForm, ZeroValuesOnlyDecayAndErase) {
  DeltaProblem p({.lengths = {37}, .K = 5, .V = 4, .g_low = -0.2, .keys = Keys::one_hot});
  cases::fill(p.v, 0);
  gated_delta_rule_prefill(kReference, p.prefill());
  for (int64_t c = 0; c < 5; ++c) {
    double kept = 1, bound = kUnit;  // an erasure rounds the part beta that it removes, relative to the part 1 - beta that stays
    for (int64_t t = 0; t < 37; ++t) {
      kept *= std::exp(get(p.g, t)) * (t % 5 == c ? 1 - get(p.beta, t) : 1);
      if (t % 5 == c) bound += kUnit * get(p.beta, t) / (1 - get(p.beta, t));
    }
    for (int64_t r = 0; r < 4; ++r) {
      const double want = kept * state_at(p.in, StateLayout::vk, 0, 0, r, c);
      EXPECT_NEAR(state_at(p.out, StateLayout::vk, 0, 0, r, c), want, bound * std::abs(want));
    }
  }
}

// With beta = 1 and |k| = 1, S_t k_t = v_t for any decay, so a query equal to the key reads scale * v.
TEST(PrefillClosedForm, FullStrengthReadsBackTheValue) {
  for (double g_low : {0.0, -1.0, -69.0}) {
    DeltaProblem p({.lengths = {130}, .Hk = 2, .Hv = 4, .K = 32, .V = 16, .g_low = g_low, .beta_low = 1, .beta_high = 1});
    GatedDeltaRulePrefillArgs args = p.prefill();
    args.q = p.k;
    args.scale = 0.5f;
    gated_delta_rule_prefill(kReference, args);
    Tensor half = p.memory.make(DType::f32, {130, 4, 16});
    fill_rows(half, 130, [&](int64_t t, int64_t h, int64_t c) { return 0.5 * get(p.v, (t * 4 + h) * 16 + c); });
    EXPECT_LE(cases::relative_rms(p.o, half), 2e-7) << "g from " << g_low;
  }
}

TEST(PrefillClosedForm, EmptyCallsAreLegal) {
  DeltaProblem none({.lengths = {}});
  gated_delta_rule_prefill(kReference, none.prefill());
  DeltaProblem empty({.lengths = {0, 0}});
  gated_delta_rule_prefill(kReference, empty.prefill());
  EXPECT_TRUE(cases::same_bits(empty.out, empty.in));  // without tokens the state is copied
  GatedDeltaRulePrefillArgs uniform = empty.prefill();
  uniform.sequences = Sequences::uniform(2);
  uniform.states.has_initial = empty.memory.indices({1, 0});
  gated_delta_rule_prefill(kReference, uniform);
  EXPECT_TRUE(cases::same_bits(rows_of(empty.out, 0, 1), rows_of(empty.in, 0, 1)));
  for (double x : cases::values(rows_of(empty.out, 1, 2))) EXPECT_EQ(x, 0);
}

TEST(PrefillLengths, OneSequence) {
  for (int64_t T : {1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 1000}) {
    SCOPED_TRACE("T=" + std::to_string(T));
    expect_prefill({.lengths = {T}, .Hv = 2, .spare_rows = 3, .seed = static_cast<uint64_t>(T)});
  }
}

TEST(PrefillLengths, LongSequences) {
  expect_prefill({.lengths = {4096}, .K = 8, .V = 6, .g_low = -0.02});
  expect_prefill({.lengths = {4123}, .K = 8, .V = 6, .g_low = -0.02});
}

TEST(PrefillLengths, PackedSequences) {
  expect_prefill({.lengths = {0, 1, 63, 64, 65, 129, 0, 2, 0}, .Hk = 2, .Hv = 4, .spare_rows = 5});
  expect_prefill({.lengths = {1, 2, 3}, .Hv = 3, .K = 7, .V = 5, .spare_rows = 64});
}

TEST(PrefillLengths, ManyShortSequences) {
  expect_prefill({.lengths = std::vector<int64_t>(2050, 16), .Hk = 1, .Hv = 2, .K = 4, .V = 3});
}

TEST(PrefillLengths, UniformSequencesAreTheSamePackedOnes) {
  DeltaProblem p({.lengths = {33, 33, 33}, .Hv = 2});
  gated_delta_rule_prefill(kReference, p.prefill());
  const Tensor o = p.memory.make(DType::f32, {99, 2, 8}), out = p.memory.make(DType::f32, {3, 2, 8, 16});
  GatedDeltaRulePrefillArgs args = p.prefill();
  args.sequences = Sequences::uniform(3);
  args.o = o;
  args.states.out = out;
  gated_delta_rule_prefill(kReference, args);
  EXPECT_TRUE(cases::same_bits(o, p.o));
  EXPECT_TRUE(cases::same_bits(out, p.out));
}

TEST(PrefillHeads, EveryRatioAndBothMaps) {
  for (int64_t ratio : {1, 2, 3, 4, 8})
    for (HeadMap map : {HeadMap::grouped, HeadMap::tiled}) {
      SCOPED_TRACE("ratio " + std::to_string(ratio) + (map == HeadMap::tiled ? " tiled" : " grouped"));
      expect_prefill({.lengths = {20, 13}, .Hk = 3, .Hv = 3 * ratio, .K = 12, .V = 10, .head_map = map});
    }
}

// With more than one key head and a ratio above one, the two maps must not agree.
TEST(PrefillHeads, MapsDiffer) {
  DeltaProblem p({.lengths = {9}, .Hk = 2, .Hv = 4});
  gated_delta_rule_prefill(kReference, p.prefill());
  const std::vector<double> grouped = cases::values(p.o);
  GatedDeltaRulePrefillArgs args = p.prefill();
  args.head_map = HeadMap::tiled;
  gated_delta_rule_prefill(kReference, args);
  const std::vector<double> tiled = cases::values(p.o);
  double middle = 0, ends = 0;  // heads 0 and 3 read key heads 0 and 1 under either map
  for (size_t i = 0; i < tiled.size(); ++i) {
    const size_t head = i / 8 % 4;
    (head == 1 || head == 2 ? middle : ends) += std::abs(tiled[i] - grouped[i]);
  }
  EXPECT_EQ(ends, 0);
  EXPECT_GT(middle, 1);
}

TEST(PrefillSizes, KAndVDiffer) {
  const std::pair<int64_t, int64_t> sizes[] = {{32, 60},   {60, 32},  {64, 100}, {100, 64}, {128, 192}, {192, 128},
                                               {256, 128}, {64, 256}, {1, 1},    {1, 256},  {256, 1},   {13, 7}};
  for (const auto& [K, V] : sizes) {
    SCOPED_TRACE("K=" + std::to_string(K) + " V=" + std::to_string(V));
    expect_prefill({.lengths = {19}, .Hv = 2, .K = K, .V = V});
  }
}

TEST(PrefillGates, Ranges) {
  const std::pair<double, double> ranges[] = {{0, 0}, {-0.05, 0}, {-20, -1e-4}, {-69, -69}, {-1e-4, 0}};
  for (const auto& [low, high] : ranges) {
    SCOPED_TRACE("g in [" + std::to_string(low) + ", " + std::to_string(high) + "]");
    expect_prefill({.lengths = {150}, .Hv = 2, .g_low = low, .g_high = high});
    expect_prefill({.lengths = {150}, .Hv = 2, .per_channel = true, .g_low = low, .g_high = high});
  }
}

TEST(PrefillGates, MixedInOneChunk) {
  DeltaProblem p({.lengths = {200}, .Hv = 2});
  fill_rows(p.g, 200, [&](int64_t t, int64_t, int64_t) { return t % 7 == 3 ? -30 : 0; });
  gated_delta_rule_prefill(kReference, p.prefill());
  p.expect_recurrence(0, p.out, 0, false, kFourRoundings, kFourRoundings);
}

// A = 16 beside A = 0: one head forgets at once, its neighbour does not decay.
TEST(PrefillGates, FastHeadBesideSlowHead) {
  DeltaProblem p({.lengths = {200}, .Hv = 2});
  fill_rows(p.g, 200, [&](int64_t, int64_t h, int64_t) { return h == 0 ? -16 * std::log1p(std::exp(p.rng.normal())) : 0; });
  gated_delta_rule_prefill(kReference, p.prefill());
  p.expect_recurrence(0, p.out, 0, false, kFourRoundings, kFourRoundings);
}

TEST(PrefillGates, FullDecayForgetsAnything) {
  DeltaProblem p({.lengths = {3}, .keys = Keys::same});
  fill_rows(p.g, 3, [](int64_t t, int64_t, int64_t) { return t == 0 ? -1e4 : -0.1; });
  gated_delta_rule_prefill(kReference, p.prefill());
  p.expect_recurrence(0, p.out, 0, true, kFourRoundings, kFourRoundings);
}

TEST(PrefillKeys, EveryKindAndStrength) {
  const std::pair<double, double> strengths[] = {{1, 1}, {0.5, 0.5}, {0, 2}, {2, 2}};
  for (Keys keys : {Keys::gaussian, Keys::positive, Keys::same, Keys::alternating})
    for (const auto& [low, high] : strengths)
      for (double g_low : {0.0, -0.05}) {
        SCOPED_TRACE("keys " + std::to_string(static_cast<int>(keys)) + " beta to " + std::to_string(high));
        // With beta = 2 (a reflection) and no decay, errors of the corrections do not fade. They add up at most linearly over the
        // 129 tokens, and in practice as their square root.
        const double bound = high > 1 && g_low == 0 ? kFourRoundings * std::sqrt(129.0) : kFourRoundings;
        expect_prefill({.lengths = {129}, .K = 24, .V = 12, .g_low = g_low, .beta_low = low, .beta_high = high, .keys = keys},
                       bound);
      }
}

// Identical keys, beta = 1, no decay: the state holds the last value along the key and the rest of S0 is untouched.
TEST(PrefillKeys, IdenticalKeysKeepTheLastValue) {
  DeltaProblem p({.lengths = {100}, .K = 8, .V = 4, .g_low = 0, .beta_low = 1, .beta_high = 1, .keys = Keys::same});
  gated_delta_rule_prefill(kReference, p.prefill());
  for (int64_t r = 0; r < 4; ++r) {
    double along = 0;
    for (int64_t c = 0; c < 8; ++c) along += state_at(p.in, StateLayout::vk, 0, 0, r, c) * get(p.k, c);
    for (int64_t c = 0; c < 8; ++c) {
      const double want = state_at(p.in, StateLayout::vk, 0, 0, r, c) + (get(p.v, 99 * 4 + r) - along) * get(p.k, c);
      EXPECT_NEAR(state_at(p.out, StateLayout::vk, 0, 0, r, c), want, 1e-6);
    }
  }
}

}  // namespace
}  // namespace weft::tests
