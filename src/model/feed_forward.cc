// The feed-forward half of a layer: SwiGLU, and experts chosen token by token with a shared one.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "model/network.h"

namespace weft::model {

void swiglu_layer(Step& step, const SwigluWeights& weights, int64_t size, Rows normed, Rows x) {
  const int64_t T = step.tokens();
  const Rows wide{step.memory.get(Workspace::wide, T * 2 * size), 2 * size};
  step.project(weights.input, T, normed, wide);
  step.other([&] { swiglu(step.stream, T, size, wide); });
  step.project(weights.down, T, wide, x, true);
}

namespace {

// The experts of every token: which, and how much each counts. Rows of the same expert lie together, tokens in order.
struct Routing {
  struct Choice {
    int64_t expert, row;
    float weight;
  };
  std::vector<std::vector<Choice>> of_token;  // experts ascending, so that sums have one order
  std::vector<int64_t> first_row;             // [experts + 1]
};

// Softmax over all experts, the most probable of them, their weights divided by their sum if the model says so.
std::vector<Routing::Choice> choose(const ModelConfig& c, const float* logits) {
  std::vector<float> p(logits, logits + c.experts);
  const float top = *std::max_element(p.begin(), p.end());
  float sum = 0;
  for (float& v : p) {
    const float e = std::exp(v - top);
    v = std::isnan(e) ? 0 : e;  // keeps the order below an order
    sum += v;
  }
  std::vector<int64_t> order(p.size());
  std::iota(order.begin(), order.end(), 0);
  const auto chosen = order.begin() + c.experts_per_token;
  std::partial_sort(order.begin(), chosen, order.end(), [&](int64_t a, int64_t b) {
    const float pa = p[static_cast<size_t>(a)], pb = p[static_cast<size_t>(b)];
    return pa != pb ? pa > pb : a < b;
  });
  std::sort(order.begin(), chosen);
  std::vector<Routing::Choice> choices;
  float of_chosen = 0;
  for (auto e = order.begin(); e != chosen; ++e) {
    choices.push_back({*e, 0, p[static_cast<size_t>(*e)] / sum});
    of_chosen += choices.back().weight;
  }
  if (c.normalize_expert_weights)
    for (Routing::Choice& choice : choices) choice.weight /= of_chosen;
  return choices;
}

Routing route(const ModelConfig& c, int64_t tokens, Rows logits) {
  Routing routing;
  routing.first_row.assign(static_cast<size_t>(c.experts) + 1, 0);
  for (int64_t t = 0; t < tokens; ++t) {
    routing.of_token.push_back(choose(c, logits.data + t * logits.stride));
    for (const Routing::Choice& choice : routing.of_token.back()) ++routing.first_row[static_cast<size_t>(choice.expert) + 1];
  }
  std::partial_sum(routing.first_row.begin(), routing.first_row.end(), routing.first_row.begin());
  std::vector<int64_t> next = routing.first_row;
  for (auto& choices : routing.of_token)
    for (Routing::Choice& choice : choices) choice.row = next[static_cast<size_t>(choice.expert)]++;
  return routing;
}

void add_tasks(std::vector<DenseTask>& tasks, const Projection& projection, int64_t rows, const float* x, int64_t x_stride,
               float* y, int64_t y_stride) {
  for (const ProjectionPart& part : projection.parts)
    tasks.push_back({part.w, x, x_stride, rows, y + part.column, y_stride, false});
}

}  // namespace

void expert_layer(Step& step, const ExpertWeights& weights, Rows normed, Rows x) {
  const ModelConfig& c = step.config;
  const int64_t T = step.tokens(), H = c.hidden_size, I = c.expert_size, E = c.experts, rows = T * c.experts_per_token;
  const Rows logits{step.memory.get(Workspace::router, T * E), E};
  const Rows gathered{step.memory.get(Workspace::gathered, rows * H), H};
  const Rows hidden{step.memory.get(Workspace::experts, rows * 2 * I), 2 * I};
  const Rows out{step.memory.get(Workspace::experts_out, rows * H), H};
  step.project(weights.router, T, normed, logits);

  Routing routing;
  step.other([&] {
    routing = route(c, T, logits);
    for (int64_t t = 0; t < T; ++t)
      for (const Routing::Choice& choice : routing.of_token[static_cast<size_t>(t)])
        std::copy_n(normed.data + t * normed.stride, H, gathered.data + choice.row * H);
  });
  std::vector<DenseTask> up, down;
  if (!step.pretended())
    for (int64_t e = 0; e < E; ++e) {
      const int64_t first = routing.first_row[static_cast<size_t>(e)],
                    count = routing.first_row[static_cast<size_t>(e) + 1] - first;
      if (count == 0) continue;
      const SwigluWeights& expert = weights.experts[static_cast<size_t>(e)];
      add_tasks(up, expert.input, count, gathered.data + first * H, H, hidden.data + first * 2 * I, 2 * I);
      add_tasks(down, expert.down, count, hidden.data + first * 2 * I, 2 * I, out.data + first * H, H);
    }
  step.project_all(up);
  step.other([&] { swiglu(step.stream, rows, I, hidden); });
  step.project_all(down);
  step.other([&] {
    for (int64_t t = 0; t < T; ++t)
      for (const Routing::Choice& choice : routing.of_token[static_cast<size_t>(t)])
        add_scaled(step.stream, H, out.data + choice.row * H, choice.weight, x.data + t * x.stride);
  });

  if (c.shared_expert_size == 0) return;
  const int64_t S = c.shared_expert_size;
  const Rows wide{step.memory.get(Workspace::wide, T * 2 * S), 2 * S};
  const Rows shared{step.memory.get(Workspace::mixed, T * H), H};
  const Rows gate{step.memory.get(Workspace::router, T), 1};
  step.project(weights.shared.input, T, normed, wide);
  step.other([&] { swiglu(step.stream, T, S, wide); });
  step.project(weights.shared.down, T, wide, shared);
  step.project(weights.shared_gate, T, normed, gate);
  step.other([&] { add_gated(step.stream, T, H, shared, gate, x); });
}

}  // namespace weft::model
