// Answers in the shapes of OpenAI's API: see reply_json.h.
#include "serve/reply_json.h"

#include <sys/random.h>

#include <cerrno>
#include <cmath>
#include <ctime>
#include <stdexcept>

namespace weft::serve {
namespace {

// Stands for a log probability of minus infinity, which JSON lacks. OpenAI's API writes this number, too.
constexpr double kImpossible = -9999.0;
double written_logprob(float logprob) { return std::isfinite(logprob) ? static_cast<double>(logprob) : kImpossible; }

}  // namespace

std::string dump(const ReplyJson& json) { return json.dump(-1, ' ', false, ReplyJson::error_handler_t::replace); }

void append_quoted(std::string& out, std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  out += '"';
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (byte < 0x20) {
      out += "\\u00";
      out += kHex[byte >> 4];
      out += kHex[byte & 15];
    } else {
      out += c;
    }
  }
  out += '"';
}

std::string random_name() {
  unsigned char bytes[16];
  for (size_t got = 0; got < sizeof bytes;) {
    const ssize_t more = ::getrandom(bytes + got, sizeof bytes - got, 0);
    if (more < 0 && errno != EINTR) throw std::runtime_error("the system gives no random bytes");
    if (more > 0) got += static_cast<size_t>(more);
  }
  std::string name;
  for (unsigned char byte : bytes) {
    name += "0123456789abcdef"[byte >> 4];
    name += "0123456789abcdef"[byte & 15];
  }
  return name;
}

const char* finish_reason(StopReason stop) {
  return stop == StopReason::length || stop == StopReason::capacity ? "length" : "stop";
}

ReplyJson Usage::json() const {
  return {{"prompt_tokens", prompt},
          {"completion_tokens", completion},
          {"total_tokens", prompt + completion},
          {"prompt_tokens_details", {{"cached_tokens", cached}}}};
}

ReplyShape::ReplyShape(std::string model, bool chat, const Tokenizer& tokenizer)
    : id_((chat ? "chatcmpl-" : "cmpl-") + random_name()),
      model_(std::move(model)),
      chat_(chat),
      created_(static_cast<int64_t>(std::time(nullptr))),
      tokenizer_(&tokenizer) {
  begin_ = dump(head(chat_ ? "chat.completion.chunk" : "text_completion"));
  begin_.pop_back();
  begin_ = "data: " + begin_ + ",\"choices\":[";
}

ReplyJson ReplyShape::head(const char* object) const {
  return {{"id", id_}, {"object", object}, {"created", created_}, {"model", model_}};
}

std::string ReplyShape::token_text(int32_t token) const { return to_well_formed_utf8(tokenizer_->bytes(token)); }

ReplyJson ReplyShape::chat_token(TokenLogprob token) const {
  ReplyJson bytes = ReplyJson::array();
  for (const char c : tokenizer_->bytes(token.token)) bytes.push_back(static_cast<unsigned char>(c));
  return {{"token", token_text(token.token)}, {"logprob", written_logprob(token.logprob)}, {"bytes", std::move(bytes)}};
}

ReplyJson ReplyShape::logprobs(const std::vector<int32_t>& tokens, const std::vector<float>& chosen,
                               const std::vector<std::vector<TokenLogprob>>& top, size_t offset) const {
  ReplyJson content = ReplyJson::array(), texts = content, numbers = content, tops = content, offsets = content;
  for (size_t i = 0; i < tokens.size() && i < chosen.size(); ++i) {
    const std::vector<TokenLogprob> none;
    const std::vector<TokenLogprob>& likely = i < top.size() ? top[i] : none;
    if (chat_) {
      ReplyJson entry = chat_token({tokens[i], chosen[i]});
      entry["top_logprobs"] = ReplyJson::array();
      for (const TokenLogprob& other : likely) entry["top_logprobs"].push_back(chat_token(other));
      content.push_back(std::move(entry));
      continue;
    }
    ReplyJson map = ReplyJson::object();
    for (const TokenLogprob& other : likely) map.emplace(token_text(other.token), written_logprob(other.logprob));
    texts.push_back(token_text(tokens[i]));
    numbers.push_back(written_logprob(chosen[i]));
    tops.push_back(std::move(map));
    offsets.push_back(offset);
    offset += token_text(tokens[i]).size();
  }
  if (chat_) return {{"content", std::move(content)}, {"refusal", nullptr}};
  return {{"tokens", std::move(texts)},
          {"token_logprobs", std::move(numbers)},
          {"top_logprobs", std::move(tops)},
          {"text_offset", std::move(offsets)}};
}

// The first token of a prompt has no log probability, because nothing predicts it.
ReplyJson ReplyShape::logprobs_with_echo(const Choice& choice) const {
  const auto join = [](auto first, const auto& second) {
    first.insert(first.end(), second.begin(), second.end());
    return first;
  };
  const std::vector<int32_t>& prompt = *choice.echo_tokens;
  const Generation& written = *choice.written;
  const std::string first = token_text(prompt.front());
  ReplyJson all = logprobs(join(std::vector<int32_t>(prompt.begin() + 1, prompt.end()), written.tokens),
                           join(choice.echo_result->prompt_logprobs, written.logprobs),
                           join(choice.echo_result->prompt_top, written.top), first.size());
  all["tokens"].insert(all["tokens"].begin(), first);
  all["token_logprobs"].insert(all["token_logprobs"].begin(), nullptr);
  all["top_logprobs"].insert(all["top_logprobs"].begin(), nullptr);
  all["text_offset"].insert(all["text_offset"].begin(), 0);
  return all;
}

ReplyJson ReplyShape::choice(const Choice& choice) const {
  const Generation& written = *choice.written;
  ReplyJson entry{{"index", choice.index}};
  if (chat_) {
    ReplyJson message{{"role", "assistant"}, {"content", choice.text}, {"refusal", nullptr}};
    if (!choice.thinking.empty()) message["reasoning_content"] = choice.thinking;
    entry["message"] = std::move(message);
  } else {
    entry["text"] = choice.echo + choice.text;
  }
  entry["logprobs"] = !choice.logprobs     ? ReplyJson(nullptr)
                      : choice.echo_result ? logprobs_with_echo(choice)
                                           : logprobs(written.tokens, written.logprobs, written.top, choice.echo.size());
  entry["finish_reason"] = choice.finish;
  return entry;
}

std::string ReplyShape::whole(std::vector<ReplyJson> choices, const Usage& usage) const {
  ReplyJson reply = head(chat_ ? "chat.completion" : "text_completion");
  reply["choices"] = std::move(choices);
  reply["usage"] = usage.json();
  return dump(reply);
}

std::string ReplyShape::event(int64_t index, std::string_view member, std::string_view text) const {
  std::string out = begin_ + "{\"index\":" + std::to_string(index);
  if (chat_)
    out += ",\"delta\":{";
  else
    out += ',';
  out.append("\"").append(member).append("\":");
  append_quoted(out, text);
  if (chat_) out += '}';
  return out + ",\"logprobs\":null,\"finish_reason\":null}]}\n\n";
}

std::string ReplyShape::event(const ReplyJson& choice) const { return begin_ + dump(choice) + "]}\n\n"; }

std::string ReplyShape::role(int64_t index) const {
  return event(
      {{"index", index}, {"delta", {{"role", "assistant"}, {"content", ""}}}, {"logprobs", nullptr}, {"finish_reason", nullptr}});
}

std::string ReplyShape::text(int64_t index, std::string_view text) const { return event(index, chat_ ? "content" : "text", text); }

std::string ReplyShape::thinking(int64_t index, std::string_view text) const { return event(index, "reasoning_content", text); }

std::string ReplyShape::text(int64_t index, std::string_view text, const GeneratedToken& token) const {
  ReplyJson entry{{"index", index}};
  if (chat_)
    entry["delta"] = {{"content", text}};
  else
    entry["text"] = text;
  entry["logprobs"] =
      token.token ? logprobs({*token.token}, {token.logprob}, {{token.top.begin(), token.top.end()}}, 0) : ReplyJson(nullptr);
  entry["finish_reason"] = nullptr;
  return event(entry);
}

std::string ReplyShape::finish(int64_t index, const char* reason) const {
  ReplyJson entry{{"index", index}};
  if (chat_)
    entry["delta"] = ReplyJson::object();
  else
    entry["text"] = "";
  entry["logprobs"] = nullptr;
  entry["finish_reason"] = reason;
  return event(entry);
}

std::string ReplyShape::usage(const Usage& usage) const { return begin_ + "],\"usage\":" + dump(usage.json()) + "}\n\n"; }

}  // namespace weft::serve
