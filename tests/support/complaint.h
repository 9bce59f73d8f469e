// The error message that an action throws.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>

namespace weft {

// The message of the std::runtime_error that `action` throws, or "none".
inline std::string complaint(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "none";
}

}  // namespace weft
