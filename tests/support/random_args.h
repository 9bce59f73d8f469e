// Random changes of argument structs: tensors, scalars and the contents of tensors, with memory behind whatever a view claims.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "cases/memory.h"
#include "core/descriptions.h"

namespace weft::tests {

using cases::Memory;
using cases::Rng;

// A tensor member of an argument struct.
struct Member {
  std::string name;
  Tensor* tensor;
  bool writes;

  // Must it hold a triangular matrix, not just any numbers?
  bool is_structured() const { return name == "a_inv" && !writes; }
  bool is_index() const { return tensor->dtype == DType::i32 || tensor->dtype == DType::i64; }
  bool ends_with(std::string_view end) const { return name.ends_with(end); }
};

template <class Args>
std::vector<Member> members_of(Args& args) {
  std::vector<Member> all;
  for_each_tensor(args, [&](const Path& path, Tensor& t, const TensorRule& rule) {
    all.push_back({path.text(), &t, rule.role == Role::out});
  });
  return all;
}

// The names that a Status may give as `argument`: every member, every struct that holds members, and what all calls have.
template <class Args>
std::set<std::string> argument_names() {
  Args args;
  std::set<std::string> names = {"stream", "scratch"};
  const auto add = [&](std::string name) {
    for (names.insert(name); name.find('.') != std::string::npos; names.insert(name)) name.resize(name.rfind('.'));
  };
  for (const Member& member : members_of(args)) add(member.name);
  for_each_scalar(args, [&](const Path& path, auto&) { add(path.text()); });
  return names;
}

// Views that claim more bytes or elements never get memory behind them.
inline constexpr int64_t kMostBytes = int64_t{1} << 20;
inline constexpr int64_t kMostElements = int64_t{1} << 16;

// Elements of a view; kMostElements + 1 stands for anything above, nothing for sizes that make no sense.
inline std::optional<int64_t> claimed_elements(const Tensor& t) {
  if (t.rank < 0 || t.rank > Tensor::kMaxRank) return {};
  const auto begin = t.sizes.begin(), end = t.sizes.begin() + t.rank;
  if (std::any_of(begin, end, [](int64_t size) { return size < 0; })) return {};
  if (t.rank == 0 || std::find(begin, end, 0) != end) return 0;
  int64_t all = 1;
  for (auto size = begin; size != end; ++size) {
    if (*size > kMostElements) return kMostElements + 1;
    all = std::min(all * *size, kMostElements + 1);
  }
  return all;
}

// Bytes from a view's first to its last element; nothing when that makes no sense or is beyond kMostBytes.
inline std::optional<int64_t> claimed_bytes(const Tensor& t) {
  const std::optional<int64_t> elements = claimed_elements(t);
  if (!elements || dtype_bytes(t.dtype) == 0) return {};
  if (*elements == 0) return 0;
  int64_t last = 0;
  for (size_t i = 0; i < static_cast<size_t>(t.rank); ++i) {
    int64_t step = 0;
    if (__builtin_mul_overflow(t.sizes[i] - 1, t.strides[i], &step) || step < 0 || step > kMostBytes) return {};
    last += step;
  }
  const int64_t bytes = (last + 1) * dtype_bytes(t.dtype);
  return bytes <= kMostBytes ? std::optional(bytes) : std::nullopt;
}

inline bool is_lent(const Memory& memory, const void* data, int64_t bytes) {
  const auto from = reinterpret_cast<uintptr_t>(data);
  return std::any_of(memory.blocks().begin(), memory.blocks().end(), [&](const Memory::Block& block) {
    const auto begin = reinterpret_cast<uintptr_t>(block.bytes.get()) + block.begin;
    return from >= begin && from + static_cast<uintptr_t>(bytes) <= begin + block.size;
  });
}

// Random numbers, with a preference for edge cases.
template <class T>
T pick(Rng& rng, std::initializer_list<T> values) {
  return values.begin()[rng.integer(0, static_cast<int64_t>(values.size()) - 1)];
}
inline bool chance(Rng& rng, double probability) { return rng.uniform() < probability; }

inline int64_t odd_integer(Rng& rng, int64_t old) {
  const auto near = static_cast<uint64_t>(old);  // wraps
  if (chance(rng, 0.4))
    return static_cast<int64_t>(pick<uint64_t>(rng, {near + 1, near - 1, 2 * near, near / 2, near + 64, ~near + 1}));
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  return pick<int64_t>(rng, {0,
                             1,
                             2,
                             3,
                             8,
                             16,
                             64,
                             -1,
                             -3,
                             1 << 16,
                             int64_t{1} << 31,
                             (int64_t{1} << 31) - 1,
                             int64_t{1} << 32,
                             int64_t{1} << 45,
                             int64_t{1} << 46,
                             int64_t{1} << 61,
                             kMost / 2 + 1,
                             kMost - 1,
                             kMost,
                             -kMost - 1});
}

inline float odd_float(Rng& rng) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  return pick<float>(rng, {0.f, -0.f, 0.5f, 1.f, -1.f, 2.f, 1e-3f, 1e-30f, -1e-30f, 1e-42f, 1e30f, FLT_MAX, -FLT_MAX, kInfinity,
                           -kInfinity, std::numeric_limits<float>::quiet_NaN()});
}

// Arguments that are being changed.
struct Draft {
  std::vector<Member> members;
  const Memory& base;  // the memory of the legal arguments
  Memory& extra;       // the memory that changes add
  Rng& rng;
  std::string story{};  // the changes in words, for failures
  bool wild = false;    // the numbers are such that results cannot be compared
  bool codes = false;   // the bytes of a cache, gains included, hold garbage

  Member& any() { return members[static_cast<size_t>(rng.integer(0, static_cast<int64_t>(members.size()) - 1))]; }
  bool is_backed(const Tensor& t) const {
    const std::optional<int64_t> bytes = claimed_bytes(t);
    return bytes && (*bytes == 0 || is_lent(base, t.data, *bytes) || is_lent(extra, t.data, *bytes));
  }
};

// --- contents -----------------------------------------------------------------------------------------------------------------

inline int64_t odd_index(Rng& rng) {
  if (chance(rng, 0.6)) return rng.integer(-1, 6);
  return pick<int64_t>(
      rng, {-1, -2, 7, 63, 64, 65, 1000, 1 << 20, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()});
}

// Fills a tensor with numbers that occur in practice.
inline void fill_plausibly(const Member& member, Rng& rng) {
  const Tensor& t = *member.tensor;
  if (claimed_elements(t).value_or(kMostElements + 1) > kMostElements) return;
  const int64_t step = rng.integer(0, 3), limit = pick<int64_t>(rng, {1, 3, 20, 70});
  int64_t i = 0;
  cases::for_each_offset(t, [&](int64_t offset) {
    double value = rng.uniform(-0.3, 0.3);
    if (t.dtype == DType::u8)
      value = static_cast<double>(rng.integer(0, 0x3b));  // gains made of such bytes are below 1 in any dtype
    if (member.is_index()) value = static_cast<double>(member.ends_with("cu_seqlens") ? i * step : rng.integer(0, limit));
    if (member.is_index() && (member.ends_with("slots") || member.ends_with("page_table"))) value = static_cast<double>(i);
    cases::set(t, offset, value);
    ++i;
  });
}

// Copies what the tensor views into memory of its own.
inline bool detach(Draft& draft, Tensor& t) {
  const std::optional<int64_t> bytes = claimed_bytes(t);
  if (!bytes || *bytes == 0 || !draft.is_backed(t)) return false;
  const size_t shift = reinterpret_cast<uintptr_t>(t.data) % 64;
  auto* copy = static_cast<uint8_t*>(draft.extra.bytes(static_cast<size_t>(*bytes) + shift)) + shift;
  std::memcpy(copy, t.data, static_cast<size_t>(*bytes));
  t.data = copy;
  return reinterpret_cast<uintptr_t>(copy) % static_cast<uintptr_t>(dtype_bytes(t.dtype)) == 0;
}

// Writes garbage into one element or all. The host never reads index tensors, so they may hold anything.
inline void change_contents(Draft& draft, Member& member) {
  Tensor& t = *member.tensor;
  const std::optional<int64_t> elements = claimed_elements(t);
  if (!elements || *elements == 0 || *elements > kMostElements || !detach(draft, t)) return;
  Rng& rng = draft.rng;
  draft.story += ", garbage in " + member.name;
  const int64_t one = chance(rng, 0.6) ? rng.integer(0, *elements - 1) : -1;
  int64_t i = 0;
  const bool is_float = t.dtype == DType::f32 || t.dtype == DType::f16 || t.dtype == DType::bf16;
  draft.wild |= is_float;
  draft.codes |= t.dtype == DType::u8;
  cases::for_each_offset(t, [&](int64_t offset) {
    if (one >= 0 && one != i++) return;
    if (is_float)
      cases::set(t, offset, odd_float(rng));
    else
      cases::set(t, offset,
                 static_cast<double>(t.dtype == DType::u8    ? rng.integer(0, 255)
                                     : t.dtype == DType::u32 ? 0
                                                             : odd_index(rng)));
  });
}

// --- views --------------------------------------------------------------------------------------------------------------------

inline void make_dense(Tensor& t) {
  uint64_t stride = 1;  // wraps where sizes are absurd
  for (int i = std::min<int>(t.rank, Tensor::kMaxRank) - 1; i >= 0; --i) {
    t.strides[static_cast<size_t>(i)] = static_cast<int64_t>(stride);
    stride *= t.sizes[static_cast<size_t>(i)] > 0 ? static_cast<uint64_t>(t.sizes[static_cast<size_t>(i)]) : 1;
  }
}

inline void change_view(Draft& draft, Member& member) {
  Rng& rng = draft.rng;
  Tensor& t = *member.tensor;
  const auto dim = static_cast<size_t>(rng.integer(0, std::clamp<int64_t>(t.rank, 1, Tensor::kMaxRank) - 1));
  const auto other = static_cast<size_t>(rng.integer(0, Tensor::kMaxRank - 1));
  const auto tell = [&](const std::string& what) { draft.story += ", " + member.name + " " + what; };
  draft.wild |= member.is_structured();
  switch (rng.integer(0, 12)) {
    case 0:
    case 1:
      t.sizes[dim] = odd_integer(rng, t.sizes[dim]);
      if (chance(rng, 0.5)) make_dense(t);
      return tell("size " + std::to_string(dim) + " = " + std::to_string(t.sizes[dim]));
    case 2:
      t.strides[dim] = odd_integer(rng, t.strides[dim]);
      return tell("stride " + std::to_string(dim) + " = " + std::to_string(t.strides[dim]));
    case 3:
      std::swap(t.sizes[dim], t.sizes[other]);
      if (chance(rng, 0.5)) std::swap(t.strides[dim], t.strides[other]);
      return tell("sizes swapped");
    case 4: std::swap(t.strides[dim], t.strides[other]); return tell("strides swapped");
    case 5:
      t.rank = static_cast<int8_t>(pick<int64_t>(rng, {t.rank + 1, t.rank - 1, 0, 1, 5, 6, 127, -1, -128}));
      return tell("rank " + std::to_string(t.rank));
    case 6: {
      t.dtype = static_cast<DType>(chance(rng, 0.6)   ? rng.integer(0, 2)
                                   : chance(rng, 0.6) ? rng.integer(0, 6)
                                                      : rng.integer(7, 255));
      // The bytes would now be other numbers, so the tensor gets new memory.
      if (t.data) t.data = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(t.data) + (uintptr_t{1} << 50));
      return tell("dtype " + std::to_string(static_cast<int>(t.dtype)));
    }
    case 7: t.data = nullptr; return tell("without data");
    case 8:
      if (t.data) t.data = static_cast<uint8_t*>(t.data) + rng.integer(1, 8);
      return tell("shifted by bytes");
    case 9:
      t.place = static_cast<Place>(pick<int>(rng, {0, 1, 1, 7}));
      t.device = static_cast<int8_t>(pick<int>(rng, {0, 0, 1, -1}));
      return tell("elsewhere");
    case 10: t = {}; return tell("absent");
    case 11:  // a larger row stride: still legal
      if (t.rank > 1 && t.rank <= Tensor::kMaxRank) t.strides[0] = static_cast<int64_t>(static_cast<uint64_t>(t.strides[0]) + 8);
      return tell("padded");
    default: t.strides[dim] = 0; return tell("broadcast");
  }
}

// Does the tensor hold a NaN, which marks elements that no op may read?
inline bool holds_nan(const Draft& draft, const Tensor& t) {
  if (!draft.is_backed(t) || claimed_elements(t).value_or(kMostElements + 1) > kMostElements) return false;
  if (reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(dtype_bytes(t.dtype)) != 0) return false;
  bool found = false;
  cases::for_each_offset(t, [&](int64_t offset) { found |= std::isnan(cases::get(t, offset)); });
  return found;
}

// Makes a tensor equal to another, or gives it the memory of another.
inline void alias(Draft& draft, Member& member) {
  const Member& other = draft.any();
  if (chance(draft.rng, 0.5))
    *member.tensor = *other.tensor;
  else
    member.tensor->data = other.tensor->data;
  // Other bits mean other numbers, and an output that is read before it is written means none.
  draft.wild |= member.is_structured() || member.tensor->dtype != other.tensor->dtype || member.writes != other.writes ||
                holds_nan(draft, *other.tensor);
  draft.story += ", " + member.name + " aliases " + other.name;
}

// Changes one size wherever it occurs: mostly all sizes that one letter of the shapes stands for.
template <class Args>
void change_letter(Draft& draft, Args& args) {
  Rng& rng = draft.rng;
  const Tensor& like = *draft.any().tensor;
  if (like.rank < 1 || like.rank > Tensor::kMaxRank) return;
  const int64_t old = like.sizes[static_cast<size_t>(rng.integer(0, like.rank - 1))];
  if (old < 0 || old > 4096) return;
  const int64_t now = pick<int64_t>(rng, {0, 1, 2, old + 1, std::max<int64_t>(old - 1, 0), 2 * old, 5, 16});
  draft.story += ", " + std::to_string(old) + " everywhere " + std::to_string(now);
  for (Member& member : draft.members) {
    Tensor& t = *member.tensor;
    bool changed = false;
    for (size_t i = 0; i < static_cast<size_t>(std::clamp<int>(t.rank, 0, Tensor::kMaxRank)); ++i) {
      const bool bounds = member.ends_with("cu_seqlens");
      if (t.sizes[i] != old + bounds) continue;
      t.sizes[i] = now + bounds;
      changed = true;
    }
    if (changed) make_dense(t);
    draft.wild |= changed && member.is_structured();
  }
  for_each_scalar(args, [&](const Path&, auto& value) {
    if constexpr (std::is_same_v<decltype(value), int64_t&>)
      if (value == old) value = now;
  });
}

// --- scalars ------------------------------------------------------------------------------------------------------------------

inline void change_scalar(Draft& draft, int64_t& x) { x = odd_integer(draft.rng, x); }
inline void change_scalar(Draft& draft, int& x) {
  x = pick<int>(draft.rng,
                {0, 1, 2, 3, 4, 5, 7, 8, 9, 16, -1, 31, 32, 64, std::numeric_limits<int>::max(), std::numeric_limits<int>::min()});
}
inline void change_scalar(Draft&, bool& x) { x = !x; }
inline void change_scalar(Draft& draft, uint64_t& x) { x = draft.rng.next(); }
inline void change_scalar(Draft&, std::string& x) { x += "?"; }
inline void change_scalar(Draft& draft, float& x) {
  x = chance(draft.rng, 0.4) ? static_cast<float>(draft.rng.uniform(0.1, 2)) : odd_float(draft.rng);
  draft.wild |= !(std::fabs(x) >= 1e-3f && std::fabs(x) <= 10);
}
template <class Enum>
requires std::is_enum_v<Enum>
void change_scalar(Draft& draft, Enum& x) {
  const int64_t value =
      chance(draft.rng, 0.6) ? draft.rng.integer(0, 3) : pick<int64_t>(draft.rng, {-1, 2, 3, 4, 7, 99, 255, 1 << 20});
  x = static_cast<Enum>(static_cast<std::underlying_type_t<Enum>>(value));
}
template <class T>
void change_scalar(Draft& draft, std::optional<T>& x) {
  if (x && chance(draft.rng, 0.3)) return x.reset();
  if (!x) x.emplace();
  change_scalar(draft, *x);
}
inline void change_scalar(Draft& draft, SignBits& x) {
  x[static_cast<size_t>(draft.rng.integer(0, 15))] ^= static_cast<uint32_t>(draft.rng.next());
}
inline void change_scalar(Draft& draft, std::array<float, 256>& x) {
  const auto i = static_cast<size_t>(draft.rng.integer(0, 3)), j = static_cast<size_t>(draft.rng.integer(0, 255));
  if (chance(draft.rng, 0.3))
    std::swap(x[i], x[j]);
  else
    change_scalar(draft, x[chance(draft.rng, 0.7) ? i : j]);
  draft.wild = true;
}

template <class T>
std::string scalar_text(const T& x) {
  if constexpr (std::is_enum_v<T>)
    return std::to_string(static_cast<int64_t>(x));
  else if constexpr (std::is_arithmetic_v<T>)
    return std::to_string(x);
  else if constexpr (requires { x.has_value(); })
    return x ? scalar_text(*x) : "absent";
  else
    return "changed";
}

template <class Args>
void change_any_scalar(Draft& draft, Args& args) {
  int64_t count = 0;
  for_each_scalar(args, [&](const Path&, auto&) { ++count; });
  if (count == 0) return;
  int64_t left = draft.rng.integer(0, count - 1);
  for_each_scalar(args, [&](const Path& path, auto& value) {
    if (left-- != 0) return;
    change_scalar(draft, value);
    draft.story += ", " + path.text() + " = " + scalar_text(value);
  });
}

// --- all of it ----------------------------------------------------------------------------------------------------------------

// One random change of the arguments.
template <class Args>
void change(Draft& draft, Args& args) {
  Member* member = &draft.any();
  const double what = draft.rng.uniform();
  if (what < 0.45) return change_view(draft, *member);
  if (what < 0.55) return alias(draft, *member);
  if (what < 0.65) return change_letter(draft, args);
  if (what < 0.80) return change_any_scalar(draft, args);
  for (int i = 0; i < 4 && !member->tensor->present(); ++i) member = &draft.any();
  return change_contents(draft, *member);
}

// Puts memory behind every view that claims other bytes than were lent, where that is possible. Are all views backed now?
inline bool back(Draft& draft) {
  bool all = true;
  for (Member& member : draft.members) {
    Tensor& t = *member.tensor;
    if (!t.present() || draft.is_backed(t)) continue;
    const std::optional<int64_t> bytes = claimed_bytes(t);
    if (!bytes || !t.data) {
      all = false;
      continue;
    }
    const size_t shift = reinterpret_cast<uintptr_t>(t.data) % 64;
    t.data = static_cast<uint8_t*>(draft.extra.bytes(static_cast<size_t>(*bytes) + shift)) + shift;
    const bool aligned = reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(dtype_bytes(t.dtype)) == 0;
    if (aligned && !member.writes) fill_plausibly(member, draft.rng);
  }
  return all;
}

// May sequences of the call meet in what they write? Callers must not let them: such calls are safe, but their results depend on order.
inline bool sequences_meet(const std::vector<Member>& members) {
  std::vector<double> in, out;
  for (const Member& member : members) {
    const Tensor& t = *member.tensor;
    if (!t.present() || !member.is_index() || claimed_elements(t).value_or(0) == 0) continue;
    const std::vector<double> all = cases::values(t);
    if (member.ends_with("cu_seqlens"))
      for (size_t i = 1; i < all.size(); ++i)
        for (size_t j = 1; j < i; ++j)
          if (std::max(all[i - 1], all[j - 1]) < std::min(all[i], all[j])) return true;
    if (!member.ends_with("slots") && !member.ends_with("page_table")) continue;
    std::vector<double> valid;
    std::copy_if(all.begin(), all.end(), std::back_inserter(valid), [](double index) { return index >= 0; });
    std::sort(valid.begin(), valid.end());
    if (std::adjacent_find(valid.begin(), valid.end()) != valid.end()) return true;
    if (member.ends_with("in_slots")) in = all;
    if (member.ends_with("out_slots")) out = all;
  }
  // Where states are updated in place, a slot may be written only by the sequence that reads it, or by one that nobody reads.
  for (size_t n = 0; n < out.size(); ++n)
    for (size_t m = 0; m < out.size(); ++m)
      if (m != n && out[n] >= 0 && out[n] == (m < in.size() ? in[m] : static_cast<double>(m))) return true;
  return false;
}

}  // namespace weft::tests
