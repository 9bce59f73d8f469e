// The tensors of a GGUF file from the weights of a model: see parts.h.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "model/quantize/parts.h"

namespace weft::model {
namespace {

using Order = std::vector<int64_t>;  // maps a position in the file to the position in the model

Order straight(int64_t first, int64_t count) {
  Order order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), first);
  return order;
}

void append(Order& to, const Order& more) { to.insert(to.end(), more.begin(), more.end()); }

// The order of the file for value heads of `size` numbers each, from `first` on: tiled for qwen35 and qwen35moe.
Order value_heads(const ModelConfig& c, int64_t first, int64_t size) {
  if (c.family == Family::qwen3_next) return straight(first, c.linear_value_heads * size);
  const int64_t Hk = c.linear_key_heads, ratio = c.linear_value_heads / Hk;
  Order order;
  for (int64_t r = 0; r < ratio; ++r)
    for (int64_t k = 0; k < Hk; ++k) append(order, straight(first + (k * ratio + r) * size, size));
  return order;
}

// Output `column` of a projection as a row of weights.
void row_of(const Projection& projection, int64_t column, float* to) {
  for (const ProjectionPart& part : projection.parts)
    if (column >= part.column && column < part.column + part.w.rows)
      return widen(part.w.type, part.w.data, (column - part.column) * part.w.cols, part.w.cols, to);
}

// The float type in which the checkpoint stores a projection.
WeightType source_of(const Projection& projection) { return projection.parts.front().w.type; }

class Tensors {
 public:
  Tensors(const ModelConfig& config, WeightType type) : c_(config), type_(type) {}

  std::vector<OutTensor> take() { return std::move(out_); }

  void vector(const std::string& name, std::vector<float> values) {
    const auto size = static_cast<int64_t>(values.size());
    out_.push_back({name, {size}, WeightType::f32, [values = std::move(values)](int64_t, int64_t, float* to) {
                      std::copy(values.begin(), values.end(), to);
                    }});
  }

  // Adds the outputs of a projection in an order. With `keep`, they keep the type of the checkpoint.
  void rows(const std::string& name, const Projection& projection, Order order, bool keep = false) {
    const int64_t cols = projection.parts.front().w.cols;
    const WeightType source = source_of(projection);
    out_.push_back({name + ".weight",
                    {static_cast<int64_t>(order.size()), cols},
                    keep ? source : type_for(cols, source),
                    [&projection, order = std::move(order), cols](int64_t row, int64_t count, float* to) {
                      for (int64_t i = 0; i < count; ++i) row_of(projection, order[static_cast<size_t>(row + i)], to + i * cols);
                    }});
  }
  void bias(const std::string& name, const std::vector<float>& bias, int64_t first, int64_t count) {
    if (bias.empty()) return;
    vector(name + ".bias", {bias.begin() + first, bias.begin() + first + count});
  }
  void whole(const std::string& name, const Projection& projection, bool keep = false) {
    rows(name, projection, straight(0, projection.outputs), keep);
    bias(name, projection.bias, 0, static_cast<int64_t>(projection.bias.size()));
  }

  // Adds a projection with the columns of its weights in an order.
  void columns(const std::string& name, const Projection& projection, Order order) {
    const auto cols = static_cast<int64_t>(order.size());
    out_.push_back({name + ".weight",
                    {projection.outputs, cols},
                    type_for(cols, source_of(projection)),
                    [&projection, order = std::move(order)](int64_t row, int64_t count, float* to) {
                      std::vector<float> plain(order.size());
                      for (int64_t i = 0; i < count; ++i) {
                        row_of(projection, row + i, plain.data());
                        for (int64_t column : order) *to++ = plain[static_cast<size_t>(column)];
                      }
                    }});
  }

  // Adds outputs [first, first + count) of projection `which` of every expert.
  void experts(const std::string& name, const std::vector<SwigluWeights>& all, Projection SwigluWeights::*which, int64_t first,
               int64_t count) {
    const int64_t cols = (all.front().*which).parts.front().w.cols;
    out_.push_back({name + ".weight",
                    {static_cast<int64_t>(all.size()), count, cols},
                    type_for(cols, source_of(all.front().*which)),
                    [&all, which, first, count, cols](int64_t row, int64_t rows, float* to) {
                      for (int64_t i = row; i < row + rows; ++i, to += cols)
                        row_of(all[static_cast<size_t>(i / count)].*which, first + i % count, to);
                    }});
  }

  // Adds the embedding or the head, which never get fewer bits than Q8_0.
  void vocabulary(const std::string& name, const Matrix& matrix) {
    const WeightLayout layout = weight_layout(type_), bytes = weight_layout(WeightType::q8_0);
    const bool fewer = layout.block > 1 && layout.bytes * bytes.block < bytes.bytes * layout.block;
    const WeightType type = layout.block == 1 ? type_ : fewer && matrix.cols % bytes.block == 0 ? WeightType::q8_0 : matrix.type;
    out_.push_back({name + ".weight", {matrix.rows, matrix.cols}, type, [matrix](int64_t row, int64_t count, float* to) {
                      widen(matrix.type, matrix.data, row * matrix.cols, count * matrix.cols, to);
                    }});
  }

  void delta(const std::string& name, const DeltaWeights& w);
  void attention(const std::string& name, const AttentionWeights& w);
  void swiglu(const std::string& name, const std::string& kind, const SwigluWeights& w) {
    rows(name + "ffn_gate" + kind, w.input, straight(0, w.input.outputs / 2));
    rows(name + "ffn_up" + kind, w.input, straight(w.input.outputs / 2, w.input.outputs / 2));
    whole(name + "ffn_down" + kind, w.down);
  }
  void routed(const std::string& name, const ExpertWeights& w) {
    whole(name + "ffn_gate_inp", w.router, true);
    experts(name + "ffn_gate_exps", w.experts, &SwigluWeights::input, 0, c_.expert_size);
    experts(name + "ffn_up_exps", w.experts, &SwigluWeights::input, c_.expert_size, c_.expert_size);
    experts(name + "ffn_down_exps", w.experts, &SwigluWeights::down, 0, c_.hidden_size);
    swiglu(name, "_shexp", w.shared);
    std::vector<float> gate(static_cast<size_t>(c_.hidden_size));
    row_of(w.shared_gate, 0, gate.data());
    vector(name + "ffn_gate_inp_shexp.weight", std::move(gate));
  }

 private:
  WeightType type_for(int64_t cols, WeightType source) const {
    if (cols % weight_layout(type_).block == 0) return type_;
    return cols % weight_layout(WeightType::q8_0).block == 0 ? WeightType::q8_0 : source;
  }

  const ModelConfig& c_;
  WeightType type_;
  std::vector<OutTensor> out_;
};

void Tensors::delta(const std::string& name, const DeltaWeights& w) {
  const int64_t keys = c_.linear_key_size(), values = c_.linear_value_size(), Hv = c_.linear_value_heads, W = c_.conv_width;
  const int64_t z = 2 * keys + values, b = z + values, a = b + Hv;  // columns of the input
  Order channels = straight(0, 2 * keys);
  append(channels, value_heads(c_, 2 * keys, c_.linear_value_head_dim));
  rows(name + "attn_qkv", w.input, channels);
  rows(name + "attn_gate", w.input, value_heads(c_, z, c_.linear_value_head_dim));
  if (c_.family == Family::qwen3_next) {
    const int64_t ratio = Hv / c_.linear_key_heads;
    Order packed;
    for (int64_t g = 0; g < c_.linear_key_heads; ++g) {
      append(packed, straight(b + g * ratio, ratio));
      append(packed, straight(a + g * ratio, ratio));
    }
    rows(name + "ssm_ba", w.input, packed, true);
  } else {
    rows(name + "ssm_beta", w.input, value_heads(c_, b, 1), true);
    rows(name + "ssm_alpha", w.input, value_heads(c_, a, 1), true);
  }
  const Tensor conv = w.conv;
  out_.push_back({name + "ssm_conv1d.weight",
                  {c_.conv_channels(), W},
                  WeightType::f32,
                  [conv, channels, W](int64_t row, int64_t count, float* to) {
                    for (int64_t i = row; i < row + count; ++i, to += W)
                      widen(*weight_type(conv.dtype), conv.data, channels[static_cast<size_t>(i)] * W, W, to);
                  }});
  std::vector<float> decay, shift;
  for (int64_t head : value_heads(c_, 0, 1)) {
    decay.push_back(-std::exp(w.a_log[static_cast<size_t>(head)]));
    shift.push_back(w.dt_bias[static_cast<size_t>(head)]);
  }
  vector(name + "ssm_a", std::move(decay));
  vector(name + "ssm_dt.bias", std::move(shift));
  std::vector<float> norm(static_cast<size_t>(c_.linear_value_head_dim));
  widen(*weight_type(w.norm.dtype), w.norm.data, 0, c_.linear_value_head_dim, norm.data());
  vector(name + "ssm_norm.weight", std::move(norm));
  columns(name + "ssm_out", w.output, value_heads(c_, 0, c_.linear_value_head_dim));
}

void Tensors::attention(const std::string& name, const AttentionWeights& w) {
  const int64_t queries = c_.attention_heads * 2 * c_.head_dim, keys = c_.kv_heads * c_.head_dim;
  const auto part = [&](const char* which, int64_t first, int64_t count) {
    rows(name + which, w.input, straight(first, count));
    bias(name + which, w.input.bias, first, count);
  };
  part("attn_q", 0, queries);
  part("attn_k", queries, keys);
  part("attn_v", queries + keys, keys);
  vector(name + "attn_q_norm.weight", w.q_norm);
  vector(name + "attn_k_norm.weight", w.k_norm);
  whole(name + "attn_output", w.output);
}

}  // namespace

int64_t OutTensor::rows() const {
  return std::accumulate(sizes.begin(), sizes.end() - 1, int64_t{1}, [](int64_t a, int64_t b) { return a * b; });
}

std::vector<OutTensor> gguf_tensors(const ModelConfig& config, const Weights& weights, WeightType type) {
  Tensors out(config, type);
  out.vocabulary("token_embd", weights.embedding);
  if (weights.head.data != weights.embedding.data) out.vocabulary("output", weights.head);
  for (size_t i = 0; i < weights.layers.size(); ++i) {
    const LayerWeights& layer = weights.layers[i];
    const std::string name = "blk." + std::to_string(i) + ".";
    out.vector(name + "attn_norm.weight", layer.mixer_norm);
    if (const auto* delta = std::get_if<DeltaWeights>(&layer.mixer))
      out.delta(name, *delta);
    else
      out.attention(name, std::get<AttentionWeights>(layer.mixer));
    out.vector(name + "post_attention_norm.weight", layer.feed_forward_norm);
    if (const auto* dense = std::get_if<SwigluWeights>(&layer.feed_forward))
      out.swiglu(name, "", *dense);
    else
      out.routed(name, std::get<ExpertWeights>(layer.feed_forward));
  }
  out.vector("output_norm.weight", weights.final_norm);
  return out.take();
}

}  // namespace weft::model
