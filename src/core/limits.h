// Limits that ops, plans and files share.
#pragma once

#include <cstdint>
#include <limits>

namespace weft {

// Positions, lengths and page numbers are 32-bit numbers; staying below also keeps every product of sizes inside int64.
inline constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();

// Sequences of one call or state: far more than a batch holds, few enough that a loop over empty ones ends soon.
inline constexpr int64_t kMaxSequences = int64_t{1} << 20;

// Taps of the short convolution: W.
inline constexpr int64_t kMinConvWidth = 2, kMaxConvWidth = 8;

}  // namespace weft
