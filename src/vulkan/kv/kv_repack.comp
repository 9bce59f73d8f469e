// kv_repack: a workgroup copies several rows of one side, from sides[0] to sides[1].
#version 460
#extension GL_GOOGLE_include_directive : require
#include "vulkan/kv/kv_side.glsl"

layout(local_size_x = 128) in;
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Params {
  Side sides[2];
  int64_t heads, capacity, count;  // count: rows of the cache
  int64_t rows;                    // rows of a workgroup
};
layout(push_constant, scalar) uniform Push { Params p; uint64_t groups; };
#include "vulkan/kv/rotate.glsl"
#include "vulkan/kv/rows.glsl"
#include "vulkan/kv/write.glsl"

shared uint64_t from_codes[16], from_gains[16], to_gains[16];
shared uint from_token[16];

void copy_pairs(uint64_t from, uint64_t to, uint bytes, uint first, uint step) {
  for (uint i = first; i < bytes / 2; i += step) Bits16(to + uint64_t(2 * i)).value = Bits16(from + uint64_t(2 * i)).value;
}

void main() {
  const uint64_t number = workgroup_number();
  if (number >= groups) return;
  const uint D = p.sides[0].D, rows = uint(p.rows), lane = lane_number(), teams = kThreads / kLanes;
  if (thread_number() < rows) {
    const uint r = thread_number();
    const int64_t item = int64_t(number) * p.rows + r;
    row_codes[r] = 0;
    if (item < p.count) {
      const int64_t of_head = int64_t(quotient(uint64_t(item), uint64_t(p.capacity))), row = item - of_head * p.capacity;
      const int64_t block = int64_t(quotient(uint64_t(of_head), uint64_t(p.heads))), head = of_head - block * p.heads;
      const RowAt from = row_at(0, block, head, uint(row)), to = row_at(1, block, head, uint(row));
      from_codes[r] = from.codes;
      from_gains[r] = from.gains;
      from_token[r] = from.token;
      row_codes[r] = to.codes;
      to_gains[r] = to.gains;
      row_token[r] = to.token;
    }
  }
  barrier();
  const bool coded = p.sides[0].passthrough == 0;
  for (uint r = team_number(); r < rows; r += teams) {
    if (row_codes[r] == 0) continue;
    if (coded)
      copy_pairs(from_gains[r], to_gains[r], p.sides[0].gain_bytes, lane, kLanes);
    else
      copy_pairs(from_codes[r], row_codes[r], p.sides[0].code_bytes, lane, kLanes);
  }
  if (!coded) return;
  for (uint e = thread_number(); e < rows * D / 8; e += kThreads) {
    const uint r = e / (D / 8), j = e % (D / 8) * 8;
    if (row_codes[r] == 0) continue;
    uint code[8];
    codes_at(0, RowAt(from_codes[r], from_gains[r], from_token[r]), j, code);
    for (uint i = 0; i < 8; ++i) row_values[r * D + j + i] = float(code[i]);
  }
  barrier();
  write_codes(1, rows);
}
