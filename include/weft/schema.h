// What the library computes, as data: the legal shapes of every op, what each backend offers, and the schema of the C interface.
//
// `weft ops` prints it; bindings for other languages are generated from it.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/device.h"

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {

// The shapes of a legal call in words: "W 2 to 8, any C". Throws std::logic_error for an op that does not exist.
std::string legal_shapes(std::string_view op);

// What a backend offers of an op; absent where the backend does not offer the op or is not in this build.
struct OpSupport {
  std::string dtypes;  // "f32 f16 bf16"
  std::string shapes;  // which of the legal shapes: "all", or what is left out
};
std::optional<OpSupport> op_support(Backend backend, std::string_view op);

// A member of a C struct.
struct SchemaMember {
  std::string path;    // "cache.k.codes", from the struct that it is listed in
  std::string kind;    // tensor, f32, i32, i64, u64, flag, enum, struct, recipe, text, pointer, size or reserved
  std::string c_type;  // "weft_tensor", "int64_t[5]"
  size_t offset = 0, size = 0;
  std::string role{};                 // "in", "out" or "unused"; empty where a member has none
  bool optional = false;              // it may be absent, or has a default
  std::vector<std::string> dtypes{};  // of a tensor
  std::string dtype_of{};             // the tensor whose dtype it must have
  std::vector<std::string> shapes{};  // "[T, C]"; two where other members decide
  std::vector<std::string> may_be{};  // tensors whose very view an output may be
  std::string fallback{};             // what stands for a number or enum that is left out, in words
  std::string legal{};                // legal values in words
  std::string of{};                   // the name of its enum or struct, or, of a has_ flag, of the number it announces
};

struct SchemaStruct {
  std::string name;  // "weft_kv_cache"
  size_t size = 0;
  std::vector<SchemaMember> members;
};

struct SchemaOp {
  std::string op;
  SchemaStruct args;  // all members, those of nested structs included, in the order of their offsets
};

struct SchemaEnum {
  struct Value {
    std::string name, constant;  // "silu", "WEFT_ACTIVATION_SILU"
    int value = 0;
  };
  std::string name;  // "Activation"
  std::vector<Value> values;
};

// Every op, struct and enum of weft/c.h, with offsets and meanings. It is taken from the descriptions that calls are checked by.
struct Schema {
  std::vector<SchemaOp> ops;
  std::vector<SchemaStruct> structs;  // those that are no arguments of an op; members of nested ones are not repeated
  std::vector<SchemaEnum> enums;
};

Schema c_schema();

}  // namespace weft
#pragma GCC visibility pop
