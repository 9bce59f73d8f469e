// l2_norm and gated_rms_norm: a team of lanes per row, for any dtypes, strides and sizes. Packed and single accesses give a lane
// the same elements in the same order, so both compute the same bits.
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

// Four elements of x, of which `left` are in the row; zeros for the others.
vec4 row_values(int64_t at, int64_t left) {
  if (kPacked) return load4(p.x.data, p.x.dtype, at);
  vec4 v = vec4(0);
  for (uint i = 0; i < 4; ++i)
    if (i < left) v[i] = load(p.x, at + i);
  return v;
}

void main() {
  const uint64_t teams = gl_WorkGroupSize.x / kLanes, row = workgroup_number() * teams + team_number();
  if (row >= uint64_t(p.rows)) return;  // all lanes of a team return
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
  precise float sum = 0;
  for (int64_t d = lane * 4; d < D; d += 4 * kLanes) {
    const vec4 v = row_values(x + d, D - d);
    for (uint i = 0; i < 4; ++i) sum = sum + v[i] * v[i];
  }
  sum = sum_lanes(sum);
  precise const float square = (kGated ? sum / float(D) : sum) + p.eps;
  const float factor = square > 0.0 ? 1.0 / sqrt(square) : 0.0;
  for (int64_t d = lane * 4; d < D; d += 4 * kLanes) {
    vec4 v = row_values(x + d, D - d) * factor;
    if (kGated)
      for (uint i = 0; i < 4; ++i)
        if (kPacked || d + i < D) v[i] = gated(v[i], z, d + i);
    if (kPacked) {
      store4(p.y.data, p.y.dtype, y + d, v);
      continue;
    }
    for (uint i = 0; i < 4; ++i)
      if (d + i < D) store(p.y, y + d + i, v[i]);
  }
}
