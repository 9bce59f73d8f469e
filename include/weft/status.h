// Status: the result of asking whether a call would work, and the one exception built from it.
#pragma once

#include <stdexcept>
#include <string>

namespace weft {

enum class Code {
  ok,
  invalid_argument,   // the arguments contradict each other or the op's rules, whatever the backend
  unsupported,        // legal arguments that this backend (or this build, or this machine) cannot compute
  scratch_too_small,  // the lent scratch is smaller than scratch_bytes() says, or misaligned
  device_error,       // the device itself reported a failure
};

const char* code_name(Code code);

// A code and a sentence. `message` names operator, argument, what it got and what it wanted.
struct Status {
  Code code = Code::ok;
  std::string op;        // "gated_delta_rule_decode"
  std::string argument;  // "states.in", as the member is called in the argument struct
  std::string message;   // "gated_delta_rule_decode: states.in is [4, 8, 64, 64], wanted [slots, 8, 128, 64]"

  bool ok() const { return code == Code::ok; }
  explicit operator bool() const { return ok(); }
};

// The only exception the library throws from an op (std::bad_alloc aside, which the reference backend may). Nothing was written when
// it is thrown, except for Code::device_error.
class Error : public std::runtime_error {
 public:
  explicit Error(Status status) : std::runtime_error(status.message), status_(std::move(status)) {}
  const Status& status() const { return status_; }

 private:
  Status status_;
};

}  // namespace weft
