// Scratch of the cpu backend: pieces of it begin where every vector may.
#pragma once

#include <cstddef>

#include "weft/device.h"

namespace weft::cpu {

// So many bytes, up to where the next piece of scratch may begin.
constexpr size_t scratch_piece(size_t bytes) { return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment; }

}  // namespace weft::cpu
