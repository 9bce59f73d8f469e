// Choosing the next token: see Sampler in weft/model.h.
#include <algorithm>
#include <cmath>
#include <string>

#include "core/check.h"
#include "weft/model.h"

namespace weft {
namespace {

[[noreturn]] void refuse(const char* argument, const std::string& what) {
  throw Error(fail(Code::invalid_argument, "sampler", argument, what));
}

// splitmix64: a step of the state and its scrambled value.
uint64_t next_bits(uint64_t& state) {
  uint64_t z = state += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

}  // namespace

Sampler::Sampler(const Sampling& sampling) : sampling_(sampling), state_(sampling.seed) {
  if (!(sampling.temperature >= 0) || std::isinf(sampling.temperature))
    refuse("temperature", "is " + std::to_string(sampling.temperature) + ", wanted 0 or more");
  if (!(sampling.top_p > 0 && sampling.top_p <= 1))
    refuse("top_p", "is " + std::to_string(sampling.top_p) + ", wanted more than 0 and at most 1");
  if (sampling.top_k < 0) refuse("top_k", "is " + std::to_string(sampling.top_k) + ", wanted 0 or more");
}

int32_t Sampler::operator()(std::span<const float> logits) {
  // A heap that gives the most probable first, equal ones by token.
  const auto less = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit < b.logit : a.token > b.token;
  };
  candidates_.clear();
  for (size_t i = 0; i < logits.size(); ++i)
    if (logits[i] > -INFINITY) candidates_.push_back({logits[i], static_cast<int32_t>(i)});  // not NaN either
  if (candidates_.empty()) refuse("logits", "hold nothing but NaN and -infinity, wanted at least one number");
  const Candidate best = *std::max_element(candidates_.begin(), candidates_.end(), less);
  if (sampling_.temperature == 0 || std::isinf(best.logit)) return best.token;  // beside +infinity nothing is probable

  const auto weight = [&](const Candidate& c) {
    return std::exp((static_cast<double>(c.logit) - static_cast<double>(best.logit)) / sampling_.temperature);
  };
  const auto count = static_cast<int64_t>(candidates_.size());
  const int64_t most = sampling_.top_k > 0 ? std::min(sampling_.top_k, count) : count;
  // Popping a heap moves the most probable candidate to the end: from the back they come in order.
  auto heap_end = candidates_.end();
  const auto pop = [&] {
    std::pop_heap(candidates_.begin(), heap_end, less);
    return weight(*--heap_end);
  };
  double total = 0;  // of the candidates that top_p is a share of
  if (most == count)
    for (const Candidate& c : candidates_) total += weight(c);
  if (most < count || sampling_.top_p < 1) std::make_heap(candidates_.begin(), candidates_.end(), less);
  if (most < count)
    for (int64_t i = 0; i < most; ++i) total += pop();

  auto first = most < count ? heap_end : candidates_.begin();
  double mass = total;
  if (sampling_.top_p < 1) {
    mass = 0;
    first = candidates_.end();
    while (candidates_.end() - first < most && mass < sampling_.top_p * total) {
      --first;
      mass += first < heap_end ? pop() : weight(*first);
    }
  }
  double point = static_cast<double>(next_bits(state_) >> 11) * 0x1p-53 * mass;
  for (auto c = candidates_.end(); c != first;) {
    point -= weight(*--c);
    if (point < 0) return c->token;
  }
  return best.token;  // rounding left a sliver
}

}  // namespace weft
