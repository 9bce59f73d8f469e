// What the handles of weft/c_model.h are, and helpers that its functions share.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "c/convert.h"
#include "weft/c_model.h"
#include "weft/model.h"

struct weft_model {
  weft::Model model;
};
struct weft_state {
  weft::HybridState state;
  std::string kv;  // as it was asked for
};
struct weft_state_lock {
  weft::StateLock lock;
};

namespace weft::c {

template <class T>
T& not_null(const char* op, const char* argument, T* pointer) {
  if (!pointer) refuse(op, argument, "is null");
  return *pointer;
}

// A list that a caller gives: null only where it is empty.
template <class T>
std::span<const T> list(const char* op, const char* argument, const T* data, size_t count) {
  if (!data && count > 0) refuse(op, argument, "is null, and " + std::to_string(count) + " entries were announced");
  return {data, count};
}

// The beginning of a list, as far as the buffer goes, and its full length.
template <class T>
void give(const char* op, std::span<const T> from, T* to, size_t capacity, size_t* count) {
  if (!to && capacity > 0) refuse(op, "buffer", "is null, and its capacity is " + std::to_string(capacity));
  if (count) *count = from.size();
  std::copy_n(from.begin(), std::min(from.size(), capacity), to);
}
void give_text(const char* op, std::string_view from, char* to, size_t capacity, size_t* count);

// An int32_t of the caller that means a bool.
bool flag(const char* op, const char* argument, int32_t value);

}  // namespace weft::c
