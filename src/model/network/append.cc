// Appends tokens to sequences: checks the inputs and splits them into steps.
#include <algorithm>
#include <string>

#include "core/backend.h"
#include "core/check.h"
#include "model/access.h"
#include "model/network/append.h"
#include "model/state/hybrid_pools.h"

namespace weft::model {
namespace {

// Throws Error for an argument of `op`.
struct Refusal {
  const char* op;
  [[noreturn]] void operator()(const char* argument, const std::string& what) const {
    throw Error(fail(Code::invalid_argument, op, argument, what));
  }
};

// Is the memory of a layer what a layer of this kind needs? `records`: does the plan have rollback?
bool fits(const ModelConfig& c, LayerKind kind, const DeltaMemory& memory, bool records) {
  return kind == LayerKind::linear_attention && memory.value_heads == c.linear_value_heads &&
         memory.value_dim == c.linear_value_head_dim && memory.key_dim == c.linear_key_head_dim &&
         memory.channels == c.conv_channels() && memory.width == c.conv_width &&
         (!records || (memory.key_heads == c.linear_key_heads && memory.head_map == c.head_map));
}

bool fits(const ModelConfig& c, LayerKind kind, const AttentionMemory& memory, bool) {
  return kind == LayerKind::full_attention && memory.kv_heads == c.kv_heads && memory.recipe.k.head_dim == c.head_dim &&
         memory.recipe.v.head_dim == c.head_dim;
}

void check_inputs(const Refusal& refuse, const ModelConfig& c, const HybridState& state, std::span<const ModelInput> inputs,
                  bool from_start) {
  std::vector<bool> seen(static_cast<size_t>(state.sequences()));
  for (const ModelInput& input : inputs) {
    const std::string sequence = "sequence " + std::to_string(input.sequence);
    if (input.sequence < 0 || input.sequence >= state.sequences())
      refuse("inputs", "name " + sequence + ", wanted 0 to " + std::to_string(state.sequences() - 1));
    if (seen[static_cast<size_t>(input.sequence)]) refuse("inputs", "name " + sequence + " twice, wanted once");
    seen[static_cast<size_t>(input.sequence)] = true;
    const int64_t left = state.plan().capacity - (from_start ? 0 : state.tokens(input.sequence)),
                  count = static_cast<int64_t>(input.tokens.size());
    if (count > left)
      refuse("inputs", "have " + std::to_string(count) + " tokens for " + sequence + ", wanted at most " + std::to_string(left) +
                           " of its capacity of " + std::to_string(state.plan().capacity));
    if (count == 0 && ((input.logits && !input.every_token) || input.best))
      refuse("inputs", "ask for logits of " + sequence + " and have no tokens for it, wanted at least one");
    for (int32_t token : input.tokens)
      if (token < 0 || token >= c.vocab_size)
        refuse("inputs", "hold token " + std::to_string(token) + ", wanted 0 to " + std::to_string(c.vocab_size - 1));
  }
}

// An input and how many of its tokens are done. Whether it decodes depends only on its own length, so that its results do not
// depend on the other inputs.
struct Pending {
  const ModelInput* input = nullptr;
  int64_t done = 0;
  int64_t left() const { return static_cast<int64_t>(input->tokens.size()) - done; }
  bool decodes() const { return static_cast<int64_t>(input->tokens.size()) <= kMaxDecodeTokens && !input->prompt_part; }
};

// Tokens of one input that a step takes if it can take `most`: all that are left, or a multiple of kCutTokens.
int64_t tokens_of_step(const Pending& pending, int64_t most) {
  if (pending.left() <= most) return pending.left();
  return pending.decodes() ? 0 : most / kCutTokens * kCutTokens;
}

}  // namespace

void check_backend(const char* op, const Stream& stream) {
  if (stream.backend == Backend::vulkan)
    Refusal{op}("stream", "is on vulkan, which computes no models yet, wanted cpu, cuda or reference");
}

void check_memory(const char* op, const char* argument, const ModelConfig& c, const Stream& stream, const HybridPlan& plan) {
  const Refusal refuse{op};
  const auto name = [](Place place, int device) {
    return place == Place::host ? std::string("the host") : "device " + std::to_string(device);
  };
  const std::string got = name(plan.place, plan.device),
                    wanted = name(stream.backend == Backend::cuda ? Place::cuda : Place::host, stream.device);
  if (got != wanted) refuse(argument, "is on " + got + ", wanted one on " + wanted + " like the stream");
  bool all = plan.layers.size() == c.layers.size();
  for (size_t i = 0; all && i < plan.layers.size(); ++i)
    all = std::visit([&](const auto& memory) { return fits(c, c.layers[i].mixer, memory, plan.rollback > 0); }, plan.layers[i]);
  if (!all) refuse(argument, "was made for another model, wanted one from create_state() or plan() of this model");
}

void check_append(const char* op, const ModelConfig& config, const Stream& stream, const HybridState& state,
                  std::span<const ModelInput> inputs, bool from_start) {
  check_backend(op, stream);
  if (Status status = check_stream(stream, op); !status) throw Error(std::move(status));
  if (pools_of(state).source->pretended)
    Refusal{op}("state", "is pretended (for dry runs) and has no memory, wanted one from HybridState::create()");
  check_memory(op, "state", config, stream, state.plan());
  check_inputs({op}, config, state, inputs, from_start);
}

void append_tokens(const ModelConfig& config, const Weights& weights, Compute& compute, Workspace& memory, HybridState& state,
                   std::span<const ModelInput> inputs, ModelTimes* times, const Observer& observer) {
  // In every step the sequences that decode come first, then those that prefill, so that each op takes consecutive sequences.
  std::vector<Pending> pending;
  for (const ModelInput& input : inputs)
    if (!input.tokens.empty()) pending.push_back({&input});
  std::stable_partition(pending.begin(), pending.end(), [](const Pending& p) { return p.decodes(); });

  std::vector<SequenceTokens> parts;
  std::vector<int32_t> tokens;
  std::vector<LogitRow> wanted;
  while (!pending.empty()) {
    parts.clear();
    tokens.clear();
    wanted.clear();
    for (Pending& p : pending) {
      const int64_t row = static_cast<int64_t>(tokens.size()),
                    count = tokens_of_step(p, step_tokens(compute.stream(), config) - row);
      if (count == 0) continue;
      const auto from = p.input->tokens.subspan(static_cast<size_t>(p.done), static_cast<size_t>(count));
      tokens.insert(tokens.end(), from.begin(), from.end());
      parts.push_back({p.input->sequence, count, p.decodes()});
      if (p.input->logits && p.input->every_token)
        for (int64_t t = 0; t < count; ++t)
          wanted.push_back({row + t, p.input->logits + (p.done + t) * config.vocab_size, nullptr});
      p.done += count;
      if (p.left() > 0) continue;
      if (p.input->logits && p.input->every_token)
        wanted.back().best = p.input->best;
      else if (p.input->logits || p.input->best)
        wanted.push_back({row + count - 1, p.input->logits, p.input->best});
    }
    const StepCounts before = compute.counts();
    Step step{config, compute, memory, state, state.append(parts, &compute.stream())};
    run_step(step, weights, tokens, wanted, observer);
    if (times) {
      times->dense += step.times.dense;
      times->mixers += step.times.mixers;
      times->other += step.times.other;
      const StepCounts& now = compute.counts();
      times->steps += now.steps - before.steps;
      times->replayed += now.replayed - before.replayed;
      times->failed_captures += now.failed_captures - before.failed_captures;
      if (now.failed_captures > before.failed_captures) times->why = now.why;
    }
    std::erase_if(pending, [](const Pending& p) { return p.left() == 0; });
  }
}

}  // namespace weft::model
