// Attention over f16 or bf16 as they are: tensor-core products whose operands carry all of f32's bits that matter.
//
// A warp takes 16 tokens at a time, of its own, and copies keys and values ahead of time into a ring of shared memory; the warps of a
// block join their sums at the end. Both products are transposed, tokens and coordinates in the 16 rows of an instruction, query rows in
// its 8 columns, twice:
//   S = K q^T: keys as A, queries as B, which lie in shared memory in fragments.
//   o^T = V^T w^T: values as A, transposed on their way from shared memory; weights as B, which are the scores, transposed.
// Memory is what such a kernel waits for, instructions are plenty: queries and weights are sums of numbers of 16 bits, as many as make up
// f32 (or what q holds), so that nothing is rounded that f32 would keep.
#pragma once

#include "cuda/attention/decode_uncompressed.h"
#include "cuda/attention/work_split.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/pdl.cuh"

namespace weft::cuda {

struct UncompressedSide : SideAddresses {  // tile: of 64 rows
  int64_t row = 0;
};

struct UncompressedParams {
  QueryParams queries;
  UncompressedSide k, v;
  PartialsPlan plan;
  int64_t row_tiles = 0, most_rows = 0;  // most_rows: sequences with more are left alone
  int planes = 1;                        // numbers of 16 bits that make up a query's
};

template <class Half, int D>
struct UncompressedShape {
  static constexpr int kSteps = D / 16, kRowBlocks = kUncompressedRows / 8;
  static constexpr int kStageBytes = kUncompressedTokens * D * 2;          // bytes of keys or values of a turn
  static constexpr int kStages = (24 << 10) / kStageBytes;                 // of a warp
  static constexpr int kPlanes = std::is_same_v<Half, __half> ? 2 : 3;     // of q, at most
  static constexpr int kQueryBytes = kPlanes * kSteps * kRowBlocks * 256;  // q in fragments
  static constexpr int kMergeRow = D + 4;                                  // floats: lanes of an access meet different banks
  static constexpr int kMergeBytes =
      kUncompressedWarps * kUncompressedRows * kMergeRow * static_cast<int>(sizeof(float));  // lies over the rings
  static constexpr int kStagesBytes = kUncompressedWarps * kStages * kStageBytes;
  static constexpr int kSharedBytes = kQueryBytes + (kStagesBytes > kMergeBytes ? kStagesBytes : kMergeBytes);
};

template <class Half, int D>
__global__ void __launch_bounds__(32 * kUncompressedWarps, 1)
    decode_uncompressed_kernel(const __grid_constant__ UncompressedParams p) {
  using Shape = UncompressedShape<Half, D>;
  using Slot = Tile<D>;
  constexpr int kWarps = kUncompressedWarps, Rows = kUncompressedRows, kTokens = kUncompressedTokens;
  constexpr int kSteps = Shape::kSteps, U = Shape::kRowBlocks, kStages = Shape::kStages;
  constexpr float kOffset = 9;  // weights are multiplied by 2^kOffset, which keeps small ones from f16's underflow
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ float row_factor[Rows], row_bad[Rows];
  __shared__ float row_m[kWarps][Rows], row_l[kWarps][Rows];
  pdl_wait();
  pdl_launch_dependents();
  const QueryParams& q = p.queries;
  const BlockItem item(q, p.row_tiles, p.plan.count);
  const RowTile rows = row_tile(q.queries.sequences, q.T, q.longest, q.group, item.n, item.hk, item.row_tile, Rows);
  if (rows.rows == 0 || rows.range.length() * q.group > p.most_rows) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  constexpr int kOwn = D / 32;  // coordinates of a query in a lane
  uint32_t query_bits[kOwn] = {};
  if (warp < rows.rows) load_query_bits<kOwn>(q.queries.q, query_row(rows, q.group, warp), lane, query_bits);
  CacheUnits<kTokens> cache(q, item);

  // What the rows see: any of them, and all of them.
  VisibleRange mine = kSeesNothing;
  if (lane < rows.rows) mine = seen_by(q, rows, cache.appended, query_row(rows, q.group, lane).t);
  const VisibleRange any = seen_by_any(mine, lane < rows.rows), all = seen_by_all(mine, lane < rows.rows);

  // This block's tokens, of which the warps take turns; their copies: keys of a turn, its values, keys of the next turn.
  cache.take(item, p.plan.count, any);
  const int first_unit = cache.first_tile + warp, last_unit = cache.last_tile, live = static_cast<int>(cache.live);
  uint8_t* const warp_ring = shared + Shape::kQueryBytes + warp * (kStages * Shape::kStageBytes);
  constexpr int kPieces = Slot::kPieces, kAtOnce = 32 / kPieces,
                kCopies = kTokens / kAtOnce;  // kAtOnce: tokens of one copy of a warp
  const int own_token = lane / kPieces, own_piece = lane % kPieces;
  const auto own_place = [&](int c) { return Slot::offset(c * kAtOnce + own_token, own_piece); };
  const auto block_of = [&](int unit) { return unit < last_unit ? static_cast<int>(cache.block_of(q, unit)) : -1; };
  int next_unit = first_unit, next_slot = 0, block = block_of(next_unit), block_after = block_of(next_unit + kWarps);
  uint32_t missing = 0;  // bit i: turn i (of 32 neighbours) has no page
  bool values_next = false;
  const auto copy_next = [&] {
    if (next_unit < last_unit) {
      const UncompressedSide& side = values_next ? p.v : p.k;
      const int alive = block >= 0 ? live - next_unit * kTokens : 0;
      const unsigned row = (cache.paged ? next_unit % cache.tiles_per_page : static_cast<unsigned>(next_unit)) * kTokens;
      const uint8_t* from = side.data + own_piece * 16;
      if (alive > 0)
        from +=
            block * side.block + cache.hk * side.head + row / kTileTokens * side.tile + (row % kTileTokens + own_token) * side.row;
      const uint32_t to = shared_address(warp_ring + next_slot * Shape::kStageBytes);
      const int64_t step = kAtOnce * side.row;
#pragma unroll 4
      for (int c = 0; c < kCopies; ++c) {
        const bool lives = c * kAtOnce + own_token < alive;
        cp_async(to + own_place(c), lives ? from + c * step : side.data, lives);
      }
    }
    cp_async_commit();
    if (++next_slot == kStages) next_slot = 0;
    if (values_next) {
      next_unit += kWarps;
      block = block_after;
      block_after = block_of(next_unit + kWarps);
    } else {
      const uint32_t bit = 1u << ((next_unit - first_unit) / kWarps % 32);
      missing = block < 0 ? missing | bit : missing & ~bit;
    }
    values_next = !values_next;
  };
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) copy_next();

    // The queries, relative to a power of two each, in fragments: as many numbers of 16 bits as make them up.
#pragma unroll 1
  for (int r = warp; r < Rows; r += kWarps) {
    float x[kOwn] = {}, unit = 0, bad = 0;  // bad: NaN where q holds NaN or infinity, and so are its scores then
    if (r < rows.rows) {
      if (r > warp) load_query_bits<kOwn>(q.queries.q, query_row(rows, q.group, r), lane, query_bits);
      float top = 0;
#pragma unroll
      for (int e = 0; e < kOwn; ++e) {
        x[e] = bits_to_float(query_bits[e], q.queries.q.dtype);
        top = fmaxf(top, fabsf(x[e]));
        bad += x[e] * 0.0f;
      }
      bad = sum_warp(bad);
      unit = __uint_as_float(min(max(__float_as_uint(max_warp(top)) & 0x7f800000u, 27u << 23), 253u << 23));  // 2^-100 to 2^126
#pragma unroll
      for (int e = 0; e < kOwn; ++e) x[e] *= 1 / unit;
    }
#pragma unroll 1
    for (int plane = 0; plane < p.planes; ++plane) {
#pragma unroll
      for (int e = 0; e < kOwn; e += 2) {
        const int c = lane * kOwn + e;
        const uint32_t pair = pack<Half>(x[e], x[e + 1]);
        const float2 taken = unpack<Half>(pair);
        x[e] -= taken.x, x[e + 1] -= taken.y;
        uint8_t* fragment = shared + ((plane * kSteps + c / 16) * U + r / 8) * 256 + (r % 8 * 4 + c % 8 / 2) * 8;
        *reinterpret_cast<uint32_t*>(fragment + c % 16 / 8 * 4) = pair;
      }
    }
    if (lane == 0) {
      row_factor[r] = unit * score_unit(q.scale, q.mask.softcap.has_value());
      row_bad[r] = bad;
    }
  }
  __syncthreads();
  const auto row_of = [&](int u, int e) { return 8 * u + 2 * t + e; };
  float factor[U][2], bad[U][2];
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      factor[u][e] = row_factor[row_of(u, e)];
      bad[u][e] = row_bad[row_of(u, e)];
    }
  const uint2* fragments = reinterpret_cast<const uint2*>(shared) + lane;

  float o[U][D / 16][4] = {};  // coordinates 16 m + g and 8 more, of rows 2 t and 2 t + 1
  RunningSoftmax softmax[U][2];
  const LdmatrixLane place(lane);
  int slot = 0;
  const auto next_place = [&] {
    const uint32_t at = shared_address(warp_ring + slot * Shape::kStageBytes);
    if (++slot == kStages) slot = 0;
    return at;
  };
  for (int i = 0; first_unit + i * kWarps < last_unit; ++i) {
    const int unit = first_unit + i * kWarps;
    cp_async_wait<kStages - 1>();
    __syncwarp();
    const uint32_t keys = next_place();
    float s[U][4];  // tokens g and g + 8, of rows 2 t and 2 t + 1
    {
      float sums[U][2][4] = {};
#pragma unroll 1
      for (int plane = 0; plane < p.planes; ++plane) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          FragmentA a;
          ldmatrix(a.x, keys + Slot::offset(place.across_row(), 2 * step + place.across_piece()));
#pragma unroll
          for (int u = 0; u < U; ++u) {
            const uint2 b = fragments[((plane * kSteps + step) * U + u) * 32];
            multiply<Half>(sums[u][step % 2], a, b.x, b.y);
          }
        }
      }
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[u][c] = fmaf(sums[u][0][c] + sums[u][1][c], factor[u][c % 2], bad[u][c % 2]);
    }
    __syncwarp();
    copy_next();

    // Masks, where somebody is not to see something.
    const int first_token = unit * kTokens, end_token = first_token + kTokens;
    const bool there = !(missing >> i % 32 & 1);
    const bool whole = !cache.ring && first_token >= all.first && end_token <= all.end && end_token <= live && there;
    bool hides = false;  // a token that lives from a row that counts
    if (!whole || q.mask.softcap) {
      const bool wrapped = cache.ring && cache.appended > q.index.rows;
      const RingPositions around(q.index, cache.appended);
      int at[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first_token + g + 8 * h;
        at[h] = !there || row >= live ? -1 : wrapped ? around.of(row) : row;
      }
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int row = row_of(u, c % 2), position = at[c / 2];
          const VisibleRange seen{__shfl_sync(0xffffffffu, mine.first, row), __shfl_sync(0xffffffffu, mine.end, row)};
          if (q.mask.softcap) s[u][c] = softcapped(s[u][c], q.mask) * kLog2e;
          const bool hidden = seen.hides(position);
          hides |= hidden && position >= 0 && row < rows.rows;
          if (hidden) s[u][c] = kMasked;
        }
    }

    cp_async_wait<kStages - 1>();
    __syncwarp();
    const uint32_t values = next_place();
    if (__any_sync(0xffffffffu, hides)) {
      // Values that are no numbers must not reach rows that do not see them: they are taken out, and their tokens' scores are none.
      uint32_t tokens = 0;
#pragma unroll 1
      for (int c = 0; c < kCopies; ++c) {
        auto* piece = reinterpret_cast<uint4*>(__cvta_shared_to_generic(values + own_place(c)));
        const uint4 x = *piece;
        if ((finite_pair<Half>(x.x) & finite_pair<Half>(x.y) & finite_pair<Half>(x.z) & finite_pair<Half>(x.w)) == 3) continue;
        *piece = {};
        tokens |= 1u << (c * kAtOnce + own_token);
      }
      tokens = __reduce_or_sync(0xffffffffu, tokens);
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (tokens >> (g + c / 2 * 8) & 1 && s[u][c] != kMasked) s[u][c] = NAN;
      __syncwarp();
    }

    // Weights, relative to a score that none so far passes by much.
    bool passed = false;
    float top[U][2];
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        top[u][e] = fmaxf(s[u][e], s[u][2 + e]);
        passed |= softmax[u][e].exceeded_by(top[u][e]);
      }
    if (__any_sync(0xffffffffu, passed)) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        float keep[2] = {1, 1};
#pragma unroll
        for (int e = 0; e < 2; ++e) softmax[u][e].raise(max_over_lanes<4, 32>(top[u][e]), keep[e]);
#pragma unroll
        for (int m = 0; m < D / 16; ++m)
#pragma unroll
          for (int c = 0; c < 4; ++c) o[u][m][c] *= keep[c % 2];
      }
    }
    constexpr int kParts = 2;  // numbers of 16 bits that make up a weight
    uint32_t weights[U][kParts][2];
#pragma unroll
    for (int u = 0; u < U; ++u) {
#pragma unroll
      for (int c = 0; c < 4; ++c) s[u][c] = add_weight(s[u][c] - (softmax[u][c % 2].reference() - kOffset), softmax[u][c % 2].sum);
#pragma unroll
      for (int part = 0; part < kParts; ++part)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t pair = pack<Half>(s[u][2 * h], s[u][2 * h + 1]);
          const float2 taken = unpack<Half>(pair);
          s[u][2 * h] -= taken.x, s[u][2 * h + 1] -= taken.y;
          weights[u][part][h] = transpose(pair);
        }
    }
#pragma unroll
    for (int m = 0; m < D / 16; ++m) {
      FragmentA a;
      ldmatrix_trans(a.x, values + Slot::offset(place.row(), 2 * m + place.piece()));
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int part = 0; part < kParts; ++part) multiply<Half>(o[u][m], a, weights[u][part][0], weights[u][part][1]);
    }
    __syncwarp();
    copy_next();
  }

  // The warps join. Partials are in natural units.
  cp_async_wait<0>();
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      softmax[u][e].sum = sum_over_lanes<4, 32>(softmax[u][e].sum);
      if (g == 0) row_m[warp][row_of(u, e)] = softmax[u][e].max;
    }
  __syncthreads();
  float* join = reinterpret_cast<float*>(shared + Shape::kQueryBytes);
  const int busy = min(last_unit - cache.first_tile, kWarps);  // warps that had a turn
  const auto joined = [&](int w, int r) { return join + (w * Rows + r) * Shape::kMergeRow; };
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int r = row_of(u, e);
      if (r >= rows.rows || warp >= busy) continue;
      float top = kMasked;
#pragma unroll 4
      for (int w = 0; w < busy; ++w) top = fmaxf(top, row_m[w][r]);
      const float keep = join_factor(softmax[u][e].max, softmax[u][e].sum, top);
      if (g == 0) row_l[warp][r] = softmax[u][e].sum * keep;
#pragma unroll
      for (int m = 0; m < D / 16; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) joined(warp, r)[16 * m + 8 * h + g] = o[u][m][2 * h + e] * keep;
    }
  __syncthreads();
  const PartialsView& out = p.plan.out;
  for (int e = threadIdx.x; e < rows.rows * (D / 4); e += 32 * kWarps) {
    const int r = e / (D / 4), d = e % (D / 4) * 4;
    float4 sum{};
#pragma unroll 4
    for (int w = 0; w < busy; ++w) {
      const float4 own = *reinterpret_cast<const float4*>(joined(w, r) + d);
      sum.x += own.x, sum.y += own.y, sum.z += own.z, sum.w += own.w;
    }
    const QueryRow row = query_row(rows, q.group, r);
    *reinterpret_cast<float4*>(out.o + out.o_at(row.t, row.hq, item.split, d)) = sum;
    if (d == 0) {
      float top = kMasked, l = 0;
#pragma unroll 4
      for (int w = 0; w < busy; ++w) {
        top = fmaxf(top, row_m[w][r]);
        l += row_l[w][r];
      }
      out.m[out.m_at(row.t, row.hq, item.split)] = l != l ? NAN : natural_max(top, kOffset);
      out.l[out.l_at(row.t, row.hq, item.split)] = l;
    }
  }
}

}  // namespace weft::cuda
