// kv_encode: a workgroup encodes several rows of one side in shared memory. Teams of lanes quantise a gain group each.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "vulkan/kv/kv_side.glsl"
#include "vulkan/kv/tokens.glsl"

layout(local_size_x = 128) in;
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Params {
  Side sides[2];
  CacheIndex index;
  TokenRows tokens;
  uint64_t overwritten;  // address of kv_overwritten.comp's flags: a later token takes the token's row. 0: no row is taken twice
};
layout(push_constant, scalar) uniform Push { Params p; uint64_t groups; };
#include "vulkan/kv/index.glsl"
#include "vulkan/kv/rotate.glsl"
#include "vulkan/kv/rows.glsl"
#include "vulkan/kv/write.glsl"
#include "vulkan/kv/token_rows.glsl"

const uint kRms = 0, kMatched = 1, kLeastSquares = 2;

shared uint64_t row_gains[16];
shared int64_t row_offset[16], row_head[16];  // offset and head of the row in x
shared float bounds[256];                     // bounds[c] is the boundary below level c

// Square roots and quotients with errors of about one unit in the last place; those of drivers may err by several.
float root_exact(float x) {
  const float s = sqrt(x);
  if (!(s > 0.0) || isinf(s)) return s;
  return s + fma(-s, s, x) / (2.0 * s);
}
float divide_exact(float a, float b) {
  const float q = a / b;
  return isinf(q) || isnan(q) || q == 0.0 ? q : q + fma(-q, b, a) / b;
}

// The gain of a group from its sums, in N(0,1) units.
float gain_of(uint rule, float yy, float cc, float yc, uint g, bool tiny) {
  const float rms = root_exact(divide_exact(yy, float(g)));
  if (rule == kRms) return rms;
  if (rule == kMatched) return cc > 0.0 ? root_exact(divide_exact(yy, cc)) : rms;
  if (rule == kLeastSquares) return !tiny && cc > 0.0 ? divide_exact(yc, cc) : 0.0;
  return !tiny && yc > 0.0 ? divide_exact(yy, yc) : 0.0;
}

// A team quantises gain group `group` of row r: it replaces the values by codes and stores the gain.
void quantise(uint side, uint r, uint group, uint g) {
  const uint base = r * p.sides[side].D + group * g, lane = lane_number();
  float top = 0;
  for (uint j = lane; j < g; j += kLanes) top = max(top, abs(row_values[base + j]));
  top = max_lanes(top);
  // Scaling by a power of two keeps the squares of very large and very small rows in range.
  const float factor_of = top > 1099511627776.0 ? 8.271806125530277e-25 : top < 9.094947017729282e-13 ? 1.2089258196146292e24 : 1.0;
  float yy = 0;
  for (uint j = lane; j < g; j += kLanes) {
    const float y = row_values[base + j] * factor_of;
    yy = fma(y, y, yy);
  }
  yy = sum_lanes(yy);
  const float norm = root_exact(yy), root = root_exact(float(g));
  const bool tiny = norm / factor_of <= p.sides[side].tiny;
  const float scale = tiny ? 0.0 : divide_exact(root, norm);
  float cc = 0, yc = 0;
  for (uint j = lane; j < g; j += kLanes) {
    const float y = row_values[base + j] * factor_of, z = tiny ? 0.0 : y * scale;
    uint code = 0;
    for (uint step = 1u << (p.sides[side].bits - 1); step > 0; step /= 2)
      if (z > bounds[code + step]) code += step;
    const float level = side_levels[side * 256 + code];
    row_values[base + j] = float(code);
    cc = fma(level, level, cc);
    yc = fma(y, level, yc);
  }
  cc = sum_lanes(cc);
  yc = sum_lanes(yc);
  if (lane == 0 && row_codes[r] != 0) {
    // yy is scaled twice and yc once, so every rule gives the gain of the scaled group; the division undoes the scale.
    float gain = gain_of(p.sides[side].rule, yy, cc, yc, g, tiny) / factor_of * p.sides[side].unit;
    const float most = p.sides[side].most;
    gain = gain > most ? most : gain < -most ? -most : gain;
    const bool finite = (floatBitsToUint(yy) & 0x7f800000u) != 0x7f800000u;
    store(row_gains[r], p.sides[side].gain, int64_t(group), finite ? gain : uintBitsToFloat(0x7fc00000u));
  }
}

void main() {
  const uint64_t number = workgroup_number();
  if (number >= groups) return;
  const uint side = number < uint64_t(p.tokens.groups_k) ? 0 : 1, D = p.sides[side].D, rows = p.tokens.rows[side];
  load_levels();
  for (uint c = thread_number(); c < 1u << p.sides[side].bits; c += kThreads)
    bounds[c] = c > 0 ? 0.5 * (p.sides[side].levels[c - 1] + p.sides[side].levels[c]) : 0.0;
  if (thread_number() < rows) {
    const uint r = thread_number();
    const TokenRow row = token_row(side, number, r);
    row_codes[r] = 0;
    if (row.there && (p.overwritten == 0 || word_at(p.overwritten, uint(row.t)) == 0)) {
      const Location to = locate(row.n, index_at(p.tokens.positions, row.t));
      if (to.block >= 0) {
        const RowAt stored = row_at(side, to.block, row.head, to.row);
        row_codes[r] = stored.codes;
        row_gains[r] = stored.gains;
        row_token[r] = stored.token;
        row_offset[r] = at(p.tokens.x[side], row.t, row.head);
        row_head[r] = row.head;
      }
    }
  }
  barrier();
  const uint64_t mean = p.sides[side].mean;
  const bool coded = p.sides[side].passthrough == 0;
  for (uint e = thread_number(); e < rows * D; e += kThreads) {
    const uint r = e / D, j = e % D;
    float value = 0;
    if (row_codes[r] != 0) {
      value = load(p.tokens.x[side], row_offset[r] + j);
      if (!coded) store(row_codes[r], p.sides[side].value, int64_t(j), value);
      if (mean != 0) value -= float_at(mean, row_head[r] * p.sides[side].mean_head + j);
    }
    row_values[e] = value;
  }
  if (!coded) return;
  barrier();
  rotate_rows(side, false, rows);
  const uint g = p.sides[side].gain_group, in_row = D / g;
  for (uint task = team_number(); task < rows * in_row; task += kThreads / kLanes) quantise(side, task / in_row, task % in_row, g);
  barrier();
  write_codes(side, rows);
}
