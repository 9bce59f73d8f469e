// Softmax attention of some query rows over a part of the context, for any format, layout and cache: attention_partials, and
// compressed_attention where no faster shader fits.
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
  Queries queries;
  Outputs outputs;
  Partials out_;
  Splits splits;
};
layout(push_constant, scalar) uniform Push { Params p; uint64_t groups; };
#include "vulkan/kv/index.glsl"
#include "vulkan/kv/rotate.glsl"
#include "vulkan/kv/rows.glsl"
#include "vulkan/attention/finish.glsl"
#include "vulkan/attention/tile.glsl"
#include "vulkan/attention/split.glsl"
#include "vulkan/attention/values.glsl"

shared float row_keep[16], row_total[16], row_factor[16];

// A team turns the tile's scores of row `r` into weights relative to the running maximum m, and adds the weights to their sum l.
// NaN scores give NaN weights, which reach l and the values.
void soften(uint r, inout float m, inout float l) {
  float top = m, sum = 0;
  for (uint token = lane_number(); token < kTokens; token += kLanes) {
    const float score = weights[token * kRows + r];
    top = score > top ? score : top;
  }
  top = max_lanes(top);
  const float reference = top == kMasked ? 0.0 : top, keep = m == kMasked ? 0.0 : exp_exact(m - reference);
  for (uint token = lane_number(); token < kTokens; token += kLanes) {
    const float score = weights[token * kRows + r], weight = score == kMasked ? 0.0 : exp_exact(score - reference);
    weights[token * kRows + r] = weight;
    sum += weight;
  }
  sum = sum_lanes(sum);
  l = fma(l, keep, sum);
  m = top;
  if (lane_number() == 0) row_keep[r] = keep;
}

void write_partials(RowTile rows, int64_t split, float m, float l) {
  const uint D = p.sides[1].D;
  for (uint i = 0; i < kRows * kColumns; ++i) {
    const uint d = thread_number() + i / kRows * kThreads, r = i % kRows;
    if (d >= D || r >= rows.rows) continue;
    const QueryRow row = query_row(rows, r);
    const int64_t t = partial_row(rows, row);
    const int64_t at = t * p.out_.o_token + row.hq * p.out_.o_head + split * p.out_.o_block;
    Float32(address(p.out_.o, at + int64_t(d / 4) * p.out_.o_four + d % 4, 4)).value = sums[i];
  }
  const uint r = team_number();
  if (r >= rows.rows || lane_number() != 0) return;
  const QueryRow row = query_row(rows, r);
  const int64_t t = partial_row(rows, row);
  if (m == kMasked && isnan(l)) m = l;
  Float32(address(p.out_.m, t * p.out_.m_token + row.hq * p.out_.m_head + split * p.out_.m_block, 4)).value = m;
  Float32(address(p.out_.l, t * p.out_.l_token + row.hq * p.out_.l_head + split * p.out_.l_block, 4)).value = l;
}

void write_outputs(RowTile rows, float m, float l) {
  const uint D = p.sides[1].D, team = team_number();
  if (team < rows.rows && lane_number() == 0) {
    const QueryRow row = query_row(rows, team);
    const Finish finish = finish_of(row.hq, m, l);
    row_factor[team] = finish.factor;
    row_total[team] = finish.tokens;
    store_log_sum(row.t, row.hq, finish.log_sum);
  }
  barrier();
  for (uint i = 0; i < kRows * kColumns; ++i) {
    const uint d = thread_number() + i / kRows * kThreads, r = i % kRows;
    if (d < D) row_values[r * D + d] = r < rows.rows ? sums[i] * row_factor[r] : 0.0;
  }
  barrier();
  rotate_rows(1, true, kRows);
  for (uint e = thread_number(); e < rows.rows * D; e += kThreads) {
    const QueryRow row = query_row(rows, e / D);
    store_output(1, row.t, row.hq, rows.hk, e % D, row_values[e], row_total[e / D]);
  }
}

void main() {
  const uint64_t number = workgroup_number();
  if (number >= groups) return;
  const uint64_t rest = quotient(number, uint64_t(p.queries.row_tiles)), next = quotient(rest, uint64_t(p.splits.count));
  const uint64_t n = quotient(next, uint64_t(p.queries.heads));
  const int64_t split = int64_t(rest - next * uint64_t(p.splits.count));
  const RowTile rows = row_tile(n, next - n * uint64_t(p.queries.heads), number - rest * uint64_t(p.queries.row_tiles));
  if (is_skipped(rows)) return;
  const int64_t appended = appended_tokens(rows.n);
  const uint live = uint(live_tokens(appended));
  const bool whole = is_whole(rows);
  if (whole && split > 0) return;
  const Span span = span_of(live, split, whole);
  load_levels();
  load_rows(rows, appended);
  for (uint i = 0; i < 16; ++i) sums[i] = 0;
  const Span seen = seen_of(span, rows, appended, kTokens);
  float m = kMasked, l = 0;  // running maximum and sum of weights of the team's row
  for (uint first = seen.begin; first < seen.end; first += kTokens) {
    const uint count = min(span.end - first, kTokens);
    barrier();
    locate_tokens(rows.n, appended, first, count);
    barrier();
    decode_tile(0, rows.hk);
    barrier();
    score_tile(rows.rows);
    barrier();
    decode_tile(1, rows.hk);
    if (team_number() < kRows) soften(team_number(), m, l);
    barrier();
    for (uint i = 0; i < kRows * kColumns; ++i) sums[i] *= row_keep[i % kRows];
    add_tile(1, count);
  }
  barrier();
  if (whole)
    write_outputs(rows, m, l);
  else
    write_partials(rows, split, m, l);
}
