// Limits of ops that callers need not know: weft/limits.h has the others.
#pragma once

#include "weft/limits.h"

namespace weft {

// Taps of the short convolution: W.
inline constexpr int64_t kMinConvWidth = 2, kMaxConvWidth = 8;

}  // namespace weft
