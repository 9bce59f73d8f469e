// How many threads the cpu backend takes at most.
#pragma once

namespace weft {

// More threads than any machine has would only cost scratch; results do not depend on their number.
inline constexpr int kMaxThreads = 1024;

}  // namespace weft
