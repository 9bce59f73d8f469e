// One step of a hybrid model, layer by layer: see network.h.
#include "model/network/network.h"

#include <algorithm>

namespace weft::model {

int64_t Workspace::bytes() const {
  size_t sum = scratch_.bytes();
  for (const Block& block : buffers_) sum += block.bytes();
  return static_cast<int64_t>(sum);
}

std::byte* Workspace::grow(Block& block, size_t bytes) {
  if (block.bytes() < bytes) {
    block = Block();  // frees the old block first; its contents are not needed between steps
    block = pretended_ ? Block::pretend(bytes, cursor_) : Block::allocate(bytes, place_, device_);
    ++generation_;
  }
  return block.data();
}

namespace {

void fill_rotations(Step& step) {
  const RopeConfig& rope = step.config.rope;
  const auto half = static_cast<int64_t>(rope.frequencies.size());
  const Tensor cosine = step.memory.get(Workspace::cosine, step.tokens(), half);
  const Tensor sine = step.memory.get(Workspace::sine, step.tokens(), half);
  step.other([&] { step.compute.rotations(rope, step.batch.positions, cosine, sine); });
}

bool any_best(std::span<const LogitRow> wanted) {
  return std::any_of(wanted.begin(), wanted.end(), [](const LogitRow& row) { return row.best != nullptr; });
}

// Workspace outputs of the head for the rows `wanted`. On a device `logits` holds all rows; on the host it is used for rows whose
// logits are needed only for `best`.
struct HeadOutputs {
  Tensor logits, best;
};
HeadOutputs outputs_of(Step& step, const Weights& weights, std::span<const LogitRow> wanted) {
  const auto count = static_cast<int64_t>(wanted.size());
  const bool any_without = std::any_of(wanted.begin(), wanted.end(), [](const LogitRow& row) { return !row.logits; });
  HeadOutputs head;
  if (step.compute.place() != Place::host || (any_without && any_best(wanted)))
    head.logits = step.memory.get(Workspace::logits, count, weights.head.rows);
  if (any_best(wanted)) head.best = step.memory.get(Workspace::best, count, 1, DType::i32);
  return head;
}

// Computes the logits of the rows `wanted`, at most logit_rows() of them. Consecutive rows are normed in one call.
HeadOutputs project_rows(Step& step, const Weights& weights, const Tensor& x, std::span<const LogitRow> wanted) {
  const auto count = static_cast<int64_t>(wanted.size());
  const Tensor rows = step.memory.get(Workspace::head, count, step.config.hidden_size, step.operand());
  const HeadOutputs head = outputs_of(step, weights, wanted);
  const Tensor split = step.split_buffer(rows);
  if (step.pretended()) return head;
  for (int64_t i = 0, run = 1; i < count; i += run, run = 1) {
    const int64_t first = wanted[static_cast<size_t>(i)].row;
    while (i + run < count && wanted[static_cast<size_t>(i + run)].row == first + run) ++run;
    step.norm(rows_of(x, first, run), weights.final_norm, rows_of(rows, i, run));
  }
  step.timed(step.times.dense, [&] { step.compute.project_head(weights.head, rows, split, wanted, head.logits, head.best); });
  return head;
}

void run_layers(Step& step, const Weights& weights, const Tensor& x, const Observer& observer) {
  step.other([&] { step.compute.embed(weights.embedding, x); });
  const auto observe = [&](int64_t layer, const Tensor& rows) {
    if (observer) observer(layer, step.compute.rows_on_host(rows));
  };
  observe(-1, x);
  fill_rotations(step);
  for (size_t i = 0; i < weights.layers.size(); ++i) {
    const LayerWeights& layer = weights.layers[i];
    if (const auto* delta = std::get_if<DeltaWeights>(&layer.mixer))
      delta_layer(step, static_cast<int64_t>(i), *delta, layer.mixer_norm, x);
    else
      attention_layer(step, static_cast<int64_t>(i), std::get<AttentionWeights>(layer.mixer), layer.mixer_norm, x);
    if (const auto* swiglu = std::get_if<SwigluWeights>(&layer.feed_forward))
      swiglu_layer(step, *swiglu, step.config.intermediate_size, layer.feed_forward_norm, x);
    else
      expert_layer(step, std::get<ExpertWeights>(layer.feed_forward), layer.feed_forward_norm, x);
    observe(static_cast<int64_t>(i), x);
  }
  if (observer) {
    const Tensor normed = step.memory.get(Workspace::normed, step.tokens(), step.config.hidden_size, step.operand());
    step.norm(x, weights.final_norm, normed);
    observe(static_cast<int64_t>(weights.layers.size()), normed);
  }
}

StepKey key_of(const Step& step, std::span<const LogitRow> wanted) {
  StepKey key;
  key.tokens = step.tokens();
  key.sequences = step.batch.sequences.count;
  key.decoding = step.batch.decoding;
  key.decoded_tokens = step.batch.decoded_tokens;
  key.longest = step.batch.sequences.max_tokens;
  key.table_width = step.batch.page_table.sizes[1];
  for (const LogitRow& row : wanted) key.rows.push_back(row.row);
  key.best = any_best(wanted);
  for (const Tensor* t : {&step.batch.slots, &step.batch.positions, &step.batch.page_table}) key.addresses.push_back(t->data);
  const std::vector<LayerMemory>& layers = step.state.plan().layers;
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto layer = static_cast<int64_t>(i);
    if (std::holds_alternative<DeltaMemory>(layers[i])) {
      key.addresses.push_back(step.state.window(layer).data);
      continue;
    }
    const KvCache cache = step.state.cache(layer, step.batch);
    key.pages = cache.k.codes.sizes[0];
    for (const Tensor* t : {&cache.k.codes, &cache.k.gains, &cache.v.codes, &cache.v.gains}) key.addresses.push_back(t->data);
  }
  key.workspace = step.memory.generation();
  key.state = step.state.identity();
  return key;
}

}  // namespace

void run_step(Step& step, const Weights& weights, std::span<const int32_t> tokens, std::span<const LogitRow> wanted,
              const Observer& observer) {
  const Tensor x = step.memory.get(Workspace::x, step.tokens(), step.config.hidden_size);
  const auto most = static_cast<size_t>(step.compute.logit_rows(weights.head.rows));
  if (step.pretended()) {
    step.batch = step.compute.pretend(step.batch, step.state.plan());
    run_layers(step, weights, x, {});
    if (!wanted.empty()) project_rows(step, weights, x, wanted.first(std::min(most, wanted.size())));
    return;
  }
  step.batch = step.compute.begin_step(step.batch, step.state.plan(), tokens);
  const std::span<const LogitRow> first = wanted.first(std::min(most, wanted.size()));
  const auto work = [&] {
    run_layers(step, weights, x, observer);
    if (!first.empty()) project_rows(step, weights, x, first);
  };
  // Graphs are used only for steps that decode. Prompts are long enough to hide launch times and rarely repeat a length, and the
  // records that a step replays differ from step to step.
  if (observer || step.batch.replays || step.batch.decoded_tokens < step.tokens()) {
    step.compute.run(nullptr, work);
  } else {
    const StepKey key = key_of(step, first);
    step.compute.run(&key, work);
  }
  if (first.empty()) return;
  const auto fetch = [&](std::span<const LogitRow> rows, const HeadOutputs& head) {
    step.compute.fetch_logits(rows, head.logits, head.best);
  };
  fetch(first, outputs_of(step, weights, first));
  for (std::span<const LogitRow> rest = wanted.subspan(first.size()); !rest.empty();) {
    const std::span<const LogitRow> some = rest.first(std::min(most, rest.size()));
    fetch(some, project_rows(step, weights, x, some));
    rest = rest.subspan(some.size());
  }
}

}  // namespace weft::model
