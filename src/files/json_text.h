// JSON from untrusted files: bounded depth, no repeated keys, and checked access to fields.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace weft::files {

using Json = nlohmann::json;

inline constexpr size_t kMaxJsonDepth = 32;
// Bytes of a text that becomes a tree. A tree takes up to 45 times as many bytes; json_walk.h reads larger texts.
inline constexpr size_t kMaxJsonTree = 1 << 20;

// Parses one JSON value, or one JSON object. Throws weft::Error for a text that is not exactly that, has more than `most` or
// kMaxJsonTree bytes, nests deeper than kMaxJsonDepth or repeats a key.
Json parse_json(std::string_view text, std::string_view file, size_t most = kMaxJsonTree);
Json parse_json_object(std::string_view text, std::string_view file);

// Reads fields of an object. Throws weft::Error that names the file and the field.
class JsonFields {
 public:
  // `path` is the prefix of field names in messages: "text_config.".
  JsonFields(const Json& object, std::string file, std::string path = {})
      : object_(&object), file_(std::move(file)), path_(std::move(path)) {}

  const std::string& file() const { return file_; }
  // The value of a field; null if it is absent or JSON null.
  const Json* find(const char* name) const;
  bool has(const char* name) const { return find(name) != nullptr; }

  // No value for an absent field. Throw for a value of another type or out of range.
  std::optional<int64_t> whole(const char* name, int64_t low, int64_t high) const;
  std::optional<double> number(const char* name, double low, double high) const;
  std::optional<bool> flag(const char* name) const;
  std::optional<std::string> text(const char* name) const;
  std::optional<JsonFields> object(const char* name) const;
  const Json* array(const char* name) const;

  [[noreturn]] void fail(std::string_view name, const std::string& what) const;

 private:
  const Json* object_;
  std::string file_, path_;
};

// A value as it appears in messages: "-3", "'abc'", "a list".
std::string json_text(const Json& value);

}  // namespace weft::files
