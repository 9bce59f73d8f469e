// KV policies (formats by layer in one string), and the sampler.
#include <gtest/gtest.h>

#include <cmath>

#include "model/state/kv_policy.h"
#include "tests/support/complaint.h"
#include "weft/model.h"
#include "weft/sampler.h"

namespace {

using namespace weft;

model::ModelConfig config(int64_t attention_layers, int64_t head_dim = 128) {
  model::ModelConfig c;
  c.head_dim = head_dim;
  for (int64_t i = 0; i < attention_layers; ++i)
    for (int64_t j = 0; j < 4; ++j)
      c.layers.push_back({j == 3 ? model::LayerKind::full_attention : model::LayerKind::linear_attention, {}});
  return c;
}

std::vector<std::string> ids(const char* policy, int64_t layers = 4) {
  std::vector<std::string> out;
  for (const KvRecipe& recipe : model::parse_kv_policy(policy, config(layers))) out.push_back(recipe.id);
  return out;
}

TEST(KvPolicy, OneRecipeForAll) {
  EXPECT_EQ(ids("8v4", 3), (std::vector<std::string>(3, "weft1-8v4")));
  EXPECT_EQ(ids("f16", 2), (std::vector<std::string>(2, kv_recipe("f16", 128, 128).id)));
  EXPECT_EQ(ids("8v4", 0), std::vector<std::string>{});
}

TEST(KvPolicy, ExceptionsByAttentionLayer) {
  const std::string f16 = kv_recipe("f16", 128, 128).id;
  EXPECT_EQ(ids("8v4,0-1:f16"), (std::vector<std::string>{f16, f16, "weft1-8v4", "weft1-8v4"}));
  EXPECT_EQ(ids("4v4,3:8v8,0:f16"), (std::vector<std::string>{f16, "weft1-4v4", "weft1-4v4", "weft1-8v8"}));
  EXPECT_EQ(ids("4v4,0-3:8v8,1-2:2v2"), (std::vector<std::string>{"weft1-8v8", "weft1-2v2", "weft1-2v2", "weft1-8v8"}));
}

TEST(KvPolicy, SignsDifferFromLayerToLayer) {
  const std::vector<KvRecipe> recipes = model::parse_kv_policy("4v4", config(2));
  EXPECT_EQ(recipes[0].k.seed, 3u);
  EXPECT_EQ(recipes[1].k.seed, 7u);
}

TEST(KvPolicy, RefusesWithASentence) {
  const auto said = [](const char* policy) { return complaint([&] { ids(policy); }); };
  EXPECT_EQ(said("0:f16"), "kv policy: '0:f16' names layers, wanted a recipe for all layers first, e.g. 8v4,0:f16");
  EXPECT_EQ(said("8v4,f16"), "kv policy: 'f16' names no layers, wanted e.g. 0-1:f16");
  EXPECT_EQ(said("8v4,4:f16"), "kv policy: '4:f16' names layers 4, wanted a range within the 4 attention layers 0 to 3");
  EXPECT_EQ(said("8v4,2-1:f16"), "kv policy: '2-1:f16' names layers 2-1, wanted a range within the 4 attention layers 0 to 3");
  EXPECT_EQ(said("8v4,x:f16"), "kv policy: 'x:f16' has 'x' for a layer, wanted a number or a range such as 0-1");
  EXPECT_EQ(said("8v4,-1:f16"), "kv policy: '-1:f16' has '' for a layer, wanted a number or a range such as 0-1");
  EXPECT_EQ(said("8v4,99999999999999999999:f16"),
            "kv policy: '99999999999999999999:f16' has '99999999999999999999' for a layer, wanted a number or a range such as 0-1");
  EXPECT_EQ(said("8v4,"), "kv policy: '8v4,' ends with a comma, wanted layers and a recipe after it");
  for (const char* policy : {"", "9v9", "8v4,0:nonsense", "8x4"})
    EXPECT_NE(said(policy).find("is not a recipe for heads of size 128"), std::string::npos) << policy << ": " << said(policy);
  // TQ exists for heads of 256 and 512 only.
  EXPECT_NE(said("tq4").find("is not a recipe for heads of size 128"), std::string::npos);
}

// ---- sampling

TEST(Sampler, ZeroTemperatureTakesTheFirstOfTheMostProbable) {
  Sampler sampler({.temperature = 0});
  EXPECT_EQ(sampler(std::vector<float>{1, 5, 5, -2}), 1);
  EXPECT_EQ(sampler(std::vector<float>{NAN, -INFINITY, -7, NAN}), 2);
}

// The same rule as ModelInput::best.
TEST(Sampler, InfinityIsTheMostProbable) {
  for (double temperature : {0.0, 0.8})
    for (double top_p : {0.5, 1.0})
      EXPECT_EQ(Sampler({.temperature = temperature, .top_p = top_p})(std::vector<float>{1, NAN, INFINITY, INFINITY, -INFINITY}),
                2);
}

// Shares of 20000 draws, against probabilities p with a standard deviation of (p (1 - p) / n)^1/2 <= 0.0036; 5 of them.
void expect_shares(const Sampling& sampling, const std::vector<float>& logits, const std::vector<double>& want) {
  Sampler sampler(sampling);
  std::vector<double> got(logits.size());
  for (int i = 0; i < 20000; ++i) got[static_cast<size_t>(sampler(logits))] += 1.0 / 20000;
  for (size_t i = 0; i < want.size(); ++i) {
    if (want[i] == 0)
      EXPECT_EQ(got[i], 0) << i;
    else
      EXPECT_NEAR(got[i], want[i], 0.018) << i;
  }
}

TEST(Sampler, FollowsTheProbabilities) {
  const std::vector<float> logits{std::log(0.1f), std::log(0.4f), std::log(0.2f), std::log(0.3f)};
  expect_shares({.temperature = 1, .top_p = 1, .seed = 3}, logits, {0.1, 0.4, 0.2, 0.3});
  expect_shares({.temperature = 1, .top_p = 1, .top_k = 2, .seed = 4}, logits, {0, 4 / 7.0, 0, 3 / 7.0});
  expect_shares({.temperature = 1, .top_p = 0.65, .seed = 5}, logits, {0, 4 / 7.0, 0, 3 / 7.0});
  expect_shares({.temperature = 1, .top_p = 0.75, .seed = 6}, logits, {0, 4 / 9.0, 2 / 9.0, 3 / 9.0});
  expect_shares({.temperature = 1, .top_p = 1e-9, .seed = 7}, logits, {0, 1, 0, 0});
  // top_p of the three that top_k leaves: 4/9 + 3/9 >= 0.7.
  expect_shares({.temperature = 1, .top_p = 0.7, .top_k = 3, .seed = 8}, logits, {0, 4 / 7.0, 0, 3 / 7.0});
  // Half the temperature squares the probabilities.
  expect_shares({.temperature = 0.5, .top_p = 1, .seed = 9}, logits, {1 / 30.0, 16 / 30.0, 4 / 30.0, 9 / 30.0});
  expect_shares({.temperature = 1, .top_p = 1, .top_k = 100, .seed = 10}, logits, {0.1, 0.4, 0.2, 0.3});
}

TEST(Sampler, MinPIsAShareOfTheMostProbable) {
  const std::vector<float> logits{std::log(0.1f), std::log(0.4f), std::log(0.2f), std::log(0.3f)};
  expect_shares({.temperature = 1, .top_p = 1, .seed = 3, .min_p = 0.49}, logits, {0, 4 / 9.0, 2 / 9.0, 3 / 9.0});
  expect_shares({.temperature = 1, .top_p = 1, .seed = 4, .min_p = 1}, logits, {0, 1, 0, 0});
  // At half the temperature the shares of 0.4 are squared: 1/16, 1, 1/4, 9/16.
  expect_shares({.temperature = 0.5, .top_p = 1, .seed = 5, .min_p = 0.5}, logits, {0, 16 / 25.0, 0, 9 / 25.0});
  // After top_p, which leaves 0.4, 0.3 and 0.2.
  expect_shares({.temperature = 1, .top_p = 0.75, .seed = 6, .min_p = 0.6}, logits, {0, 4 / 7.0, 0, 3 / 7.0});
  expect_shares({.temperature = 1, .top_p = 1, .top_k = 3, .seed = 7, .min_p = 0.1}, logits, {0, 4 / 9.0, 2 / 9.0, 3 / 9.0});
}

// Repetition penalty: divides positive logits and multiplies negative ones, of tokens in the prompt or written. Presence penalty:
// subtracted once, from tokens that were written.
TEST(Sampler, Penalties) {
  const std::vector<float> logits{4, 3, -1, -1.5f};
  Sampler repetition({.temperature = 0, .repetition_penalty = 2});
  EXPECT_EQ(repetition(logits), 0);
  EXPECT_EQ(repetition(logits), 1) << "4 / 2 is less than 3";
  EXPECT_EQ(repetition(logits), 0) << "4 / 2 is more than 3 / 2, and counts once";
  Sampler prompt({.temperature = 0, .repetition_penalty = 5});
  prompt.see(std::vector<int32_t>{0, 1, 2});
  EXPECT_EQ(prompt(std::vector<float>{-1, -1, -1, -4}), 3) << "-1 * 5 is less than -4";
  Sampler presence({.temperature = 0, .presence_penalty = 2});
  presence.see(std::vector<int32_t>{0});
  EXPECT_EQ(presence(logits), 0) << "the prompt does not count";
  EXPECT_EQ(presence(logits), 1);
  EXPECT_EQ(presence(logits), 0) << "4 - 2 is more than 3 - 2";
  Sampler frequency({.temperature = 0, .frequency_penalty = 0.75});
  for (int expected : {0, 0, 1, 0, 1, 0}) EXPECT_EQ(frequency(logits), expected) << "4, 3.25, 2.5, ... beside 3, 2.25, ...";
  Sampler outside({.temperature = 0, .repetition_penalty = 2});
  outside.see(std::vector<int32_t>{-1, 100, INT32_MAX});
  EXPECT_EQ(outside(logits), 0);
  // Neutral values change nothing.
  Sampler neutral({.temperature = 1, .seed = 9}), same({.temperature = 1, .seed = 9, .min_p = 0, .repetition_penalty = 1});
  neutral.see(std::vector<int32_t>{0, 1});
  for (int i = 0; i < 20; ++i) EXPECT_EQ(neutral(logits), same(logits));
}

TEST(Sampler, TheSeedDecides) {
  const std::vector<float> logits(1000, 0.0f);
  const auto draw = [&](uint64_t seed) {
    Sampler sampler({.temperature = 1, .top_p = 0.9, .seed = seed});
    std::vector<int32_t> tokens;
    for (int i = 0; i < 20; ++i) tokens.push_back(sampler(logits));
    return tokens;
  };
  EXPECT_EQ(draw(1), draw(1));
  EXPECT_NE(draw(1), draw(2));
}

TEST(Sampler, RefusesWithASentence) {
  EXPECT_NE(complaint([] { Sampler({.temperature = -1}); }), "none");
  EXPECT_NE(complaint([] { Sampler({.temperature = NAN}); }), "none");
  EXPECT_NE(complaint([] { Sampler({.top_p = 0}); }), "none");
  EXPECT_NE(complaint([] { Sampler({.top_p = 1.5}); }), "none");
  EXPECT_NE(complaint([] { Sampler({.top_k = -1}); }), "none");
  EXPECT_EQ(complaint([] { Sampler({.min_p = 1.5}); }), "sampler: min_p is 1.500000, wanted 0 to 1");
  EXPECT_NE(complaint([] { Sampler({.repetition_penalty = 0}); }), "none");
  EXPECT_NE(complaint([] { Sampler({.presence_penalty = NAN}); }), "none");
  EXPECT_NE(complaint([] { Sampler({.frequency_penalty = 1001}); }), "none");
  EXPECT_EQ(complaint([] {
              Sampler({})(std::vector<float>{NAN, -INFINITY});
            }),
            "sampler: logits hold nothing but NaN and -infinity, wanted at least one number");
}

}  // namespace
