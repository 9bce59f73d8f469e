// What an action complains about.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>

namespace weft {

// The sentence of the std::runtime_error that it throws, or "none".
inline std::string complaint(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "none";
}

}  // namespace weft
