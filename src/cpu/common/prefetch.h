// Lines that will be wanted soon, on their way into the second-level cache.
#pragma once

#include <hwy/base.h>

namespace weft::cpu {

// Not into the first: there, only as many lines may be on their way as it has places to note a miss, and a core that streams through
// memory waits for those. From the second-level cache lines come quickly enough.
HWY_INLINE void prefetch_line(const void* line) { __builtin_prefetch(line, 0, 2); }

}  // namespace weft::cpu
