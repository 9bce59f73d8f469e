// From the structs of weft/c.h to those of the C++ API, and from exceptions to codes.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <string_view>

#include "weft/c.h"
#include "weft/weft.h"

struct weft_kv_recipe {
  weft::KvRecipe recipe;
};

namespace weft::c {

// Throws an Error "<op>: <prefix><argument> <what>".
[[noreturn]] void refuse(const char* op, const char* prefix, const char* argument, const std::string& what);

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

// Checks a struct_size against what the library knows; `align` is that of the struct.
void check_struct_size(const char* op, const char* prefix, size_t got, size_t known, size_t align);

// A full copy of a struct that may come from an older header: its missing tail is zeros.
template <class T>
T full_copy(const char* op, const char* what, const T* from) {
  if (!from) refuse(op, "", what, "is null");
  size_t size = 0;
  std::memcpy(&size, from, sizeof size);
  const std::string prefix = std::string(what) + ".";
  check_struct_size(op, prefix.c_str(), size, sizeof(T), alignof(T));
  T copy{};
  std::memcpy(&copy, from, size);
  return copy;
}

Stream to_stream(const char* op, const weft_stream* stream);
int32_t dtype_value(DType dtype);  // WEFT_F32, ...
// Copies a text into a fixed array, cut to fit, terminated.
template <size_t n>
void copy_text(char (&to)[n], std::string_view text) noexcept {
  const size_t length = std::min(text.size(), n - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}
Tensor to_tensor(const char* op, const char* prefix, const char* member, const weft_tensor& tensor);

DeltaGatesArgs to_cpp(const weft_delta_gates_args& args);
ShortConvArgs to_cpp(const weft_short_conv_args& args);
GatedRmsNormArgs to_cpp(const weft_gated_rms_norm_args& args);
GatedDeltaRulePrefillArgs to_cpp(const weft_gated_delta_rule_prefill_args& args);
GatedDeltaRuleDecodeArgs to_cpp(const weft_gated_delta_rule_decode_args& args);
GatedDeltaRuleReplayArgs to_cpp(const weft_gated_delta_rule_replay_args& args);
KvEncodeArgs to_cpp(const weft_kv_encode_args& args);
KvDecodeArgs to_cpp(const weft_kv_decode_args& args);
KvRepackArgs to_cpp(const weft_kv_repack_args& args);
AttentionMergeArgs to_cpp(const weft_attention_merge_args& args);
CompressedAttentionArgs to_cpp(const weft_compressed_attention_args& args);

}  // namespace weft::c
