// The vocabulary in which an argument struct is described once, for every reader: checks, tests, the C interface, the schema.
//
// An argument struct S, and every struct nested in it, has one function
//   template <DescribedAs<S> A, class V> void describe(A& a, V&& v)
// in describe_delta.h, describe_kv.h or describe_attention.h. It tells the visitor v every member in turn:
//   v.tensor(name, member, c, TensorRule)     a tensor
//   v.scalar(name, member, c, ScalarRule)     a number, a flag or an enum; std::optional where it may be left out
//   v.group(name, member, c, use...)          a nested struct, described by describe(member, inner visitor, use...)
//   v.format(name, member, c, use...)         a KvFormat
//   v.recipe(c, formats...)                   the C member that the formats of the struct come from
//   v.rule(f)                                 f(Check&): a rule between members, checked in this place
// `c` finds the member in the C struct of the same meaning (weft/c.h). The members of `a` may be read, so that a rule can depend on
// the arguments. A visitor must not allocate where it is used in a call.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <type_traits>

#include "core/limits.h"
#include "weft/device.h"
#include "weft/tensor.h"

namespace weft {

// FNV-1a: sizes are looked up by the hash of their letter, because every call looks up dozens.
constexpr uint64_t letter_key(const char* text) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (; *text; ++text) hash = (hash ^ static_cast<uint8_t>(*text)) * 0x100000001b3ull;
  return hash;
}

// One size of a shape: a letter that means the same number wherever a call's tensors carry it ("T"), a number ("4"), or a size that
// a shape leaves open ("*", ">= max_chunks"). "..." stands for any leading sizes.
struct Letter {
  char text[40] = {};
  uint64_t key = 0;
  int64_t number = -1;  // >= 0: the size itself
  bool open = false;

  template <size_t n>
  constexpr Letter(const char (&name)[n]) {  // NOLINT(google-explicit-constructor): shapes are lists of texts
    static_assert(n <= sizeof text);
    for (size_t i = 0; i < n; ++i) text[i] = name[i];
    key = letter_key(name);
    open = name[0] == '*' || name[0] == '>' || name[0] == '.';
    if (name[0] < '0' || name[0] > '9') return;
    number = 0;
    for (size_t i = 0; i + 1 < n; ++i) number = 10 * number + (name[i] - '0');
  }
};

struct Shape {
  const Letter* letters;
  int rank;
  constexpr bool any_rank() const { return letters[0].text[0] == '.'; }
};

template <Letter... letters>
struct ShapeOf {
  static constexpr Letter kLetters[] = {letters...};
  static constexpr Shape kShape{kLetters, sizeof...(letters)};
};
// shape<"T", "Hv", "K">
template <Letter... letters>
inline constexpr const Shape* shape = &ShapeOf<letters...>::kShape;  // NOLINT(readability-identifier-naming): read as a function

// A set of dtypes.
class DTypes {
 public:
  constexpr DTypes(std::initializer_list<DType> all) {
    for (DType dtype : all) bits_ |= bit(dtype);
  }
  constexpr bool has(DType dtype) const { return (bits_ & bit(dtype)) != 0; }

 private:
  static constexpr uint8_t bit(DType dtype) {
    return static_cast<unsigned>(dtype) < 8 ? static_cast<uint8_t>(1u << static_cast<unsigned>(dtype)) : uint8_t{0};
  }
  uint8_t bits_ = 0;
};
inline constexpr DTypes kFloatTypes = {DType::f32, DType::f16, DType::bf16};
inline constexpr DTypes kF32Type = {DType::f32};
inline constexpr DTypes kI32Type = {DType::i32};

// What a call does with a tensor. An unused one may be anything: no check looks at it.
enum class Role { in, out, unused };

struct TensorRule {
  const Shape* shape = nullptr;
  DTypes dtypes = kFloatTypes;
  Role role = Role::in;
  bool optional = false;             // for these arguments: another member may make it required
  const Shape* other = nullptr;      // a second legal shape,
  bool takes_other = false;          // and whether these arguments call for it
  const Tensor* may_be[2] = {};      // of an output: tensors whose very view it may be. It may share memory with no other
  const Tensor* dtype_of = nullptr;  // the dtype must be that of this tensor
  bool any_strides = false;          // the last dimension, too, may have any stride
  bool special = false;              // validate() checks shape and dtype by rules that no letters express
};

struct ScalarRule {
  const char* legal = "";     // the legal values in words, ">= 1"; empty: all that the type has (floats must be finite)
  const char* fallback = "";  // what stands for a std::optional that is left out: "K^-1/2"
  bool required = false;      // its C member has no default
  double at_least = -std::numeric_limits<double>::infinity();
  double above = -std::numeric_limits<double>::infinity();
};
inline constexpr ScalarRule kAtLeast0{.legal = ">= 0", .at_least = 0};
inline constexpr ScalarRule kAtLeast1{.legal = ">= 1", .at_least = 1};

// The values of an enum. The C value of one is its index here, so that 0 is the default of every C member.
template <class E>
struct EnumValue {
  E value;
  const char* name;
};
template <class E, size_t n>
struct EnumTable {
  const char* c_prefix;  // "WEFT_GATE_"
  std::array<EnumValue<E>, n> values;
};
template <class E, size_t n>
constexpr EnumTable<E, n> enum_table(const char* c_prefix, const EnumValue<E> (&values)[n]) {
  return {c_prefix, std::to_array(values)};
}
template <class E>
struct EnumValues;  // static constexpr auto kTable = enum_table<E>(...)

template <>
struct EnumValues<DType> {
  static constexpr auto kTable = enum_table<DType>("WEFT_", {{DType::f32, "f32"},
                                                             {DType::f16, "f16"},
                                                             {DType::bf16, "bf16"},
                                                             {DType::i32, "i32"},
                                                             {DType::i64, "i64"},
                                                             {DType::u8, "u8"},
                                                             {DType::u32, "u32"}});
};
template <>
struct EnumValues<Place> {
  static constexpr auto kTable =
      enum_table<Place>("WEFT_", {{Place::host, "host"}, {Place::cuda, "cuda"}, {Place::vulkan, "vulkan"}});
};
template <>
struct EnumValues<Backend> {
  static constexpr auto kTable = enum_table<Backend>(
      "WEFT_BACKEND_",
      {{Backend::cpu, "cpu"}, {Backend::reference, "reference"}, {Backend::cuda, "cuda"}, {Backend::vulkan, "vulkan"}});
};
inline const char* place_name(Place place) {
  for (const auto& entry : EnumValues<Place>::kTable.values)
    if (entry.value == place) return entry.name;
  return "?";
}
template <>
struct EnumValues<Isa> {
  static constexpr auto kTable = enum_table<Isa>("WEFT_ISA_", {{Isa::best, "best"},
                                                               {Isa::scalar, "scalar"},
                                                               {Isa::avx2, "avx2"},
                                                               {Isa::avx512, "avx512"},
                                                               {Isa::avx512_vnni, "avx512_vnni"},
                                                               {Isa::neon, "neon"}});
};
template <>
struct EnumValues<Speed> {
  static constexpr auto kTable =
      enum_table<Speed>("WEFT_SPEED_", {{Speed::fast, "fast"}, {Speed::portable, "portable"}, {Speed::slow, "slow"}});
};
template <>
struct EnumValues<Schedule> {
  static constexpr auto kTable =
      enum_table<Schedule>("WEFT_SCHEDULE_", {{Schedule::fastest, "fastest"}, {Schedule::invariant, "invariant"}});
};

// Where a member is in the C struct `c` of the same meaning.
template <class F>
struct InC {
  F at;
};
// A number with a default: has_x and x.
template <class Has, class F>
struct OptionInC {
  const char* has_name;
  Has has;
  F at;
};
// A flag that is true by default: not_x.
template <class F>
struct NegatedInC {
  const char* name;
  F at;
};
// No C struct has it.
struct NotInC {};
template <class F>
InC(F) -> InC<F>;
template <class Has, class F>
OptionInC(const char*, Has, F) -> OptionInC<Has, F>;
template <class F>
NegatedInC(const char*, F) -> NegatedInC<F>;

#define WEFT_IN_C(member) \
  [](auto& c) -> auto& { return c.member; }
// The first three arguments of a visitor's functions, for a member of `a`.
#define WEFT_MEMBER(member) \
#member, a.member, ::weft::InC { WEFT_IN_C(member) }
#define WEFT_OPTION(member) \
#member, a.member, ::weft::OptionInC { "has_" #member, WEFT_IN_C(has_##member), WEFT_IN_C(member) }
#define WEFT_NEGATED(member) \
#member, a.member, ::weft::NegatedInC { "not_" #member, WEFT_IN_C(not_##member) }
#define WEFT_CPP_ONLY(member) \
#member, a.member, ::weft::NotInC {}

template <class A, class S>
concept DescribedAs = std::is_same_v<std::remove_const_t<A>, S>;

// The name of a member with the structs that it is in: "cache.k.codes". Text is made only when somebody asks for it.
class Path {
 public:
  constexpr Path() = default;
  constexpr Path(const char* name) : names_{name}, depth_(1) {}  // NOLINT(google-explicit-constructor): most have one name
  constexpr Path in(const char* name) const {
    Path path = *this;
    if (depth_ < kMaxDepth) path.names_[path.depth_++] = name;
    return path;
  }
  std::string text() const {
    std::string all;
    for (int i = 0; i < depth_; ++i) all += (i > 0 ? "." : "") + std::string(names_[i]);
    return all;
  }

 private:
  static constexpr int kMaxDepth = 4;
  const char* names_[kMaxDepth];
  int depth_;
};

template <DescribedAs<Sequences> A, class V>
void describe(A& a, V&& v) {
  static_assert(kMaxSequences == 1048576, "the words below");
  v.tensor(WEFT_MEMBER(cu_seqlens),
           {.shape = shape<"count + 1">, .dtypes = {DType::i32, DType::i64}, .optional = true, .special = true});
  v.scalar(WEFT_MEMBER(count), {.legal = "0 to 1048576", .required = true});
  v.scalar(WEFT_MEMBER(max_tokens), {.legal = ">= 0; >= 1 with cu_seqlens"});
}

namespace detail {

// Calls f(path, tensor, rule) for every tensor that the op uses.
template <class F>
struct EachTensor {
  F& f;
  Path at{};

  template <class T, class C>
  void tensor(const char* name, T& tensor, const C&, const TensorRule& rule) {
    if (rule.role != Role::unused) f(at.in(name), tensor, rule);
  }
  template <class T, class C>
  void scalar(const char*, T&, const C&, const ScalarRule&) {}
  template <class S, class C, class... Use>
  void group(const char* name, S& member, const C&, Use... use) {
    describe(member, EachTensor{f, at.in(name)}, use...);
  }
  template <class S, class C, class... Use>
  void format(const char* name, S& member, const C& c, Use... use) {
    group(name, member, c, use...);
  }
  template <class... All>
  void recipe(const All&...) {}
  template <class Rule>
  void rule(const Rule&) {}
};

// Is there a tensor that the op uses and f(tensor) holds of?
template <class F>
struct AnyTensor {
  F& f;
  bool& any;

  template <class C>
  void tensor(const char*, const Tensor& tensor, const C&, const TensorRule& rule) {
    any |= rule.role != Role::unused && f(tensor);
  }
  template <class T, class C>
  void scalar(const char*, T&, const C&, const ScalarRule&) {}
  template <class S, class C, class... Use>
  void group(const char*, S& member, const C&, Use... use) {
    describe(member, *this, use...);
  }
  template <class S, class C, class... Use>
  void format(const char*, S& member, const C&, Use... use) {
    describe(member, *this, use...);
  }
  template <class... All>
  void recipe(const All&...) {}
  template <class Rule>
  void rule(const Rule&) {}
};

// Calls f(path, member) for every member that is no tensor.
template <class F>
struct EachScalar {
  F& f;
  Path at{};

  template <class T, class C>
  void tensor(const char*, T&, const C&, const TensorRule&) {}
  template <class T, class C>
  void scalar(const char* name, T& member, const C&, const ScalarRule&) {
    f(at.in(name), member);
  }
  template <class S, class C, class... Use>
  void group(const char* name, S& member, const C&, Use... use) {
    describe(member, EachScalar{f, at.in(name)}, use...);
  }
  template <class S, class C, class... Use>
  void format(const char* name, S& member, const C& c, Use... use) {
    group(name, member, c, use...);
  }
  template <class... All>
  void recipe(const All&...) {}
  template <class Rule>
  void rule(const Rule&) {}
};

}  // namespace detail

// f(path, tensor, rule) for every tensor that a call uses, absent ones included, in the order of the description.
template <class Args, class F>
void for_each_tensor(Args& args, F&& f) {
  describe(args, detail::EachTensor<F>{f});
}

// Does f(tensor) hold of any tensor that a call uses? Makes no paths, so it is cheap enough for every call.
template <class Args, class F>
bool any_tensor(const Args& args, F&& f) {
  bool any = false;
  describe(args, detail::AnyTensor<F>{f, any});
  return any;
}

// f(path, member) for every member that is no tensor: bool, int64_t, float, enums, std::optional of these, and what a KvFormat
// holds.
template <class Args, class F>
void for_each_scalar(Args& args, F&& f) {
  describe(args, detail::EachScalar<F>{f});
}

}  // namespace weft
