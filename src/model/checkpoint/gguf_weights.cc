// Finds every weight of a model in its GGUF file: see weights.h.
//
// Names and shapes are those of llama.cpp's converter. In the delta layers, the converter stores the value heads of qwen35 and
// qwen35moe in tiled order, and those of qwen3next grouped by key head.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "model/checkpoint/binder.h"

namespace weft::model {
namespace {

// A_log from -e^A_log. The file holds 0 where e^A_log is below the smallest float. Any A_log that small then serves, because the
// state practically does not decay.
std::vector<float> a_log(Binder& binder, const std::string& name, int64_t heads) {
  constexpr float kSmallest = -87;
  std::vector<float> values = binder.vector(name, heads, 0);
  for (float& value : values) {
    if (!(value <= 0) || !std::isfinite(value))
      Binder::refuse(name, "holds " + std::to_string(value) + ", wanted -e^A_log, which is negative");
    value = std::max(kSmallest, static_cast<float>(std::log(-static_cast<double>(value))));
  }
  return values;
}

// qwen3next packs b and a by key head.
Projection packed_gates(Binder& binder, const std::string& name, const ModelConfig& c) {
  const int64_t Hv = c.linear_value_heads, ratio = Hv / c.linear_key_heads;
  const Matrix ba = binder.matrix(name, 2 * Hv, c.hidden_size);
  Projection p;
  p.outputs = 2 * Hv;
  p.parts.reserve(static_cast<size_t>(2 * c.linear_key_heads));
  for (int64_t g = 0; g < c.linear_key_heads; ++g) {
    p.parts.push_back({ba.slice(g * 2 * ratio, ratio), g * ratio});
    p.parts.push_back({ba.slice(g * 2 * ratio + ratio, ratio), Hv + g * ratio});
  }
  return p;
}

DeltaWeights bind_delta(Binder& binder, const std::string& name, const ModelConfig& c) {
  DeltaWeights w;
  const int64_t Hv = c.linear_value_heads, values = c.linear_value_size(), H = c.hidden_size;
  append(w.input, binder.linear(name + "attn_qkv", c.conv_channels(), H));
  append(w.input, binder.linear(name + "attn_gate", values, H));
  if (binder.has(name + "ssm_ba.weight")) {
    append(w.input, packed_gates(binder, name + "ssm_ba.weight", c));
  } else {
    append(w.input, binder.linear(name + "ssm_beta", Hv, H));
    append(w.input, binder.linear(name + "ssm_alpha", Hv, H));
  }
  w.conv = binder.tensor(name + "ssm_conv1d.weight", {c.conv_channels(), c.conv_width}, {c.conv_channels(), c.conv_width});
  w.a_log = a_log(binder, name + "ssm_a", Hv);
  w.dt_bias = binder.vector(name + "ssm_dt.bias", Hv, 0);
  w.norm = binder.tensor(name + "ssm_norm.weight", {c.linear_value_head_dim}, {c.linear_value_head_dim});
  w.output = binder.linear(name + "ssm_out", H, values);
  w.head_map = c.head_map;
  return w;
}

AttentionWeights bind_attention(Binder& binder, const std::string& name, const ModelConfig& c) {
  AttentionWeights w;
  const int64_t D = c.head_dim, H = c.hidden_size, queries = c.attention_heads * 2 * D, keys = c.kv_heads * D;
  const auto linear = [&](const char* part, int64_t outputs, int64_t inputs) {
    return binder.linear(name + part, outputs, inputs, binder.has(name + part + ".bias"));
  };
  if (binder.has(name + "attn_qkv.weight")) {
    w.input = linear("attn_qkv", queries + 2 * keys, H);
  } else {
    append(w.input, linear("attn_q", queries, H));
    append(w.input, linear("attn_k", keys, H));
    append(w.input, linear("attn_v", keys, H));
  }
  if (!w.input.bias.empty()) w.input.bias.resize(static_cast<size_t>(w.input.outputs), 0.0f);
  w.q_norm = binder.vector(name + "attn_q_norm.weight", D, 0);
  w.k_norm = binder.vector(name + "attn_k_norm.weight", D, 0);
  w.output = linear("attn_output", H, c.attention_heads * D);
  return w;
}

SwigluWeights bind_swiglu(Binder& binder, const std::string& name, const std::string& kind, int64_t size, int64_t H) {
  SwigluWeights w;
  append(w.input, binder.linear(name + "ffn_gate" + kind, size, H));
  append(w.input, binder.linear(name + "ffn_up" + kind, size, H));
  w.down = binder.linear(name + "ffn_down" + kind, H, size);
  return w;
}

ExpertWeights bind_experts(Binder& binder, const std::string& name, const ModelConfig& c) {
  ExpertWeights w;
  const int64_t E = c.experts, I = c.expert_size, H = c.hidden_size;
  w.router = binder.linear(name + "ffn_gate_inp", E, H);
  const Matrix downs = binder.matrices(name + "ffn_down_exps.weight", E, H, I);
  w.experts.resize(static_cast<size_t>(E));
  const auto expert = [&](int64_t e) -> SwigluWeights& { return w.experts[static_cast<size_t>(e)]; };
  for (int64_t e = 0; e < E; ++e) expert(e).down = {{{downs.slice(e * H, H), 0}}, H, {}};
  if (binder.has(name + "ffn_gate_up_exps.weight")) {
    const Matrix both = binder.matrices(name + "ffn_gate_up_exps.weight", E, 2 * I, H);
    for (int64_t e = 0; e < E; ++e) expert(e).input = {{{both.slice(e * 2 * I, 2 * I), 0}}, 2 * I, {}};
  } else {
    const Matrix gates = binder.matrices(name + "ffn_gate_exps.weight", E, I, H);
    const Matrix ups = binder.matrices(name + "ffn_up_exps.weight", E, I, H);
    for (int64_t e = 0; e < E; ++e) expert(e).input = {{{gates.slice(e * I, I), 0}, {ups.slice(e * I, I), I}}, 2 * I, {}};
  }
  w.shared = bind_swiglu(binder, name, "_shexp", c.shared_expert_size, H);
  w.shared_gate = {{{binder.row(name + "ffn_gate_inp_shexp.weight", H), 0}}, 1, {}};
  return w;
}

// Does a tensor belong to one of the layers of multi-token prediction? They follow the layers of the config.
bool is_prediction(const std::string& name, const ModelConfig& config) {
  constexpr std::string_view kLayer = "blk.";
  size_t layer = 0;
  const char* const end = name.data() + name.size();
  const bool numbered = name.starts_with(kLayer) && std::from_chars(name.data() + kLayer.size(), end, layer).ec == std::errc();
  const size_t layers = config.layers.size();
  return numbered && layer >= layers && layer - layers < static_cast<size_t>(config.prediction_layers);
}

}  // namespace

Weights bind_gguf_weights(Checkpoint& checkpoint, const ModelConfig& config, int64_t most_copied) {
  Weights w;
  Binder binder(checkpoint, most_copied, w.copied_bytes);
  const int64_t H = config.hidden_size;
  w.embedding = binder.matrix("token_embd.weight", config.vocab_size, H);
  w.head = config.tie_word_embeddings ? w.embedding : binder.matrix("output.weight", config.vocab_size, H);
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const std::string name = "blk." + std::to_string(i) + ".";
    LayerWeights layer;
    layer.mixer_norm = binder.vector(name + "attn_norm.weight", H, 0);
    if (config.layers[i].mixer == LayerKind::linear_attention)
      layer.mixer = bind_delta(binder, name, config);
    else
      layer.mixer = bind_attention(binder, name, config);
    layer.feed_forward_norm = binder.vector(name + "post_attention_norm.weight", H, 0);
    if (config.layers[i].feed_forward == FeedForward::dense)
      layer.feed_forward = bind_swiglu(binder, name, "", config.intermediate_size, H);
    else
      layer.feed_forward = bind_experts(binder, name, config);
    w.layers.push_back(std::move(layer));
  }
  w.final_norm = binder.vector("output_norm.weight", H, 0);
  binder.finish([&](const std::string& name) { return is_prediction(name, config); }, "the metadata");
  return w;
}

}  // namespace weft::model
