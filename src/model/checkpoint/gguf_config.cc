// Reads and checks the metadata of a GGUF file: see gguf_config.h.
#include "model/checkpoint/gguf_config.h"

#include <algorithm>
#include <cstdio>

#include "core/limits.h"
#include "files/refuse.h"
#include "model/checkpoint/config_limits.h"
#include "model/checkpoint/rope_config.h"
#include "weft/delta_chunk.h"
#include "weft/kv_codec.h"

namespace weft::model {
namespace {

using files::GgufFields;
using files::GgufValue;

constexpr double kMaxFactor = 1e6;
constexpr double kLeastEps = 1e-12F;  // in f32, as files store it: a little below 1e-12
constexpr int64_t kControl = 3;       // a control token, in tokenizer.ggml.token_type

class Reader {
 public:
  explicit Reader(const files::GgufFiles& file) : file_(file), fields_(file.fields) {}

  ModelConfig read() {
    read_family();
    read_sizes();
    read_mixers();
    read_feed_forward();
    read_attention();
    read_delta();
    read_tokens();
    read_sampling();
    config_.identity = identity();
    return std::move(config_);
  }

 private:
  std::string key(const char* name) const { return config_.model_type + "." + name; }
  int64_t needed(const char* name, int64_t low, int64_t high) const {
    const std::optional<int64_t> value = fields_.whole(key(name), low, high);
    if (!value) fields_.fail(key(name), "is missing");
    return *value;
  }
  int64_t whole(const char* name, int64_t low, int64_t high, int64_t fallback) const {
    return fields_.whole(key(name), low, high).value_or(fallback);
  }
  double number(const char* name, double low, double high, double fallback) const {
    return fields_.number(key(name), low, high).value_or(fallback);
  }
  // "<key> is 6, wanted a multiple of <other> = 4"
  void require_multiple(const char* name, int64_t value, const std::string& other, int64_t divisor) const {
    if (value % divisor != 0)
      fields_.fail(key(name), "is " + std::to_string(value) + ", wanted a multiple of " + other + std::to_string(divisor));
  }
  void require_few(const char* name, int64_t value, int64_t most) const {
    const auto layers = static_cast<int64_t>(config_.layers.size());
    if (value > most / layers)
      fields_.fail(key(name), "is " + std::to_string(value) + ", wanted at most " + std::to_string(most / layers) + " for " +
                                  std::to_string(layers) + " layers");
  }

  void read_family() {
    const std::string known = "wanted qwen35, qwen35moe or qwen3next";
    const std::optional<std::string_view> name = fields_.text("general.architecture");
    if (!name) fields_.fail("general.architecture", "is missing, " + known);
    if (*name == "qwen35")
      config_.family = Family::qwen3_5;
    else if (*name == "qwen35moe")
      config_.family = Family::qwen3_5_moe;
    else if (*name == "qwen3next")
      config_.family = Family::qwen3_next;
    else
      fields_.fail("general.architecture", "is " + files::in_quotes(*name) + ", " + known);
    config_.model_type = *name;
  }

  void read_sizes() {
    const auto embedding = file_.tensors.find("token_embd.weight");
    if (embedding == file_.tensors.end() || embedding->second.rank != 2)
      files::refuse(fields_.file(), "tensor token_embd.weight", "is missing, wanted [vocabulary, hidden size]");
    config_.vocab_size = embedding->second.sizes[0];
    if (config_.vocab_size > kMaxVocab)
      files::refuse(fields_.file(), "tensor token_embd.weight",
                    "has " + std::to_string(config_.vocab_size) + " rows, wanted at most " + std::to_string(kMaxVocab));
    config_.tie_word_embeddings = !file_.tensors.contains("output.weight");
    config_.hidden_size = needed("embedding_length", 1, kMaxHidden);
    const int64_t blocks = needed("block_count", 1, kMaxLayers), prediction = whole("nextn_predict_layers", 0, kMaxLayers, 0);
    if (prediction >= blocks)
      fields_.fail(key("nextn_predict_layers"),
                   "is " + std::to_string(prediction) + ", wanted less than block_count = " + std::to_string(blocks));
    config_.layers.resize(static_cast<size_t>(blocks - prediction));
    config_.prediction_layers = prediction;
    config_.rms_norm_eps = number("attention.layer_norm_rms_epsilon", kLeastEps, 1, 1e-6);
    config_.max_positions = whole("context_length", 0, kMaxPositions, 0);
  }

  // Which layers are gated delta networks: the metadata has a list of booleans (or of numbers, where 0 is false), or an interval; then
  // every interval-th layer is attention. The list may include the layers of multi-token prediction.
  void read_mixers() {
    const auto interval = static_cast<size_t>(whole("full_attention_interval", 1, kMaxLayers, 4));
    const GgufValue* const list = fields_.find(key("attention.recurrent_layers"));
    const size_t layers = config_.layers.size(), all = layers + static_cast<size_t>(config_.prediction_layers);
    const auto refuse = [&] {
      fields_.fail(key("attention.recurrent_layers"),
                   "is " + list->description() + ", wanted a list of booleans for " + std::to_string(layers) + " layers");
    };
    if (list && (!list->is_list() || list->is_list_of_texts() || (list->size() != layers && list->size() != all))) refuse();
    for (size_t i = 0; i < layers; ++i) {
      bool recurrent = (i + 1) % interval != 0;
      if (list) {
        const GgufValue entry = list->element(i);
        if (!entry.flag() && !entry.whole()) refuse();
        recurrent = entry.flag() ? *entry.flag() : *entry.whole() != 0;
      }
      config_.layers[i].mixer = recurrent ? LayerKind::linear_attention : LayerKind::full_attention;
    }
  }

  void read_feed_forward() {
    const bool routed = config_.family != Family::qwen3_5;
    for (LayerConfig& layer : config_.layers) layer.feed_forward = routed ? FeedForward::experts : FeedForward::dense;
    if (!routed) {
      config_.intermediate_size = needed("feed_forward_length", 1, kMaxDenseSize);
      return;
    }
    config_.experts = needed("expert_count", 1, kMaxExperts);
    require_few("expert_count", config_.experts, kMaxAllExperts);
    config_.experts_per_token = needed("expert_used_count", 1, kMaxExperts);
    if (config_.experts_per_token > config_.experts)
      fields_.fail(key("expert_used_count"), "is " + std::to_string(config_.experts_per_token) +
                                                 ", wanted at most expert_count = " + std::to_string(config_.experts));
    config_.expert_size = needed("expert_feed_forward_length", 1, kMaxHidden);
    config_.shared_expert_size = needed("expert_shared_feed_forward_length", 1, kMaxHidden);
    config_.normalize_expert_weights = fields_.flag(key("expert_weights_norm")).value_or(true);
    constexpr int64_t kSoftmax = 1;
    if (const int64_t gating = whole("expert_gating_func", 0, 1000, kSoftmax); gating != kSoftmax)
      fields_.fail(key("expert_gating_func"), "is " + std::to_string(gating) + ", wanted 1, a softmax");
    if (const double scale = number("expert_weights_scale", 0, 1e6, 1); scale != 1)
      fields_.fail(key("expert_weights_scale"), "is " + std::to_string(scale) + ", wanted 1");
  }

  void read_attention() {
    config_.attention_heads = needed("attention.head_count", 1, kMaxHeads);
    config_.kv_heads = needed("attention.head_count_kv", 1, kMaxHeads);
    require_multiple("attention.head_count", config_.attention_heads, "attention.head_count_kv = ", config_.kv_heads);
    config_.head_dim = needed("attention.key_length", 8, kMaxHeadDim);
    require_multiple("attention.key_length", config_.head_dim, "", 8);
    if (const int64_t values = whole("attention.value_length", 1, kMaxHeadDim, config_.head_dim); values != config_.head_dim)
      fields_.fail(key("attention.value_length"),
                   "is " + std::to_string(values) + ", wanted attention.key_length = " + std::to_string(config_.head_dim));
    read_rope();
  }

  void read_rope() {
    const int64_t channels = whole("rope.dimension_count", 2, config_.head_dim, config_.head_dim);
    require_multiple("rope.dimension_count", channels, "", 2);
    const double theta = number("rope.freq_base", 1.0001, 1e12, 10000);
    config_.rope = plain_rope(theta, channels);
    const std::string type(fields_.text(key("rope.scaling.type")).value_or("none"));
    if (type == "none") return;
    const double factor = number("rope.scaling.factor", 1, kMaxFactor, 0);
    if (factor == 0)
      fields_.fail(key("rope.scaling.factor"), "is missing, rope.scaling.type " + files::in_quotes(type) + " needs it");
    if (type == "linear") {
      for (double& frequency : config_.rope.frequencies) frequency /= factor;
      return;
    }
    if (type != "yarn")
      fields_.fail(key("rope.scaling.type"), "is " + files::in_quotes(type) + ", wanted 'none', 'linear' or 'yarn'");
    for (const char* name : {"rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"})
      if (const double value = number(name, -kMaxFactor, kMaxFactor, 1); value != 1)
        fields_.fail(key(name), "is " + std::to_string(value) + ", wanted 1");
    Yarn yarn;
    yarn.factor = factor;
    const int64_t original = whole("rope.scaling.original_context_length", 1, kMaxPositions, config_.max_positions);
    if (original == 0) fields_.fail(key("rope.scaling.original_context_length"), "is missing, rope.scaling.type 'yarn' needs it");
    yarn.original = static_cast<double>(original);
    yarn.fast = number("rope.scaling.yarn_beta_fast", 1e-3, kMaxFactor, yarn.fast);
    yarn.slow = number("rope.scaling.yarn_beta_slow", 1e-3, kMaxFactor, yarn.slow);
    yarn.attention = yarn_attention(factor);
    apply_yarn(yarn, theta, config_.rope);
  }

  void read_delta() {
    config_.linear_key_heads = needed("ssm.group_count", 1, kMaxHeads);
    require_few("ssm.group_count", config_.linear_key_heads, kMaxAllKeyHeads);
    config_.linear_value_heads = needed("ssm.time_step_rank", 1, kMaxHeads);
    require_multiple("ssm.time_step_rank", config_.linear_value_heads, "ssm.group_count = ", config_.linear_key_heads);
    config_.linear_key_head_dim = needed("ssm.state_size", 1, kMaxDeltaHeadSize);
    const int64_t inner = needed("ssm.inner_size", 1, kMaxHeads * kMaxDeltaHeadSize);
    require_multiple("ssm.inner_size", inner, "ssm.time_step_rank = ", config_.linear_value_heads);
    config_.linear_value_head_dim = inner / config_.linear_value_heads;
    if (config_.linear_value_head_dim > kMaxDeltaHeadSize)
      fields_.fail(key("ssm.inner_size"), "makes heads of " + std::to_string(config_.linear_value_head_dim) + ", wanted at most " +
                                              std::to_string(kMaxDeltaHeadSize));
    config_.conv_width = needed("ssm.conv_kernel", kMinConvWidth, kMaxConvWidth);
    const bool tiled = config_.family != Family::qwen3_next && config_.linear_value_heads != config_.linear_key_heads;
    config_.head_map = tiled ? HeadMap::tiled : HeadMap::grouped;
  }

  void add_eos(int64_t id) {
    if (!config_.is_eos(static_cast<int32_t>(id))) config_.eos_ids.push_back(static_cast<int32_t>(id));
  }

  // A file names one token that ends a text. A chat model has two, so the control tokens of these names end a text too.
  void read_tokens() {
    if (const auto bos = fields_.whole("tokenizer.ggml.bos_token_id", 0, config_.vocab_size - 1))
      config_.bos_id = static_cast<int32_t>(*bos);
    for (const char* name : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"})
      if (const auto id = fields_.whole(name, 0, config_.vocab_size - 1)) add_eos(*id);
    const GgufValue *tokens = fields_.texts("tokenizer.ggml.tokens"), *types = fields_.wholes("tokenizer.ggml.token_type");
    if (!tokens || !types) return;
    const uint64_t count = std::min({tokens->size(), types->size(), static_cast<uint64_t>(config_.vocab_size)});
    uint64_t id = 0;
    tokens->texts([&](std::string_view text) {
      const bool ends = text == "<|endoftext|>" || text == "<|im_end|>";
      if (ends && id < count && types->element(id).whole() == kControl) add_eos(static_cast<int64_t>(id));
      ++id;
    });
  }

  void read_sampling() {
    GenerationConfig& generation = config_.generation;
    generation.temperature = fields_.number("general.sampling.temp", 0, 100);
    generation.top_p = fields_.number("general.sampling.top_p", 1e-9, 1);
    generation.top_k = fields_.whole("general.sampling.top_k", 0, kMaxVocab);
    generation.repetition_penalty = fields_.number("general.sampling.penalty_repeat", 1e-3, 1e3);
    if (generation.temperature) generation.do_sample = *generation.temperature > 0;
  }

  std::string identity() const {
    const ModelConfig& c = config_;
    std::string text = c.model_type;
    const auto add = [&](const char* name, double value) {
      char part[80];
      std::snprintf(part, sizeof part, " %s=%.17g", name, value);
      text += part;
    };
    const auto count = [&](const char* name, int64_t value) { add(name, static_cast<double>(value)); };
    count("vocabulary", c.vocab_size);
    count("hidden", c.hidden_size);
    for (const LayerConfig& layer : c.layers) text += layer.mixer == LayerKind::linear_attention ? " delta" : " attention";
    add("eps", c.rms_norm_eps);
    for (int64_t value : {c.attention_heads, c.kv_heads, c.head_dim}) count("attention", value);
    for (double value : c.rope.frequencies) add("rope", value);
    add("factor", c.rope.factor);
    for (int64_t value : {c.linear_key_heads, c.linear_value_heads, c.linear_key_head_dim, c.linear_value_head_dim, c.conv_width})
      count("delta", value);
    for (int64_t value : {c.intermediate_size, c.experts, c.experts_per_token, c.expert_size, c.shared_expert_size})
      count("feed_forward", value);
    count("normalize", c.normalize_expert_weights);
    return text;
  }

  const files::GgufFiles& file_;
  const GgufFields& fields_;
  ModelConfig config_;
};

}  // namespace

ModelConfig read_gguf_config(const files::GgufFiles& file) { return Reader(file).read(); }

}  // namespace weft::model
