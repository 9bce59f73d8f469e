// Requests of the API: every field right once and wrong in every way that has a sentence of its own.
#include "serve/request.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "serve/api_error.h"
#include "serve/json_fields.h"
#include "serve/limits.h"
#include "serve/reply_json.h"

namespace {

using namespace weft::serve;
using nlohmann::json;

const RequestLimits kLimits{.vocabulary = 100, .choices = 4, .capacity = 64};

struct Wrong {
  std::string body, param, code, message;
};

template <class Parse>
void expect_refused(const std::vector<Wrong>& table, Parse&& parse) {
  for (const Wrong& wrong : table) {
    try {
      parse(wrong.body);
      ADD_FAILURE() << "accepted: " << wrong.body;
    } catch (const ApiError& error) {
      EXPECT_EQ(error.status(), 400) << wrong.body;
      EXPECT_EQ(error.param(), wrong.param) << wrong.body;
      EXPECT_EQ(error.code(), wrong.code) << wrong.body;
      EXPECT_NE(std::string(error.what()).find(wrong.message), std::string::npos) << wrong.body << "\n" << error.what();
    }
  }
}

// A valid body with these members added.
std::string completion(const std::string& members) { return R"({"prompt": "a", )" + members + "}"; }
std::string chat(const std::string& members) { return R"({"messages": [{"role": "user", "content": "a"}], )" + members + "}"; }

TEST(Completion, TakesEveryField) {
  const CompletionRequest request = parse_completion(
      R"({"model": "m", "prompt": ["a", "b"], "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
          "presence_penalty": -1, "frequency_penalty": 0, "repetition_penalty": 1.1, "seed": -3, "n": 2, "stop": ["x", "y"],
          "stream": true, "stream_options": {"include_usage": true}, "echo": true, "user": "u-1", "max_seconds": 2.5,
          "response_format": {"type": "text"}, "logit_bias": null, "suffix": null, "best_of": null})",
      kLimits);
  EXPECT_EQ(request.model, "m");
  ASSERT_EQ(request.prompts.size(), 2u);
  EXPECT_EQ(std::get<std::string>(request.prompts[1]), "b");
  EXPECT_EQ(request.max_tokens, 7);
  EXPECT_EQ(request.temperature, 0.5);
  EXPECT_EQ(request.top_p, 0.9);
  EXPECT_EQ(request.top_k, 5);
  EXPECT_EQ(request.min_p, 0.1);
  EXPECT_EQ(request.presence_penalty, -1);
  EXPECT_EQ(request.repetition_penalty, 1.1);
  EXPECT_EQ(request.seed, static_cast<uint64_t>(-3));
  EXPECT_EQ(request.choices, 2);
  EXPECT_EQ(request.stop, (std::vector<std::string>{"x", "y"}));
  EXPECT_TRUE(request.stream && request.include_usage && request.echo);
  EXPECT_EQ(request.user, "u-1");
  EXPECT_EQ(request.max_seconds, 2.5);
}

TEST(Completion, TakesEveryKindOfPrompt) {
  const auto prompts = [](const std::string& prompt) { return parse_completion("{\"prompt\": " + prompt + "}", kLimits).prompts; };
  EXPECT_EQ(std::get<std::string>(prompts("\"\"")[0]), "");
  EXPECT_EQ(std::get<std::vector<int32_t>>(prompts("[1, 2, 99]")[0]), (std::vector<int32_t>{1, 2, 99}));
  EXPECT_EQ(std::get<std::vector<int32_t>>(prompts("[[1], [2, 3]]")[1]), (std::vector<int32_t>{2, 3}));
  EXPECT_EQ(std::get<std::string>(prompts(R"(["\u00e4\n\ud83d\ude00"])")[0]), "ä\n😀");
}

TEST(Completion, RefusesWrongFieldsByName) {
  const auto whole = [](const char* text) { return std::string("wanted a whole number from ") + text; };
  std::vector<Wrong> table = {
      {"", "", "invalid_json", "is not JSON at byte 1"},
      {"[]", "", "invalid_json", "wanted a JSON object"},
      {"{\"prompt\": \"a\"} x", "", "invalid_json", "is not JSON at byte"},
      {"{\"prompt\": \"a\xff\"}", "", "invalid_json", "is not JSON at byte"},
      {"{\"prompt\": \"\\ud800\"}", "", "invalid_json", "is not JSON at byte"},
      {"{\"prompt\": \"a\", \"x\": " + std::string(40, '[') + std::string(40, ']') + "}", "", "invalid_json", "nests deeper"},
      {"{}", "prompt", "invalid_value", "is missing"},
      {"{\"prompt\": null}", "prompt", "invalid_value", "is missing"},
      {"{\"prompt\": 3}", "prompt", "invalid_value", "wanted a text or a list of tokens"},
      {"{\"prompt\": []}", "prompt", "invalid_value", "has 0 elements"},
      {"{\"prompt\": [1, 100]}", "prompt[1]", "invalid_value", "wanted a token from 0 to 99"},
      {"{\"prompt\": [1, -1]}", "prompt[1]", "invalid_value", "wanted a token"},
      {"{\"prompt\": [1.5]}", "prompt[0]", "invalid_value", "wanted a token"},
      {"{\"prompt\": [1, \"a\"]}", "prompt[0]", "invalid_value", "wanted a text or a list of tokens"},
      {"{\"prompt\": [[1], [true]]}", "prompt[1][0]", "invalid_value", "wanted a token"},
      {completion("\"prompt\": \"b\""), "prompt", "invalid_value", "occurs twice"},
      {completion("\"Temperature\": 1"), "Temperature", "unknown_parameter", "is not a field"},
      {completion("\"\\u0000\\u001b[31m\": 1"), "\\x00\\x1b[31m", "unknown_parameter", "is not a field"},
      {completion("\"messages\": []"), "messages", "unknown_parameter", "is not a field"},
      {completion("\"model\": 1"), "model", "invalid_value", "wanted a string"},
      {completion("\"max_tokens\": -1"), "max_tokens", "invalid_value", whole("0 to 2147483647")},
      {completion("\"max_tokens\": 1.0"), "max_tokens", "invalid_value", whole("0 to")},
      {completion("\"max_tokens\": \"9\""), "max_tokens", "invalid_value", "is '9'"},
      {completion("\"max_tokens\": 99999999999999999999"), "max_tokens", "invalid_value", whole("0 to")},
      {completion("\"temperature\": \"hot\""), "temperature", "invalid_value", "is 'hot', wanted a number from 0 to 2"},
      {completion("\"temperature\": 2.1"), "temperature", "invalid_value", "wanted a number from 0 to 2"},
      {completion("\"temperature\": 1e999"), "temperature", "invalid_value", "wanted a number"},
      {completion("\"temperature\": true"), "temperature", "invalid_value", "is true"},
      {completion("\"top_p\": 0"), "top_p", "invalid_value", "wanted a number above 0, at most 1"},
      {completion("\"top_k\": -1"), "top_k", "invalid_value", whole("0 to")},
      {completion("\"min_p\": 1.5"), "min_p", "invalid_value", "from 0 to 1"},
      {completion("\"presence_penalty\": 3"), "presence_penalty", "invalid_value", "from -2 to 2"},
      {completion("\"frequency_penalty\": -3"), "frequency_penalty", "invalid_value", "from -2 to 2"},
      {completion("\"repetition_penalty\": 0"), "repetition_penalty", "invalid_value", "from 0.001 to 1000"},
      {completion("\"seed\": 0.5"), "seed", "invalid_value", whole("-9223372036854775808 to 9223372036854775807")},
      {completion("\"n\": 0"), "n", "invalid_value", whole("1 to 4")},
      {completion("\"n\": 5"), "n", "invalid_value", whole("1 to 4")},
      {completion("\"stop\": 1"), "stop", "invalid_value", "wanted a string or a list of strings"},
      {completion("\"stop\": \"\""), "stop", "invalid_value", "is not empty"},
      {completion("\"stop\": [\"a\", \"\"]"), "stop[1]", "invalid_value", "is not empty"},
      {completion("\"stop\": \"" + std::string(kMaxStopBytes + 1, 'a') + "\""), "stop", "invalid_value", "has 1025 bytes"},
      {completion("\"stop\": " + json(std::vector<std::string>(17, "a")).dump()), "stop", "invalid_value", "has 17 elements"},
      {completion("\"stream\": 1"), "stream", "invalid_value", "wanted true or false"},
      {completion("\"stream_options\": {}, \"stream\": true, \"echo\": 0"), "echo", "invalid_value", "wanted true or false"},
      {completion("\"stream_options\": {\"include_usage\": true}"), "stream_options", "invalid_value", "needs \"stream\": true"},
      {completion("\"stream_options\": {\"x\": 1}"), "stream_options.x", "unknown_parameter", "is not a field"},
      {completion("\"stream_options\": 1"), "stream_options", "invalid_value", "wanted an object"},
      {completion("\"logprobs\": 21"), "logprobs", "invalid_value", whole("0 to 20")},
      {completion("\"logprobs\": true"), "logprobs", "invalid_value", whole("0 to 20")},
      {completion("\"logprobs\": 1, \"echo\": true, \"stream\": true"), "logprobs", "unsupported_parameter", "cannot be streamed"},
      {completion("\"logprobs\": 1, \"echo\": true, \"session\": \"s\""), "logprobs", "invalid_value", "no session"},
      {completion("\"session\": \"s\", \"session_from\": \"s\""), "session_from", "invalid_value", "wanted another one"},
      {completion("\"max_seconds\": 0"), "max_seconds", "invalid_value", "above 0"},
      {completion("\"user\": \"a b\""), "user", "invalid_value", "letters, digits"},
      {completion("\"session\": \"\""), "session", "invalid_value", "letters, digits"},
      {completion("\"session\": \"../x\""), "session", "invalid_value", "letters, digits"},
      {completion("\"session\": \"..\""), "session", "invalid_value", "letters, digits"},
      {completion("\"session\": \"" + std::string(65, 'a') + "\""), "session", "invalid_value", "has 65 bytes"},
      {completion("\"session\": \"a\", \"n\": 2"), "session", "invalid_value", "n must be 1"},
      {"{\"prompt\": [\"a\", \"b\"], \"session\": \"a\"}", "session", "invalid_value", "prompt must be one"},
      {completion("\"response_format\": {\"type\": \"json_object\"}"), "response_format", "unsupported_parameter",
       "is not supported"},
      {completion("\"response_format\": {}"), "response_format", "unsupported_parameter", "is not supported"},
  };
  for (const char* name : {"best_of", "suffix", "logit_bias"})
    table.push_back({completion("\"" + std::string(name) + "\": 1"), name, "unsupported_parameter", "is not supported"});
  expect_refused(table, [](const std::string& body) { parse_completion(body, kLimits); });
}

TEST(Chat, TakesEveryField) {
  const ChatRequest request = parse_chat(
      R"({"messages": [{"role": "developer", "content": "s"},
                       {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                       {"role": "assistant", "content": "c", "reasoning_content": "t", "refusal": null, "tool_calls": null}],
          "max_completion_tokens": 9, "logprobs": true, "top_logprobs": 3, "chat_template_kwargs": {"enable_thinking": false},
          "tools": null, "tool_choice": null, "session": "s1"})",
      kLimits);
  ASSERT_EQ(request.messages.size(), 3u);
  EXPECT_EQ(request.messages[0].role, "system");
  EXPECT_EQ(request.messages[1].content, "ab");
  EXPECT_EQ(request.messages[2].thinking, "t");
  EXPECT_EQ(request.max_tokens, 9);
  EXPECT_EQ(request.logprobs, 3);
  EXPECT_EQ(request.thinking, false);
  EXPECT_EQ(request.session, "s1");
  EXPECT_EQ(parse_chat(chat("\"logprobs\": true"), kLimits).logprobs, 0);
  EXPECT_FALSE(parse_chat(chat("\"logprobs\": false"), kLimits).logprobs);
}

TEST(Chat, RefusesWrongFieldsByName) {
  const auto message = [](const std::string& members) { return "{\"messages\": [{" + members + "}]}"; };
  std::vector<Wrong> table = {
      {"{}", "messages", "invalid_value", "is missing"},
      {"{\"messages\": {}}", "messages", "invalid_value", "wanted a list"},
      {"{\"messages\": []}", "messages", "invalid_value", "has 0 elements"},
      {"{\"messages\": [1]}", "messages[0]", "invalid_value", "wanted an object"},
      {message("\"content\": \"a\""), "messages[0].role", "invalid_value", "is missing"},
      {message("\"role\": \"user\""), "messages[0].content", "invalid_value", "is missing"},
      {message("\"role\": \"user\", \"content\": null"), "messages[0].content", "invalid_value", "is missing"},
      {message("\"role\": \"tool\", \"content\": \"a\""), "messages[0].role", "invalid_value", "is 'tool'"},
      {message("\"role\": \"user\", \"content\": 1"), "messages[0].content", "invalid_value", "wanted a string or a list"},
      {message("\"role\": \"user\", \"content\": [{\"type\": \"text\"}]"), "messages[0].content[0].text", "invalid_value",
       "is missing"},
      {message("\"role\": \"user\", \"content\": [{\"text\": \"a\"}]"), "messages[0].content[0].type", "invalid_value",
       "is missing"},
      {message("\"role\": \"user\", \"content\": [{\"type\": \"image_url\"}]"), "messages[0].content[0].type", "invalid_value",
       "takes no pictures"},
      {message("\"role\": \"user\", \"content\": \"a\", \"name\": \"b\""), "messages[0].name", "unsupported_parameter",
       "not supported"},
      {message("\"role\": \"user\", \"content\": \"a\", \"x\": 1"), "messages[0].x", "unknown_parameter", "is not a field"},
      {message("\"role\": \"assistant\", \"content\": \"a\", \"tool_calls\": []"), "messages[0].tool_calls",
       "unsupported_parameter", "not supported"},
      {chat("\"max_tokens\": 0"), "max_tokens", "invalid_value", "from 1 to"},
      {chat("\"max_tokens\": 1, \"max_completion_tokens\": 1"), "max_completion_tokens", "invalid_value", "mean the same"},
      {chat("\"logprobs\": 2"), "logprobs", "invalid_value", "wanted true or false"},
      {chat("\"top_logprobs\": 2"), "top_logprobs", "invalid_value", "needs \"logprobs\": true"},
      {chat("\"top_logprobs\": 21, \"logprobs\": true"), "top_logprobs", "invalid_value", "from 0 to 20"},
      {chat("\"chat_template_kwargs\": {\"x\": 1}"), "chat_template_kwargs.x", "unknown_parameter", "is not a field"},
      {chat("\"prompt\": \"a\""), "prompt", "unknown_parameter", "is not a field"},
      {chat("\"echo\": true"), "echo", "unknown_parameter", "is not a field"},
  };
  for (const char* name : {"tools", "functions", "modalities", "prediction", "logit_bias", "store", "metadata"})
    table.push_back({chat("\"" + std::string(name) + "\": {}"), name, "unsupported_parameter", "is not supported"});
  expect_refused(table, [](const std::string& body) { parse_chat(body, kLimits); });
}

TEST(Tokenize, Bodies) {
  EXPECT_EQ(parse_tokenize(R"({"content": "a\u0000b"})"), std::string("a\0b", 3));
  EXPECT_EQ(parse_detokenize(R"({"tokens": []})", kLimits), std::vector<int32_t>{});
  expect_refused(
      {{"{}", "content", "invalid_value", "is missing"}, {"{\"content\": 1}", "content", "invalid_value", "wanted a string"}},
      [](const std::string& body) { parse_tokenize(body); });
  expect_refused({{"{}", "tokens", "invalid_value", "is missing"},
                  {"{\"tokens\": \"a\"}", "tokens", "invalid_value", "wanted a list of tokens"},
                  {"{\"tokens\": [100]}", "tokens[0]", "invalid_value", "wanted a token"}},
                 [](const std::string& body) { parse_detokenize(body, kLimits); });
}

TEST(Reply, QuotesWhatJsonWantsQuoted) {
  std::string all = "a\"\\/\b\f\n\r\t\x01\x1f ä😀\x7f";
  all += '\0';
  std::string quoted;
  append_quoted(quoted, all);
  EXPECT_EQ(json::parse(quoted).get<std::string>(), all);
}

}  // namespace
