// Reading config.json and generation_config.json: every spelling of a field, every default, every refusal.
#include "model/checkpoint/config.h"

#include <gtest/gtest.h>

#include <cmath>

#include "files/json_text.h"
#include "tests/support/complaint.h"
#include "tests/support/folder.h"

namespace weft::model {
namespace {

using files::Json;

const std::filesystem::path kSource = WEFT_SOURCE_DIR;

// A small legal config with the fields of `change` replaced; a null removes a field.
std::string config_text(const std::string& change, const std::string& type = "qwen3_5_text") {
  Json json = {{"model_type", type},
               {"vocab_size", 101},
               {"hidden_size", 40},
               {"num_hidden_layers", 4},
               {"num_attention_heads", 6},
               {"num_key_value_heads", 2},
               {"head_dim", 32},
               {"linear_num_key_heads", 2},
               {"linear_num_value_heads", 6},
               {"linear_key_head_dim", 16},
               {"linear_value_head_dim", 24},
               {"intermediate_size", 52}};
  json.merge_patch(Json::parse(change));
  return json.dump();
}
ModelConfig changed(const std::string& change, const std::string& type = "qwen3_5_text") {
  return parse_config(config_text(change, type));
}
std::string fault(const std::string& change, const std::string& type = "qwen3_5_text") {
  return complaint([&] { changed(change, type); });
}

std::string kinds(const ModelConfig& config) {
  std::string text;
  for (const LayerConfig& layer : config.layers) {
    text += layer.mixer == LayerKind::full_attention ? 'A' : 'D';
    text += layer.feed_forward == FeedForward::experts ? 'e' : 'd';
  }
  return text;
}

TEST(Config, OfTheShippedModel) {
  const ModelConfig config = read_config(kSource / "models/weft-11m");
  EXPECT_EQ(config.family, Family::qwen3_5);
  EXPECT_EQ(config.model_type, "qwen3_5_text");
  EXPECT_EQ(config.vocab_size, 6144);
  EXPECT_EQ(config.hidden_size, 256);
  EXPECT_EQ(kinds(config), "DdDdDdAdDdDdDdAd");
  EXPECT_EQ(config.layers_of(LayerKind::full_attention), 2);
  EXPECT_EQ(config.attention_heads, 4);
  EXPECT_EQ(config.kv_heads, 2);
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_EQ(config.linear_key_heads, 2);
  EXPECT_EQ(config.linear_value_heads, 4);
  EXPECT_EQ(config.conv_channels(), 1024);
  EXPECT_EQ(config.conv_width, 4);
  EXPECT_EQ(config.intermediate_size, 768);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_EQ(config.max_positions, 32768);
  EXPECT_EQ(config.eos_ids, std::vector<int32_t>{0});
  EXPECT_EQ(config.bos_id, std::nullopt);
  EXPECT_EQ(config.rope.channels(), 32);
  EXPECT_DOUBLE_EQ(config.rope.frequencies[1], std::pow(1e6, -2.0 / 32));
  EXPECT_EQ(config.generation.do_sample, true);
  EXPECT_EQ(config.generation.temperature, 0.8);
  EXPECT_EQ(config.generation.top_p, 0.95);
  EXPECT_EQ(config.generation.top_k, std::nullopt);
  EXPECT_EQ(config.generation.max_new_tokens, 200);
}

TEST(Config, OfTheGoldenModels) {
  const ModelConfig next = read_config(kSource / "cases/golden/models/qwen3_next");
  EXPECT_EQ(next.family, Family::qwen3_next);
  EXPECT_EQ(kinds(next), "DeDdDeAe");
  EXPECT_EQ(next.experts, 7);
  EXPECT_EQ(next.experts_per_token, 3);
  EXPECT_EQ(next.expert_size, 20);
  EXPECT_EQ(next.shared_expert_size, 12);
  EXPECT_EQ(next.intermediate_size, 28);
  EXPECT_EQ(next.rope.channels(), 8);
  EXPECT_DOUBLE_EQ(next.rope.frequencies[3], std::pow(1e4, -6.0 / 8));
  EXPECT_FALSE(next.tie_word_embeddings);

  const ModelConfig dense = read_config(kSource / "cases/golden/models/qwen3_5");
  EXPECT_EQ(dense.family, Family::qwen3_5);
  EXPECT_EQ(kinds(dense), "DdAdDdDd");
  EXPECT_TRUE(dense.attention_bias);
  EXPECT_TRUE(dense.tie_word_embeddings);
  EXPECT_EQ(dense.rms_norm_eps, 1e-5);
  EXPECT_EQ(dense.eos_ids, std::vector<int32_t>{3});

  const ModelConfig moe = read_config(kSource / "cases/golden/models/qwen3_5_moe");
  EXPECT_EQ(moe.family, Family::qwen3_5_moe);
  EXPECT_EQ(kinds(moe), "DeDeDeAeDeDeDeAe");
  EXPECT_EQ(moe.intermediate_size, 0);
  EXPECT_EQ(moe.conv_width, 2);
  EXPECT_EQ(moe.rope.channels(), 16);
}

TEST(Config, DefaultsOfEachFamily) {
  const ModelConfig next = parse_config(R"({"model_type":"qwen3_next"})");
  EXPECT_EQ(next.vocab_size, 151936);
  EXPECT_EQ(next.hidden_size, 2048);
  EXPECT_EQ(next.layers.size(), 48u);
  EXPECT_EQ(next.layers_of(LayerKind::full_attention), 12);
  EXPECT_EQ(next.kv_heads, 2);
  EXPECT_EQ(next.experts, 512);
  EXPECT_EQ(next.experts_per_token, 10);
  EXPECT_EQ(next.rope.channels(), 64);
  EXPECT_DOUBLE_EQ(next.rope.frequencies[1], std::pow(1e4, -2.0 / 64));
  const ModelConfig dense = parse_config(R"({"model_type":"qwen3_5","text_config":{}})");
  EXPECT_EQ(dense.vocab_size, 248320);
  EXPECT_EQ(dense.hidden_size, 4096);
  EXPECT_EQ(dense.layers.size(), 32u);
  EXPECT_EQ(dense.intermediate_size, 12288);
  EXPECT_EQ(dense.kv_heads, 4);
  EXPECT_EQ(dense.linear_key_heads, 16);
  EXPECT_EQ(dense.linear_value_heads, 32);
  const ModelConfig moe = parse_config(R"({"model_type":"qwen3_5_moe","text_config":{"model_type":"qwen3_5_moe_text"}})");
  EXPECT_EQ(moe.hidden_size, 2048);
  EXPECT_EQ(moe.layers.size(), 40u);
  EXPECT_EQ(moe.experts, 256);
  EXPECT_EQ(moe.experts_per_token, 8);
  EXPECT_TRUE(moe.normalize_expert_weights);
  EXPECT_EQ(moe.max_positions, 0);
}

TEST(Config, SpellingsOfLayers) {
  EXPECT_EQ(kinds(changed(R"({"layer_types":["mamba","attention","linear_attention","full_attention"]})")), "DdAdDdAd");
  EXPECT_EQ(kinds(changed(R"({"full_attention_interval":2})")), "DdAdDdAd");
  EXPECT_EQ(kinds(changed(R"({"full_attention_interval":1})")), "AdAdAdAd");
  EXPECT_EQ(kinds(changed(R"({"full_attention_interval":9})")), "DdDdDdDd");
  EXPECT_EQ(kinds(changed(R"({"num_experts":7,"num_experts_per_tok":2,"decoder_sparse_step":2})", "qwen3_next")), "DdDeDdAe");
  EXPECT_EQ(kinds(changed(R"({"num_experts":0})", "qwen3_next")), "DdDdDdAd");
  EXPECT_FALSE(changed(R"({"norm_topk_prob":false})", "qwen3_next").normalize_expert_weights);
  EXPECT_TRUE(changed(R"({"norm_topk_prob":false})", "qwen3_5_moe_text").normalize_expert_weights);  // Qwen3.5 ignores the field
}

TEST(Config, TiesAndEndsFromEveryPlace) {
  const auto parse = [](const std::string& outer, const std::string& generation = "{}") {
    Json json = Json::parse(outer);
    json["model_type"] = "qwen3_5";
    return parse_config(json.dump(), generation);
  };
  const auto tied = [&](const char* text) { return parse(text).tie_word_embeddings; };
  EXPECT_TRUE(tied(R"({"tie_word_embeddings":true,"text_config":{}})"));
  EXPECT_TRUE(tied(R"({"tie_word_embeddings":true,"text_config":{"tie_word_embeddings":false}})"));
  EXPECT_FALSE(tied(R"({"tie_word_embeddings":false,"text_config":{"tie_word_embeddings":true}})"));
  EXPECT_TRUE(tied(R"({"text_config":{"tie_word_embeddings":true}})"));
  EXPECT_FALSE(parse(R"({"text_config":{}})").tie_word_embeddings);
  const ModelConfig config = parse(R"({"eos_token_id":7,"bos_token_id":1,"text_config":{"eos_token_id":[5,7]}})",
                                   R"({"eos_token_id":[9,5],"top_k":20,"repetition_penalty":1.05})");
  EXPECT_EQ(config.eos_ids, (std::vector<int32_t>{5, 7, 9}));
  EXPECT_TRUE(config.is_eos(9));
  EXPECT_FALSE(config.is_eos(1));
  EXPECT_EQ(config.bos_id, 1);
  EXPECT_EQ(config.generation.top_k, 20);
  EXPECT_EQ(config.generation.repetition_penalty, 1.05);
}

// Numbers of transformers' ROPE_INIT_FUNCTIONS for head_dim 32, half of it rotary, theta 1e6 (float32).
TEST(Config, RopeOfEveryKind) {
  const RopeConfig plain = changed(R"({"rope_parameters":{"rope_theta":1e6,"partial_rotary_factor":0.5}})").rope;
  ASSERT_EQ(plain.frequencies.size(), 8u);
  EXPECT_EQ(plain.frequencies[0], 1);
  EXPECT_EQ(plain.factor, 1);
  const RopeConfig old = changed(R"({"rope_theta":1e6,"partial_rotary_factor":0.5,"rope_scaling":{"type":"mrope"}})").rope;
  EXPECT_EQ(old.frequencies, plain.frequencies);
  const RopeConfig both = changed(R"({"rope_theta":5,"rope_parameters":{"rope_theta":1e6,"partial_rotary_factor":0.5}})").rope;
  EXPECT_EQ(both.frequencies, plain.frequencies);
  const RopeConfig linear =
      changed(R"({"rope_theta":1e6,"partial_rotary_factor":0.5,"rope_scaling":{"rope_type":"linear","factor":4}})").rope;
  EXPECT_DOUBLE_EQ(linear.frequencies[3], plain.frequencies[3] / 4);
  const RopeConfig yarn =
      changed(R"({"rope_parameters":{"rope_type":"yarn","rope_theta":1e6,"partial_rotary_factor":0.5,"factor":4.0,
                                      "original_max_position_embeddings":4096}})")
          .rope;
  const double golden[] = {
      1, 0.177827939, 0.023717083, 0.00281170662, 0.000250000012, 4.44569851e-05, 7.90569356e-06, 1.40585337e-06};
  EXPECT_NEAR(yarn.factor, 1.13862943611, 1e-7);
  for (size_t j = 0; j < 8; ++j) EXPECT_NEAR(yarn.frequencies[j] / golden[j], 1, 3e-7) << j;
}

TEST(Config, RefusesWithSentences) {
  EXPECT_EQ(fault(R"({"model_type":null})"),
            "config.json: model_type is missing, wanted qwen3_next, qwen3_5, qwen3_5_text, qwen3_5_moe or qwen3_5_moe_text");
  EXPECT_EQ(fault(R"({"model_type":"llama"})"),
            "config.json: model_type is 'llama', wanted qwen3_next, qwen3_5, qwen3_5_text, qwen3_5_moe or qwen3_5_moe_text");
  EXPECT_EQ(fault(R"({"hidden_size":-40})"), "config.json: hidden_size is -40, wanted a whole number from 1 to 262144");
  EXPECT_EQ(fault(R"({"hidden_size":40.5})"), "config.json: hidden_size is 40.5, wanted a whole number from 1 to 262144");
  EXPECT_EQ(fault(R"({"num_hidden_layers":1000000000})"),
            "config.json: num_hidden_layers is 1000000000, wanted a whole number from 1 to 1024");
  EXPECT_EQ(fault(R"({"vocab_size":300000000000000000000})"),
            "config.json: vocab_size is 3e+20, wanted a whole number from 1 to 16777216");
  EXPECT_EQ(fault(R"({"vocab_size":"many"})"), "config.json: vocab_size is 'many', wanted a whole number from 1 to 16777216");
  EXPECT_EQ(fault(R"({"num_attention_heads":5})"),
            "config.json: num_attention_heads is 5, wanted a multiple of num_key_value_heads = 2");
  EXPECT_EQ(fault(R"({"head_dim":20})"), "config.json: head_dim is 20, wanted a multiple of 8");
  EXPECT_EQ(fault(R"({"linear_num_value_heads":3})"),
            "config.json: linear_num_value_heads is 3, wanted a multiple of linear_num_key_heads = 2");
  EXPECT_EQ(fault(R"({"linear_key_head_dim":512})"),
            "config.json: linear_key_head_dim is 512, wanted a whole number from 1 to 256");
  EXPECT_EQ(fault(R"({"linear_conv_kernel_dim":1})"),
            "config.json: linear_conv_kernel_dim is 1, wanted a whole number from 2 to 8");
  EXPECT_EQ(fault(R"({"rms_norm_eps":0})"), "config.json: rms_norm_eps is 0, wanted a number from 1e-12 to 1");
  EXPECT_EQ(fault(R"({"hidden_act":"gelu"})"), "config.json: hidden_act is 'gelu', wanted 'silu'");
  EXPECT_EQ(fault(R"({"attn_output_gate":false})"),
            "config.json: attn_output_gate is false, wanted true: attention without an output gate is not supported");
  EXPECT_EQ(fault(R"({"quantization_config":{"quant_method":"fp8"}})"),
            "config.json: quantization_config is given, wanted unquantised f32, f16 or bf16 weights");
  EXPECT_EQ(fault(R"({"layer_types":["full_attention"]})"), "config.json: layer_types has 1 entries, wanted num_hidden_layers = 4");
  EXPECT_EQ(fault(R"({"layer_types":["mamba","mamba","mamba","sliding"]})"),
            "config.json: layer_types[3] is 'sliding', wanted 'linear_attention' or 'full_attention'");
  EXPECT_EQ(fault(R"({"full_attention_interval":0})"),
            "config.json: full_attention_interval is 0, wanted a whole number from 1 to 1024");
  EXPECT_EQ(fault(R"({"num_experts":2,"num_experts_per_tok":3})", "qwen3_5_moe"),
            "config.json: num_experts_per_tok is 3, wanted at most num_experts = 2");
  EXPECT_EQ(fault(R"({"num_experts":0})", "qwen3_5_moe"), "config.json: num_experts is 0, wanted a whole number from 1 to 4096");
  EXPECT_EQ(fault(R"({"num_experts":4096,"num_hidden_layers":1024})", "qwen3_5_moe"),
            "config.json: num_experts is 4096, wanted at most 256 for 1024 layers");
  EXPECT_EQ(fault(R"({"linear_num_key_heads":4096,"linear_num_value_heads":4096,"num_hidden_layers":65})"),
            "config.json: linear_num_key_heads is 4096, wanted at most 4032 for 65 layers");
  EXPECT_EQ(fault(R"({"mlp_only_layers":[4]})", "qwen3_next"), "config.json: mlp_only_layers holds 4, wanted layers below 4");
  EXPECT_EQ(fault(R"({"eos_token_id":101})"), "config.json: eos_token_id is 101, wanted tokens below vocab_size = 101");
  EXPECT_EQ(fault(R"({"eos_token_id":[1,-1]})"), "config.json: eos_token_id is -1, wanted tokens below vocab_size = 101");
  EXPECT_EQ(fault(R"({"rope_parameters":{"rope_type":"longrope"}})"),
            "config.json: rope_parameters.rope_type is 'longrope', wanted 'default', 'linear' or 'yarn'");
  EXPECT_EQ(fault(R"({"rope_parameters":{"rope_type":"yarn"}})"),
            "config.json: rope_parameters.factor is missing, rope_type 'yarn' needs it");
  EXPECT_EQ(fault(R"({"rope_parameters":{"rope_theta":1e6},"rope_scaling":{"type":"yarn","factor":4}})"),
            "config.json: rope_scaling is given together with a different rope_parameters, wanted one of them");
  EXPECT_EQ(fault(R"({"rope_parameters":{"rope_theta":1e6},"rope_scaling":{"rope_theta":1e6}})"), "none");
  EXPECT_EQ(fault(R"({"rope_theta":-1})"), "config.json: rope_theta is -1, wanted a number from 1.0001 to 1e+12");
  EXPECT_EQ(fault(R"({"partial_rotary_factor":0.01})"),
            "config.json: partial_rotary_factor makes 0 of head_dim = 32 channels rotary, wanted an even number of at least 2");
  EXPECT_EQ(fault(R"({"text_config":{"model_type":"qwen3_next"}})"),
            "config.json: text_config.model_type is 'qwen3_next', wanted the text part of 'qwen3_5_text'");
  EXPECT_EQ(fault(R"({"text_config":{"hidden_size":0}})"),
            "config.json: text_config.hidden_size is 0, wanted a whole number from 1 to 262144");
  EXPECT_EQ(complaint([] { parse_config("[]"); }), "config.json: is a list, wanted a JSON object");
  EXPECT_EQ(complaint([] { parse_config(config_text("{}"), R"({"top_p":7})"); }),
            "generation_config.json: top_p is 7, wanted a number from 1e-09 to 1");
}

TEST(Config, FilesThatAreNotThere) {
  const Folder folder;
  EXPECT_EQ(complaint([&] { read_config(folder.path()); }),
            (folder.path() / "config.json").string() + ": cannot be opened: No such file or directory");
  folder.write("config.json", config_text("{}"));
  EXPECT_EQ(read_config(folder.path()).hidden_size, 40);
  folder.write("generation_config.json", "{");
  EXPECT_EQ(complaint([&] { read_config(folder.path()); }),
            (folder.path() / "generation_config.json").string() + ": is not JSON at byte 2");
  folder.write("generation_config.json", "");
  EXPECT_EQ(complaint([&] { read_config(folder.path()); }),
            (folder.path() / "generation_config.json").string() + ": is not JSON at byte 1");
  std::filesystem::remove(folder.path() / "generation_config.json");
  std::filesystem::create_symlink("missing.json", folder.path() / "generation_config.json");
  EXPECT_EQ(complaint([&] { read_config(folder.path()); }),
            (folder.path() / "generation_config.json").string() + ": cannot be opened: No such file or directory");
}

}  // namespace
}  // namespace weft::model
