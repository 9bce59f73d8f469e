// gated_delta_rule_summarize, _compose and _apply on the reference: token ranges as affine maps of states.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/delta.h"

namespace weft::tests {
namespace {

using cases::get;

struct Map {
  Tensor p, q;
};

Map make_map(cases::Memory& memory, int64_t N, const DeltaOptions& o) {
  return {memory.make(DType::f32, {N, o.Hv, o.K, o.K}), memory.make(DType::f32, {N, o.Hv, o.V, o.K})};
}

// The map of tokens [begin, end) of every sequence's packed rows, or of whole sequences.
GatedDeltaRuleSummarizeArgs summarize_args(const DeltaProblem& p, const Map& map) {
  GatedDeltaRuleSummarizeArgs args;
  args.k = p.k;
  args.v = p.v;
  args.gates.g = p.g;
  args.gates.beta = p.beta;
  args.head_map = p.options.head_map;
  args.sequences = p.sequences;
  args.p = map.p;
  args.q = map.q;
  return args;
}

Map summarize_rows(DeltaProblem& p, int64_t begin, int64_t end) {
  const Map map = make_map(p.memory, 1, p.options);
  GatedDeltaRuleSummarizeArgs args = summarize_args(p, map);
  for (Tensor* t : {&args.k, &args.v, &args.gates.g, &args.gates.beta}) *t = rows_of(*t, begin, end);
  args.sequences = Sequences::uniform(1);
  gated_delta_rule_summarize(kReference, args);
  return map;
}

Map compose(DeltaProblem& p, const Map& earlier, const Map& later) {
  const Map map = make_map(p.memory, earlier.p.size(0), p.options);
  gated_delta_rule_compose(kReference, {earlier.p, earlier.q, later.p, later.q, map.p, map.q});
  return map;
}

void expect_close(const Map& got, const Map& want, double bound) {
  EXPECT_LE(cases::relative_rms(got.p, want.p), bound);
  EXPECT_LE(cases::relative_rms(got.q, want.q), bound);
}

TEST(Summarize, OneTokenClosedForm) {
  DeltaProblem p({.lengths = {1}, .K = 5, .V = 3});
  const Map map = summarize_rows(p, 0, 1);
  const double decay = std::exp(get(p.g, 0)), strength = get(p.beta, 0);
  for (int64_t c = 0; c < 5; ++c) {
    for (int64_t r = 0; r < 5; ++r)
      EXPECT_NEAR(get(map.p, r * 5 + c), decay * ((r == c ? 1 : 0) - strength * get(p.k, r) * get(p.k, c)), 2e-7);
    for (int64_t r = 0; r < 3; ++r) EXPECT_NEAR(get(map.q, r * 5 + c), strength * get(p.v, r) * get(p.k, c), 2e-7);
  }
}

TEST(Summarize, NoTokensAreTheIdentity) {
  DeltaProblem p({.lengths = {0, 0}, .Hv = 2});
  const Map map = make_map(p.memory, 2, p.options);
  gated_delta_rule_summarize(kReference, summarize_args(p, map));
  for (int64_t i = 0; i < map.p.elements(); ++i) EXPECT_EQ(get(map.p, i), i % 256 / 16 == i % 16 ? 1 : 0);
  for (double x : cases::values(map.q)) EXPECT_EQ(x, 0);
}

// The state that summarize and apply give, against prefill. The map and the state are rounded to f32. The sum over K of rounded
// entries of P adds a factor of at most sqrt(K).
void expect_prefill_state(const DeltaOptions& options, bool l2_norm = false) {
  DeltaProblem p(options);
  GatedDeltaRulePrefillArgs prefill = p.prefill();
  prefill.l2_norm = l2_norm;
  gated_delta_rule_prefill(kReference, prefill);
  const Map map = make_map(p.memory, p.sequences.count, options);
  GatedDeltaRuleSummarizeArgs args = summarize_args(p, map);
  args.l2_norm = l2_norm;
  gated_delta_rule_summarize(kReference, args);
  const Tensor want = make_pool(p.memory, DType::f32, p.sequences.count, options.Hv, options.V, options.K, options.layout);
  cases::copy(p.out, want);
  cases::fill(p.out, NAN);
  GatedDeltaRuleApplyArgs apply;
  apply.p = map.p;
  apply.q = map.q;
  apply.states = prefill.states;
  gated_delta_rule_apply(kReference, apply);
  EXPECT_LE(cases::relative_rms(p.out, want), kFourRoundings * (1 + std::sqrt(static_cast<double>(options.K))));
  EXPECT_TRUE(p.memory.guards_intact());
}

TEST(Summarize, AppliedIsThePrefillState) {
  for (int64_t T : {1, 2, 16, 63, 64, 65, 200}) {
    SCOPED_TRACE("T=" + std::to_string(T));
    expect_prefill_state({.lengths = {T}, .Hv = 2, .g_low = -0.1});
  }
  expect_prefill_state({.lengths = {0, 1, 64, 7, 129}, .Hk = 2, .Hv = 4, .K = 12, .V = 20, .g_low = -0.1, .spare_rows = 2});
}

TEST(Summarize, AppliedIsThePrefillStateUnderEveryOption) {
  expect_prefill_state({.lengths = {30, 5}, .Hk = 2, .Hv = 6, .head_map = HeadMap::tiled, .layout = StateLayout::kv}, true);
  expect_prefill_state({.lengths = {70}, .Hk = 2, .Hv = 2, .per_channel = true, .g_low = -3});
  expect_prefill_state({.lengths = {70}, .Hv = 2, .g_low = -0.01, .beta_high = 2, .keys = Keys::positive});
  expect_prefill_state({.lengths = {70}, .Hv = 2, .g_low = -69, .g_high = -20, .keys = Keys::same});
}

TEST(Summarize, IllegalSequencesAreInert) {
  DeltaProblem p({.lengths = {4, 4}});
  const Map map = make_map(p.memory, 3, p.options);
  GatedDeltaRuleSummarizeArgs args = summarize_args(p, map);
  args.sequences = Sequences::packed(p.memory.indices({0, 9, 4, 8}), 3, 4);  // only the last is legal
  gated_delta_rule_summarize(kReference, args);
  for (const Tensor& t : {map.p, map.q}) {
    EXPECT_TRUE(all_nan(rows_of(t, 0, 2)));
    EXPECT_FALSE(std::isnan(cases::values(rows_of(t, 2, 3))[0]));
  }
}

TEST(Compose, SplitRangesAreOneRange) {
  const int64_t T = 100;
  for (bool per_channel : {false, true}) {
    DeltaProblem p({.lengths = {T}, .Hk = 1, .Hv = 2, .per_channel = per_channel, .g_low = -0.05});
    const Map whole = summarize_rows(p, 0, T);
    for (int64_t a : {0, 1, 33, 64, 99, 100}) {
      SCOPED_TRACE("split at " + std::to_string(a));
      expect_close(compose(p, summarize_rows(p, 0, a), summarize_rows(p, a, T)), whole, kFourRoundings * (1 + std::sqrt(16.0)));
    }
  }
}

TEST(Compose, IsAssociativeAndOrdered) {
  DeltaProblem p({.lengths = {90}, .Hv = 2, .g_low = -0.05});
  const Map a = summarize_rows(p, 0, 30), b = summarize_rows(p, 30, 60), c = summarize_rows(p, 60, 90);
  expect_close(compose(p, compose(p, a, b), c), compose(p, a, compose(p, b, c)), kFourRoundings * (1 + std::sqrt(16.0)));
  EXPECT_GT(cases::relative_rms(compose(p, b, a).q, compose(p, a, b).q), 1e-2);  // earlier and later are not exchangeable
}

// Small integers: products and sums are exact, so composition is too.
TEST(Compose, ClosedForm) {
  DeltaOptions options{.lengths = {1}, .K = 2, .V = 1};
  DeltaProblem p(options);
  const Map a = make_map(p.memory, 1, options), b = make_map(p.memory, 1, options);
  const double pa[] = {1, 2, 3, 4}, pb[] = {5, 6, 7, 8}, want_p[] = {19, 22, 43, 50};
  for (int64_t i = 0; i < 4; ++i) {
    cases::set(a.p, i, pa[i]);
    cases::set(b.p, i, pb[i]);
  }
  cases::set(a.q, 0, 1);
  cases::set(a.q, 1, -1);
  cases::set(b.q, 0, 10);
  cases::set(b.q, 1, 20);
  const Map got = compose(p, a, b);
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(get(got.p, i), want_p[i]);
  EXPECT_EQ(get(got.q, 0), 5 - 7 + 10);
  EXPECT_EQ(get(got.q, 1), 6 - 8 + 20);
}

TEST(Apply, SlotsInPlaceZerosAndLayouts) {
  for (StateLayout layout : {StateLayout::vk, StateLayout::kv}) {
    DeltaProblem p({.lengths = {9, 9, 9}, .Hv = 2, .layout = layout});
    gated_delta_rule_prefill(kReference, p.prefill());
    const Map map = make_map(p.memory, 3, p.options);
    gated_delta_rule_summarize(kReference, summarize_args(p, map));
    const Tensor pool = make_pool(p.memory, DType::f32, 4, 2, 8, 16, layout);
    cases::copy(rows_of(p.in, 0, 1), rows_of(pool, 2, 3));
    GatedDeltaRuleApplyArgs args;
    args.p = map.p;
    args.q = map.q;
    args.states.in = args.states.out = pool;
    args.states.in_slots = p.memory.indices({2, -1, 0});
    args.states.has_initial = p.memory.indices({1, 1, 0});
    args.states.layout = layout;
    gated_delta_rule_apply(kReference, args);
    EXPECT_LE(cases::relative_rms(rows_of(pool, 2, 3), rows_of(p.out, 0, 1)), kFourRoundings * 5);
    EXPECT_TRUE(all_nan(rows_of(pool, 1, 2)));
    EXPECT_TRUE(all_nan(rows_of(pool, 3, 4)));
    for (int64_t h = 0; h < 2; ++h)  // sequence 2 started from zeros: its state is q
      for (int64_t r = 0; r < 8; ++r)
        for (int64_t c = 0; c < 16; ++c) EXPECT_EQ(state_at(pool, layout, 0, h, r, c), get(map.q, ((2 * 2 + h) * 8 + r) * 16 + c));
  }
}

TEST(Apply, PaddedMapsAndSixteenBitStates) {
  DeltaProblem p({.lengths = {5, 5}, .Hv = 2, .state_dtype = DType::bf16});
  const Map map = make_map(p.memory, 2, p.options);
  Map padded{p.memory.make(DType::f32, {2, 3, 16, 16}), p.memory.make(DType::f32, {2, 5, 8, 16})};
  padded.p.sizes[1] = padded.q.sizes[1] = 2;  // maps of spare heads lie between those of two sequences
  gated_delta_rule_summarize(kReference, summarize_args(p, map));
  gated_delta_rule_summarize(kReference, summarize_args(p, padded));
  EXPECT_TRUE(cases::same_bits(padded.p, map.p));
  EXPECT_TRUE(cases::same_bits(padded.q, map.q));
  gated_delta_rule_prefill(kReference, p.prefill());
  GatedDeltaRuleApplyArgs args;
  args.p = padded.p;
  args.q = padded.q;
  args.states.in = p.in;
  args.states.out = p.memory.make(DType::bf16, {2, 2, 8, 16});
  gated_delta_rule_apply(kReference, args);
  EXPECT_LE(cases::relative_rms(args.states.out, p.out), 0x1p-8);  // a value beside a rounding boundary may fall on either side
}

// Context parallelism: token ranges are summarised separately; composed and applied maps give every range its initial state.
TEST(Affine, RangesInParallelAreTheWholePrefill) {
  const int64_t T = 256, part = 64;
  DeltaProblem p({.lengths = {T}, .Hk = 2, .Hv = 4, .g_low = -0.05});
  gated_delta_rule_prefill(kReference, p.prefill());
  const Tensor o = p.memory.make(DType::f32, {T, 4, 8}), entry = p.memory.make(DType::f32, {1, 4, 8, 16}),
               last = p.memory.make(DType::f32, {1, 4, 8, 16});
  Map before = summarize_rows(p, 0, 0);
  for (int64_t begin = 0; begin < T; begin += part) {
    GatedDeltaRuleApplyArgs apply;
    apply.p = before.p;
    apply.q = before.q;
    apply.states.in = p.in;
    apply.states.out = entry;
    gated_delta_rule_apply(kReference, apply);
    GatedDeltaRulePrefillArgs args = p.prefill();
    args.o = o;
    for (Tensor* t : {&args.q, &args.k, &args.v, &args.gates.g, &args.gates.beta, &args.o}) *t = rows_of(*t, begin, begin + part);
    args.sequences = Sequences::uniform(1);
    args.states.in = entry;
    args.states.out = last;
    gated_delta_rule_prefill(kReference, args);
    before = compose(p, before, summarize_rows(p, begin, begin + part));
  }
  EXPECT_LE(cases::relative_rms(o, p.o), kFourRoundings * (1 + std::sqrt(16.0)));
  EXPECT_LE(cases::relative_rms(last, p.out), kFourRoundings * (1 + std::sqrt(16.0)));
}

}  // namespace
}  // namespace weft::tests
