// A server whose paths show what the HTTP half of `weft serve` does, without a model.
#pragma once

#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "serve/http_server.h"
#include "tests/support/http_client.h"

namespace weft {

using namespace serve;
using std::chrono::milliseconds;

inline HttpLimits short_linger() {
  HttpLimits limits;
  limits.linger = milliseconds(200);
  return limits;
}

// A server whose paths show what the HTTP half does: /echo, /stream (pieces until the client leaves), /late, /throw, /drop.
class TestServer {
 public:
  explicit TestServer(const HttpLimits& limits = short_linger())
      : server_("127.0.0.1", 0, limits, check,
                [this](const HttpRequest& request, const auto& exchange) { answer(request, exchange); }) {
    server_.answer_at_once([](const HttpRequest& request) {
      return request.path == "/quick" ? std::optional(HttpReply{.body = "quick", .fields = {}}) : std::nullopt;
    });
    thread_ = std::thread([this] { server_.run(); });
  }
  ~TestServer() {
    stop_ = true;
    server_.close();
    if (thread_.joinable()) thread_.join();
    for (std::thread& one : streams_) one.join();
  }
  uint16_t port() const { return server_.port(); }
  HttpStats stats() const { return server_.stats(); }
  HttpServer& server() { return server_; }
  void join() { thread_.join(); }
  void drop_held() {
    const std::scoped_lock guard(lock_);
    held_.clear();
  }
  std::atomic<int> left = 0, pieces = 0;
  std::atomic<int> blocked = 0;
  std::atomic<bool> written = false;
  std::atomic<bool> stop_ = false;

 private:
  static void check(const HttpRequest& head) {
    check_origin({}, head.access);
    if (head.path == "/closed") throw ApiError(403, "closed");
  }
  void answer(const HttpRequest& request, const std::shared_ptr<Exchange>& exchange) {
    if (request.path == "/echo") return exchange->reply({.body = request.method + " " + request.body, .fields = {}});
    if (request.path == "/size") return exchange->reply({.body = std::to_string(request.body.size()), .fields = {}});
    if (request.path == "/throw") throw std::runtime_error("a fault");
    if (request.path == "/drop") return;
    if (request.path == "/block") {
      ++blocked;
      while (!stop_) std::this_thread::sleep_for(milliseconds(2));
      return;
    }
    if (request.path == "/large") return exchange->reply({.body = std::string(2 << 20, 'x'), .fields = {}});
    if (request.path == "/large-beginning") {  // longer than what may be unsent, and then more pieces
      exchange->begin({.type = "text/plain", .body = std::string(1 << 20, 'x'), .fields = {}});
      for (int i = 0; i < 5; ++i) written = exchange->write("piece");
      return exchange->end();
    }
    exchange->on_leave([this] { ++left; });
    if (request.path == "/wait") {  // until the client leaves
      const std::scoped_lock guard(lock_);
      held_.push_back(exchange);
      return;
    }
    exchange->begin({.type = "text/event-stream", .body = {}, .fields = {}});
    if (request.path == "/torn") {
      exchange->write("data: a\n\n");
      return;  // dropped without an end
    }
    const std::scoped_lock guard(lock_);
    streams_.emplace_back([this, exchange, many = request.path == "/flood"] {
      const std::string piece = many ? std::string(4096, 'x') : "data: piece\n\n";
      for (int i = 0; (many || i < 5) && !stop_; ++i) {
        if (!exchange->write(piece)) return;
        ++pieces;
        if (!many) std::this_thread::sleep_for(milliseconds(2));
      }
      exchange->end();
    });
  }

  std::vector<std::thread> streams_;
  std::mutex lock_;  // workers answer
  std::vector<std::shared_ptr<Exchange>> held_;
  HttpServer server_;
  std::thread thread_;
};

inline HttpAnswer exchange_raw(uint16_t port, const std::string& bytes) {
  HttpClient client(port);
  client.send(bytes);
  return client.answer();
}

inline constexpr const char* kGet = "GET /echo HTTP/1.1\r\nHost: localhost\r\n\r\n";

}  // namespace weft
