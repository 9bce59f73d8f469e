// One request and the way to answer it: the interface between the HTTP half of the server and the API half.
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
  uint64_t body_bytes = 0;  // most bytes of the body, according to the header
};

struct HttpReply {
  int status = 200;
  std::string type = "application/json", body;
  std::vector<std::pair<std::string, std::string>> fields;  // further header fields
};

HttpReply reply_of(const ApiError& error);

// The answer to one request. Any thread may call the members; none of them blocks. If the exchange is dropped without an answer,
// the client gets status 500.
class Exchange {
 public:
  virtual ~Exchange() = default;

  // Sends the whole answer. Only the first call of reply() or begin() has an effect.
  virtual void reply(HttpReply reply) = 0;

  // Begins an answer of pieces. The body of `head` is the first piece. It may be long, because it does not count as unsent.
  virtual void begin(HttpReply head) = 0;
  // Adds a piece. False: the client has left, or has more than kMaxUnsentBytes unread; the caller should end the request.
  virtual bool write(std::string_view piece) = 0;
  virtual void end() = 0;

  // Calls `leave` once, on a thread of the server, if the client leaves before the end of the answer; at once if it has left
  // already.
  virtual void on_leave(std::function<void()> leave) = 0;
};

// Decides about a request from its header alone. Throws ApiError.
using HttpGate = std::function<void(const HttpRequest& head)>;
// Answers a request on the thread of the server, for requests that take no time and must not wait for others. Absent: the handler
// answers.
using HttpQuick = std::function<std::optional<HttpReply>(const HttpRequest& request)>;
// Answers a request. Runs on a worker thread; an ApiError that it throws is the answer.
using HttpHandler = std::function<void(HttpRequest request, std::shared_ptr<Exchange> exchange)>;

}  // namespace weft::serve
