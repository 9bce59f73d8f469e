// What the ops do where a caller leaves it open: one number for all backends.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>

namespace weft {

// Keys and queries that an op normalises are divided by sqrt(sum x^2 + kKeyNormEps).
template <class Real>
inline constexpr Real kKeyNormEps = static_cast<Real>(1e-6);

// What scores, or queries of the delta rule, are multiplied by: 1 / sqrt(head size) unless a call says otherwise.
template <class Real = float>
Real scale_or_default(const std::optional<float>& scale, int64_t head_size) {
  return scale ? *scale : 1 / std::sqrt(static_cast<Real>(head_size));
}

}  // namespace weft
