// Continuing a text with a model: sampling, stopping, streaming text, drafting, log probabilities.
//
//   auto model = weft::Model::load("models/weft-11m");
//   auto state = model.create_state("8v4", 4096);
//   std::vector<int32_t> tokens = model.encode("It was a dark night, and");
//   weft::GenerateOptions options = weft::suggested_options(model);
//   options.stop_strings = {"\n\n"};
//   weft::Generator generator(model, options);
//   weft::Generation done = generator.run(state, tokens, [](const weft::GeneratedToken& next) {
//     std::cout << next.text << std::flush;
//     return true;  // false stops
//   });
//
// One run() reads a prompt and then writes tokens. After each step of the model it chooses a token from the logits
// (weft/sampler.h), decides whether the text ends, and passes the token and its text to the callback.
//
// Tokens and state. `tokens` is the whole sequence: run() reads those that the state does not hold yet, and appends every token
// that it chooses, the one that ended the text included. Afterwards the state holds all tokens but the last. So the next run() with
// the same vector, perhaps with more tokens at its end, continues the text, and Model::save() stores it.
//
// Text. A token may hold a part of a UTF-8 character, and a stop string may begin in one token and end in a later one. Text is
// therefore passed on only when it is certain: whole characters, and nothing that could still become part of a stop string.
//
// Drafting. With draft > 0, an n-gram look-up proposes up to `draft` tokens: the tokens that followed the latest earlier occurrence
// of the last 4 tokens of the sequence (or of the last 3 or 2). One step of the model computes the logits after every proposal. The
// sampler chooses a token from the logits in turn. The first choice that differs from its proposal ends the step, and the state
// rolls back the rest. With or without drafts the sampler draws once per written token, so on the cpu the text does not depend on
// `draft`. On a GPU the logits differ by rounding, and with a coded cache by more, because codes flip.
//
// The same model, options, tokens and state give the same tokens, on the same device and with the same number of tokens in the
// state.
//
// Link with weft_model. Every function throws weft::Error with a sentence.
// ABI: relink C++ callers between minor versions; weft/c_model.h is the stable interface.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/model.h"
#include "weft/sampler.h"

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {

// Why a run ended.
enum class StopReason {
  length,        // max_tokens were written
  end_token,     // the model chose an end-of-text token
  stop_token,    // one of stop_tokens was chosen
  stop_string,   // the text reached one of stop_strings
  sentence_end,  // a sentence ended after `sentence_after` tokens
  capacity,      // the sequence fills the capacity of its state
  callback       // a callback returned false
};
const char* stop_reason_name(StopReason reason);  // "end_token"

struct GenerateOptions {
  int64_t max_tokens = 200;  // to write at most; 0 reads the prompt and writes nothing
  Sampling sampling;         // the prompt, for penalties, is the whole sequence as run() gets it

  // Texts that end the run. The text ends before the stop string; its tokens are written and counted all the same. Of several stop
  // strings the one that is complete first counts; of those complete at the same character, the longest. Not empty, well-formed
  // UTF-8.
  std::vector<std::string> stop_strings;
  // Tokens that end the run, beside the end-of-text tokens of the model. Such a token gives no text and is not in
  // Generation::tokens.
  std::vector<int32_t> stop_tokens;
  bool ignore_end_tokens = false;  // treat end-of-text tokens as any other
  // Ends the run at the first end of a sentence once this many tokens are written. A sentence ends with . ! ? or an ellipsis, and
  // any closing quotes and brackets behind it, where white space follows; the text ends before the white space.
  std::optional<int64_t> sentence_after;
  bool special_text = true;  // special tokens give their texts ("<|im_end|>"); false: they give none

  // Tokens proposed in one step at most, 0 to 15; the state's plan must have that much rollback.
  int64_t draft = 0;
  // Report the log probability of every chosen token, and of this many most probable tokens, 0 to vocab_size. These are of the
  // model's own distribution, softmax of the logits, without penalties, temperature and cuts. Absent: none are computed.
  std::optional<int64_t> logprobs;

  int64_t sequence = 0;  // of the state
  // With a store, run() drops what the sequence holds and reads all tokens; it restores the beginning that the store has.
  PrefixStore* store = nullptr;
};

// A token and its natural log probability.
struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0;
};

// What a callback receives: a chosen token and the text that became certain with it.
struct GeneratedToken {
  // Absent in the last call of a run, which passes on text that was held back, where there is such text.
  std::optional<int32_t> token;
  std::string_view text;  // well-formed UTF-8, often empty; valid during the call
  // With GenerateOptions::logprobs and a token:
  float logprob = 0;
  std::span<const TokenLogprob> top;  // the most probable tokens, in descending order; valid during the call
};
using TokenCallback = std::function<bool(const GeneratedToken&)>;

// One phase of a run.
struct GenerationPhase {
  int64_t tokens = 0;  // that the model computed
  double seconds = 0;
  ModelTimes times;
  double rate() const { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }  // tokens per second
};

// How drafts fared.
struct DraftStats {
  int64_t proposed = 0, accepted = 0;  // tokens
  int64_t steps = 0;                   // of the model, with or without a draft
  std::vector<double> single;          // seconds of each step of one token; the first four steps of a run are such
  double single_seconds() const;       // their median
};

struct Generation {
  StopReason stop = StopReason::length;
  size_t stop_index = 0;                       // index in stop_strings or stop_tokens
  std::vector<int32_t> tokens;                 // written, without the end-of-text or stop token that ended the run
  std::string text;                            // everything that was passed to the callback
  std::vector<float> logprobs;                 // of `tokens`, with GenerateOptions::logprobs
  std::vector<std::vector<TokenLogprob>> top;  // as GeneratedToken::top, of every one of `tokens`
  int64_t prompt_tokens = 0;                   // of the prompt, without those that the state held; with a store, all
  int64_t restored_tokens = 0;                 // of prompt_tokens, restored from the store
  GenerationPhase prefill, decode;
  double first_token_seconds = 0;  // until the logits of the first token
  DraftStats draft;
  // Decoded tokens per second, relative to steps of one token.
  double draft_speed_up() const;
};

// The options that generation_config.json of the model suggests, with the defaults above where it says nothing.
GenerateOptions suggested_options(const Model& model);

// Immutable: several threads may call run() at the same time, each with a state of its own. The model and the store must outlive the
// generator.
class Generator {
 public:
  // Throws Error (operator "generator") for an option outside of its range, and for options about text where the model has no
  // tokenizer.
  Generator(const Model& model, GenerateOptions options, const Stream& stream = {});

  const GenerateOptions& options() const { return options_; }

  // Continues the sequence `tokens`. The sequence of the state holds the first tokens of `tokens`, or none; at least one token must
  // be left to read. The random state begins at the seed in every call.
  //
  // Throws Error, before anything changes, for tokens that do not fit the state or its capacity, and for a state without the
  // rollback that drafts need. An exception of a callback ends the run as false would, and is passed on. A later failure (memory,
  // device) leaves the sequence undefined: reset() it.
  Generation run(HybridState& state, std::vector<int32_t>& tokens, const TokenCallback& on_token = {},
                 const PromptCallback& on_prompt = {}) const;

 private:
  const Model* model_;
  GenerateOptions options_;
  Stream stream_;
};

// Turns tokens into text as a Generator does, for callers that run a model step by step: passes on whole characters only, and holds
// text back while it could still become part of a stop string.
class TextStream {
 public:
  // Throws Error for a model without tokenizer and for a stop string that is empty or not UTF-8. The model must outlive the stream.
  explicit TextStream(const Model& model, std::vector<std::string> stop_strings = {}, bool special_text = true);
  ~TextStream();
  TextStream(TextStream&&) noexcept;
  TextStream& operator=(TextStream&&) noexcept;

  // Takes a token and returns the text that became certain; nothing once a stop string was reached.
  std::string push(int32_t token);
  // Returns the text that was held back, at the end of the tokens. An incomplete character becomes U+FFFD.
  std::string finish();
  // The index of the stop string that was reached.
  std::optional<size_t> stopped() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace weft
#pragma GCC visibility pop
