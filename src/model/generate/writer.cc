// Choosing tokens, stop rules and text: see writer.h.
#include "model/generate/writer.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/check.h"
#include "model/generate/sampling.h"
#include "model/network/cpu/activations.h"

namespace weft::model {

Status check_options(const Model& model, const GenerateOptions& options, const char* op) {
  Check check(op);
  check.also(check_sampling(options.sampling, op, "sampling."));
  check.require(options.max_tokens >= 0, "max_tokens",
                [&] { return "is " + std::to_string(options.max_tokens) + ", wanted 0 or more"; });
  check.between("draft", options.draft, 0, kMaxDecodeTokens - 1);
  if (options.logprobs) check.between("logprobs", *options.logprobs, 0, model.vocab_size());
  if (options.sentence_after)
    check.require(*options.sentence_after >= 0, "sentence_after",
                  [&] { return "is " + std::to_string(*options.sentence_after) + ", wanted 0 or more"; });
  for (int32_t token : options.stop_tokens)
    check.require(token >= 0 && token < model.vocab_size(), "stop_tokens", [&] {
      return "hold token " + std::to_string(token) + ", wanted 0 to " + std::to_string(model.vocab_size() - 1);
    });
  check.also(check_stop_strings(options.stop_strings, op));
  const char* const about_text = options.sentence_after ? "sentence_after" : "stop_strings";
  check.require(model.has_tokenizer() || (options.stop_strings.empty() && !options.sentence_after), about_text,
                "needs text, and the model has no tokenizer");
  return std::move(check).status();
}

float find_logprobs(const Model& model, const Stream& stream, const float* logits, int32_t token, int64_t count,
                    std::vector<TokenLogprob>& top) {
  const int64_t vocab = model.vocab_size();
  const double sum = log_sum_exp(stream, logits, vocab);
  const auto logprob = [&](int64_t v) { return static_cast<float>(static_cast<double>(logits[v]) - sum); };
  top.clear();
  for (int32_t v = 0; count > 0 && v < vocab; ++v)
    if (!std::isnan(logits[v])) top.push_back({v, logits[v]});
  const auto kept = std::min(static_cast<std::ptrdiff_t>(count), static_cast<std::ptrdiff_t>(top.size()));
  std::partial_sort(top.begin(), top.begin() + kept, top.end(), [](const TokenLogprob& a, const TokenLogprob& b) {
    return a.logprob != b.logprob ? a.logprob > b.logprob : a.token < b.token;
  });
  top.resize(static_cast<size_t>(kept));
  for (TokenLogprob& entry : top) entry.logprob = logprob(entry.token);
  return logprob(token);
}

Writer::Writer(const Model& model, const Stream& stream, const GenerateOptions& options, const Sampling& sampling,
               const TokenCallback& on_token)
    : model_(model), stream_(stream), options_(options), on_token_(on_token), sampler_(sampling) {
  if (model.has_tokenizer()) text_.emplace(model, options.stop_strings, options.special_text);
}

int32_t Writer::choose(const float* logits) {
  const int32_t token = sampler_({logits, static_cast<size_t>(model_.vocab_size())});
  if (options_.logprobs) logprob_ = find_logprobs(model_, stream_, logits, token, *options_.logprobs, top_);
  return token;
}

void Writer::write(int32_t token) {
  if (model_.ends(token) && !options_.ignore_end_tokens) return stop(StopReason::end_token);
  if (const auto found = std::ranges::find(options_.stop_tokens, token); found != options_.stop_tokens.end())
    return stop(StopReason::stop_token, static_cast<size_t>(found - options_.stop_tokens.begin()));
  out_.tokens.push_back(token);
  GeneratedToken next;
  next.token = token;
  if (options_.logprobs) {
    next.logprob = logprob_;
    next.top = top_;
    out_.logprobs.push_back(logprob_);
    out_.top.push_back(top_);
  }
  const std::string piece = text_ ? text_->push(token) : std::string();
  next.text = piece;
  if (text_ && text_->stopped()) stop(StopReason::stop_string, *text_->stopped());
  pass_on(next);
}

void Writer::pass_on(GeneratedToken& next) {
  const bool may_end = options_.sentence_after && written() >= *options_.sentence_after;
  if (const auto end = sentence_.find(next.text, may_end)) {
    next.text = next.text.substr(0, *end);
    stop(StopReason::sentence_end);
  }
  out_.text += next.text;
  // If a stop rule has already ended the text, its reason stays.
  if (!ask(on_token_, std::as_const(next)) && !stopped_) stop(StopReason::callback);
}

void Writer::finish_text() {
  if (!text_ || out_.stop == StopReason::stop_string || out_.stop == StopReason::sentence_end || out_.stop == StopReason::callback)
    return;
  const std::string rest = text_->finish();
  if (text_->stopped()) stop(StopReason::stop_string, *text_->stopped());
  if (rest.empty()) return;
  GeneratedToken last;
  last.text = rest;
  stopped_ = true;  // the text has ended for another reason, so the callback's answer must not become the reason
  pass_on(last);
}

void Writer::stop(StopReason reason, size_t index) {
  stopped_ = true;
  out_.stop = reason;
  out_.stop_index = index;
}

}  // namespace weft::model
