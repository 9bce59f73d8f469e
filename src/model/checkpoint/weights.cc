// Finds every weight of a model in its Hugging Face checkpoint: see weights.h.
#include "model/checkpoint/weights.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "model/checkpoint/binder.h"

namespace weft::model {
namespace {

// The prefix of the names of all tensors but the head.
std::string prefix_of(const Checkpoint& checkpoint) {
  std::string found;
  // A checkpoint of a tied model may lack the embedding, but never the final norm.
  for (const char* name : {"norm.weight", "embed_tokens.weight"})
    for (const char* prefix : {"model.", "model.language_model.", "language_model.model."})
      if (checkpoint.find(std::string(prefix) + name)) found = prefix;
  if (found.empty())
    Binder::refuse("model.embed_tokens.weight",
                   "is missing, also as model.language_model.embed_tokens.weight and language_model.model.embed_tokens.weight");
  return found;
}

// Does a tensor belong to multi-token prediction or vision?
bool is_other_part(const std::string& name) {
  const auto parts = {"mtp.", "model.mtp.", "visual.", "model.visual.", "language_model.mtp.", "model.language_model.mtp."};
  return std::any_of(parts.begin(), parts.end(), [&](const char* part) { return name.rfind(part, 0) == 0; });
}

// Qwen3-Next packs q, k, v and z by key head in one matrix, and b and a in another. The rows of each key head give their columns of
// [q | k | v | z | b | a].
Projection packed_delta_input(Binder& binder, const std::string& name, const ModelConfig& c) {
  const int64_t Hk = c.linear_key_heads, r = c.linear_value_heads / Hk, K = c.linear_key_head_dim, V = c.linear_value_head_dim;
  const int64_t keys = c.linear_key_size(), values = c.linear_value_size();
  const Matrix qkvz = binder.matrix(name + "in_proj_qkvz.weight", 2 * keys + 2 * values, c.hidden_size);
  const Matrix ba = binder.matrix(name + "in_proj_ba.weight", 2 * c.linear_value_heads, c.hidden_size);
  Projection p;
  p.outputs = 2 * keys + 2 * values + 2 * c.linear_value_heads;
  p.parts.reserve(static_cast<size_t>(6 * Hk));
  const int64_t z = 2 * keys + values, b = z + values, a = b + c.linear_value_heads;
  for (int64_t g = 0; g < Hk; ++g) {
    const int64_t row = g * (2 * K + 2 * r * V);
    p.parts.push_back({qkvz.slice(row, K), g * K});
    p.parts.push_back({qkvz.slice(row + K, K), keys + g * K});
    p.parts.push_back({qkvz.slice(row + 2 * K, r * V), 2 * keys + g * r * V});
    p.parts.push_back({qkvz.slice(row + 2 * K + r * V, r * V), z + g * r * V});
    p.parts.push_back({ba.slice(g * 2 * r, r), b + g * r});
    p.parts.push_back({ba.slice(g * 2 * r + r, r), a + g * r});
  }
  return p;
}

DeltaWeights bind_delta(Binder& binder, const std::string& name, const ModelConfig& c) {
  DeltaWeights w;
  const int64_t Hv = c.linear_value_heads, values = c.linear_value_size(), H = c.hidden_size;
  if (c.family == Family::qwen3_next && !binder.has(name + "in_proj_qkv.weight")) {
    w.input = packed_delta_input(binder, name, c);
  } else {
    append(w.input, binder.linear(name + "in_proj_qkv", c.conv_channels(), H));
    append(w.input, binder.linear(name + "in_proj_z", values, H));
    append(w.input, binder.linear(name + "in_proj_b", Hv, H));
    append(w.input, binder.linear(name + "in_proj_a", Hv, H));
  }
  w.conv = binder.tensor(name + "conv1d.weight", {c.conv_channels(), 1, c.conv_width}, {c.conv_channels(), c.conv_width});
  w.a_log = binder.vector(name + "A_log", Hv, 0);
  w.dt_bias = binder.vector(name + "dt_bias", Hv, 0);
  w.norm = binder.tensor(name + "norm.weight", {c.linear_value_head_dim}, {c.linear_value_head_dim});
  w.output = binder.linear(name + "out_proj", H, values);
  w.head_map = c.head_map;
  return w;
}

AttentionWeights bind_attention(Binder& binder, const std::string& name, const ModelConfig& c) {
  AttentionWeights w;
  const int64_t D = c.head_dim, H = c.hidden_size;
  append(w.input, binder.linear(name + "q_proj", c.attention_heads * 2 * D, H, c.attention_bias));
  append(w.input, binder.linear(name + "k_proj", c.kv_heads * D, H, c.attention_bias));
  append(w.input, binder.linear(name + "v_proj", c.kv_heads * D, H, c.attention_bias));
  w.q_norm = binder.vector(name + "q_norm.weight", D, 1);
  w.k_norm = binder.vector(name + "k_norm.weight", D, 1);
  w.output = binder.linear(name + "o_proj", H, c.attention_heads * D, c.attention_bias);
  return w;
}

SwigluWeights bind_swiglu(Binder& binder, const std::string& name, int64_t size, int64_t H) {
  SwigluWeights w;
  append(w.input, binder.linear(name + "gate_proj", size, H));
  append(w.input, binder.linear(name + "up_proj", size, H));
  w.down = binder.linear(name + "down_proj", H, size);
  return w;
}

ExpertWeights bind_experts(Binder& binder, const std::string& name, const ModelConfig& c) {
  ExpertWeights w;
  const int64_t E = c.experts, I = c.expert_size, H = c.hidden_size;
  w.router = binder.linear(name + "gate", E, H);
  if (binder.has(name + "experts.gate_up_proj")) {
    const Matrix ups = binder.matrices(name + "experts.gate_up_proj", E, 2 * I, H);
    const Matrix downs = binder.matrices(name + "experts.down_proj", E, H, I);
    for (int64_t e = 0; e < E; ++e)
      w.experts.push_back({{{{ups.slice(e * 2 * I, 2 * I), 0}}, 2 * I, {}}, {{{downs.slice(e * H, H), 0}}, H, {}}});
  } else {
    for (int64_t e = 0; e < E; ++e) w.experts.push_back(bind_swiglu(binder, name + "experts." + std::to_string(e) + ".", I, H));
  }
  w.shared = bind_swiglu(binder, name + "shared_expert.", c.shared_expert_size, H);
  w.shared_gate = binder.linear(name + "shared_expert_gate", 1, H);
  return w;
}

bool same_values(const Matrix& a, const Matrix& b) {
  if (a.type == b.type) return std::memcmp(a.data, b.data, static_cast<size_t>(a.bytes())) == 0;
  std::vector<float> from_a(static_cast<size_t>(a.cols)), from_b(from_a);
  for (int64_t row = 0; row < a.rows; ++row) {
    widen(a.type, a.data, row * a.cols, a.cols, from_a.data());
    widen(b.type, b.data, row * b.cols, b.cols, from_b.data());
    if (from_a != from_b) return false;
  }
  return true;
}

// The embedding and the head.
void bind_vocabulary(Binder& binder, const std::string& prefix, const ModelConfig& config, Weights& w) {
  const std::string embedding = prefix + "embed_tokens.weight", head = "lm_head.weight";
  const auto bind = [&](const std::string& name) { return binder.matrix(name, config.vocab_size, config.hidden_size); };
  const bool tied = config.tie_word_embeddings;
  if (tied && !binder.has(head)) {
    w.embedding = w.head = bind(embedding);
  } else if (tied && !binder.has(embedding)) {
    w.embedding = w.head = bind(head);
  } else {
    w.embedding = bind(embedding);
    w.head = bind(head);
    if (!tied) return;
    if (same_values(w.embedding, w.head))
      w.head = w.embedding;
    else
      w.warnings.push_back("config.json says that " + head +
                           " is the embedding (tie_word_embeddings is true), but the file has a " + head +
                           " with other values: it is used, as transformers uses it");
  }
}

}  // namespace

Weights bind_weights(Checkpoint& checkpoint, const ModelConfig& config, int64_t most_copied) {
  Weights w;
  Binder binder(checkpoint, most_copied, w.copied_bytes);
  const std::string prefix = prefix_of(checkpoint);
  const int64_t H = config.hidden_size;
  bind_vocabulary(binder, prefix, config, w);
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const std::string name = prefix + "layers." + std::to_string(i) + ".";
    LayerWeights layer;
    layer.mixer_norm = binder.vector(name + "input_layernorm.weight", H, 1);
    if (config.layers[i].mixer == LayerKind::linear_attention)
      layer.mixer = bind_delta(binder, name + "linear_attn.", config);
    else
      layer.mixer = bind_attention(binder, name + "self_attn.", config);
    layer.feed_forward_norm = binder.vector(name + "post_attention_layernorm.weight", H, 1);
    if (config.layers[i].feed_forward == FeedForward::dense)
      layer.feed_forward = bind_swiglu(binder, name + "mlp.", config.intermediate_size, H);
    else
      layer.feed_forward = bind_experts(binder, name + "mlp.", config);
    w.layers.push_back(std::move(layer));
  }
  w.final_norm = binder.vector(prefix + "norm.weight", H, 1);
  binder.finish(is_other_part, "config.json");
  return w;
}

}  // namespace weft::model
