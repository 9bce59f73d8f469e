// The schema of the C interface, from the descriptions of the argument structs: see weft/schema.h.
#include "weft/schema.h"

#include <algorithm>
#include <cctype>
#include <map>

#include "c/convert.h"

namespace weft::c {
namespace {

template <class C>
constexpr const char* kStructName = nullptr;
#define WEFT_NAMED(name) \
  template <>            \
  constexpr const char* kStructName<name> = #name;
WEFT_NAMED(weft_sequences)
WEFT_NAMED(weft_delta_gate_inputs)
WEFT_NAMED(weft_delta_states)
WEFT_NAMED(weft_delta_record)
WEFT_NAMED(weft_kv_side)
WEFT_NAMED(weft_kv_cache)
WEFT_NAMED(weft_attention_queries)
WEFT_NAMED(weft_attention_mask)
WEFT_NAMED(weft_partials)
#undef WEFT_NAMED

template <class E>
constexpr const char* kEnumName = nullptr;
#define WEFT_NAMED(name) \
  template <>            \
  constexpr const char* kEnumName<name> = #name;
WEFT_NAMED(DType)
WEFT_NAMED(Place)
WEFT_NAMED(Backend)
WEFT_NAMED(Isa)
WEFT_NAMED(Speed)
WEFT_NAMED(Schedule)
WEFT_NAMED(Activation)
WEFT_NAMED(Gate)
WEFT_NAMED(HeadMap)
WEFT_NAMED(StateLayout)
WEFT_NAMED(KvLayout)
WEFT_NAMED(TileOrder)
WEFT_NAMED(CacheKind)
WEFT_NAMED(KvDomain)
WEFT_NAMED(RecipeSide)
WEFT_NAMED(PartialLayout)
WEFT_NAMED(Precision)
#undef WEFT_NAMED

const char* role_name(Role role) { return role == Role::in ? "in" : role == Role::out ? "out" : "unused"; }

std::string shape_of(const Shape& shape) {
  std::string text = "[";
  for (int i = 0; i < shape.rank; ++i) text += (i ? ", " : "") + std::string(shape.letters[i].text);
  return text + "]";
}

template <class T>
std::string number_text(T value) {
  std::string text = std::to_string(value);
  if constexpr (std::is_same_v<T, float>) {
    char buffer[32];
    std::snprintf(buffer, sizeof buffer, "%g", static_cast<double>(value));
    text = buffer;
  }
  return text;
}

void sort_by_offset(std::vector<SchemaMember>& members) {  // a struct stays before its first member
  std::stable_sort(members.begin(), members.end(),
                   [](const SchemaMember& a, const SchemaMember& b) { return a.offset < b.offset; });
}

// What the walk over one op gathers.
struct Gathered {
  std::map<std::string, SchemaStruct>* structs;
  std::vector<SchemaMember> members{};
  std::map<const Tensor*, std::string> names{};                        // of the tensors of the arguments
  std::vector<std::pair<size_t, const Tensor*>> may_be{}, dtype_of{};  // of the member with that index
};

// The visitor: describes default arguments beside a C struct of zeros, whose addresses give the offsets.
template <class C>
struct ToSchema {
  Gathered& out;
  const char* base;  // the C struct of the op
  const C& c;
  Path at{};

  template <class M>
  SchemaMember& add(const char* name, const char* kind, const char* c_type, const M& member) const {
    const auto offset = static_cast<size_t>(reinterpret_cast<const char*>(&member) - base);
    // A member may be a pointer; the size is then meant to be the pointer's. NOLINTNEXTLINE(bugprone-sizeof-expression)
    out.members.push_back({.path = at.in(name).text(), .kind = kind, .c_type = c_type, .offset = offset, .size = sizeof(M)});
    return out.members.back();
  }

  template <class F>
  void tensor(const char* name, const Tensor& tensor, const InC<F>& member, const TensorRule& rule) {
    static_assert(std::is_same_v<decltype(member.at(c)), const weft_tensor&>);
    SchemaMember& made = add(name, "tensor", "weft_tensor", member.at(c));
    made.role = role_name(rule.role);
    made.optional = rule.optional;
    for (const auto& [dtype, dtype_name] : EnumValues<DType>::kTable.values)
      if (rule.dtypes.has(dtype)) made.dtypes.emplace_back(dtype_name);
    made.shapes.push_back(shape_of(*rule.shape));
    if (rule.other) made.shapes.push_back(shape_of(*rule.other));
    const size_t index = out.members.size() - 1;
    out.names[&tensor] = made.path;
    for (const Tensor* other : rule.may_be)
      if (other) out.may_be.emplace_back(index, other);
    if (rule.dtype_of) out.dtype_of.emplace_back(index, rule.dtype_of);
  }

  template <class T, class F>
  void scalar(const char* name, const T& value, const InC<F>& member, const ScalarRule& rule) {
    const auto& there = member.at(c);
    SchemaMember* made = nullptr;
    if constexpr (std::is_same_v<T, bool>) {
      static_assert(std::is_same_v<decltype(there), const int32_t&>);
      made = &add(name, "flag", "int32_t", there);
      made->fallback = value ? "1" : "0";
    } else if constexpr (std::is_enum_v<T>) {
      static_assert(std::is_same_v<decltype(there), const int32_t&>);
      made = &add(name, "enum", "int32_t", there);
      made->of = kEnumName<T>;
      for (const auto& [each, each_name] : EnumValues<T>::kTable.values)
        if (each == value) made->fallback = each_name;
    } else {
      static_assert(std::is_same_v<T, int64_t> && std::is_same_v<decltype(there), const int64_t&>);
      made = &add(name, "i64", "int64_t", there);
      if (!rule.required) made->fallback = number_text(value);
    }
    made->role = "in";
    made->optional = !rule.required;
    made->legal = rule.legal;
  }
  template <class T, class Has, class F>
  void scalar(const char* name, const T& value, const OptionInC<Has, F>& member, const ScalarRule& rule) {
    static_assert(std::is_same_v<decltype(member.has(c)), const int32_t&>);
    add(member.has_name, "flag", "int32_t", member.has(c)).of = name;
    out.members.back().fallback = "0";
    out.members.back().role = "in";
    out.members.back().optional = true;
    const auto& there = member.at(c);
    constexpr bool kFloat = std::is_same_v<decltype(there), const float&>;
    static_assert(kFloat || std::is_same_v<decltype(there), const int64_t&>);
    SchemaMember& made = add(name, kFloat ? "f32" : "i64", kFloat ? "float" : "int64_t", there);
    made.role = "in";
    made.optional = true;
    made.legal = rule.legal;
    if constexpr (std::is_same_v<T, float>)
      made.fallback = number_text(value);
    else
      made.fallback = rule.fallback;
  }
  template <class F>
  void scalar(const char*, const bool& value, const NegatedInC<F>& member, const ScalarRule&) {
    static_assert(std::is_same_v<decltype(member.at(c)), const int32_t&>);
    SchemaMember& made = add(member.name, "flag", "int32_t", member.at(c));
    made.role = "in";
    made.optional = true;
    made.fallback = value ? "0" : "1";
  }

  template <class S, class F, class... Use>
  void group(const char* name, const S& value, const InC<F>& member, Use... use) {
    using Inner = std::remove_cvref_t<decltype(member.at(c))>;
    const Inner& inner = member.at(c);
    add(name, "struct", kStructName<Inner>, inner).of = kStructName<Inner>;
    const size_t first = out.members.size();
    gather(out, base, inner, at.in(name), value, use...);
    list_struct(kStructName<Inner>, sizeof(Inner), first);
  }
  template <class S, class... Use>
  void format(const char*, const S&, const NotInC&, Use...) {}
  template <class F>
  void rule(const F&) {}
  template <class F>
  void recipe(const InC<F>& member, const KvFormat*, const KvFormat*) {
    static_assert(std::is_same_v<decltype(member.at(c)), const weft_kv_recipe* const&>);
    add("recipe", "recipe", "const weft_kv_recipe*", member.at(c)).role = "in";
  }
  template <class F, class G>
  void recipe(const InC<F>& member, const InC<G>& side, const KvFormat*) {
    recipe(member, nullptr, nullptr);
    scalar("side", RecipeSide::k, side, {});
  }

  // A nested struct is listed by itself when it is first met, with names and offsets from its own beginning. What a member is used
  // for depends on the op, so it is left out.
  void list_struct(const char* name, size_t size, size_t first) const {
    if (out.structs->contains(name)) return;
    const SchemaMember& whole = out.members[first - 1];
    SchemaStruct listed{name, size, {}};
    for (size_t i = first; i < out.members.size(); ++i) {
      SchemaMember member = out.members[i];
      member.path = member.path.substr(whole.path.size() + 1);
      if (member.path.find('.') != std::string::npos) continue;
      member.offset -= whole.offset;
      member.role.clear();
      member.optional = false;
      listed.members.push_back(member);
    }
    sort_by_offset(listed.members);
    (*out.structs)[name] = std::move(listed);
  }
};

template <class C, class S, class... Use>
void gather(Gathered& out, const char* base, const C& c, const Path& at, const S& value, Use... use) {
  ToSchema<C> visitor{out, base, c, at};
  if constexpr (requires { c.struct_size; }) visitor.add("struct_size", "size", "size_t", c.struct_size);
  describe(value, visitor, use...);
  if constexpr (requires { c.reserved; }) visitor.add("reserved", "reserved", "int32_t", c.reserved);
}

template <class Args>
SchemaOp describe_op(const char* op, const char* name, std::map<std::string, SchemaStruct>& structs) {
  using C = typename StructOf<Args>::Type;
  const Args args{};
  const C c{};
  Gathered out{.structs = &structs};
  gather(out, reinterpret_cast<const char*>(&c), c, {}, args);
  for (const auto& [index, other] : out.may_be) out.members[index].may_be.push_back(out.names.at(other));
  for (const auto& [index, other] : out.dtype_of) out.members[index].dtype_of = out.names.at(other);
  sort_by_offset(out.members);
  return {op, {name, sizeof(C), std::move(out.members)}};
}

template <class E>
SchemaEnum enum_of() {
  SchemaEnum made{kEnumName<E>, {}};
  int next = 0;
  for (const auto& [value, name] : EnumValues<E>::kTable.values) {
    std::string constant = std::string(EnumValues<E>::kTable.c_prefix) + name;
    std::transform(constant.begin(), constant.end(), constant.begin(), [](unsigned char x) { return std::toupper(x); });
    made.values.push_back({name, constant, next++});
  }
  return made;
}

// The structs that no description covers, because C++ has other types for what they hold.
#define WEFT_FIELD(kind, c_type, member) \
  { #member, kind, c_type, offsetof(Struct, member), sizeof(Struct::member) }
SchemaStruct tensor_struct() {
  using Struct = weft_tensor;
  return {"weft_tensor",
          sizeof(Struct),
          {WEFT_FIELD("pointer", "void*", data), WEFT_FIELD("i64", "int64_t[5]", sizes), WEFT_FIELD("i64", "int64_t[5]", strides),
           WEFT_FIELD("i32", "int32_t", rank), WEFT_FIELD("enum", "int32_t", dtype), WEFT_FIELD("enum", "int32_t", place),
           WEFT_FIELD("i32", "int32_t", device)}};
}
SchemaStruct stream_struct() {
  using Struct = weft_stream;
  return {"weft_stream",
          sizeof(Struct),
          {WEFT_FIELD("size", "size_t", struct_size), WEFT_FIELD("enum", "int32_t", backend), WEFT_FIELD("i32", "int32_t", device),
           WEFT_FIELD("pointer", "void*", queue), WEFT_FIELD("i32", "int32_t", threads), WEFT_FIELD("enum", "int32_t", isa)}};
}
SchemaStruct status_struct() {
  using Struct = weft_status;
  return {"weft_status",
          sizeof(Struct),
          {WEFT_FIELD("size", "size_t", struct_size), WEFT_FIELD("enum", "weft_code", code), WEFT_FIELD("text", "char[60]", op),
           WEFT_FIELD("text", "char[64]", argument), WEFT_FIELD("text", "char[512]", message)}};
}
SchemaStruct choice_struct() {
  using Struct = weft_choice;
  return {
      "weft_choice",
      sizeof(Struct),
      {WEFT_FIELD("size", "size_t", struct_size), WEFT_FIELD("text", "char[128]", kernel), WEFT_FIELD("text", "char[512]", plan),
       WEFT_FIELD("enum", "int32_t", speed), WEFT_FIELD("reserved", "int32_t", reserved)}};
}
SchemaStruct recipe_args_struct() {
  using Struct = weft_kv_recipe_args;
  return {"weft_kv_recipe_args",
          sizeof(Struct),
          {WEFT_FIELD("size", "size_t", struct_size), WEFT_FIELD("pointer", "const char*", name),
           WEFT_FIELD("i64", "int64_t", k_head_dim), WEFT_FIELD("i64", "int64_t", v_head_dim), WEFT_FIELD("u64", "uint64_t", seed),
           WEFT_FIELD("tensor", "weft_tensor", k_mean), WEFT_FIELD("tensor", "weft_tensor", v_mean)}};
}
SchemaStruct side_info_struct() {
  using Struct = weft_kv_side_info;
  return {"weft_kv_side_info",
          sizeof(Struct),
          {WEFT_FIELD("i64", "int64_t", head_dim), WEFT_FIELD("i64", "int64_t", code_bytes), WEFT_FIELD("i64", "int64_t", gains),
           WEFT_FIELD("i64", "int64_t", gain_bytes), WEFT_FIELD("i64", "int64_t", tile_bytes),
           WEFT_FIELD("enum", "int32_t", codes_dtype), WEFT_FIELD("enum", "int32_t", gains_dtype),
           WEFT_FIELD("i32", "int32_t", bits), WEFT_FIELD("flag", "int32_t", passthrough)}};
}
SchemaStruct recipe_info_struct() {
  using Struct = weft_kv_recipe_info;
  return {
      "weft_kv_recipe_info",
      sizeof(Struct),
      {WEFT_FIELD("size", "size_t", struct_size), WEFT_FIELD("text", "char[64]", id), WEFT_FIELD("struct", "weft_kv_side_info", k),
       WEFT_FIELD("struct", "weft_kv_side_info", v), WEFT_FIELD("i64", "int64_t", bytes_per_token)}};
}
#undef WEFT_FIELD

// What the kinds of those members leave open.
void complete(SchemaStruct& made) {
  const std::pair<const char*, const char*> enums[] = {{"dtype", "DType"}, {"codes_dtype", "DType"}, {"gains_dtype", "DType"},
                                                       {"place", "Place"}, {"backend", "Backend"},   {"isa", "Isa"},
                                                       {"code", "Code"},   {"speed", "Speed"}};
  for (SchemaMember& member : made.members) {
    if (member.kind == "struct") member.of = member.c_type;
    for (const auto& [name, of] : enums)
      if (member.kind == "enum" && member.path == name) member.of = of;
  }
}

SchemaEnum code_enum() {
  SchemaEnum made{"Code", {}};
  const std::pair<const char*, const char*> values[] = {{"ok", "WEFT_OK"},
                                                        {"invalid_argument", "WEFT_INVALID_ARGUMENT"},
                                                        {"unsupported", "WEFT_UNSUPPORTED"},
                                                        {"scratch_too_small", "WEFT_SCRATCH_TOO_SMALL"},
                                                        {"device_error", "WEFT_DEVICE_ERROR"},
                                                        {"out_of_memory", "WEFT_OUT_OF_MEMORY"},
                                                        {"internal_error", "WEFT_INTERNAL_ERROR"}};
  for (const auto& [name, constant] : values) made.values.push_back({name, constant, static_cast<int>(made.values.size())});
  return made;
}

}  // namespace

Schema make_schema() {
  Schema schema;
  std::map<std::string, SchemaStruct> nested;
#define WEFT_SCHEMA_OP(name, Args) schema.ops.push_back(describe_op<Args>(#name, "weft_" #name "_args", nested));
  WEFT_FOR_EACH_OP(WEFT_SCHEMA_OP)
#undef WEFT_SCHEMA_OP
  schema.structs = {tensor_struct(),      stream_struct(),    status_struct(),     choice_struct(),
                    recipe_args_struct(), side_info_struct(), recipe_info_struct()};
  for (SchemaStruct& made : schema.structs) complete(made);
  for (auto& [name, made] : nested) schema.structs.push_back(std::move(made));
  schema.enums = {code_enum(),          enum_of<DType>(),       enum_of<Place>(),      enum_of<Backend>(),
                  enum_of<Isa>(),       enum_of<Schedule>(),    enum_of<Activation>(), enum_of<Gate>(),
                  enum_of<HeadMap>(),   enum_of<StateLayout>(), enum_of<KvLayout>(),   enum_of<TileOrder>(),
                  enum_of<CacheKind>(), enum_of<KvDomain>(),    enum_of<RecipeSide>(), enum_of<PartialLayout>(),
                  enum_of<Precision>(), enum_of<Speed>()};
  return schema;
}

}  // namespace weft::c

namespace weft {

Schema c_schema() { return c::make_schema(); }

}  // namespace weft
