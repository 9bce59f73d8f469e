// Completions and chat completions: see completion.h.
#include "serve/completion.h"

#include <algorithm>

#include "serve/api_error.h"
#include "serve/job.h"
#include "serve/limits.h"

namespace weft::serve {
namespace {

constexpr int64_t kDefaultMaxTokens = 16;  // of completions, as in OpenAI's API

void check_model(const Engine& engine, const GenerationFields& fields) {
  if (!fields.model.empty() && fields.model != engine.name)
    throw ApiError(404, "model is '" + fields.model.substr(0, 200) + "', and this server has " + engine.name, "model",
                   "model_not_found");
}

uint64_t random_seed() { return std::stoull(random_name().substr(0, 16), nullptr, 16); }

// What is left of the capacity after a prompt; refuses a prompt that fills it.
int64_t room_after(const Engine& engine, size_t prompt, const char* param) {
  const int64_t room = engine.batcher->options().capacity - static_cast<int64_t>(prompt);
  if (room <= 0)
    throw ApiError(400,
                   std::string(param) + " has " + std::to_string(prompt) + " tokens, wanted fewer than the " +
                       std::to_string(engine.batcher->options().capacity) + " of a sequence (weft serve --capacity)",
                   param, "context_length_exceeded");
  return room;
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
  request.client = peer;
  request.user = fields.user;
  if (fields.max_seconds)
    request.deadline = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                              std::chrono::duration<double>(*fields.max_seconds));
  return request;
}

// Refuses requests whose answer could fill the memory.
void check_answer(const std::vector<BatchRequest>& requests) {
  int64_t tokens = 0;
  for (const BatchRequest& one : requests) tokens += one.choices * one.options.max_tokens;
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

// The tokens of a text; of an empty one, the token that begins texts.
std::vector<int32_t> tokens_of(const Engine& engine, std::string_view text) {
  std::vector<int32_t> tokens = engine.model->encode(text);
  if (tokens.empty() && engine.model->begin_token()) tokens.push_back(*engine.model->begin_token());
  if (tokens.empty()) refuse_field("prompt", "is empty, and this model has no token that begins a text");
  return tokens;
}

// The same after what is remembered of a session.
std::vector<int32_t> session_tokens(Engine& engine, const std::string& session, std::string_view text) {
  SessionTexts::Beginning known = engine.sessions.find(session, text);
  if (known.bytes == 0) return tokens_of(engine, text);
  const std::vector<int32_t> more = engine.model->encode(text.substr(known.bytes));
  known.tokens.insert(known.tokens.end(), more.begin(), more.end());
  return std::move(known.tokens);
}

// The segments without their first `bytes`.
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
    if (!text)
      tokens = std::get<std::vector<int32_t>>(prompt);
    else if (request.session.empty())
      tokens = tokens_of(engine, *text);
    else
      tokens = session_tokens(engine, request.session, *text);
    if (tokens.empty()) refuse_field("prompt", "is empty");
    const int64_t room = room_after(engine, tokens.size(), "prompt");
    const std::string written = text ? *text : request.echo || !request.session.empty() ? engine.model->decode(tokens) : "";
    if (request.echo) plan.echoes.push_back(written);
    if (!request.session.empty()) plan.session_text = written;
    requests.push_back(batch_request(request, peer, std::move(tokens), options, room));
  }
  check_answer(requests);
  std::make_shared<Job>(engine, std::move(plan), std::move(exchange))->submit(std::move(requests));
}

void answer_chat(Engine& engine, const ChatRequest& request, const std::string& peer, std::shared_ptr<Exchange> exchange) {
  check_model(engine, request);
  const std::vector<ChatSegment> segments = render(engine, request);
  JobPlan plan = plan_of(engine, request, /*chat=*/true);
  if (engine.chat->may_think()) plan.filter = engine.chat->filter(request.thinking);
  std::vector<int32_t> tokens;
  if (!request.session.empty()) {
    plan.session_text = chat_text(segments);
    plan.session_changes = changes_of(segments);
    SessionTexts::Beginning known = engine.sessions.find(request.session, plan.session_text, plan.session_changes);
    if (cuts_control(segments, known.bytes)) known = {};
    tokens = std::move(known.tokens);
    const std::vector<int32_t> more = encode_chat(*engine.model, after(segments, known.bytes));
    tokens.insert(tokens.end(), more.begin(), more.end());
  } else {
    tokens = encode_chat(*engine.model, segments);
  }
  if (tokens.empty() && engine.model->begin_token()) tokens.push_back(*engine.model->begin_token());
  if (tokens.empty()) refuse_field("messages", "have no text");
  const int64_t room = room_after(engine, tokens.size(), "messages");
  GenerateOptions options = options_of(engine, request);
  // Without a template nothing tells the model to end, so the answer has the length that the model suggests.
  options.max_tokens = request.max_tokens.value_or(engine.chat->is_plain() ? options.max_tokens : room);
  engine.chat->add_stops(*engine.model, options);
  std::vector<BatchRequest> requests;
  requests.push_back(batch_request(request, peer, std::move(tokens), std::move(options), room));
  check_answer(requests);
  std::make_shared<Job>(engine, std::move(plan), std::move(exchange))->submit(std::move(requests));
}

}  // namespace weft::serve
