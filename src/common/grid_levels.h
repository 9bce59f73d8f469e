// Levels of codes on a grid: level = (n + 1/2) * grid_step.
#pragma once

#include <cmath>

#include "weft/kv_codec.h"

namespace weft {

// The n of a code of a format that has a grid.
inline int grid_point(const KvFormat& format, int code) {
  return static_cast<int>(std::floor(format.codebook[static_cast<size_t>(code)] / *format.grid_step));
}

// Are the codes neighbouring points of the grid, in order, around its middle? Levels then need no table.
inline bool levels_are_neighbours(const KvFormat& format) {
  const int codes = 1 << format.bits;
  for (int code = 0; code < codes; ++code)
    if (grid_point(format, code) != code - codes / 2) return false;
  return true;
}

}  // namespace weft
