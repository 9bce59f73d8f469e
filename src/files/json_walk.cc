// Large JSON texts from untrusted files: see json_walk.h.
#include "files/json_walk.h"

#include <array>
#include <charconv>
#include <cstring>

#include "files/refuse.h"

namespace weft::files {
namespace {

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
int hex_digit(char c) {
  return is_digit(c) ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

// Reads a text once and stops at the first byte that JSON does not allow there.
class Checker {
 public:
  Checker(std::string_view text, std::string_view file) : text_(text), file_(file) {}

  // The extent of the one value of the text.
  std::string_view check() {
    if (text_.starts_with("\xEF\xBB\xBF")) at_ = 3;
    skip_space();
    const size_t begin = at_;
    value();
    const size_t end = at_;
    skip_space();
    if (at_ != text_.size()) fail();
    return text_.substr(begin, end - begin);
  }

 private:
  // Position of the byte that is at fault, counted from 1.
  [[noreturn]] void fail() const { refuse(file_, "", "is not JSON at byte " + std::to_string(at_ + 1)); }

  // The byte `ahead` of the position; -1 at the end of the text.
  int peek(size_t ahead = 0) const { return at_ + ahead < text_.size() ? static_cast<unsigned char>(text_[at_ + ahead]) : -1; }
  bool take(char wanted) {
    if (peek() != static_cast<unsigned char>(wanted)) return false;
    ++at_;
    return true;
  }
  void expect(char wanted) {
    if (!take(wanted)) fail();
  }
  void skip_space() {
    while (at_ < text_.size() && is_space(text_[at_])) ++at_;
  }

  // One value with everything in it. `open` holds the closing brackets that are awaited.
  void value() {
    std::array<char, kMaxJsonDepth> open{};
    size_t depth = 0;
    for (;;) {
      skip_space();
      bool complete = true;  // a value ends here
      if (peek() == '{' || peek() == '[') {
        if (depth == open.size()) refuse(file_, "", "nests deeper than " + std::to_string(kMaxJsonDepth) + " levels");
        open[depth++] = text_[at_++] == '{' ? '}' : ']';
        skip_space();
        if (take(open[depth - 1]))
          --depth;
        else
          complete = false;
      } else {
        scalar();
      }
      while (complete && depth > 0) {
        skip_space();
        if (take(',')) break;
        expect(open[depth - 1]);
        --depth;
      }
      if (depth == 0) return;
      if (open[depth - 1] == '}') {
        skip_space();
        string();
        skip_space();
        expect(':');
      }
    }
  }

  void scalar() {
    switch (peek()) {
      case '"': return string();
      case 't': return word("true");
      case 'f': return word("false");
      case 'n': return word("null");
      default: return number();
    }
  }

  void word(std::string_view wanted) {
    for (char c : wanted) expect(c);
  }

  void digits() {
    if (at_ >= text_.size() || !is_digit(text_[at_])) fail();
    while (at_ < text_.size() && is_digit(text_[at_])) ++at_;
  }

  void number() {
    take('-');
    if (!take('0')) digits();
    if (take('.')) digits();
    if (take('e') || take('E')) {
      if (!take('+')) take('-');
      digits();
    }
  }

  void string() {
    expect('"');
    for (;;) {
      const int c = peek();
      if (c < 0x20) fail();  // the end of the text, too
      if (c == '"') break;
      if (c == '\\')
        escape();
      else if (c < 0x80)
        ++at_;
      else
        utf8();
    }
    ++at_;
  }

  unsigned four_digits() {
    unsigned unit = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const int digit = peek() < 0 ? -1 : hex_digit(text_[at_]);
      if (digit < 0) fail();
      unit = unit << 4 | static_cast<unsigned>(digit);
    }
    return unit;
  }

  void escape() {
    ++at_;
    if (take('u')) {
      const unsigned unit = four_digits();
      if (unit >= 0xDC00 && unit < 0xE000) fail();  // the second half of a pair, without the first
      if (unit < 0xD800 || unit >= 0xE000) return;
      expect('\\');
      expect('u');
      const unsigned low = four_digits();
      if (low < 0xDC00 || low >= 0xE000) fail();
      return;
    }
    if (peek() <= 0 || !std::strchr("\"\\/bfnrt", peek())) fail();
    ++at_;
  }

  // One character of two bytes or more: neither overlong nor a surrogate nor beyond U+10FFFF.
  void utf8() {
    const int lead = peek();
    if (lead < 0xC2 || lead > 0xF4) fail();
    const int low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80, high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    ++at_;
    if (peek() < low || peek() > high) fail();
    ++at_;
    for (int more = lead < 0xE0 ? 0 : lead < 0xF0 ? 1 : 2; more > 0; --more, ++at_)
      if (peek() < 0x80 || peek() > 0xBF) fail();
  }

  std::string_view text_, file_;
  size_t at_ = 0;
};

// The walk below needs no bounds: the text is checked, and every value it visits lies inside brackets.
const char* skip_space(const char* at) {
  while (is_space(*at)) ++at;
  return at;
}

const char* string_end(const char* at) {
  for (++at; *at != '"'; ++at)
    if (*at == '\\') ++at;
  return at + 1;
}

void append_utf8(std::string& out, unsigned c) {
  const auto byte = [&](unsigned value) { out += static_cast<char>(value); };
  if (c < 0x80) return byte(c);
  if (c < 0x800) {
    byte(0xC0 | c >> 6);
  } else {
    if (c < 0x10000) {
      byte(0xE0 | c >> 12);
    } else {
      byte(0xF0 | c >> 18);
      byte(0x80 | (c >> 12 & 0x3F));
    }
    byte(0x80 | (c >> 6 & 0x3F));
  }
  byte(0x80 | (c & 0x3F));
}

unsigned unit_at(std::string_view text, size_t at) {
  unsigned unit = 0;
  for (char c : text.substr(at, 4)) unit = unit << 4 | static_cast<unsigned>(hex_digit(c));
  return unit;
}

}  // namespace

JsonPart::Kind JsonPart::kind() const {
  switch (text_.front()) {
    case '{': return Kind::object;
    case '[': return Kind::list;
    case '"': return Kind::string;
    case 't':
    case 'f': return Kind::boolean;
    case 'n': return Kind::null;
    default: return Kind::number;
  }
}

const char* JsonPart::first() const { return skip_space(text_.data() + 1); }

const char* JsonPart::next(const char* end) {
  const char* const at = skip_space(end);
  return *at == ',' ? skip_space(at + 1) : at;
}

const char* JsonPart::value_after_colon(const char* end) { return skip_space(skip_space(end) + 1); }

const char* JsonPart::value_end(const char* begin) {
  const char* at = begin;
  if (*at == '"') return string_end(at);
  if (*at != '{' && *at != '[') {
    while (!is_space(*at) && *at != ',' && *at != '}' && *at != ']') ++at;
    return at;
  }
  int depth = 0;
  do {
    if (*at == '"') {
      at = string_end(at);
      continue;
    }
    depth += *at == '{' || *at == '[';
    depth -= *at == '}' || *at == ']';
    ++at;
  } while (depth > 0);
  return at;
}

size_t JsonPart::size() const {
  size_t count = 0;
  if (is(Kind::object)) members([&](std::string_view, JsonPart) { ++count; });
  if (is(Kind::list)) elements([&](JsonPart) { ++count; });
  return count;
}

std::string_view JsonPart::unescaped(std::string_view quoted, std::string& buffer) {
  const std::string_view inside = quoted.substr(1, quoted.size() - 2);
  size_t at = inside.find('\\');
  if (at == std::string_view::npos) return inside;
  buffer.clear();
  buffer.reserve(inside.size());
  buffer.append(inside.substr(0, at));
  while (at < inside.size()) {
    if (inside[at] != '\\') {
      buffer += inside[at++];
      continue;
    }
    const char kind = inside[at + 1];
    at += 2;
    if (kind == 'u') {
      unsigned c = unit_at(inside, at);
      at += 4;
      if (c >= 0xD800 && c < 0xDC00) {
        c = 0x10000 + ((c - 0xD800) << 10) + (unit_at(inside, at + 2) - 0xDC00);
        at += 6;
      }
      append_utf8(buffer, c);
    } else {
      constexpr std::string_view kKinds = "bfnrt", kMeans = "\b\f\n\r\t";
      const size_t found = kKinds.find(kind);
      buffer += found == std::string_view::npos ? kind : kMeans[found];
    }
  }
  return buffer;
}

std::string JsonPart::string() const {
  std::string buffer;
  return std::string(unescaped(text_, buffer));
}

std::optional<uint64_t> JsonPart::whole() const {
  uint64_t value = 0;
  const char* const end = text_.data() + text_.size();
  const auto [stop, fault] = std::from_chars(text_.data(), end, value);
  if (fault != std::errc() || stop != end) return std::nullopt;
  return value;
}

Json JsonPart::tree(std::string_view file) const { return parse_json(text_, file, kMaxJsonPart); }

JsonPart check_json_object(std::string_view text, std::string_view file) {
  const JsonPart whole(Checker(text, file).check());
  if (!whole.is(JsonPart::Kind::object)) refuse(file, "", "is " + json_text(whole) + ", wanted a JSON object");
  return whole;
}

std::string json_text(const JsonPart& value) {
  switch (value.kind()) {
    case JsonPart::Kind::string: return in_quotes(value.string());
    case JsonPart::Kind::list: return "a list";
    case JsonPart::Kind::object: return "an object";
    default: return printable(value.text());
  }
}

}  // namespace weft::files
