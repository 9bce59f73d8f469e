// Defaults that all backends share.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>

namespace weft {

// Keys and queries that an op normalises are divided by sqrt(sum x^2 + kKeyNormEps).
template <class Real>
inline constexpr Real kKeyNormEps = static_cast<Real>(1e-6);

// The factor of scores, or of queries of the delta rule: 1 / sqrt(head size) unless a call says otherwise.
template <class Real = float>
Real scale_or_default(const std::optional<float>& scale, int64_t head_size) {
  return scale ? *scale : 1 / std::sqrt(static_cast<Real>(head_size));
}

}  // namespace weft
