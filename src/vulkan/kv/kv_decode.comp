// kv_decode: a workgroup decodes several rows of one side in shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "vulkan/kv/kv_side.glsl"
#include "vulkan/kv/tokens.glsl"

layout(local_size_x = 128) in;
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Params {
  Side sides[2];
  CacheIndex index;
  TokenRows tokens;
  int64_t rotated;
};
layout(push_constant, scalar) uniform Push { Params p; uint64_t groups; };
#include "vulkan/kv/index.glsl"
#include "vulkan/kv/rotate.glsl"
#include "vulkan/kv/rows.glsl"
#include "vulkan/kv/token_rows.glsl"

shared uint64_t out_codes[16], out_gains[16];  // codes 0: there is no such row
shared uint out_token[16];
shared int64_t out_offset[16], out_head[16];  // offset and head of the row in x; -1: the row is not written

void main() {
  const uint64_t number = workgroup_number();
  if (number >= groups) return;
  const uint side = number < uint64_t(p.tokens.groups_k) ? 0 : 1, D = p.sides[side].D, rows = p.tokens.rows[side];
  load_levels();
  if (thread_number() < rows) {
    const uint r = thread_number();
    const TokenRow row = token_row(side, number, r);
    out_offset[r] = -1;
    out_codes[r] = 0;
    if (row.there) {
      out_offset[r] = at(p.tokens.x[side], row.t, row.head);
      out_head[r] = row.head;
      const Location from = locate(row.n, index_at(p.tokens.positions, row.t));
      if (from.block >= 0) {
        const RowAt stored = row_at(side, from.block, row.head, from.row);
        out_codes[r] = stored.codes;
        out_gains[r] = stored.gains;
        out_token[r] = stored.token;
      }
    }
  }
  barrier();
  for (uint e = thread_number(); e < rows * D / 8; e += kThreads) {
    const uint r = e / (D / 8), j = e % (D / 8) * 8;
    float value[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (out_codes[r] != 0) values_at(side, RowAt(out_codes[r], out_gains[r], out_token[r]), j, value);
    for (uint i = 0; i < 8; ++i) row_values[r * D + j + i] = value[i];
  }
  barrier();
  if (p.rotated == 0) rotate_rows(side, true, rows);
  const bool mean = p.rotated == 0 && p.sides[side].mean != 0;
  for (uint e = thread_number(); e < rows * D; e += kThreads) {
    const uint r = e / D, j = e % D;
    if (out_offset[r] < 0) continue;
    float value = row_values[e];
    if (mean && out_codes[r] != 0) value += float_at(p.sides[side].mean, out_head[r] * p.sides[side].mean_head + j);
    store(p.tokens.x[side], out_offset[r] + j, value);
  }
}
