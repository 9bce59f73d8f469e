// Errors that a client receives, in the shape of OpenAI's API.
#pragma once

#include <stdexcept>
#include <string>

namespace weft::serve {

// {"error": {"message", "type", "param", "code"}} with an HTTP status.
class ApiError : public std::runtime_error {
 public:
  // `param` is the field at fault, as messages[0].role; empty: none. An empty `code` becomes null.
  ApiError(int status, const std::string& message, const std::string& param = {}, std::string code = {});

  int status() const { return status_; }
  const std::string& param() const { return param_; }
  const std::string& code() const { return code_; }
  std::string json() const;

  std::string allow;  // with status 405: the field Allow

 private:
  int status_;
  std::string param_, code_;
};

// A field that is wrong: status 400.
[[noreturn]] void refuse_field(const std::string& param, const std::string& what, const char* code = "invalid_value");

}  // namespace weft::serve
