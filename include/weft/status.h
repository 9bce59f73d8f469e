/// Status, the answer to "would this call work?", and Error, the exception made from it.
/// @file
#pragma once

#include <stdexcept>
#include <string>

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {

/// The kind of a fault.
enum class Code {
  ok,                 ///< no fault
  invalid_argument,   ///< the arguments contradict each other or the op's rules, whatever the backend
  unsupported,        ///< the arguments are legal, but this backend, build or machine cannot compute the call
  scratch_too_small,  ///< the lent scratch is smaller than scratch_bytes() says, or misaligned
  device_error,       ///< the device itself reported a failure
};

/// The name of a code: "invalid_argument".
const char* code_name(Code code);

/// A code and a sentence. The sentence names the op, the argument, what it got and what it wanted.
struct Status {
  Code code = Code::ok;  ///< the kind of the fault
  std::string op;        ///< "gated_delta_rule_decode"
  std::string argument;  ///< "states.in", as the member is called in the argument struct
  std::string message;   ///< "gated_delta_rule_decode: states.in is [4, 8, 64, 64], wanted [slots, 8, 128, 64]"

  /// Is there no fault?
  bool ok() const { return code == Code::ok; }
  /// Is there no fault?
  explicit operator bool() const { return ok(); }
};

/// The only exception that an op throws, apart from std::bad_alloc, which the reference backend may throw. When an op throws, it
/// has written nothing, except with Code::device_error.
class Error : public std::runtime_error {
 public:
  /// The message of the exception is that of the status.
  explicit Error(Status status) : std::runtime_error(status.message), status_(std::move(status)) {}
  /// The fault.
  const Status& status() const { return status_; }

 private:
  Status status_;
};

}  // namespace weft
#pragma GCC visibility pop
