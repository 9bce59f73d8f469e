// The whole server: model, batcher, HTTP and API together.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "serve/http_server.h"
#include "weft/batcher.h"
#include "weft/chat.h"
#include "weft/tokenizer.h"

namespace weft::serve {

struct ServeOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 8080;  // 0: the system chooses
  std::string key;       // the key that clients must send; required where the host or an allowed host is not the loopback address
  std::vector<std::string> allowed_hosts;  // further names of this server in the field Host
  std::string name;                        // name of the model
  HttpLimits http;
  BatcherOptions batch;
  std::chrono::milliseconds drain{30000};  // time that running requests have to finish once the server stops
  bool signals = false;                    // SIGINT, SIGTERM and SIGHUP stop the server; a second one ends requests at once
};

class Server {
 public:
  // Makes the batcher and listens. Answers no request before run(). The model must outlive the server. Throws with a sentence.
  Server(const Model& model, Tokenizer tokenizer, ChatTemplate chat, const ServeOptions& options);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  uint16_t port() const;
  std::string url() const;  // "http://127.0.0.1:8080"
  const Batcher& batcher() const;
  HttpStats http_stats() const;

  // Serves until stop() or a signal. Then lets requests finish, saves sessions, and returns.
  void run();
  void stop();  // any thread may call it; a second call ends the requests at once
  // After run(): sentences about sessions that could not be saved.
  const std::vector<std::string>& faults() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace weft::serve
