// Prefetch of cache lines into the L2 cache.
#pragma once

#include <hwy/base.h>

namespace weft::cpu {

// L2 rather than L1: every line on its way into L1 takes one of its few miss buffers (MSHRs), and a core that streams through
// memory stalls once they are full. Loads from L2 are fast enough.
HWY_INLINE void prefetch_line(const void* line) { __builtin_prefetch(line, 0, 2); }

}  // namespace weft::cpu
