// GGUF files as models: parity with the checkpoints that llama.cpp's converter made them from, tokenizers, and refusals.
#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "files/gguf.h"
#include "tests/support/complaint.h"
#include "tests/support/folder.h"
#include "tests/support/gguf_bytes.h"
#include "tests/support/golden_model.h"
#include "weft/chat.h"
#include "weft/tokenizer.h"

namespace weft {
namespace {

using namespace testing_support;

std::filesystem::path golden(const std::string& name) { return golden_models() / "gguf" / (name + ".gguf"); }

// The bars are those of the Hugging Face checkpoint: every type of these files holds its weights exactly.
void expect_parity(const std::vector<float>& got, const std::vector<float>& want, const std::string& what) {
  const Distance d = distance(got, want);
  EXPECT_LE(d.max, kMaxLogitError) << what;
  EXPECT_LE(d.rms, kRmsLogitError) << what;
}

TEST(GgufModel, DenseAndExpertsGiveTheLogitsOfTransformers) {
  for (const auto& [checkpoint, file] : {std::pair("qwen3_5", "qwen35"), std::pair("qwen3_5_moe", "qwen35moe")}) {
    const GoldenModel model(checkpoint, golden(file));
    EXPECT_EQ(model.config.head_map, HeadMap::tiled);
    expect_parity(model.logits(), model.want, file);
    std::vector<int64_t> cuts;
    for (int64_t t = 60; t < 130; ++t) cuts.push_back(t);
    expect_parity(model.logits(cuts), model.want, std::string(file) + ", decoded");
    GoldenModel reference(checkpoint, golden(file));
    reference.stream.backend = Backend::reference;
    expect_parity(reference.logits(), model.want, std::string(file) + ", reference");
  }
}

// The golden checkpoint of Qwen3-Next with the experts of layer 0 in its dense layer 1, as make_gguf.py gives it to the converter.
void write_all_experts(const std::filesystem::path& to) {
  const std::string bytes = text_of(golden_models() / "qwen3_next/model.safetensors");
  const files::SafeTensors file =
      files::parse_safetensors({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, "golden");
  nlohmann::json header;
  std::string data;
  const auto add = [&](const std::string& name, const files::SafeTensor& tensor) {
    const size_t begin = data.size();
    data.append(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
    header[name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  };
  const std::string first = "model.layers.0.mlp.", second = "model.layers.1.mlp.";
  for (const auto& [name, tensor] : file.tensors) {
    if (!name.starts_with(second)) add(name, tensor);
    if (name.starts_with(first)) add(second + name.substr(first.size()), tensor);
  }
  std::ofstream(to / "model.safetensors", std::ios::binary) << safetensors_bytes(header.dump(), data);
  nlohmann::json config = nlohmann::json::parse(text_of(golden_models() / "qwen3_next/config.json"));
  config["mlp_only_layers"] = nlohmann::json::array();
  std::ofstream(to / "config.json") << config.dump();
}

TEST(GgufModel, Qwen3NextGivesTheLogitsOfItsFolder) {
  const Folder folder;
  write_all_experts(folder.path());
  const GoldenModel original("qwen3_next", folder.path()), converted("qwen3_next", golden("qwen3next"));
  EXPECT_EQ(converted.config.head_map, HeadMap::grouped);
  const std::vector<float> want = original.logits();
  EXPECT_GT(distance(want, original.want).max, 0.1);  // another model than the golden one
  expect_parity(converted.logits(), want, "qwen3next");
}

TEST(GgufModel, ConfigIsThatOfTheFolder) {
  for (const auto& [checkpoint, file] : {std::pair("qwen3_5", "qwen35"), std::pair("qwen3_5_moe", "qwen35moe")}) {
    const GoldenModel original(checkpoint), converted(checkpoint, golden(file));
    const model::ModelConfig &a = original.config, &b = converted.config;
    EXPECT_EQ(a.family, b.family);
    EXPECT_EQ(a.vocab_size, b.vocab_size);
    EXPECT_EQ(a.hidden_size, b.hidden_size);
    ASSERT_EQ(a.layers.size(), b.layers.size());
    for (size_t i = 0; i < a.layers.size(); ++i) {
      EXPECT_EQ(a.layers[i].mixer, b.layers[i].mixer) << i;
      EXPECT_EQ(a.layers[i].feed_forward, b.layers[i].feed_forward) << i;
    }
    EXPECT_EQ(static_cast<float>(a.rms_norm_eps), static_cast<float>(b.rms_norm_eps));
    EXPECT_EQ(a.tie_word_embeddings, b.tie_word_embeddings);
    EXPECT_EQ(a.max_positions, b.max_positions);
    EXPECT_EQ(a.rope.frequencies, b.rope.frequencies);
    EXPECT_EQ(a.linear_value_head_dim, b.linear_value_head_dim);
    EXPECT_EQ(a.conv_width, b.conv_width);
    EXPECT_EQ(a.experts_per_token, b.experts_per_token);
    EXPECT_EQ(a.shared_expert_size, b.shared_expert_size);
  }
}

TEST(GgufModel, TokenizersEncodeAsTokenizerJson) {
  const Expected texts(golden_models() / "tokenizers.safetensors");
  const std::vector<char> all = texts.get<char>("texts");
  const std::vector<int32_t> offsets = texts.get<int32_t>("text_offsets");
  for (const auto& [folder, file] :
       {std::pair(golden_models() / "tokenizer_qwen2", "tokenizer_qwen2"),
        std::pair(golden_models() / "tokenizer_qwen3_5", "tokenizer_qwen3_5"), std::pair(shipped_model(), "tokenizer_weft-11m")}) {
    const Tokenizer json = Tokenizer::load(folder), gguf = Tokenizer::load(golden(file));
    for (int32_t id = 0; id < json.size(); ++id) {
      EXPECT_EQ(json.bytes(id), gguf.bytes(id)) << file << " " << id;
      EXPECT_EQ(json.is_special(id), gguf.is_special(id)) << file << " " << id;
    }
    // Added tokens of the small tokenizers strip white space, which the format cannot say: texts without them.
    const bool shipped = folder == shipped_model();
    size_t compared = 0;
    for (size_t i = 0; i + 1 < offsets.size(); ++i) {
      const std::string_view text(all.data() + offsets[i], static_cast<size_t>(offsets[i + 1] - offsets[i]));
      if (!shipped && text.find('<') != std::string_view::npos) continue;
      EXPECT_EQ(json.encode(text), gguf.encode(text)) << file << " text " << i;
      EXPECT_EQ(gguf.decode(gguf.encode(text)), json.decode(json.encode(text))) << file << " text " << i;
      ++compared;
    }
    EXPECT_GT(compared, offsets.size() / 2) << file;
  }
}

// A small legal model, whose entries and tensors tests replace.
struct Small {
  std::map<std::string, std::function<void(GgufBytes&, const std::string&)>> entries;
  std::map<std::string, std::vector<int64_t>> tensors;

  Small() {
    const auto number = [&](const std::string& key, uint32_t value) {
      entries["qwen35." + key] = [value](GgufBytes& file, const std::string& name) { file.set(name, value); };
    };
    entries["general.architecture"] = [](GgufBytes& file, const std::string& name) { file.set(name, "qwen35"); };
    number("block_count", 1);
    number("embedding_length", 32);
    number("feed_forward_length", 32);
    number("attention.head_count", 2);
    number("attention.head_count_kv", 1);
    number("attention.key_length", 8);
    number("ssm.conv_kernel", 4);
    number("ssm.state_size", 8);
    number("ssm.group_count", 1);
    number("ssm.time_step_rank", 2);
    number("ssm.inner_size", 16);
    tensors = {{"token_embd.weight", {16, 32}},
               {"output_norm.weight", {32}},
               {"blk.0.attn_norm.weight", {32}},
               {"blk.0.attn_qkv.weight", {32, 32}},
               {"blk.0.attn_gate.weight", {16, 32}},
               {"blk.0.ssm_beta.weight", {2, 32}},
               {"blk.0.ssm_alpha.weight", {2, 32}},
               {"blk.0.ssm_conv1d.weight", {32, 4}},
               {"blk.0.ssm_a", {2}},
               {"blk.0.ssm_dt.bias", {2}},
               {"blk.0.ssm_norm.weight", {8}},
               {"blk.0.ssm_out.weight", {32, 16}},
               {"blk.0.ffn_gate.weight", {32, 32}},
               {"blk.0.ffn_up.weight", {32, 32}},
               {"blk.0.ffn_down.weight", {32, 32}},
               {"blk.0.post_attention_norm.weight", {32}}};
  }
  template <class T>
  Small& set(const std::string& key, T value) {
    entries[key] = [value](GgufBytes& file, const std::string& name) { file.set(name, value); };
    return *this;
  }
  std::string bytes(const std::string& typed = "", const std::string& type = "") const {
    GgufBytes file;
    for (const auto& [key, add] : entries) add(file, key);
    for (const auto& [name, sizes] : tensors) {
      int64_t count = 1;
      for (int64_t size : sizes) count *= size;
      const files::GgufType* const kind = files::find_gguf_type(name == typed ? type : "F32");
      std::string data(static_cast<size_t>(count / kind->block * kind->bytes), '\0');
      if (name == "blk.0.ssm_a")
        for (size_t i = 0; i < data.size(); i += 4) std::memcpy(data.data() + i, &a, 4);
      file.tensor(name, sizes, kind->name, data);
    }
    return file.bytes();
  }
  float a = -1;
};

std::string said(const std::string& bytes) {
  const Folder folder;
  const std::filesystem::path path = folder.write("m.gguf", bytes);
  std::string sentence = complaint([&] { Model::load(path); });
  const size_t at = sentence.find(path.native() + ": ");
  return at == std::string::npos ? sentence : sentence.replace(at, path.native().size() + 2, "");
}
std::string said(const Small& small) { return said(small.bytes()); }

TEST(GgufModel, RefusalsNameWhatIsWrong) {
  EXPECT_EQ(said(Small()), "none");
  EXPECT_EQ(said(Small().set("general.architecture", "llama")),
            "general.architecture is 'llama', wanted qwen35, qwen35moe or qwen3next");
  EXPECT_EQ(said(Small().set("qwen35.embedding_length", 0u)),
            "qwen35.embedding_length is 0, wanted a whole number from 1 to 262144");
  EXPECT_EQ(said(Small().set("qwen35.attention.head_count", 3u).set("qwen35.attention.head_count_kv", 2u)),
            "qwen35.attention.head_count is 3, wanted a multiple of attention.head_count_kv = 2");
  EXPECT_EQ(said(Small().set("qwen35.nextn_predict_layers", 1u)),
            "qwen35.nextn_predict_layers is 1, wanted less than block_count = 1");
  Small more;
  more.tensors["blk.1.attn_norm.weight"] = {32};
  EXPECT_NE(said(more).find("blk.1.attn_norm.weight is in the file, but the model that the metadata describes has no such tensor"),
            std::string::npos)
      << said(more);
  EXPECT_EQ(said(Small().set("qwen35.rope.scaling.type", "longrope").set("qwen35.rope.scaling.factor", 2.0f)),
            "qwen35.rope.scaling.type is 'longrope', wanted 'none', 'linear' or 'yarn'");
  EXPECT_EQ(said(Small().set("qwen35.ssm.inner_size", 15u)),
            "qwen35.ssm.inner_size is 15, wanted a multiple of ssm.time_step_rank = 2");
  EXPECT_EQ(said(Small().set("tokenizer.ggml.model", "llama")), "tokenizer.ggml.model is 'llama', wanted 'gpt2', a byte-level BPE");
  EXPECT_EQ(said(Small().set("tokenizer.ggml.model", "gpt2").set("tokenizer.ggml.pre", "llama-bpe")),
            "tokenizer.ggml.pre is 'llama-bpe', wanted 'qwen2' or 'qwen35'");
  EXPECT_EQ(
      said(
          Small().set("tokenizer.ggml.model", "gpt2").set("tokenizer.ggml.pre", "qwen2").set("tokenizer.ggml.add_bos_token", true)),
      "tokenizer.ggml.add_bos_token is true, and Weft adds no tokens to a text; wanted false");
  EXPECT_EQ(said(Small().set("tokenizer.ggml.eos_token_id", 16u)),
            "tokenizer.ggml.eos_token_id is 16, wanted a whole number from 0 to 15");
  EXPECT_EQ(said(Small().set("qwen35.attention.layer_norm_rms_epsilon", 1e-12f)), "none");
  EXPECT_EQ(said(Small().set("qwen35.attention.layer_norm_rms_epsilon", 0.0f)),
            "qwen35.attention.layer_norm_rms_epsilon is 0, wanted a number from 1e-12 to 1");
  const auto said_of_layers = [](const auto& list) {
    Small small;
    small.entries["qwen35.attention.recurrent_layers"] = [&](GgufBytes& file, const std::string& name) { file.list(name, list); };
    return said(small);
  };
  const std::string wanted_layers = ", wanted a list of booleans for 1 layers";
  EXPECT_EQ(said_of_layers(std::vector<int32_t>{1}), "none");
  EXPECT_EQ(said_of_layers(std::vector<int32_t>{1, 1}), "qwen35.attention.recurrent_layers is a list of 2" + wanted_layers);
  EXPECT_EQ(said_of_layers(std::vector<float>{1}), "qwen35.attention.recurrent_layers is a list of 1" + wanted_layers);
  Small without;
  without.entries.erase("qwen35.block_count");
  EXPECT_EQ(said(without), "qwen35.block_count is missing");
  without = Small();
  without.tensors.erase("blk.0.ssm_out.weight");
  EXPECT_EQ(said(without), "checkpoint: blk.0.ssm_out.weight is missing, wanted [32, 16]");
  without = Small();
  without.tensors["blk.0.attn_gate.weight"] = {32, 16};
  EXPECT_EQ(said(without), "checkpoint: blk.0.attn_gate.weight is [32, 16], wanted [16, 32]");
  without = Small();
  without.tensors["rope_freqs.weight"] = {4};
  EXPECT_EQ(
      said(without),
      "checkpoint: rope_freqs.weight is in the file, but the model that the metadata describes has no such tensor (1 of them)");
  without = Small();
  without.a = -std::numeric_limits<float>::infinity();
  EXPECT_EQ(said(without), "checkpoint: blk.0.ssm_a holds -inf, wanted -e^A_log, which is negative");
  without.a = 0.5f;
  EXPECT_EQ(said(without), "checkpoint: blk.0.ssm_a holds 0.500000, wanted -e^A_log, which is negative");
  EXPECT_EQ(
      said(Small().bytes("blk.0.ffn_up.weight", "IQ4_NL")),
      "checkpoint: blk.0.ffn_up.weight is IQ4_NL, wanted F32, F16 or BF16, or blocks Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or "
      "Q6_K");
  EXPECT_EQ(said(Small().bytes("blk.0.attn_norm.weight", "Q8_0")),
            "checkpoint: blk.0.attn_norm.weight is Q8_0, wanted F32, F16 or BF16");
  EXPECT_EQ(said(Small().bytes("blk.0.ffn_up.weight", "Q8_0")), "none");
}

TEST(GgufModel, FingerprintIsOfTheContentNotOfTheContainer) {
  const Folder folder;
  const Model one = Model::load(folder.write("one.gguf", Small().bytes()));
  const Model named = Model::load(folder.write("named.gguf", Small().set("general.name", "another name").bytes()));
  EXPECT_EQ(one.fingerprint(), named.fingerprint());
  const Model other = Model::load(folder.write("other.gguf", Small().set("qwen35.attention.layer_norm_rms_epsilon", 0.5f).bytes()));
  EXPECT_NE(one.fingerprint(), other.fingerprint());
  Small values;
  values.a = -2;
  EXPECT_NE(Model::load(folder.write("values.gguf", values.bytes())).fingerprint(), one.fingerprint());
}

TEST(GgufModel, StateFilesWork) {
  const Folder folder;
  const Model model = Model::load(golden("qwen35"));
  const std::vector<int32_t> ids = {5, 7, 11, 13};
  HybridState state = model.create_state("8v4", 64), again = model.create_state("8v4", 64);
  std::vector<float> logits(static_cast<size_t>(model.vocab_size())), more(logits);
  model.append({}, state, {{.tokens = ids}});
  model.save(folder.path() / "s.state", state, 0, ids);
  EXPECT_EQ(model.restore(folder.path() / "s.state", again, 0), ids);
  const std::vector<int32_t> next = {17};
  model.append({}, state, {{.tokens = next, .logits = logits.data()}});
  model.append({}, again, {{.tokens = next, .logits = more.data()}});
  EXPECT_EQ(logits, more);
}

}  // namespace
}  // namespace weft
