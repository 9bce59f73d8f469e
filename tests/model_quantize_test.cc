// Quantised weights and the GGUF files that quantize() writes.
#include "weft/quantize.h"

#include <gtest/gtest.h>

#include "cases/memory.h"
#include "model/checkpoint/narrow.h"
#include "tests/support/complaint.h"
#include "tests/support/folder.h"
#include "tests/support/golden_model.h"
#include "weft/chat.h"

namespace weft {
namespace {

using namespace testing_support;
using model::WeightType;

TEST(Quantize, WritesTheBitsOfThePackageGguf) {
  const Expected golden(std::filesystem::path(WEFT_SOURCE_DIR) / "cases/golden/weight_blocks.safetensors");
  const std::vector<float> weights = golden.get<float>("weights");
  for (const auto& [type, name] :
       {std::pair(WeightType::f16, "F16"), std::pair(WeightType::bf16, "BF16"), std::pair(WeightType::q8_0, "Q8_0"),
        std::pair(WeightType::q4_0, "Q4_0"), std::pair(WeightType::q4_1, "Q4_1"), std::pair(WeightType::q5_0, "Q5_0"),
        std::pair(WeightType::q5_1, "Q5_1")}) {
    const auto wanted = golden.get<uint8_t>(std::string(name) + ".quantised");
    std::vector<uint8_t> got(wanted.size());
    ASSERT_EQ(model::weight_bytes(type, static_cast<int64_t>(weights.size())), static_cast<int64_t>(wanted.size()));
    model::narrow(type, weights.data(), static_cast<int64_t>(weights.size()), got.data());
    for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], wanted[i]) << name << " byte " << i;
  }
}

// A uniform quantiser of b bits over a range r has a mean squared error of (r / 2^b)^2 / 12. A group of 32 normal numbers spans about
// 4.1 deviations and one of 16 about 3.5; a search over scales is not worse, and the rounding of the scales to 6 bits or more adds
// less than a quarter.
TEST(Quantize, BlocksOf256AreCloseToTheirNumbers) {
  cases::Rng rng(9);
  std::vector<float> x(256 * 40), back(x.size());
  for (float& v : x) v = static_cast<float>(0.02 * rng.normal());
  for (const auto& [type, bits, range] : {std::tuple(WeightType::q4_k, 4, 4.1), std::tuple(WeightType::q5_k, 5, 4.1),
                                          std::tuple(WeightType::q6_k, 6, 3.9)}) {  // 6 bits are symmetric: twice the largest of 16
    const auto count = static_cast<int64_t>(x.size());
    std::vector<uint8_t> blocks(static_cast<size_t>(model::weight_bytes(type, count)));
    model::narrow(type, x.data(), count, blocks.data());
    model::widen(type, blocks.data(), 0, count, back.data());
    double error = 0, power = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      error += std::pow(static_cast<double>(x[i] - back[i]), 2);
      power += std::pow(static_cast<double>(x[i]), 2);
    }
    const double step = range / std::pow(2.0, bits);
    EXPECT_LE(error / power, 1.25 * step * step / 12) << model::weight_name(type);
    EXPECT_GE(error / power, 0.2 * step * step / 12) << model::weight_name(type);
  }
  // Zeros, one number, and numbers of one sign survive.
  for (WeightType type : {WeightType::q4_k, WeightType::q5_k, WeightType::q6_k})
    for (float value : {0.0f, 1.0f, -1.0f}) {
      std::vector<float> flat(256, value), again(256);
      std::vector<uint8_t> block(static_cast<size_t>(model::weight_bytes(type, 256)));
      model::narrow(type, flat.data(), 256, block.data());
      model::widen(type, block.data(), 0, 256, again.data());
      for (float v : again) EXPECT_NEAR(v, value, 0.02f) << model::weight_name(type);
    }
}

// Written in the type of the checkpoint, a file gives the logits of the checkpoint.
TEST(Quantize, FilesOfFullPrecisionKeepTheLogits) {
  for (const auto& [name, weights] : {std::pair("qwen3_5", "bf16"), std::pair("qwen3_5_moe", "f16")}) {
    const Folder folder;
    const QuantizeResult result = quantize(golden_models() / name, folder.path() / "m.gguf", {.weights = weights});
    EXPECT_EQ(result.bytes_after, static_cast<int64_t>(std::filesystem::file_size(folder.path() / "m.gguf")));
    const GoldenModel golden(name, folder.path() / "m.gguf");
    const Distance d = distance(golden.logits(), golden.want);
    EXPECT_LE(d.max, kMaxLogitError) << name;
    EXPECT_LE(d.rms, kRmsLogitError) << name;
  }
}

TEST(Quantize, TheBundledModelWritesTexts) {
  const Folder folder;
  const std::filesystem::path file = folder.path() / "m.gguf";
  const Model original = Model::load(shipped_model());
  const std::vector<int32_t> ids = original.encode("It was a dark night, and the ship");
  const auto logits_of = [&](const Model& model) {
    std::vector<float> logits(static_cast<size_t>(model.vocab_size()));
    HybridState state = model.create_state("f32", 64);
    model.append({}, state, {{.tokens = ids, .logits = logits.data()}});
    return logits;
  };
  const std::vector<float> want = logits_of(original);
  double deviation = 0;
  for (float v : want) deviation += static_cast<double>(v) * v;
  deviation = std::sqrt(deviation / static_cast<double>(want.size()));
  std::vector<int64_t> sizes;
  for (const char* weights : {"q8_0", "q4_k"}) {
    int64_t last = 0;
    QuantizeOptions options{.weights = weights, .threads = 1};
    options.on_progress = [&](int64_t done, int64_t all) {
      EXPECT_GE(done, last);
      EXPECT_LE(done, all);
      last = done;
      return true;
    };
    sizes.push_back(quantize(shipped_model(), file, options).bytes_after);
    const Model model = Model::load(file);
    EXPECT_EQ(model.encode("It was a dark night, and the ship"), ids);
    EXPECT_EQ(model.ends(*model.begin_token()), true);
    const Distance d = distance(logits_of(model), want);
    EXPECT_GT(d.rms, 0) << weights;
    EXPECT_LT(d.rms / deviation, weights[1] == '8' ? 0.01 : 0.15) << weights;
  }
  EXPECT_LT(sizes[1], sizes[0]);
}

TEST(Quantize, AFailureLeavesNothingBehind) {
  const Folder folder;
  const std::filesystem::path file = folder.path() / "m.gguf";
  quantize(golden_models() / "qwen3_5", file, {.weights = "q8_0"});
  const std::string old = text_of(file);
  const std::string shard = (folder.path() / "model.safetensors").string();
  EXPECT_EQ(complaint([&] { quantize(golden_models() / "qwen3_5", shard); }),
            "quantize: file is " + shard + ", wanted a name that ends in .gguf");
  EXPECT_EQ(complaint([&] { quantize(golden_models() / "qwen3_5", file, {.weights = "q2_k"}); }),
            "quantize: weights is 'q2_k', wanted one of f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k");
  EXPECT_NE(complaint([&] { quantize(golden_models() / "qwen3_next", file); }).find("mlp_only_layers makes layers without experts"),
            std::string::npos);
  const Folder ends;
  for (const auto& entry : std::filesystem::directory_iterator(golden_models() / "qwen3_5"))
    std::filesystem::copy(entry.path(), ends.path() / entry.path().filename());
  ends.write("generation_config.json", R"({"eos_token_id": [1, 2, 3, 4]})");
  EXPECT_EQ(complaint([&] { quantize(ends.path(), file); }),
            ends.path().native() + ": eos_token_id has 4 tokens, and the format holds 3");
  QuantizeOptions stop;
  stop.on_progress = [](int64_t, int64_t) { return false; };
  EXPECT_TRUE(quantize(golden_models() / "qwen3_5", file, stop).stopped);
  EXPECT_EQ(text_of(file), old);
  int entries = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder.path())) ++entries;
  EXPECT_EQ(entries, 1);
}

}  // namespace
}  // namespace weft
