// Binding a checkpoint: every variant of names, and an error message for every missing, extra, misshapen or mistyped tensor.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>

#include "model/parts.h"
#include "tests/support/complaint.h"
#include "tests/support/folder.h"
#include "tests/support/golden_model.h"

namespace {

using namespace weft;
using namespace weft::testing_support;
using nlohmann::json;

// The tensors of a golden checkpoint, which tests change and write as one file.
struct Copy {
  struct Entry {
    std::string dtype;
    std::vector<int64_t> shape;
    std::vector<uint8_t> bytes;
  };
  std::map<std::string, Entry> tensors;
  std::string config;
  Folder folder;

  explicit Copy(const std::string& name) {
    const std::filesystem::path from = golden_models() / name;
    config = text_of(from / "config.json");
    const model::Checkpoint checkpoint = model::Checkpoint::open(from);
    for (const auto& [key, view] : checkpoint.tensors()) {
      const auto* bytes = static_cast<const uint8_t*>(view.data);
      tensors[key] = {std::string(view.dtype_text), view.sizes, {bytes, bytes + view.bytes}};
    }
  }
  void rename(const std::string& from, const std::string& to) {
    auto node = tensors.extract(from);
    ASSERT_FALSE(node.empty()) << from;
    node.key() = to;
    tensors.insert(std::move(node));
  }
  // Replaces a part of every name.
  void rename_all(const std::string& from, const std::string& to) {
    std::map<std::string, Entry> renamed;
    for (auto& [name, entry] : tensors) {
      std::string other = name;
      if (const size_t at = other.find(from); at != std::string::npos) other.replace(at, from.size(), to);
      renamed[other] = entry;
    }
    tensors = renamed;
  }
  void write() const {
    json header = json::object();
    std::string data;
    for (const auto& [name, entry] : tensors) {
      header[name] = {
          {"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {data.size(), data.size() + entry.bytes.size()}}};
      data.append(entry.bytes.begin(), entry.bytes.end());
    }
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    const uint64_t size = text.size();
    folder.write("model.safetensors", std::string(reinterpret_cast<const char*>(&size), 8) + text + data);
    folder.write("config.json", config);
  }
  std::string load() const {
    write();
    return complaint([&] { Model::load(folder.path()); });
  }
  // Logits of the golden prompts from the written copy.
  std::vector<float> logits(const GoldenModel& golden) const {
    write();
    const Model model = Model::load(folder.path());
    std::vector<float> out(golden.want.size());
    HybridState state = model.create_state("f32", 4096, golden.prompts());
    std::vector<ModelInput> inputs;
    for (int64_t n = 0; n < golden.prompts(); ++n) inputs.push_back(golden.input(n, golden.begin(n), golden.end(n), out));
    model.append({}, state, inputs);
    return out;
  }
};

void expect_same_model(const Copy& copy, const char* name) {
  const GoldenModel golden(name);
  EXPECT_EQ(copy.logits(golden), golden.logits()) << name;
}

TEST(Weights, EveryPrefixIsTheSameModel) {
  for (const char* prefix : {"model.", "model.language_model.", "language_model.model."}) {
    Copy copy("qwen3_5");
    copy.rename_all("model.language_model.", prefix);
    expect_same_model(copy, "qwen3_5");
  }
}

TEST(Weights, ExpertsOneByOneOrFused) {
  Copy copy("qwen3_5_moe");  // fused in the file
  std::map<std::string, Copy::Entry> split;
  for (auto& [name, entry] : copy.tensors) {
    const size_t at = name.find("experts.gate_up_proj"), down = name.find("experts.down_proj");
    if (at == std::string::npos && down == std::string::npos) {
      split[name] = entry;
      continue;
    }
    const int64_t experts = entry.shape[0];
    const size_t each = entry.bytes.size() / static_cast<size_t>(experts);
    for (int64_t e = 0; e < experts; ++e) {
      const std::string stem = name.substr(0, at != std::string::npos ? at : down) + "experts." + std::to_string(e) + ".";
      const auto begin = entry.bytes.begin() + static_cast<int64_t>(each) * e;
      if (down != std::string::npos) {
        split[stem + "down_proj.weight"] = {
            entry.dtype, {entry.shape[1], entry.shape[2]}, {begin, begin + static_cast<int64_t>(each)}};
      } else {
        const auto half = static_cast<int64_t>(each / 2);
        split[stem + "gate_proj.weight"] = {entry.dtype, {entry.shape[1] / 2, entry.shape[2]}, {begin, begin + half}};
        split[stem + "up_proj.weight"] = {entry.dtype, {entry.shape[1] / 2, entry.shape[2]}, {begin + half, begin + 2 * half}};
      }
    }
  }
  copy.tensors = split;
  expect_same_model(copy, "qwen3_5_moe");
}

TEST(Weights, PackedProjectionsOfNextOrSplitOnes) {
  // The packed matrices, unpacked as the specification says, under the names of Qwen3.5.
  Copy copy("qwen3_next");
  const GoldenModel golden("qwen3_next");
  const model::ModelConfig& c = golden.config;
  const int64_t Hk = c.linear_key_heads, r = c.linear_value_heads / Hk, K = c.linear_key_head_dim, V = c.linear_value_head_dim;
  for (size_t i = 0; i < c.layers.size(); ++i) {
    const std::string stem = "model.layers." + std::to_string(i) + ".linear_attn.";
    if (!copy.tensors.count(stem + "in_proj_qkvz.weight")) continue;
    const Copy::Entry qkvz = copy.tensors[stem + "in_proj_qkvz.weight"], ba = copy.tensors[stem + "in_proj_ba.weight"];
    const int64_t row_bytes = c.hidden_size * 4;
    const auto rows = [&](Copy::Entry& to, const Copy::Entry& from, int64_t first, int64_t count) {
      to.bytes.insert(to.bytes.end(), from.bytes.begin() + first * row_bytes, from.bytes.begin() + (first + count) * row_bytes);
    };
    Copy::Entry qkv{"F32", {c.conv_channels(), c.hidden_size}, {}}, z{"F32", {c.linear_value_size(), c.hidden_size}, {}};
    Copy::Entry b{"F32", {c.linear_value_heads, c.hidden_size}, {}}, a = b;
    const int64_t group = 2 * K + 2 * r * V;
    for (int64_t g = 0; g < Hk; ++g) rows(qkv, qkvz, g * group, K);
    for (int64_t g = 0; g < Hk; ++g) rows(qkv, qkvz, g * group + K, K);
    for (int64_t g = 0; g < Hk; ++g) rows(qkv, qkvz, g * group + 2 * K, r * V);
    for (int64_t g = 0; g < Hk; ++g) rows(z, qkvz, g * group + 2 * K + r * V, r * V);
    for (int64_t g = 0; g < Hk; ++g) rows(b, ba, g * 2 * r, r), rows(a, ba, g * 2 * r + r, r);
    copy.tensors.erase(stem + "in_proj_qkvz.weight");
    copy.tensors.erase(stem + "in_proj_ba.weight");
    copy.tensors[stem + "in_proj_qkv.weight"] = qkv;
    copy.tensors[stem + "in_proj_z.weight"] = z;
    copy.tensors[stem + "in_proj_b.weight"] = b;
    copy.tensors[stem + "in_proj_a.weight"] = a;
  }
  expect_same_model(copy, "qwen3_next");
}

TEST(Weights, PartsThatAreNotRunAreIgnored) {
  Copy copy("qwen3_5");
  const Copy::Entry any = copy.tensors.begin()->second;
  for (const char* name : {"mtp.fc.weight", "model.mtp.norm.weight", "model.visual.blocks.0.attn.qkv.weight"})
    copy.tensors[name] = any;
  expect_same_model(copy, "qwen3_5");
}

// Checkpoints of cases/golden/models/tied, with the logits of the class of transformers that saved them, in f64. The outer flag of a
// nested configuration decides, and a head in the file counts whatever the flags say.
TEST(Weights, TiesAsTransformersDoes) {
  for (const char* name : {"outer_false_nested_false", "outer_false_nested_true", "outer_true_nested_false",
                           "outer_true_nested_true", "head_differs_nested", "head_differs_flat"}) {
    const std::filesystem::path directory = golden_models() / "tied" / name;
    const Expected expected(directory / "expected.safetensors");
    const std::vector<int32_t> tokens = expected.get<int32_t>("tokens");
    const std::vector<double> exact = expected.get<double>("logits");
    const Model model = Model::load(directory);
    std::vector<float> got(exact.size());
    HybridState state = model.create_state("f32", 64);
    model.append({}, state, {{.sequence = 0, .tokens = tokens, .logits = got.data(), .every_token = true}});
    const Distance d = distance(got, std::vector<float>(exact.begin(), exact.end()));
    EXPECT_LE(d.max, kMaxLogitError) << name;
    EXPECT_LE(d.rms, kRmsLogitError) << name;
    EXPECT_EQ(model.warnings().size(), std::string(name).starts_with("head_differs") ? 1u : 0u) << name;
  }
}

TEST(Weights, AHeadOfItsOwnIsUsedWithAWarning) {
  const Model model = Model::load(golden_models() / "tied/head_differs_flat");
  ASSERT_EQ(model.warnings().size(), 1u);
  EXPECT_EQ(
      model.warnings()[0],
      "config.json says that lm_head.weight is the embedding (tie_word_embeddings is true), but the file has a lm_head.weight "
      "with other values: it is used, as transformers uses it");
  const model::Weights& w = model::parts_of(model).weights;
  EXPECT_NE(w.head.data, w.embedding.data);
}

TEST(Weights, ATiedModelNeedsOneOfHeadAndEmbedding) {
  const std::string embedding = "model.language_model.embed_tokens.weight";
  Copy both("qwen3_5");
  both.tensors["lm_head.weight"] = both.tensors.at(embedding);
  expect_same_model(both, "qwen3_5");
  both.write();
  const Model shared = Model::load(both.folder.path());
  EXPECT_TRUE(shared.warnings().empty());
  EXPECT_EQ(model::parts_of(shared).weights.head.data, model::parts_of(shared).weights.embedding.data);

  Copy widened("qwen3_5");  // the same values, in another type
  Copy::Entry wide{"F32", both.tensors.at(embedding).shape, {}};
  const std::vector<uint8_t>& narrow = both.tensors.at(embedding).bytes;
  for (size_t i = 0; i < narrow.size(); i += 2) wide.bytes.insert(wide.bytes.end(), {0, 0, narrow[i], narrow[i + 1]});
  widened.tensors["lm_head.weight"] = wide;
  widened.write();
  EXPECT_TRUE(Model::load(widened.folder.path()).warnings().empty());

  Copy head("qwen3_5");
  head.rename(embedding, "lm_head.weight");
  expect_same_model(head, "qwen3_5");

  Copy misshapen("qwen3_5");
  misshapen.tensors["lm_head.weight"] = misshapen.tensors.at("model.language_model.norm.weight");
  EXPECT_EQ(misshapen.load(), "checkpoint: lm_head.weight is [40], wanted [101, 40]");

  Copy untied("qwen3_5");
  untied.config = std::regex_replace(untied.config, std::regex("\"tie_word_embeddings\": true"), "\"tie_word_embeddings\": false");
  EXPECT_EQ(untied.load(), "checkpoint: lm_head.weight is missing, wanted [101, 40]");
}

// The error message names the missing tensor, whichever it is. (Without one matrix of a packed or fused pair, the loader may name
// another variant of the same tensor.)
TEST(Weights, MissingTensorsAreNamed) {
  for (const char* family : {"qwen3_next", "qwen3_5", "qwen3_5_moe"}) {
    Copy copy(family);
    std::vector<std::string> names;
    for (const auto& [name, entry] : copy.tensors) names.push_back(name);
    for (const std::string& name : names) {
      auto node = copy.tensors.extract(name);
      const std::string said = copy.load();
      copy.tensors.insert(std::move(node));
      std::string part = name.substr(0, std::min(name.find("experts."), name.rfind("proj")));
      if (name.find("embed_tokens") != std::string::npos) part = "embed_tokens.weight";
      EXPECT_NE(said.find(part), std::string::npos) << name << ": " << said;
      EXPECT_NE(said.find("is missing"), std::string::npos) << name << ": " << said;
    }
  }
}

TEST(Weights, MisshapenTensorsAreNamed) {
  Copy copy("qwen3_5");
  Copy::Entry& q = copy.tensors.at("model.language_model.layers.1.self_attn.q_proj.weight");
  std::swap(q.shape[0], q.shape[1]);
  EXPECT_EQ(copy.load(), "checkpoint: model.language_model.layers.1.self_attn.q_proj.weight is [40, 384], wanted [384, 40]");
}

TEST(Weights, OtherTypesAreNamed) {
  Copy copy("qwen3_5");
  copy.tensors.at("model.language_model.norm.weight").dtype = "I16";
  EXPECT_EQ(copy.load(), "checkpoint: model.language_model.norm.weight is I16, wanted F32, F16 or BF16");
}

TEST(Weights, TensorsWithoutAPlaceAreNamed) {
  Copy copy("qwen3_5");
  copy.tensors["model.language_model.layers.1.self_attn.sinks"] = copy.tensors.at("model.language_model.norm.weight");
  copy.tensors["model.language_model.layers.7.input_layernorm.weight"] = copy.tensors.at("model.language_model.norm.weight");
  EXPECT_EQ(
      copy.load(),
      "checkpoint: model.language_model.layers.1.self_attn.sinks is in the file, but the model that config.json describes has no "
      "such tensor (2 of them, model.language_model.layers.7.input_layernorm.weight)");
}

TEST(Weights, NamesOfTensorsCannotWriteOnTheTerminal) {
  Copy copy("qwen3_5");
  for (const char* begins : {"\x1b[31m", "\x1b[32m"})
    copy.tensors[begins + std::string(100000, 'x')] = copy.tensors.at("model.language_model.norm.weight");
  const std::string said = copy.load();
  EXPECT_EQ(said.rfind("checkpoint: \\x1b[31mxxx", 0), 0u) << said;
  EXPECT_NE(said.find("(2 of them, \\x1b[32mxxx"), std::string::npos) << said;
  EXPECT_LT(said.size(), 1000u);
}

// head_dim is a field of its own; hidden_size / heads would give other shapes.
TEST(Weights, HeadDimFromHiddenSizeDoesNotFit) {
  Copy copy("qwen3_5");
  json config = json::parse(copy.config);
  config["text_config"]["head_dim"] = 8;
  copy.config = config.dump();
  EXPECT_NE(copy.load().find("self_attn.q_proj.weight is [384, 40], wanted [96, 40]"), std::string::npos) << copy.load();
}

// A tensor of one byte before all others moves them to odd addresses.
TEST(Weights, CopiesOfMisalignedTensorsArePlanned) {
  Copy copy("qwen3_5");
  copy.write();
  const auto planned = [&] {
    const Model model = Model::load(copy.folder.path());
    return model.bytes({}, model.plan("f16", 64), 64);
  };
  const ModelBytes aligned = planned();
  copy.tensors["language_model.mtp.x"] = {"U8", {1}, {0}};  // a part that is not run
  expect_same_model(copy, "qwen3_5");
  const ModelBytes odd = planned();
  int64_t bytes = 0;
  for (const auto& [name, entry] : copy.tensors)
    if (entry.dtype != "U8") bytes += static_cast<int64_t>((entry.bytes.size() + 7) / 8 * 8);
  EXPECT_EQ(odd.copies - aligned.copies, bytes);
  EXPECT_EQ(odd.weights - aligned.weights, bytes + 1);
  EXPECT_EQ(odd.total() - aligned.total(), bytes + 1);
}

TEST(Weights, MatricesStayWhereTheFileIsMapped) {
  const Model model = Model::load(shipped_model());
  const model::Weights& w = model::parts_of(model).weights;
  const model::TensorView* embedding = model::parts_of(model).checkpoint.find("model.embed_tokens.weight");
  ASSERT_TRUE(embedding);
  EXPECT_EQ(w.embedding.data, embedding->data);
  EXPECT_EQ(w.head.data, embedding->data) << "tied";
  EXPECT_EQ(w.embedding.type, model::WeightType::bf16);
  EXPECT_LT(w.copied_bytes, 64 * 1024);
}

}  // namespace
