// Alignment of buffers inside the scratch of the cpu backend.
#pragma once

#include <cstddef>

#include "weft/device.h"

namespace weft::cpu {

// `bytes` rounded up to the alignment of scratch, so that the next buffer is aligned for vectors, too.
constexpr size_t align_scratch(size_t bytes) { return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment; }

}  // namespace weft::cpu
