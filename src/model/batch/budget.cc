// The budget of a batcher: see budget.h.
#include "model/batch/budget.h"

#include <algorithm>
#include <string>

#include "core/check.h"
#include "model/parts.h"
#include "model/state/hybrid_pools.h"

namespace weft::model {
namespace {

constexpr int64_t kMostSequences = 4096, kMostKept = 1 << 16, kMostBytes = int64_t{1} << 60;

Status check_batcher_options(const BatcherOptions& options) {
  Check check(kBatcherOp);
  check.between("sequences", options.sequences, 1, kMostSequences).between("queue", options.queue, 1, 1 << 20);
  check.between("capacity", options.capacity, 1, INT32_MAX);
  check.between("memory", options.memory, 0, kMostBytes).between("store", options.store, 0, kMostBytes);
  check.between("longest_step", options.longest_step.count(), 1, 3'600'000);
  check.between("session_expiry", options.session_expiry.count(), 1, int64_t{1} << 31);
  check.require(options.every >= 0 && options.every % kPageTokens == 0, "every",
                [&] { return "is " + std::to_string(options.every) + ", wanted a multiple of " + std::to_string(kPageTokens); });
  return std::move(check).status();
}

}  // namespace

Budget plan_budget(const Model& model, const BatcherOptions& options) {
  if (Status status = check_batcher_options(options); !status) throw Error(std::move(status));
  Budget budget;
  budget.plan = model.plan(options.kv, options.capacity, options.sequences, options.stream);
  const HybridBytes state = hybrid_bytes(budget.plan, 0);
  for (const LayerMemory& layer : budget.plan.layers) {
    budget.page_bytes += model::page_bytes(layer);
    budget.kept_bytes += (recurrent_numbers(layer) + history_numbers(layer)) * kF32;
  }
  const int64_t full_pages = pages_of(options.capacity), sequence_bytes = full_pages * budget.page_bytes + budget.kept_bytes;
  // While a checkpoint is copied, the copy and its recurrent states exist beside the store.
  const int64_t checkpoint =
      options.store > 0 ? std::min(options.store, sequence_bytes + options.capacity * 4) + budget.kept_bytes : 0;
  // Logits of every sequence. Logits and normed rows of one piece of a prompt whose log probabilities a request wants.
  const int64_t logits =
      (options.sequences + kPageTokens) * model.vocab_size() + 2 * kPageTokens * parts_of(model).config.hidden_size;
  budget.scratch = model.bytes(options.stream, budget.plan, options.capacity).scratch +
                   logits * static_cast<int64_t>(sizeof(float)) + checkpoint;
  const int64_t fixed = state.recurrent + state.windows + budget.scratch + options.store;
  const bool on_device = budget.plan.place != Place::host;  // a device allocates all pages of the plan at once
  const int64_t least = fixed + (on_device ? options.sequences : 1) * sequence_bytes;
  budget.bytes = options.memory > 0 ? options.memory : fixed + options.sequences * sequence_bytes;
  if (budget.bytes < least)
    throw Error(fail(Code::invalid_argument, kBatcherOp, "memory",
                     "is " + std::to_string(budget.bytes) + " bytes, wanted at least " + std::to_string(least) + ": " +
                         std::to_string(state.recurrent + state.windows) + " for the states of " +
                         std::to_string(options.sequences) + " sequences, " + std::to_string(budget.scratch) + " of scratch, " +
                         std::to_string(options.store) + " for the prefix store and " + std::to_string(sequence_bytes) +
                         (on_device ? " for each sequence of " : " for one sequence of ") + std::to_string(options.capacity) +
                         " tokens"));
  // As many kept sessions as there would be sequences of full length.
  const int64_t rest = budget.bytes - fixed;
  budget.kept = std::min(kMostKept, rest / sequence_bytes);
  budget.pages = budget.page_bytes > 0 ? std::min<int64_t>((rest - budget.kept * budget.kept_bytes) / budget.page_bytes, INT32_MAX)
                                       : INT32_MAX;
  // All sequences and sessions together cannot hold more pages than this.
  budget.pages = std::min(budget.pages, (options.sequences + budget.kept) * full_pages);
  return budget;
}

RequestPages pages_of_request(const Budget& budget, int64_t prompt_tokens, int64_t max_tokens) {
  // The sequence never holds the last written token.
  const int64_t room = budget.plan.capacity - prompt_tokens, written = std::clamp<int64_t>(max_tokens - 1, 0, room);
  const int64_t shared = prompt_tokens / kPageTokens;
  return {shared, pages_of(prompt_tokens + written) - shared};
}

}  // namespace weft::model
