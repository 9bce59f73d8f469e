// Forks, snapshots and rollbacks: the bits of never having seen the removed tokens, and no leaked pages.
#include <gtest/gtest.h>

#include <random>

#include "tests/support/complaint.h"
#include "tests/support/golden_model.h"
#include "tests/support/sequence_bits.h"

namespace {

using namespace weft;
using namespace weft::testing_support;

constexpr Stream kOneThread{Backend::cpu, 0, nullptr, 1, Isa::best};

// A golden model, states of it, and random tokens.
class Rollback : public testing::TestWithParam<const char*> {
 protected:
  Rollback() : model_(Model::load(golden_models() / GetParam())), logits_(static_cast<size_t>(model_.vocab_size())) {}

  HybridState state(int64_t rollback, int64_t sequences = 1, const char* kv = "4v4") const {
    HybridPlan plan = model_.plan(kv, 1000, sequences);
    plan.rollback = rollback;
    return HybridState::create(plan);
  }
  std::vector<int32_t> tokens(size_t count) {
    std::vector<int32_t> out(count);
    for (int32_t& token : out) token = static_cast<int32_t>(random_() % static_cast<uint64_t>(model_.vocab_size()));
    return out;
  }
  std::vector<float> append(HybridState& state, int64_t sequence, std::span<const int32_t> tokens) {
    model_.append(kOneThread, state, {{.sequence = sequence, .tokens = tokens, .logits = logits_.data()}});
    return logits_;
  }
  size_t below(size_t end) { return random_() % end; }

  Model model_;
  std::vector<float> logits_;
  std::mt19937_64 random_{7};
};
INSTANTIATE_TEST_SUITE_P(Families, Rollback, testing::Values("qwen3_next", "qwen3_5"));

TEST_P(Rollback, IsAsIfTheTokensHadNeverBeen) {
  for (int64_t depth : {1, 5, 16}) {
    HybridState tried = state(depth), plain = state(0);
    for (int round = 0; round < 60; ++round) {
      if (tried.tokens(0) > 800) {
        tried.reset(0);
        plain.reset(0);
      }
      // Tokens that stay: decoded one by one or several at once, rarely a prompt.
      const std::vector<int32_t> kept = tokens(round % 13 == 12 ? 17 + below(80) : 1 + below(round % 3 == 0 ? 16 : 2));
      const std::vector<float> a = append(tried, 0, kept), b = append(plain, 0, kept);
      ASSERT_EQ(a, b) << depth << " " << round;
      // Tokens that are appended in one or several steps and then rolled back.
      const int64_t rejected = static_cast<int64_t>(below(static_cast<size_t>(depth) + 1));
      for (int64_t left = rejected; left > 0;) {
        const int64_t count = 1 + static_cast<int64_t>(below(static_cast<size_t>(left)));
        append(tried, 0, tokens(static_cast<size_t>(count)));
        left -= count;
      }
      ASSERT_GE(tried.rollable(0), rejected);
      tried.rollback(kOneThread, 0, rejected);
      ASSERT_EQ(tried.tokens(0), plain.tokens(0));
      ASSERT_EQ(bits_of(tried, 0), bits_of(plain, 0)) << depth << " " << round;
    }
  }
}

// A draft is verified in one step: its tail is rolled back while the head of the same step stays.
TEST_P(Rollback, TakesBackThePartOfAStep) {
  HybridState tried = state(16), plain = state(0);
  for (int round = 0; round < 40; ++round) {
    const std::vector<int32_t> draft = tokens(1 + below(16));
    const size_t kept = 1 + below(draft.size());
    append(tried, 0, draft);
    tried.rollback(kOneThread, 0, static_cast<int64_t>(draft.size() - kept));
    append(plain, 0, std::span(draft).first(kept));
    ASSERT_EQ(bits_of(tried, 0), bits_of(plain, 0)) << round;
  }
  const std::vector<int32_t> last = tokens(1);
  EXPECT_EQ(append(tried, 0, last), append(plain, 0, last));
}

TEST_P(Rollback, ManySequencesAtOnce) {
  constexpr int64_t kSequences = 4;
  HybridState tried = state(8, kSequences), plain = state(0, kSequences);
  for (int round = 0; round < 30; ++round) {
    std::vector<std::vector<int32_t>> draft(kSequences);
    std::vector<ModelInput> inputs, kept_inputs;
    std::vector<SequenceTokens> back;
    for (int64_t n = 0; n < kSequences; ++n) {
      std::vector<int32_t>& ids = draft[static_cast<size_t>(n)] = tokens(round % 7 == 3 && n == 1 ? 40 : 1 + below(8));
      const size_t rejected = ids.size() > 16 ? 0 : below(ids.size() + 1);
      inputs.push_back({.sequence = n, .tokens = ids});
      kept_inputs.push_back({.sequence = n, .tokens = std::span(ids).first(ids.size() - rejected)});
      back.push_back({n, static_cast<int64_t>(rejected)});
    }
    model_.append(kOneThread, tried, inputs);
    tried.rollback(kOneThread, back);
    model_.append(kOneThread, plain, kept_inputs);
    for (int64_t n = 0; n < kSequences; ++n) ASSERT_EQ(bits_of(tried, n), bits_of(plain, n)) << round << " " << n;
  }
}

TEST_P(Rollback, ForksGoTheirOwnWays) {
  HybridState together = state(4, 3), alone = state(4);
  const std::vector<int32_t> past = tokens(100), left = tokens(5), right = tokens(70);
  append(together, 0, past);
  append(together, 0, left);
  const int64_t kv = together.bytes().kv, pages = model::pools_of(together).pages->in_use();
  together.fork(0, 2);
  EXPECT_EQ(together.bytes().kv, kv);
  EXPECT_EQ(model::pools_of(together).pages->in_use(), pages) << "no page is copied by a fork";
  together.rollback(kOneThread, 2, 4);  // a fork has records of its own
  append(together, 2, right);
  EXPECT_EQ(model::pools_of(together).pages->in_use(), pages + 2) << "the page that both write, and a new one";
  const std::vector<float> first = append(together, 0, left), second = append(together, 2, left);

  append(alone, 0, past);
  append(alone, 0, left);
  const std::vector<float> want_first = append(alone, 0, left);
  EXPECT_EQ(first, want_first);
  alone.reset(0);
  append(alone, 0, past);
  append(alone, 0, std::span(left).first(1));
  append(alone, 0, right);
  EXPECT_EQ(second, append(alone, 0, left));
  together.reset(0);
  together.reset(2);
  EXPECT_EQ(model::pools_of(together).pages->in_use(), 0);
}

TEST_P(Rollback, SnapshotsComeBack) {
  for (int64_t depth : {0, 16}) {
    HybridState one = state(depth, 2);
    const std::vector<int32_t> past = tokens(90), next = tokens(9);
    append(one, 0, past);
    append(one, 0, std::span(next).first(3));
    const HybridSnapshot kept = one.snapshot(0);
    EXPECT_EQ(kept.tokens(), 93);
    EXPECT_EQ(kept.bytes(), model::pools_of(one).recurrent_bytes() + model::pools_of(one).history_bytes());
    const SequenceBits bits = bits_of(one, 0);
    const std::vector<float> want = append(one, 0, next);
    append(one, 1, tokens(300));
    for (int64_t n : {0, 1}) {
      one.restore(n, kept);
      EXPECT_EQ(one.tokens(n), 93);
      EXPECT_EQ(one.rollable(n), 0);
      EXPECT_EQ(bits_of(one, n), bits);
      EXPECT_EQ(append(one, n, next), want);
    }
    HybridState other = state(depth);
    EXPECT_EQ(complaint([&] { other.restore(0, kept); }),
              "hybrid_state: snapshot was taken from another state, wanted one of this state");
  }
}

TEST_P(Rollback, SnapshotsOutliveTheirState) {
  std::vector<HybridSnapshot> kept;
  {
    HybridState one = state(0);
    append(one, 0, tokens(200));
    kept.push_back(one.snapshot(0));
  }
  EXPECT_EQ(kept.back().tokens(), 200);
}

// Chains of forks, freed in any order; run under AddressSanitizer.
TEST(ForkChains, AThousandDeepLeaveNothing) {
  HybridPlan plan;
  plan.sequences = 1001;
  plan.capacity = 4000;
  plan.rollback = 2;
  plan.layers.emplace_back(DeltaMemory{2, 4, 4, 8, 3, 1});
  plan.layers.emplace_back(AttentionMemory::for_cpu(1, kv_recipe("8v4", 32, 32)));
  HybridState state = HybridState::create(plan);
  std::mt19937 random(1);
  for (int round = 0; round < 3; ++round) {
    std::vector<HybridSnapshot> kept;
    state.append(std::array{SequenceTokens{0, 70}});
    for (int64_t n = 0; n < 1000; ++n) {
      state.fork(n, n + 1);
      state.append(std::array{SequenceTokens{n + 1, 1, true}});
      if (n % 3 == 0) kept.push_back(state.snapshot(n));
    }
    EXPECT_EQ(state.tokens(1000), 1070);
    std::vector<int64_t> order(1001);
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
    std::shuffle(order.begin(), order.end(), random);
    std::shuffle(kept.begin(), kept.end(), random);
    for (int64_t n : order) {
      state.reset(n);
      if (!kept.empty() && n % 3 == 1) kept.pop_back();
    }
    if (round < 2) {
      kept.clear();
      EXPECT_EQ(model::pools_of(state).pages->in_use(), 0) << round;
    }
  }
}

TEST(RollbackPlan, BytesAreExactlyThePlanned) {
  const Model model = Model::load(golden_models() / "qwen3_5");
  for (int64_t sequences : {1, 3}) {
    HybridPlan plan = model.plan("8v4", 100, sequences);
    plan.rollback = 7;
    HybridState state = HybridState::create(plan);
    std::vector<SequenceTokens> parts;
    for (int64_t n = 0; n < sequences; ++n) parts.push_back({n, 100});
    state.append(parts);
    const HybridBytes want = hybrid_bytes(plan, 100), got = state.bytes();
    EXPECT_EQ(got.recurrent, want.recurrent);
    EXPECT_EQ(got.windows, want.windows);
    EXPECT_EQ(got.kv, want.kv);
    EXPECT_EQ(got.records, want.records);
    EXPECT_GT(want.records, 0);
    EXPECT_EQ(model.bytes(kOneThread, plan, 100).state.records, want.records);
    plan.rollback = 0;
    EXPECT_EQ(hybrid_bytes(plan, 100).records, 0);
  }
}

// A plan whose records have other heads than the model is refused at once; replay would notice it late or never.
TEST(RollbackPlan, OtherKeyHeadsAreRefusedBeforeAnythingChanges) {
  const Model model = Model::load(golden_models() / "qwen3_5");
  const HybridPlan right = model.plan("8v4", 100);
  const std::vector<int32_t> ids(2, 1);
  const auto said = [&](int64_t rollback, auto change) {
    HybridPlan plan = right;
    plan.rollback = rollback;
    for (LayerMemory& layer : plan.layers)
      if (auto* memory = std::get_if<DeltaMemory>(&layer)) change(*memory);
    HybridState state = HybridState::create(plan);
    const std::string what = complaint([&] { model.append(kOneThread, state, {{.tokens = ids}}); });
    EXPECT_EQ(state.tokens(0), what == "none" ? 2 : 0);
    return what;
  };
  const auto other_heads = [](DeltaMemory& memory) { memory.key_heads = memory.key_heads == 1 ? memory.value_heads : 1; };
  const auto tiled = [](DeltaMemory& memory) { memory.head_map = HeadMap::tiled; };
  const std::string refused = "model append: state was made for another model, wanted one of this model's create_state() or plan()";
  EXPECT_EQ(said(4, [](DeltaMemory&) {}), "none");
  EXPECT_EQ(said(4, other_heads), refused);
  EXPECT_EQ(said(4, tiled), refused);
  EXPECT_EQ(said(0, other_heads), "none") << "there are no records";
  EXPECT_EQ(said(0, tiled), "none") << "there are no records";
}

TEST(RollbackPlan, SequencesWithoutNewTokensAreLeftAlone) {
  const Model model = Model::load(golden_models() / "qwen3_5");
  HybridPlan plan = model.plan("8v4", 100, 2);
  plan.rollback = 4;
  HybridState state = HybridState::create(plan);
  const std::vector<int32_t> ids(20, 1);
  model.append(kOneThread, state, {{.tokens = ids}});
  for (int i = 0; i < 3; ++i) model.append(kOneThread, state, {{.tokens = std::span(ids).first(1)}});
  state.rollback(kOneThread, 0, 2);
  const HybridBatch batch = state.append(std::array{SequenceTokens{0, 0}, SequenceTokens{1, 1}});
  for (const Tensor* slots : {&batch.slots, &batch.in_slots, &batch.out_slots}) {
    if (!slots->present()) continue;
    EXPECT_LT(static_cast<const int32_t*>(slots->data)[0], 0);
    EXPECT_GE(static_cast<const int32_t*>(slots->data)[1], 0);
  }
  EXPECT_EQ(state.tokens(0), 21);
}

TEST(RollbackPlan, RefusesWithASentenceAndChangesNothing) {
  const Model model = Model::load(golden_models() / "qwen3_5");
  HybridPlan plan = model.plan("8v4", 100, 2);
  plan.rollback = 17;
  EXPECT_EQ(complaint([&] { HybridState::create(plan); }), "hybrid_state: plan.rollback is 17, wanted 0 to 16");
  plan.rollback = 3;
  HybridState state = HybridState::create(plan);
  const std::vector<int32_t> ids(20, 1);
  model.append(kOneThread, state, {{.tokens = ids}});
  EXPECT_EQ(state.rollable(0), 0);
  for (int i = 0; i < 5; ++i) model.append(kOneThread, state, {{.tokens = std::span(ids).first(1)}});
  EXPECT_EQ(state.rollable(0), 3);
  const SequenceBits before = bits_of(state, 0);
  EXPECT_EQ(complaint([&] { state.rollback(kOneThread, 0, 4); }),
            "hybrid_state: tokens to take back are 4 for sequence 0, wanted 0 to 3 (the plan has rollback 3, and tokens that came "
            "more than 16 at once, in a prompt or by a restore stay)");
  EXPECT_NE(complaint([&] { state.rollback(kOneThread, 1, 1); }), "none");
  EXPECT_EQ(complaint([&] { state.rollback(Stream{.backend = Backend::cuda}, 0, 1); }),
            "hybrid_state: stream is of backend cuda, device 0, the state is on the host");
  EXPECT_NE(complaint([&] { state.rollback(kOneThread, 2, 0); }), "none");
  EXPECT_NE(complaint([&] { state.rollback(kOneThread, 0, -1); }), "none");
  EXPECT_NE(complaint([&] { state.fork(0, 2); }), "none");
  EXPECT_NE(complaint([&] { state.snapshot(-1); }), "none");
  EXPECT_EQ(complaint([&] {
              state.append(std::array{SequenceTokens{0, 17, true}});
            }),
            "hybrid_state: tokens is 17 for sequence 0, which decodes, wanted at most 16");
  EXPECT_EQ(complaint([&] {
              state.append(std::array{SequenceTokens{0, 1}, SequenceTokens{1, 1, true}});
            }),
            "hybrid_state: decodes is set for sequence 1 after one that does not decode, wanted those first");
  EXPECT_EQ(state.tokens(0), 25);
  EXPECT_EQ(bits_of(state, 0), before);
}

}  // namespace
