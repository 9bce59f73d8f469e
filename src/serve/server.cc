// The whole server: see server.h.
#include "serve/server.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "files/refuse.h"
#include "serve/api.h"

namespace weft::serve {

namespace {
constexpr std::chrono::seconds kLastAnswers{5};  // time that clients have to read answers, once the server has stopped

void check_name(const std::string& name) {
  const bool control =
      std::any_of(name.begin(), name.end(), [](char c) { return static_cast<unsigned char>(c) < ' ' || c == 127; });
  if (name.empty() || control || to_well_formed_utf8(name) != name)
    throw std::runtime_error("--name is empty or no printable text, and clients name the model with it");
}

// The names in the form in which the field Host is compared: in lower case, without port.
std::vector<std::string> host_names(const std::vector<std::string>& given) {
  std::vector<std::string> names;
  for (const std::string& one : given) {
    std::optional<std::string> name = host_name(one);
    if (!name || one.find(':') != std::string::npos)
      throw std::runtime_error("--allow-host " + files::in_quotes(one) +
                               " is not the name of a host, without scheme, port and path");
    names.push_back(std::move(*name));
  }
  return names;
}

// Refuses to serve without a key, unless only programs of this machine can reach the server, and under no other name.
void check_key_given(const HttpServer& http, const ServeOptions& options, const AccessRules& rules) {
  if (!rules.key.empty()) return;
  if (!http.loopback())
    throw std::runtime_error(
        "--host " + options.host +
        " can be reached from other machines, so the server wants an API key; name its file with --api-key-file");
  for (const std::string& name : rules.allowed_hosts)
    if (!is_loopback_name(name))
      throw std::runtime_error(
          "--allow-host " + name +
          " is the name of a proxy that other machines reach, so the server wants an API key; name its file with "
          "--api-key-file");
}
}  // namespace

struct Server::Parts {
  ServeOptions options;
  Tokenizer tokenizer;
  ChatTemplate chat;
  AccessRules rules;
  Engine engine;
  std::unique_ptr<Batcher> batcher;
  std::unique_ptr<HttpServer> http;
  std::unique_ptr<Api> api;
  std::atomic<int> stops = 0;
  std::mutex lock;
  std::thread drainer;
  std::vector<std::string> faults;

  Parts(const ServeOptions& wanted, Tokenizer words, ChatTemplate templates)
      : options(wanted), tokenizer(std::move(words)), chat(std::move(templates)) {}

  // Does not block: signals call it on the thread that serves.
  void stop() {
    const int before = stops++;
    if (before == 0) {
      const auto deadline = std::chrono::steady_clock::now() + options.drain;
      http->hold();
      http->close(deadline + kLastAnswers);
      const std::scoped_lock guard(lock);
      drainer = std::thread([this, deadline] {
        faults = batcher->drain(deadline);
        http->release();
      });
    } else {
      batcher->request_stop();
      if (before > 1) http->abort();
    }
  }

  void join() {
    std::thread ended;
    {
      const std::scoped_lock guard(lock);
      ended.swap(drainer);
    }
    if (ended.joinable()) ended.join();
  }
};

Server::Server(const Model& model, Tokenizer tokenizer, ChatTemplate chat, const ServeOptions& options)
    : parts_(std::make_unique<Parts>(options, std::move(tokenizer), std::move(chat))) {
  Parts& parts = *parts_;
  check_name(options.name);
  // The first part to be made, because it fails fast.
  parts.http = std::make_unique<HttpServer>(
      options.host, options.port, options.http, [&parts](const HttpRequest& head) { Api::check(parts.rules, head); },
      [&parts](HttpRequest request, std::shared_ptr<Exchange> exchange) {
        parts.api->answer(std::move(request), std::move(exchange));
      });
  parts.rules = {parts.http->loopback(), host_names(options.allowed_hosts), options.key};
  check_key_given(*parts.http, options, parts.rules);
  parts.batcher = std::make_unique<Batcher>(model, options.batch);
  Engine& engine = parts.engine;
  engine.model = &model;
  engine.tokenizer = &parts.tokenizer;
  engine.chat = &parts.chat;
  engine.batcher = parts.batcher.get();
  engine.name = options.name;
  engine.options = suggested_options(model);
  engine.sessions.set_expiry(options.batch.session_expiry);
  // Captures the pointer, because parts.http is null while ~Server waits for the workers.
  HttpServer* const http = parts.http.get();
  engine.defer = [http](std::function<void()> work) { http->defer(std::move(work)); };
  parts.api = std::make_unique<Api>(
      engine, [http] { return http->stats(); }, [&parts] { return parts.stops > 0; });
  http->answer_at_once([&parts](const HttpRequest& request) { return Api::health(request, parts.stops > 0); });
  if (options.signals) parts.http->on_signal([&parts](int) { parts.stop(); });
}

Server::~Server() {
  if (parts_->batcher) parts_->batcher->stop();
  parts_->join();
  // The HTTP half ends first, because its workers may still hold requests, which use the batcher.
  parts_->http.reset();
}

uint16_t Server::port() const { return parts_->http->port(); }
std::string Server::url() const { return "http://" + parts_->http->address() + ":" + std::to_string(port()); }
const Batcher& Server::batcher() const { return *parts_->batcher; }
HttpStats Server::http_stats() const { return parts_->http->stats(); }

void Server::run() {
  parts_->http->run();
  parts_->join();
}

void Server::stop() { parts_->stop(); }
const std::vector<std::string>& Server::faults() const { return parts_->faults; }

}  // namespace weft::serve
