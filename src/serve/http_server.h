// The HTTP half of the server: connections, limits and timeouts. It knows nothing of models.
//
// One thread moves all bytes. Workers run the handler, which may take time: reading JSON, tokenizing a prompt. A connection has one
// request at a time. Further requests that its client sends meanwhile (pipelining) wait in a buffer of kMaxHeaderBytes, and in the
// socket. The server holds at most kMaxUnsentBytes of a stream that its client does not read.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "serve/exchange.h"
#include "serve/limits.h"

namespace weft::serve {

// `connections` is the present number; the others count from the start and only grow.
struct HttpStats {
  int64_t connections = 0, accepted = 0, evicted = 0;  // evicted: waited for a request when another connection came
  int64_t requests = 0, slow = 0;                      // slow: streams that ended because their client did not read
  int64_t answers[6] = {};                             // by the first digit of the status
};

class HttpServer {
 public:
  // Listens. Throws std::runtime_error with a sentence where it cannot listen on the address. Port 0: the system chooses.
  HttpServer(const std::string& host, uint16_t port, const HttpLimits& limits, HttpGate gate, HttpHandler handler);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  uint16_t port() const;
  std::string address() const;  // the address that the server listens on, as in a URL: "127.0.0.1", "[::1]"
  bool loopback() const;
  HttpStats stats() const;  // any thread may call it

  // Asks `quick` before the handler. Call it before run().
  void answer_at_once(HttpQuick quick);
  // Calls `signalled` with the number of a signal, on the thread of run(). Call it before run().
  void on_signal(std::function<void(int signal)> signalled);
  // Serves until close() was called and every answer is sent, or abort() was called.
  void run();

  // These may be called from any thread. close(): accepts no more connections, and closes each after its present answer, or at the
  // deadline.
  void close(std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max());
  // Between hold() and release(), run() does not return although no connection is left, so that signals still arrive. abort() ends
  // run() all the same.
  void hold();
  void release();
  void abort();
  // Runs a function on a worker thread.
  void defer(std::function<void()> work);

 private:
  struct Parts;
  std::shared_ptr<Parts> parts_;
};

}  // namespace weft::serve
