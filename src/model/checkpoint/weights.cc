// Finds every weight of a model in its checkpoint: see weights.h.
#include "model/checkpoint/weights.h"

#include <cstring>
#include <set>
#include <string>

#include "common/half.h"
#include "files/refuse.h"

namespace weft::model {
namespace {

using Sizes = std::vector<int64_t>;

std::string text(const Sizes& sizes) {
  std::string out = "[";
  for (size_t i = 0; i < sizes.size(); ++i) out += (i ? ", " : "") + std::to_string(sizes[i]);
  return out + "]";
}

[[noreturn]] void refuse(const std::string& name, const std::string& what) { files::refuse("checkpoint", name, what); }

// Element i of f32, f16 or bf16 data.
float value_at(const void* data, DType dtype, size_t i) {
  if (dtype == DType::f32) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  return dtype == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

// Takes tensors of a checkpoint by name and remembers which ones were taken.
class Binder {
 public:
  Binder(Checkpoint& checkpoint, int64_t most_copied, int64_t& copied_bytes)
      : checkpoint_(checkpoint), most_copied_(most_copied), copied_bytes_(copied_bytes) {
    // A checkpoint of a tied model may lack the embedding, but never the final norm.
    for (const char* name : {"norm.weight", "embed_tokens.weight"})
      for (const char* prefix : {"model.", "model.language_model.", "language_model.model."})
        if (checkpoint.find(std::string(prefix) + name)) prefix_ = prefix;
    if (prefix_.empty())
      refuse("model.embed_tokens.weight",
             "is missing, also as model.language_model.embed_tokens.weight and "
             "language_model.model.embed_tokens.weight");
  }

  const std::string& prefix() const { return prefix_; }
  bool has(const std::string& name) const { return checkpoint_.find(name) != nullptr; }

  const TensorView& take(const std::string& name, const Sizes& wanted) {
    const TensorView* view = checkpoint_.find(name);
    if (!view) refuse(name, "is missing, wanted " + text(wanted));
    if (view->sizes != wanted) refuse(name, "is " + text(view->sizes) + ", wanted " + text(wanted));
    if (view->dtype != DType::f32 && view->dtype != DType::f16 && view->dtype != DType::bf16)
      refuse(name, "is " + std::string(view->dtype_text) + ", wanted F32, F16 or BF16");
    used_.insert(name);
    checkpoint_.align(name, most_copied_);
    return *view;
  }

  Matrix matrix(const std::string& name, int64_t rows, int64_t cols) {
    const TensorView& view = take(name, {rows, cols});
    return {view.data, *view.dtype, rows, cols};
  }

  // A whole matrix as a projection, with its bias if asked.
  Projection linear(const std::string& name, int64_t outputs, int64_t inputs, bool bias = false) {
    Projection p{{{matrix(name + ".weight", outputs, inputs), 0}}, outputs, {}};
    if (bias) p.bias = vector(name + ".bias", outputs, 0);
    return p;
  }

  // A vector as an f32 copy, with `offset` added.
  std::vector<float> vector(const std::string& name, int64_t size, float offset) {
    const TensorView& view = take(name, {size});
    std::vector<float> values(static_cast<size_t>(size));
    for (size_t i = 0; i < values.size(); ++i) values[i] = offset + value_at(view.data, *view.dtype, i);
    copied_bytes_ += size * static_cast<int64_t>(sizeof(float));
    return values;
  }

  // A tensor of sizes `wanted` in the file as a read-only op input of sizes `sizes`.
  Tensor tensor(const std::string& name, const Sizes& wanted, std::initializer_list<int64_t> sizes) {
    const TensorView& view = take(name, wanted);
    return dense(const_cast<void*>(view.data), *view.dtype, sizes);  // NOLINT: ops do not write their inputs
  }

  // Throws Error for a tensor that was not taken, unless it belongs to a part of the model that Weft does not run.
  void finish() const {
    std::vector<std::string> extra;
    for (const auto& [name, view] : checkpoint_.tensors()) {
      if (used_.count(name)) continue;
      bool ignored = false;
      for (const char* part :
           {"mtp.", "model.mtp.", "visual.", "model.visual.", "language_model.mtp.", "model.language_model.mtp."})
        ignored |= name.rfind(part, 0) == 0;
      if (!ignored) extra.push_back(name);
    }
    if (extra.empty()) return;
    std::string others;
    for (size_t i = 1; i < extra.size() && i < 4; ++i) others += ", " + files::printable(extra[i]);
    if (extra.size() > 4) others += ", ...";
    refuse(extra.front(), "is in the file, but the model that config.json describes has no such tensor (" +
                              std::to_string(extra.size()) + " of them" + others + ")");
  }

 private:
  Checkpoint& checkpoint_;
  int64_t most_copied_;
  int64_t& copied_bytes_;
  std::string prefix_;
  std::set<std::string> used_;
};

void append(Projection& to, const Projection& part) {
  for (const ProjectionPart& p : part.parts) to.parts.push_back({p.w, to.outputs + p.column});
  if (!part.bias.empty()) {
    to.bias.resize(static_cast<size_t>(to.outputs), 0.0f);
    to.bias.insert(to.bias.end(), part.bias.begin(), part.bias.end());
  }
  to.outputs += part.outputs;
}

// Qwen3-Next packs q, k, v and z, and b and a, by key head. The rows of each group go to their columns of [q | k | v | z | b | a].
Projection packed_delta_input(Binder& binder, const std::string& name, const ModelConfig& c) {
  const int64_t Hk = c.linear_key_heads, r = c.linear_value_heads / Hk, K = c.linear_key_head_dim, V = c.linear_value_head_dim;
  const int64_t keys = c.linear_key_size(), values = c.linear_value_size();
  const Matrix qkvz = binder.matrix(name + "in_proj_qkvz.weight", 2 * keys + 2 * values, c.hidden_size);
  const Matrix ba = binder.matrix(name + "in_proj_ba.weight", 2 * c.linear_value_heads, c.hidden_size);
  Projection p;
  p.outputs = 2 * keys + 2 * values + 2 * c.linear_value_heads;
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
    const TensorView& up = binder.take(name + "experts.gate_up_proj", {E, 2 * I, H});
    const TensorView& down = binder.take(name + "experts.down_proj", {E, H, I});
    const Matrix ups{up.data, *up.dtype, E * 2 * I, H}, downs{down.data, *down.dtype, E * H, I};
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
  if (a.dtype == b.dtype) return std::memcmp(a.data, b.data, static_cast<size_t>(a.rows * a.cols * dtype_bytes(a.dtype))) == 0;
  for (int64_t i = 0; i < a.rows * a.cols; ++i)
    if (value_at(a.data, a.dtype, static_cast<size_t>(i)) != value_at(b.data, b.dtype, static_cast<size_t>(i))) return false;
  return true;
}

// The embedding and the head.
void bind_vocabulary(Binder& binder, const ModelConfig& config, Weights& w) {
  const std::string embedding = binder.prefix() + "embed_tokens.weight", head = "lm_head.weight";
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
  const int64_t H = config.hidden_size;
  bind_vocabulary(binder, config, w);
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const std::string name = binder.prefix() + "layers." + std::to_string(i) + ".";
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
  w.final_norm = binder.vector(binder.prefix() + "norm.weight", H, 1);
  binder.finish();
  return w;
}

}  // namespace weft::model
