// Requests to the server: HTTP in pieces of any size, bodies of every path, and the fields that decide who may speak.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "serve/access.h"
#include "serve/api_error.h"
#include "serve/http_parser.h"
#include "serve/limits.h"
#include "serve/request.h"

namespace {

using namespace weft::serve;

const RequestLimits kLimits{.vocabulary = 1000, .choices = 8, .capacity = 4096};

void expect(bool good) {
  if (!good) std::abort();
}

template <class Parse>
void parse_body_with(Parse&& parse) {
  try {
    parse();
  } catch (const ApiError& error) {
    expect(error.status() == 400 && !std::string_view(error.what()).empty());
    // What reaches a log or a terminal has no control characters.
    for (const char c : std::string_view(error.what())) expect(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f);
    expect(error.json().find("\"error\"") != std::string::npos);
  }
}

// All requests of a connection, received in pieces of `piece` bytes. Returns those that were understood. Whether what follows them is
// refused at once or when its header is complete may depend on the pieces.
std::string parse_connection(std::string_view bytes, size_t piece) {
  std::string seen, in;
  try {
    HttpParser parser;
    for (size_t at = 0; at < bytes.size(); at += piece) {
      in += bytes.substr(at, piece);
      while (!in.empty()) {
        const size_t taken = parser.parse(in);
        expect(taken <= in.size());
        in.erase(0, taken);
        if (parser.done()) {
          const HttpRequest request = parser.take();
          expect(request.body.size() <= kMaxBodyBytes && request.path.starts_with('/'));
          seen += request.method + " " + request.path + " " + request.access.host.value_or("-") + " " + request.body + "\n";
          if (!parser.keeps_alive()) return seen;
          parser = HttpParser();
        } else if (taken == 0) {
          break;
        }
      }
      if (in.size() > kMaxHeaderBytes + piece) return seen;
    }
  } catch (const ApiError& error) {
    expect(error.status() >= 400);
  }
  return seen;
}

void check_access(std::string_view bytes) {
  const size_t half = bytes.size() / 2;
  const AccessFields fields{std::string(bytes.substr(0, half)), std::string(bytes.substr(half)), std::string(bytes)};
  try {
    check_origin({}, fields);
    // Whoever passes named the loopback address, and came from there.
    expect(is_loopback_name(*host_name(*fields.host)));
  } catch (const ApiError& error) {
    expect(error.status() == 400 || error.status() == 403);
  }
  expect(same_key("0123456789abcdef", bytes) == (bytes == "0123456789abcdef"));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0]) {
    case 'c': parse_body_with([&] { parse_completion(text, kLimits); }); break;
    case 'm': parse_body_with([&] { parse_chat(text, kLimits); }); break;
    case 't': parse_body_with([&] { parse_tokenize(text); }); break;
    case 'd': parse_body_with([&] { parse_detokenize(text, kLimits); }); break;
    case 'a': check_access(text); break;
    default: {
      // Where the pieces end must not matter.
      const std::string whole = parse_connection(text, text.size() + 1);
      for (size_t piece : {size_t{1}, size_t{7}}) expect(parse_connection(text, piece) == whole);
    }
  }
  return 0;
}
