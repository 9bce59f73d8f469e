// Answers as bytes of HTTP.
#pragma once

#include <string>
#include <string_view>

#include "serve/exchange.h"

namespace weft::serve {

// How the end of a body is marked.
enum class HttpEnd { length, chunks, close };

// The status line and all fields. `bytes` is the length of the body, for HttpEnd::length. `keep`: may another request follow?
std::string reply_head(const HttpReply& reply, HttpEnd end, size_t bytes, bool keep);
std::string chunk(std::string_view piece);  // one chunk; an empty piece gives nothing
inline constexpr std::string_view kLastChunk = "0\r\n\r\n";

}  // namespace weft::serve
