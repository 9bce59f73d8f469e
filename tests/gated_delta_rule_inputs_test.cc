// gated_delta_rule_prefill on the reference: forms of gates, per-channel decay, normalisation, dtypes, views and checkpoints.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/delta.h"
#include "weft/delta_preprocess.h"

namespace weft::tests {
namespace {

using cases::get;
using cases::set;

struct Outputs {
  Tensor o, out;
};

// Runs `args` of a problem into new outputs.
Outputs run(DeltaProblem& p, GatedDeltaRulePrefillArgs args) {
  args.o = p.memory.make(DType::f32, {p.o.size(0), p.o.size(1), p.o.size(2)});
  args.states.out = p.memory.make(DType::f32, {p.out.size(0), p.out.size(1), p.out.size(2), p.out.size(3)});
  gated_delta_rule_prefill(kReference, args);
  return {args.o, args.states.out};
}

TEST(PrefillGateForms, LinearDecayIsItsLogarithm) {
  for (bool per_channel : {false, true}) {
    DeltaProblem p({.lengths = {90}, .Hv = 2, .per_channel = per_channel, .g_low = -3});
    const Tensor alpha = per_channel ? p.memory.make(DType::f32, {90, 2, 16}) : p.memory.make(DType::f32, {90, 2});
    fill_rows(alpha, 90,
              [&](int64_t t, int64_t h, int64_t c) { return std::exp(get(p.g, t * p.g.strides[0] + h * p.g.strides[1] + c)); });
    // alpha is rounded to f32, so the recurrence must use the decay log(alpha) of the rounded value.
    fill_rows(p.g, 90, [&](int64_t t, int64_t h, int64_t c) {
      return std::log(get(alpha, t * alpha.strides[0] + h * alpha.strides[1] + c));
    });
    const Outputs want = run(p, p.prefill());
    GatedDeltaRulePrefillArgs args = p.prefill();
    args.gates.g = Tensor{};
    args.gates.alpha = alpha;
    const Outputs got = run(p, args);
    EXPECT_TRUE(cases::same_bits(got.o, want.o));
    EXPECT_TRUE(cases::same_bits(got.out, want.out));
  }
}

TEST(PrefillGateForms, AlphaZeroForgetsAndAlphaOneKeeps) {
  DeltaProblem p({.lengths = {5}, .g_low = 0});
  const Tensor alpha = p.memory.make(DType::f32, {5, 1});
  fill_rows(alpha, 5, [](int64_t t, int64_t, int64_t) { return t == 0 ? 0 : 1; });
  GatedDeltaRulePrefillArgs args = p.prefill();
  args.gates.g = Tensor{};
  args.gates.alpha = alpha;
  gated_delta_rule_prefill(kReference, args);
  p.expect_recurrence(0, p.out, 0, true, kFourRoundings, kFourRoundings);  // g = 0 from zeros
}

TEST(PrefillGateForms, RawGatesAreThoseOfDeltaGates) {
  for (bool per_channel : {false, true})
    for (bool doubled : {false, true}) {
      DeltaProblem p({.lengths = {70}, .Hk = 1, .Hv = 3, .per_channel = per_channel});
      DeltaGatesArgs gates;
      gates.a = per_channel ? p.memory.make(DType::bf16, {70, 3, 16}) : p.memory.make(DType::bf16, {70, 3});
      gates.b = p.memory.make(DType::f16, {70, 3});
      gates.a_log = p.memory.make(DType::f32, {3});
      gates.dt_bias = per_channel ? p.memory.make(DType::f32, {3, 16}) : p.memory.make(DType::f32, {3});
      gates.g = p.g;
      gates.beta = p.beta;
      gates.double_beta = doubled;
      cases::fill_normal(gates.a, p.rng, 2, -3);
      cases::fill_normal(gates.b, p.rng, 2);
      cases::fill_uniform(gates.a_log, p.rng, -2, 2);
      cases::fill_normal(gates.dt_bias, p.rng);
      delta_gates(kReference, gates);
      const Outputs want = run(p, p.prefill());
      GatedDeltaRulePrefillArgs args = p.prefill();
      args.gates = {};
      args.gates.a = gates.a;
      args.gates.a_log = gates.a_log;
      args.gates.dt_bias = gates.dt_bias;
      args.gates.b = gates.b;
      args.gates.double_beta = doubled;
      const Outputs got = run(p, args);
      // delta_gates rounds beta to f32, the raw form does not: one more rounding.
      EXPECT_LE(cases::relative_rms(got.o, want.o), 5 * kUnit);
      EXPECT_LE(cases::relative_rms(got.out, want.out), 5 * kUnit);
      args.gates.b = Tensor{};
      args.gates.double_beta = false;
      args.gates.beta = p.beta;  // with a raw decay but a given beta, all bits are equal
      EXPECT_TRUE(cases::same_bits(run(p, args).o, want.o));
    }
}

TEST(PrefillChannels, EqualChannelsAreTheScalarDecay) {
  DeltaProblem p({.lengths = {100, 3}, .Hk = 2, .Hv = 4, .g_low = -5});
  const Outputs want = run(p, p.prefill());
  const Tensor g = p.memory.make(DType::f32, {103, 4, 16});
  fill_rows(g, 103, [&](int64_t t, int64_t h, int64_t) { return get(p.g, t * 4 + h); });
  GatedDeltaRulePrefillArgs args = p.prefill();
  args.gates.g = g;
  const Outputs got = run(p, args);
  EXPECT_TRUE(cases::same_bits(got.o, want.o));
  EXPECT_TRUE(cases::same_bits(got.out, want.out));
}

TEST(PrefillChannels, EachChannelDecaysByItself) {
  for (int64_t T : {1, 64, 129}) {
    DeltaProblem p({.lengths = {T, 5}, .Hk = 2, .Hv = 4, .K = 20, .V = 9, .per_channel = true, .g_low = -8});
    gated_delta_rule_prefill(kReference, p.prefill());
    for (int64_t n : {0, 1}) p.expect_recurrence(n, p.out, n, false, kFourRoundings, kFourRoundings);
  }
}

TEST(PrefillNorm, NormalisesKeysAndQueriesBeforeScale) {
  DeltaProblem p({.lengths = {40}, .Hk = 2, .Hv = 2});
  fill_rows(p.k, 40, [&](int64_t, int64_t, int64_t) { return 3 * p.rng.normal(); });
  fill_rows(p.q, 40, [&](int64_t, int64_t, int64_t) { return 0.2 * p.rng.normal(); });
  GatedDeltaRulePrefillArgs args = p.prefill();
  args.l2_norm = true;
  const Outputs got = run(p, args);
  l2_norm(kReference, {p.q, p.q, 1e-6f});
  l2_norm(kReference, {p.k, p.k, 1e-6f});
  const Outputs want = run(p, p.prefill());
  EXPECT_LE(cases::relative_rms(got.o, want.o), 5 * kUnit);  // the op does not round the normalised query
  EXPECT_TRUE(cases::same_bits(got.out, want.out));          // but it rounds the normalised key
}

// For a key of length 1e-3, |k|^2 equals eps = 1e-6: k^ = k / sqrt(2e-6). With eps outside the root, or as a maximum, |k^| would be
// 1.
TEST(PrefillNorm, EpsilonIsInsideTheRoot) {
  DeltaProblem p({.lengths = {1}, .K = 4, .V = 1, .g_low = 0, .beta_low = 1, .beta_high = 1});
  cases::fill(p.k, 0);
  set(p.k, 2, 1e-3);
  cases::fill(p.v, 1);
  GatedDeltaRulePrefillArgs args = p.prefill();
  args.states.in = Tensor{};
  args.l2_norm = true;
  gated_delta_rule_prefill(kReference, args);
  EXPECT_NEAR(get(p.out, 2), std::sqrt(0.5), 1e-6);
  cases::fill(p.k, 0);  // a zero key stays zero
  gated_delta_rule_prefill(kReference, args);
  for (double x : cases::values(p.out)) EXPECT_EQ(x, 0);
}

TEST(PrefillScale, DefaultIsInverseRootOfK) {
  DeltaProblem p({.lengths = {11}, .K = 64});
  const Outputs root = run(p, p.prefill());
  GatedDeltaRulePrefillArgs args = p.prefill();
  args.scale = 0.125f;
  EXPECT_TRUE(cases::same_bits(run(p, args).o, root.o));
  args.scale = 0.0f;  // a number like any other
  for (double x : cases::values(run(p, args).o)) EXPECT_EQ(x, 0);
}

TEST(PrefillTypes, SixteenBitStorageRoundsOnce) {
  for (DType dtype : {DType::bf16, DType::f16})
    for (StateLayout layout : {StateLayout::vk, StateLayout::kv}) {
      DeltaProblem p({.lengths = {70, 3}, .Hk = 2, .Hv = 4, .dtype = dtype, .state_dtype = dtype, .layout = layout});
      const Outputs exact = run(p, p.prefill());  // f32 outputs of the same 16-bit inputs
      const Tensor o = p.memory.make(dtype, {73, 4, 8}), want_o = p.memory.make(dtype, {73, 4, 8});
      const Tensor want = make_pool(p.memory, dtype, 2, 4, 8, 16, layout);
      GatedDeltaRulePrefillArgs args = p.prefill();
      args.o = o;
      gated_delta_rule_prefill(kReference, args);
      cases::copy(exact.o, want_o);  // rounds
      cases::copy(exact.out, want);
      EXPECT_TRUE(cases::same_bits(o, want_o));
      EXPECT_TRUE(cases::same_bits(p.out, want));
      for (int64_t n : {0, 1}) {  // f32 o and the 16-bit state against the recurrence on the same 16-bit inputs
        args.o = p.o;
        gated_delta_rule_prefill(kReference, args);
        p.expect_recurrence(n, p.out, n, false, kFourRoundings, dtype == DType::bf16 ? 0x1p-8 : 0x1p-10);
      }
    }
}

TEST(PrefillTypes, StateTypesOfInAndOutAreFree) {
  DeltaProblem p({.lengths = {20}, .state_dtype = DType::f16});
  const Tensor wide = p.memory.make(DType::f32, {1, 1, 8, 16}), o = p.memory.make(DType::f32, {20, 1, 8});
  cases::copy(p.in, wide);
  gated_delta_rule_prefill(kReference, p.prefill());
  GatedDeltaRulePrefillArgs args = p.prefill();
  args.states.in = wide;
  args.o = o;
  gated_delta_rule_prefill(kReference, args);
  EXPECT_TRUE(cases::same_bits(o, p.o));
}

// q, k and v as columns of one packed row, gates with row padding, o with padding of its own.
TEST(PrefillViews, StridedTensorsGiveTheSameBits) {
  DeltaProblem p({.lengths = {30, 40}, .Hk = 2, .Hv = 4});
  const Outputs want = run(p, p.prefill());
  const int64_t width = 2 * 2 * 16 + 4 * 8 + 5;
  const Tensor packed = p.memory.make(DType::f32, {70, width});
  const auto view = [&](int64_t column, const Tensor& like) {
    Tensor t = like;
    t.data = static_cast<float*>(packed.data) + column;
    t.strides = {width, like.size(2), 1};
    cases::copy(like, t);
    return t;
  };
  GatedDeltaRulePrefillArgs args = p.prefill();
  args.q = view(0, p.q);
  args.k = view(32, p.k);
  args.v = view(64, p.v);
  args.gates.g = p.memory.make_padded(DType::f32, {70, 4}, 3);
  args.gates.beta = p.memory.make_padded(DType::f32, {70, 4}, 1);
  cases::copy(p.g, args.gates.g);
  cases::copy(p.beta, args.gates.beta);
  args.o = p.memory.make_padded(DType::f32, {70, 4, 8}, 3);
  gated_delta_rule_prefill(kReference, args);
  EXPECT_TRUE(cases::same_bits(args.o, want.o));
  EXPECT_TRUE(cases::same_bits(p.out, want.out));
  EXPECT_TRUE(p.memory.guards_intact());
  for (int64_t t = 0; t < 70; ++t)
    for (int64_t pad = 0; t < 69 && pad < 3; ++pad)
      EXPECT_TRUE(std::isnan(get(args.o, t * args.o.strides[0] + args.o.strides[0] - 1 - pad)));
}

TEST(PrefillViews, BroadcastInputsAreLegal) {
  DeltaProblem p({.lengths = {12}, .Hk = 2, .Hv = 2});
  GatedDeltaRulePrefillArgs args = p.prefill();
  args.k.strides[1] = 0;  // both heads read the first one's keys
  gated_delta_rule_prefill(kReference, args);
  fill_rows(p.k, 12, [&](int64_t t, int64_t, int64_t c) { return get(p.k, t * 32 + c); });
  EXPECT_TRUE(cases::same_bits(run(p, p.prefill()).o, p.o));
}

TEST(PrefillCheckpoints, AreTheFinalStatesOfPrefixes) {
  for (StateLayout layout : {StateLayout::vk, StateLayout::kv})
    for (int64_t every : {64, 128}) {
      DeltaProblem p({.lengths = {0, 63, 64, 300, 129}, .Hk = 1, .Hv = 2, .layout = layout});
      GatedDeltaRulePrefillArgs args = p.prefill();
      args.checkpoint_every = every;
      args.checkpoints = layout == StateLayout::vk ? p.memory.make(DType::f32, {5, 300 / every + 1, 2, 8, 16})
                                                   : p.memory.make(DType::f32, {5, 300 / every + 1, 2, 16, 8});
      gated_delta_rule_prefill(kReference, args);
      for (int64_t n = 0; n < 5; ++n)
        for (int64_t j = 0; j < 300 / every + 1; ++j) {
          Tensor row = dense(static_cast<float*>(args.checkpoints.data) + (n * (300 / every + 1) + j) * 2 * 8 * 16, DType::f32,
                             {1, 2, args.checkpoints.size(3), args.checkpoints.size(4)});
          const int64_t begin = p.begins[static_cast<size_t>(n)], tokens = (j + 1) * every;
          if (tokens > p.options.lengths[static_cast<size_t>(n)]) {
            EXPECT_TRUE(all_nan(row)) << "sequence " << n << " has no checkpoint " << j;
            continue;
          }
          GatedDeltaRulePrefillArgs prefix = p.prefill();
          prefix.q = rows_of(p.q, begin, begin + tokens);
          prefix.k = rows_of(p.k, begin, begin + tokens);
          prefix.v = rows_of(p.v, begin, begin + tokens);
          prefix.gates.g = rows_of(p.g, begin, begin + tokens);
          prefix.gates.beta = rows_of(p.beta, begin, begin + tokens);
          prefix.o = p.memory.make(DType::f32, {tokens, 2, 8});
          prefix.sequences = Sequences::uniform(1);
          prefix.states.in = rows_of(p.in, n, n + 1);
          prefix.states.out = rows_of(p.out, n, n + 1);
          gated_delta_rule_prefill(kReference, prefix);
          EXPECT_TRUE(cases::same_bits(row, prefix.states.out)) << "sequence " << n << " checkpoint " << j;
        }
      EXPECT_TRUE(p.memory.guards_intact());
    }
}

TEST(PrefillDeterminism, SameBitsAgainAndInAnyBatch) {
  DeltaProblem p({.lengths = {33, 70, 1, 128}, .Hk = 2, .Hv = 4});
  const Outputs first = run(p, p.prefill()), again = run(p, p.prefill());
  EXPECT_TRUE(cases::same_bits(first.o, again.o));
  EXPECT_TRUE(cases::same_bits(first.out, again.out));
  for (int64_t n = 0; n < 4; ++n) {
    const int64_t begin = p.begins[static_cast<size_t>(n)], end = p.begins[static_cast<size_t>(n) + 1];
    GatedDeltaRulePrefillArgs alone = p.prefill();
    for (Tensor* t : {&alone.q, &alone.k, &alone.v, &alone.gates.g, &alone.gates.beta, &alone.o}) *t = rows_of(*t, begin, end);
    alone.sequences = Sequences::uniform(1);
    alone.states.in = rows_of(p.in, n, n + 1);
    alone.states.out = rows_of(p.out, n, n + 1);
    gated_delta_rule_prefill(kReference, alone);
    EXPECT_TRUE(cases::same_bits(alone.o, rows_of(first.o, begin, end)));
    EXPECT_TRUE(cases::same_bits(alone.states.out, rows_of(first.out, n, n + 1)));
  }
}

}  // namespace
}  // namespace weft::tests
