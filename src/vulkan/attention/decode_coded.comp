// compressed_attention of a few query rows over coded tiles in lanes order. A step takes 256 tokens: a thread scores two tokens for
// all query rows, then sums two coordinates of the values. Tables in shared memory turn codes into levels.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "vulkan/kv/kv_side.glsl"
#include "vulkan/common/math.glsl"
#include "vulkan/attention/partials.glsl"
#include "vulkan/attention/query.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const uint kD = 128;   // of K and V: 64, 128 or 256
layout(constant_id = 1) const uint kFours = 1;  // fours of query rows: 1 or 2
layout(constant_id = 2) const uint kBitsK = 4;
layout(constant_id = 3) const uint kBitsV = 4;
layout(constant_id = 4) const uint kRotationK = 2;  // see rotate.glsl
layout(constant_id = 5) const uint kRotationV = 2;
layout(constant_id = 6) const bool kMeanK = true;
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

const uint kRows = 4 * kFours;
const uint kStep = 256;                        // tokens of a step
const uint kPairs = kD / 2;                    // pairs of coordinates d, d + kPairs
const uint kParts = kThreads / kPairs;         // threads that share a pair: each sums a part of the tokens
const float kLog2e = 1.44269504;

shared float spare_row[256];
#define SPARE_ROW spare_row
#include "vulkan/kv/index.glsl"
#include "vulkan/kv/rotate.glsl"
#include "vulkan/kv/rows.glsl"
#include "vulkan/attention/finish.glsl"
#include "vulkan/attention/query_rows.glsl"
#include "vulkan/attention/split.glsl"

shared vec4 queries4[512];          // [kD][kFours]
shared vec4 weights4[512];          // [kStep][kFours]; after the last step, sums of the parts
shared vec4 team_values[32];        // [16][kFours]: maxima; after the last step, sums of weights
shared uint64_t tiles_v[2][4];      // addresses of V's tiles, by parity of the step; 0: no such tile
shared float row_total[8], row_factor[8];

// Eight neighbouring codes of `bits` bits in lanes order, 8 octet .. 8 octet + 7: coordinates of a token of K, or tokens of a
// coordinate of V. `first` is the index of the lane's word in the first group of vectors, `apart` the distance to its word in the
// next group.
void octet_codes(uint bits, uint64_t tile, uint octet, uint first, uint apart, out uint code[8]) {
  uint64_t plane = tile;
  if (bits == 8) {
    for (uint half_of = 0; half_of < 2; ++half_of) {
      const uint word = word_at(plane, first + (2 * octet + half_of) * apart);
      for (uint i = 0; i < 4; ++i) code[4 * half_of + i] = word >> (8 * i) & 255;
    }
    return;
  }
  for (uint e = 0; e < 8; ++e) code[e] = 0;
  uint shift = 0;
  for (uint width = 4; width > 0; width /= 2) {
    if ((bits & width) == 0) continue;
    const uint word = word_at(plane, first + octet * width / 4 * apart) >> octet * 8 % (32 / width) / 4 * width;
    for (uint e = 0; e < 8; ++e) code[e] |= (word >> (e % 4 * 8 + e / 4 * width) & ((1u << width) - 1)) << shift;
    shift += width;
    plane += uint64_t(kTileTokens * kD * width / 8);
  }
}

// Address of the sequence's tile `index`, in the order of storage; 0 where there is none.
uint64_t tile_at(uint side, int64_t n, int64_t hk, uint index) {
  const Location at = locate(n, int64_t(index) * kTileTokens);
  if (at.block < 0) return 0;
  return p.sides[side].codes + uint64_t(at.block * p.sides[side].codes_block + hk * p.sides[side].codes_head +
                                        int64_t(at.row / kTileTokens) * p.sides[side].codes_row);
}

float token_gain(uint side, uint bits, uint64_t tile, uint token) {
  return load(tile + uint64_t(kTileTokens * kD * bits / 8), p.sides[side].gain, int64_t(token)) * p.sides[side].gain_factor;
}

// Position of the token in storage row `row` of a ring that has overwritten tokens.
uint ring_position(uint row, int64_t appended) {
  const uint pinned = uint(p.index.pinned);
  if (row < pinned) return row;
  const uint ring = uint(p.index.rows) - pinned, lost = uint(appended - p.index.rows), oldest = lost % ring, ahead = row - pinned;
  return pinned + lost + (ahead >= oldest ? ahead - oldest : ahead + ring - oldest);
}

// Dot products of two keys with all query rows; 0 for a token without a tile. Loops over octets are not unrolled: drivers would
// compile the unrolled loops for seconds.
void multiply(const uint64_t tile[2], uint token, out vec4 sums[2][2]) {
  for (uint t = 0; t < 2; ++t)
    for (uint f = 0; f < 2; ++f) sums[t][f] = vec4(0);
  [[dont_unroll]] for (uint octet = 0; octet < kD / 8; ++octet) {
    uint code[2][8];
    for (uint t = 0; t < 2; ++t) {
      for (uint e = 0; e < 8; ++e) code[t][e] = 0;
      if (tile[t] != 0) octet_codes(kBitsK, tile[t], octet, token, kTileTokens, code[t]);
    }
    for (uint e = 0; e < 8; ++e) {
      const float first = side_levels[code[0][e]], second = side_levels[code[1][e]];
      for (uint f = 0; f < kFours; ++f) {
        const vec4 q = queries4[(octet * 8 + e) * kFours + f];
        sums[0][f] = fma(q, vec4(first), sums[0][f]);
        sums[1][f] = fma(q, vec4(second), sums[1][f]);
      }
    }
  }
}

// Scores of a token from its dot products with rows 4 f .. 4 f + 3; -inf where a row must not see the token.
vec4 scores_of(RowTile rows, vec4 products, float gain, uint f, uint position) {
  vec4 scores = vec4(kMasked);
  for (uint i = 0; i < 4; ++i) {
    const uint r = 4 * f + i;
    if (r < rows.rows && int(position) >= seen_first[r] && int(position) < seen_end[r])
      scores[i] = softcapped(p.queries.scale * fma(gain, products[i], from_mean[r]));
  }
  return scores;
}

vec4 max_lanes4(vec4 x) { return vec4(max_lanes(x.x), max_lanes(x.y), max_lanes(x.z), max_lanes(x.w)); }
vec4 sum_lanes4(vec4 x) { return vec4(sum_lanes(x.x), sum_lanes(x.y), sum_lanes(x.z), sum_lanes(x.w)); }

// Weights e^(score - reference); 0 for masked scores.
vec4 weights_of(vec4 scores, vec4 reference) {
  vec4 weight;
  for (uint i = 0; i < 4; ++i) weight[i] = scores[i] == kMasked ? 0.0 : exp2((scores[i] - reference[i]) * kLog2e);
  return weight;
}

// Adds the step's weighted values of the thread's two coordinates.
void add_values(uint parity, uint pair, uint part, inout vec4 sums[4]) {
  [[dont_unroll]] for (uint octet = part; octet < kStep / 8; octet += kParts) {
    const uint64_t tile = tiles_v[parity][octet / 8];
    if (tile == 0) continue;
    uint low[8], high[8];
    octet_codes(kBitsV, tile, octet % 8, pair, kD, low);
    octet_codes(kBitsV, tile, octet % 8, pair + kPairs, kD, high);
    for (uint e = 0; e < 8; ++e) {
      const vec2 levels = vec2(side_levels[256 + low[e]], side_levels[256 + high[e]]);
      for (uint f = 0; f < kFours; ++f) {
        const vec4 weight = weights4[(octet * 8 + e) * kFours + f];
        sums[f] = fma(weight, vec4(levels.x), sums[f]);
        sums[2 + f] = fma(weight, vec4(levels.y), sums[2 + f]);
      }
    }
  }
}

// Gathers the `sums` of all parts in row_values, [kRows][kD], and the sums of weights `l` of all threads in `total`.
void gather(uint pair, uint part, const vec4 sums[4], vec4 l[2], out vec4 total[2]) {
  for (uint f = 0; f < kFours; ++f) {
    const vec4 of_team = sum_lanes4(l[f]);
    if (lane_number() == 0) team_values[team_number() * kFours + f] = of_team;
  }
  barrier();
  for (uint f = 0; f < kFours; ++f) {
    weights4[(part * kD + pair) * kFours + f] = sums[f];
    weights4[(part * kD + pair + kPairs) * kFours + f] = sums[2 + f];
    total[f] = vec4(0);
    for (uint k = 0; k < kThreads / kLanes; ++k) total[f] += team_values[k * kFours + f];
  }
  barrier();
  for (uint e = thread_number(); e < kD * kFours; e += kThreads) {
    vec4 sum = vec4(0);
    for (uint k = 0; k < kParts; ++k) sum += weights4[k * kD * kFours + e];
    for (uint i = 0; i < 4; ++i) row_values[(e % kFours * 4 + i) * kD + e / kFours] = sum[i];
  }
  barrier();
}

void write_partials(RowTile rows, int64_t split, const vec4 m[2], const vec4 l[2]) {
  for (uint e = thread_number(); e < rows.rows * kD; e += kThreads) {
    const uint d = e % kD;
    const QueryRow row = query_row(rows, e / kD);
    const int64_t at = partial_row(rows, row) * p.out_.o_token + row.hq * p.out_.o_head + split * p.out_.o_block;
    Float32(address(p.out_.o, at + int64_t(d / 4) * p.out_.o_four + d % 4, 4)).value = row_values[e];
  }
  const uint r = thread_number();
  if (r >= rows.rows) return;
  const QueryRow row = query_row(rows, r);
  const int64_t t = partial_row(rows, row);
  const float top = m[r / 4][r % 4], sum = l[r / 4][r % 4];
  Float32(address(p.out_.m, t * p.out_.m_token + row.hq * p.out_.m_head + split * p.out_.m_block, 4)).value =
      top == kMasked && isnan(sum) ? sum : top;
  Float32(address(p.out_.l, t * p.out_.l_token + row.hq * p.out_.l_head + split * p.out_.l_block, 4)).value = sum;
}

void write_outputs(RowTile rows, const vec4 m[2], const vec4 l[2]) {
  const uint r = thread_number();
  if (r < rows.rows) {
    const QueryRow row = query_row(rows, r);
    const Finish finish = finish_of(row.hq, m[r / 4][r % 4], l[r / 4][r % 4]);
    row_factor[r] = finish.factor;
    row_total[r] = finish.tokens;
    store_log_sum(row.t, row.hq, finish.log_sum);
  }
  barrier();
  for (uint e = thread_number(); e < rows.rows * kD; e += kThreads) row_values[e] *= row_factor[e / kD];
  barrier();
  rotate_rows(1, true, kRows);
  for (uint e = thread_number(); e < rows.rows * kD; e += kThreads) {
    const QueryRow row = query_row(rows, e / kD);
    store_output(1, row.t, row.hq, rows.hk, e % kD, row_values[e], row_total[e / kD]);
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
  const uint live = uint(live_tokens(appended)), thread = thread_number();
  const bool whole = is_whole(rows), wrapped = p.index.kind == kRing && appended > p.index.rows;
  if (whole && split > 0) return;
  load_levels();
  load_rows(rows, appended);
  for (uint e = thread; e < kD * kFours; e += kThreads) {
    vec4 four;
    for (uint i = 0; i < 4; ++i) four[i] = row_values[(e % kFours * 4 + i) * kD + e / kFours];
    queries4[e] = four;
  }
  const Span seen = seen_of(span_of(live, split, whole), rows, appended, kTileTokens);
  const uint pair = thread % kPairs, part = thread / kPairs;
  vec4 sums[4] = {vec4(0), vec4(0), vec4(0), vec4(0)}, m[2] = {vec4(kMasked), vec4(kMasked)}, l[2] = {vec4(0), vec4(0)};
  barrier();
  uint parity = 0;
  [[dont_unroll]] for (uint first = seen.begin; first < seen.end; first += kStep, parity ^= 1) {
    // The thread's two tokens have the same index in their tiles.
    const uint token = thread % kTileTokens;
    uint64_t tile_k[2];
    vec4 scores[2][2];
    float gain_v[2] = {0, 0};
    for (uint t = 0; t < 2; ++t) {
      const uint row = first + t * kThreads + thread, index = row / kTileTokens;
      tile_k[t] = row < seen.end ? tile_at(0, rows.n, rows.hk, index) : 0;
      const uint64_t tile_v = row < seen.end ? tile_at(1, rows.n, rows.hk, index) : 0;
      if (token == 0) tiles_v[parity][(row - first) / kTileTokens] = tile_v;
      if (tile_v != 0) gain_v[t] = token_gain(1, kBitsV, tile_v, token);
    }
    multiply(tile_k, token, scores);
    for (uint t = 0; t < 2; ++t) {
      const uint row = first + t * kThreads + thread;
      const float gain = tile_k[t] != 0 ? token_gain(0, kBitsK, tile_k[t], token) : 0.0;
      const uint position = tile_k[t] == 0 ? 0x80000000u : wrapped ? ring_position(row, appended) : row;  // seen by no row
      for (uint f = 0; f < kFours; ++f) scores[t][f] = scores_of(rows, scores[t][f], gain, f, position);
    }
    for (uint f = 0; f < kFours; ++f) {
      const vec4 top = max_lanes4(max(scores[0][f], scores[1][f]));
      if (lane_number() == 0) team_values[team_number() * kFours + f] = top;
    }
    barrier();
    for (uint f = 0; f < kFours; ++f) {
      vec4 top = m[f];
      for (uint k = 0; k < kThreads / kLanes; ++k) top = max(top, team_values[k * kFours + f]);
      const vec4 reference = mix(top, vec4(0), equal(top, vec4(kMasked)));
      const vec4 keep = weights_of(m[f], reference);
      m[f] = top;
      vec4 added = vec4(0);
      sums[f] *= keep;
      sums[2 + f] *= keep;
      for (uint t = 0; t < 2; ++t) {
        const vec4 weight = weights_of(scores[t][f], reference);
        added += weight;
        // A weight of 0 hides the gain, because a masked token's gain may be NaN.
        weights4[(t * kThreads + thread) * kFours + f] = mix(weight * gain_v[t], vec4(0), equal(weight, vec4(0)));
      }
      l[f] = fma(l[f], keep, added);
    }
    barrier();
    add_values(parity, pair, part, sums);
  }
  barrier();
  vec4 total[2];
  gather(pair, part, sums, l, total);
  if (whole)
    write_outputs(rows, m, total);
  else
    write_partials(rows, split, m, total);
}
