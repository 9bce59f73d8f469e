// attention_values for any format, layout and cache: a workgroup sums some rows over all tokens.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "vulkan/kv/kv_side.glsl"
#include "vulkan/common/math.glsl"
#include "vulkan/attention/partials.glsl"
#include "vulkan/attention/query.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const uint kRows = 4;
layout(constant_id = 1) const uint kTokens = 8;
layout(constant_id = 2) const uint kColumns = 4;
layout(constant_id = 3) const uint kRotationK = 2;  // see rotate.glsl
layout(constant_id = 4) const uint kRotationV = 2;
layout(constant_id = 5) const bool kMeanK = true;
#define ROTATIONS(side) (side == 0 ? kRotationK : kRotationV)
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Params {
  Side sides[2];
  CacheIndex index;
  Queries queries;  // q holds the weights
  Outputs outputs;
  uint has_threshold;
  float threshold;
};
layout(push_constant, scalar) uniform Push { Params p; uint64_t groups; };
#include "vulkan/kv/index.glsl"
#include "vulkan/kv/rotate.glsl"
#include "vulkan/kv/rows.glsl"
#include "vulkan/attention/finish.glsl"
#include "vulkan/attention/tile.glsl"
#include "vulkan/attention/values.glsl"

shared float totals[16];

void main() {
  const uint64_t number = workgroup_number();
  if (number >= groups) return;
  const uint64_t rest = quotient(number, uint64_t(p.queries.row_tiles)), n = quotient(rest, uint64_t(p.queries.heads));
  const RowTile rows = row_tile(n, rest - n * uint64_t(p.queries.heads), number - rest * uint64_t(p.queries.row_tiles));
  if (rows.rows == 0) return;
  const int64_t appended = appended_tokens(rows.n);
  const uint columns = uint(min(live_tokens(appended), p.queries.q.sizes[2])), D = p.sides[1].D, thread = thread_number();
  load_levels();
  if (thread < 16) totals[thread] = 0;
  for (uint i = 0; i < 16; ++i) sums[i] = 0;
  for (uint first = 0; first < columns; first += kTokens) {
    const uint count = min(columns - first, kTokens);
    barrier();
    locate_tokens(rows.n, appended, first, count);
    barrier();
    decode_tile(1, rows.hk);
    for (uint e = thread; e < kTokens * kRows; e += kThreads) {
      const uint r = e / kTokens, token = e % kTokens;
      float weight = 0;
      if (r < rows.rows && token < count && token_position[token] >= 0) {
        const QueryRow row = query_row(rows, r);
        weight = load(p.queries.q, at(p.queries.q, row.t, row.hq) + first + token);
        if (p.has_threshold != 0 && !(weight >= p.threshold)) weight = 0;
      }
      weights[token * kRows + r] = weight;
    }
    barrier();
    if (thread < rows.rows) {
      float sum = 0;
      for (uint token = 0; token < count; ++token) sum += weights[token * kRows + thread];
      totals[thread] += sum;
    }
    add_tile(1, count);
  }
  barrier();
  for (uint i = 0; i < kRows * kColumns; ++i) {
    const uint d = thread + i / kRows * kThreads;
    if (d < D) row_values[i % kRows * D + d] = sums[i];
  }
  barrier();
  rotate_rows(1, true, kRows);
  for (uint e = thread; e < rows.rows * D; e += kThreads) {
    const QueryRow row = query_row(rows, e / D);
    store_output(1, row.t, row.hq, rows.hk, e % D, row_values[e], totals[e / D]);
  }
}
