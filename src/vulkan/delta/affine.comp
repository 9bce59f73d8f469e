// S p + q for the states of sequences: a workgroup per row of a state. The workgroup reads the whole row before it writes, so S may
// be the output.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "vulkan/common/views.glsl"
#include "vulkan/delta/states.glsl"

layout(local_size_x = 128) in;
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Params {
  View p, q;  // q absent: zeros
  States states;
  int64_t Hv, rows, K;
};
layout(push_constant, scalar) uniform Push { Params p; uint64_t groups; };

const uint kMaxHeadSize = 256;
shared float row_of_state[kMaxHeadSize];

void main() {
  const uint64_t number = workgroup_number();
  if (number >= groups) return;
  const uint K = uint(p.K), rows = uint(p.rows);
  const uint64_t head = quotient(number, rows);
  const int64_t n = int64_t(quotient(head, uint64_t(p.Hv))), hv = int64_t(head) - n * p.Hv;
  const uint row = uint(number - head * rows);
  const StateSlots slots = STATE_SLOTS(p.states, n);
  if (slots.inert || slots.out_ < 0) return;  // the same for all threads
  const bool kv = p.states.layout_kv != 0;
  const int64_t from = at(p.states.in_, slots.in_, hv), to = at(p.states.out_, slots.out_, hv);
  for (uint c = gl_LocalInvocationID.x; c < K; c += gl_WorkGroupSize.x)
    row_of_state[c] = slots.in_ < 0 ? 0.0 : load(p.states.in_, from + (kv ? int64_t(c) * rows + row : int64_t(row) * K + c));
  barrier();
  for (uint c = gl_LocalInvocationID.x; c < K; c += gl_WorkGroupSize.x) {
    float sum = present(p.q) ? load(p.q, at(p.q, n, hv) + int64_t(row) * K + c) : 0.0;
    for (uint m = 0; m < K; ++m) sum += row_of_state[m] * load(p.p, at(p.p, n, hv) + int64_t(m) * K + c);
    store(p.states.out_, to + (kv ? int64_t(c) * rows + row : int64_t(row) * K + c), sum);
  }
}
