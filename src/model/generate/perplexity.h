// How well a model predicts a text: mean negative log likelihood over windows of its tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "weft/model.h"

namespace weft::model {

// Windows begin at tokens 0, stride, 2 stride, ... and feed up to `context` tokens, each from an empty memory; in each, the tokens that
// no earlier window predicted are predicted from all before them in the window. With stride = context windows do not overlap; a
// smaller stride gives every token at least context - stride tokens of history.
struct PerplexityWindows {
  int64_t context = 2048;
  int64_t stride = 2048;  // 1 to context
};

struct Perplexity {
  double nll = 0;      // nats per token
  int64_t tokens = 0;  // predicted: all but the first
  int64_t fed = 0;     // tokens that went through the model
  double seconds = 0;
  ModelTimes times;
  bool complete = true;  // false: stopped by `proceed`
};

// `state` must have room for a window in its sequence 0, and is reset. `proceed(done, all)` is called with predicted tokens after every
// piece of work; false stops. Throws Error for fewer than two tokens or windows that make no sense.
Perplexity measure_perplexity(const Model& model, const Stream& stream, HybridState& state, std::span<const int32_t> tokens,
                              const PerplexityWindows& windows, const std::function<bool(int64_t done, int64_t all)>& proceed = {});

}  // namespace weft::model
