// Perplexity over windows of a text: see weft/perplexity.h.
#include "weft/perplexity.h"

#include <algorithm>
#include <chrono>
#include <string>

#include "core/check.h"
#include "cpu/runner-inl.h"
#include "model/network/cpu/activations.h"
#include "model/parts.h"
#include "model/state/state_header.h"

namespace weft {
namespace {

// Logits held at a time: 64 MB.
constexpr int64_t kLogitNumbers = 16 << 20;

void check(std::span<const int32_t> tokens, const PerplexityWindows& windows, int64_t vocab) {
  const auto refuse = [](const char* argument, const std::string& what) {
    throw Error(fail(Code::invalid_argument, "perplexity", argument, what));
  };
  if (tokens.size() < 2) refuse("tokens", "are " + std::to_string(tokens.size()) + ", wanted at least 2");
  // append() checks the tokens that it gets; the last token of the text, and the one after each piece, are read before that.
  if (const auto invalid = model::first_invalid_token(tokens, vocab)) refuse("tokens", "hold token " + *invalid);
  if (windows.context < 1) refuse("context", "is " + std::to_string(windows.context) + ", wanted at least 1");
  if (windows.stride < 1 || windows.stride > windows.context)
    refuse("stride", "is " + std::to_string(windows.stride) + ", wanted 1 to the context of " + std::to_string(windows.context));
}

}  // namespace

Perplexity measure_perplexity(const Model& model, const Stream& stream, HybridState& state, std::span<const int32_t> tokens,
                              const PerplexityWindows& windows, const std::function<bool(int64_t, int64_t)>& proceed) {
  check(tokens, windows, model.vocab_size());
  const auto begin = std::chrono::steady_clock::now();
  const int64_t vocab = model.vocab_size(), last = static_cast<int64_t>(tokens.size()) - 1;  // tokens with a successor
  const int64_t piece = std::clamp<int64_t>(kLogitNumbers / vocab / model::kCutTokens * model::kCutTokens, model::kCutTokens,
                                            model::step_tokens(stream, model::parts_of(model).config));
  std::vector<float> logits(static_cast<size_t>(std::min(piece, last) * vocab));
  std::vector<double> losses(static_cast<size_t>(piece));
  Perplexity result;
  double sum = 0;
  int64_t predicted = 0;  // tokens 1 to this one are predicted
  for (int64_t start = 0; predicted < last && result.complete; start += windows.stride) {
    const int64_t end = std::min(last, start + windows.context);
    state.reset(0);
    for (int64_t at = start; at < end && result.complete;) {
      // Tokens that an earlier window predicted need no logits.
      const int64_t count = std::min(at < predicted ? predicted - at : end - at, piece);
      ModelInput input{0, tokens.subspan(static_cast<size_t>(at), static_cast<size_t>(count)), nullptr, true};
      if (at >= predicted) input.logits = logits.data();
      model.append(stream, state, {input}, &result.times);
      result.fed += count;
      if (at >= predicted) {
        cpu::parallel_for(
            cpu::worth_threads(cpu::thread_count(stream), 10.0 * static_cast<double>(count * vocab)), count, [&](int64_t t, int) {
              const float* row = logits.data() + t * vocab;
              losses[static_cast<size_t>(t)] =
                  model::log_sum_exp(stream, row, vocab) - static_cast<double>(row[tokens[static_cast<size_t>(at + t + 1)]]);
            });
        for (int64_t t = 0; t < count; ++t) sum += losses[static_cast<size_t>(t)];
        predicted += count;
      }
      at += count;
      if (proceed) result.complete = proceed(predicted, last);
    }
  }
  result.tokens = predicted;
  result.nll = predicted > 0 ? sum / static_cast<double>(predicted) : 0;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

}  // namespace weft
