// kv_rotate: a workgroup rotates several rows in shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "vulkan/kv/kv_side.glsl"

layout(local_size_x = 128) in;
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Params {
  Side sides[2];
  View x, y;
  int64_t count;
  uint rows, inverse;  // rows: of a workgroup
};
layout(push_constant, scalar) uniform Push { Params p; uint64_t groups; };
#include "vulkan/kv/rotate.glsl"

void main() {
  const uint64_t number = workgroup_number();
  if (number >= groups) return;
  const uint D = p.sides[0].D;
  const int64_t first = int64_t(number) * p.rows;
  for (uint e = thread_number(); e < p.rows * D; e += kThreads) {
    const int64_t row = first + e / D;
    if (row >= p.count) continue;
    const int64_t t = int64_t(quotient(uint64_t(row), uint64_t(p.x.sizes[1]))), h = row - t * p.x.sizes[1];
    row_values[e] = load(p.x, at(p.x, t, h) + e % D);
  }
  barrier();
  rotate_rows(0, p.inverse != 0, p.rows);
  for (uint e = thread_number(); e < p.rows * D; e += kThreads) {
    const int64_t row = first + e / D;
    if (row >= p.count) continue;
    const int64_t t = int64_t(quotient(uint64_t(row), uint64_t(p.x.sizes[1]))), h = row - t * p.x.sizes[1];
    store(p.y, at(p.y, t, h) + e % D, row_values[e]);
  }
}
