// One connection of the HTTP server. Included by http_server.cc and connection.cc only: Asio takes long to compile.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>

#include "serve/http_parser.h"
#include "serve/http_server.h"

namespace weft::serve {

class Connection;

// The data that connections share with their server. Only the thread of the server may use it, except the atomics and `counters`.
struct ConnectionHost {
  using Clock = std::chrono::steady_clock;

  HttpLimits limits;
  HttpGate gate;
  HttpHandler handler;
  HttpQuick quick;
  std::function<void(std::function<void()>)> defer, defer_leave;  // pass requests to workers, and their ends to another thread
  std::unordered_set<std::shared_ptr<Connection>> connections;
  std::function<void()> removed;    // called when a connection leaves the set
  std::atomic<size_t> bodies = 0;   // bytes of bodies that are being received or parsed
  std::atomic<size_t> answers = 0;  // bytes of whole answers that are being sent
  bool closing = false;

  struct Counters {
    std::atomic<int64_t> connections = 0, accepted = 0, evicted = 0, requests = 0, slow = 0;
    std::atomic<int64_t> answers[6] = {};
  } counters;
};

// Members are called on the thread of the server.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  using Clock = ConnectionHost::Clock;
  using Socket = boost::asio::ip::tcp::socket;

  Connection(Socket socket, std::shared_ptr<ConnectionHost> host);

  void start();
  void close();                // closes at once
  void close_when_answered();  // closes at once where no request is being answered
  void check_deadline(Clock::time_point now);
  // Does it wait for a request, for the rest of a request, or for its client to close? Such a connection may be closed for another
  // one.
  bool waits() const { return state_ != State::answer && state_ != State::closed; }
  Clock::time_point since() const { return since_; }

 private:
  class Answer;
  friend class Answer;
  // idle: between requests. head, body: a request arrives. answer: the request is answered. linger: the last answer was sent, and
  // the client has time to read it.
  enum class State { idle, head, body, answer, linger, closed };

  // A step can fail for lack of memory. Then only this connection is closed.
  template <class Step>
  void guarded(const Step& step) {
    try {
      step();
    } catch (const std::exception&) {
      close();
    }
  }
  void enter(State state, std::chrono::milliseconds deadline);
  void read();
  void on_readable();
  void parse();
  void on_header();
  void count_body();
  void uncount_body();
  void dispatch();
  void refuse(const ApiError& error);
  void leave();
  bool left_unread();
  bool slow(Clock::time_point now);
  void flush();
  void finish();

  Socket socket_;
  std::shared_ptr<ConnectionHost> host_;
  std::string peer_;
  State state_ = State::idle;
  Clock::time_point since_, deadline_, last_written_;
  HttpParser parser_;
  std::string in_;        // bytes received and not yet parsed
  bool reading_ = false;  // a read is in progress
  bool checked_ = false;  // the gate has seen the header
  size_t counted_ = 0;    // bytes of the body in ConnectionHost::bodies
  size_t discarded_ = 0;  // bytes read while lingering
  std::shared_ptr<Answer> answer_;
  std::string out_;  // bytes that are being sent
  size_t sent_ = 0;  // bytes of out_ that were sent
  bool writing_ = false, keep_ = false;
  Clock::time_point window_;  // when the measurement of the client's speed began
  size_t window_bytes_ = 0;   // bytes that the client accepted since then
};

}  // namespace weft::serve
