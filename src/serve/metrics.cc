// The answer to /metrics: see metrics.h.
#include "serve/metrics.h"

#include <charconv>
#include <initializer_list>
#include <string_view>
#include <utility>

namespace weft::serve {
namespace {

std::string number(double value) {
  char text[40];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}
std::string number(int64_t value) { return std::to_string(value); }

// Collects metrics, each with its help and type.
class Page {
 public:
  void head(std::string_view name, std::string_view type, std::string_view help) {
    text_.append("# HELP weft_")
        .append(name)
        .append(" ")
        .append(help)
        .append("\n# TYPE weft_")
        .append(name)
        .append(" ")
        .append(type)
        .append("\n");
  }
  template <class Number>
  void sample(std::string_view name, std::string_view labels, Number value) {
    text_.append("weft_").append(name).append(labels).append(" ").append(number(value)).append("\n");
  }
  template <class Number>
  void gauge(std::string_view name, std::string_view help, Number value) {
    head(name, "gauge", help);
    sample(name, "", value);
  }
  template <class Number>
  void counter(std::string_view name, std::string_view help, Number value) {
    head(name, "counter", help);
    sample(name, "", value);
  }
  // One metric with a label of several values.
  void labelled(std::string_view name, std::string_view type, std::string_view help, std::string_view label,
                std::initializer_list<std::pair<std::string_view, int64_t>> values) {
    head(name, type, help);
    for (const auto& [value, count] : values) sample(name, "{" + std::string(label) + "=\"" + std::string(value) + "\"}", count);
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

void add_requests(Page& page, const BatcherStats& stats, const BatcherOptions& options) {
  page.labelled("sequences", "gauge", "Sequences that run, by what they do.", "phase",
                {{"reading", stats.reading}, {"decoding", stats.decoding}});
  page.gauge("sequences_limit", "Sequences that may run at the same time.", options.sequences);
  page.gauge("requests_waiting", "Requests in the queue.", stats.waiting);
  page.gauge("requests_waiting_limit", "Requests that the queue takes.", options.queue);
  page.labelled(
      "requests_total", "counter", "Requests to the model, by outcome; refused: the queue was full.", "outcome",
      {{"finished", stats.finished}, {"cancelled", stats.cancelled}, {"failed", stats.failed}, {"refused", stats.refused}});
  page.counter("prompt_tokens_total", "Tokens of prompts.", stats.prompt_tokens);
  page.counter("cached_tokens_total", "Tokens of prompts that came from the prefix store or a session.", stats.cached_tokens);
  page.counter("written_tokens_total", "Tokens that were written.", stats.written_tokens);
  page.counter("steps_total", "Steps of the model.", stats.steps);
  page.counter("step_seconds_total", "Time of all steps.", stats.step_seconds);
  page.gauge("longest_step_seconds", "Time of the longest step that decoded anything.", stats.longest_step_seconds);
}

void add_memory(Page& page, const BatcherStats& stats) {
  page.gauge("sessions", "Sessions kept in memory.", stats.sessions);
  page.labelled("sessions_total", "counter", "Sessions that a request continued, and that were dropped.", "event",
                {{"resumed", stats.resumed_sessions}, {"dropped", stats.dropped_sessions}});
  page.labelled("memory_bytes", "gauge", "Memory in use, by kind.", "kind",
                {{"weights", stats.weights},
                 {"recurrent", stats.state.recurrent + stats.state.windows + stats.state.records},
                 {"kv", stats.kv_used},
                 {"sessions", stats.session_states},
                 {"prefix_store", stats.store.bytes},
                 {"scratch", stats.scratch}});
  page.gauge("memory_budget_bytes", "Memory that all kinds but weights may take together.", stats.budget);
  page.gauge("prefix_store_checkpoints", "Checkpoints in the prefix store.", stats.store.checkpoints);
  page.labelled("prefix_store_lookups_total", "counter", "Prompts that were looked up.", "result",
                {{"hit", stats.store.hits}, {"miss", stats.store.misses}});
  page.counter("prefix_store_tokens_total", "Tokens that the prefix store restored.", stats.store.tokens);
  page.labelled("prefix_store_checkpoints_total", "counter", "Checkpoints, by what happened to them.", "event",
                {{"inserted", stats.store.inserted}, {"evicted", stats.store.evicted}, {"refused", stats.store.refused}});
}

void add_first_token(Page& page, const Histogram::Counts& counts) {
  page.head("first_token_seconds", "histogram", "Time from a request's arrival in the queue to its first token.");
  int64_t sum = 0;
  for (size_t i = 0; i < counts.within.size(); ++i) {
    sum += counts.within[i];
    const std::string bound = i < Histogram::kBounds.size() ? number(Histogram::kBounds[i]) : "+Inf";
    page.sample("first_token_seconds_bucket", "{le=\"" + bound + "\"}", sum);
  }
  page.sample("first_token_seconds_sum", "", static_cast<double>(counts.microseconds) * 1e-6);
  page.sample("first_token_seconds_count", "", sum);
}

void add_http(Page& page, const HttpStats& http) {
  page.gauge("http_connections", "Open connections.", http.connections);
  page.counter("http_connections_total", "Connections that were accepted.", http.accepted);
  page.counter("http_evicted_total", "Connections that were closed, while waiting for a request, to make room for another.",
               http.evicted);
  page.counter("http_slow_readers_total", "Answers that ended because their client did not read them.", http.slow);
  page.counter("http_requests_total", "Requests with a complete header.", http.requests);
  page.labelled("http_answers_total", "counter", "Answers by class of status.", "status",
                {{"2xx", http.answers[2]}, {"4xx", http.answers[4]}, {"5xx", http.answers[5]}});
}

}  // namespace

void Histogram::add(double seconds) {
  size_t at = 0;
  while (at < kBounds.size() && seconds > kBounds[at]) ++at;
  ++within_[at];
  microseconds_ += static_cast<int64_t>(seconds * 1e6);
}

Histogram::Counts Histogram::counts() const {
  Counts counts;
  for (size_t i = 0; i < within_.size(); ++i) counts.within[i] = within_[i];
  counts.microseconds = microseconds_;
  return counts;
}

std::string metrics_text(const Engine& engine, const HttpStats& http) {
  const BatcherStats stats = engine.batcher->stats();
  Page page;
  add_requests(page, stats, engine.batcher->options());
  add_memory(page, stats);
  add_first_token(page, engine.first_token.counts());
  add_http(page, http);
  return page.take();
}

}  // namespace weft::serve
