// attention_scores for any format, layout and cache: a workgroup computes some rows over a span of tokens.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "vulkan/kv/kv_side.glsl"
#include "vulkan/common/math.glsl"
#include "vulkan/attention/partials.glsl"
#include "vulkan/attention/query.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const uint kRows = 4;
layout(constant_id = 1) const uint kTokens = 8;
layout(constant_id = 2) const uint kRotationK = 2;  // see rotate.glsl
layout(constant_id = 3) const uint kRotationV = 2;
layout(constant_id = 4) const bool kMeanK = true;
#define ROTATIONS(side) (side == 0 ? kRotationK : kRotationV)
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Params {
  Side sides[2];
  CacheIndex index;
  Queries queries;
  View scores;
  int64_t spans, span;  // of `span` tokens each
};
layout(push_constant, scalar) uniform Push { Params p; uint64_t groups; };
#include "vulkan/kv/index.glsl"
#include "vulkan/kv/rotate.glsl"
#include "vulkan/kv/rows.glsl"
#include "vulkan/attention/tile.glsl"

void main() {
  uint64_t number = workgroup_number();
  if (number >= groups) return;
  uint64_t rest = quotient(number, uint64_t(p.queries.row_tiles));
  const uint64_t index = number - rest * uint64_t(p.queries.row_tiles);
  uint64_t next = quotient(rest, uint64_t(p.spans));
  const int64_t span = int64_t(rest - next * uint64_t(p.spans));
  const uint64_t n = quotient(next, uint64_t(p.queries.heads));
  const RowTile rows = row_tile(n, next - n * uint64_t(p.queries.heads), index);
  if (rows.rows == 0) return;
  const int64_t appended = appended_tokens(rows.n), live = live_tokens(appended), context = p.scores.sizes[2];
  load_levels();
  load_rows(rows, appended);
  const int64_t last = min((span + 1) * p.span, context);
  for (int64_t first = span * p.span; first < last; first += kTokens) {
    const bool some = first < live;
    if (some) {
      barrier();
      locate_tokens(rows.n, appended, uint(first), uint(min(live - first, int64_t(kTokens))));
      barrier();
      decode_tile(0, rows.hk);
      barrier();
      score_tile(rows.rows);
      barrier();
    }
    for (uint e = thread_number(); e < kTokens * rows.rows; e += kThreads) {
      const uint r = e / kTokens, token = e % kTokens;
      if (first + token >= last) continue;
      const QueryRow row = query_row(rows, r);
      store(p.scores, at(p.scores, row.t, row.hq) + first + token, some ? weights[token * kRows + r] : kMasked);
    }
  }
}
