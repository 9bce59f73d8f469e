// l2_norm and gated_rms_norm: a team of lanes per row, for any dtypes, strides and sizes.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "vulkan/common/views.glsl"
#include "vulkan/common/lanes.glsl"
#include "vulkan/common/math.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const bool kGated = false;
layout(constant_id = 1) const bool kPacked = false;  // groups of four elements may be accessed at once
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Params {
  View x, z, weight, y;
  int64_t rows;
  float eps;
  uint sigmoid_gate;
};
layout(push_constant, scalar) uniform Push { Params p; uint64_t groups; };

float gated(float normed, int64_t z, int64_t d) {
  const float gate = load(p.z, z + d);
  return load(p.weight, d * p.weight.strides[0]) * normed * (p.sigmoid_gate != 0 ? sigmoid(gate) : silu(gate));
}

void main() {
  const uint64_t teams = gl_WorkGroupSize.x / kLanes, row = workgroup_number() * teams + team_number();
  if (row >= uint64_t(p.rows)) return;  // whole teams leave together
  const int64_t lane = int64_t(lane_number()), last = int64_t(p.x.rank) - 1, D = p.x.sizes[p.x.rank - 1];
  int64_t x = 0, y = 0, z = 0;
  uint64_t rest = row;
  for (int dim = int(last) - 1; dim >= 0; --dim) {
    const uint64_t size = uint64_t(p.x.sizes[dim]), above = quotient(rest, size);
    const int64_t index = int64_t(rest - above * size);
    x += index * p.x.strides[dim];
    y += index * p.y.strides[dim];
    if (kGated) z += index * p.z.strides[dim];
    rest = above;
  }
  float sum = 0;
  if (kPacked) {
    for (int64_t d = lane * 4; d < D; d += 4 * kLanes) {
      const vec4 v = load4(p.x.data, p.x.dtype, x + d);
      sum += dot(v, v);
    }
  } else {
    for (int64_t d = lane; d < D; d += kLanes) {
      const float v = load(p.x, x + d);
      sum += v * v;
    }
  }
  sum = sum_lanes(sum);
  const float square = (kGated ? sum / float(D) : sum) + p.eps, factor = square > 0.0 ? 1.0 / sqrt(square) : 0.0;
  if (kPacked) {
    for (int64_t d = lane * 4; d < D; d += 4 * kLanes) {
      vec4 v = load4(p.x.data, p.x.dtype, x + d) * factor;
      if (kGated) v = vec4(gated(v.x, z, d), gated(v.y, z, d + 1), gated(v.z, z, d + 2), gated(v.w, z, d + 3));
      store4(p.y.data, p.y.dtype, y + d, v);
    }
  } else {
    for (int64_t d = lane; d < D; d += kLanes) {
      const float v = load(p.x, x + d) * factor;
      store(p.y, y + d, kGated ? gated(v, z, d) : v);
    }
  }
}
