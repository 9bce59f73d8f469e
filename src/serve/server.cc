// The whole server: see server.h.
#include "serve/server.h"

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "serve/api.h"

namespace weft::serve {

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

  void stop() {
    const int before = stops++;
    const std::scoped_lock guard(lock);
    if (before == 0) {
      http->close();
      drainer = std::thread([this] { faults = batcher->drain(std::chrono::steady_clock::now() + options.drain); });
    } else {
      batcher->stop();
      if (before > 1) http->abort();
    }
  }
};

Server::Server(const Model& model, Tokenizer tokenizer, ChatTemplate chat, const ServeOptions& options)
    : parts_(std::make_unique<Parts>(options, std::move(tokenizer), std::move(chat))) {
  Parts& parts = *parts_;
  // First, because it is quick to fail.
  parts.http = std::make_unique<HttpServer>(
      options.host, options.port, options.http, [&parts](const HttpRequest& head) { Api::check(parts.rules, head); },
      [&parts](HttpRequest request, std::shared_ptr<Exchange> exchange) {
        parts.api->answer(std::move(request), std::move(exchange));
      });
  if (!parts.http->loopback() && options.key.empty())
    throw std::runtime_error(
        "--host " + options.host +
        " can be reached from other machines, so the server wants an API key; name its file with --api-key-file");
  parts.rules = {parts.http->loopback(), options.allowed_hosts, options.key};
  parts.batcher = std::make_unique<Batcher>(model, options.batch);
  Engine& engine = parts.engine;
  engine.model = &model;
  engine.tokenizer = &parts.tokenizer;
  engine.chat = &parts.chat;
  engine.batcher = parts.batcher.get();
  engine.name = options.name;
  engine.options = suggested_options(model);
  engine.defer = [&parts](std::function<void()> work) { parts.http->defer(std::move(work)); };
  parts.api = std::make_unique<Api>(
      engine, [&parts] { return parts.http->stats(); }, [&parts] { return parts.stops > 0; });
  if (options.signals) parts.http->on_signal([&parts](int) { parts.stop(); });
}

Server::~Server() {
  if (parts_->batcher) parts_->batcher->stop();
  if (parts_->drainer.joinable()) parts_->drainer.join();
  // Workers may still hold requests, which use the batcher.
  parts_->http.reset();
}

uint16_t Server::port() const { return parts_->http->port(); }
std::string Server::url() const { return "http://" + parts_->http->address() + ":" + std::to_string(port()); }
const Batcher& Server::batcher() const { return *parts_->batcher; }
HttpStats Server::http_stats() const { return parts_->http->stats(); }

void Server::run() {
  parts_->http->run();
  const std::scoped_lock guard(parts_->lock);
  if (parts_->drainer.joinable()) parts_->drainer.join();
}

void Server::stop() { parts_->stop(); }
const std::vector<std::string>& Server::faults() const { return parts_->faults; }

}  // namespace weft::serve
