// How well a model predicts a text: the mean negative log likelihood over windows of its tokens.
//
//   nll = -1/n sum_t ln p(token t | the tokens of its window before t),   perplexity = exp(nll)
//
// ABI: relink C++ callers between minor versions.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "weft/model.h"

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {

// Windows begin at tokens 0, stride, 2 stride, ... and hold up to `context` tokens. Each window starts from an empty state and
// predicts the tokens that no earlier window predicted, each from all tokens before it in the window. With stride = context windows
// do not overlap. A smaller stride gives every token at least context - stride tokens of history.
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
  bool complete = true;  // false: `proceed` stopped the measurement, and nll is that of the tokens predicted so far
};

// Resets sequence 0 of `state` and uses it; it must have room for a window. `proceed(done, all)` is called with counts of predicted
// tokens after every step; false stops. Throws Error (operator "perplexity") for fewer than two tokens or an invalid context or
// stride.
Perplexity measure_perplexity(const Model& model, const Stream& stream, HybridState& state, std::span<const int32_t> tokens,
                              const PerplexityWindows& windows, const std::function<bool(int64_t done, int64_t all)>& proceed = {});

}  // namespace weft
#pragma GCC visibility pop
