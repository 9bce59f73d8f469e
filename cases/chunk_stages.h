// The chunk stages in sequence on the reference: inputs for cases of a later stage, and a second formulation of prefill.
#pragma once

#include "cases/memory.h"
#include "weft/delta_chunk.h"

namespace weft::cases {

// q, k, v as the rule uses them (normalised), g and beta f32.
struct ChunkInputs {
  Tensor q, k, v, g, beta, state_in;
  Sequences sequences;
  HeadMap head_map = HeadMap::grouped;
  std::optional<float> scale;
  int64_t chunk = 64;
};

enum class Stage { cumsum, kkt, inverse, wu, state, output };

struct ChunkResults {
  Tensor g_cumsum, a, a_inv, w, u, h, v_new, state_out, o;
};

// Runs the stages up to and including `last`; w, u, h and v_new have dtype `staged`.
ChunkResults run_stages(Memory& memory, const ChunkInputs& in, DType staged, Stage last);

}  // namespace weft::cases
