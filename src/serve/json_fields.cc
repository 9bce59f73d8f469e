// Strict reading of the JSON of requests: see json_fields.h.
#include "serve/json_fields.h"

#include <charconv>
#include <cmath>

#include "files/refuse.h"
#include "serve/api_error.h"

namespace weft::serve {
namespace {

using files::JsonPart;

template <class Number>
bool parse_number(std::string_view text, Number& value) {
  const char* const end = text.data() + text.size();
  const auto [stop, fault] = std::from_chars(text.data(), end, value);
  return fault == std::errc() && stop == end;
}

}  // namespace

void JsonValue::refuse(const std::string& wanted) const {
  refuse_field(path_, "is " + files::json_text(part_) + ", wanted " + wanted);
}

int64_t JsonValue::whole(int64_t low, int64_t high) const {
  int64_t value = 0;
  if (!part_.is(JsonPart::Kind::number) || !parse_number(part_.text(), value) || value < low || value > high)
    refuse("a whole number from " + std::to_string(low) + " to " + std::to_string(high));
  return value;
}

double JsonValue::number(double low, double high, bool above) const {
  double value = NAN;
  if (!part_.is(JsonPart::Kind::number) || !parse_number(part_.text(), value) || !(value >= low && value <= high) ||
      (above && value == low))
    refuse((above ? "a number above " : "a number from ") + files::number_text(low) + (above ? ", at most " : " to ") +
           files::number_text(high));
  return value;
}

bool JsonValue::flag() const {
  if (!part_.is(JsonPart::Kind::boolean)) refuse("true or false");
  return part_.text() == "true";
}

std::string JsonValue::text(size_t most) const {
  if (!part_.is(JsonPart::Kind::string)) refuse("a string");
  std::string value = part_.string();
  if (value.size() > most)
    refuse_field(path_, "has " + std::to_string(value.size()) + " bytes, wanted at most " + std::to_string(most));
  return value;
}

std::vector<JsonValue> JsonValue::list(size_t least, size_t most) const {
  if (!part_.is(JsonPart::Kind::list)) refuse("a list");
  const size_t size = part_.size();
  if (size < least || size > most)
    refuse_field(path_, "has " + std::to_string(size) + (size == 1 ? " element" : " elements") + ", wanted " +
                            std::to_string(least) + " to " + std::to_string(most));
  std::vector<JsonValue> values;
  values.reserve(size);
  part_.elements([&](const JsonPart& one) { values.emplace_back(one, path_ + "[" + std::to_string(values.size()) + "]"); });
  return values;
}

std::vector<int32_t> JsonValue::tokens(int32_t size) const {
  if (!part_.is(JsonPart::Kind::list)) refuse("a list of tokens");
  std::vector<int32_t> tokens;
  part_.elements([&](const JsonPart& one) {
    int32_t token = -1;
    if (!one.is(JsonPart::Kind::number) || !parse_number(one.text(), token) || token < 0 || token >= size)
      JsonValue(one, path_ + "[" + std::to_string(tokens.size()) + "]").refuse("a token from 0 to " + std::to_string(size - 1));
    tokens.push_back(token);
  });
  return tokens;
}

namespace {

void read_members(const JsonValue& object, const JsonField* begin, size_t count) {
  if (!object.part().is(JsonPart::Kind::object)) object.refuse("an object");
  std::vector<bool> seen(count);
  object.part().members([&](std::string_view key, const JsonPart& part) {
    constexpr size_t kLongest = 64;  // bytes of a name that an error shows
    const std::string prefix = object.path().empty() ? "" : object.path() + ".";
    const std::string path = prefix + std::string(key.substr(0, kLongest));
    size_t found = 0;
    while (found < count && begin[found].name != key) ++found;
    if (found == count) refuse_field(path, "is not a field of this request", "unknown_parameter");
    if (seen[found]) refuse_field(path, "occurs twice");
    seen[found] = true;
    if (part.is(JsonPart::Kind::null)) return;
    if (!begin[found].read) refuse_field(path, "is not supported", "unsupported_parameter");
    begin[found].read(JsonValue(part, path));
  });
}

}  // namespace

void read_fields(const JsonValue& object, std::initializer_list<JsonField> fields) {
  read_members(object, fields.begin(), fields.size());
}
void read_fields(const JsonValue& object, const std::vector<JsonField>& fields) {
  read_members(object, fields.data(), fields.size());
}

JsonValue parse_body(std::string_view body) {
  try {
    return {files::check_json_object(body, "the body of the request"), ""};
  } catch (const Error& error) {
    throw ApiError(400, error.what(), "", "invalid_json");
  }
}

}  // namespace weft::serve
