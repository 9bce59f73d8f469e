// Merges the partials of a query row in order, adds the sink, and undoes V's rotation: a workgroup per row.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "vulkan/kv/kv_side.glsl"
#include "vulkan/common/math.glsl"
#include "vulkan/attention/partials.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const uint kRotation = 2;  // see rotate.glsl
#define ROTATIONS(side) kRotation
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Params {
  Side sides[2];  // of V
  Partials in_;
  Outputs outputs;
  Sequences sequences;
  int64_t splits, longest, Hq, group;
  int64_t most;  // sequences with more query tokens have no partials and are skipped
};
layout(push_constant, scalar) uniform Push { Params p; uint64_t groups; };
#include "vulkan/kv/rotate.glsl"
#include "vulkan/attention/finish.glsl"

shared float factors[kThreads], of_team[kThreads / kLanes];

bool empty(int64_t m_at, int64_t l_at) { return float_at(p.in_.l, l_at) == 0.0 || float_at(p.in_.m, m_at) <= p.in_.empty_m; }

void main() {
  const uint64_t number = workgroup_number();
  if (number >= groups) return;
  const uint64_t token = quotient(number, uint64_t(p.Hq));
  const int64_t hq = int64_t(number - token * uint64_t(p.Hq)), n = int64_t(quotient(token, uint64_t(p.longest)));
  const int64_t i = int64_t(token) - n * p.longest;
  const TokenRange range = tokens_of(p.sequences, n);
  if (!range.legal || range.begin + i >= range.end || range.end - range.begin > p.most) return;
  const int64_t t = range.begin + i, row = int64_t(token);  // partials are numbered by sequence
  const int64_t m_row = row * p.in_.m_token + hq * p.in_.m_head, l_row = row * p.in_.l_token + hq * p.in_.l_head;
  const int64_t o_row = row * p.in_.o_token + hq * p.in_.o_head;
  const uint D = p.sides[0].D, thread = thread_number();

  float top = kMasked;
  for (int64_t b = thread; b < p.splits; b += kThreads) {
    const int64_t m_at = m_row + b * p.in_.m_block;
    if (!empty(m_at, l_row + b * p.in_.l_block)) top = max(top, float_at(p.in_.m, m_at));
  }
  factors[thread] = top;
  barrier();
  for (uint k = 0; k < kThreads; ++k) top = max(top, factors[k]);

  float o[4] = {0, 0, 0, 0}, total = 0;
  for (int64_t first = 0; first < p.splits; first += kThreads) {
    const int64_t b = first + thread;
    barrier();
    // A factor of 0 marks an empty split, whose o must not be used.
    float factor = 0, sum = 0;
    if (b < p.splits) {
      const int64_t m_at = m_row + b * p.in_.m_block, l_at = l_row + b * p.in_.l_block;
      if (!empty(m_at, l_at)) {
        factor = exp_exact(float_at(p.in_.m, m_at) - (top == kMasked ? 0.0 : top));
        sum = factor * float_at(p.in_.l, l_at);
      }
    }
    factors[thread] = factor;
    sum = sum_lanes(sum);
    if (lane_number() == 0) of_team[team_number()] = sum;
    barrier();
    for (uint k = 0; k < kThreads / kLanes; ++k) total += of_team[k];
    const uint here = uint(min(p.splits - first, int64_t(kThreads)));
    for (uint c = 0; c < 4; ++c) {
      const uint d = thread + c * kThreads;
      if (d >= D) continue;
      const int64_t from = o_row + first * p.in_.o_block + int64_t(d / 4) * p.in_.o_four + d % 4;
      for (uint k = 0; k < here; ++k)
        if (factors[k] != 0.0) o[c] = fma(factors[k], float_at(p.in_.o, from + int64_t(k) * p.in_.o_block), o[c]);
    }
  }
  const Finish finish = finish_of(hq, top, total);
  for (uint c = 0; c < 4; ++c)
    if (thread + c * kThreads < D) row_values[thread + c * kThreads] = o[c] * finish.factor;
  barrier();
  rotate_rows(0, true, 1);
  for (uint d = thread; d < D; d += kThreads) store_output(0, t, hq, hq / p.group, d, row_values[d], finish.tokens);
  if (thread == 0) store_log_sum(t, hq, finish.log_sum);
}
