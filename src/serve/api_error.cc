// Errors that a client receives: see api_error.h.
#include "serve/api_error.h"

#include <nlohmann/json.hpp>

#include "weft/printable.h"

namespace weft::serve {
namespace {

const char* type_of(int status) {
  if (status == 401) return "authentication_error";
  if (status == 403) return "permission_error";
  if (status == 429) return "rate_limit_error";
  return status >= 500 ? "server_error" : "invalid_request_error";
}

}  // namespace

ApiError::ApiError(int status, const std::string& message, const std::string& param, std::string code)
    : std::runtime_error(printable_text(message)), status_(status), param_(printable_text(param)), code_(std::move(code)) {}

std::string ApiError::json() const {
  using Json = nlohmann::ordered_json;
  const auto or_null = [](const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); };
  const Json error{{"message", what()}, {"type", type_of(status_)}, {"param", or_null(param_)}, {"code", or_null(code_)}};
  return Json{{"error", error}}.dump(-1, ' ', false, Json::error_handler_t::replace);
}

void refuse_field(const std::string& param, const std::string& what, const char* code) {
  throw ApiError(400, param + " " + what, param, code);
}

}  // namespace weft::serve
