// The runner against transformers: logits and hidden states of the golden models, for any split and batch of the tokens.
#include <gtest/gtest.h>

#include "cases/verify.h"
#include "tests/support/golden_model.h"

namespace {

using namespace weft;
using namespace weft::testing_support;

void expect_parity(const std::vector<float>& got, const std::vector<float>& want, const std::string& what) {
  const Distance d = distance(got, want);
  EXPECT_LE(d.max, kMaxLogitError) << what;
  EXPECT_LE(d.rms, kRmsLogitError) << what;
}

class Parity : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Families, Parity, testing::Values("qwen3_next", "qwen3_5", "qwen3_5_moe"));

TEST_P(Parity, GoldenLogitsHaveUnitDeviation) {
  const GoldenModel golden(GetParam());
  double sum = 0, squares = 0;
  for (float v : golden.want) sum += v, squares += static_cast<double>(v) * v;
  const auto n = static_cast<double>(golden.want.size());
  EXPECT_NEAR(std::sqrt(squares / n - sum / n * sum / n), 1, 0.05);
}

TEST_P(Parity, OneShot) {
  const GoldenModel golden(GetParam());
  expect_parity(golden.logits(), golden.want, "one shot");
}

TEST_P(Parity, EveryInstructionSetAndTheReference) {
  GoldenModel golden(GetParam());
  for (Isa isa : cases::usable_isas()) {
    golden.stream.isa = isa;
    expect_parity(golden.logits(), golden.want, isa_name(isa));
  }
  golden.stream.isa = Isa::best;
  golden.stream.backend = Backend::reference;
  expect_parity(golden.logits(), golden.want, "reference");
}

TEST_P(Parity, SplitPrefill) {
  const GoldenModel golden(GetParam());
  expect_parity(golden.logits({64}), golden.want, "64");
  expect_parity(golden.logits({1, 3, 20, 67, 100}), golden.want, "1, 3, 20, 67, 100");
  expect_parity(golden.logits({17, 34, 51, 129}), golden.want, "17, 34, 51, 129");
}

TEST_P(Parity, PrefillThenDecode) {
  const GoldenModel golden(GetParam());
  for (int64_t prefill : {0, 4, 60, 97}) {
    std::vector<int64_t> cuts;
    for (int64_t t = prefill; t < 130; ++t) cuts.push_back(t);
    expect_parity(golden.logits(cuts), golden.want, "prefill of " + std::to_string(prefill));
  }
}

TEST_P(Parity, RaggedBatch) {
  const GoldenModel golden(GetParam());
  std::vector<float> got(golden.want.size());
  HybridState state = golden.loaded.create_state("f32", 4096, golden.prompts());
  std::vector<ModelInput> inputs;
  for (int64_t n = golden.prompts() - 1; n >= 0; --n) inputs.push_back(golden.input(n, golden.begin(n), golden.end(n), got));
  golden.append(state, inputs);
  expect_parity(got, golden.want, "ragged batch");
}

// Some sequences prefill while others decode, in one call.
TEST_P(Parity, MixedBatchOfPrefillAndDecode) {
  const GoldenModel golden(GetParam());
  std::vector<float> got(golden.want.size());
  HybridState state = golden.loaded.create_state("f32", 4096, golden.prompts());
  std::vector<int64_t> at;
  for (int64_t n = 0; n < golden.prompts(); ++n) at.push_back(golden.begin(n));
  const int64_t steps[] = {3, 1, 40, 2, 1, 17};
  for (size_t round = 0; round < 60; ++round) {
    std::vector<ModelInput> inputs;
    for (int64_t n = 0; n < golden.prompts(); ++n) {
      int64_t& from = at[static_cast<size_t>(n)];
      const int64_t to = std::min(golden.end(n), from + steps[(round + static_cast<size_t>(n)) % std::size(steps)]);
      if (to > from) inputs.push_back(golden.input(n, from, to, got));
      from = to;
    }
    if (!inputs.empty()) golden.append(state, inputs);
  }
  expect_parity(got, golden.want, "mixed batch");
}

// The bits of a sequence do not depend on the other sequences of the batch.
TEST_P(Parity, BatchDoesNotChangeBits) {
  const GoldenModel golden(GetParam());
  const std::vector<float> alone = golden.logits();
  std::vector<float> got(golden.want.size());
  HybridState state = golden.loaded.create_state("f32", 4096, golden.prompts());
  std::vector<ModelInput> inputs;
  for (int64_t n = 0; n < golden.prompts(); ++n) inputs.push_back(golden.input(n, golden.begin(n), golden.end(n), got));
  golden.append(state, inputs);
  EXPECT_EQ(got, alone);
}

TEST_P(Parity, ThreadsDoNotChangeBits) {
  GoldenModel golden(GetParam());
  const std::vector<float> one = golden.logits({70});
  golden.stream.threads = 3;
  EXPECT_EQ(golden.logits({70}), one);
}

// A cut at 64 tokens, where the delta rule continues with the same bits; all other layers work token by token.
TEST_P(Parity, SplitAtSixtyFourDoesNotChangeBits) {
  const GoldenModel golden(GetParam());
  const std::vector<float> whole = golden.logits(), split = golden.logits({64});
  const auto first = golden.begin(3) * golden.config.vocab_size;  // the prompt of 130 tokens: both inputs are prefill
  EXPECT_TRUE(std::equal(whole.begin() + first, whole.end(), split.begin() + first));
}

// Comparing the residual stream after every layer shows which layer is at fault.
TEST_P(Parity, HiddenStatesOfEveryLayer) {
  const GoldenModel golden(GetParam());
  const auto layers = static_cast<int64_t>(golden.config.layers.size());
  std::vector<float> got(golden.want.size());
  HybridState state = golden.loaded.create_state("f32", 4096, golden.prompts());
  std::vector<ModelInput> inputs;
  for (int64_t n = 0; n < golden.prompts(); ++n) inputs.push_back(golden.input(n, golden.begin(n), golden.end(n), got));
  // The runner puts inputs of at most 16 tokens first; these are in that order already.
  std::map<int64_t, std::vector<float>> seen;
  golden.append(state, inputs, [&](int64_t layer, const float* rows) {
    seen[layer].assign(rows, rows + golden.tokens.size() * static_cast<size_t>(golden.config.hidden_size));
  });
  for (int64_t layer = -1; layer <= layers; ++layer) {
    const std::string name = layer < 0 ? "embedding" : layer == layers ? "final" : "layer." + std::to_string(layer);
    const std::vector<float> want = golden.expected.get<float>(name);
    double size = 0;
    for (float v : want) size = std::max(size, std::abs(static_cast<double>(v)));
    const Distance d = distance(seen[layer], want);
    // The embedding is exact. Each later number is a sum of a few hundred products, each rounded by 2^-24; errors grow with depth.
    EXPECT_LE(d.max, layer < 0 ? 0 : 4e-5 * size) << name;
    EXPECT_LE(d.rms, layer < 0 ? 0 : 4e-6 * size) << name;
  }
}

// Compressed caches give results near the exact ones; f16 gives the nearest.
TEST_P(Parity, CompressedCachesStayNear) {
  const GoldenModel golden(GetParam());
  double before = 0;
  for (const char* kv : {"f16", "8v8", "4v4", "2v2"}) {
    const Distance d = distance(golden.logits({}, kv), golden.want);
    EXPECT_GT(d.rms, before) << kv;
    EXPECT_LT(d.rms, 0.5) << kv;
    before = d.rms;
  }
}

}  // namespace
