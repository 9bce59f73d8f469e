// Mistakes that implementations of these models have made, each made here on purpose: the golden logits must detect every one.
//
// Most tests change the bound weights or the configuration. Mistakes inside the delta rule, where the runner only calls an op, are
// made in a transcription of a layer in double, which agrees with the golden layer when no mistake is made.
#include <gtest/gtest.h>

#include <functional>

#include "common/half.h"
#include "model/network/cpu/activations.h"
#include "tests/support/golden_model.h"

namespace {

using namespace weft;
using namespace weft::testing_support;
using model::AttentionWeights;
using model::DeltaWeights;
using model::ExpertWeights;
using model::Matrix;
using model::Projection;
using model::WeightType;

// Far above the tolerance of parity, so that a mistake cannot pass as rounding.
void expect_noticed(const char* family, const std::function<void(GoldenModel&)>& mistake, const std::string& what) {
  GoldenModel golden(family);
  mistake(golden);
  const Distance d = distance(golden.logits(), golden.want);
  EXPECT_GT(d.max, 10 * kMaxLogitError) << family << ": " << what;
  EXPECT_GT(d.rms, 10 * kRmsLogitError) << family << ": " << what;
}

constexpr const char* kFamilies[] = {"qwen3_next", "qwen3_5", "qwen3_5_moe"};

void for_each_delta(GoldenModel& golden, const std::function<void(DeltaWeights&)>& change) {
  for (model::LayerWeights& layer : golden.weights.layers)
    if (auto* delta = std::get_if<DeltaWeights>(&layer.mixer)) change(*delta);
}
void for_each_attention(GoldenModel& golden, const std::function<void(AttentionWeights&)>& change) {
  for (model::LayerWeights& layer : golden.weights.layers)
    if (auto* attention = std::get_if<AttentionWeights>(&layer.mixer)) change(*attention);
}

void shift(std::vector<float>& weights, float by) {
  for (float& w : weights) w += by;
}

TEST(Mistake1, NormsWithoutTheirOneOrWithTwo) {
  for (const char* family : kFamilies)
    for (float by : {-1.0f, 1.0f}) {
      const std::string sign = by < 0 ? " without 1" : " with 2";
      expect_noticed(
          family,
          [&](GoldenModel& g) {
            for (auto& l : g.weights.layers) shift(l.mixer_norm, by);
          },
          "input norm" + sign);
      expect_noticed(
          family,
          [&](GoldenModel& g) {
            for (auto& l : g.weights.layers) shift(l.feed_forward_norm, by);
          },
          "post norm" + sign);
      expect_noticed(
          family, [&](GoldenModel& g) { shift(g.weights.final_norm, by); }, "final norm" + sign);
      expect_noticed(
          family, [&](GoldenModel& g) { for_each_attention(g, [&](auto& a) { shift(a.q_norm, by); }); }, "q_norm" + sign);
      expect_noticed(
          family, [&](GoldenModel& g) { for_each_attention(g, [&](auto& a) { shift(a.k_norm, by); }); }, "k_norm" + sign);
    }
}

TEST(Mistake1, GatedNormWithAOneAdded) {
  for (const char* family : kFamilies) {
    std::vector<std::vector<float>> shifted;
    expect_noticed(
        family,
        [&](GoldenModel& g) {
          for_each_delta(g, [&](DeltaWeights& d) {
            std::vector<float>& values = shifted.emplace_back(static_cast<size_t>(d.norm.size(0)));
            model::widen(*model::weight_type(d.norm.dtype), d.norm.data, 0, d.norm.size(0), values.data());
            shift(values, 1);
            d.norm = dense(values.data(), DType::f32, {d.norm.size(0)});
          });
        },
        "linear_attn.norm plus 1");
  }
}

// Rows of the matrix of a projection that is one whole matrix from `column` on.
const Matrix& matrix_at(const Projection& p, int64_t column) {
  for (const model::ProjectionPart& part : p.parts)
    if (part.column == column) return part.w;
  throw std::runtime_error("no part there");
}

TEST(Mistake2, QueriesAndGatesAsTwoHalves) {
  for (const char* family : kFamilies)
    expect_noticed(
        family,
        [](GoldenModel& g) {
          const int64_t Hq = g.config.attention_heads, D = g.config.head_dim;
          for_each_attention(g, [&](AttentionWeights& a) {
            const Matrix q = matrix_at(a.input, 0);
            std::erase_if(a.input.parts, [](const auto& part) { return part.column == 0; });
            for (int64_t h = 0; h < Hq; ++h) {
              a.input.parts.push_back({q.slice(h * D, D), h * 2 * D});
              a.input.parts.push_back({q.slice((Hq + h) * D, D), h * 2 * D + D});
            }
          });
        },
        "all queries, then all gates");
}

TEST(Mistake3, RotaryPositions) {
  for (const char* family : kFamilies) {
    expect_noticed(
        family,
        [](GoldenModel& g) {  // all channels of the head
          const int64_t n = g.config.head_dim;
          g.config.rope.frequencies.clear();
          for (int64_t j = 0; j < n / 2; ++j)
            g.config.rope.frequencies.push_back(std::pow(1e4, static_cast<double>(-2 * j) / static_cast<double>(n)));
        },
        "rotation of every channel");
    expect_noticed(
        family, [](GoldenModel& g) { g.config.rope.frequencies.clear(); }, "no rotation");
    expect_noticed(
        family,
        [](GoldenModel& g) {
          for (double& f : g.config.rope.frequencies) f = f == 1 ? 1 : f * 0.5;
        },
        "another theta");
    // Rotary pairs of neighbours instead of halves: the same as halves of reordered channels, in q and k.
    expect_noticed(
        family,
        [](GoldenModel& g) {
          const int64_t D = g.config.head_dim, half = g.config.rope.channels() / 2, q_rows = g.config.attention_heads * 2 * D;
          const auto source = [&](int64_t j) { return j < half ? 2 * j : j < 2 * half ? 2 * (j - half) + 1 : j; };
          for_each_attention(g, [&](AttentionWeights& a) {
            std::vector<model::ProjectionPart> parts;
            const std::vector<float> bias = a.input.bias, q_norm = a.q_norm, k_norm = a.k_norm;
            const auto permute = [&](const Matrix& w, int64_t column, int64_t rows, int64_t head, int64_t channels) {
              for (int64_t first = 0; first < rows; first += head)
                for (int64_t j = 0; j < head; ++j) {
                  const int64_t from = first + (j < channels ? source(j) : j);
                  parts.push_back({w.slice(from, 1), column + first + j});
                  if (!bias.empty())
                    a.input.bias[static_cast<size_t>(column + first + j)] = bias[static_cast<size_t>(column + from)];
                }
            };
            permute(matrix_at(a.input, 0), 0, q_rows, 2 * D, D);
            permute(matrix_at(a.input, q_rows), q_rows, g.config.kv_heads * D, D, D);
            parts.push_back({matrix_at(a.input, q_rows + g.config.kv_heads * D), q_rows + g.config.kv_heads * D});
            a.input.parts = parts;
            for (int64_t j = 0; j < D; ++j) {
              a.q_norm[static_cast<size_t>(j)] = q_norm[static_cast<size_t>(source(j))];
              a.k_norm[static_cast<size_t>(j)] = k_norm[static_cast<size_t>(source(j))];
            }
          });
        },
        "interleaved pairs");
  }
}

TEST(Mistake4, PackedRowsReadAsConcatenated) {
  expect_noticed(
      "qwen3_next",
      [](GoldenModel& g) {
        const model::ModelConfig& c = g.config;
        for_each_delta(g, [&](DeltaWeights& d) {
          Matrix qkvz = d.input.parts[0].w;  // begins with the first row of in_proj_qkvz: the whole in the file's order
          qkvz.rows = c.conv_channels() + c.linear_value_size();
          const model::Projection was = d.input;
          d.input.parts = {{qkvz, 0}};
          for (const auto& part : was.parts)
            if (part.column >= qkvz.rows) d.input.parts.push_back(part);
        });
      },
      "qkvz concatenated");
}

TEST(Mistake4, BAndASwapped) {
  for (const char* family : kFamilies)
    expect_noticed(
        family,
        [](GoldenModel& g) {
          const int64_t b = g.config.conv_channels() + g.config.linear_value_size(), Hv = g.config.linear_value_heads;
          for_each_delta(g, [&](DeltaWeights& d) {
            for (auto& part : d.input.parts)
              if (part.column >= b) part.column += part.column < b + Hv ? Hv : -Hv;
          });
        },
        "b and a swapped");
}

TEST(Mistake5, HeadsTiledInsteadOfGrouped) {
  for (const char* family : kFamilies)
    expect_noticed(
        family, [](GoldenModel& g) { for_each_delta(g, [](DeltaWeights& d) { d.head_map = HeadMap::tiled; }); }, "tiled heads");
}

TEST(Mistake8, DecayAlreadyExponentiatedOrRounded) {
  for (const char* family : kFamilies) {
    expect_noticed(
        family,
        [](GoldenModel& g) {
          for_each_delta(g, [](DeltaWeights& d) {
            for (float& a : d.a_log) a = -std::exp(a);
          });
        },
        "A_log holds -exp(A_log)");
    expect_noticed(
        family,
        [](GoldenModel& g) {
          for_each_delta(g, [](DeltaWeights& d) {
            for (float& a : d.a_log) a = bf16_to_f32(f32_to_bf16(a));
            for (float& b : d.dt_bias) b = bf16_to_f32(f32_to_bf16(b));
          });
        },
        "A_log and dt_bias in bf16");
  }
}

TEST(Mistake9, AStateThatLeaksIntoTheNextSequence) {
  for (const char* family : kFamilies) {
    const GoldenModel golden(family);
    std::vector<float> got(golden.want.size());
    HybridState state = golden.loaded.create_state("f32", 4096);
    for (int64_t n = 0; n < golden.prompts(); ++n) golden.append(state, {golden.input(0, golden.begin(n), golden.end(n), got)});
    EXPECT_GT(distance(got, golden.want).max, 10 * kMaxLogitError) << family;
  }
}

TEST(Mistake12, ExpertsWithoutRenormalisationOrGate) {
  for (const char* family : {"qwen3_next", "qwen3_5_moe"}) {
    expect_noticed(
        family, [](GoldenModel& g) { g.config.normalize_expert_weights = false; }, "no renormalisation");
    expect_noticed(
        family,
        [](GoldenModel& g) {
          g.config.normalize_expert_weights = true;
          ++g.config.experts_per_token;
        },
        "another k");
    // Without its gate the shared expert has weight 1: sigmoid(0) = 1/2 times a matrix twice as large.
    std::vector<std::vector<float>> doubled;
    const std::vector<float> zeros(256);
    expect_noticed(
        family,
        [&](GoldenModel& g) {
          for (model::LayerWeights& layer : g.weights.layers) {
            auto* experts = std::get_if<ExpertWeights>(&layer.feed_forward);
            if (!experts) continue;
            experts->shared_gate.parts.front().w = {zeros.data(), WeightType::f32, 1, g.config.hidden_size};
            Matrix& down = experts->shared.down.parts.front().w;
            std::vector<float> values(static_cast<size_t>(down.rows * down.cols));
            model::widen(down.type, down.data, 0, down.rows * down.cols, values.data());
            for (float& v : values) v *= 2;
            doubled.push_back(values);
            down = {doubled.back().data(), WeightType::f32, down.rows, down.cols};
          }
        },
        "shared expert without gate");
  }
}

// The softmax over all experts comes before top-k. The difference shows where weights are not normalised: softmax after top-k would
// normalise them.
TEST(Mistake12, TopKBeforeSoftmax) {
  GoldenModel golden("qwen3_next");
  const Expected expected(golden_models() / "qwen3_next" / "expected-not-renormalised.safetensors");
  golden.config.normalize_expert_weights = false;
  const Distance apart = distance(golden.logits(), expected.get<float>("logits"));
  EXPECT_LE(apart.max, kMaxLogitError);
  EXPECT_LE(apart.rms, kRmsLogitError);
  golden.config.normalize_expert_weights = true;
  EXPECT_GT(distance(golden.logits(), expected.get<float>("logits")).max, 10 * kMaxLogitError);
}

// ---- inside the delta rule: a layer in double

enum class Mistake {
  none,
  error_before_decay,
  output_before_update,
  mean_in_l2_norm,
  no_scale,
  scale_twice,
  state_transposed,
  window_off_by_one,
  conv_leaks,
  rule_leaks
};

using Vector = std::vector<double>;

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

Vector project(const Projection& p, const Vector& x) {
  Vector y(static_cast<size_t>(p.outputs));
  for (const auto& part : p.parts) {
    std::vector<float> w(static_cast<size_t>(part.w.rows * part.w.cols));
    model::widen(part.w.type, part.w.data, 0, part.w.rows * part.w.cols, w.data());
    for (int64_t n = 0; n < part.w.rows; ++n)
      for (int64_t k = 0; k < part.w.cols; ++k)
        y[static_cast<size_t>(part.column + n)] +=
            static_cast<double>(w[static_cast<size_t>(n * part.w.cols + k)]) * x[static_cast<size_t>(k)];
  }
  return y;
}

Vector rms_norm(const Vector& x, const float* weight, double eps) {
  double sum = 0;
  for (double v : x) sum += v * v;
  Vector y = x;
  for (size_t i = 0; i < y.size(); ++i)
    y[i] *= static_cast<double>(weight[i]) / std::sqrt(sum / static_cast<double>(x.size()) + eps);
  return y;
}

// One delta layer with a dense feed-forward over the golden prompts, from the golden residual stream before it.
std::vector<float> layer_in_double(const GoldenModel& g, size_t index, const std::vector<float>& before, Mistake mistake) {
  const model::ModelConfig& c = g.config;
  const auto& layer = g.weights.layers[index];
  const auto& w = std::get<DeltaWeights>(layer.mixer);
  const auto& ffn = std::get<model::SwigluWeights>(layer.feed_forward);
  const size_t H = static_cast<size_t>(c.hidden_size), Hk = static_cast<size_t>(c.linear_key_heads),
               Hv = static_cast<size_t>(c.linear_value_heads), K = static_cast<size_t>(c.linear_key_head_dim),
               V = static_cast<size_t>(c.linear_value_head_dim), C = static_cast<size_t>(c.conv_channels()),
               W = static_cast<size_t>(c.conv_width), r = Hv / Hk;
  std::vector<float> conv(C * W), norm(V), out(before.size());
  model::widen(*model::weight_type(w.conv.dtype), w.conv.data, 0, static_cast<int64_t>(C * W), conv.data());
  model::widen(*model::weight_type(w.norm.dtype), w.norm.data, 0, static_cast<int64_t>(V), norm.data());
  std::vector<Vector> history;               // inputs of the convolution
  std::vector<Vector> S(Hv, Vector(K * V));  // [K, V]
  for (int64_t n = 0; n < g.prompts(); ++n) {
    if (mistake != Mistake::conv_leaks) history.clear();
    if (mistake != Mistake::rule_leaks) S.assign(Hv, Vector(K * V));
    for (int64_t t = g.begin(n); t < g.end(n); ++t) {
      Vector x(before.begin() + t * static_cast<int64_t>(H), before.begin() + (t + 1) * static_cast<int64_t>(H));
      const Vector in = project(w.input, rms_norm(x, layer.mixer_norm.data(), c.rms_norm_eps));
      history.emplace_back(in.begin(), in.begin() + static_cast<int64_t>(C));
      Vector u(C);
      for (size_t ch = 0; ch < C; ++ch) {
        for (size_t j = 0; j < W; ++j) {
          size_t back = W - 1 - j;
          if (mistake == Mistake::window_off_by_one && back > 0) ++back;
          if (back < history.size()) u[ch] += static_cast<double>(conv[ch * W + j]) * history[history.size() - 1 - back][ch];
        }
        u[ch] *= sigmoid(u[ch]);
      }
      Vector mixed(Hv * V);
      for (size_t h = 0; h < Hv; ++h) {
        const size_t hk = h / r;
        const auto unit = [&](size_t first) {
          double sum = 0;
          for (size_t i = 0; i < K; ++i) sum += u[first + i] * u[first + i];
          if (mistake == Mistake::mean_in_l2_norm) sum /= static_cast<double>(K);
          Vector y(K);
          for (size_t i = 0; i < K; ++i) y[i] = u[first + i] / std::sqrt(sum + 1e-6);
          return y;
        };
        const Vector q = unit(hk * K), k = unit(Hk * K + hk * K);
        const double scale =
            mistake == Mistake::no_scale ? 1 : std::pow(static_cast<double>(K), mistake == Mistake::scale_twice ? -1 : -0.5);
        const double beta = sigmoid(in[C + Hv * V + h]);
        const double alpha = std::exp(-std::exp(static_cast<double>(w.a_log[h])) *
                                      std::log1p(std::exp(in[C + Hv * V + Hv + h] + static_cast<double>(w.dt_bias[h]))));
        Vector& s = S[h];
        Vector o(V), read(V);
        const auto dot_state = [&](const Vector& row, Vector& to) {
          to.assign(V, 0);
          for (size_t i = 0; i < K; ++i)
            for (size_t j = 0; j < V; ++j)
              to[j] += row[i] * s[mistake == Mistake::state_transposed ? (j * K + i) % (K * V) : i * V + j];
        };
        if (mistake == Mistake::error_before_decay) dot_state(k, read);
        for (double& v : s) v *= alpha;
        if (mistake == Mistake::output_before_update) dot_state(q, o);
        if (mistake != Mistake::error_before_decay) dot_state(k, read);
        for (size_t i = 0; i < K; ++i)
          for (size_t j = 0; j < V; ++j) s[i * V + j] += k[i] * beta * (u[2 * Hk * K + h * V + j] - read[j]);
        if (mistake != Mistake::output_before_update) dot_state(q, o);
        for (double& v : o) v *= scale;
        const Vector normed = rms_norm(o, norm.data(), c.rms_norm_eps);
        for (size_t j = 0; j < V; ++j) {
          const double z = in[C + h * V + j];
          mixed[h * V + j] = normed[j] * z * sigmoid(z);
        }
      }
      const Vector mix = project(w.output, mixed);
      for (size_t i = 0; i < H; ++i) x[i] += mix[i];
      Vector up = project(ffn.input, rms_norm(x, layer.feed_forward_norm.data(), c.rms_norm_eps));
      const size_t I = up.size() / 2;
      Vector hidden(I);
      for (size_t i = 0; i < I; ++i) hidden[i] = up[i] * sigmoid(up[i]) * up[I + i];
      const Vector down = project(ffn.down, hidden);
      for (size_t i = 0; i < H; ++i) out[static_cast<size_t>(t) * H + i] = static_cast<float>(x[i] + down[i]);
    }
  }
  return out;
}

TEST(MistakesInTheRule, AreNoticedByTheGoldenLayer) {
  const GoldenModel golden("qwen3_5");  // layer 2: a delta layer after attention, with a dense feed-forward
  const std::vector<float> before = golden.expected.get<float>("layer.1"), want = golden.expected.get<float>("layer.2");
  const auto moved = [&](Mistake mistake) { return distance(layer_in_double(golden, 2, before, mistake), want).max; };
  EXPECT_LT(moved(Mistake::none), 1e-4);
  const std::pair<Mistake, const char*> mistakes[] = {{Mistake::error_before_decay, "6: error before decay"},
                                                      {Mistake::output_before_update, "6: output before update"},
                                                      {Mistake::mean_in_l2_norm, "7: mean in the l2 norm"},
                                                      {Mistake::no_scale, "7: no scale"},
                                                      {Mistake::scale_twice, "7: scale twice"},
                                                      {Mistake::state_transposed, "10: state transposed"},
                                                      {Mistake::window_off_by_one, "11: window off by one"},
                                                      {Mistake::conv_leaks, "9: convolution leaks"},
                                                      {Mistake::rule_leaks, "9: rule leaks"}};
  for (const auto& [mistake, what] : mistakes) EXPECT_GT(moved(mistake), 2e-2) << what;
}

}  // namespace
