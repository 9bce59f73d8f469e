// Requests of the API as typed values: bodies are checked field by field before a model sees them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "weft/chat.h"

namespace weft::serve {

// Limits that depend on the model and on the options of the server.
struct RequestLimits {
  int32_t vocabulary = 1;  // tokens are 0 to vocabulary - 1
  int64_t choices = 1;     // the largest `n`
  int64_t capacity = 1;    // tokens of one sequence
};

// Fields that completions and chat completions share. For absent numbers, the model's suggestions hold.
struct GenerationFields {
  std::string model, user, session, parent;  // parent: session_from
  std::optional<double> temperature, top_p, min_p, repetition_penalty, max_seconds;
  double presence_penalty = 0, frequency_penalty = 0;
  std::optional<int64_t> max_tokens, top_k;
  std::optional<uint64_t> seed;
  std::optional<int64_t> logprobs;  // how many of the most probable tokens to list beside the chosen token
  int64_t choices = 1;
  std::vector<std::string> stop;
  bool stream = false, include_usage = false;
};

using Prompt = std::variant<std::string, std::vector<int32_t>>;  // a text or its tokens

struct CompletionRequest : GenerationFields {
  std::vector<Prompt> prompts;
  bool echo = false;
};

struct ChatRequest : GenerationFields {
  std::vector<weft::ChatMessage> messages;  // `developer` becomes system
  std::optional<bool> thinking;             // chat_template_kwargs.enable_thinking
};

// Is the text a name of 1 to kMaxName letters, digits and - _ . : that does not begin with a dot? Such a name is safe in paths and
// logs.
bool is_name(std::string_view text);

// Each throws ApiError with status 400 that names the field at fault.
CompletionRequest parse_completion(std::string_view body, const RequestLimits& limits);
ChatRequest parse_chat(std::string_view body, const RequestLimits& limits);
std::string parse_tokenize(std::string_view body);                                          // {"content": "..."}
std::vector<int32_t> parse_detokenize(std::string_view body, const RequestLimits& limits);  // {"tokens": [...]}

}  // namespace weft::serve
