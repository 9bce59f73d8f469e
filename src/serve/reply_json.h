// Answers in the shapes of OpenAI's API: whole ones, and the pieces of a stream.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "weft/batcher.h"
#include "weft/tokenizer.h"

namespace weft::serve {

using ReplyJson = nlohmann::ordered_json;

std::string dump(const ReplyJson& json);
// The text in quotes, escaped. It must be well-formed UTF-8.
void append_quoted(std::string& out, std::string_view text);

// "stop" or "length".
const char* finish_reason(StopReason stop);

struct Usage {
  int64_t prompt = 0, completion = 0, cached = 0;
  ReplyJson json() const;
};

// Makes the JSON of the answers to one request, with the fields that they have in common.
class ReplyShape {
 public:
  ReplyShape(std::string model, bool chat, const Tokenizer& tokenizer);

  bool chat() const { return chat_; }

  // One choice of a whole answer. `echo` comes before the text of a completion.
  struct Choice {
    int64_t index = 0;
    const Generation* written = nullptr;
    std::string text, thinking, echo;
    const char* finish = "stop";
    bool logprobs = false;
    // Where log probabilities of the echo are wanted: the tokens of the echo, and the result that has the log probabilities.
    const std::vector<int32_t>* echo_tokens = nullptr;
    const BatchResult* echo_result = nullptr;
  };
  ReplyJson choice(const Choice& choice) const;
  std::string whole(std::vector<ReplyJson> choices, const Usage& usage) const;

  // Events of a stream: "data: {...}\n\n".
  std::string role(int64_t index) const;  // the first event of a choice, in chats
  std::string text(int64_t index, std::string_view text) const;
  std::string thinking(int64_t index, std::string_view text) const;
  std::string text(int64_t index, std::string_view text, const GeneratedToken& token) const;  // with log probabilities
  std::string finish(int64_t index, const char* reason) const;
  std::string usage(const Usage& usage) const;
  static std::string error(const std::string& json) { return "data: " + json + "\n\n"; }
  static constexpr const char* kDone = "data: [DONE]\n\n";

 private:
  std::string event(int64_t index, std::string_view member, std::string_view text) const;
  std::string event(const ReplyJson& choice) const;
  ReplyJson head(const char* object) const;
  std::string token_text(int32_t token) const;
  ReplyJson chat_token(TokenLogprob token) const;
  ReplyJson logprobs(const std::vector<int32_t>& tokens, const std::vector<float>& chosen,
                     const std::vector<std::vector<TokenLogprob>>& top, size_t offset) const;
  ReplyJson logprobs_with_echo(const Choice& choice) const;

  std::string id_, model_;
  bool chat_;
  int64_t created_;
  const Tokenizer* tokenizer_;
  std::string begin_;  // the beginning of every event, up to the list of choices
};

// Sixteen random bytes as hexadecimal digits.
std::string random_name();

}  // namespace weft::serve
