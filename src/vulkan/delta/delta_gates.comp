// delta_gates: a thread per element of g; per head of a token where g has no elements.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "vulkan/common/views.glsl"
#include "vulkan/delta/gates.glsl"

layout(local_size_x = 128) in;
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Params {
  View a, a_log, dt_bias, b, g, beta;
  int64_t total, channels;
  uint double_beta, pad;
};
layout(push_constant, scalar) uniform Push { Params p; uint64_t groups; };

void main() {
  const uint64_t i = workgroup_number() * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
  if (i >= uint64_t(p.total)) return;
  const uint64_t K = max(uint64_t(p.channels), uint64_t(1)), Hv = uint64_t(p.a.sizes[1]), row = quotient(i, K);
  const int64_t c = int64_t(i - row * K), t = int64_t(quotient(row, Hv)), h = int64_t(row) - t * int64_t(Hv);
  if (p.channels > 0) {
    const float a_log = load(p.a_log, h * p.a_log.strides[0]), bias = load(p.dt_bias, h * p.dt_bias.strides[0] + c);
    store(p.g, at(p.g, t, h) + c, raw_log_decay(load(p.a, at(p.a, t, h) + c), a_log, bias));
  }
  if (c == 0 && present(p.b)) store(p.beta, at(p.beta, t, h), raw_strength(load(p.b, at(p.b, t, h)), p.double_beta != 0));
}
