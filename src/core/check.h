// Checking arguments: failures as sentences, shapes by letters, and the memory rules that all tensors share.
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "core/tensors_of.h"
#include "weft/status.h"
#include "weft/tensor.h"

namespace weft {

// "<op>: <argument> <what>"
Status fail(Code code, std::string_view op, std::string_view argument, const std::string& what);

std::string shape_text(const Tensor& tensor);  // "[4, 128]"

inline constexpr std::initializer_list<DType> kFloatTypes = {DType::f32, DType::f16, DType::bf16};

// Collects the first fault of a call. Sizes are named by letters: the first tensor that carries a letter binds it, the others must
// agree. A wanted size is a letter ("T"), a number ("4") or free ("*").
class Check {
 public:
  explicit Check(const char* op) : op_(op) {}

  bool ok() const { return status_.ok(); }
  Status status() && { return std::move(status_); }

  // Records a fault unless one is known already or `good` holds. `what` is a text, or a function that makes one: use a function
  // wherever making the text costs anything, since every call of every op passes here. (For the same reason nobody asks how long the
  // name of a faultless argument is.)
  template <class Name, class What>
  Check& require(bool good, const Name& argument, What&& what) {
    if (good || !status_.ok()) return *this;
    if constexpr (std::is_invocable_v<What>)
      status_ = fail(Code::invalid_argument, op_, argument, what());
    else
      status_ = fail(Code::invalid_argument, op_, argument, what);
    return *this;
  }
  // Adopts a Status from elsewhere.
  Check& also(Status status) {
    if (status_.ok()) status_ = std::move(status);
    return *this;
  }
  // Presence, shape and dtype of a tensor.
  Check& tensor(const char* argument, const Tensor& tensor, std::initializer_list<const char*> wanted,
                std::initializer_list<DType> dtypes = kFloatTypes);
  // As tensor(), but absent is fine too.
  Check& optional_tensor(const char* argument, const Tensor& tensor, std::initializer_list<const char*> wanted,
                         std::initializer_list<DType> dtypes = kFloatTypes);
  // Binds or compares a letter.
  Check& bind(const char* letter, int64_t value);
  // Value of a bound letter, -1 if none.
  int64_t dim(const char* letter) const;
  // Binds N and checks cu_seqlens against it, or that T splits evenly.
  Check& sequences(const char* argument, const Sequences& sequences, int64_t tokens);
  // Hv must be a positive multiple of Hk.
  Check& head_ratio(const char* argument, int64_t many, int64_t few);
  Check& between(const char* argument, int64_t value, int64_t low, int64_t high);
  // An enum of values 0 .. last: others, which a cast can make, would mean different things to different readers.
  template <class Enum>
  Check& known(const char* argument, Enum value, Enum last) {
    return between(argument, static_cast<int64_t>(value), 0, static_cast<int64_t>(last));
  }
  // Finite: not NaN, not infinite.
  Check& finite(const char* argument, float value);
  Check& not_negative(const char* argument, float value);  // finite and >= 0

  // Rules of memory that every tensor obeys: sane sizes and strides, contiguous last dimension, alignment, one place, outputs apart.
  template <class Args>
  Check& memory(const Args& args) {
    Named all[32];
    size_t count = 0;
    tensors_of(args, [&](const char* name, const Tensor& tensor, Use use) {
      if (!tensor.present()) return;
      if (count == std::size(all)) return void(require(false, name, "is one tensor more than the checks have room for"));
      all[count++] = {name, &tensor, use};
    });
    return memory_rules({all, count});
  }

 private:
  struct Named {
    const char* name = nullptr;
    const Tensor* tensor = nullptr;
    Use use;
  };
  struct Letter {
    uint64_t key;
    int64_t value;
  };
  Check& memory_rules(std::span<const Named> all);
  std::string wanted_text(std::initializer_list<const char*> wanted) const;

  const char* op_;
  Status status_;
  Letter letters_[24];
  int letter_count_ = 0;
};

// May two views touch the same byte? Errs on the side of yes.
bool may_overlap(const Tensor& a, const Tensor& b);
bool same_view(const Tensor& a, const Tensor& b);

// Do the tensors of a call live where the backend computes?
template <class Args>
Status check_place(const char* op, const Args& args, Place place, const Stream& stream) {
  Status status;
  tensors_of(args, [&](const char* name, const Tensor& tensor, Use) {
    if (!status.ok() || !tensor.present() || tensor.elements() == 0) return;
    if (tensor.place != place)
      status = fail(Code::invalid_argument, op, name,
                    std::string("lives in ") + (tensor.place == Place::host ? "host" : "cuda") + " memory, backend " +
                        backend_name(stream.backend) + " wants " + (place == Place::host ? "host" : "cuda") + " memory");
    else if (place == Place::cuda && tensor.device != stream.device)
      status =
          fail(Code::invalid_argument, op, name,
               "lives on device " + std::to_string(tensor.device) + ", the stream is on device " + std::to_string(stream.device));
  });
  return status;
}

}  // namespace weft
