// The size of prompt pieces: see pace.h.
#include "model/batch/pace.h"

#include <algorithm>

#include "model/network/append.h"

namespace weft::model {
namespace {

constexpr double kMargin = 0.8;   // of the longest step: steps vary
constexpr double kForget = 0.25;  // weight of a faster measurement; a slower one counts at once

}  // namespace

double Pace::decode_seconds(int64_t decoding) const {
  if (decoded_ == 0 || decoding == 0) return 0;
  // A decode step reads all weights, so fewer tokens are hardly faster.
  return decode_ * std::max(1.0, static_cast<double>(decoding) / static_cast<double>(decoded_));
}

int64_t Pace::prompt_tokens(int64_t decoding) const {
  const int64_t most = (most_ - decoding) / kCutTokens * kCutTokens;
  int64_t tokens = kCutTokens;
  if (seconds_a_token_ > 0) {
    const double left = kMargin * longest_ - decode_seconds(decoding);
    const double fitting = std::clamp(left / seconds_a_token_, 0.0, static_cast<double>(most_));
    // Twice the latest piece at most: a large step after a small one has no measurement that is worth much.
    tokens = std::min(static_cast<int64_t>(fitting) / kCutTokens * kCutTokens, std::max(2 * last_, kCutTokens));
  }
  return std::max(std::min(tokens, most), kCutTokens);
}

void Pace::measure(int64_t decoding, int64_t prompt, double seconds) {
  if (prompt == 0) {
    decode_ = decoded_ == decoding && seconds < decode_ ? kForget * seconds + (1 - kForget) * decode_ : seconds;
    decoded_ = decoding;
    return;
  }
  last_ = (prompt + kCutTokens - 1) / kCutTokens * kCutTokens;
  const double one = std::max(seconds - decode_seconds(decoding), 0.1 * seconds) / static_cast<double>(prompt);
  seconds_a_token_ = one > seconds_a_token_ ? one : kForget * one + (1 - kForget) * seconds_a_token_;
}

}  // namespace weft::model
