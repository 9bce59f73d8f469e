// Writing on with a model: a prompt read, from a prefix store where one is given, then tokens chosen one by one or as drafts allow.
#pragma once

#include <string>
#include <vector>

#include "tools/model_command.h"

namespace weft::tools {

// One part of a run.
struct Phase {
  int64_t tokens = 0;
  double seconds = 0;
  ModelTimes times;
  double rate() const { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }
};

// How drafts fared.
struct DraftStats {
  int64_t proposed = 0, accepted = 0, steps = 0;
  std::vector<double> single;  // seconds of the steps of one token: what they are compared with
  double single_seconds() const;
};

struct Generated {
  int64_t prompt_tokens = 0, restored = 0;  // of the prompt, from the prefix store
  std::vector<int32_t> ids;                 // written, without the one that ended the text
  std::string finish;                       // "length", "end" or "interrupted"
  Phase prefill, decode;
  double first_token_seconds = 0;  // until the logits of the first token
  DraftStats draft;
  // Tokens by time, against the same number of steps of one token.
  double speed_up() const;
};

// Writes text as it comes, or keeps it until the end.
class Output {
 public:
  Output(bool stream, bool keep) : stream_(stream), keep_(keep) {}
  void write(const std::string& piece);
  void finish();
  const std::string& text() const { return text_; }

 private:
  bool stream_, keep_;
  std::string text_;
};

struct GenerateOptions {
  int64_t max_tokens = 200;
  int64_t draft = 0;             // most tokens proposed at once, 0 to 15; the state's plan has so much rollback
  PrefixStore* store = nullptr;  // the state then forgets what it holds and reads all tokens, or finds them there
};

// Continues `tokens`, of which sequence 0 of the state holds the first so many, and adds what was written to them; all but the last
// of those are then in the state. Draws from the sampler as often as tokens are written, whatever the drafts.
Generated generate(const Model& model, const Stream& stream, HybridState& state, std::vector<int32_t>& tokens, Sampler& sampler,
                   const GenerateOptions& options, Output& output);

}  // namespace weft::tools
