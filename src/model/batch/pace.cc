// The size of prompt pieces: see pace.h.
#include "model/batch/pace.h"

#include <algorithm>

#include "model/network/append.h"

namespace weft::model {
namespace {

constexpr double kMargin = 0.8;   // of the longest step: steps vary
constexpr double kForget = 0.25;  // weight of a faster measurement; a slower one counts at once

}  // namespace

int64_t Pace::prompt_tokens(int64_t decoding) const {
  int64_t tokens = kCutTokens;
  if (seconds_a_token_ > 0) {
    const double all = std::min(kMargin * longest_ / seconds_a_token_, static_cast<double>(most_));
    // At most twice the latest piece, because a small step predicts the time of a large one badly.
    tokens = std::min(static_cast<int64_t>(all) - decoding, std::max(2 * last_, kCutTokens));
  }
  return std::max(tokens / kCutTokens * kCutTokens, kCutTokens);
}

void Pace::measure(int64_t decoding, int64_t prompt, double seconds) {
  // Reading the weights bounds a small step, so its time says little about the time of a token.
  if (prompt == 0 || decoding + prompt < kCutTokens) return;
  last_ = (prompt + kCutTokens - 1) / kCutTokens * kCutTokens;
  const double one = seconds / static_cast<double>(decoding + prompt);
  seconds_a_token_ = one > seconds_a_token_ ? one : kForget * one + (1 - kForget) * seconds_a_token_;
}

}  // namespace weft::model
