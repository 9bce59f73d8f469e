// Choosing the next token: see weft/sampler.h.
#include "weft/sampler.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/fail.h"
#include "model/generate/sampling.h"

namespace weft {
namespace model {

Status check_sampling(const Sampling& sampling, const char* op, const std::string& prefix) {
  Status first;  // the first fault
  const auto require = [&](bool good, const char* name, auto value, const char* wanted) {
    if (good || !first) return;
    first = fail(Code::invalid_argument, op, prefix + name, "is " + std::to_string(value) + ", wanted " + wanted);
  };
  require(sampling.temperature >= 0 && !std::isinf(sampling.temperature), "temperature", sampling.temperature, "0 or more");
  require(sampling.top_p > 0 && sampling.top_p <= 1, "top_p", sampling.top_p, "more than 0 and at most 1");
  require(sampling.top_k >= 0, "top_k", sampling.top_k, "0 or more");
  require(sampling.min_p >= 0 && sampling.min_p <= 1, "min_p", sampling.min_p, "0 to 1");
  require(sampling.repetition_penalty >= 1e-3 && sampling.repetition_penalty <= 1e3, "repetition_penalty",
          sampling.repetition_penalty, "0.001 to 1000");
  require(std::abs(sampling.presence_penalty) <= 1e3, "presence_penalty", sampling.presence_penalty, "-1000 to 1000");
  require(std::abs(sampling.frequency_penalty) <= 1e3, "frequency_penalty", sampling.frequency_penalty, "-1000 to 1000");
  return first;
}

}  // namespace model

namespace {

constexpr const char* kOp = "sampler";

// splitmix64: a step of the state and its scrambled value.
uint64_t next_bits(uint64_t& state) {
  uint64_t z = state += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

}  // namespace

Sampler::Sampler(const Sampling& sampling) : sampling_(sampling), state_(sampling.seed) {
  if (Status status = model::check_sampling(sampling, kOp, ""); !status) throw Error(std::move(status));
}

void Sampler::see(std::span<const int32_t> prompt) {
  if (penalises())
    for (int32_t token : prompt) seen_.try_emplace(token, 0);
}

std::span<const float> Sampler::penalised(std::span<const float> logits) {
  penalised_.assign(logits.begin(), logits.end());
  for (const auto& [token, written] : seen_) {
    if (token < 0 || static_cast<size_t>(token) >= penalised_.size()) continue;
    float& logit = penalised_[static_cast<size_t>(token)];
    logit = static_cast<float>(logit > 0 ? logit / sampling_.repetition_penalty : logit * sampling_.repetition_penalty);
    if (written > 0)
      logit = static_cast<float>(logit - sampling_.presence_penalty - sampling_.frequency_penalty * static_cast<double>(written));
  }
  return penalised_;
}

int32_t Sampler::operator()(std::span<const float> logits) {
  if (!penalises()) return choose(logits);
  const int32_t token = choose(penalised(logits));
  ++seen_[token];
  return token;
}

int32_t Sampler::choose(std::span<const float> logits) {
  // NaN compares as false, so it is never chosen; of equal logits the first stays.
  Candidate best{-INFINITY, -1};
  for (size_t i = 0; i < logits.size(); ++i)
    if (logits[i] > best.logit) best = {logits[i], static_cast<int32_t>(i)};
  if (best.token < 0)
    throw Error(fail(Code::invalid_argument, kOp, "logits", "hold nothing but NaN and -infinity, wanted at least one number"));
  if (sampling_.temperature == 0 || std::isinf(best.logit))
    return best.token;  // beside +infinity every other token has probability 0

  // The order of a heap that gives the most probable candidate first.
  const auto less = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit < b.logit : a.token > b.token;
  };
  candidates_.clear();
  for (size_t i = 0; i < logits.size(); ++i)
    if (logits[i] > -INFINITY) candidates_.push_back({logits[i], static_cast<int32_t>(i)});  // false for NaN too
  const auto weight = [&](const Candidate& c) {
    return std::exp((static_cast<double>(c.logit) - static_cast<double>(best.logit)) / sampling_.temperature);
  };
  const auto count = static_cast<int64_t>(candidates_.size());
  const int64_t most = sampling_.top_k > 0 ? std::min(sampling_.top_k, count) : count;
  // Popping a heap moves its most probable candidate to the end: read from the back, the popped candidates are in order.
  auto heap_end = candidates_.end();
  const auto pop = [&] {
    std::pop_heap(candidates_.begin(), heap_end, less);
    return weight(*--heap_end);
  };
  double total = 0;  // sum of the weights of the candidates that top_k left
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
  const auto kept = [&](double w) { return w >= sampling_.min_p; };  // the most probable candidate has weight 1
  if (sampling_.min_p > 0) {
    mass = 0;
    for (auto c = first; c != candidates_.end(); ++c)
      if (const double w = weight(*c); kept(w)) mass += w;
  }
  double point = static_cast<double>(next_bits(state_) >> 11) * 0x1p-53 * mass;
  for (auto c = candidates_.end(); c != first;) {
    const double w = weight(*--c);
    if (kept(w)) point -= w;
    if (point < 0) return c->token;
  }
  return best.token;  // rounding may leave a draw beyond the last weight
}

}  // namespace weft
