// Attention over tiles in lanes order: integer tensor-core products for scores, f16 ones for values, codes looked up in registers.
//
// A warp takes tiles of 64 tokens of its own, which it copies into a ring of shared memory ahead of time; the warps of a block, or of
// either half of it, join their sums at the end. The block finishes its rows where it has all of their tokens, or the cluster of blocks
// that have; else what is left are partials. Both products are transposed, tokens and coordinates in the 16 rows of an instruction,
// query rows in its 8 columns. For lane = 4 j + t operands lie so that nothing moves between lanes but row maxima and the transposed
// weights:
//   K as A of m16n8k32: a 16-byte piece of K holds 4 tokens of one group of coordinates. Lane (j, t) takes piece quad(j, h) of group t
//     of a k-step, tokens 4 quad + x. Which coordinate a byte is decides where q puts its own.
//   S: lane (j, t) then holds query rows 2 t and 2 t + 1 of those tokens, or both planes of row t where there are but 4 rows;
//     transposed, query row j of tokens x of the pieces of j = 2 t and 2 t + 1, as B of m16n8k16 wants them.
//   V as A: a word of V holds one coordinate of just such tokens, and quad() is such that it decodes to those pairs. A 16-byte piece is
//     4 coordinates 32 b + 4 j + x.
// q is two planes of int8, 128 hi + lo, so that scores are exact integers until the gain. A level is (n + 1/2) step: half the sum of
// q, and half the sum of the weights where V's tables hold n only, stand for the 1/2. Weights carry V's gain, relative to the largest
// that the warp has met.
#pragma once

#include "cuda/attention_cluster.cuh"
#include "cuda/attention_finish.cuh"
#include "cuda/attention_lanes_shape.cuh"
#include "cuda/attention_tiles.cuh"
#include "cuda/launch_early.cuh"

namespace weft::cuda {

template <int KBits, int VBits, int D, int Rows>
__global__ void __launch_bounds__(32 * LanesShape<KBits, VBits, D, Rows>::kWarps, 1)
    lanes_kernel(const __grid_constant__ LanesParams p) {
  using Shape = LanesShape<KBits, VBits, D, Rows>;
  using K = typename Shape::K;
  using V = typename Shape::V;
  constexpr int kWarps = Shape::kWarps, kTeams = Shape::kTeams, kSteps = Shape::kSteps, U = Shape::kEights, E = Shape::kEach;
  // Weights may pass the largest score by 2^kSlack before sums are put in relation to a larger one.
  constexpr float kLog2e = 1.4426950408889634f, kNone = -INFINITY, kFull = 0x1p9f, kSlack = 6;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ float row_factor[kTeams][Rows], row_offset[kTeams][Rows], row_mean[kTeams][Rows];
  __shared__ float row_m[kWarps][Rows], row_l[kWarps][Rows];
  __shared__ float2 part_sums[Rows];  // m and l, for the cluster
  const QueryParams& q = p.queries;
  // The same in all lanes, and so that the compiler knows it.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = static_cast<int>(threadIdx.x) % 32;
  const int j = lane / 4, t = lane % 4;
  // A team of warps has a share of the work to itself; where a block has two, the last one may have none.
  const bool two = kTeams == 2 && p.teams == 2;
  const int mates = two ? kWarps / 2 : kWarps, team = two && warp >= mates ? 1 : 0, mate = warp - team * mates;
  const unsigned number = two ? 2 * blockIdx.x + team : blockIdx.x;
  const bool idle = number >= p.items;
  const BlockItem item(p.by_row_tiles, p.by_parts, p.by_heads, idle ? 0 : number);
  if constexpr (Shape::kPairs) {
    const auto pair = [&](int low, int high) {
      return static_cast<uint32_t>(p.v.halves[low]) | static_cast<uint32_t>(p.v.halves[high]) << 16;
    };
#pragma unroll 1
    for (int high = warp; high < 16; high += kWarps) {
#pragma unroll
      for (int low = 0; low < 16; ++low) {
        uint8_t* entry = shared + Shape::kTeams * Shape::kPlanes + (high * 16 + low) * 256;
        if constexpr (VBits == 2)
          reinterpret_cast<uint2*>(entry)[lane] = {pair(low & 3, high & 3), pair(low >> 2, high >> 2)};
        else
          reinterpret_cast<uint32_t*>(entry)[lane] = pair(low, high);
      }
    }
  }
  wait_for_kernels_before();  // all that other kernels have no part in is done
  release_kernels_behind();
  RowTile rows = row_tile(q.queries.sequences, q.T, q.longest, q.group, item.n, item.hk, item.row_tile, Rows);
  if (idle || rows.range.length() * q.group > p.most_rows) rows.rows = 0;
  if (rows.rows == 0 && !two) return;
  constexpr int kOwn = D / 32;  // coordinates of a query in a lane
  uint32_t query_bits[kOwn] = {};
  if (mate < rows.rows) load_query_bits<kOwn>(q.queries.q, query_row(rows, p.by_group, mate), lane, query_bits);
  // Lanes load different things, so that none waits for the other.
  const int64_t found = lane == 0 ? index_at(q.index.lengths, item.n) : lane == 1 ? CacheTiles::slot_at(q, item.n) : 0;
  CacheTiles cache(q, item, __shfl_sync(0xffffffffu, found, 0), __shfl_sync(0xffffffffu, found, 1));

  // What the rows see.
  Seen mine{0x7fffffff, 0};
  if (lane < rows.rows) mine = seen_by(q, rows, cache.appended, query_row(rows, p.by_group, lane).t);
  const bool some = lane < rows.rows && mine.first < mine.end;
  const int first_seen = __reduce_min_sync(0xffffffffu, some ? mine.first : 0x7fffffff);
  const int end_seen = __reduce_max_sync(0xffffffffu, some ? mine.end : 0);

  // This team's tiles, of which the warps take turns.
  cache.take(item, first_seen, end_seen, [&](unsigned tiles) { return p.by_parts.quotient(tiles + p.by_parts.by - 1); });
  const int first_tile = cache.first_tile + mate, last_tile = cache.last_tile;
  uint8_t* const planes = shared + team * Shape::kPlanes;
  uint8_t* const warp_ring = shared + Shape::kTeams * Shape::kPlanes + Shape::kTable + warp * Shape::kRing;
  const auto k_slot = [&](int i) { return warp_ring + i % Shape::kK * K::kBytes; };
  const auto v_slot = [&](int i) { return warp_ring + Shape::kK * K::kBytes + i % Shape::kV * Shape::kVBytes; };
  const auto copy_k = [&](int i) {
    const int tile = first_tile + i * mates;
    if (i >= 0 && tile < last_tile)
      if (const uint8_t* from = cache.find(q, p.by_page, p.k, tile)) K::copy(shared_address(k_slot(i)), from, lane);
    commit_copies();
  };
  // The gains lie before the codes; a second half finds them there.
  const auto copy_v = [&](int i, int half) {
    const int tile = first_tile + i * mates;
    if (i >= 0 && tile < last_tile)
      if (const uint8_t* from = cache.find(q, p.by_page, p.v, tile))
        V::template copy_part<Shape::kHalves>(shared_address(v_slot(i)), from, half, lane);
    commit_copies();
  };
  constexpr int kAhead = Shape::kK > Shape::kV ? Shape::kK : Shape::kV;
#pragma unroll 1
  for (int i = -kAhead; i < 0; ++i) {
    copy_k(i + Shape::kK);
    copy_v(i + Shape::kV, 0);
  }

  // Tiles that all rows see all of.
  const int first_all = __reduce_max_sync(0xffffffffu, lane < rows.rows ? mine.first : 0);
  const int end_all = __reduce_min_sync(0xffffffffu, lane < rows.rows ? mine.end : 0x7fffffff);
  constexpr int kTokens = static_cast<int>(kTileTokens);
  const int whole_first = first_all / kTokens + (first_all % kTokens != 0);  // positions reach as far as int does
  const int whole_end =
      cache.ring || q.mask.softcap ? 0 : static_cast<int>(min(static_cast<int64_t>(end_all), cache.live) / kTokens);

  // The queries: rotated, in two planes of int8, in fragments.
#pragma unroll 1
  for (int r = mate; r < Rows; r += mates) {
    float x[kOwn] = {}, step = 0, from_mean = 0;
    if (r < rows.rows) {
      if (r > mate) load_query_bits<kOwn>(q.queries.q, query_row(rows, p.by_group, r), lane, query_bits);
      from_mean = rotate_query<kOwn>(q, query_bits, item.hk, lane, x);
      float top = 0, bad = 0;  // bad: NaN where q holds NaN or infinity, and so are its scores then
#pragma unroll
      for (int e = 0; e < kOwn; ++e) {
        top = fmaxf(top, fabsf(x[e]));
        bad += x[e] * 0.0f;
      }
      step = max_warp(top) / 16256.0f;  // 127 * 128
      from_mean += sum_warp(bad);
    }
    const float inverse = step > 0 ? 1 / step : 0.0f;
    int sum = 0;
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      const int value = __float2int_rn(x[e] * inverse), low = ((value + 64) & 127) - 64, high = (value - low) >> 7;
      sum += value;
      const QueryPlace at = query_place<KBits>(lane * kOwn + e);
      const auto place = [&](int plane) {
        const int column = Rows == 4 ? 2 * r + plane : r % 8, first = Rows == 4 ? at.step : (plane * kSteps + at.step) * U + r / 8;
        return (first * 32 + column * 4 + at.t) * 8 + at.half * 4 + at.byte;
      };
      planes[place(0)] = static_cast<uint8_t>(high);
      planes[place(1)] = static_cast<uint8_t>(low);
    }
    sum = __reduce_add_sync(0xffffffffu, sum);
    if (lane == 0) {
      const float unit = q.mask.softcap ? q.scale : q.scale * kLog2e;  // softcap wants natural units
      row_factor[team][r] = step * p.k.step * unit;
      row_offset[team][r] = 0.5f * static_cast<float>(sum) * row_factor[team][r];
      row_mean[team][r] = from_mean * unit;
    }
  }
  __syncthreads();
  const auto row_of = [&](int u, int e) { return Rows == 4 ? t : 8 * u + 2 * t + e; };
  float factor[U][E], offset[U][E], mean[U][E];
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int e = 0; e < E; ++e) {
      factor[u][e] = row_factor[team][row_of(u, e)];
      offset[u][e] = row_offset[team][row_of(u, e)];
      mean[u][e] = row_mean[team][row_of(u, e)];
    }
  const uint2* fragments = reinterpret_cast<const uint2*>(planes) + lane;
  const auto fragment = [&](int plane, int step, int u) { return fragments[((plane * kSteps + step) * U + u) * 32]; };

  float o[U][D / 32][2][4] = {};
  float base[U][E], sum_l[U][E] = {}, sum_weights[U][E] = {};  // base: what scores are relative to, -inf at first
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int e = 0; e < E; ++e) base[u][e] = kNone;
  float gain_top = 0, gain_unit = 0;  // largest gain met, as a power of two, and kFull over it
  for (int i = 0; first_tile + i * mates < last_tile; ++i) {
    const int tile = first_tile + i * mates;
    wait_copies<2 * Shape::kK - 1>();
    __syncwarp();
    const uint8_t* k = k_slot(i);
    float s[U][2][4][E];  // h, x, row
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int high[U][2][4] = {}, low[U][2][4] = {};  // 4 rows have both in `high`
      const int quad = V::quad(j, h);
      const auto step_of = [&](int step, const uint32_t(&b0)[4], const uint32_t(&b1)[4]) {
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const uint2 q_high = fragment(0, step, u);
          uint2 q_low = q_high;
          if constexpr (Rows != 4) q_low = fragment(1, step, u);
#pragma unroll
          for (int y = 0; y < 2; ++y) {
            const FragmentA a{{b0[2 * y], b0[2 * y + 1], b1[2 * y], b1[2 * y + 1]}};
            multiply_bytes(high[u][y], a, q_high);
            if constexpr (Rows != 4) multiply_bytes(low[u][y], a, q_low);
          }
        }
      };
      if constexpr (K::kWide == 2) {
#pragma unroll 1
        for (int pair = 0; pair < kSteps / 2; ++pair) {
          const uint4 four = K::read(k, 4 * pair + t, quad, t);
          const uint32_t words[4] = {four.x, four.y, four.z, four.w};
          uint32_t more[4] = {};
          if constexpr (KBits == 3) {
            const uint4 bits = K::read_narrow(k, 2 * pair + t / 2, quad);
            const int shift = t % 2 * 4;
            more[0] = bits.x >> shift, more[1] = bits.y >> shift, more[2] = bits.z >> shift, more[3] = bits.w >> shift;
          }
          uint32_t even0[4], even1[4], odd0[4], odd1[4];
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            const uint32_t even = nibbles<KBits, 0>(words[x], more[x]), odd = nibbles<KBits, 1>(words[x], more[x]);
            even0[x] = permute(p.k.table[0], p.k.table[1], even);
            even1[x] = permute(p.k.table[0], p.k.table[1], even >> 16);
            odd0[x] = permute(p.k.table[0], p.k.table[1], odd);
            odd1[x] = permute(p.k.table[0], p.k.table[1], odd >> 16);
          }
          step_of(2 * pair, even0, even1);
          step_of(2 * pair + 1, odd0, odd1);
        }
      } else {
#pragma unroll kSteps <= 4 ? kSteps : 2
        for (int step = 0; step < kSteps; ++step) {
          uint32_t b0[4], b1[4];
          if constexpr (KBits == 4) {
            const uint4 four = K::read(k, 4 * step + t, quad, t);
            look_up_16(p.k.table, four.x, b0[0], b1[0]);
            look_up_16(p.k.table, four.y, b0[1], b1[1]);
            look_up_16(p.k.table, four.z, b0[2], b1[2]);
            look_up_16(p.k.table, four.w, b0[3], b1[3]);
          } else {
            const uint4 x = K::read(k, 8 * step + t, quad, t), y = K::read(k, 8 * step + 4 + t, quad, t);
            constexpr uint32_t kFlip = 0x80808080u;
            b0[0] = x.x ^ kFlip, b0[1] = x.y ^ kFlip, b0[2] = x.z ^ kFlip, b0[3] = x.w ^ kFlip;
            b1[0] = y.x ^ kFlip, b1[1] = y.y ^ kFlip, b1[2] = y.z ^ kFlip, b1[3] = y.w ^ kFlip;
          }
          step_of(step, b0, b1);
        }
      }
      float gain[4];
      read_gains(k + K::kCodes, quad, gain);
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int x = 0; x < 4; ++x)
#pragma unroll
          for (int e = 0; e < E; ++e) {
            const int c = x % 2 * 2 + e;
            const auto value = static_cast<float>(high[u][x / 2][c] * 128 + (Rows == 4 ? high[u][x / 2][c + 1] : low[u][x / 2][c]));
            s[u][h][x][e] = fmaf(fmaf(value, factor[u][e], offset[u][e]), gain[x], mean[u][e]);
          }
    }
    __syncwarp();
    copy_k(i + Shape::kK);

    // Masks, where somebody is not to see something; gains that stand for nothing are 0.
    const int first_token = tile * static_cast<int>(kTileTokens);
    const bool whole = tile >= whole_first && tile < whole_end && (!cache.paged || cache.there(q, p.by_page, tile));
    bool lives[2] = {true, true};  // of tokens 2 lane and 2 lane + 1
    uint32_t hidden[U] = {};       // bit (h, x, e)
    if (!whole) {
      const bool there = cache.there(q, p.by_page, tile);
      const bool wrapped = cache.ring && cache.appended > q.index.rows;
      const RingPositions around(q.index, cache.appended);
      const auto position = [&](int token) {
        const int row = first_token + token;
        return !there || row >= cache.live ? -1 : wrapped ? around.of(row) : row;
      };
      lives[0] = position(2 * lane) >= 0;
      lives[1] = position(2 * lane + 1) >= 0;
      int at[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int x = 0; x < 4; ++x) at[h][x] = position(4 * V::quad(j, h) + x);
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int e = 0; e < E; ++e) {
          const int row = row_of(u, e);
          const Seen seen{__shfl_sync(0xffffffffu, mine.first, row), __shfl_sync(0xffffffffu, mine.end, row)};
#pragma unroll
          for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int x = 0; x < 4; ++x) {
              float& score = s[u][h][x][e];
              if (q.mask.softcap) score = capped_fast(score, *q.mask.softcap) * kLog2e;
              if (at[h][x] < 0 || at[h][x] < seen.first || at[h][x] >= seen.end) {
                score = kNone;
                hidden[u] |= 1u << (h * 8 + x * 2 + e);
              }
            }
        }
    }

    wait_copies<2 * Shape::kV - 1>();
    __syncwarp();
    const uint8_t* v = v_slot(i);
    // Weights are relative to the largest gain, and to a score that none so far passes by much.
    float common = 1;
    {
      const float2 gains = unpack<__half>(*reinterpret_cast<const uint32_t*>(v + lane * 4));
      const float top = fmaxf(lives[0] ? fabsf(gains.x) : 0.0f, lives[1] ? fabsf(gains.y) : 0.0f);
      if (__any_sync(0xffffffffu, top > gain_top)) {
        const float raised = exp2f(ceilf(log2f(fmaxf(max_warp(top), 0x1p-24f))));
        if (raised > gain_top) {
          common = gain_top / raised;
          gain_top = raised;
          gain_unit = kFull / raised;
        }
      }
    }
    uint32_t weights[U][2][4];  // pairs of tokens of a query row, as f16
    float gain[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      read_gains(v, V::quad(j, h), gain[h]);
#pragma unroll
      for (int x = 0; x < 4; ++x) gain[h][x] *= gain_unit;
    }
    bool passed = common != 1.0f;
    float top[U][E];
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int e = 0; e < E; ++e) {
        top[u][e] = kNone;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int x = 0; x < 4; ++x) top[u][e] = fmaxf(top[u][e], s[u][h][x][e]);
        passed |= top[u][e] > base[u][e] + kSlack;
      }
    if (__any_sync(0xffffffffu, passed)) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        float rescale[E];
#pragma unroll
        for (int e = 0; e < E; ++e) {
          float most = top[u][e];
#pragma unroll
          for (int apart = 4; apart < 32; apart *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, apart));
          rescale[e] = common;
          if (most > base[u][e]) {
            const float keep = exp2_fast(base[u][e] - most);
            sum_l[u][e] *= keep;
            rescale[e] *= keep;
            base[u][e] = most;
          }
          sum_weights[u][e] *= rescale[e];
        }
#pragma unroll
        for (int b = 0; b < D / 32; ++b)
#pragma unroll
          for (int y = 0; y < 2; ++y)
#pragma unroll
            for (int c = 0; c < 4; ++c) o[u][b][y][c] *= rescale[E == 1 ? 0 : c % 2];
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      float from[E];
#pragma unroll
      for (int e = 0; e < E; ++e) from[e] = base[u][e] == kNone ? 0.0f : base[u][e];
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int x = 0; x < 4; ++x)
#pragma unroll
          for (int e = 0; e < E; ++e) {
            const float weight = exp2_fast(s[u][h][x][e] - from[e]);
            sum_l[u][e] += weight;
            s[u][h][x][e] = weight * gain[h][x];
          }
      if (hidden[u]) {  // what is hidden may hold anything
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int x = 0; x < 4; ++x)
#pragma unroll
            for (int e = 0; e < E; ++e)
              if (hidden[u] >> (h * 8 + x * 2 + e) & 1) s[u][h][x][e] = 0;
      }
      if constexpr (!Shape::kPairs) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int x = 0; x < 4; ++x)
#pragma unroll
            for (int e = 0; e < E; ++e) sum_weights[u][e] += s[u][h][x][e];
      }
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          if constexpr (E == 2) {
            weights[u][h][x] = transpose(pack<__half>(s[u][h][x][0], s[u][h][x][1]));
          } else if (x % 2 == 0) {
            // Column 2 r takes tokens x of row r, column 2 r + 1 tokens x + 1; their sums are added at the end.
            const uint32_t both = transpose(pack<__half>(s[u][h][x][0], s[u][h][x + 1][0]));
            weights[u][h][x] = j % 2 == 0 ? both : 0u;
            weights[u][h][x + 1] = j % 2 == 0 ? 0u : both;
          }
        }
    }
    // Tokens x and x + 1 of half h, for coordinates 2 y and 2 y + 1: first and second pair of the operands. The halves take turns where
    // a word of V holds but one.
    constexpr int kTurns = V::kWide == 2 ? 1 : 2;
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      if (Shape::kHalves == 2 && turn == 1) {
        __syncwarp();
        copy_v(i, 1);
        wait_copies<0>();
        __syncwarp();
      }
      const uint8_t *codes = v + V::kGains, *table = shared + Shape::kTeams * Shape::kPlanes;
      const int group = Shape::kHalves == 2 ? 0 : turn;  // of halves here
#pragma unroll
      for (int b = 0; b < D / 32; ++b) {
        uint32_t pairs[4][8 / kTurns];  // coordinate, then pairs of tokens as f16
        if constexpr (VBits == 8) {
          const uint4 f = V::read(codes, 8 * group + 2 * t, 8 * b + j, t), g = V::read(codes, 8 * group + 2 * t + 1, 8 * b + j, t);
          const uint32_t near[4] = {f.x, f.y, f.z, f.w}, far[4] = {g.x, g.y, g.z, g.w};
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            widen(permute(near[x], far[x], 0x5140u), pairs[x][0], pairs[x][1]);
            widen(permute(near[x], far[x], 0x7362u), pairs[x][2], pairs[x][3]);
          }
        } else {
          const uint4 f = V::read(codes, kTurns == 2 ? 4 * group + t : t, 8 * b + j, t);
          const uint32_t words[4] = {f.x, f.y, f.z, f.w};
          uint32_t more[4] = {};
          if constexpr (VBits == 3) {
            const uint4 bits = V::read_narrow(codes, t / 2, 8 * b + j);
            const int shift = t % 2 * 4;
            more[0] = bits.x >> shift, more[1] = bits.y >> shift, more[2] = bits.z >> shift, more[3] = bits.w >> shift;
          }
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            if constexpr (Shape::kPairs && VBits == 4) {
#pragma unroll
              for (int i = 0; i < 4; ++i)
                pairs[x][i] = *reinterpret_cast<const uint32_t*>(table + permute(words[x], lane * 4, 0x5504u + 16 * i));
            } else if constexpr (Shape::kPairs && VBits == 2) {
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                const uint2 four = *reinterpret_cast<const uint2*>(table + permute(words[x], lane * 8, 0x5504u + 16 * i));
                pairs[x][i] = four.x, pairs[x][4 + i] = four.y;
              }
            } else if constexpr (Shape::kPairs) {
              const uint32_t even = nibbles<VBits, 0>(words[x], more[x]), odd = nibbles<VBits, 1>(words[x], more[x]);
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                pairs[x][i] = *reinterpret_cast<const uint32_t*>(table + permute(even, lane * 4, 0x5504u + 16 * i));
                pairs[x][4 + i] = *reinterpret_cast<const uint32_t*>(table + permute(odd, lane * 4, 0x5504u + 16 * i));
              }
            } else if constexpr (VBits == 4) {
              uint32_t low, high;
              look_up_16(p.v.table, words[x], low, high);
              widen(low, pairs[x][0], pairs[x][1]);
              widen(high, pairs[x][2], pairs[x][3]);
            } else {
              const uint32_t even = nibbles<VBits, 0>(words[x], more[x]), odd = nibbles<VBits, 1>(words[x], more[x]);
              widen(permute(p.v.table[0], p.v.table[1], even), pairs[x][0], pairs[x][1]);
              widen(permute(p.v.table[0], p.v.table[1], even >> 16), pairs[x][2], pairs[x][3]);
              widen(permute(p.v.table[0], p.v.table[1], odd), pairs[x][4], pairs[x][5]);
              widen(permute(p.v.table[0], p.v.table[1], odd >> 16), pairs[x][6], pairs[x][7]);
            }
          }
        }
#pragma unroll
        for (int z = 0; z < 4 / kTurns; ++z)
#pragma unroll
          for (int y = 0; y < 2; ++y) {
            const FragmentA a{{pairs[2 * y][2 * z], pairs[2 * y + 1][2 * z], pairs[2 * y][2 * z + 1], pairs[2 * y + 1][2 * z + 1]}};
#pragma unroll
            for (int u = 0; u < U; ++u)
              multiply<__half>(o[u][b][y], a, weights[u][z / 2][z % 2 * 2], weights[u][z / 2][z % 2 * 2 + 1]);
          }
      }
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int x = 0; x < 4; ++x) weights[u][0][x] = weights[u][1][x];
    }
    __syncwarp();
    copy_v(i + Shape::kV, 0);
  }

  // The warps join. Partials are in natural units and in those of V.
  wait_copies<0>();
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int e = 0; e < E; ++e) {
#pragma unroll
      for (int apart = 4; apart < 32; apart *= 2) {
        sum_l[u][e] += __shfl_xor_sync(0xffffffffu, sum_l[u][e], apart);
        if constexpr (!Shape::kPairs) sum_weights[u][e] += __shfl_xor_sync(0xffffffffu, sum_weights[u][e], apart);
      }
      if (j == 0) row_m[warp][row_of(u, e)] = base[u][e];
    }
  __syncthreads();
  float* join = reinterpret_cast<float*>(shared + Shape::kTeams * Shape::kPlanes);
  // Warps of the team that had a tile.
  const int first_warp = team * mates, end_warp = first_warp + min(last_tile - cache.first_tile, mates);
  // Four coordinates of a row of a warp's sums; they change places by the row, so that lanes t meet different banks.
  const auto place = [&](int w, int r, int four) {
    return join + (w * Rows + r) * D + (four ^ (Rows == 4 ? r : r / 2) % 4 * 2) * 4;
  };
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int e = 0; e < E; ++e) {
      const int r = row_of(u, e);
      if (r >= rows.rows || warp >= end_warp) continue;
      float top = kNone;
#pragma unroll 4
      for (int w = first_warp; w < end_warp; ++w) top = fmaxf(top, row_m[w][r]);
      const float own = base[u][e], l = sum_l[u][e];
      const float keep = own == kNone ? (l == l ? 0.0f : NAN) : exp2_fast(own - top);
      if (j == 0) row_l[warp][r] = l * keep;
      const float unit = keep * (gain_top / kFull) * p.v.step, half = 0.5f * sum_weights[u][e];
      const auto sum = [&](int b, int y, int c) {
        return ((E == 1 ? o[u][b][y][2 * c] + o[u][b][y][2 * c + 1] : o[u][b][y][2 * c + e]) + half) * unit;
      };
#pragma unroll
      for (int b = 0; b < D / 32; ++b)
        *reinterpret_cast<float4*>(place(warp, r, 8 * b + j)) = {sum(b, 0, 0), sum(b, 0, 1), sum(b, 1, 0), sum(b, 1, 1)};
    }
  __syncthreads();
  // A warp for each row, whose lanes hold coordinates lane kOwn + e.
  const auto fours = [&](int w, int r, float(&x)[kOwn]) {
    if constexpr (kOwn == 2) {
      const float2 two = *reinterpret_cast<const float2*>(place(w, r, lane / 2) + lane % 2 * 2);
      x[0] = two.x, x[1] = two.y;
    } else {
#pragma unroll
      for (int e = 0; e < kOwn; e += 4) {
        const float4 four = *reinterpret_cast<const float4*>(place(w, r, (lane * kOwn + e) / 4));
        x[e] = four.x, x[e + 1] = four.y, x[e + 2] = four.z, x[e + 3] = four.w;
      }
    }
  };
#pragma unroll 1
  for (int r = mate; r < rows.rows; r += mates) {
    float sum[kOwn] = {}, top = kNone, l = 0;
#pragma unroll 8
    for (int w = first_warp; w < end_warp; ++w) {
      float own[kOwn];
      fours(w, r, own);
#pragma unroll
      for (int e = 0; e < kOwn; ++e) sum[e] += own[e];
      top = fmaxf(top, row_m[w][r]);
      l += row_l[w][r];
    }
    const float m = l != l ? NAN : top / kLog2e;
    const QueryRow row = query_row(rows, p.by_group, r);
    if (p.finish == LanesFinish::block) {
      finish_row<kOwn>(p.merge, row.t, static_cast<unsigned>(row.hq), {m, l}, sum, lane);
    } else if (p.finish == LanesFinish::cluster) {  // there is one team
      __syncwarp();
#pragma unroll
      for (int e = 0; e < kOwn; ++e) *(place(0, r, (lane * kOwn + e) / 4) + (lane * kOwn + e) % 4) = sum[e];
      if (lane == 0) part_sums[r] = {m, l};
    } else {
      const PartialsView& out = p.plan.out;
      float* to = out.o + out.o_at(row.t, row.hq, item.part, lane * kOwn);
      if constexpr (kOwn == 2) {
        *reinterpret_cast<float2*>(to) = {sum[0], sum[1]};
      } else {
#pragma unroll
        for (int e = 0; e < kOwn; e += 4) *reinterpret_cast<float4*>(to + e) = {sum[e], sum[e + 1], sum[e + 2], sum[e + 3]};
      }
      if (lane == 0) {
        out.m[out.m_at(row.t, row.hq, item.part)] = m;
        out.l[out.l_at(row.t, row.hq, item.part)] = l;
      }
    }
  }
  if (p.finish != LanesFinish::cluster) return;
  static_assert(2 * Shape::kWarps >= Rows, "the smallest cluster has a warp for every row");
  // The parts of a sequence are the blocks of a cluster, which take turns with the rows.
  const int parts = static_cast<int>(p.plan.count), r = static_cast<int>(item.part) + parts * warp;
  arrive_in_cluster();
  wait_for_cluster();
  float top = kNone, total = 0, sum[kOwn] = {};
  if (r < rows.rows) {
    // There are 2, 4, 8 or 16 parts: the first lanes have one each, and so on all over again.
    float own[2];
    load_from_cluster(shared_address(&part_sums[r]), lane & (parts - 1), own);
    const auto load_part = [&](int part, float(&x)[kOwn]) {
      if constexpr (kOwn == 8) {  // neighbours of four may have changed places
        float four[2][4];
        load_from_cluster(shared_address(place(0, r, 2 * lane)), part, four[0]);
        load_from_cluster(shared_address(place(0, r, 2 * lane + 1)), part, four[1]);
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = four[e / 4][e % 4];
      } else {
        load_from_cluster(shared_address(place(0, r, lane * kOwn / 4) + lane * kOwn % 4), part, x);
      }
    };
    constexpr int kAtOnce = kOwn == 8 ? 2 : 4;
    float next[kAtOnce][kOwn];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) load_part(min(i, parts - 1), next[i]);
    const bool there = own[1] != 0 && own[0] != kNone;
    top = there ? own[0] : kNone;
#pragma unroll 1
    for (int apart = parts / 2; apart > 0; apart /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, apart));
    const float factor = there ? exp2_fast((own[0] - (top == kNone ? 0.0f : top)) * kLog2e) : 0.0f;
    total = there ? factor * own[1] : 0.0f;
#pragma unroll 1
    for (int apart = parts / 2; apart > 0; apart /= 2) total += __shfl_xor_sync(0xffffffffu, total, apart);
#pragma unroll 1
    for (int part = 0; part < parts; part += kAtOnce)
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float f = __shfl_sync(0xffffffffu, factor, (part + i) & (parts - 1));
        if (part + i < parts && f != 0)
#pragma unroll
          for (int e = 0; e < kOwn; ++e) sum[e] = fmaf(f, next[i][e], sum[e]);
        if (part + i + kAtOnce < parts) load_part(part + i + kAtOnce, next[i]);
      }
  }
  arrive_in_cluster();  // has read all that it wants; nobody leaves before all have
  if (r < rows.rows) {
    const QueryRow row = query_row(rows, p.by_group, r);
    finish_row<kOwn>(p.merge, row.t, static_cast<unsigned>(row.hq), {top, total}, sum, lane);
  }
  wait_for_cluster();
}

template <int KBits, int VBits, int D, int Rows>
constexpr LanesKernel make_lanes_kernel() {
  using Shape = LanesShape<KBits, VBits, D, Rows>;
  return {KBits, VBits, D, Rows, Shape::kWarps, Shape::kTeams, Shape::kShared, lanes_kernel<KBits, VBits, D, Rows>};
}

}  // namespace weft::cuda
