// short_conv: a thread per channel and run of tokens of a sequence. Run 0 also writes the state.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "vulkan/common/views.glsl"
#include "vulkan/common/math.glsl"
#include "vulkan/delta/states.glsl"

layout(local_size_x = 128) in;
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Params {
  View x, weight, bias, y, state_in, state_out;
  Sequences sequences;
  Indices in_slots, out_slots, has_initial, offsets;
  int64_t run, runs, channel_blocks;  // tokens of a run, runs of a sequence, workgroups that share the channels of a run
  uint silu, pad;
};
layout(push_constant, scalar) uniform Push { Params p; uint64_t groups; };

const uint kMaxWidth = 8;

int64_t at3(View t, int64_t i, int64_t j, int64_t k) { return at(t, i, j) + k * t.strides[2]; }

void main() {
  const uint64_t number = workgroup_number();
  if (number >= groups) return;
  const uint64_t run_number = quotient(number, uint64_t(p.channel_blocks));
  const int64_t n = int64_t(quotient(run_number, uint64_t(p.runs))), run = int64_t(run_number) - n * p.runs;
  const int64_t c = int64_t(number - run_number * uint64_t(p.channel_blocks)) * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
  if (c >= p.x.sizes[1]) return;
  const TokenRange range = tokens_of(p.sequences, n);
  if (!range.legal) return;
  const int64_t first = range.begin + run * p.run, last = min(first + p.run, range.end), T = range.end - range.begin;
  if (run > 0 && first >= last) return;
  const StateSlots slots = state_slots(p.state_in.rank, p.state_in.sizes[0], p.state_out.rank, p.state_out.sizes[0], p.in_slots,
                                       p.out_slots, p.has_initial, n);
  if (slots.inert) {
    for (int64_t t = first; t < last; ++t) store(p.y, t * p.y.strides[0] + c, 0.0);
    return;
  }
  const int64_t W = p.weight.sizes[1];
  const int64_t L = present(p.state_in) ? p.state_in.sizes[1] : present(p.state_out) ? p.state_out.sizes[1] : W - 1;
  int64_t offset = L - (W - 1);
  if (p.offsets.there != 0) offset = clamp(index_at(p.offsets, n), int64_t(0), offset);
  const int64_t history = offset + W - 1;  // rows of the state before x

  // The end of the window holds the W - 1 rows before the current row. Taps that the filter lacks are zero.
  float window[kMaxWidth], weight[kMaxWidth];
  for (uint m = 0; m < kMaxWidth; ++m) {
    const int64_t tap = int64_t(m) - (kMaxWidth - W), row = history + (first - range.begin) + tap - (W - 1);
    weight[m] = tap >= 0 ? load(p.weight, at(p.weight, c, tap)) : 0.0;
    window[m] = 0.0;
    if (tap < 0 || tap == W - 1) continue;
    if (row >= history)
      window[m] = load(p.x, at(p.x, range.begin + row - history, c));
    else if (slots.in_ >= 0)
      window[m] = load(p.state_in, at3(p.state_in, slots.in_, row, c));
  }

  // y may be x, so the state is written before y. The order of the rows allows state_out to be state_in.
  if (run == 0 && slots.out_ >= 0) {
    const int64_t shift = history + T - L;  // row l of the new state is row l + shift of [state | x]
    for (int64_t i = 0; i < L; ++i) {
      const int64_t l = shift >= 0 ? i : L - 1 - i, row = l + shift;
      float value = 0.0;
      if (row >= history)
        value = load(p.x, at(p.x, range.begin + row - history, c));
      else if (row >= 0 && slots.in_ >= 0)
        value = load(p.state_in, at3(p.state_in, slots.in_, row, c));
      store(p.state_out, at3(p.state_out, slots.out_, l, c), value);
    }
  }

  const float bias = present(p.bias) ? load(p.bias, c * p.bias.strides[0]) : 0.0;
  for (int64_t t = first; t < last; ++t) {
    window[kMaxWidth - 1] = load(p.x, at(p.x, t, c));
    float sum = bias;
    for (uint m = 0; m < kMaxWidth; ++m) sum += weight[m] * window[m];
    store(p.y, t * p.y.strides[0] + c, p.silu != 0 ? silu(sum) : sum);
    for (uint m = 0; m + 1 < kMaxWidth; ++m) window[m] = window[m + 1];
  }
}
