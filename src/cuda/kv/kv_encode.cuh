// What the kernels of kv_encode share: a side as they see it, the gain of a group, and rows that a later token takes.
#pragma once

#include "cuda/kv/kv_rows.cuh"
#include "weft/device.h"

namespace weft::cuda {

struct EncodeSide {
  Tensor x;
  SideView side;
  RotateView rotate;
  MeanView mean;
  GainRule rule = GainRule::unbiased;
  float tiny = 0, unit = 1, most = 0;  // unit: of the stored gain; most: its largest
};

struct EncodeParams : TokenRows {
  EncodeSide k, v;
  int64_t blocks = 0;  // of a sequence
  int each = 1;        // tokens of a block
};

// Does the rule want the sum of squared levels?
WEFT_HOST_DEVICE inline bool needs_levels(GainRule rule) { return rule == GainRule::matched || rule == GainRule::least_squares; }

// Gain of a group from its sums, in N(0,1) units; `tiny`: too small to normalise.
__device__ inline float gain_of(GainRule rule, float yy, float cc, float yc, int g, bool tiny) {
  const float rms = sqrtf(yy / static_cast<float>(g));
  switch (rule) {
    case GainRule::rms: return rms;
    case GainRule::matched: return cc > 0 ? sqrtf(yy / cc) : rms;
    case GainRule::least_squares: return !tiny && cc > 0 ? yc / cc : 0.0f;
    default: return !tiny && yc > 0 ? yy / yc : 0.0f;
  }
}

// Squares of very large and very small rows are taken in other units.
__device__ inline float unit_for(float top) { return top > 0x1p40f ? 0x1p-80f : top < 0x1p-40f ? 0x1p80f : 1.0f; }

// The stored gain of a group whose sums were taken of `unit` times its numbers.
__device__ inline float stored_gain(const EncodeSide& p, float yy, float cc, float yc, int g, bool tiny, float unit) {
  const float gain = gain_of(p.rule, yy, cc, yc, g, tiny) / unit * p.unit;
  return !isfinite(yy) ? NAN : gain > p.most ? p.most : gain < -p.most ? -p.most : gain;
}

// The row that a position takes, as a number of its own; < 0: none.
__device__ inline int64_t row_key(const KvIndex& index, int64_t position) {
  return position >= 0 && index.kind == CacheKind::ring ? ring_row(position, index.rows, index.pinned) : position;
}

// Encodes tiles of 64 tokens of one head and side with tensor-core rotations; false, and nothing launched, where a side is not of that
// kind: signed Hadamard over all of D = 64, 128 or 256, one gain for each row, at most 6 bits or a uniform table.
bool launch_encode_tiles(const Stream& stream, const EncodeParams& params, const KvCache& cache);

}  // namespace weft::cuda
