// Strict reading of the JSON of requests: every field has a type and a range, and unknown ones are refused by name.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "files/json_walk.h"

namespace weft::serve {

// A value with its path for errors, such as messages[0].role. Every reader throws ApiError for a value of another type or out of
// range.
class JsonValue {
 public:
  JsonValue(files::JsonPart part, std::string path) : part_(part), path_(std::move(path)) {}

  const std::string& path() const { return path_; }
  const files::JsonPart& part() const { return part_; }

  int64_t whole(int64_t low, int64_t high) const;
  double number(double low, double high, bool above = false) const;  // above: `low` itself is out of range
  bool flag() const;
  std::string text(size_t most = SIZE_MAX) const;
  // The elements of a list of `least` to `most` elements, with their paths.
  std::vector<JsonValue> list(size_t least, size_t most) const;
  // Token ids from 0 to size - 1.
  std::vector<int32_t> tokens(int32_t size) const;

  // Throws "<path> is <value>, wanted <what>".
  [[noreturn]] void refuse(const std::string& wanted) const;

 private:
  files::JsonPart part_;
  std::string path_;
};

// A field of an object and what to do with its value. A value that is null counts as absent.
struct JsonField {
  std::string_view name;
  std::function<void(const JsonValue& value)> read;  // empty: a field of OpenAI's API that this server does not support
};

// Reads all members of an object. Throws ApiError for a member that `fields` lacks, for one that occurs twice, and for one without
// `read`. The path of a member is that of the object, a dot and the name.
void read_fields(const JsonValue& object, std::initializer_list<JsonField> fields);
void read_fields(const JsonValue& object, const std::vector<JsonField>& fields);

// The object in the body of a request. Throws ApiError for anything that is not one JSON object within the bounds of
// files/json_text.h. The value is a view of the body.
JsonValue parse_body(std::string_view body);

}  // namespace weft::serve
