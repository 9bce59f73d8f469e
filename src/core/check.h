// Check: the rules that all argument structs share. It reads them from the description of a struct and keeps the first fault.
#pragma once

#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/describe.h"
#include "core/fail.h"

namespace weft {

// A letter of a shape as Check looks it up. The hash of a literal is made at compile time.
struct LetterName {
  const char* text;
  uint64_t key;
  consteval LetterName(const char* name) : text(name), key(letter_key(name)) {}       // NOLINT(google-explicit-constructor)
  constexpr LetterName(const Letter& letter) : text(letter.text), key(letter.key) {}  // NOLINT(google-explicit-constructor)
};

// Collects the first fault of a call. Sizes are named by letters: the first tensor that carries a letter binds it, and the others
// must agree. No function allocates or makes text unless there is a fault.
class Check {
 public:
  explicit Check(const char* op) : op_(op) {}

  bool ok() const { return status_.ok(); }
  Status status() && { return std::move(status_); }

  // Records a fault unless one is known already or `good` holds. `what` is a text or a function that makes one: use
  // a function wherever making the text costs anything, because every call of every op passes here.
  template <class What>
  Check& require(bool good, const Path& argument, What&& what) {
    if (good || !status_.ok()) return *this;
    if constexpr (std::is_invocable_v<What>)
      status_ = fail(Code::invalid_argument, op_, argument.text(), what());
    else
      status_ = fail(Code::invalid_argument, op_, argument.text(), what);
    return *this;
  }
  // Takes over a fault found elsewhere.
  Check& also(Status status) {
    if (status_.ok()) status_ = std::move(status);
    return *this;
  }

  // Checks what the description says of every member: presence, dtype and shape of tensors, sequences, values of scalars and enums.
  // Binds the letters of shapes. Letters that a scalar gives (C, Dv) must be bound before.
  template <class Args>
  Check& members(const Args& args) {
    given_ = letter_count_;
    disputed_ = 0;
    describe(args, Members<true>{*this});
    if (disputed_ != 0) {
      std::vector<Ballot> ballots;
      for_each_tensor(args, [&](const Path& path, const Tensor& tensor, const TensorRule& rule) {
        const Shape* wanted = rule.takes_other ? rule.other : rule.shape;
        if (!rule.special && wanted && !wanted->any_rank() && tensor.rank == wanted->rank)
          ballots.push_back({path, &tensor, wanted});
      });
      settle(ballots);
    }
    return *this;
  }
  // The memory rules of all tensors: sane sizes and strides, a contiguous last dimension, alignment, one place, outputs apart from
  // everything else.
  template <class Args>
  Check& memory(const Args& args) {
    if (count_ == 0) describe(args, Members<false>{*this});
    return memory_rules();
  }

  // Presence, dtype and shape of one tensor.
  Check& tensor(const Path& argument, const Tensor& tensor, const TensorRule& rule);
  // Binds a letter that is not bound yet.
  Check& bind(LetterName letter, int64_t value);
  // The value of a bound letter, -1 if there is none.
  int64_t dim(LetterName letter) const;
  // Binds N and checks cu_seqlens against it, or that T splits evenly.
  Check& sequences(const Path& argument, const Sequences& sequences, int64_t tokens);
  // Heads of a tensor without tokens would be bounded by nothing, and plans count sequences x heads.
  Check& head_count(const Path& argument, int64_t count);
  // The query heads of `argument` share the KV heads of `cache`. Blames the queries: caches outlive many calls.
  Check& query_heads(const Path& argument, int64_t count, const Path& cache, int64_t kv_heads);
  // The heads of `values` share the key heads of `argument`. Blames the keys, so ask this after every shape: then several tensors have
  // agreed on the number of value heads.
  Check& key_heads(const Path& argument, int64_t count, const Path& values, int64_t value_heads);
  // A scalar that must divide `of`, which is called `name`.
  Check& divisor(const Path& argument, int64_t value, const char* name, int64_t of);
  Check& between(const Path& argument, int64_t value, int64_t low, int64_t high);
  // An enum of values 0 .. last. Others, which a cast can make, would mean different things to different readers.
  template <class Enum>
  Check& known(const Path& argument, Enum value, Enum last) {
    return between(argument, static_cast<int64_t>(value), 0, static_cast<int64_t>(last));
  }

 private:
  // The visitor of members() and, without values, of memory().
  template <bool values>
  struct Members {
    Check& check;
    Path at{};

    template <class C>
    void tensor(const char* name, const Tensor& tensor, const C&, const TensorRule& rule) {
      if (rule.role == Role::unused) return;
      const Path path = at.in(name);
      if (values && !rule.special) check.tensor(path, tensor, rule);
      if (tensor.present()) check.collect(path, tensor, rule);
    }
    template <class T, class C>
    void scalar(const char* name, const T& member, const C&, const ScalarRule& rule) {
      if constexpr (values) check.value(at.in(name), member, rule);
    }
    template <class S, class C, class... Use>
    void group(const char* name, const S& member, const C&, Use... use) {
      constexpr bool kSequences = std::is_same_v<S, Sequences>;
      describe(member, Members < values && !kSequences > {check, at.in(name)}, use...);
      if constexpr (values && kSequences) check.sequences(at.in(name), member, check.dim("T"));
    }
    // validate(KvFormat) checks the values.
    template <class S, class C, class... Use>
    void format(const char* name, const S& member, const C&, Use... use) {
      describe(member, Members<false>{check, at.in(name)}, use...);
    }
    template <class... All>
    void recipe(const All&...) {}
    template <class F>
    void rule(const F& f) {
      if constexpr (values)
        if (check.ok()) f(check);
    }
  };

  struct Named {  // left uninitialised: every call makes a list of them
    Path path;
    const Tensor* tensor;
    const Tensor* may_be[2];
    bool writes;
    bool any_strides;
  };
  // A tensor of a call in which two tensors disagree about the size of a letter.
  struct Ballot {
    Path path;
    const Tensor* tensor;
    const Shape* wanted;
  };
  struct Bound {
    uint64_t key;
    int64_t value;
  };

  void collect(const Path& path, const Tensor& tensor, const TensorRule& rule) {
    if (count_ == std::size(all_))
      require(false, path, "is one tensor more than the checks have room for");
    else
      all_[count_++] = {path, &tensor, {rule.may_be[0], rule.may_be[1]}, rule.role == Role::out, rule.any_strides};
  }
  template <class T>
  void value(const Path& path, const T& value, const ScalarRule& rule) {
    if constexpr (std::is_enum_v<T>) {
      constexpr int64_t kLast = static_cast<int64_t>(EnumValues<T>::kTable.values.size()) - 1;
      const auto number = static_cast<int64_t>(value);
      require(number >= 0 && number <= kLast, path,
              [&] { return "is " + std::to_string(number) + ", wanted 0 to " + std::to_string(kLast); });
    } else if constexpr (std::is_same_v<T, float> || std::is_same_v<T, int64_t>) {
      number(path, value, rule);
    } else if constexpr (!std::is_same_v<T, bool>) {
      if (value) this->value(path, *value, rule);
    }
  }
  void number(const Path& path, float value, const ScalarRule& rule);
  void number(const Path& path, int64_t value, const ScalarRule& rule);
  Check& memory_rules();
  std::string wanted_text(const Shape& wanted) const;
  void fit(const Path& argument, const Tensor& tensor, const Shape& wanted);
  int64_t vote(const Ballot& ballot) const;
  void settle(const std::vector<Ballot>& ballots);

  const char* op_;
  Status status_;
  Bound letters_[24];
  int letter_count_ = 0;
  Path sequences_{};       // what bound N
  int given_ = 0;          // letters that were bound before members()
  uint64_t disputed_ = 0;  // the key of the letter about which two tensors disagree
  Named all_[32];
  size_t count_ = 0;
};

// May two views touch the same byte? Errs on the side of yes.
bool may_overlap(const Tensor& a, const Tensor& b);
bool same_view(const Tensor& a, const Tensor& b);

// Do the tensors of a call live where the backend computes?
template <class Args>
Status check_place(const char* op, const Args& args, Place place, const Stream& stream) {
  const auto elsewhere = [&](const Tensor& t) {
    const bool there = t.place == place && (place == Place::host || t.device == stream.device);
    return !there && t.present() && t.elements() > 0;
  };
  if (!any_tensor(args, elsewhere)) return {};
  Status status;
  for_each_tensor(args, [&](const Path& path, const Tensor& tensor, const TensorRule&) {
    if (!status.ok() || !elsewhere(tensor)) return;
    if (tensor.place != place)
      status = fail(Code::invalid_argument, op, path.text(),
                    std::string("lives in ") + place_name(tensor.place) + " memory, backend " + backend_name(stream.backend) +
                        " wants " + place_name(place) + " memory");
    else
      status =
          fail(Code::invalid_argument, op, path.text(),
               "lives on device " + std::to_string(tensor.device) + ", the stream is on device " + std::to_string(stream.device));
  });
  return status;
}

}  // namespace weft
