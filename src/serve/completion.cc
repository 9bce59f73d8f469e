// Completions and chat completions: see completion.h.
#include "serve/completion.h"

#include <algorithm>

#include "serve/api_error.h"
#include "serve/job.h"
#include "serve/limits.h"

namespace weft::serve {
namespace {

constexpr int64_t kDefaultMaxTokens = 16;  // default of completions, as in OpenAI's API

void check_model(const Engine& engine, const GenerationFields& fields) {
  if (!fields.model.empty() && fields.model != engine.name)
    throw ApiError(404, "model is '" + fields.model.substr(0, 200) + "', and this server has " + engine.name, "model",
                   "model_not_found");
}

uint64_t random_seed() { return std::stoull(random_name().substr(0, 16), nullptr, 16); }

// Most tokens of a prompt, which must leave room for one token of text.
size_t most_tokens(const Engine& engine) { return static_cast<size_t>(engine.batcher->options().capacity - 1); }

// `tokens`: how many the prompt has, in words.
[[noreturn]] void refuse_long(const Engine& engine, const std::string& tokens, const char* param) {
  const std::string capacity = std::to_string(engine.batcher->options().capacity);
  throw ApiError(400,
                 std::string(param) + " has " + tokens + " tokens, wanted fewer than the " + capacity +
                     " of a sequence (weft serve --capacity)",
                 param, "context_length_exceeded");
}

// The tokens of a prompt after the known ones. Refuses a prompt that fills the capacity. Encoding stops at the capacity, so that
// long texts cost no more than texts of that length.
template <class Encode>
std::vector<int32_t> tokens_after(const Engine& engine, std::vector<int32_t> known, const char* param, const Encode& encode) {
  const size_t most = most_tokens(engine);
  if (known.size() > most) refuse_long(engine, std::to_string(known.size()), param);
  const std::optional<std::vector<int32_t>> more = encode(most - known.size());
  if (!more) refuse_long(engine, std::to_string(most + 1) + " or more", param);
  if (known.empty()) return std::move(*more);
  known.insert(known.end(), more->begin(), more->end());
  return known;
}

// Tokens that the capacity leaves after a prompt.
int64_t room_after(const Engine& engine, size_t prompt, const char* param) {
  if (prompt > most_tokens(engine)) refuse_long(engine, std::to_string(prompt), param);
  return engine.batcher->options().capacity - static_cast<int64_t>(prompt);
}

GenerateOptions options_of(const Engine& engine, const GenerationFields& fields) {
  GenerateOptions options = engine.options;
  Sampling& sampling = options.sampling;
  sampling.temperature = fields.temperature.value_or(sampling.temperature);
  sampling.top_p = fields.top_p.value_or(sampling.top_p);
  sampling.top_k = fields.top_k.value_or(sampling.top_k);
  sampling.min_p = fields.min_p.value_or(sampling.min_p);
  sampling.repetition_penalty = fields.repetition_penalty.value_or(sampling.repetition_penalty);
  sampling.presence_penalty = fields.presence_penalty;
  sampling.frequency_penalty = fields.frequency_penalty;
  sampling.seed = fields.seed ? *fields.seed : random_seed();
  options.stop_strings = fields.stop;
  options.logprobs = fields.logprobs;
  return options;
}

BatchRequest batch_request(const GenerationFields& fields, const std::string& peer, std::vector<int32_t> tokens,
                           GenerateOptions options, int64_t room) {
  BatchRequest request;
  request.tokens = std::move(tokens);
  request.options = std::move(options);
  request.options.max_tokens = std::min(request.options.max_tokens, room);
  request.choices = fields.choices;
  request.session = fields.session;
  request.parent = fields.parent;
  request.client = peer;
  request.user = fields.user;
  if (fields.max_seconds)
    request.deadline = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                              std::chrono::duration<double>(*fields.max_seconds));
  return request;
}

// Refuses requests whose answers could take too much memory.
void check_answer(const std::vector<BatchRequest>& requests) {
  int64_t tokens = 0;
  for (const BatchRequest& one : requests) {
    const int64_t prompt = one.prompt_logprobs ? static_cast<int64_t>(one.tokens.size()) : 0;
    tokens += one.choices * (prompt + one.options.max_tokens);
  }
  const std::optional<int64_t> top = requests[0].options.logprobs;
  const int64_t most = top ? kMaxLogprobs / (1 + *top) : kMaxAnswerTokens;
  if (tokens > most)
    refuse_field("max_tokens", "asks for up to " + std::to_string(tokens) + " tokens of all prompts and choices, wanted at most " +
                                   std::to_string(most) + (top ? " with so many logprobs" : ""));
}

JobPlan plan_of(const Engine& engine, const GenerationFields& fields, bool chat) {
  return {.shape = ReplyShape(engine.name, chat, *engine.tokenizer),
          .stream = fields.stream,
          .include_usage = fields.include_usage,
          .logprobs = fields.logprobs.has_value(),
          .choices = fields.choices,
          .echoes = {},
          .filter = {},
          .session = fields.session,
          .session_text = {}};
}

// The beginning of the text that the session of the request, or the session that the request forks, is known to hold. `encode`
// gives the tokens of the whole text; a session that exists only as a file needs them.
template <class Encode>
SessionTexts::Beginning known_beginning(Engine& engine, const GenerationFields& fields, std::string_view text,
                                        const SessionTexts::Changes& changes, const Encode& encode) {
  for (const std::string* session : {&fields.session, &fields.parent}) {
    if (session->empty()) continue;
    SessionTexts::Beginning known = engine.sessions.find(*session, text, changes);
    if (known.bytes == 0 && session == &fields.session && !engine.sessions.knows(*session))
      if (std::vector<int32_t> saved = engine.batcher->saved_tokens(*session); !saved.empty())
        if (const std::optional<std::vector<int32_t>> whole = encode(most_tokens(engine)))
          known = saved_beginning(text, *whole, std::move(saved), *engine.tokenizer);
    if (known.bytes > 0) return known;
  }
  return {};
}

// The tokens of a text, of which the beginning may be known from its session. An empty text gives the token that begins texts.
std::vector<int32_t> tokens_of(Engine& engine, const GenerationFields& fields, std::string_view text) {
  SessionTexts::Beginning known =
      known_beginning(engine, fields, text, {}, [&](size_t most) { return engine.tokenizer->encode(text, most); });
  std::vector<int32_t> tokens = tokens_after(engine, std::move(known.tokens), "prompt",
                                             [&](size_t most) { return engine.tokenizer->encode(text.substr(known.bytes), most); });
  if (tokens.empty() && engine.model->begin_token()) tokens.push_back(*engine.model->begin_token());
  if (tokens.empty()) refuse_field("prompt", "is empty, and this model has no token that begins a text");
  return tokens;
}

// The segments without their first `bytes` bytes.
std::vector<ChatSegment> after(std::span<const ChatSegment> segments, size_t bytes) {
  std::vector<ChatSegment> rest;
  for (const ChatSegment& segment : segments) {
    const size_t cut = std::min(bytes, segment.text.size());
    bytes -= cut;
    if (cut < segment.text.size()) rest.push_back({segment.text.substr(cut), segment.control});
  }
  return rest;
}

SessionTexts::Changes changes_of(std::span<const ChatSegment> segments) {
  SessionTexts::Changes changes;
  size_t at = 0;
  bool control = false;
  for (const ChatSegment& segment : segments) {
    if (segment.control != control && !segment.text.empty()) {
      changes.push_back(at);
      control = segment.control;
    }
    at += segment.text.size();
  }
  return changes;
}

// Does a text of so many bytes end inside of a control segment?
bool cuts_control(std::span<const ChatSegment> segments, size_t bytes) {
  for (const ChatSegment& segment : segments) {
    if (bytes < segment.text.size()) return segment.control && bytes > 0;
    bytes -= segment.text.size();
  }
  return false;
}

std::vector<ChatSegment> render(const Engine& engine, const ChatRequest& request) {
  try {
    return engine.chat->render(request.messages, {.thinking = request.thinking});
  } catch (const Error& error) {
    const bool thinking = error.status().argument == "thinking";
    throw ApiError(400, error.what(), thinking ? "chat_template_kwargs.enable_thinking" : "messages");
  }
}

}  // namespace

void answer_completion(Engine& engine, const CompletionRequest& request, const std::string& peer,
                       std::shared_ptr<Exchange> exchange) {
  check_model(engine, request);
  GenerateOptions options = options_of(engine, request);
  options.max_tokens = request.max_tokens.value_or(kDefaultMaxTokens);
  JobPlan plan = plan_of(engine, request, /*chat=*/false);
  std::vector<BatchRequest> requests;
  for (const Prompt& prompt : request.prompts) {
    const auto* text = std::get_if<std::string>(&prompt);
    std::vector<int32_t> tokens;
    if (text)
      tokens = tokens_of(engine, request, *text);
    else
      tokens = std::get<std::vector<int32_t>>(prompt);
    if (tokens.empty()) refuse_field("prompt", "is empty");
    const int64_t room = room_after(engine, tokens.size(), "prompt");
    const std::string written = text ? *text : request.echo || !request.session.empty() ? engine.model->decode(tokens) : "";
    if (request.echo) plan.echoes.push_back(written);
    if (!request.session.empty()) plan.session_text = written;
    requests.push_back(batch_request(request, peer, std::move(tokens), options, room));
    requests.back().prompt_logprobs = request.echo && request.logprobs;
  }
  check_answer(requests);
  if (requests[0].prompt_logprobs)
    for (const BatchRequest& one : requests) plan.echo_tokens.push_back(one.tokens);
  std::make_shared<Job>(engine, std::move(plan), std::move(exchange))->submit(std::move(requests));
}

void answer_chat(Engine& engine, const ChatRequest& request, const std::string& peer, std::shared_ptr<Exchange> exchange) {
  check_model(engine, request);
  const std::vector<ChatSegment> segments = render(engine, request);
  JobPlan plan = plan_of(engine, request, /*chat=*/true);
  if (engine.chat->may_think()) plan.filter = engine.chat->filter(request.thinking);
  SessionTexts::Beginning known;
  if (!request.session.empty() || !request.parent.empty()) {
    plan.session_text = chat_text(segments);
    plan.session_changes = changes_of(segments);
    known = known_beginning(engine, request, plan.session_text, plan.session_changes,
                            [&](size_t most) { return encode_chat(*engine.model, segments, most); });
    if (cuts_control(segments, known.bytes)) known = {};
  }
  const std::vector<ChatSegment> rest = after(segments, known.bytes);
  std::vector<int32_t> tokens = tokens_after(engine, std::move(known.tokens), "messages",
                                             [&](size_t most) { return encode_chat(*engine.model, rest, most); });
  if (tokens.empty() && engine.model->begin_token()) tokens.push_back(*engine.model->begin_token());
  if (tokens.empty()) refuse_field("messages", "have no text");
  const int64_t room = room_after(engine, tokens.size(), "messages");
  GenerateOptions options = options_of(engine, request);
  // Without a template nothing tells the model to end, so the default is the number of tokens that the model suggests.
  options.max_tokens = request.max_tokens.value_or(engine.chat->is_plain() ? options.max_tokens : room);
  engine.chat->add_stops(*engine.model, options);
  std::vector<BatchRequest> requests;
  requests.push_back(batch_request(request, peer, std::move(tokens), std::move(options), room));
  check_answer(requests);
  std::make_shared<Job>(engine, std::move(plan), std::move(exchange))->submit(std::move(requests));
}

}  // namespace weft::serve
