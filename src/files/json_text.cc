// JSON from untrusted files: see json_text.h.
#include "files/json_text.h"

#include <cmath>

#include "files/refuse.h"

namespace weft::files {
namespace {

// Builds the tree from the events of the parser, and stops at the first repeated key or at too deep nesting.
class Builder : public nlohmann::json_sax<Json> {
 public:
  explicit Builder(Json& root) : root_(root) {}

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool number_float(number_float_t value, const string_t&) override { return put(value); }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t&) override { return false; }  // does not occur in JSON text
  bool start_object(std::size_t) override { return enter(Json::object()); }
  bool start_array(std::size_t) override { return enter(Json::array()); }
  bool end_object() override { return leave(); }
  bool end_array() override { return leave(); }

  bool key(string_t& name) override {
    const auto [place, fresh] = open_.back()->get_ref<Json::object_t&>().emplace(std::move(name), nullptr);
    if (!fresh) fault = "repeats the key " + in_quotes(place->first);
    value_ = &place->second;
    return fresh;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    fault = "is not JSON at byte " + std::to_string(position);
    return false;
  }

  std::string fault;

 private:
  // Stores the next value: at the last key, at the end of a list, or as the root.
  Json* place(Json&& value) {
    if (open_.empty()) return &(root_ = std::move(value));
    if (!open_.back()->is_array()) return &(*value_ = std::move(value));
    open_.back()->push_back(std::move(value));
    return &open_.back()->back();
  }
  bool put(Json&& value) {
    place(std::move(value));
    return true;
  }
  bool enter(Json&& value) {
    if (open_.size() >= kMaxJsonDepth) {
      fault = "nests deeper than " + std::to_string(kMaxJsonDepth) + " levels";
      return false;
    }
    open_.push_back(place(std::move(value)));
    return true;
  }
  bool leave() {
    open_.pop_back();
    return true;
  }

  Json& root_;
  // Only the innermost open container is appended to, so these addresses stay valid.
  std::vector<Json*> open_;
  Json* value_ = nullptr;
};

}  // namespace

Json parse_json(std::string_view text, std::string_view file, size_t most) {
  if (text.size() > most)
    refuse(file, "", "has a value of " + std::to_string(text.size()) + " bytes, wanted at most " + std::to_string(most));
  Json root;
  Builder builder(root);
  if (!Json::sax_parse(text, &builder)) refuse(file, "", builder.fault.empty() ? "is not JSON" : builder.fault);
  return root;
}

Json parse_json_object(std::string_view text, std::string_view file) {
  Json root = parse_json(text, file);
  if (!root.is_object()) refuse(file, "", "is " + json_text(root) + ", wanted a JSON object");
  return root;
}

std::string json_text(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null: return "null";
    case Json::value_t::boolean: return value.get<bool>() ? "true" : "false";
    case Json::value_t::string: return in_quotes(value.get_ref<const std::string&>());
    case Json::value_t::array: return "a list";
    case Json::value_t::object: return "an object";
    default: return value.dump();
  }
}

const Json* JsonFields::find(const char* name) const {
  const auto found = object_->find(name);
  return found == object_->end() || found->is_null() ? nullptr : &*found;
}

void JsonFields::fail(std::string_view name, const std::string& what) const { refuse(file_, path_ + std::string(name), what); }

std::optional<int64_t> JsonFields::whole(const char* name, int64_t low, int64_t high) const {
  const Json* value = find(name);
  if (!value) return std::nullopt;
  const bool fits =
      value->is_number_unsigned() ? value->get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX) : value->is_number_integer();
  const int64_t number = fits ? value->get<int64_t>() : 0;
  if (!fits || number < low || number > high)
    fail(name, "is " + json_text(*value) + ", wanted a whole number from " + std::to_string(low) + " to " + std::to_string(high));
  return number;
}

std::optional<double> JsonFields::number(const char* name, double low, double high) const {
  const Json* value = find(name);
  if (!value) return std::nullopt;
  const double number = value->is_number() ? value->get<double>() : NAN;
  if (!(number >= low && number <= high))
    fail(name, "is " + json_text(*value) + ", wanted a number from " + number_text(low) + " to " + number_text(high));
  return number;
}

std::optional<bool> JsonFields::flag(const char* name) const {
  const Json* value = find(name);
  if (!value) return std::nullopt;
  if (!value->is_boolean()) fail(name, "is " + json_text(*value) + ", wanted true or false");
  return value->get<bool>();
}

std::optional<std::string> JsonFields::text(const char* name) const {
  const Json* value = find(name);
  if (!value) return std::nullopt;
  if (!value->is_string()) fail(name, "is " + json_text(*value) + ", wanted a string");
  return value->get<std::string>();
}

std::optional<JsonFields> JsonFields::object(const char* name) const {
  const Json* value = find(name);
  if (!value) return std::nullopt;
  if (!value->is_object()) fail(name, "is " + json_text(*value) + ", wanted an object");
  return JsonFields(*value, file_, path_ + name + ".");
}

const Json* JsonFields::array(const char* name) const {
  const Json* value = find(name);
  if (value && !value->is_array()) fail(name, "is " + json_text(*value) + ", wanted a list");
  return value;
}

}  // namespace weft::files
