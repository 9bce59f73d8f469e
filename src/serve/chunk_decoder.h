// The decoder of chunked request bodies (RFC 9112, 7.1), bounded by limits.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace weft::serve {

// Stricter than the RFC against request smuggling, which needs two readers that disagree about the end of a request: lines end with
// CR LF, and a size is followed by nothing or by `;` at once. Extensions and trailer fields are read and dropped.
class ChunkDecoder {
 public:
  // Decodes as many of `bytes` as it can, appends the content to `body`, and returns the number of bytes consumed: all, or those up
  // to the end of the body. Throws ApiError with status 400 for bytes that are no chunks, 413 for a body above kMaxBodyBytes, 431
  // for too long extensions and trailers.
  size_t decode(std::string_view bytes, std::string& body);
  bool done() const { return state_ == State::done; }

 private:
  enum class State { size, extension, size_end, data, data_cr, data_lf, line, trailer, trailer_end, end, done };

  void take(char c, const std::string& body);
  void take_size(char c, const std::string& body);
  void take_text(char c, State after);

  State state_ = State::size;
  uint64_t left_ = 0;  // bytes of the chunk that are still to come; while its size is read: the size so far
  int digits_ = 0;     // digits of the size so far
  size_t texts_ = 0;   // bytes of extensions and trailer fields
};

}  // namespace weft::serve
