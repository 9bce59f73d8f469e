// The writer of one text: chooses tokens from logits, applies the stop rules, makes text of tokens, calls back.
#pragma once

#include <exception>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "model/generate/text_stream.h"
#include "weft/generate.h"

namespace weft::model {

// A fault of `op` for the first option outside of its range. Options about text need a model with a tokenizer.
Status check_options(const Model& model, const GenerateOptions& options, const char* op);

// The log probability of a token, and the `count` most probable tokens with theirs, in descending order.
float find_logprobs(const Model& model, const Stream& stream, const float* logits, int32_t token, int64_t count,
                    std::vector<TokenLogprob>& top);

// Options, callback and model must outlive the writer. A writer belongs to one thread at a time; different writers are independent.
class Writer {
 public:
  // `sampling` stands in for options.sampling, so that several writers can share options.
  Writer(const Model& model, const Stream& stream, const GenerateOptions& options, const Sampling& sampling,
         const TokenCallback& on_token);

  // Tells the sampler the prompt, for penalties. Call it once, before the first token.
  void see(std::span<const int32_t> prompt) { sampler_.see(prompt); }

  // Chooses the next token and finds its log probabilities. Only write() applies stop rules and calls back.
  int32_t choose(const float* logits);
  // Applies the stop rules to the token that choose() returned last, and passes it on with its text.
  void write(int32_t token);
  // Passes on the text that was held back, unless a stop rule or a callback cut the text. Stop strings and the end of a sentence
  // apply to that text, too. It is the last call of a writer.
  void finish_text();

  void stop(StopReason reason, size_t index = 0);
  bool stopped() const { return stopped_; }
  int64_t written() const { return static_cast<int64_t>(out_.tokens.size()); }
  Generation& result() { return out_; }

  // Calls back. An exception counts as false and is kept in thrown().
  template <class Callback, class... Values>
  bool ask(const Callback& callback, Values&&... values) {
    if (!callback) return true;
    try {
      return callback(std::forward<Values>(values)...);
    } catch (...) {
      thrown_ = std::current_exception();
      return false;
    }
  }
  const std::exception_ptr& thrown() const { return thrown_; }

 private:
  void pass_on(GeneratedToken& next);

  const Model& model_;
  const Stream& stream_;
  const GenerateOptions& options_;
  const TokenCallback& on_token_;
  Sampler sampler_;
  std::optional<TextStream> text_;  // none where the model has no tokenizer
  SentenceEnd sentence_;
  float logprob_ = 0;              // log probability of the chosen token
  std::vector<TokenLogprob> top_;  // the most probable tokens with theirs
  Generation out_;
  bool stopped_ = false;
  std::exception_ptr thrown_;
};

}  // namespace weft::model
