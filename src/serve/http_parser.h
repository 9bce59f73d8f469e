// The parser of HTTP requests: Boost.Beast's grammar of headers, with the bounds of limits.h, without the fields that nobody reads.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

#include "serve/exchange.h"

namespace weft::serve {

// Parses one request. After a fault or the end of the request it takes no more bytes.
class HttpParser {
 public:
  HttpParser();
  ~HttpParser();
  HttpParser(HttpParser&&) noexcept;
  HttpParser& operator=(HttpParser&&) noexcept;

  // Parses what it can of `bytes` and returns how many it consumed. The rest must come again, with more bytes after it. Throws
  // ApiError for a request that is malformed or too large: the connection must then close. Returns once the header is complete,
  // before any of the body.
  size_t parse(std::string_view bytes);

  bool has_header() const;      // request() has all but the body
  bool done() const;            // it has the body, too
  bool keeps_alive() const;     // may another request follow on this connection?
  bool streams() const;         // does the client know chunked answers, as HTTP/1.1 does?
  bool wants_continue() const;  // Expect: 100-continue
  const HttpRequest& request() const;
  HttpRequest take();  // after done()

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace weft::serve
