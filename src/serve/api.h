// The paths of the server and what each answers.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "serve/engine.h"
#include "serve/exchange.h"
#include "serve/http_server.h"

namespace weft::serve {

class Api {
 public:
  // Calls `stats` for /metrics. `stopping` says whether the server takes no more requests.
  Api(Engine& engine, std::function<HttpStats()> stats, std::function<bool()> stopping)
      : engine_(engine), stats_(std::move(stats)), stopping_(std::move(stopping)) {}

  // Refuses requests by their header alone: a foreign Host or Origin, a wrong key, an unknown path, a body of another type than
  // JSON.
  static void check(const AccessRules& rules, const HttpRequest& head);
  // Answers /health, and nothing else.
  static std::optional<HttpReply> health(const HttpRequest& request, bool stopping);
  // Answers every other request that passed check(). Throws ApiError.
  void answer(HttpRequest request, std::shared_ptr<Exchange> exchange);

 private:
  HttpReply get(const HttpRequest& request) const;
  HttpReply tokenize(const HttpRequest& request) const;
  HttpReply detokenize(const HttpRequest& request) const;

  Engine& engine_;
  std::function<HttpStats()> stats_;
  std::function<bool()> stopping_;
};

}  // namespace weft::serve
