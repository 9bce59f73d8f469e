// The general decode kernel: queries as fragments, and scores of the keys of a unit.
//
// K is the A operand, tokens in its rows. A lane 4 g + t reads 8 neighbouring coordinates of its two tokens at once, 32 chunk + 8 t
// and up: operands of two mmas of 16 coordinates, or of four of 8. Fragments of queries are in the same order of coordinates. Where D is
// no multiple of 32, the lanes of the last chunk have 2, 4 or 6 coordinates, and zeros in the queries.
#pragma once

#include "cuda/attention/decode_general_pipeline.cuh"
#include "cuda/attention/decode_general_read.cuh"

namespace weft::cuda {

// Where coordinate d of a query is: the chunk, the t of its lane, and its place among the lane's 8.
struct QueryPlace {
  int chunk, t, i;
  __device__ QueryPlace(int d, int D) : chunk(d / 32) {
    const int each = min(8, (D - 32 * chunk) / 4);
    t = d % 32 / each, i = d % 32 % each;
  }
};

// Bytes of a lane's 8 coordinates of a fragment.
__host__ __device__ constexpr int general_fragment_bytes(SideKind k) { return k == SideKind::f32 ? 32 : 16; }

// The queries, each relative to a power of two, as fragments: `planes` numbers whose sum is a query's number. The fragments are zeros
// beforehand. `spare`: 3 D floats of the warp.
template <int U>
__device__ __forceinline__ void place_queries(const GeneralParams& p, const RowTile& rows, uint8_t* fragments, float* spare,
                                              GeneralShared<U>& shared, int warp, int lane) {
  const QueryParams& q = p.queries;
  const int D = p.k().D, bytes = general_fragment_bytes(p.k().kind);
#pragma unroll 1
  for (int r = warp; r < GeneralShared<U>::kRows; r += kGeneralWarps) {
    float from_mean = 0, unit = 0;
    if (r < rows.rows) {
      from_mean = load_query(q, query_row(rows, q.group, r), rows.hk, spare, spare + D, lane);
      __syncwarp();
      float top = 0;
      for (int d = lane; d < D; d += 32) top = fmaxf(top, fabsf(spare[d]));
      unit = __uint_as_float(min(max(__float_as_uint(max_warp(top)) & 0x7f800000u, 27u << 23), 253u << 23));  // 2^-100 to 2^126
      for (int d = lane; d < D; d += 32) {
        const QueryPlace at(d, D);
        float x = spare[d] * (1 / unit);
#pragma unroll 1
        for (int plane = 0; plane < p.planes; ++plane) {
          uint8_t* to = fragments + (((at.chunk * p.planes + plane) * U + r / 8) * 32 + r % 8 * 4 + at.t) * bytes;
          if (p.k().kind == SideKind::f32) {
            const uint32_t part = tf32_part(x);
            reinterpret_cast<uint32_t*>(to)[at.i] = part;
            x -= __uint_as_float(part);
          } else if (p.k().kind == SideKind::bf16) {
            const __nv_bfloat16 part = __float2bfloat16_rn(x);
            reinterpret_cast<__nv_bfloat16*>(to)[at.i] = part;
            x -= __bfloat162float(part);
          } else {
            const __half part = __float2half_rn(x);
            reinterpret_cast<__half*>(to)[at.i] = part;
            x -= __half2float(part);
          }
        }
      }
    }
    if (lane == 0) {
      const float score = score_unit(q.scale, q.mask.has_softcap());
      shared.factor[r] = unit * score * p.k().unit;
      shared.offset[r] = from_mean * score;
    }
    __syncwarp();
  }
}

template <int U>
using GeneralScores = float[U][4];  // tokens `first` and `second` of the lane, for rows 8 u + 2 t and 8 u + 2 t + 1

// Sums of the products of a unit.
template <int U>
struct GeneralKeySums {
  float sum[2][U][4] = {};
};

// What a lane knows of a piece of keys.
struct KeyPiece {
  const uint8_t* data;
  const uint8_t* rows[2];  // of the lane's tokens, in rows
  int first, coordinates;
};

// The chunk from coordinate `first` of the piece on, of uncompressed keys in f32. `fragments`: of the chunk, and the lane's. `count`:
// coordinates of a lane.
template <int U>
__device__ __forceinline__ void multiply_f32_keys(const KeyPiece& piece, int first, int count, int t, const uint8_t* fragments,
                                                  GeneralKeySums<U>& sums) {
  uint32_t x[2][8];
#pragma unroll
  for (int h = 0; h < 2; ++h) row_words<SideKind::f32, false>(piece.rows[h], first + count * t, count, x[h]);
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    FragmentA high[2], low[2];
#pragma unroll
    for (int e = 0; e < 4; ++e) {  // operands: first token, second token, then their next coordinate
      const uint32_t value = x[e % 2][i + e / 2], next = x[e % 2][i + 2 + e / 2];
      high[0].x[e] = tf32_part(__uint_as_float(value)), high[1].x[e] = tf32_part(__uint_as_float(next));
      low[0].x[e] = tf32_part(__uint_as_float(value) - __uint_as_float(high[0].x[e]));
      low[1].x[e] = tf32_part(__uint_as_float(next) - __uint_as_float(high[1].x[e]));
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const uint4 q = four_words_at(fragments + u * 1024 + i * 4), rest = four_words_at(fragments + (U + u) * 1024 + i * 4);
      multiply_tf32(sums.sum[0][u], high[0], q.x, q.y);
      multiply_tf32(sums.sum[1][u], high[1], q.z, q.w);
      multiply_tf32(sums.sum[0][u], high[0], rest.x, rest.y);
      multiply_tf32(sums.sum[1][u], high[1], rest.z, rest.w);
      multiply_tf32(sums.sum[0][u], low[0], q.x, q.y);
      multiply_tf32(sums.sum[1][u], low[1], q.z, q.w);
    }
  }
}

// The same for keys in f16 or bf16, and for codes.
template <SideKind Kind, bool Lanes, int U>
__device__ __forceinline__ void multiply_half_keys(const GeneralSide& side, const LevelReader<Kind, Lanes>& levels, int planes,
                                                   const KeyPiece& piece, int first, int count, const LaneTokens& tokens, int t,
                                                   const uint8_t* fragments, GeneralKeySums<U>& sums) {
  using Half = std::conditional_t<Kind == SideKind::bf16, __nv_bfloat16, __half>;
  uint32_t x[2][4], low[2][4];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if constexpr (!is_coded(Kind)) {
      row_words<Kind, false>(piece.rows[h], first + count * t, count, x[h]);
    } else {
      const Codes codes =
          Lanes ? key_lanes_at(side.bits, piece.data, piece.coordinates, first >> 5, h ? tokens.second : tokens.first, t)
                : codes_at(piece.rows[h], (first + count * t) * levels.field, levels.field);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (Kind == SideKind::pairs) {
          x[h][i] = levels.pair(codes.low, i);
        } else if constexpr (Kind == SideKind::linear) {
          x[h][i] = levels.pair(i < 2 ? codes.low : codes.high, i % 2);
        } else {
          const uint32_t word = i < 2 ? codes.low : codes.high;
          const uint32_t a = levels.level(word, i % 2 * 2), b = levels.level(word, i % 2 * 2 + 1);
          x[h][i] = lower_halves(a, b);
          if constexpr (Kind == SideKind::split_levels) low[h][i] = upper_halves(a, b);
        }
      }
    }
  }
  const auto multiply_plane = [&](int plane) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const uint4 q = four_words_at(fragments + (plane * U + u) * 512);
      multiply<Half>(sums.sum[0][u], {{x[0][0], x[1][0], x[0][1], x[1][1]}}, q.x, q.y);
      multiply<Half>(sums.sum[1][u], {{x[0][2], x[1][2], x[0][3], x[1][3]}}, q.z, q.w);
      if constexpr (Kind == SideKind::split_levels)
        if (plane == 0) {
          multiply<Half>(sums.sum[0][u], {{low[0][0], low[1][0], low[0][1], low[1][1]}}, q.x, q.y);
          multiply<Half>(sums.sum[1][u], {{low[0][2], low[1][2], low[0][3], low[1][3]}}, q.z, q.w);
        }
    }
  };
  if constexpr (is_coded(Kind)) {
    multiply_plane(0);
    multiply_plane(1);
  } else {
#pragma unroll 1
    for (int plane = 0; plane < planes; ++plane) multiply_plane(plane);
  }
}

// Adds the sums to the scores by the gains of a group, and clears them.
template <int U>
__device__ __forceinline__ void take_key_sums(GeneralKeySums<U>& sums, const float (&gain)[2], GeneralScores<U>& s) {
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      s[u][c] = fmaf(sums.sum[0][u][c] + sums.sum[1][u][c], gain[c / 2], s[u][c]);
      sums.sum[0][u][c] = sums.sum[1][u][c] = 0;
    }
}

// All chunks of a piece.
template <SideKind Kind, bool Lanes, int U>
__device__ __forceinline__ void score_piece(const GeneralParams& p, const KeyPiece& piece, const uint8_t* memory,
                                            const LaneTokens& tokens, int lane, const float (&gain)[2][2], GeneralKeySums<U>& sums,
                                            GeneralScores<U>& s) {
  const int t = lane % 4, step = p.planes * U * 32 * general_fragment_bytes(Kind);
  const uint8_t* fragments = memory + p.queries_at + (piece.first >> 5) * step + lane * general_fragment_bytes(Kind);
  const LevelReader<Kind, Lanes> levels(p.k(), KvRole::k, shared_address(memory) + general_tables_at(U), lane);
  const auto multiply_chunk = [&](int first, int count) {
    if constexpr (Kind == SideKind::f32)
      multiply_f32_keys<U>(piece, first, count, t, fragments, sums);
    else
      multiply_half_keys<Kind, Lanes, U>(p.k(), levels, p.planes, piece, first, count, tokens, t, fragments, sums);
    fragments += step;
  };
  const int next_group = p.k().gain_groups == 2 ? p.k().D / 2 - piece.first : -1;
  int first = 0, end = next_group >= 0 && next_group < piece.coordinates ? next_group : piece.coordinates;
#pragma unroll 1
  while (true) {
#pragma unroll 1
    for (; first + 32 <= end; first += 32) multiply_chunk(first, 8);
    if (end == piece.coordinates) break;
    take_key_sums<U>(sums, gain[0], s);
    end = piece.coordinates;
  }
  if constexpr (!Lanes)
    if (first < end) multiply_chunk(first, (end - first) >> 2);
}

// Calls `body` with a side's kind and order as template arguments.
template <class Body>
__device__ __forceinline__ void with_kind(const GeneralSide& side, Body&& body) {
  switch (side.kind) {
    case SideKind::f16: return body.template operator()<SideKind::f16, false>();
    case SideKind::bf16: return body.template operator()<SideKind::bf16, false>();
    case SideKind::f32: return body.template operator()<SideKind::f32, false>();
    case SideKind::pairs: return body.template operator()<SideKind::pairs, false>();
    case SideKind::levels:
      return side.lanes ? body.template operator()<SideKind::levels, true>() : body.template operator()<SideKind::levels, false>();
    case SideKind::split_levels:
      return side.lanes ? body.template operator()<SideKind::split_levels, true>()
                        : body.template operator()<SideKind::split_levels, false>();
    case SideKind::linear:
      return side.lanes ? body.template operator()<SideKind::linear, true>() : body.template operator()<SideKind::linear, false>();
  }
}

// Gains of the lane's tokens at a slot: gain[group][token]. Without gains, 1.
__device__ __forceinline__ void read_gains(const GeneralSide& side, const uint8_t* slot, const LaneTokens& tokens,
                                           float (&gain)[2][2]) {
  const auto* gains = reinterpret_cast<const float*>(slot);
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    const bool some = group < side.gain_groups;
    gain[group][0] = some ? gains[group * kGeneralTokens + tokens.first] : 1.0f;
    gain[group][1] = some ? gains[group * kGeneralTokens + tokens.second] : 1.0f;
  }
}

// Scores of the next unit, without mask.
template <int U>
__device__ __forceinline__ void score_keys(GeneralPipeline& pipeline, const GeneralShared<U>& shared, const uint8_t* memory,
                                           const LaneTokens& tokens, int lane, GeneralScores<U>& s) {
  const GeneralParams& p = pipeline.p;
  const GeneralSide& side = p.k();
#pragma unroll
  for (auto& row : s)
#pragma unroll
    for (float& score : row) score = 0;
  GeneralKeySums<U> sums;
  float gain[2][2];
#pragma unroll 1
  for (int i = 0; i < side.pieces; ++i) {
    const uint8_t* slot = pipeline.wait_next();
    if (i == 0) read_gains(side, slot, tokens, gain);
    const uint8_t* data = slot + kGeneralGainBytes;
    const auto row_of = [&](int token) { return data + (side.adjacent ? token : staged_row(token)) * side.stride; };
    const int first = i * side.piece;
    const KeyPiece piece{data, {row_of(tokens.first), row_of(tokens.second)}, first, min(side.piece, side.D - first)};
    with_kind(side,
              [&]<SideKind Kind, bool Lanes>() { score_piece<Kind, Lanes, U>(p, piece, memory, tokens, lane, gain, sums, s); });
    pipeline.release();
  }
  const bool halves = side.gain_groups == 2;
  take_key_sums<U>(sums, {halves ? gain[1][0] : gain[0][0], halves ? gain[1][1] : gain[0][1]}, s);
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int row = 8 * u + lane % 4 * 2 + c % 2;
      s[u][c] = fmaf(s[u][c], shared.factor[row], shared.offset[row]);
    }
}

}  // namespace weft::cuda
