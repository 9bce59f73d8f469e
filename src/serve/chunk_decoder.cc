// The decoder of chunked request bodies: see chunk_decoder.h.
#include "serve/chunk_decoder.h"

#include <algorithm>

#include "serve/api_error.h"
#include "serve/limits.h"

namespace weft::serve {
namespace {

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

[[noreturn]] void refuse(const char* what) { throw ApiError(400, std::string("the chunks of the body are not HTTP: ") + what); }

}  // namespace

size_t ChunkDecoder::decode(std::string_view bytes, std::string& body) {
  size_t at = 0;
  while (at < bytes.size() && !done()) {
    if (state_ != State::data) {
      take(bytes[at++], body);
      continue;
    }
    const size_t some = static_cast<size_t>(std::min<uint64_t>(left_, bytes.size() - at));
    body.append(bytes.substr(at, some));
    at += some;
    left_ -= some;
    if (left_ == 0) state_ = State::data_cr;
  }
  return at;
}

void ChunkDecoder::take(char c, const std::string& body) {
  const auto expect = [&](char wanted, State next) {
    if (c != wanted) refuse("a line does not end with CR LF");
    state_ = next;
  };
  switch (state_) {
    case State::size: return take_size(c, body);
    case State::extension: return take_text(c, State::size_end);
    case State::size_end: return expect('\n', left_ > 0 ? State::data : State::line);
    case State::data_cr: return expect('\r', State::data_lf);
    case State::data_lf: digits_ = 0; return expect('\n', State::size);
    case State::line:  // a field of the trailer, or the empty line at its end
      if (c != '\r') return take_text(c, State::trailer_end);
      state_ = State::end;
      return;
    case State::trailer: return take_text(c, State::trailer_end);
    case State::trailer_end: return expect('\n', State::line);
    case State::end: return expect('\n', State::done);
    case State::data:
    case State::done: return;
  }
}

void ChunkDecoder::take_size(char c, const std::string& body) {
  constexpr int kMaxDigits = 16;  // leading zeros included
  if (const int digit = hex_digit(c); digit >= 0) {
    if (++digits_ > kMaxDigits) refuse("a size has more than 16 digits");
    left_ = left_ * 16 + static_cast<uint64_t>(digit);
    return;
  }
  if (digits_ == 0) refuse("a chunk has no size");
  if (c != '\r' && c != ';') refuse("a size is not hexadecimal");
  if (left_ > kMaxBodyBytes - body.size())
    throw ApiError(413, "the body of the request has more than " + std::to_string(kMaxBodyBytes) + " bytes");
  state_ = c == ';' ? State::extension : State::size_end;
}

// A byte of an extension or of a trailer field.
void ChunkDecoder::take_text(char c, State after) {
  if (c == '\r') {
    state_ = after;
    return;
  }
  if ((static_cast<unsigned char>(c) < 0x20 && c != '\t') || c == 0x7f) refuse("a control character");
  if (++texts_ > kMaxHeaderBytes)
    throw ApiError(431, "the extensions and trailers of the request have more than " + std::to_string(kMaxHeaderBytes) + " bytes");
  if (state_ == State::line) state_ = State::trailer;
}

}  // namespace weft::serve
