// Reads and checks config.json and generation_config.json: see config.h.
#include "model/checkpoint/config.h"

#include <algorithm>

#include "core/limits.h"
#include "files/json_text.h"
#include "files/mapped_file.h"
#include "files/refuse.h"
#include "model/checkpoint/config_limits.h"
#include "model/checkpoint/rope_config.h"
#include "weft/delta_chunk.h"
#include "weft/kv_codec.h"

namespace weft::model {
namespace {

using files::Json;
using files::JsonFields;

constexpr uint64_t kMaxConfigBytes = files::kMaxJsonTree;  // of config.json and of generation_config.json

// The defaults of transformers for absent fields.
struct Defaults {
  int64_t vocab_size, hidden_size, layers, kv_heads, intermediate_size, experts, experts_per_token;
};

Defaults defaults_of(Family family) {
  switch (family) {
    case Family::qwen3_next: return {151936, 2048, 48, 2, 5632, 512, 10};
    case Family::qwen3_5: return {248320, 4096, 32, 4, 12288, 0, 0};
    case Family::qwen3_5_moe: return {248320, 2048, 40, 2, 0, 256, 8};
  }
  return {};
}

Family family_of(const JsonFields& fields) {
  const std::string known = "wanted qwen3_next, qwen3_5, qwen3_5_text, qwen3_5_moe or qwen3_5_moe_text";
  const std::optional<std::string> type = fields.text("model_type");
  if (!type) fields.fail("model_type", "is missing, " + known);
  if (*type == "qwen3_next") return Family::qwen3_next;
  if (*type == "qwen3_5" || *type == "qwen3_5_text") return Family::qwen3_5;
  if (*type == "qwen3_5_moe" || *type == "qwen3_5_moe_text") return Family::qwen3_5_moe;
  fields.fail("model_type", "is " + files::in_quotes(*type) + ", " + known);
}

LayerKind kind_of(const JsonFields& fields, size_t layer, const Json& value) {
  const std::string text = value.is_string() ? value.get<std::string>() : "";
  if (text == "linear_attention" || text == "mamba") return LayerKind::linear_attention;  // older files use the second names
  if (text == "full_attention" || text == "attention") return LayerKind::full_attention;
  fields.fail("layer_types[" + std::to_string(layer) + "]",
              "is " + files::json_text(value) + ", wanted 'linear_attention' or 'full_attention'");
}

void read_mixers(const JsonFields& fields, ModelConfig& config) {
  const size_t count = config.layers.size();
  if (const Json* types = fields.array("layer_types")) {
    if (types->size() != count)
      fields.fail("layer_types",
                  "has " + std::to_string(types->size()) + " entries, wanted num_hidden_layers = " + std::to_string(count));
    for (size_t i = 0; i < count; ++i) config.layers[i].mixer = kind_of(fields, i, (*types)[i]);
    return;
  }
  const auto interval = static_cast<size_t>(fields.whole("full_attention_interval", 1, kMaxLayers).value_or(4));
  for (size_t i = 0; i < count; ++i)
    config.layers[i].mixer = (i + 1) % interval == 0 ? LayerKind::full_attention : LayerKind::linear_attention;
}

// "<field> is 4096, wanted at most 256 for 1024 layers"
void require_few(const JsonFields& fields, const char* field, int64_t value, int64_t layers, int64_t most) {
  if (value > most / layers)
    fields.fail(field, "is " + std::to_string(value) + ", wanted at most " + std::to_string(most / layers) + " for " +
                           std::to_string(layers) + " layers");
}

void read_feed_forward(const JsonFields& fields, const Defaults& defaults, ModelConfig& config) {
  const bool next = config.family == Family::qwen3_next;
  const auto count = static_cast<int64_t>(config.layers.size());
  int64_t experts = 0;
  if (config.family != Family::qwen3_5) experts = fields.whole("num_experts", next ? 0 : 1, kMaxExperts).value_or(defaults.experts);
  int64_t step = 1;
  std::vector<bool> dense(config.layers.size(), experts == 0);
  if (next) {
    step = fields.whole("decoder_sparse_step", 1, kMaxLayers).value_or(1);
    if (const Json* list = fields.array("mlp_only_layers"))
      for (const Json& layer : *list) {
        if (!layer.is_number_unsigned() || layer.get<uint64_t>() >= dense.size())
          fields.fail("mlp_only_layers", "holds " + files::json_text(layer) + ", wanted layers below " + std::to_string(count));
        dense[layer.get<size_t>()] = true;
      }
  }
  bool any_dense = false, any_experts = false;
  for (size_t i = 0; i < dense.size(); ++i) {
    const bool routed = !dense[i] && (i + 1) % static_cast<size_t>(step) == 0;
    config.layers[i].feed_forward = routed ? FeedForward::experts : FeedForward::dense;
    (routed ? any_experts : any_dense) = true;
  }
  if (any_dense)
    config.intermediate_size = fields.whole("intermediate_size", 1, kMaxDenseSize).value_or(defaults.intermediate_size);
  if (!any_experts) return;
  require_few(fields, "num_experts", experts, count, kMaxAllExperts);
  config.experts = experts;
  config.experts_per_token = fields.whole("num_experts_per_tok", 1, kMaxExperts).value_or(defaults.experts_per_token);
  if (config.experts_per_token > experts)
    fields.fail("num_experts_per_tok",
                "is " + std::to_string(config.experts_per_token) + ", wanted at most num_experts = " + std::to_string(experts));
  config.expert_size = fields.whole("moe_intermediate_size", 1, kMaxHidden).value_or(512);
  config.shared_expert_size = fields.whole("shared_expert_intermediate_size", 1, kMaxHidden).value_or(512);
  if (next) config.normalize_expert_weights = fields.flag("norm_topk_prob").value_or(true);
}

// "<field> is 6, wanted a multiple of <other> = 4"
void require_multiple(const JsonFields& fields, const char* field, int64_t value, const std::string& other, int64_t divisor) {
  if (value % divisor != 0)
    fields.fail(field, "is " + std::to_string(value) + ", wanted a multiple of " + other + std::to_string(divisor));
}

void read_attention(const JsonFields& fields, const Defaults& defaults, ModelConfig& config) {
  config.attention_heads = fields.whole("num_attention_heads", 1, kMaxHeads).value_or(16);
  config.kv_heads = fields.whole("num_key_value_heads", 1, kMaxHeads).value_or(defaults.kv_heads);
  require_multiple(fields, "num_attention_heads", config.attention_heads, "num_key_value_heads = ", config.kv_heads);
  config.head_dim = fields.whole("head_dim", 8, kMaxHeadDim).value_or(256);
  require_multiple(fields, "head_dim", config.head_dim, "", 8);
  config.attention_bias = fields.flag("attention_bias").value_or(false);
  if (!fields.flag("attn_output_gate").value_or(true))
    fields.fail("attn_output_gate", "is false, wanted true: attention without an output gate is not supported");
  config.rope = read_rope(fields, config.head_dim);
}

void read_delta(const JsonFields& fields, ModelConfig& config) {
  config.linear_key_heads = fields.whole("linear_num_key_heads", 1, kMaxHeads).value_or(16);
  require_few(fields, "linear_num_key_heads", config.linear_key_heads, static_cast<int64_t>(config.layers.size()), kMaxAllKeyHeads);
  config.linear_value_heads = fields.whole("linear_num_value_heads", 1, kMaxHeads).value_or(32);
  require_multiple(fields, "linear_num_value_heads", config.linear_value_heads, "linear_num_key_heads = ", config.linear_key_heads);
  config.linear_key_head_dim = fields.whole("linear_key_head_dim", 1, kMaxDeltaHeadSize).value_or(128);
  config.linear_value_head_dim = fields.whole("linear_value_head_dim", 1, kMaxDeltaHeadSize).value_or(128);
  config.conv_width = fields.whole("linear_conv_kernel_dim", kMinConvWidth, kMaxConvWidth).value_or(4);
}

// Reads one id or a list of ids and adds those that `config` does not have yet.
void read_eos(const JsonFields& fields, ModelConfig& config) {
  const Json* value = fields.find("eos_token_id");
  if (!value) return;
  const auto add = [&](const Json& id) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= static_cast<uint64_t>(config.vocab_size))
      fields.fail("eos_token_id",
                  "is " + files::json_text(id) + ", wanted tokens below vocab_size = " + std::to_string(config.vocab_size));
    if (!config.is_eos(id.get<int32_t>())) config.eos_ids.push_back(id.get<int32_t>());
  };
  if (!value->is_array()) return add(*value);
  if (value->size() > 64) fields.fail("eos_token_id", "has " + std::to_string(value->size()) + " entries, wanted at most 64");
  for (const Json& id : *value) add(id);
}

void read_generation(const JsonFields& fields, ModelConfig& config) {
  GenerationConfig& generation = config.generation;
  generation.do_sample = fields.flag("do_sample");
  generation.temperature = fields.number("temperature", 0, 100);
  generation.top_p = fields.number("top_p", 1e-9, 1);
  generation.top_k = fields.whole("top_k", 0, kMaxVocab);
  generation.repetition_penalty = fields.number("repetition_penalty", 1e-3, 1e3);
  generation.max_new_tokens = fields.whole("max_new_tokens", 0, kMaxPositions);
  read_eos(fields, config);
}

std::string identity_of(Json& config) {
  for (const char* name : {"transformers_version", "_name_or_path"}) config.erase(name);
  return config.dump();
}

ModelConfig parse(std::string_view text, const std::string& file, std::optional<std::string_view> generation,
                  const std::string& generation_file) {
  Json json = files::parse_json_object(text, file);
  const JsonFields outer(json, file);
  const std::optional<JsonFields> nested = outer.object("text_config");
  const JsonFields& fields = nested ? *nested : outer;

  ModelConfig config;
  config.family = family_of(outer);
  config.model_type = *outer.text("model_type");
  if (nested && nested->has("model_type") && family_of(*nested) != config.family)
    nested->fail("model_type", "is " + files::in_quotes(*nested->text("model_type")) + ", wanted the text part of " +
                                   files::in_quotes(config.model_type));
  for (const JsonFields* place : {&outer, &fields})
    if (place->has("quantization_config"))
      place->fail("quantization_config", "is given, wanted unquantised f32, f16 or bf16 weights");
  const std::string activation = fields.text("hidden_act").value_or("silu");
  if (activation != "silu") fields.fail("hidden_act", "is " + files::in_quotes(activation) + ", wanted 'silu'");

  const Defaults defaults = defaults_of(config.family);
  config.vocab_size = fields.whole("vocab_size", 1, kMaxVocab).value_or(defaults.vocab_size);
  config.hidden_size = fields.whole("hidden_size", 1, kMaxHidden).value_or(defaults.hidden_size);
  config.layers.resize(static_cast<size_t>(fields.whole("num_hidden_layers", 1, kMaxLayers).value_or(defaults.layers)));
  config.rms_norm_eps = fields.number("rms_norm_eps", 1e-12, 1).value_or(1e-6);
  config.max_positions = fields.whole("max_position_embeddings", 1, kMaxPositions).value_or(0);
  // In transformers, the class of nested configurations ties by the outer flag, and always saves it. Where another program left the
  // outer flag out, the nested flag counts.
  const std::optional<bool> tied = outer.flag("tie_word_embeddings");
  config.tie_word_embeddings = tied ? *tied : fields.flag("tie_word_embeddings").value_or(false);
  read_mixers(fields, config);
  read_feed_forward(fields, defaults, config);
  read_attention(fields, defaults, config);
  read_delta(fields, config);

  for (const JsonFields* place : {&fields, &outer})
    if (!config.bos_id)
      if (const auto bos = place->whole("bos_token_id", 0, config.vocab_size - 1)) config.bos_id = static_cast<int32_t>(*bos);
  read_eos(fields, config);
  if (nested) read_eos(outer, config);
  config.identity = identity_of(json);
  if (generation) {
    const Json more = files::parse_json_object(*generation, generation_file);
    read_generation(JsonFields(more, generation_file), config);
  }
  return config;
}

}  // namespace

const char* family_name(Family family) {
  switch (family) {
    case Family::qwen3_next: return "qwen3_next";
    case Family::qwen3_5: return "qwen3_5";
    case Family::qwen3_5_moe: return "qwen3_5_moe";
  }
  return "?";
}

int64_t ModelConfig::layers_of(LayerKind kind) const {
  return std::count_if(layers.begin(), layers.end(), [&](const LayerConfig& layer) { return layer.mixer == kind; });
}

bool ModelConfig::is_eos(int32_t id) const { return std::find(eos_ids.begin(), eos_ids.end(), id) != eos_ids.end(); }

ModelConfig parse_config(std::string_view config, std::optional<std::string_view> generation) {
  return parse(config, "config.json", generation, "generation_config.json");
}

ModelConfig read_config(const std::filesystem::path& directory) {
  const std::filesystem::path config = directory / "config.json", generation = directory / "generation_config.json";
  const std::string text = files::read_text(config, kMaxConfigBytes);
  if (!files::is_there(generation)) return parse(text, config.native(), {}, {});
  return parse(text, config.native(), files::read_text(generation, kMaxConfigBytes), generation.native());
}

}  // namespace weft::model
