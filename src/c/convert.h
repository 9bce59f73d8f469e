// From the structs of weft/c.h to those of the C++ API, driven by the descriptions, and from exceptions to codes.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <string_view>

#include "core/descriptions.h"
#include "weft/c.h"
#include "weft/weft.h"

struct weft_kv_recipe {
  weft::KvRecipe recipe;
};

namespace weft::c {

// The C struct of an argument struct.
template <class Args>
struct StructOf;
#define WEFT_C_STRUCT(name, Args)    \
  template <>                        \
  struct StructOf<Args> {            \
    using Type = weft_##name##_args; \
  };
WEFT_FOR_EACH_OP(WEFT_C_STRUCT)
#undef WEFT_C_STRUCT

// Throws an Error "<op>: <argument> <what>".
[[noreturn]] void refuse(const char* op, const Path& argument, const std::string& what);

weft_code report_ok(weft_status* status) noexcept;
weft_code report(weft_status* status, weft_code code, const char* op, const char* argument, const char* message) noexcept;
weft_code report(weft_status* status, const Status& fault) noexcept;

// Runs `body`; whatever it throws becomes a code and, if wanted, a status.
template <class Body>
weft_code guarded(const char* op, weft_status* status, Body&& body) noexcept {
  try {
    body();
    return report_ok(status);
  } catch (const Error& error) {
    return report(status, error.status());
  } catch (const std::bad_alloc&) {
    return report(status, WEFT_OUT_OF_MEMORY, op, "", "the host is out of memory");
  } catch (const std::exception& error) {
    return report(status, WEFT_INTERNAL_ERROR, op, "", error.what());
  } catch (...) {
    return report(status, WEFT_INTERNAL_ERROR, op, "", "an exception of unknown type");
  }
}

// Checks the struct_size of `argument` against what the library knows; `align` is that of the struct.
void check_struct_size(const char* op, const char* argument, size_t got, size_t known, size_t align);

// A full copy of a struct that may come from an older header: its missing tail is zeros.
template <class T>
T full_copy(const char* op, const char* argument, const T* from) {
  if (!from) refuse(op, argument, "is null");
  size_t size = 0;
  std::memcpy(&size, from, sizeof size);
  check_struct_size(op, argument, size, sizeof(T), alignof(T));
  T copy{};
  std::memcpy(&copy, from, size);
  return copy;
}

// Copies a text into a fixed array, cut to fit, terminated.
template <size_t n>
void copy_text(char (&to)[n], std::string_view text) noexcept {
  const size_t length = std::min(text.size(), n - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

inline void copy_choice(weft_choice& to, const Choice& choice) noexcept {
  copy_text(to.kernel, choice.kernel);
  copy_text(to.plan, choice.plan);
  to.speed = static_cast<int32_t>(choice.speed);
}

int32_t dtype_value(DType dtype);  // WEFT_F32, ...
Stream to_stream(const char* op, const weft_stream* stream);
Tensor to_tensor(const char* op, const Path& member, const weft_tensor& tensor);
bool to_flag(const char* op, const Path& member, int32_t value);
const KvRecipe& to_recipe(const char* op, const Path& member, const weft_kv_recipe* recipe);

template <class E>
E to_enum(const char* op, const Path& member, int32_t value) {
  constexpr auto& kValues = EnumValues<E>::kTable.values;
  if (value < 0 || static_cast<size_t>(value) >= kValues.size())
    refuse(op, member, "is " + std::to_string(value) + ", wanted 0.." + std::to_string(kValues.size() - 1));
  return kValues[static_cast<size_t>(value)].value;
}

// Fills the argument struct `to`, or a struct nested in one, from the C struct of the same meaning.
template <class C, class S, class... Use>
void fill(const char* op, const Path& at, const C& c, S& to, Use... use);

// The visitor that fills an argument struct from its C struct. Names in its sentences are those of the C struct.
template <class C>
struct FromC {
  const char* op;
  const C& c;
  Path at{};

  template <class F>
  void tensor(const char* name, Tensor& to, const InC<F>& member, const TensorRule&) {
    to = to_tensor(op, at.in(name), member.at(c));
  }

  template <class T, class F>
  void scalar(const char* name, T& to, const InC<F>& member, const ScalarRule&) {
    if constexpr (std::is_same_v<T, bool>)
      to = to_flag(op, at.in(name), member.at(c));
    else if constexpr (std::is_enum_v<T>)
      to = to_enum<T>(op, at.in(name), member.at(c));
    else
      to = member.at(c);
  }
  template <class T, class Has, class F>
  void scalar(const char*, T& to, const OptionInC<Has, F>& member, const ScalarRule&) {
    if (to_flag(op, at.in(member.has_name), member.has(c))) to = member.at(c);
  }
  template <class F>
  void scalar(const char*, bool& to, const NegatedInC<F>& member, const ScalarRule&) {
    to = !to_flag(op, at.in(member.name), member.at(c));
  }

  template <class S, class F, class... Use>
  void group(const char* name, S& to, const InC<F>& member, Use... use) {
    const auto& inner = member.at(c);
    fill(op, at.in(name), inner, to, use...);
  }

  template <class F>
  void rule(const F&) {}

  // A C struct has a recipe where the C++ struct has the formats themselves.
  template <class S, class... Use>
  void format(const char*, S&, const NotInC&, Use...) {}
  template <class F>
  void recipe(const InC<F>& member, KvFormat* k, KvFormat* v) {
    const KvRecipe& from = to_recipe(op, at.in("recipe"), member.at(c));
    if (k) *k = from.k;
    if (v) *v = from.v;
  }
  template <class F, class G>
  void recipe(const InC<F>& member, const InC<G>& side, KvFormat* format) {
    const KvRecipe& from = to_recipe(op, at.in("recipe"), member.at(c));
    *format = to_enum<RecipeSide>(op, at.in("side"), side.at(c)) == RecipeSide::k ? from.k : from.v;
  }
};

template <class C, class S, class... Use>
void fill(const char* op, const Path& at, const C& c, S& to, Use... use) {
  if constexpr (requires { c.reserved; })
    if (c.reserved != 0) refuse(op, at.in("reserved"), "is " + std::to_string(c.reserved) + ", wanted 0");
  describe(to, FromC<C>{op, c, at}, use...);
}

// The arguments of an op from a full copy of their C struct.
template <class Args>
Args to_cpp(const char* op, const typename StructOf<Args>::Type& c) {
  Args args;
  fill(op, {}, c, args);
  return args;
}

}  // namespace weft::c
