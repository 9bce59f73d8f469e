// The parser of HTTP requests: Boost.Beast's grammar of headers, with the bounds of limits.h. It keeps only fields that the server
// reads.
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

  // Parses as many of `bytes` as it can, and returns the number of bytes consumed. The next call must begin with the other bytes.
  // Returns once the header is complete, before the body. Throws ApiError for a request that is malformed or too large; the
  // connection must then close.
  size_t parse(std::string_view bytes);

  bool has_header() const;      // request() is complete except for the body
  bool done() const;            // request() is complete
  bool keeps_alive() const;     // may another request follow on this connection?
  bool streams() const;         // does the client know chunked answers, as HTTP/1.1 does?
  bool wants_continue() const;  // Expect: 100-continue
  const HttpRequest& request() const;
  HttpRequest take();  // the request; call it when done()

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace weft::serve
