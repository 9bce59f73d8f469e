// The schema of the C interface as JSON: what weft_schema() returns and `weft ops --schema` prints.
#include <string>
#include <string_view>
#include <vector>

#include "weft/c.h"
#include "weft/schema.h"
#include "weft/version.h"

namespace weft::c {
namespace {

// The texts of the schema are our own: names, shapes and words without control characters.
std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (char each : text) {
    if (each == '"' || each == '\\') out += '\\';
    out += each;
  }
  return out + '"';
}

// The entries of a list or an object, separated by commas.
class Entries {
 public:
  explicit Entries(const char* brackets) : close_(brackets[1]), text_(1, brackets[0]) {}

  Entries& value(std::string_view json) {
    if (text_.size() > 1) text_ += ",";
    text_ += json;
    return *this;
  }
  Entries& raw(const char* key, std::string_view json) { return value(quoted(key) + ":" + std::string(json)); }
  Entries& text(const char* key, std::string_view words) { return raw(key, quoted(words)); }
  Entries& number(const char* key, size_t count) { return raw(key, std::to_string(count)); }
  Entries& filled(const char* key, const std::string& words) { return words.empty() ? *this : text(key, words); }
  Entries& filled(const char* key, const std::vector<std::string>& all);
  std::string done() const { return text_ + close_; }

 private:
  char close_;
  std::string text_;
};

template <class T, class F>
std::string list(const std::vector<T>& all, F&& json) {
  Entries out("[]");
  for (const T& each : all) out.value(json(each));
  return out.done();
}

Entries& Entries::filled(const char* key, const std::vector<std::string>& all) {
  return all.empty() ? *this : raw(key, list(all, quoted));
}

std::string member_json(const SchemaMember& member) {
  Entries out("{}");
  out.text("path", member.path).text("kind", member.kind).text("type", member.c_type);
  out.number("offset", member.offset).number("size", member.size);
  out.filled("of", member.of).filled("role", member.role);
  if (!member.role.empty()) out.raw("optional", member.optional ? "true" : "false");
  out.filled("dtypes", member.dtypes).filled("dtype_of", member.dtype_of).filled("shapes", member.shapes);
  out.filled("may_be", member.may_be).filled("default", member.fallback).filled("legal", member.legal);
  return out.done();
}

void add_struct(Entries& out, const SchemaStruct& made) {
  out.text("struct", made.name).number("size", made.size).raw("members", list(made.members, member_json));
}

std::string struct_json(const SchemaStruct& made) {
  Entries out("{}");
  add_struct(out, made);
  return out.done();
}

std::string op_json(const SchemaOp& op) {
  Entries out("{}");
  out.text("op", op.op).text("shapes", legal_shapes(op.op));
  const std::string name = "weft_" + op.op;
  out.raw("functions", list(std::vector<std::string>{name + "_scratch_bytes", name, name + "_choose"}, quoted));
  add_struct(out, op.args);
  return out.done();
}

std::string value_json(const SchemaEnum::Value& value) {
  Entries out("{}");
  out.text("name", value.name).text("constant", value.constant).raw("value", std::to_string(value.value));
  return out.done();
}

std::string enum_json(const SchemaEnum& made) {
  Entries out("{}");
  out.text("enum", made.name).raw("values", list(made.values, value_json));
  return out.done();
}

std::string schema_json() {
  const Schema schema = c_schema();
  Entries out("{}");
  out.number("schema", 1).text("version", version()).number("c_abi", WEFT_C_ABI).number("pointer_bytes", sizeof(void*));
  out.raw("ops", list(schema.ops, op_json));
  out.raw("structs", list(schema.structs, struct_json)).raw("enums", list(schema.enums, enum_json));
  return out.done();
}

}  // namespace
}  // namespace weft::c

extern "C" const char* weft_schema(void) {
  try {
    static const std::string text = weft::c::schema_json();
    return text.c_str();
  } catch (...) {
    return nullptr;
  }
}
