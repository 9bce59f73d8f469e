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
// Equal to grid_point(format, code) == code - codes / 2 for every code, without branches: every call on a cache asks this.
inline bool levels_are_neighbours(const KvFormat& format) {
  const int codes = 1 << format.bits;
  const int middle = codes / 2;
  const float step = *format.grid_step;
  int good = 1;
  for (int code = 0; code < codes; ++code) {
    const float steps = format.codebook[static_cast<size_t>(code)] / step;
    const auto n = static_cast<float>(code - middle);
    good &= static_cast<int>(steps >= n) & static_cast<int>(steps < n + 1);
  }
  return good != 0;
}

}  // namespace weft
