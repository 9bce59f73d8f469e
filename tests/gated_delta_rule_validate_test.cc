// Every validation rule of gated_delta_rule.h, broken once, with the message that refuses it.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/rules.h"
#include "weft/gated_delta_rule.h"

namespace weft::tests {
namespace {

constexpr int64_t kT = 12, kHk = 2, kHv = 4, kK = 16, kV = 8, kN = 2;

// The members that prefill and decode share.
template <class Args>
Args make_rule() {
  Args args;
  args.q = bf16({kT, kHk, kK});
  args.k = bf16({kT, kHk, kK});
  args.v = bf16({kT, kHv, kV});
  args.gates.g = f32({kT, kHv});
  args.gates.beta = f32({kT, kHv});
  args.o = bf16({kT, kHv, kV});
  args.sequences = Sequences::packed(shared_memory().indices({0, 5, kT}), kN, 7);
  args.states.in = f32({5, kHv, kV, kK});
  args.states.out = bf16({6, kHv, kV, kK});
  args.states.in_slots = i32({kN});
  args.states.out_slots = i32({kN});
  args.states.has_initial = i32({kN});
  return args;
}

template <class Args>
std::vector<Rule<Args>> shape_rules() {
  return {
      {[](Args& a) { a.q = Tensor{}; }, "q", "is absent, wanted [T, Hk, K]"},
      {[](Args& a) {
         a.q = i32({kT, kHk, kK});
       },
       "q", "is i32, wanted f32, f16 or bf16"},
      {[](Args& a) {
         a.k = f32({kT, kHk, kK});
       },
       "k", "is f32, wanted bf16, the dtype of q"},
      {[](Args& a) {
         a.v = f32({kT, kHv, kV});
       },
       "v", "is f32, wanted bf16, the dtype of q"},
      {[](Args& a) {
         a.k = bf16({kT, kHk, 17});
       },
       "k", "is [12, 2, 17], wanted [T=12, Hk=2, K=16]"},
      {[](Args& a) {
         a.v = bf16({13, kHv, kV});
       },
       "v", "is [13, 4, 8], wanted [T=12, Hv, V]"},
      {[](Args& a) {
         a.v = bf16({kT, kV});
       },
       "v", "is [12, 8], wanted [T=12, Hv, V]"},
      {[](Args& a) {
         a.q = a.k = bf16({kT, kHk, 257});
       },
       "k", "has K=257, wanted 1 to 256"},
      {[](Args& a) {
         a.q = a.k = bf16({kT, kHk, 0});
       },
       "k", "has K=0, wanted 1 to 256"},
      {[](Args& a) {
         a.v = bf16({kT, kHv, 257});
       },
       "v", "has V=257, wanted 1 to 256"},
      {[](Args& a) {
         a.q = a.k = bf16({kT, 3, kK});
       },
       "k", "has 3 heads, wanted a positive divisor of the 4 heads of v"},
      {[](Args& a) {
         a.q = a.k = bf16({kT, 0, kK});
       },
       "k", "has 0 heads, wanted a positive divisor of the 4 heads of v"},
      {[](Args& a) {
         constexpr int64_t kMany = (1 << 14) + 1;
         a.q = a.k = bf16({0, kHk, kK});
         a.v = a.o = dense(nullptr, DType::bf16, {0, kMany, kV});
         a.gates.g = a.gates.beta = dense(nullptr, DType::f32, {0, kMany});
         a.states = {};
       },
       "v", "has 16385 heads, wanted at most 16384"},
      // The first tensor of a size is blamed where all others agree on another size.
      {[](Args& a) {
         a.q = bf16({13, kHk, kK});
       },
       "q", "is [13, 2, 16], wanted [T=12, Hk=2, K=16]"},
      {[](Args& a) {
         a.v = bf16({kT, 3, kV});
       },
       "v", "is [12, 3, 8], wanted [T=12, Hv=4, V=8]"},
      {[](Args& a) {
         a.v = bf16({kT, kHv, 9});
       },
       "v", "is [12, 4, 9], wanted [T=12, Hv=4, V=8]"},
      {[](Args& a) { a.head_map = static_cast<HeadMap>(2); }, "head_map", "is 2, wanted 0 to 1"},
      {[](Args& a) { a.head_map = static_cast<HeadMap>(-1); }, "head_map", "is -1, wanted 0 to 1"},
      {[](Args& a) {
         a.o = bf16({kT, kHv, kK});
       },
       "o", "is [12, 4, 16], wanted [T=12, Hv=4, V=8]"},
      {[](Args& a) { a.o = Tensor{}; }, "o", "is absent, wanted [T=12, Hv=4, V=8]"},
      {[](Args& a) { a.o = a.v; }, "o", "overlaps v in memory"},
      {[](Args& a) { a.scale = INFINITY; }, "scale", "is inf, wanted a finite number"},
      {[](Args& a) { a.sequences = Sequences::uniform(5); }, "sequences.count",
       "is 5, wanted a divisor of T=12, or cu_seqlens for sequences of different lengths"},
      {[](Args& a) { a.sequences.max_tokens = -1; }, "sequences.max_tokens", "is -1, wanted >= 0"},
  };
}

template <class Args>
std::vector<Rule<Args>> gate_rules() {
  return {
      {[](Args& a) { a.gates.g = Tensor{}; }, "gates.g", "is absent, wanted exactly one of g, alpha and a + a_log + dt_bias"},
      {[](Args& a) {
         a.gates.alpha = f32({kT, kHv});
       },
       "gates.alpha", "is given beside gates.g, wanted exactly one of g, alpha and a + a_log + dt_bias"},
      {[](Args& a) {
         a.gates.a = f32({kT, kHv});
       },
       "gates.a", "is given beside gates.g, wanted exactly one of g, alpha and a + a_log + dt_bias"},
      {[](Args& a) { a.gates.dt_bias = f32({kHv}); }, "gates.a",
       "is given beside gates.g, wanted exactly one of g, alpha and a + a_log + dt_bias"},
      {[](Args& a) { a.gates.g = {}, a.gates.a_log = f32({kHv}); }, "gates.a", "is absent, wanted [T=12, Hv=4]"},
      {[](Args& a) {
         a.gates.g = {}, a.gates.a = bf16({kT, kHv});
       },
       "gates.a_log", "is absent, wanted [Hv=4]"},
      {[](Args& a) {
         a.gates.g = {}, a.gates.a = bf16({kT, kHv}), a.gates.a_log = f32({kHv});
       },
       "gates.dt_bias", "is absent, wanted [Hv=4]"},
      {[](Args& a) {
         a.gates.g = {}, a.gates.a = bf16({kT, kHv, kK}), a.gates.a_log = f32({kHv}), a.gates.dt_bias = f32({kHv});
       },
       "gates.dt_bias", "is [4], wanted [Hv=4, K=16]"},
      {[](Args& a) {
         a.gates.g = {}, a.gates.a = i32({kT, kHv}), a.gates.a_log = f32({kHv}), a.gates.dt_bias = f32({kHv});
       },
       "gates.a", "is i32, wanted f32, f16 or bf16"},
      {[](Args& a) {
         a.gates.g = {}, a.gates.a = bf16({kT, kHv}), a.gates.a_log = bf16({kHv}), a.gates.dt_bias = f32({kHv});
       },
       "gates.a_log", "is bf16, wanted f32"},
      {[](Args& a) {
         a.gates.g = bf16({kT, kHv});
       },
       "gates.g", "is bf16, wanted f32"},
      {[](Args& a) {
         a.gates.g = f32({kT, kHv, 8});
       },
       "gates.g", "is [12, 4, 8], wanted [T=12, Hv=4, K=16]"},
      {[](Args& a) {
         a.gates.g = {}, a.gates.alpha = f32({kT, 3});
       },
       "gates.alpha", "is [12, 3], wanted [T=12, Hv=4]"},
      {[](Args& a) { a.gates.beta = Tensor{}; }, "gates.beta", "is absent, wanted exactly one of beta and b"},
      {[](Args& a) {
         a.gates.b = f32({kT, kHv});
       },
       "gates.b", "is given beside gates.beta, wanted exactly one of beta and b"},
      {[](Args& a) {
         a.gates.beta = bf16({kT, kHv});
       },
       "gates.beta", "is bf16, wanted f32"},
      {[](Args& a) {
         a.gates.beta = {}, a.gates.b = bf16({kT, kHk});
       },
       "gates.b", "is [12, 2], wanted [T=12, Hv=4]"},
      {[](Args& a) { a.gates.double_beta = true; }, "gates.double_beta", "is set, but it doubles sigmoid(b) and b is absent"},
  };
}

template <class Args>
std::vector<Rule<Args>> state_rules() {
  return {
      {[](Args& a) {
         a.states.in = f32({5, kHv, kK, kV});
       },
       "states.in", "is [5, 4, 16, 8], wanted [slots, Hv=4, V=8, K=16]"},
      {[](Args& a) { a.states.layout = static_cast<StateLayout>(2); }, "states.layout", "is 2, wanted 0 to 1"},
      {[](Args& a) { a.states.layout = static_cast<StateLayout>(-1); }, "states.layout", "is -1, wanted 0 to 1"},
      {[](Args& a) { a.states.layout = StateLayout::kv; }, "states.in", "is [5, 4, 8, 16], wanted [slots, Hv=4, K=16, V=8]"},
      {[](Args& a) {
         a.states.in = i32({5, kHv, kV, kK});
       },
       "states.in", "is i32, wanted f32, f16 or bf16"},
      {[](Args& a) {
         a.states.in = shared_memory().make_padded(DType::f32, {5, kHv, kV, kK}, 1);
       },
       "states.in", "has matrices of row stride 17, wanted dense ones of 16"},
      {[](Args& a) {
         a.states.in_slots = {}, a.states.in = f32({1, kHv, kV, kK});
       },
       "states.in", "has 1 slots and no slot indices, wanted at least N=2"},
      {[](Args& a) {
         a.states.out = f32({6, kHv, kV, 8});
       },
       "states.out", "is [6, 4, 8, 8], wanted [out slots, Hv=4, V=8, K=16]"},
      {[](Args& a) {
         a.states.out = shared_memory().make_padded(DType::f32, {5, kHv, kV, kK}, 2);
       },
       "states.out", "has matrices of row stride 18, wanted dense ones of 16"},
      {[](Args& a) {
         a.states.in_slots = a.states.out_slots = {}, a.states.out = f32({1, kHv, kV, kK});
       },
       "states.out", "has 1 slots and no slot indices, wanted at least N=2"},
      {[](Args& a) { a.states.in_slots = i32({3}); }, "states.in_slots", "is [3], wanted [N=2]"},
      {[](Args& a) { a.states.out_slots = f32({kN}); }, "states.out_slots", "is f32, wanted i32"},
      {[](Args& a) {
         a.states.has_initial = i32({kN, 1});
       },
       "states.has_initial", "is [2, 1], wanted [N=2]"},
      {[](Args& a) { a.states.out = a.states.in, a.states.out.sizes[0] = 4; }, "states.out", "overlaps states.in in memory"},
  };
}

template <class Args>
void expect_legal(const char* what, Args args, void (*change)(Args&)) {
  change(args);
  EXPECT_EQ(validate(args).message, "") << what;
}

TEST(RuleValidate, Prefill) {
  using Args = GatedDeltaRulePrefillArgs;
  const Args legal = make_rule<Args>();
  const char* op = "gated_delta_rule_prefill";
  expect_rules<Args>(op, legal, shape_rules<Args>());
  expect_rules<Args>(op, legal, gate_rules<Args>());
  expect_rules<Args>(op, legal, state_rules<Args>());
  expect_rules<Args>(op, legal,
                     {{[](Args& a) { a.schedule = static_cast<Schedule>(2); }, "schedule", "is 2, wanted 0 to 1"},
                      {[](Args& a) { a.schedule = static_cast<Schedule>(-1); }, "schedule", "is -1, wanted 0 to 1"}});
  expect_legal<Args>("in place", legal, [](Args& a) { a.states.out = a.states.in; });
  expect_legal<Args>("per channel", legal, [](Args& a) { a.gates.g = f32({kT, kHv, kK}); });
  expect_legal<Args>("no states", legal, [](Args& a) { a.states = {}; });
}

TEST(RuleValidate, PrefillCheckpoints) {
  using Args = GatedDeltaRulePrefillArgs;
  Args legal = make_rule<Args>();
  legal.q = bf16({300, kHk, kK});
  legal.k = bf16({300, kHk, kK});
  legal.v = bf16({300, kHv, kV});
  legal.o = bf16({300, kHv, kV});
  legal.gates.g = f32({300, kHv});
  legal.gates.beta = f32({300, kHv});
  legal.sequences.max_tokens = 200;
  legal.checkpoints = f32({kN, 3, kHv, kV, kK});
  legal.checkpoint_every = 64;
  expect_rules<Args>("gated_delta_rule_prefill", legal,
                     {{[](Args& a) { a.checkpoints = Tensor{}; }, "checkpoint_every", "is 64 without checkpoints, wanted 0"},
                      {[](Args& a) { a.checkpoint_every = 0; }, "checkpoint_every", "is 0, wanted a positive multiple of 64"},
                      {[](Args& a) { a.checkpoint_every = 96; }, "checkpoint_every", "is 96, wanted a positive multiple of 64"},
                      {[](Args& a) { a.checkpoint_every = -64; }, "checkpoint_every", "is -64, wanted a positive multiple of 64"},
                      {[](Args& a) {
                         a.checkpoints = f32({kN, 3, kHv, kK, kV});
                       },
                       "checkpoints", "is [2, 3, 4, 16, 8], wanted [N=2, >= max_tokens / checkpoint_every, Hv=4, V=8, K=16]"},
                      {[](Args& a) {
                         a.checkpoints = f32({kN, 2, kHv, kV, kK});
                       },
                       "checkpoints", "has 2 rows per sequence, wanted at least 3"},
                      {[](Args& a) {
                         a.checkpoints = i32({kN, 3, kHv, kV, kK});
                       },
                       "checkpoints", "is i32, wanted f32, f16 or bf16"},
                      {[](Args& a) {
                         a.states.layout = StateLayout::kv;
                         a.states.in = a.states.out = {};
                       },
                       "checkpoints", "is [2, 3, 4, 8, 16], wanted [N=2, >= max_tokens / checkpoint_every, Hv=4, K=16, V=8]"}});
  expect_legal<Args>("every second unit", legal, [](Args& a) { a.checkpoint_every = 128; });
}

TEST(RuleValidate, Decode) {
  using Args = GatedDeltaRuleDecodeArgs;
  Args legal = make_rule<Args>();
  const char* op = "gated_delta_rule_decode";
  expect_rules<Args>(op, legal, shape_rules<Args>());
  expect_rules<Args>(op, legal, gate_rules<Args>());
  expect_rules<Args>(op, legal, state_rules<Args>());
  legal.record = {f32({kT, kHk, kK}), f32({kT, kHv, kV}), f32({kT, kHv})};
  expect_rules<Args>(op, legal,
                     {{[](Args& a) { a.sequences.max_tokens = 17; }, "sequences.max_tokens", "is 17, wanted at most 16"},
                      {[](Args& a) { a.record.k = Tensor{}; }, "record.k", "is absent, wanted [T=12, Hk=2, K=16]"},
                      {[](Args& a) { a.record.delta = Tensor{}; }, "record.delta", "is absent, wanted [T=12, Hv=4, V=8]"},
                      {[](Args& a) { a.record.g = Tensor{}; }, "record.g", "is absent, wanted [T=12, Hv=4]"},
                      {[](Args& a) {
                         a.record.k = bf16({kT, kHk, kK});
                       },
                       "record.k", "is bf16, wanted f32"},
                      {[](Args& a) {
                         a.record.delta = f32({kT, kHk, kV});
                       },
                       "record.delta", "is [12, 2, 8], wanted [T=12, Hv=4, V=8]"},
                      {[](Args& a) {
                         a.record.g = f32({kT, kHv, kK});
                       },
                       "record.g", "is [12, 4, 16], wanted [T, Hv] like the decay in gates"},
                      {[](Args& a) {
                         a.gates.g = f32({kT, kHv, kK});
                       },
                       "record.g", "is [12, 4], wanted [T, Hv, K] like the decay in gates"},
                      {[](Args& a) { a.record.g = a.gates.g; }, "record.g", "overlaps gates.g in memory"}});
  Args uniform = legal;
  uniform.q = uniform.k = bf16({34, kHk, kK});
  uniform.v = bf16({34, kHv, kV});
  uniform.o = bf16({34, kHv, kV});
  uniform.gates.g = uniform.gates.beta = f32({34, kHv});
  uniform.record = {};
  uniform.sequences = Sequences::uniform(2);
  EXPECT_EQ(validate(uniform).message,
            "gated_delta_rule_decode: sequences.count is 2, so each sequence has 17 of the T=34 tokens, wanted at most 16");
}

TEST(RuleValidate, Replay) {
  using Args = GatedDeltaRuleReplayArgs;
  const GatedDeltaRuleDecodeArgs decode = make_rule<GatedDeltaRuleDecodeArgs>();
  Args legal;
  legal.record = {f32({kT, kHk, kK}), f32({kT, kHv, kV}), f32({kT, kHv})};
  legal.accepted = i32({kN});
  legal.sequences = decode.sequences;
  legal.states = decode.states;
  expect_rules<Args>("gated_delta_rule_replay", legal, state_rules<Args>());
  expect_rules<Args>("gated_delta_rule_replay", legal,
                     {{[](Args& a) { a.record.k = Tensor{}; }, "record.k", "is absent, wanted [T, Hk, K]"},
                      {[](Args& a) {
                         a.record.delta = bf16({kT, kHv, kV});
                       },
                       "record.delta", "is bf16, wanted f32"},
                      {[](Args& a) {
                         a.record.g = f32({kT, kHv, 8});
                       },
                       "record.g", "is [12, 4, 8], wanted [T=12, Hv=4, K=16]"},
                      {[](Args& a) {
                         a.record.k = f32({kT, kHk, 257});
                       },
                       "record.k", "has K=257, wanted 1 to 256"},
                      {[](Args& a) {
                         a.record.delta = f32({kT, kHv, 257});
                       },
                       "record.delta", "has V=257, wanted 1 to 256"},
                      {[](Args& a) {
                         a.record.k = f32({kT, 3, kK});
                       },
                       "record.k", "has 3 heads, wanted a positive divisor of the 4 heads of record.delta"},
                      {[](Args& a) { a.head_map = static_cast<HeadMap>(2); }, "head_map", "is 2, wanted 0 to 1"},
                      {[](Args& a) { a.accepted = Tensor{}; }, "accepted", "is absent, wanted [N=2]"},
                      {[](Args& a) { a.accepted = f32({kN}); }, "accepted", "is f32, wanted i32"},
                      {[](Args& a) { a.accepted = i32({3}); }, "accepted", "is [3], wanted [N=2]"},
                      {[](Args& a) { a.sequences.max_tokens = 64; }, "sequences.max_tokens", "is 64, wanted at most 16"},
                      {[](Args& a) { a.states.in = Tensor{}; }, "states.in", "is absent, wanted [slots, Hv=4, V=8, K=16]"},
                      {[](Args& a) { a.states.out = Tensor{}; }, "states.out", "is absent, wanted [out slots, Hv=4, V=8, K=16]"}});
}

TEST(RuleValidate, Summarize) {
  using Args = GatedDeltaRuleSummarizeArgs;
  const GatedDeltaRulePrefillArgs prefill = make_rule<GatedDeltaRulePrefillArgs>();
  Args legal;
  legal.k = prefill.k;
  legal.v = prefill.v;
  legal.gates = prefill.gates;
  legal.sequences = prefill.sequences;
  legal.p = f32({kN, kHv, kK, kK});
  legal.q = f32({kN, kHv, kV, kK});
  expect_rules<Args>("gated_delta_rule_summarize", legal, gate_rules<Args>());
  expect_rules<Args>("gated_delta_rule_summarize", legal,
                     {{[](Args& a) {
                         a.k = bf16({kT, 3, kK});
                       },
                       "k", "has 3 heads, wanted a positive divisor of the 4 heads of v"},
                      {[](Args& a) {
                         a.k = bf16({kT, kHk, 257});
                       },
                       "k", "has K=257, wanted 1 to 256"},
                      {[](Args& a) {
                         a.v = bf16({kT, kHv, 0});
                       },
                       "v", "has V=0, wanted 1 to 256"},
                      {[](Args& a) {
                         a.v = f32({kT, kHv, kV});
                       },
                       "v", "is f32, wanted bf16, the dtype of k"},
                      {[](Args& a) {
                         a.p = f32({kN, kHv, kV, kK});
                       },
                       "p", "is [2, 4, 8, 16], wanted [N=2, Hv=4, K=16, K=16]"},
                      {[](Args& a) {
                         a.p = bf16({kN, kHv, kK, kK});
                       },
                       "p", "is bf16, wanted f32"},
                      {[](Args& a) {
                         a.q = f32({3, kHv, kV, kK});
                       },
                       "q", "is [3, 4, 8, 16], wanted [N=2, Hv=4, V=8, K=16]"},
                      {[](Args& a) { a.head_map = static_cast<HeadMap>(2); }, "head_map", "is 2, wanted 0 to 1"},
                      {[](Args& a) { a.q = Tensor{}; }, "q", "is absent, wanted [N=2, Hv=4, V=8, K=16]"}});
}

TEST(RuleValidate, ComposeAndApply) {
  const auto p = [] { return f32({kN, kHv, kK, kK}); };
  const auto q = [] { return f32({kN, kHv, kV, kK}); };
  using Compose = GatedDeltaRuleComposeArgs;
  expect_rules<Compose>("gated_delta_rule_compose", {p(), q(), p(), q(), p(), q()},
                        {{[](Compose& a) {
                            a.p1 = f32({kN, kHv, kK, kV});
                          },
                          "p1", "is [2, 4, 16, 8], wanted [N=2, Hv=4, K=16, K=16]"},
                         {[](Compose& a) {
                            a.q1 = bf16({kN, kHv, kV, kK});
                          },
                          "q1", "is bf16, wanted f32"},
                         {[](Compose& a) {
                            a.p2 = f32({1, kHv, kK, kK});
                          },
                          "p2", "is [1, 4, 16, 16], wanted [N=2, Hv=4, K=16, K=16]"},
                         {[](Compose& a) {
                            a.q2 = f32({kN, kHv, 9, kK});
                          },
                          "q2", "is [2, 4, 9, 16], wanted [N=2, Hv=4, V=8, K=16]"},
                         {[](Compose& a) { a.p = Tensor{}; }, "p", "is absent, wanted [N=2, Hv=4, K=16, K=16]"},
                         {[](Compose& a) { a.q = Tensor{}; }, "q", "is absent, wanted [N=2, Hv=4, V=8, K=16]"},
                         {[](Compose& a) { a.q = a.q2; }, "q", "overlaps q2 in memory"},
                         {[](Compose& a) {
                            a.p1 = a.p2 = a.p = f32({1, 1, 257, 257}), a.q1 = a.q2 = a.q = f32({1, 1, 8, 257});
                          },
                          "p1", "has K=257, wanted 1 to 256"}});
  using Apply = GatedDeltaRuleApplyArgs;
  Apply apply;
  apply.p = p();
  apply.q = q();
  apply.states = make_rule<GatedDeltaRulePrefillArgs>().states;
  expect_rules<Apply>("gated_delta_rule_apply", apply, state_rules<Apply>());
  expect_rules<Apply>(
      "gated_delta_rule_apply", apply,
      {{[](Apply& a) { a.p = Tensor{}; }, "p", "is absent, wanted [N, Hv, K, K]"},
       {[](Apply& a) {
          a.q = f32({kN, kHv, kV, 8});
        },
        "q", "is [2, 4, 8, 8], wanted [N=2, Hv=4, V, K=16]"},
       {[](Apply& a) {
          a.q = f32({kN, kHv, 257, kK});
        },
        "q", "has V=257, wanted 1 to 256"},
       {[](Apply& a) { a.states.out = Tensor{}; }, "states.out", "is absent, wanted [out slots, Hv=4, V=8, K=16]"}});
}

// A refused call writes nothing and throws the message.
TEST(RuleValidate, CallsThrowTheMessage) {
  GatedDeltaRulePrefillArgs args = make_rule<GatedDeltaRulePrefillArgs>();
  args.gates.beta = Tensor{};
  try {
    gated_delta_rule_prefill({Backend::reference}, args);
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "gated_delta_rule_prefill: gates.beta is absent, wanted exactly one of beta and b");
    EXPECT_EQ(error.status().argument, "gates.beta");
  }
  for (double x : cases::values(args.o)) EXPECT_TRUE(std::isnan(x));
}

}  // namespace
}  // namespace weft::tests
