// The memory that a batcher may allocate: one budget of bytes for its state, scratch, kept sessions and prefix store.
#pragma once

#include <cstdint>

#include "weft/batcher.h"

namespace weft::model {

inline constexpr const char* kBatcherOp = "batcher";

// A KV page counts from the moment a request that may need it is admitted. Pages of kept sessions count, too.
struct Budget {
  HybridPlan plan;
  int64_t bytes = 0;       // the whole budget
  int64_t scratch = 0;     // bytes for steps, logits and copies of checkpoints
  int64_t page_bytes = 0;  // bytes of one KV page in all layers
  int64_t pages = 0;       // KV pages of running sequences and kept sessions together
  int64_t kept_bytes = 0;  // bytes of recurrent states and windows of one kept session
  int64_t kept = 0;        // most kept sessions
};

// Throws Error (operator kBatcherOp) for options out of range and where BatcherOptions::memory does not hold one sequence.
Budget plan_budget(const Model& model, const BatcherOptions& options);

// Pages of a request: those of the prompt that all its choices share, and those of each choice.
struct RequestPages {
  int64_t shared = 0, each = 0;
  int64_t total(int64_t choices) const { return shared + choices * each; }
};
RequestPages pages_of_request(const Budget& budget, int64_t prompt_tokens, int64_t max_tokens);

}  // namespace weft::model
