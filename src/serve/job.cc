// One request that runs: see job.h.
#include "serve/job.h"

namespace weft::serve {
namespace {

// An error of the batcher with the name of the request's field; `chat` decides between the names of the two kinds of requests.
ApiError error_of(const Error& error, bool chat) {
  const Status& status = error.status();
  const char* const prompt = chat ? "messages" : "prompt";
  if (status.argument == "queue")
    return {429, "the server has as many requests waiting as it takes; try again later", "", "queue_full"};
  if (status.argument == "batcher") return {503, "the server is stopping", "", "stopping"};
  if (status.argument == "requests")
    return {400, std::string(prompt) + " has more prompts than the queue of the server takes (weft serve --max-queue)", prompt};
  if (status.code != Code::invalid_argument) return {500, status.message};
  std::string field = status.argument.starts_with("sampling.") ? status.argument.substr(9) : status.argument;
  if (field == "tokens") field = prompt;
  if (field == "choices") field = "n";
  if (field == "stop_strings" || field == "stop_tokens") field = "stop";
  return {400, status.message, field};
}

}  // namespace

Job::Job(Engine& engine, JobPlan plan, std::shared_ptr<Exchange> exchange)
    : engine_(engine), plan_(std::move(plan)), exchange_(std::move(exchange)) {}

void Job::submit(std::vector<BatchRequest> requests) {
  expected_ = requests.size();
  results_.resize(expected_);
  stops_.resize(expected_ * static_cast<size_t>(plan_.choices));
  if (plan_.filter) filters_.assign(stops_.size(), *plan_.filter);
  if (!plan_.session.empty()) session_tokens_ = requests[0].tokens;
  const std::shared_ptr<Job> self = shared_from_this();
  std::vector<BatchSubmission> submissions;
  for (size_t prompt = 0; prompt < requests.size(); ++prompt) {
    const int64_t first = static_cast<int64_t>(prompt) * plan_.choices;
    BatchCallbacks callbacks;
    if (plan_.stream) {
      callbacks.on_token = [self, first](int64_t choice, const GeneratedToken& next) {
        self->on_token(first + choice, next);
        return true;
      };
      callbacks.on_choice_end = [self, first](int64_t choice, const Generation& written) {
        self->on_choice_end(first + choice, written);
      };
    } else {
      callbacks.on_choice_end = [self, first](int64_t choice, const Generation& written) {
        self->stops_[static_cast<size_t>(first + choice)] = written.stop;
      };
    }
    callbacks.on_end = [self, prompt](BatchResult result) { self->on_end(prompt, std::move(result)); };
    submissions.push_back({std::move(requests[prompt]), std::move(callbacks)});
  }
  std::vector<Batcher::Ticket> tickets;
  try {
    tickets = engine_.batcher->submit(std::move(submissions));
  } catch (const Error& error) {
    throw error_of(error, plan_.shape.chat());
  }
  bool cancelled = false;
  {
    const std::scoped_lock guard(lock_);
    tickets_ = std::move(tickets);
    cancelled = cancelled_;
  }
  if (cancelled) cancel();  // a callback found meanwhile that the client has left
  if (plan_.stream) begin();
  exchange_->on_leave([weak = weak_from_this()] {
    if (const std::shared_ptr<Job> job = weak.lock()) job->cancel();
  });
}

void Job::cancel() {
  std::vector<Batcher::Ticket> tickets;
  {
    const std::scoped_lock guard(lock_);
    cancelled_ = true;
    tickets = tickets_;
  }
  for (Batcher::Ticket ticket : tickets) engine_.batcher->cancel(ticket);
}

void Job::begin() {
  std::call_once(begun_, [this] {
    std::string text;
    for (size_t i = 0; i < stops_.size(); ++i) {
      const auto index = static_cast<int64_t>(i);
      if (plan_.shape.chat()) text += plan_.shape.role(index);
      if (!plan_.echoes.empty()) text += plan_.shape.text(index, plan_.echoes[i / static_cast<size_t>(plan_.choices)]);
    }
    exchange_->begin({.type = "text/event-stream; charset=utf-8", .body = std::move(text), .fields = {}});
  });
}

bool Job::write_text(int64_t index, const ThinkingFilter::Pieces& pieces, const GeneratedToken* token) {
  std::string events;
  if (!pieces.thinking.empty()) events += plan_.shape.thinking(index, pieces.thinking);
  if (plan_.logprobs && token && token->token)
    events += plan_.shape.text(index, pieces.answer, *token);
  else if (!pieces.answer.empty())
    events += plan_.shape.text(index, pieces.answer);
  return events.empty() || exchange_->write(events);
}

// If the client has left, the request is cancelled, so that it does not count as finished.
void Job::on_token(int64_t index, const GeneratedToken& next) {
  begin();
  const ThinkingFilter::Pieces pieces =
      filters_.empty() ? ThinkingFilter::Pieces{{}, std::string(next.text)} : filters_[static_cast<size_t>(index)].push(next.text);
  if (!write_text(index, pieces, &next)) cancel();
}

void Job::on_choice_end(int64_t index, const Generation& written) {
  begin();
  stops_[static_cast<size_t>(index)] = written.stop;
  if (!filters_.empty()) write_text(index, filters_[static_cast<size_t>(index)].finish(), nullptr);
  exchange_->write(plan_.shape.finish(index, finish_reason(written.stop)));
}

void Job::on_end(size_t prompt, BatchResult result) {
  if (result.first_token_seconds > 0) engine_.first_token.add(result.first_token_seconds);
  bool cancelled = false;
  {
    const std::scoped_lock guard(lock_);
    results_[prompt] = std::move(result);
    if (++ended_ < expected_) return;
    cancelled = cancelled_;
  }
  if (plan_.stream && !cancelled) begin();
  keep_session();
  // Writing the JSON of a long answer takes long, and this thread runs the model. So another thread writes it.
  engine_.defer([self = shared_from_this(), cancelled] {
    if (cancelled) return;  // no client waits for the answer
    if (self->plan_.stream)
      self->finish_stream();
    else
      self->reply_whole();
  });
}

std::optional<ApiError> Job::fault() const {
  for (const BatchResult& result : results_) {
    if (result.outcome == BatchOutcome::failed) return error_of(Error(result.status), plan_.shape.chat());
    if (result.outcome == BatchOutcome::stopped)
      return ApiError(503, "the server stopped before the end of the text", "", "stopping");
    if (result.outcome == BatchOutcome::cancelled) return ApiError(500, "the request was cancelled");
  }
  return std::nullopt;
}

Usage Job::usage() const {
  Usage usage;
  for (const BatchResult& result : results_) {
    usage.prompt += result.prompt_tokens;
    usage.cached += result.cached_tokens;
    for (const Generation& choice : result.choices) usage.completion += static_cast<int64_t>(choice.tokens.size());
  }
  return usage;
}

// A choice that no stop rule ended has met the deadline.
const char* Job::finish_of(int64_t index) const {
  const std::optional<StopReason>& stop = stops_[static_cast<size_t>(index)];
  return stop ? finish_reason(*stop) : "length";
}

void Job::finish_stream() {
  if (const std::optional<ApiError> error = fault()) {
    exchange_->write(ReplyShape::error(error->json()));
    return exchange_->end();
  }
  std::string text;
  for (size_t i = 0; i < stops_.size(); ++i) {
    if (stops_[i]) continue;
    const auto index = static_cast<int64_t>(i);
    if (!filters_.empty()) write_text(index, filters_[i].finish(), nullptr);
    text += plan_.shape.finish(index, finish_of(index));
  }
  if (plan_.include_usage) text += plan_.shape.usage(usage());
  exchange_->write(text + ReplyShape::kDone);
  exchange_->end();
}

void Job::reply_whole() {
  if (const std::optional<ApiError> error = fault()) return exchange_->reply(reply_of(*error));
  std::vector<ReplyJson> choices;
  for (size_t prompt = 0; prompt < results_.size(); ++prompt)
    for (const Generation& written : results_[prompt].choices) {
      const auto index = static_cast<int64_t>(choices.size());
      ReplyShape::Choice choice{.index = index, .written = &written, .text = {}, .thinking = {}, .echo = {}};
      if (!plan_.echoes.empty()) choice.echo = plan_.echoes[prompt];
      if (!plan_.echo_tokens.empty()) {
        choice.echo_tokens = &plan_.echo_tokens[prompt];
        choice.echo_result = &results_[prompt];
      }
      choice.text = written.text;
      if (!filters_.empty()) {
        ThinkingFilter& filter = filters_[choices.size()];
        ThinkingFilter::Pieces pieces = filter.push(written.text), rest = filter.finish();
        choice.text = pieces.answer + rest.answer;
        choice.thinking = pieces.thinking + rest.thinking;
      }
      choice.finish = finish_of(index);
      choice.logprobs = plan_.logprobs;
      choices.push_back(plan_.shape.choice(choice));
    }
  exchange_->reply({.body = plan_.shape.whole(std::move(choices), usage()), .fields = {}});
}

// Keeps the tokens of the session's sequence whatever the outcome, because the batcher keeps the sequence in any case.
void Job::keep_session() {
  if (plan_.session.empty() || results_[0].kept.empty() || results_[0].choices.empty()) return;
  const Generation& written = results_[0].choices[0];
  engine_.sessions.keep(plan_.session, plan_.session_text, session_tokens_, written.text, written.tokens, *engine_.tokenizer,
                        plan_.session_changes);
}

}  // namespace weft::serve
