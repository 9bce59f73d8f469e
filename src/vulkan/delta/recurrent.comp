// The gated delta rule token by token: decode, replay, prefill and summarize. A team of lanes holds a row of the state in
// registers, E channels per lane. Rows are independent, so teams never synchronise. All products and sums are `precise`, so every
// pipeline of this shader computes the same bits: replay, verify and decode agree.
// variants: E8 = -DE=8, E16 = -DE=16, E32 = -DE=32
#version 460
#extension GL_GOOGLE_include_directive : require
#include "vulkan/common/views.glsl"
#include "vulkan/common/lanes.glsl"
#include "vulkan/delta/gates.glsl"
#include "vulkan/delta/states.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const bool kPerChannel = false;  // a decay for each channel
layout(constant_id = 1) const bool kReplay = false;      // v holds recorded corrections
layout(constant_id = 2) const bool kMaps = false;        // summarize: K rows from the identity, then V rows from zeros
layout(constant_id = 3) const bool kPackedKeys = false;  // groups of four elements may be accessed at once
layout(constant_id = 4) const bool kPackedIn = false;
layout(constant_id = 5) const bool kPackedOut = false;
layout(constant_id = 6) const uint kKeyType = 0;
layout(constant_id = 7) const uint kInType = 0;
layout(constant_id = 8) const uint kOutType = 0;
layout(constant_id = 9) const uint kDecayForm = 0;  // of delta/gates.glsl
layout(constant_id = 10) const bool kRawStrength = false;
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Params {
  View q, k, v, o;
  Gates gates;
  Sequences sequences;
  States states;
  View record_k, record_delta, record_g;
  Indices accepted;
  View checkpoints, map_p, map_q;
  int64_t checkpoint_every;
  int64_t Hk, Hv, K, V;
  float scale;
  uint l2_norm, tiled_heads, pad;
};
layout(push_constant, scalar) uniform Push { Params p; uint64_t groups; };

const float kKeyNormEps = 1e-6;

// First channel of group j of four channels of this lane.
uint channel(uint j) { return j * 4 * kLanes + lane_number() * 4; }

// This lane's channels of the K contiguous elements from `base`; zeros beyond K.
void load_row(uint64_t data, uint dtype, int64_t base, bool packed, uint K, out float row[E]) {
  for (uint j = 0; j < E / 4; ++j) {
    const uint c = channel(j);
    vec4 four = vec4(0);
    if (packed) {
      if (c < K) four = load4(data, dtype, base + c);
    } else {
      for (uint i = 0; i < 4; ++i)
        if (c + i < K) four[i] = load(data, dtype, base + c + i);
    }
    for (uint i = 0; i < 4; ++i) row[j * 4 + i] = four[i];
  }
}

void store_row(uint64_t data, uint dtype, int64_t base, bool packed, uint K, const float row[E]) {
  for (uint j = 0; j < E / 4; ++j) {
    const uint c = channel(j);
    if (packed) {
      if (c < K) store4(data, dtype, base + c, vec4(row[j * 4], row[j * 4 + 1], row[j * 4 + 2], row[j * 4 + 3]));
    } else {
      for (uint i = 0; i < 4; ++i)
        if (c + i < K) store(data, dtype, base + c + i, row[j * 4 + i]);
    }
  }
}

// Row `r` of the matrix that begins at element `base`, in either layout.
void load_state(int64_t base, uint r, uint K, uint V, out float row[E]) {
  if (p.states.layout_kv == 0) {
    load_row(p.states.in_.data, kInType, base + int64_t(r) * K, kPackedIn, K, row);
    return;
  }
  for (uint e = 0; e < E; ++e) {
    const uint c = channel(e / 4) + e % 4;
    row[e] = c < K ? load(p.states.in_.data, kInType, base + int64_t(c) * V + r) : 0.0;
  }
}

void store_state(uint64_t data, uint dtype, int64_t base, bool packed, uint r, uint K, uint V, const float row[E]) {
  if (p.states.layout_kv == 0) {
    store_row(data, dtype, base + int64_t(r) * K, packed, K, row);
    return;
  }
  for (uint e = 0; e < E; ++e) {
    const uint c = channel(e / 4) + e % 4;
    if (c < K) store(data, dtype, base + int64_t(c) * V + r, row[e]);
  }
}

float inverse_norm(const float x[E]) {
  precise float sum = 0;
  for (uint e = 0; e < E; ++e) sum = sum + x[e] * x[e];
  precise const float square = sum_lanes(sum) + kKeyNormEps;
  return 1.0 / sqrt(square);
}

void main() {
  const uint K = uint(p.K), V = uint(p.V), rows = kMaps ? K + V : V, teams = gl_WorkGroupSize.x / kLanes;
  const uint64_t row_blocks = (rows + teams - 1) / teams, number = workgroup_number();
  if (number >= groups) return;
  const uint64_t head_number = quotient(number, row_blocks);
  const uint row_block = uint(number - head_number * row_blocks), row = row_block * teams + team_number(), lane = lane_number();
  const int64_t n = int64_t(quotient(head_number, uint64_t(p.Hv))), hv = int64_t(head_number) - n * p.Hv;
  const int64_t hk = int64_t(p.tiled_heads != 0 ? uint(hv) % uint(p.Hk) : uint(hv) / (uint(p.Hv) / uint(p.Hk)));
  const TokenRange range = tokens_of(p.sequences, n);
  if (!range.legal || row >= rows) return;  // all lanes of a team return
  StateSlots slots = StateSlots(false, -1, -1);
  if (!kMaps) slots = STATE_SLOTS(p.states, n);
  const bool outputs = present(p.q), records = present(p.record_k);
  if (slots.inert) {
    if (outputs && lane == 0)
      for (int64_t t = range.begin; t < range.end; ++t) store(p.o, at(p.o, t, hv) + row, 0.0);
    return;
  }

  float state[E];
  if (slots.in_ >= 0) {
    load_state(slots.in_ * p.states.in_.strides[0] + hv * p.states.in_.strides[1], row, K, V, state);
  } else {
    for (uint e = 0; e < E; ++e) state[e] = kMaps && row < K && channel(e / 4) + e % 4 == row ? 1.0 : 0.0;
  }
  int64_t last = range.end;
  if (kReplay) last = range.begin + clamp(index_at(p.accepted, n), int64_t(0), range.end - range.begin);
  const bool has_v = !kMaps || row >= K;
  const int64_t v_row = int64_t(row) - (kMaps ? int64_t(K) : 0);
  // One team of a value head records the head's decays. The first value head of a key head also records the key.
  const bool records_head = records && row == 0;
  const bool records_key = records_head && hv == (p.tiled_heads != 0 ? hk : hk * (p.Hv / p.Hk));

  for (int64_t t = range.begin; t < last; ++t) {
    float k[E], decay[E];
    load_row(p.k.data, kKeyType, at(p.k, t, hk), kPackedKeys, K, k);
    if (p.l2_norm != 0) {
      const float factor = inverse_norm(k);
      for (uint e = 0; e < E; ++e) k[e] *= factor;
    }
    if (kPerChannel) {
      for (uint e = 0; e < E; ++e) {
        const uint c = channel(e / 4) + e % 4;
        const float g = c < K ? LOG_DECAY(kDecayForm, p.gates, t, hv, int64_t(c)) : 0.0;
        decay[e] = exp_exact(g);
        if (records_head && c < K) store(p.record_g, at(p.record_g, t, hv) + c, g);
      }
    } else {
      const float g = LOG_DECAY(kDecayForm, p.gates, t, hv, int64_t(0));
      const float same = exp_exact(g);
      for (uint e = 0; e < E; ++e) decay[e] = same;
      if (records_head && lane == 0) store(p.record_g, at(p.record_g, t, hv), g);
    }
    if (records_key) store_row(p.record_k.data, kF32, at(p.record_k, t, hk), false, K, k);

    precise float delta = has_v ? load(p.v.data, kKeyType, at(p.v, t, hv) + v_row) : 0.0;
    precise float sum = 0;
    for (uint e = 0; e < E; ++e) {
      precise const float decayed = decay[e] * state[e];
      state[e] = decayed;
      sum = sum + decayed * k[e];
    }
    if (!kReplay) delta = STRENGTH(kRawStrength, p.gates, t, hv) * (delta - sum_lanes(sum));
    for (uint e = 0; e < E; ++e) {
      precise const float product = delta * k[e];
      precise const float updated = state[e] + product;
      state[e] = updated;
    }
    if (records && lane == 0) store(p.record_delta, at(p.record_delta, t, hv) + row, delta);

    if (outputs) {
      float q[E];
      load_row(p.q.data, kKeyType, at(p.q, t, hk), kPackedKeys, K, q);
      const float factor = p.scale * (p.l2_norm != 0 ? inverse_norm(q) : 1.0);
      precise float o = 0;
      for (uint e = 0; e < E; ++e) o = o + state[e] * q[e];
      o = sum_lanes(o) * factor;
      if (lane == 0) store(p.o, at(p.o, t, hv) + row, o);
    }
    if (p.checkpoint_every > 0) {
      const int64_t done = t + 1 - range.begin, index = done / p.checkpoint_every;
      if (index * p.checkpoint_every == done)
        store_state(p.checkpoints.data, p.checkpoints.dtype,
                    n * p.checkpoints.strides[0] + (index - 1) * p.checkpoints.strides[1] + hv * p.checkpoints.strides[2], false, row, K,
                    V, state);
    }
  }

  if (kMaps) {
    if (row < K)
      store_row(p.map_p.data, kF32, at(p.map_p, n, hv) + int64_t(row) * K, false, K, state);
    else
      store_row(p.map_q.data, kF32, at(p.map_q, n, hv) + int64_t(row - K) * K, false, K, state);
  } else if (slots.out_ >= 0) {
    store_state(p.states.out_.data, kOutType, slots.out_ * p.states.out_.strides[0] + hv * p.states.out_.strides[1], kPackedOut, row, K, V,
                state);
  }
}
