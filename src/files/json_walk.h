// Large JSON texts from untrusted files: checked once, then walked in place. Only what a caller keeps takes memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "files/json_text.h"

namespace weft::files {

// Bytes of a part that becomes a tree.
inline constexpr size_t kMaxJsonPart = 1 << 17;

// A value in a text that check_json_object() has accepted. It is a view of that text.
class JsonPart {
 public:
  enum class Kind { null, boolean, number, string, list, object };

  explicit JsonPart(std::string_view checked) : text_(checked) {}
  std::string_view text() const { return text_; }
  Kind kind() const;
  bool is(Kind kind) const { return this->kind() == kind; }

  // Calls each(key, value) for every member of an object, in the order of the text. The key is a std::string_view that is valid
  // during the call. A key may occur twice.
  template <class Each>
  void members(Each&& each) const {
    std::string buffer;
    member_texts([&](std::string_view quoted, const JsonPart& value) { each(unescaped(quoted, buffer), value); });
  }
  // The same with keys as they are in the text, in quotes and with escapes.
  template <class Each>
  void member_texts(Each&& each) const {
    for (const char* at = first(); *at != '}';) {
      const char* const key_end = value_end(at);
      const char* const begin = value_after_colon(key_end);
      const char* const end = value_end(begin);
      each(view(at, key_end), JsonPart(view(begin, end)));
      at = next(end);
    }
  }
  // Calls each(value) for every element of a list.
  template <class Each>
  void elements(Each&& each) const {
    for (const char* at = first(); *at != ']';) {
      const char* const end = value_end(at);
      each(JsonPart(view(at, end)));
      at = next(end);
    }
  }
  size_t size() const;  // members or elements

  std::string string() const;             // of a string
  std::optional<uint64_t> whole() const;  // absent for what is not a whole number from 0 to 2^64 - 1, in digits
  // The value as a tree, for a small part of a large text. Throws weft::Error for one of more than kMaxJsonPart bytes, and as
  // parse_json() does.
  Json tree(std::string_view file) const;

  // The text that a string of the text, with its quotes, means: a part of `quoted`, or of `buffer` if it has escapes.
  static std::string_view unescaped(std::string_view quoted, std::string& buffer);

 private:
  static std::string_view view(const char* begin, const char* end) { return {begin, static_cast<size_t>(end - begin)}; }
  // Positions in the text, which is known to be well-formed from there on.
  const char* first() const;                              // of the first key or element, or of the closing bracket
  static const char* next(const char* end);               // the same after a value that ends at `end`
  static const char* value_after_colon(const char* end);  // the value of a key that ends at `end`
  static const char* value_end(const char* begin);

  std::string_view text_;
};

// Checks that a text is exactly one JSON object that nests no deeper than kMaxJsonDepth. Throws weft::Error otherwise. Takes no
// memory; repeated keys are not noticed.
JsonPart check_json_object(std::string_view text, std::string_view file);

// A value as it appears in messages: "-3", "'abc'", "a list".
std::string json_text(const JsonPart& value);

}  // namespace weft::files
