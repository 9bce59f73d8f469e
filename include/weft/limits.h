// Limits that ops, plans, files and command-line options share.
#pragma once

#include <cstdint>
#include <limits>

namespace weft {

// Positions, lengths and page numbers are 32-bit numbers. This bound also keeps every product of sizes inside int64_t.
inline constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();

// Sequences of one call or state: more than any batch holds, and few enough that a loop over empty sequences ends soon.
inline constexpr int64_t kMaxSequences = int64_t{1} << 20;

// Stream::threads at most. More threads than a machine has would only cost scratch; results do not depend on the number.
inline constexpr int kMaxThreads = 1024;

}  // namespace weft
