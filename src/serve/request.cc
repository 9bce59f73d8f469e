// Requests of the API as typed values: see request.h.
#include "serve/request.h"

#include "serve/api_error.h"
#include "serve/json_fields.h"
#include "serve/limits.h"

namespace weft::serve {
namespace {

using Kind = files::JsonPart::Kind;

std::string read_name(const JsonValue& value) {
  std::string name = value.text(kMaxName);
  if (!is_name(name)) value.refuse("1 to " + std::to_string(kMaxName) + " letters, digits and - _ . : (not . first)");
  return name;
}

std::string read_stop(const JsonValue& value) {
  std::string stop = value.text(kMaxStopBytes);
  if (stop.empty()) value.refuse("a text that is not empty");
  return stop;
}

std::vector<std::string> read_stops(const JsonValue& value) {
  if (value.part().is(Kind::string)) return {read_stop(value)};
  if (!value.part().is(Kind::list)) value.refuse("a string or a list of strings");
  std::vector<std::string> stops;
  for (const JsonValue& one : value.list(0, kMaxStops)) stops.push_back(read_stop(one));
  return stops;
}

void read_stream_options(const JsonValue& value, GenerationFields& into) {
  read_fields(value, {{"include_usage", [&](const JsonValue& usage) { into.include_usage = usage.flag(); }}});
}

// Accepts {"type": "text"} alone, because every answer is text.
void read_response_format(const JsonValue& value) {
  bool text = false;
  read_fields(value, {{"type", [&](const JsonValue& type) { text = type.text() == "text"; }}, {"json_schema", {}}});
  if (!text) refuse_field(value.path(), "is not supported, except {\"type\": \"text\"}", "unsupported_parameter");
}

std::vector<JsonField> shared_fields(GenerationFields& into, const RequestLimits& limits) {
  constexpr double kPenalty = 2, kMaxSeconds = 1e6;
  return {
      {"model", [&](const JsonValue& v) { into.model = v.text(); }},
      {"user", [&](const JsonValue& v) { into.user = read_name(v); }},
      {"session", [&](const JsonValue& v) { into.session = read_name(v); }},
      {"session_from", [&](const JsonValue& v) { into.parent = read_name(v); }},
      {"temperature", [&](const JsonValue& v) { into.temperature = v.number(0, 2); }},
      {"top_p", [&](const JsonValue& v) { into.top_p = v.number(0, 1, /*above=*/true); }},
      {"min_p", [&](const JsonValue& v) { into.min_p = v.number(0, 1); }},
      {"top_k", [&](const JsonValue& v) { into.top_k = v.whole(0, INT32_MAX); }},
      {"repetition_penalty", [&](const JsonValue& v) { into.repetition_penalty = v.number(0.001, 1000); }},
      {"presence_penalty", [&](const JsonValue& v) { into.presence_penalty = v.number(-kPenalty, kPenalty); }},
      {"frequency_penalty", [&](const JsonValue& v) { into.frequency_penalty = v.number(-kPenalty, kPenalty); }},
      {"seed", [&](const JsonValue& v) { into.seed = static_cast<uint64_t>(v.whole(INT64_MIN, INT64_MAX)); }},
      {"n", [&, most = limits.choices](const JsonValue& v) { into.choices = v.whole(1, most); }},
      {"max_seconds", [&](const JsonValue& v) { into.max_seconds = v.number(0, kMaxSeconds, /*above=*/true); }},
      {"stop", [&](const JsonValue& v) { into.stop = read_stops(v); }},
      {"stream", [&](const JsonValue& v) { into.stream = v.flag(); }},
      {"stream_options", [&](const JsonValue& v) { read_stream_options(v, into); }},
      {"response_format", read_response_format},
      // Fields of OpenAI's API that this server refuses, because an answer that ignored them would be wrong.
      {"logit_bias", {}},
      {"metadata", {}},
      {"service_tier", {}},
      {"store", {}},
  };
}

// Rules between fields.
void check_shared(const GenerationFields& fields) {
  if (fields.include_usage && !fields.stream) refuse_field("stream_options", "needs \"stream\": true");
  if (!fields.session.empty() && fields.choices > 1) refuse_field("session", "keeps one text, so n must be 1");
  if (!fields.parent.empty() && fields.parent == fields.session)
    refuse_field("session_from", "is the session itself, wanted another one");
}

Prompt read_prompt(const JsonValue& value, const RequestLimits& limits) {
  if (value.part().is(Kind::string)) return value.text();
  if (!value.part().is(Kind::list)) value.refuse("a text or a list of tokens");
  return value.tokens(limits.vocabulary);
}

// A text, tokens, or a list of texts or of lists of tokens.
std::vector<Prompt> read_prompts(const JsonValue& value, const RequestLimits& limits) {
  if (!value.part().is(Kind::list)) return {read_prompt(value, limits)};
  bool numbers = false, others = false;
  value.part().elements([&](const files::JsonPart& one) { (one.is(Kind::number) ? numbers : others) = true; });
  if (numbers && !others) return {value.tokens(limits.vocabulary)};
  std::vector<Prompt> prompts;
  for (const JsonValue& one : value.list(1, kMaxPrompts)) prompts.push_back(read_prompt(one, limits));
  return prompts;
}

// A string, or a list of {"type": "text", "text": "..."}.
std::string read_content(const JsonValue& value) {
  if (value.part().is(Kind::string)) return value.text();
  if (!value.part().is(Kind::list)) value.refuse("a string or a list of text parts");
  std::string content;
  for (const JsonValue& part : value.list(1, kMaxMessages)) {
    bool typed = false, given = false;
    std::string text;
    read_fields(part, {{"type",
                        [&](const JsonValue& type) {
                          if (type.text() != "text") type.refuse("\"text\"; this server takes no pictures, files or sounds");
                          typed = true;
                        }},
                       {"text",
                        [&](const JsonValue& v) {
                          text = v.text();
                          given = true;
                        }},
                       {"image_url", {}},
                       {"input_audio", {}},
                       {"file", {}}});
    if (!typed) refuse_field(part.path() + ".type", "is missing");
    if (!given) refuse_field(part.path() + ".text", "is missing");
    content += text;
  }
  return content;
}

ChatMessage read_message(const JsonValue& value) {
  ChatMessage message;
  bool content = false;
  read_fields(value, {{"role",
                       [&](const JsonValue& role) {
                         message.role = role.text();
                         if (message.role == "developer") message.role = "system";
                         if (message.role != "system" && message.role != "user" && message.role != "assistant")
                           role.refuse("system, developer, user or assistant");
                       }},
                      {"content",
                       [&](const JsonValue& v) {
                         message.content = read_content(v);
                         content = true;
                       }},
                      {"reasoning_content", [&](const JsonValue& v) { message.thinking = v.text(); }},
                      // OpenAI clients send answers back as messages in which these are null.
                      {"name", {}},
                      {"refusal", {}},
                      {"annotations", {}},
                      {"audio", {}},
                      {"function_call", {}},
                      {"tool_calls", {}},
                      {"tool_call_id", {}}});
  if (message.role.empty()) refuse_field(value.path() + ".role", "is missing");
  if (!content) refuse_field(value.path() + ".content", "is missing");
  return message;
}

}  // namespace

bool is_name(std::string_view text) {
  constexpr std::string_view kAlphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:";
  return !text.empty() && text.size() <= kMaxName && text[0] != '.' && text.find_first_not_of(kAlphabet) == std::string_view::npos;
}

CompletionRequest parse_completion(std::string_view body, const RequestLimits& limits) {
  CompletionRequest request;
  std::vector<JsonField> fields = shared_fields(request, limits);
  fields.push_back({"prompt", [&](const JsonValue& v) { request.prompts = read_prompts(v, limits); }});
  fields.push_back({"max_tokens", [&](const JsonValue& v) { request.max_tokens = v.whole(0, INT32_MAX); }});
  fields.push_back({"logprobs", [&](const JsonValue& v) { request.logprobs = v.whole(0, kMaxTopLogprobs); }});
  fields.push_back({"echo", [&](const JsonValue& v) { request.echo = v.flag(); }});
  fields.push_back({"best_of", {}});
  fields.push_back({"suffix", {}});
  read_fields(parse_body(body), fields);
  check_shared(request);
  if (request.prompts.empty()) refuse_field("prompt", "is missing");
  if (!request.session.empty() && request.prompts.size() > 1) refuse_field("session", "keeps one text, so prompt must be one");
  if (!request.parent.empty() && request.prompts.size() > 1)
    refuse_field("session_from", "is continued by one text, so prompt must be one");
  if (request.echo && request.logprobs) {
    if (request.stream) refuse_field("logprobs", "of a prompt (with echo) cannot be streamed", "unsupported_parameter");
    if (!request.session.empty() || !request.parent.empty())
      refuse_field("logprobs", "of a prompt (with echo) need the whole prompt read, so there must be no session");
  }
  return request;
}

ChatRequest parse_chat(std::string_view body, const RequestLimits& limits) {
  ChatRequest request;
  bool logprobs = false;
  std::optional<int64_t> top;
  std::vector<JsonField> fields = shared_fields(request, limits);
  const auto max_tokens = [&](const JsonValue& v) {
    if (request.max_tokens) refuse_field(v.path(), "is given beside max_tokens or max_completion_tokens, which mean the same");
    request.max_tokens = v.whole(1, INT32_MAX);
  };
  fields.push_back({"messages", [&](const JsonValue& v) {
                      for (const JsonValue& one : v.list(1, kMaxMessages)) request.messages.push_back(read_message(one));
                    }});
  fields.push_back({"max_tokens", max_tokens});
  fields.push_back({"max_completion_tokens", max_tokens});
  fields.push_back({"logprobs", [&](const JsonValue& v) { logprobs = v.flag(); }});
  fields.push_back({"top_logprobs", [&](const JsonValue& v) { top = v.whole(0, kMaxTopLogprobs); }});
  fields.push_back({"chat_template_kwargs", [&](const JsonValue& v) {
                      read_fields(v, {{"enable_thinking", [&](const JsonValue& think) { request.thinking = think.flag(); }}});
                    }});
  for (const char* name : {"audio", "function_call", "functions", "modalities", "moderation", "parallel_tool_calls", "prediction",
                           "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "safety_identifier", "tool_choice",
                           "tools", "verbosity", "web_search_options"})
    fields.push_back({name, {}});
  read_fields(parse_body(body), fields);
  check_shared(request);
  if (request.messages.empty()) refuse_field("messages", "is missing");
  if (top && !logprobs) refuse_field("top_logprobs", "needs \"logprobs\": true");
  if (logprobs) request.logprobs = top.value_or(0);
  return request;
}

std::string parse_tokenize(std::string_view body) {
  std::optional<std::string> content;
  read_fields(parse_body(body), {{"content", [&](const JsonValue& v) { content = v.text(kMaxTokenizeBytes); }}});
  if (!content) refuse_field("content", "is missing");
  return std::move(*content);
}

std::vector<int32_t> parse_detokenize(std::string_view body, const RequestLimits& limits) {
  std::optional<std::vector<int32_t>> tokens;
  read_fields(parse_body(body), {{"tokens", [&](const JsonValue& v) { tokens = v.tokens(limits.vocabulary); }}});
  if (!tokens) refuse_field("tokens", "is missing");
  return std::move(*tokens);
}

}  // namespace weft::serve
