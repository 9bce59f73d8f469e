// What the kernels of kv_encode share: the parameters of a side, the gain of a group, and which positions share a row.
#pragma once

#include "cuda/kv/kv_rows.cuh"
#include "weft/device.h"

namespace weft::cuda {

struct EncodeSide {
  StridedView x;
  SideView side;
  RotateView rotate;
  MeanView mean;
  GainRule rule = GainRule::unbiased;
  float tiny = 0;            // norms up to this one are not normalised
  float unit = 1, most = 0;  // of the stored gain: its unit and its largest finite value
};

struct EncodeParams : TokenRows {
  EncodeSide k, v;
  int64_t blocks = 0;  // per sequence
  int tokens_per_block = 1;
};

// Does the rule need the sum of squared levels?
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

// A power of two that keeps the squares of very large and very small rows in range. `top`: the largest magnitude of the row.
__device__ inline float unit_for(float top) { return top > 0x1p40f ? 0x1p-80f : top < 0x1p-40f ? 0x1p80f : 1.0f; }

// The stored gain of a group whose sums are over `unit` times its numbers. A NaN or an infinity in the row gives NaN.
__device__ inline float stored_gain(const EncodeSide& p, float yy, float cc, float yc, int g, bool tiny, float unit) {
  const float gain = gain_of(p.rule, yy, cc, yc, g, tiny) / unit * p.unit;
  return !isfinite(yy) ? NAN : gain > p.most ? p.most : gain < -p.most ? -p.most : gain;
}

// A number that two positions share if and only if they share a row; < 0: no row.
__device__ inline int64_t row_key(const CacheIndex& index, int64_t position) {
  return position >= 0 && index.kind == CacheKind::ring ? ring_row(position, index.rows, index.pinned) : position;
}

// Encodes tiles of 64 tokens of one head and side with rotations on tensor cores. Returns false and launches nothing unless both sides
// have a signed Hadamard rotation over all of D = 64, 128 or 256, one gain per row, and at most 6 bits or a uniform codebook.
bool launch_encode_tiles(const Stream& stream, const EncodeParams& params, const KvEncodeArgs& args);

}  // namespace weft::cuda
