// Checking arguments: see check.h.
#include "core/check.h"

#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "core/limits.h"

namespace weft {
namespace {

// Largest byte extent a view may have: keeps every later product of sizes and strides inside int64.
constexpr int64_t kMaxExtent = int64_t{1} << 46;

// Heads of a tensor: with no tokens they would be bounded by nothing, and plans count sequences x heads.
constexpr int64_t kMaxHeads = int64_t{1} << 14;

// Bytes from the first to one past the last byte of dims [from, rank), or -1 when that is absurdly large.
int64_t extent_bytes(const Tensor& t, int from = 0) {
  int64_t last = 0;
  for (int i = from; i < t.rank; ++i) {
    if (t.sizes[i] == 0) return 0;
    int64_t step = 0;
    if (__builtin_mul_overflow(t.sizes[i] - 1, t.strides[i], &step) || step > kMaxExtent) return -1;
    last += step;
    if (last > kMaxExtent) return -1;
  }
  return (last + 1) * dtype_bytes(t.dtype);
}

// Are the elements few enough to be counted? Sizes alone decide: dimensions with a stride of 0, and those beside an empty one, take
// no bytes and could be anything.
bool countable(const Tensor& t) {
  int64_t all = 1;
  for (int i = 0; i < t.rank; ++i)
    if (__builtin_mul_overflow(all, t.sizes[i] > 0 ? t.sizes[i] : 1, &all) || all > kMaxExtent) return false;
  return true;
}

std::string dtypes_text(DTypes dtypes) {
  std::string text;
  const char* last = nullptr;
  for (const auto& [dtype, name] : EnumValues<DType>::kTable.values) {
    if (!dtypes.has(dtype)) continue;
    if (last) text += (text.empty() ? "" : ", ") + std::string(last);
    last = name;
  }
  return text.empty() ? std::string(last ? last : "none") : text + " or " + last;
}

// Do different indices of the view always mean different elements? Dimensions sorted by stride must each clear the ones inside.
bool writes_twice(const Tensor& t) {
  int order[Tensor::kMaxRank];
  for (int i = 0; i < t.rank; ++i) order[i] = i;
  for (int i = 1; i < t.rank; ++i)
    for (int j = i; j > 0 && t.strides[order[j]] < t.strides[order[j - 1]]; --j) std::swap(order[j], order[j - 1]);
  int64_t reach = 0;  // farthest element of the dimensions so far
  for (int i = 0; i < t.rank; ++i) {
    const int64_t size = t.sizes[order[i]], stride = t.strides[order[i]];
    if (size <= 1) continue;
    if (stride <= reach) return true;
    reach += (size - 1) * stride;
  }
  return false;
}

}  // namespace

bool same_view(const Tensor& a, const Tensor& b) {
  bool same = a.data == b.data && a.dtype == b.dtype && a.rank == b.rank;
  for (size_t i = 0; same && i < static_cast<size_t>(a.rank); ++i)  // a stride over one element is never taken
    same = a.sizes[i] == b.sizes[i] && (a.sizes[i] <= 1 || a.strides[i] == b.strides[i]);
  return same;
}

bool may_overlap(const Tensor& a, const Tensor& b) {
  const int64_t a_bytes = extent_bytes(a), b_bytes = extent_bytes(b);
  if (a_bytes == 0 || b_bytes == 0) return false;
  const auto a_begin = reinterpret_cast<uintptr_t>(a.data), b_begin = reinterpret_cast<uintptr_t>(b.data);
  if (a_begin + static_cast<uintptr_t>(a_bytes) <= b_begin || b_begin + static_cast<uintptr_t>(b_bytes) <= a_begin) return false;
  // Columns of one wider row: equal row pitch, and the two column ranges are apart modulo that pitch.
  if (a.rank >= 2 && b.rank >= 2) {
    const int64_t pitch = a.strides[0] * dtype_bytes(a.dtype);
    const int64_t a_row = extent_bytes(a, 1), b_row = extent_bytes(b, 1);
    if (pitch > 0 && pitch == b.strides[0] * dtype_bytes(b.dtype) && a_row <= pitch && b_row <= pitch) {
      const int64_t offset = static_cast<int64_t>(b_begin - a_begin) % pitch;
      const int64_t gap = offset < 0 ? offset + pitch : offset;
      if (gap >= a_row && gap + b_row <= pitch) return false;
    }
  }
  return true;
}

std::string Check::wanted_text(const Shape& wanted) const {
  std::string text = "[";
  for (int i = 0; i < wanted.rank; ++i) {
    const Letter& letter = wanted.letters[i];
    text += (i ? ", " : "") + std::string(letter.text);
    if (const int64_t value = dim(letter); value >= 0) text += "=" + std::to_string(value);
  }
  return text + "]";
}

int64_t Check::dim(LetterName letter) const {
  for (int i = 0; i < letter_count_; ++i)
    if (letters_[i].key == letter.key) return letters_[i].value;
  return -1;
}

Check& Check::bind(LetterName letter, int64_t value) {
  if (dim(letter) >= 0) return *this;
  if (letter_count_ == static_cast<int>(std::size(letters_)))
    return require(false, letter.text, "is one letter more than the checks have room for");
  letters_[letter_count_++] = {letter.key, value};
  return *this;
}

Check& Check::tensor(const Path& argument, const Tensor& t, const TensorRule& rule) {
  if (!status_.ok()) return *this;
  const Shape& wanted = *(rule.takes_other ? rule.other : rule.shape);
  if (!t.present()) return require(rule.optional, argument, [&] { return "is absent, wanted " + wanted_text(wanted); });
  const DTypes dtypes = rule.dtype_of ? DTypes{rule.dtype_of->dtype} : rule.dtypes;
  require(dtypes.has(t.dtype), argument, [&] {
    std::string text = std::string("is ") + dtype_name(t.dtype) + ", wanted " + dtypes_text(dtypes);
    for (size_t n = 0; rule.dtype_of && n < count_; ++n)
      if (all_[n].tensor == rule.dtype_of) text += ", the dtype of " + all_[n].path.text();
    return text;
  });
  if (wanted.any_rank()) return *this;
  if (status_.ok()) fit(argument, t, wanted);
  return *this;
}

// Compares sizes with the letters that are known, and binds the others.
void Check::fit(const Path& argument, const Tensor& t, const Shape& wanted) {
  const int known = letter_count_;
  bool fits = t.rank == wanted.rank;
  for (int i = 0; fits && i < wanted.rank; ++i) {
    const Letter& letter = wanted.letters[i];
    const int64_t size = t.sizes[i];
    if (letter.open) continue;
    const int64_t value = letter.number >= 0 ? letter.number : dim(letter);
    fits = size >= 0 && (value < 0 || value == size);
    if (fits && value < 0) bind(letter, size);
    if (fits || value < 0) continue;
    // The message gives the value of a letter only where another tensor bound it, or where this tensor has it twice ("K", "K").
    for (int j = 0; j < known; ++j)
      if (letters_[j].key == letter.key) letter_count_ = known;
    if (letter.number < 0 && size >= 0) disputed_ = letter.key;
  }
  if (fits) return;
  require(false, argument, [&] { return "is " + shape_text(t) + ", wanted " + wanted_text(wanted); });
}

// What a tensor says of the disputed letter; -1 where it says nothing, contradicts itself, or is at odds with the other letters too.
int64_t Check::vote(const Ballot& ballot) const {
  int64_t vote = -1;
  for (int i = 0; i < ballot.wanted->rank; ++i) {
    const Letter& letter = ballot.wanted->letters[i];
    const int64_t size = ballot.tensor->sizes[i];
    const int64_t wanted = letter.key == disputed_ ? vote : letter.number >= 0 ? letter.number : dim(letter);
    if (!letter.open && wanted >= 0 && wanted != size) return -1;
    if (letter.key == disputed_) vote = size;
  }
  return vote;
}

// Two tensors disagree about a letter, and the later one was blamed. Blames the first tensor where all others disagree with it, and the count of
// sequences where all tensors agree on another.
void Check::settle(const std::vector<Ballot>& ballots) {
  const Ballot* first = nullptr;
  int64_t value = -1, others = -1;
  int same = 0, other = 0;  // tensors that agree with the first, and that do not
  for (const Ballot& ballot : ballots) {
    const int64_t size = vote(ballot);
    if (size < 0) continue;
    if (!first) {
      first = &ballot;
      value = size;
    } else if (size == value) {
      ++same;
    } else if (others < 0 || size == others) {
      others = size;
      ++other;
    } else {
      return;
    }
  }
  int bound = given_;  // skips letters bound by a scalar or the cache, which take precedence over tensors
  while (bound < letter_count_ && letters_[bound].key != disputed_) ++bound;
  if (!first || bound == letter_count_) return;
  Bound& letter = letters_[bound];
  if (disputed_ == letter_key("N")) {
    // 0 and 1 are the defaults of the count in C and C++: one tensor is enough to see that it was forgotten.
    if (other > 0 || letter.value == value || (same == 0 && letter.value > 1)) return;
    status_ = {};
    require(false, sequences_.in("count"), [&] {
      return "is " + std::to_string(letter.value) + ", wanted " + std::to_string(value) + ", the number of sequences in " +
             first->path.text();
    });
    return;
  }
  if (same > 0 || other < 2) return;
  letter.value = others;
  status_ = {};
  require(false, first->path, [&] { return "is " + shape_text(*first->tensor) + ", wanted " + wanted_text(*first->wanted); });
}

Check& Check::sequences(const Path& argument, const Sequences& s, int64_t tokens) {
  if (!status_.ok()) return *this;
  const Path count = argument.in("count"), bounds = argument.in("cu_seqlens"), longest = argument.in("max_tokens");
  const auto is_count = [&] { return "is " + std::to_string(s.count) + ", wanted "; };
  require(s.count >= 0 && s.count <= kMaxSequences, count, [&] { return is_count() + "0 to " + std::to_string(kMaxSequences); });
  if (!status_.ok()) return *this;
  bind("N", s.count);
  sequences_ = argument;
  if (!s.cu_seqlens.present()) {
    require(s.count > 0 || tokens == 0, count,
            [&] { return is_count() + "the number of sequences that the T=" + std::to_string(tokens) + " tokens belong to"; });
    const bool even = s.count == 0 || tokens % s.count == 0;
    if (!even) disputed_ = letter_key("T");  // the tensor that gave T may be the one that is wrong
    return require(even, count, [&] {
      return is_count() + "a divisor of T=" + std::to_string(tokens) + ", or cu_seqlens for sequences of different lengths";
    });
  }
  require(s.cu_seqlens.dtype == DType::i32 || s.cu_seqlens.dtype == DType::i64, bounds,
          [&] { return std::string("is ") + dtype_name(s.cu_seqlens.dtype) + ", wanted i32 or i64"; });
  const int64_t entries = s.cu_seqlens.rank == 1 ? s.cu_seqlens.sizes[0] : -1;
  // Bounds of more sequences than a count of 0 or 1: surely the count was forgotten, since 0 (in C) and 1 are its defaults.
  require(s.count > 1 || entries <= s.count + 1, count, [&] {
    return is_count() + std::to_string(entries - 1) + ", one less than the " + std::to_string(entries) + " numbers in cu_seqlens";
  });
  require(entries == s.count + 1, bounds,
          [&] { return "is " + shape_text(s.cu_seqlens) + ", wanted [count + 1=" + std::to_string(s.count + 1) + "]"; });
  require(s.max_tokens >= 0, longest, [&] { return "is " + std::to_string(s.max_tokens) + ", wanted >= 0"; });
  // Zero would make every sequence inert: surely a field that was forgotten.
  return require(s.max_tokens > 0 || tokens == 0 || s.count == 0, longest, [&] {
    return "is 0, wanted the length of the longest of " + std::to_string(s.count) + " sequences with T=" + std::to_string(tokens);
  });
}

Check& Check::head_count(const Path& argument, int64_t count) {
  return require(count <= kMaxHeads, argument,
                 [&] { return "has " + std::to_string(count) + " heads, wanted at most " + std::to_string(kMaxHeads); });
}

Check& Check::query_heads(const Path& argument, int64_t count, const Path& cache, int64_t kv_heads) {
  const auto has = [&](int64_t heads) { return "has " + std::to_string(heads) + " heads, wanted "; };
  require(kv_heads > 0, cache, [&] { return has(kv_heads) + "at least 1"; });
  return head_count(argument, count).require(count > 0 && count % (kv_heads > 0 ? kv_heads : 1) == 0, argument, [&] {
    return has(count) + "a positive multiple of the cache's " + std::to_string(kv_heads) + " KV heads";
  });
}

Check& Check::key_heads(const Path& argument, int64_t count, const Path& values, int64_t value_heads) {
  const auto has = [&](int64_t heads) { return "has " + std::to_string(heads) + " heads, wanted "; };
  require(value_heads > 0, values, [&] { return has(value_heads) + "at least 1"; });
  return head_count(values, value_heads).require(count > 0 && value_heads % (count > 0 ? count : 1) == 0, argument, [&] {
    return has(count) + "a positive divisor of the " + std::to_string(value_heads) + " heads of " + values.text();
  });
}

Check& Check::divisor(const Path& argument, int64_t value, const char* name, int64_t of) {
  return require(value > 0 && of > 0 && of % value == 0, argument, [&] {
    return "is " + std::to_string(value) + ", wanted a positive divisor of " + name + "=" + std::to_string(of);
  });
}

Check& Check::between(const Path& argument, int64_t value, int64_t low, int64_t high) {
  return require(value >= low && value <= high, argument,
                 [&] { return "is " + std::to_string(value) + ", wanted " + std::to_string(low) + " to " + std::to_string(high); });
}

void Check::number(const Path& path, float value, const ScalarRule& rule) {
  const auto text = [&] { return "is " + std::to_string(value) + ", wanted "; };
  require(std::isfinite(value), path, [&] { return text() + "a finite number"; });
  require(value >= rule.at_least && value > rule.above, path, [&] { return text() + rule.legal; });
}

void Check::number(const Path& path, int64_t value, const ScalarRule& rule) {
  const auto real = static_cast<double>(value);
  require(real >= rule.at_least && real > rule.above, path,
          [&] { return "is " + std::to_string(value) + ", wanted " + rule.legal; });
}

Check& Check::memory_rules() {
  const std::span<const Named> all{all_, count_};
  uintptr_t begin[std::extent_v<decltype(all_)>]{}, end[std::extent_v<decltype(all_)>]{};
  const Named* first = nullptr;  // the first tensor with anything in it says where all must live
  for (size_t n = 0; n < all.size(); ++n) {
    if (!status_.ok()) return *this;
    const Named& x = all[n];
    const Tensor& t = *x.tensor;
    require(t.rank >= 1 && t.rank <= Tensor::kMaxRank, x.path,
            [&] { return "has rank " + std::to_string(t.rank) + ", wanted 1 to " + std::to_string(Tensor::kMaxRank); });
    for (int i = 0; i < t.rank && ok(); ++i) {
      require(t.sizes[i] >= 0, x.path, [&] { return "is " + shape_text(t) + ", sizes must not be negative"; });
      require(t.strides[i] >= 0, x.path, [&] { return "has stride " + std::to_string(t.strides[i]) + ", wanted >= 0"; });
      // Over a single element too: kernels multiply by it.
      require(t.strides[i] <= kMaxExtent, x.path,
              [&] { return "has stride " + std::to_string(t.strides[i]) + ", wanted at most 2^46"; });
    }
    if (!ok()) return *this;
    require(countable(t), x.path, [&] { return "is " + shape_text(t) + ", more than 2^46 elements"; });
    const int64_t bytes = extent_bytes(t);
    require(bytes >= 0, x.path, [&] { return "is " + shape_text(t) + " with strides beyond 2^46 bytes"; });
    begin[n] = reinterpret_cast<uintptr_t>(t.data);
    end[n] = begin[n] + static_cast<uintptr_t>(bytes);
    if (!ok() || bytes == 0) continue;
    require(x.any_strides || t.sizes[t.rank - 1] <= 1 || t.strides[t.rank - 1] == 1, x.path,
            [&] { return "has stride " + std::to_string(t.strides[t.rank - 1]) + " in its last dimension, wanted 1"; });
    require(t.data != nullptr, x.path, [&] { return "has no data for its shape " + shape_text(t); });
    require(reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(dtype_bytes(t.dtype)) == 0, x.path,
            [&] { return std::string("is not aligned to its element, ") + dtype_name(t.dtype); });
    if (!first) first = &x;
    require(t.place == first->tensor->place && t.device == first->tensor->device, x.path,
            [&] { return "lives elsewhere than " + first->path.text(); });
    require(!x.writes || !t.read_only, x.path, "is an output, but was made from a pointer to const");
    require(!x.writes || !writes_twice(t), x.path, "is an output whose strides let two indices share an element");
  }
  for (size_t o = 0; ok() && o < all.size(); ++o) {
    const Named& out = all[o];
    if (!out.writes) continue;
    for (size_t n = 0; n < all.size(); ++n) {
      const Named& other = all[n];
      if (o == n || end[o] <= begin[n] || end[n] <= begin[o] || !may_overlap(*out.tensor, *other.tensor)) continue;
      bool allowed = false;
      for (int i = 0; i < 2; ++i) allowed |= out.may_be[i] == other.tensor || other.may_be[i] == out.tensor;
      require(allowed && same_view(*out.tensor, *other.tensor), out.path,
              [&] { return "overlaps " + other.path.text() + " in memory"; });
    }
  }
  return *this;
}

}  // namespace weft
