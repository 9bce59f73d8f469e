// One request and the way to answer it: what the HTTP half of the server and the API half know of each other.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "serve/access.h"

namespace weft::serve {

struct HttpRequest {
  std::string method, path, query, content_type, body;
  AccessFields access;
  std::string peer;         // the client's address
  uint64_t body_bytes = 0;  // at most, as the header says
};

struct HttpReply {
  int status = 200;
  std::string type = "application/json", body;
  std::vector<std::pair<std::string, std::string>> fields;  // further header fields
};

HttpReply reply_of(const ApiError& error);

// The answer to one request. Any thread may call the members; none of them blocks. An exchange that is dropped unanswered answers
// with status 500.
class Exchange {
 public:
  virtual ~Exchange() = default;

  // The whole answer. The first call of reply() or begin() counts.
  virtual void reply(HttpReply reply) = 0;

  // Begins an answer of pieces. The body of `head` is the first one. It may be long: it does not count as unsent.
  virtual void begin(HttpReply head) = 0;
  // Adds a piece. False: the client has left, or has not read kMaxUnsentBytes; what the piece answers should end.
  virtual bool write(std::string_view piece) = 0;
  virtual void end() = 0;

  // Called once, on a thread of the server, when the client leaves before the end of the answer; at once where it has left.
  virtual void on_leave(std::function<void()> leave) = 0;
};

// Decides about a request from its header alone. Throws ApiError.
using HttpGate = std::function<void(const HttpRequest& head)>;
// Answers, on the thread of the server, a request that takes no time and that shall not wait for others.
using HttpQuick = std::function<std::optional<HttpReply>(const HttpRequest& request)>;
// Answers a request. Runs on a worker thread; an ApiError that it throws is the answer.
using HttpHandler = std::function<void(HttpRequest request, std::shared_ptr<Exchange> exchange)>;

}  // namespace weft::serve
