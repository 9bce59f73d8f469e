// What the cpu kernels of the chunk stages read; a kernel takes one chunk of one head at a time.
#pragma once

#include "cpu/delta/delta_params.h"

namespace weft::cpu {

struct ChunkView {
  RowsView q, k, v, w, u, v_new, o, beta, g, a, a_inv;  // those that the stage uses; g holds prefix sums (chunk_cumsum: log decays)
  RowsView g_out;
  bool per_channel = false;
  DeltaHeads heads;
  int64_t C = 64;
  float scale = 1;
  StateView h;  // a slot per chunk
};

// One chunk: tokens [begin, begin + count) of a sequence, and its slot in h.
struct ChunkRange {
  int64_t begin = 0, count = 0, row = 0;
};

}  // namespace weft::cpu
