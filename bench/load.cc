// weft_load: many clients of `weft serve` at once, in one thread. Measures throughput, time to the first token and time between
// tokens. Compares every text with the text that a single client gets.
//
//   weft_load --port 8080 --clients 1,8,64 --seconds 10 --tokens 64 --json
#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

struct Options {
  int port = 8080;
  std::vector<int> clients{1, 8, 64};
  double seconds = 10;
  int64_t requests = 0;
  int tokens = 64;
  int repeat = 1;
  int second_turn = 0;
  bool json = false;
};

constexpr const char* kTexts[] = {
    "The ship",       "A dog",         "It was a dark night, and", "In the beginning", "He said that",
    "The old woman",  "Down the road", "When the war ended,",      "A letter came",    "My father",
    "The king asked", "On the hill",   "She looked at the sea",    "Nobody knew why",  "There was once",
    "At the door"};

double milliseconds(Clock::duration time) { return std::chrono::duration<double, std::milli>(time).count(); }

// The measurements of all clients of one run.
struct Seen {
  std::vector<double> first, between;  // milliseconds
  int64_t requests = 0, tokens = 0, errors = 0, different = 0;
  std::string fault;  // the first fault
};

// The text of an event, or nothing for an event without text. The server writes events without blanks.
std::string text_of(std::string_view event, Seen& seen) {
  const Json data = Json::parse(event, nullptr, false);
  if (data.is_discarded() || data.contains("error") || !data.contains("choices")) {
    ++seen.errors;
    if (seen.fault.empty()) seen.fault = event.substr(0, 300);
    return {};
  }
  return data["choices"].empty() ? "" : data["choices"][0]["text"].get<std::string>();
}

class Client {
 public:
  Client(const Options& options, size_t number) : options_(options), number_(number) {}
  ~Client() { close(); }
  Client(Client&& other) noexcept = delete;

  int socket() const { return socket_; }
  bool active() const { return active_; }
  size_t prompt() const { return prompt_; }

  bool begin(Seen& seen) {
    prompt_ = number_++ % std::size(kTexts);
    std::string prompt;
    for (int i = 0; i < options_.repeat; ++i) prompt += (i ? " " : "") + std::string(kTexts[prompt_]);
    return send({{"prompt", prompt}, {"max_tokens", options_.tokens}, {"user", "c" + std::to_string(number_)}}, seen);
  }
  // Sends a request for a greedy stream.
  bool send(Json request, Seen& seen) {
    if (socket_ < 0 && !connect()) return fail(seen, "cannot connect");
    request["temperature"] = 0;
    request["stream"] = true;
    const std::string body = request.dump();
    const std::string bytes =
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: " +
        std::to_string(body.size()) + "\r\n\r\n" + body;
    for (size_t sent = 0; sent < bytes.size();) {
      const ssize_t more = ::send(socket_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (more <= 0) return fail(seen, "cannot send");
      sent += static_cast<size_t>(more);
    }
    sent_ = last_ = Clock::now();
    text_.clear();
    buffer_.clear();
    begun_ = head_ = false;
    return active_ = true;
  }

  // Reads the bytes that have arrived. Returns true when an answer is complete; text() then returns it.
  bool receive(Seen& seen) {
    char bytes[65536];
    const ssize_t got = ::recv(socket_, bytes, sizeof bytes, 0);
    if (got <= 0) return fail(seen, "the connection ended");
    const Clock::time_point now = Clock::now();
    buffer_.append(bytes, static_cast<size_t>(got));
    if (!head_) {
      const size_t end = buffer_.find("\r\n\r\n");
      if (end == std::string::npos) return false;
      if (!buffer_.starts_with("HTTP/1.1 200")) return fail(seen, buffer_.substr(0, 600));
      buffer_.erase(0, end + 4);
      head_ = true;
    }
    for (size_t at; (at = buffer_.find("\n\n")) != std::string::npos; buffer_.erase(0, at + 2)) {
      const size_t begin = buffer_.find("data: ");
      if (begin >= at) continue;
      const std::string_view event = std::string_view(buffer_).substr(begin + 6, at - begin - 6);
      if (event == "[DONE]") done_ = true;
      const std::string text = done_ ? "" : text_of(event, seen);
      if (text.empty()) continue;
      text_ += text;
      ++seen.tokens;
      (begun_ ? seen.between : seen.first).push_back(milliseconds(now - (begun_ ? last_ : sent_)));
      begun_ = true;
      last_ = now;
    }
    if (!done_ || buffer_.find("0\r\n\r\n") == std::string::npos) return false;
    done_ = active_ = false;
    ++seen.requests;
    return true;
  }
  const std::string& text() const { return text_; }

 private:
  bool connect() {
    socket_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int one = 1;
    ::setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(options_.port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return true;
    close();
    return false;
  }
  void close() {
    if (socket_ >= 0) ::close(socket_);
    socket_ = -1;
  }
  bool fail(Seen& seen, const std::string& what) {
    ++seen.errors;
    if (seen.fault.empty()) seen.fault = what;
    close();
    return done_ = active_ = false;
  }

  const Options& options_;
  size_t number_, prompt_ = 0;
  int socket_ = -1;
  bool active_ = false, begun_ = false, head_ = false, done_ = false;
  Clock::time_point sent_, last_;
  std::string buffer_, text_;
};

// The texts that a single client gets; empty where a run has an error.
std::vector<std::string> texts_alone(const Options& options, Seen& seen) {
  std::vector<std::string> texts;
  Client client(options, 0);
  for (size_t i = 0; i < std::size(kTexts) && seen.errors == 0; ++i) {
    client.begin(seen);
    while (client.active() && !client.receive(seen)) {
    }
    texts.push_back(client.text());
  }
  return texts;
}

Seen run(const Options& options, int count, const std::vector<std::string>& wanted, double& seconds) {
  Seen seen;
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < count; ++i) clients.push_back(std::make_unique<Client>(options, static_cast<size_t>(i)));
  const Clock::time_point begin = Clock::now();
  int64_t started = 0;
  constexpr int64_t kMostErrors = 100;
  const auto more = [&] {
    if (seen.errors >= kMostErrors) return false;
    return options.requests > 0 ? started < options.requests : milliseconds(Clock::now() - begin) < options.seconds * 1000;
  };
  for (auto& client : clients)
    if (more() && client->begin(seen)) ++started;
  std::vector<pollfd> waiting;
  std::vector<Client*> order;
  for (;;) {
    waiting.clear();
    order.clear();
    for (auto& client : clients) {
      if (!client->active() && more() && client->begin(seen)) ++started;
      if (!client->active()) continue;
      waiting.push_back({client->socket(), POLLIN, 0});
      order.push_back(client.get());
    }
    if (waiting.empty()) break;
    constexpr int kMostWait = 60000;
    if (::poll(waiting.data(), waiting.size(), kMostWait) <= 0) {
      ++seen.errors;
      if (seen.fault.empty()) seen.fault = "nothing came for a minute";
      break;
    }
    for (size_t i = 0; i < order.size(); ++i)
      if (waiting[i].revents != 0 && order[i]->receive(seen) && order[i]->text() != wanted[order[i]->prompt()]) ++seen.different;
  }
  seconds = milliseconds(Clock::now() - begin) / 1000;
  return seen;
}

double quantile(std::vector<double>& values, double share) {
  if (values.empty()) return 0;
  const size_t at = std::min(values.size() - 1, static_cast<size_t>(share * static_cast<double>(values.size())));
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(at), values.end());
  return values[at];
}

Json times(std::vector<double>& values) {
  const double median = quantile(values, 0.5), late = quantile(values, 0.99);
  return {{"p50", median}, {"p99", late}, {"max", values.empty() ? 0 : *std::max_element(values.begin(), values.end())}};
}

// Time to the first token of a long prompt, and of the next turn of the same session.
int second_turn(const Options& options) {
  Seen seen;
  Client client(options, 0);
  const auto ask = [&](const std::string& prompt) {
    client.send({{"prompt", prompt}, {"max_tokens", options.tokens}, {"session", "load"}}, seen);
    while (client.active() && !client.receive(seen)) {
    }
    return seen.first.empty() ? 0 : seen.first.back();
  };
  std::string prompt;
  constexpr int kWords = 5;  // words of a text, which are about as many tokens
  for (int i = 0; i * kWords < options.second_turn; ++i)
    prompt += std::string(kTexts[static_cast<size_t>(i) % std::size(kTexts)]) + " went to the sea. ";
  const double cold = ask(prompt);
  prompt += client.text() + "\nThen he said:";
  const double warm = ask(prompt);
  if (seen.errors > 0) {
    fmt::print(stderr, "weft_load: {}\n", seen.fault);
    return 1;
  }
  if (options.json)
    fmt::print("{}\n", Json{{"prompt_bytes", prompt.size()}, {"first_token_ms", {{"cold", cold}, {"second_turn", warm}}}}.dump(2));
  else
    fmt::print("first token of a prompt of {} bytes: {:.1f} ms; of the second turn: {:.1f} ms ({:.2f} %)\n", prompt.size(), cold,
               warm, 100 * warm / cold);
  return 0;
}

int load(const Options& options) {
  Seen alone;
  const std::vector<std::string> wanted = texts_alone(options, alone);
  if (alone.errors > 0) {
    fmt::print(stderr, "weft_load: {}\n", alone.fault);
    return 1;
  }
  Json report{{"tokens_per_request", options.tokens}, {"runs", Json::array()}};
  bool good = true;
  for (int count : options.clients) {
    double seconds = 0;
    Seen seen = run(options, count, wanted, seconds);
    Json result{{"clients", count},
                {"seconds", seconds},
                {"requests", seen.requests},
                {"tokens", seen.tokens},
                {"tokens_per_second", static_cast<double>(seen.tokens) / seconds},
                {"first_token_ms", times(seen.first)},
                {"between_tokens_ms", times(seen.between)},
                {"errors", seen.errors},
                {"different_texts", seen.different}};
    if (!options.json)
      fmt::print(
          "{:3} clients: {:6.0f} tokens/s; first token p50 {:.1f} p99 {:.1f} ms; between tokens p50 {:.2f} p99 {:.2f} max {:.1f} "
          "ms; {} "
          "requests, {} errors, {} other texts\n",
          count, result["tokens_per_second"].get<double>(), result["first_token_ms"]["p50"].get<double>(),
          result["first_token_ms"]["p99"].get<double>(), result["between_tokens_ms"]["p50"].get<double>(),
          result["between_tokens_ms"]["p99"].get<double>(), result["between_tokens_ms"]["max"].get<double>(), seen.requests,
          seen.errors, seen.different);
    if (!seen.fault.empty()) fmt::print(stderr, "weft_load: {}\n", seen.fault);
    good = good && seen.errors == 0 && seen.different == 0;
    report["runs"].push_back(std::move(result));
  }
  if (options.json) fmt::print("{}\n", report.dump(2));
  return good ? 0 : 1;
}

int run(int argc, char** argv) {
  Options options;
  CLI::App app{"Many clients of weft serve at once, on the loopback address", "weft_load"};
  app.add_option("--port", options.port, "Port of the server")->capture_default_str()->check(CLI::Range(1, 65535));
  app.add_option("--clients", options.clients, "Clients at the same time; several numbers are measured one after another")
      ->delimiter(',')
      ->check(CLI::Range(1, 1000));
  app.add_option("--seconds", options.seconds, "How long each run begins requests")
      ->capture_default_str()
      ->check(CLI::Range(0.1, 600.0));
  app.add_option("--requests", options.requests, "Requests of each run, instead of a time")->check(CLI::Range(1, 1000000));
  app.add_option("--tokens", options.tokens, "Tokens of each answer")->capture_default_str()->check(CLI::Range(1, 100000));
  app.add_option("--repeat", options.repeat, "Prompts are a short text this many times")
      ->capture_default_str()
      ->check(CLI::Range(1, 10000));
  app.add_option("--second-turn", options.second_turn,
                 "Instead: a prompt of about this many tokens, and the next turn of its session")
      ->check(CLI::Range(1, 1000000));
  app.add_flag("--json", options.json, "The result as JSON");
  CLI11_PARSE(app, argc, argv);
  return options.second_turn > 0 ? second_turn(options) : load(options);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "weft_load: %s\n", error.what());
  }
  return 1;
}
