// The paths of the server: see api.h.
#include "serve/api.h"

#include "files/refuse.h"
#include "serve/completion.h"
#include "serve/limits.h"
#include "serve/metrics.h"
#include "serve/page.h"
#include "serve/reply_json.h"

namespace weft::serve {
namespace {

struct Path {
  std::string_view path, method;
  bool open = false;  // clients need no key
};
// A path that ends with a slash stands for all paths with one more segment.
constexpr Path kPaths[] = {
    {"/", "GET", true},      {"/health", "GET", true},    {"/metrics", "GET"},   {"/v1/models", "GET"},
    {"/v1/models/", "GET"},  {"/v1/completions", "POST"}, {"/tokenize", "POST"}, {"/v1/chat/completions", "POST"},
    {"/detokenize", "POST"}, {"/v1/sessions/", "DELETE"},
};
constexpr std::string_view kModelPath = "/v1/models/", kSessionPath = "/v1/sessions/";

const Path* find_path(std::string_view path) {
  for (const Path& known : kPaths) {
    if (known.path == path) return &known;
    if (known.path.size() > 1 && known.path.ends_with('/') && path.starts_with(known.path) && path.size() > known.path.size() &&
        path.find('/', known.path.size()) == std::string_view::npos)
      return &known;
  }
  return nullptr;
}

bool is_json(std::string_view type) {
  constexpr std::string_view kJson = "application/json";
  const std::string_view name = type.substr(0, type.find(';'));
  const size_t end = name.find_last_not_of(" \t");
  if (end == std::string_view::npos || end + 1 != kJson.size()) return false;
  for (size_t i = 0; i < kJson.size(); ++i)
    if ((name[i] >= 'A' && name[i] <= 'Z' ? name[i] + ('a' - 'A') : name[i]) != kJson[i]) return false;
  return true;
}

// The last segment of a path, with %20 decoded as a blank.
std::string decoded(std::string_view part) {
  const auto digit = [](char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
  };
  std::string text;
  for (size_t i = 0; i < part.size(); ++i) {
    const int high = part[i] == '%' && i + 2 < part.size() ? digit(part[i + 1]) : -1, low = high < 0 ? -1 : digit(part[i + 2]);
    if (low >= 0) i += 2;
    text += low >= 0 ? static_cast<char>(high * 16 + low) : part[i];
  }
  return text;
}

HttpReply json_reply(const ReplyJson& json, int status = 200) { return {.status = status, .body = dump(json), .fields = {}}; }

ApiError no_session(const std::string& name) {
  return {404, "there is no session " + files::in_quotes(name), "", "session_not_found"};
}

ReplyJson model_json(const Engine& engine) {
  return {{"id", engine.name},
          {"object", "model"},
          {"created", 0},
          {"owned_by", "weft"},
          {"summary", engine.model->summary()},
          {"context_length", engine.batcher->options().capacity},
          {"chat", !engine.chat->is_plain()},
          {"chat_system", engine.chat->has_system()},
          {"chat_thinking", engine.chat->may_think()}};
}

}  // namespace

void Api::check(const AccessRules& rules, const HttpRequest& head) {
  check_origin(rules, head.access);
  const Path* known = find_path(head.path);
  if (!known || !known->open) check_key(rules, head.access);
  if (!known) throw ApiError(404, "there is no path " + files::in_quotes(head.path), "", "unknown_path");
  if (head.method != known->method && !(head.method == "HEAD" && known->method == "GET")) {
    ApiError error(405,
                   std::string(known->path) + " takes " + std::string(known->method) + ", not " + files::printable(head.method));
    error.allow = known->method;
    throw ApiError(error);
  }
  if (known->method != "POST" && head.body_bytes > 0)
    throw ApiError(400, std::string(known->method) + " " + std::string(known->path) + " takes no body");
  if (known->method == "POST" && !is_json(head.content_type))
    throw ApiError(415, "the Content-Type is " + files::in_quotes(head.content_type) + ", wanted application/json");
}

void Api::answer(HttpRequest request, std::shared_ptr<Exchange> exchange) {
  if (request.method == "GET" || request.method == "HEAD") return exchange->reply(get(request));
  if (request.method == "DELETE") {
    const std::string session = decoded(std::string_view(request.path).substr(kSessionPath.size()));
    if (!is_name(session)) throw no_session(session);
    // The thread of the batcher forgets the text, because that thread also keeps texts: so no request that has ended can keep the
    // text again after this answer.
    return engine_.batcher->drop_session(session, [this, session, exchange](bool known) {
      known |= engine_.sessions.forget(session);
      exchange->reply(known ? json_reply({{"id", session}, {"object", "session"}, {"deleted", true}})
                            : reply_of(no_session(session)));
    });
  }
  if (request.path == "/tokenize") return exchange->reply(tokenize(request));
  if (request.path == "/detokenize") return exchange->reply(detokenize(request));
  if (stopping_()) throw ApiError(503, "the server is stopping", "", "stopping");
  if (request.path == "/v1/completions") {
    const CompletionRequest parsed = parse_completion(request.body, engine_.limits());
    std::string().swap(request.body);
    return answer_completion(engine_, parsed, request.peer, std::move(exchange));
  }
  const ChatRequest parsed = parse_chat(request.body, engine_.limits());
  std::string().swap(request.body);
  answer_chat(engine_, parsed, request.peer, std::move(exchange));
}

std::optional<HttpReply> Api::health(const HttpRequest& request, bool stopping) {
  if (request.path != "/health") return std::nullopt;
  return stopping ? json_reply({{"status", "stopping"}}, 503) : json_reply({{"status", "ok"}});
}

HttpReply Api::get(const HttpRequest& request) const {
  if (request.path == "/") return page_reply();
  if (request.path == "/metrics") return {.type = kMetricsType, .body = metrics_text(engine_, stats_()), .fields = {}};
  if (request.path == "/v1/models") return json_reply({{"object", "list"}, {"data", {model_json(engine_)}}});
  if (decoded(std::string_view(request.path).substr(kModelPath.size())) != engine_.name)
    throw ApiError(404, "this server has the model " + engine_.name, "model", "model_not_found");
  return json_reply(model_json(engine_));
}

HttpReply Api::tokenize(const HttpRequest& request) const {
  const std::vector<int32_t> tokens = engine_.model->encode(parse_tokenize(request.body));
  return json_reply({{"tokens", tokens}, {"count", tokens.size()}});
}

HttpReply Api::detokenize(const HttpRequest& request) const {
  const std::vector<int32_t> tokens = parse_detokenize(request.body, engine_.limits());
  size_t bytes = 0;
  for (int32_t token : tokens) bytes += engine_.tokenizer->bytes(token).size();
  if (bytes > kMaxTokenizeBytes)
    refuse_field("tokens",
                 "are a text of " + std::to_string(bytes) + " bytes, wanted at most " + std::to_string(kMaxTokenizeBytes));
  return json_reply({{"content", engine_.model->decode(tokens)}});
}

}  // namespace weft::serve
