// One step of a hybrid model, layer by layer: see network.h.
#include "model/network.h"

#include <cmath>

namespace weft::model {

int64_t Workspace::bytes() const {
  size_t sum = scratch_.bytes();
  for (const Block& block : buffers_) sum += block.bytes();
  return static_cast<int64_t>(sum);
}

std::byte* Workspace::grow(Block& block, size_t bytes) {
  if (block.bytes() < bytes) {
    block = Block();  // what it held is garbage between steps
    block = pretended_ ? Block::pretend(bytes, cursor_) : Block::allocate(bytes);
  }
  return block.data();
}

void Step::project_all(std::span<const DenseTask> tasks) {
  timed(times.dense, [&] { dense(stream, tasks); });
}

void Step::project(const Projection& projection, int64_t rows, Rows x, Rows y, bool add) {
  std::vector<DenseTask> tasks;
  tasks.reserve(projection.parts.size());
  for (const ProjectionPart& part : projection.parts)
    tasks.push_back({part.w, x.data, x.stride, rows, y.data + part.column, y.stride, add});
  project_all(tasks);
  if (!projection.bias.empty()) other([&] { add_bias(stream, rows, projection.outputs, y, projection.bias.data()); });
}

namespace {

// Angles as transformers computes them, in f32: position * frequency, then cosine and sine.
void fill_rotations(Step& step) {
  const RopeConfig& rope = step.config.rope;
  const auto half = static_cast<int64_t>(rope.frequencies.size());
  float* cosine = step.memory.get(Workspace::cosine, step.tokens() * half);
  float* sine = step.memory.get(Workspace::sine, step.tokens() * half);
  step.other([&] {
    const auto* positions = static_cast<const int32_t*>(step.batch.positions.data);
    const auto factor = static_cast<float>(rope.factor);
    for (int64_t t = 0; t < step.tokens(); ++t)
      for (int64_t j = 0; j < half; ++j) {
        const float angle = static_cast<float>(positions[t]) * static_cast<float>(rope.frequencies[static_cast<size_t>(j)]);
        cosine[t * half + j] = std::cos(angle) * factor;
        sine[t * half + j] = std::sin(angle) * factor;
      }
  });
}

void write_logits(Step& step, const Weights& weights, Rows x, std::span<const LogitRow> wanted) {
  const int64_t H = step.config.hidden_size, count = static_cast<int64_t>(wanted.size());
  const Rows rows{step.memory.get(Workspace::head, count * H), H};
  if (step.pretended()) return;
  const auto eps = static_cast<float>(step.config.rms_norm_eps);
  step.other([&] {
    for (int64_t i = 0; i < count; ++i)
      rms_norm(step.stream, 1, H, {x.data + wanted[static_cast<size_t>(i)].row * x.stride, H}, weights.final_norm.data(), eps,
               {rows.data + i * H, H});
  });
  // Rows whose logits follow each other in memory are one product.
  const int64_t vocab = weights.head.rows;
  std::vector<DenseTask> tasks;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!tasks.empty() && wanted[i].logits == tasks.back().y + tasks.back().M * vocab)
      ++tasks.back().M;
    else
      tasks.push_back({weights.head, rows.data + static_cast<int64_t>(i) * H, H, 1, wanted[i].logits, vocab, false});
  }
  step.project_all(tasks);
}

}  // namespace

void run_step(Step& step, const Weights& weights, std::span<const int32_t> tokens, std::span<const LogitRow> wanted,
              const Observer& observer) {
  const int64_t T = step.tokens(), H = step.config.hidden_size;
  const auto eps = static_cast<float>(step.config.rms_norm_eps);
  const Rows x{step.memory.get(Workspace::x, T * H), H}, normed{step.memory.get(Workspace::normed, T * H), H};
  step.other([&] {
    for (int64_t t = 0; t < T; ++t)
      convert(step.stream, weights.embedding.dtype, weights.embedding.data, tokens[static_cast<size_t>(t)] * H, H, x.data + t * H);
  });
  if (observer) observer(-1, x.data);
  fill_rotations(step);
  for (size_t i = 0; i < weights.layers.size(); ++i) {
    const LayerWeights& layer = weights.layers[i];
    step.other([&] { rms_norm(step.stream, T, H, x, layer.mixer_norm.data(), eps, normed); });
    if (const auto* delta = std::get_if<DeltaWeights>(&layer.mixer))
      delta_layer(step, static_cast<int64_t>(i), *delta, normed, x);
    else
      attention_layer(step, static_cast<int64_t>(i), std::get<AttentionWeights>(layer.mixer), normed, x);
    step.other([&] { rms_norm(step.stream, T, H, x, layer.feed_forward_norm.data(), eps, normed); });
    if (const auto* swiglu = std::get_if<SwigluWeights>(&layer.feed_forward))
      swiglu_layer(step, *swiglu, step.config.intermediate_size, normed, x);
    else
      expert_layer(step, std::get<ExpertWeights>(layer.feed_forward), normed, x);
    if (observer) observer(static_cast<int64_t>(i), x.data);
  }
  if (observer) {
    rms_norm(step.stream, T, H, x, weights.final_norm.data(), eps, normed);
    observer(static_cast<int64_t>(weights.layers.size()), normed.data);
  }
  if (!wanted.empty()) write_logits(step, weights, x, wanted);
}

}  // namespace weft::model
