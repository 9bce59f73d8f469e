// gated_delta_rule_decode and _replay on the reference: the recurrence, records, and bit-equal replay of every accepted prefix.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/delta.h"

namespace weft::tests {
namespace {

using cases::get;

Tensor like(cases::Memory& memory, const Tensor& t) {
  return memory.make(t.dtype, std::vector<int64_t>(t.sizes.begin(), t.sizes.begin() + t.rank));
}

DeltaRecord make_record(DeltaProblem& p) {
  const int64_t rows = p.k.size(0);
  DeltaRecord record;
  record.k = p.memory.make(DType::f32, {rows, p.options.Hk, p.options.K});
  record.delta = p.memory.make(DType::f32, {rows, p.options.Hv, p.options.V});
  record.g = like(p.memory, p.g);
  return record;
}

GatedDeltaRuleReplayArgs replay_of(const GatedDeltaRuleDecodeArgs& decode, const Tensor& accepted, const Tensor& out) {
  GatedDeltaRuleReplayArgs args;
  args.record = decode.record;
  args.accepted = accepted;
  args.head_map = decode.head_map;
  args.sequences = decode.sequences;
  args.states = decode.states;
  args.states.out = out;
  return args;
}

TEST(Decode, EveryTokenCountIsTheRecurrence) {
  for (int64_t T = 1; T <= kMaxDecodeTokens; ++T) {
    DeltaProblem p({.lengths = {T, T}, .Hk = 2, .Hv = 6, .K = 20, .V = 12, .seed = static_cast<uint64_t>(T)});
    gated_delta_rule_decode(kReference, p.decode());
    for (int64_t n : {0, 1}) p.expect_recurrence(n, p.out, n, false, kFourRoundings, kFourRoundings);
    EXPECT_TRUE(p.memory.guards_intact());
  }
}

TEST(Decode, IsPrefillToTheBit) {
  DeltaProblem p({.lengths = {16, 0, 1, 7}, .Hk = 2, .Hv = 4, .spare_rows = 2});
  gated_delta_rule_prefill(kReference, p.prefill());
  GatedDeltaRuleDecodeArgs args = p.decode();
  args.o = like(p.memory, p.o);
  args.states.out = like(p.memory, p.out);
  gated_delta_rule_decode(kReference, args);
  EXPECT_TRUE(cases::same_bits(args.o, p.o));
  EXPECT_TRUE(cases::same_bits(args.states.out, p.out));
}

TEST(Decode, InPlaceIsTheSame) {
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    DeltaProblem p({.lengths = {4, 4, 4}, .Hv = 2, .state_dtype = dtype});
    gated_delta_rule_decode(kReference, p.decode());
    GatedDeltaRuleDecodeArgs args = p.decode();
    args.o = like(p.memory, p.o);
    args.states.out = p.in;
    gated_delta_rule_decode(kReference, args);
    EXPECT_TRUE(cases::same_bits(args.o, p.o));
    EXPECT_TRUE(cases::same_bits(p.in, p.out));
  }
}

// 2049 single steps in place against the recurrence; every step rounds the state once more.
TEST(Decode, LongChainsDoNotDrift) {
  DeltaProblem p({.lengths = {2049}, .Hv = 2, .K = 8, .V = 4, .g_low = -0.01});
  const std::vector<double> start0 = p.initial(0, 0), start1 = p.initial(0, 1);
  for (int64_t t = 0; t < 2049; ++t) {
    GatedDeltaRuleDecodeArgs args = p.decode();
    for (Tensor* x : {&args.q, &args.k, &args.v, &args.gates.g, &args.gates.beta, &args.o}) *x = rows_of(*x, t, t + 1);
    args.sequences = Sequences::uniform(1);
    args.states.out = p.in;
    gated_delta_rule_decode(kReference, args);
  }
  for (int64_t h : {0, 1}) {
    const HeadResult want = p.recurrence(h, 0, 2049, h == 0 ? start0 : start1);
    double error = 0, norm = 0;
    for (int64_t i = 0; i < 32; ++i) {
      const double truth = want.state[static_cast<size_t>(i)];
      error += std::pow(get(p.in, h * 32 + i) - truth, 2);
      norm += truth * truth;
    }
    EXPECT_LE(std::sqrt(error), 2e-6 * std::sqrt(2049.0) * std::sqrt(norm));
  }
}

TEST(DecodeRecord, HoldsKeysCorrectionsAndDecays) {
  DeltaProblem p({.lengths = {5}, .Hk = 1, .Hv = 2, .K = 6, .V = 3});
  fill_rows(p.k, 5, [&](int64_t, int64_t, int64_t) { return 2 * p.rng.normal(); });
  GatedDeltaRuleDecodeArgs args = p.decode();
  args.l2_norm = true;
  args.record = make_record(p);
  gated_delta_rule_decode(kReference, args);
  EXPECT_TRUE(cases::same_bits(args.record.g, p.g));
  for (int64_t t = 0; t < 5; ++t) {
    double norm = 1e-6;
    for (int64_t c = 0; c < 6; ++c) norm += std::pow(get(p.k, t * 6 + c), 2);
    for (int64_t c = 0; c < 6; ++c)
      EXPECT_FLOAT_EQ(static_cast<float>(get(args.record.k, t * 6 + c)), static_cast<float>(get(p.k, t * 6 + c) / std::sqrt(norm)));
  }
  for (int64_t h = 0; h < 2; ++h) {  // e_t = beta (v - e^g S_(t-1) k), with S_(t-1) from the recurrence over the recorded keys
    std::vector<double> state = p.initial(0, h);
    for (int64_t t = 0; t < 5; ++t)
      for (int64_t r = 0; r < 3; ++r) {
        double along = 0;
        for (int64_t c = 0; c < 6; ++c)
          along += std::exp(get(p.g, t * 2 + h)) * state[static_cast<size_t>(r * 6 + c)] * get(args.record.k, t * 6 + c);
        const double e = get(p.beta, t * 2 + h) * (get(p.v, (t * 2 + h) * 3 + r) - along);
        EXPECT_NEAR(get(args.record.delta, (t * 2 + h) * 3 + r), e, 1e-6);
        for (int64_t c = 0; c < 6; ++c)
          state[static_cast<size_t>(r * 6 + c)] =
              std::exp(get(p.g, t * 2 + h)) * state[static_cast<size_t>(r * 6 + c)] + e * get(args.record.k, t * 6 + c);
      }
  }
}

TEST(DecodeRecord, ChangesNothingElse) {
  DeltaProblem p({.lengths = {3, 16}, .Hk = 2, .Hv = 4, .spare_rows = 2});
  gated_delta_rule_decode(kReference, p.decode());
  GatedDeltaRuleDecodeArgs args = p.decode();
  args.o = like(p.memory, p.o);
  args.states.out = like(p.memory, p.out);
  args.record = make_record(p);
  gated_delta_rule_decode(kReference, args);
  EXPECT_TRUE(cases::same_bits(args.o, p.o));
  EXPECT_TRUE(cases::same_bits(args.states.out, p.out));
  for (const Tensor& t : {args.record.k, args.record.delta, args.record.g}) {
    EXPECT_TRUE(all_nan(rows_of(t, 19, 21)));
    for (double x : cases::values(rows_of(t, 0, 19))) EXPECT_FALSE(std::isnan(x));
  }
}

// A verify step without an output pool. Then, for every number of accepted tokens, replay against decoding only those tokens.
void expect_every_prefix(const DeltaOptions& options, bool l2_norm, bool linear_decay) {
  DeltaProblem p(options);
  GatedDeltaRuleDecodeArgs verify = p.decode();
  verify.l2_norm = l2_norm;
  if (linear_decay) {
    fill_rows(p.g, p.tokens, [&](int64_t, int64_t, int64_t) { return p.rng.uniform(); });
    verify.gates.g = Tensor{};
    verify.gates.alpha = p.g;
  }
  verify.states.out = Tensor{};
  verify.record = make_record(p);
  gated_delta_rule_decode(kReference, verify);
  const auto N = p.sequences.count;
  for (int64_t accepted = -1; accepted <= kMaxDecodeTokens + 1; ++accepted) {
    const Tensor replayed = like(p.memory, p.out);
    gated_delta_rule_replay(kReference,
                            replay_of(verify, p.memory.indices(std::vector<int64_t>(static_cast<size_t>(N), accepted)), replayed));
    for (int64_t n = 0; n < N; ++n) {
      const int64_t begin = p.begins[static_cast<size_t>(n)];
      const int64_t end = begin + std::clamp<int64_t>(accepted, 0, options.lengths[static_cast<size_t>(n)]);
      GatedDeltaRuleDecodeArgs prefix = verify;
      prefix.record = {};
      for (Tensor* t : {&prefix.q, &prefix.k, &prefix.v, &prefix.gates.g, &prefix.gates.alpha, &prefix.gates.beta, &prefix.o})
        if (t->present()) *t = rows_of(*t, begin, end);
      prefix.sequences = Sequences::uniform(1);
      prefix.states.in = rows_of(p.in, n, n + 1);
      prefix.states.out = rows_of(p.out, n, n + 1);
      gated_delta_rule_decode(kReference, prefix);
      EXPECT_TRUE(cases::same_bits(prefix.states.out, rows_of(replayed, n, n + 1))) << accepted << " accepted of sequence " << n;
    }
  }
  EXPECT_TRUE(p.memory.guards_intact());
}

TEST(Replay, EveryPrefixToTheBit) {
  expect_every_prefix({.lengths = {16}, .K = 32, .V = 16}, false, false);
  expect_every_prefix({.lengths = {16, 3, 0, 8, 1}, .Hk = 2, .Hv = 4, .K = 13, .V = 7}, false, false);
}

TEST(Replay, EveryPrefixUnderEveryOption) {
  expect_every_prefix({.lengths = {16, 5}, .Hk = 2, .Hv = 6, .head_map = HeadMap::tiled, .layout = StateLayout::kv}, true, false);
  expect_every_prefix({.lengths = {7, 16}, .Hk = 2, .Hv = 2, .dtype = DType::bf16, .per_channel = true, .g_low = -9}, true, false);
  expect_every_prefix({.lengths = {9}, .Hv = 2, .dtype = DType::f16, .beta_high = 2}, false, true);
  expect_every_prefix({.lengths = {16}, .Hv = 2, .per_channel = true, .keys = Keys::same}, false, true);
}

// The reference reads and writes a state once per call, so replay is bit-equal for 16-bit states too.
TEST(Replay, EveryPrefixOfSixteenBitStates) {
  for (DType dtype : {DType::bf16, DType::f16})
    expect_every_prefix({.lengths = {8, 4}, .Hv = 2, .state_dtype = dtype}, false, false);
}

// S_P = e^(G_P) S_0 + sum_j e^(G_P - G_j) e_j k_j^T
TEST(Replay, ClosedForm) {
  DeltaProblem p({.lengths = {6}, .K = 5, .V = 3});
  GatedDeltaRuleDecodeArgs verify = p.decode();
  verify.record = make_record(p);
  gated_delta_rule_decode(kReference, verify);
  gated_delta_rule_replay(kReference, replay_of(verify, p.memory.indices({4}), p.out));
  double total = 0;
  for (int64_t t = 0; t < 4; ++t) total += get(p.g, t);
  for (int64_t r = 0; r < 3; ++r)
    for (int64_t c = 0; c < 5; ++c) {
      double want = std::exp(total) * state_at(p.in, StateLayout::vk, 0, 0, r, c), prefix = 0;
      for (int64_t t = 0; t < 4; ++t) {
        prefix += get(p.g, t);
        want += std::exp(total - prefix) * get(verify.record.delta, t * 3 + r) * get(verify.record.k, t * 5 + c);
      }
      EXPECT_NEAR(state_at(p.out, StateLayout::vk, 0, 0, r, c), want, 2 * kUnit * std::abs(want) + 1e-12);
    }
}

// Verify, accept, replay in place, verify again: the same states as decoding the accepted tokens one call after another.
TEST(Replay, SpeculativeLoopKeepsTheState) {
  DeltaProblem p({.lengths = {40}, .Hk = 1, .Hv = 2});
  const Tensor plain = like(p.memory, p.in), speculative = like(p.memory, p.in);
  cases::copy(p.in, plain);
  cases::copy(p.in, speculative);
  const auto call = [&](int64_t begin, int64_t end) {
    GatedDeltaRuleDecodeArgs args = p.decode();
    for (Tensor* t : {&args.q, &args.k, &args.v, &args.gates.g, &args.gates.beta, &args.o}) *t = rows_of(*t, begin, end);
    args.sequences = Sequences::uniform(1);
    return args;
  };
  int64_t at = 0;
  for (int64_t accepted : {1, 4, 2, 8, 0, 5}) {
    GatedDeltaRuleDecodeArgs verify = call(at, at + 8);
    verify.states.in = speculative;
    verify.states.out = Tensor{};
    verify.record = make_record(p);
    for (Tensor* t : {&verify.record.k, &verify.record.delta, &verify.record.g}) *t = rows_of(*t, 0, 8);
    gated_delta_rule_decode(kReference, verify);
    gated_delta_rule_replay(kReference, replay_of(verify, p.memory.indices({accepted}), speculative));
    GatedDeltaRuleDecodeArgs straight = call(at, at + accepted);
    straight.states.in = straight.states.out = plain;
    gated_delta_rule_decode(kReference, straight);
    EXPECT_TRUE(cases::same_bits(plain, speculative)) << "after " << accepted << " at " << at;
    at += accepted;
  }
}

TEST(Replay, InertSlotsAndIllegalSequences) {
  DeltaProblem p({.lengths = {4, 4, 4, 4}});
  GatedDeltaRuleDecodeArgs verify = p.decode();
  verify.record = make_record(p);
  gated_delta_rule_decode(kReference, verify);
  const Tensor out = like(p.memory, p.out);
  GatedDeltaRuleReplayArgs args = replay_of(verify, p.memory.indices({4, 4, 4, 4}), out);
  args.sequences = Sequences::packed(p.memory.indices({0, 4, 2, 6, 99}), 4, 4);  // legal: 0 and 2
  args.states.in_slots = p.memory.indices({-1, 1, 2, 3});
  args.states.out_slots = p.memory.indices({0, 1, 3, 2});
  gated_delta_rule_replay(kReference, args);
  EXPECT_TRUE(all_nan(rows_of(out, 0, 3)));
  EXPECT_FALSE(std::isnan(get(out, 3 * out.strides[0])));
}

}  // namespace
}  // namespace weft::tests
