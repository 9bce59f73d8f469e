// Attention over tiles in lanes order: integer tensor-core products for scores, f16 ones for values, codes looked up in registers.
//
// A warp takes tiles of 64 tokens of its own, which it copies into a ring of shared memory ahead of time; the warps of a block join
// their sums at the end. Both products are transposed, tokens and coordinates in the 16 rows of an instruction, query rows in its 8
// columns. For lane = 4 j + t operands lie so that nothing moves between lanes but row maxima and the transposed weights:
//   K as A of m16n8k32: a 16-byte piece of K holds 4 tokens of one group of coordinates. Lane (j, t) takes piece quad(j, h) of group t
//     of a k-step, tokens 4 quad + x. Which coordinate a byte is decides where q puts its own.
//   S: lane (j, t) then holds query rows 2 t and 2 t + 1 of those tokens; transposed, query row j of tokens x of the pieces of j = 2 t
//     and 2 t + 1, as B of m16n8k16 wants them.
//   V as A: a word of V holds one coordinate of just such tokens, and quad() is such that it decodes to those pairs. A 16-byte piece is
//     4 coordinates 32 b + 4 j + x.
// q is two planes of int8, 128 hi + lo, so that scores are exact integers until the gain. A level is (n + 1/2) step: half the sum of
// q, and half the sum of the weights, stand for the 1/2. Weights carry V's gain, relative to the largest that the warp has met.
#pragma once

#include <span>

#include "cuda/attention_parts.cuh"
#include "cuda/lane_tile.cuh"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"

namespace weft::cuda {

struct LanesSide {
  const uint8_t* data = nullptr;
  int64_t block = 0, head = 0, tile = 0;  // strides in bytes
  uint32_t table[4] = {};                 // K: n as int8; V: n + 128
  float step = 1;                         // of levels, with the gain's units
};

struct LanesParams {
  QueryParams queries;
  LanesSide k, v;
  PartialsPlan plan;
  int64_t row_tiles = 0;
};

// One kernel as the host finds it.
struct LanesKernel {
  int k_bits, v_bits, D, rows, warps;  // rows: of queries, of a block
  void (*launch)(const char* op, const Stream& stream, const LanesParams& params);
};
// Those of a pair of bits, in files of their own: they take long to compile.
std::span<const LanesKernel> lanes_kernels_8v8();
std::span<const LanesKernel> lanes_kernels_8v4();
std::span<const LanesKernel> lanes_kernels_4v4();
std::span<const LanesKernel> lanes_kernels_4v2();
std::span<const LanesKernel> lanes_kernels_3v3();
std::span<const LanesKernel> lanes_kernels_2v2();

__device__ inline void multiply_bytes(int (&c)[4], const FragmentA& a, const uint2& b) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x), "r"(b.y));
}

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Eights: columns of query rows, 8 each.
template <int KBits, int VBits, int D, int Eights>
struct LanesShape {
  using K = LaneTile<KBits, D, KvRole::k>;
  using V = LaneTile<VBits, D, KvRole::v>;
  static constexpr int kRowsHere = 8 * Eights, kPrologueWarps = D <= 128 ? 8 : 4, kSteps = D / 32;
  // Integer instructions bound 4v4: V's bytes, two codes each, are looked up as pairs of f16 in shared memory then. Every lane has a
  // table of its own bank.
  static constexpr bool kPairs = KBits == 4 && VBits == 4 && D <= 128;
  static constexpr int kTable = kPairs ? 256 * 32 * 4 : 0;
  static constexpr int kAll = (204 << 10) - kTable;  // bytes for rings
  static constexpr int kFit = kAll / (K::kBytes + V::kBytes), kMost = Eights == 1 && D <= 128 ? 12 : 8;
  static constexpr int kWarps = kFit >= kMost ? kMost : kFit >= 12 ? 12 : kFit >= 8 ? 8 : kFit >= 6 ? 6 : 4;
  // Tiles in flight of a warp. With one of each, K of the next tile loads while this one's values are summed.
  static constexpr int kRoom = kAll / kWarps, kBoth = kRoom / (K::kBytes + V::kBytes);
  static constexpr int kV = kBoth < 1 ? 1 : kBoth > 4 ? 4 : kBoth;
  static constexpr int kK = kV < 3 && kV * V::kBytes + (kV + 1) * K::kBytes <= kRoom ? kV + 1 : kV;
  static constexpr int kRing = kK * K::kBytes + kV * V::kBytes;
  static constexpr int kPlanes = 2 * kSteps * Eights * 256;  // q in fragments
  static constexpr int kSpare = kPrologueWarps * 3 * D * static_cast<int>(sizeof(float));
  static constexpr int kJoin = kWarps * kRowsHere * D * static_cast<int>(sizeof(float));  // lies over the ring
  static constexpr int kBefore = kPlanes + kSpare + kTable;
  static constexpr int kShared = kBefore + (kWarps * kRing > kJoin ? kWarps * kRing : kJoin);
};

// Where q's coordinate c goes: k-step, register, lane t and byte of the B operand.
struct QueryPlace {
  int step, half, t, byte;
};
template <int KBits>
__device__ inline QueryPlace query_place(int c) {
  if constexpr (KBits == 8) return {c / 32, c / 16 % 2, c / 4 % 4, c % 4};
  const int group = c / (32 / wide_bits(KBits)), i = c % 4, s = c / 4 % (8 / wide_bits(KBits));
  if constexpr (KBits == 4) return {group / 4, i / 2, group % 4, i % 2 * 2 + s};
  return {group / 4 * 2 + s % 2, i / 2, group % 4, i % 2 * 2 + s / 2};
}

// Positions of the rows of a ring to which more than it holds has been appended; in 32 bits, as positions are.
struct RingPositions {
  int pinned = 0, ring = 0, lost = 0,
      turn = 0;  // positions pinned .. pinned + lost - 1 are gone; the next lives in row pinned + turn
  __device__ RingPositions(const KvIndex& index, int64_t appended) {
    pinned = static_cast<int>(index.pinned);
    ring = static_cast<int>(index.rows) - pinned;
    lost = static_cast<int>(appended - index.rows);
    turn = lost % ring;
  }
  __device__ int of(int row) const {
    if (row < pinned) return row;
    const int ahead = row - pinned - turn;
    return pinned + lost + (ahead < 0 ? ahead + ring : ahead);
  }
};

template <int KBits, int VBits, int D, int Eights>
__global__ void __launch_bounds__(32 * LanesShape<KBits, VBits, D, Eights>::kWarps, 1)
    lanes_kernel(const __grid_constant__ LanesParams p) {
  using Shape = LanesShape<KBits, VBits, D, Eights>;
  using K = typename Shape::K;
  using V = typename Shape::V;
  constexpr int kWarps = Shape::kWarps, kSteps = Shape::kSteps, kRowsHere = Shape::kRowsHere;
  constexpr float kLog2e = 1.4426950408889634f, kNone = -INFINITY, kFull = 0x1p15f;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ float row_factor[kRowsHere], row_offset[kRowsHere], row_mean[kRowsHere];
  __shared__ float row_m[kWarps][kRowsHere], row_l[kWarps][kRowsHere];
  const QueryParams& q = p.queries;
  // Divisions of 64 bits are long pieces of code; a grid counts in 32.
  unsigned item = blockIdx.x;
  const auto row_tiles = static_cast<unsigned>(p.row_tiles), parts = static_cast<unsigned>(p.plan.count),
             heads = static_cast<unsigned>(q.Hk);
  const unsigned tile_index = item % row_tiles, part = (item /= row_tiles) % parts, hk = (item /= parts) % heads, n = item / heads;
  const RowTile rows = row_tile(q.queries.sequences, q.T, q.longest, q.group, n, hk, tile_index, kRowsHere);
  if (rows.rows == 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, j = lane / 4, t = lane % 4;
  const bool ring = q.index.kind == CacheKind::ring, paged = q.index.kind == CacheKind::paged;
  const int64_t appended = appended_tokens(q.index, n), live = live_tokens(q.index, appended);

  // What the rows see: any of them, and all of them.
  Seen mine{0x7fffffff, 0};
  if (lane < rows.rows) mine = seen_by(q, rows, appended, query_row(rows, q.group, lane).t);
  const bool some = lane < rows.rows && mine.first < mine.end;
  const int first_seen = __reduce_min_sync(0xffffffffu, some ? mine.first : 0x7fffffff);
  const int end_seen = __reduce_max_sync(0xffffffffu, some ? mine.end : 0);
  const int first_all = __reduce_max_sync(0xffffffffu, lane < rows.rows ? mine.first : 0);
  const int end_all = __reduce_min_sync(0xffffffffu, lane < rows.rows ? mine.end : 0x7fffffff);

  // This block's tiles, of which the warps take turns.
  const int64_t slot = paged ? 0 : slot_of(q.index.slots, n, q.index.blocks);
  const int64_t end_token = ring || end_seen > live ? live : end_seen;
  int64_t tile_begin = ring ? 0 : first_seen / kTileTokens, tile_end = (end_token + kTileTokens - 1) / kTileTokens;
  if (slot < 0 || first_seen >= end_seen || tile_begin > tile_end) tile_begin = tile_end = 0;
  const auto tiles = static_cast<unsigned>(tile_end - tile_begin);
  const unsigned share = (tiles + parts - 1) / parts, begin = min(part * share, tiles), end = min(begin + share, tiles);
  const int first_tile = static_cast<int>(tile_begin + begin) + warp, last_tile = static_cast<int>(tile_begin + end);
  const auto tiles_per_page = static_cast<unsigned>(q.index.rows / kTileTokens);
  const auto block_of = [&](int tile) -> int64_t {  // as locate() has it, by tile
    if (!paged) return slot;
    const Tensor& table = q.index.page_table;
    const int64_t block = static_cast<const int32_t*>(table.data)[n * table.strides[0] + tile / tiles_per_page * table.strides[1]];
    return block < q.index.blocks ? block : -1;
  };
  uint8_t* const warp_ring = shared + Shape::kBefore + warp * Shape::kRing;
  const auto k_slot = [&](int i) { return warp_ring + i % Shape::kK * K::kBytes; };
  const auto v_slot = [&](int i) { return warp_ring + Shape::kK * K::kBytes + i % Shape::kV * V::kBytes; };
  const auto source = [&](const LanesSide& side, int tile, int64_t block) {
    return side.data + block * side.block + hk * side.head + (paged ? tile % tiles_per_page : tile) * side.tile;
  };
  const auto copy_k = [&](int i) {
    const int tile = first_tile + i * kWarps;
    if (i >= 0 && tile < last_tile)
      if (const int64_t block = block_of(tile); block >= 0) K::copy(shared_address(k_slot(i)), source(p.k, tile, block), lane);
    commit_copies();
  };
  const auto copy_v = [&](int i) {
    const int tile = first_tile + i * kWarps;
    if (i >= 0 && tile < last_tile)
      if (const int64_t block = block_of(tile); block >= 0) V::copy(shared_address(v_slot(i)), source(p.v, tile, block), lane);
    commit_copies();
  };
  constexpr int kAhead = Shape::kK > Shape::kV ? Shape::kK : Shape::kV;
#pragma unroll 1
  for (int i = -kAhead; i < 0; ++i) {
    copy_k(i + Shape::kK);
    copy_v(i + Shape::kV);
  }

  uint32_t* const pair_table = reinterpret_cast<uint32_t*>(shared + Shape::kPlanes + Shape::kSpare) + lane;
  if constexpr (Shape::kPairs) {
    const auto level = [&](int code) {  // n as f16, exactly
      const uint32_t word = code & 8 ? (code & 4 ? p.v.table[3] : p.v.table[2]) : (code & 4 ? p.v.table[1] : p.v.table[0]);
      return static_cast<float>(static_cast<int>(word >> code % 4 * 8 & 0xff) - 128);
    };
#pragma unroll 1
    for (int code = kWarps - 1 - warp; code < 256; code += kWarps)  // from behind: the first warps have queries to prepare
      pair_table[code * 32] = pack<__half>(level(code % 16), level(code / 16));
  }

  // The queries: rotated, in two planes of int8, in fragments.
  if (warp < Shape::kPrologueWarps) {
    float* x = reinterpret_cast<float*>(shared + Shape::kPlanes) + warp * 3 * D;
    for (int r = warp; r < kRowsHere; r += Shape::kPrologueWarps) {
      float step = 0, from_mean = 0;
      if (r < rows.rows) {
        from_mean = load_query<D>(q, query_row(rows, q.group, r), hk, x, x + D, lane);
        float top = 0, bad = 0;  // bad: NaN where q holds NaN or infinity, and so are its scores then
        for (int c = lane; c < D; c += 32) {
          top = fmaxf(top, fabsf(x[c]));
          bad += x[c] * 0.0f;
        }
        step = max_warp(top) / 16256.0f;  // 127 * 128
        from_mean += sum_warp(bad);
      }
      const float inverse = step > 0 ? 1 / step : 0.0f;
      int sum = 0;
#pragma unroll 1
      for (int c = lane; c < D; c += 32) {
        const int value = r < rows.rows ? __float2int_rn(x[c] * inverse) : 0, low = ((value + 64) & 127) - 64,
                  high = (value - low) >> 7;
        sum += value;
        const QueryPlace at = query_place<KBits>(c);
        const int byte = ((at.step * Eights + r / 8) * 32 + r % 8 * 4 + at.t) * 8 + at.half * 4 + at.byte;
        shared[byte] = static_cast<uint8_t>(high);
        shared[kSteps * Eights * 256 + byte] = static_cast<uint8_t>(low);
      }
      sum = __reduce_add_sync(0xffffffffu, sum);
      if (lane == 0) {
        const float unit = q.mask.softcap ? q.scale : q.scale * kLog2e;  // softcap wants natural units
        row_factor[r] = step * p.k.step * unit;
        row_offset[r] = 0.5f * static_cast<float>(sum) * row_factor[r];
        row_mean[r] = from_mean * unit;
      }
      __syncwarp();
    }
  }
  __syncthreads();
  float factor[Eights][2], offset[Eights][2], mean[Eights][2];
#pragma unroll
  for (int u = 0; u < Eights; ++u)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      factor[u][e] = row_factor[8 * u + 2 * t + e];
      offset[u][e] = row_offset[8 * u + 2 * t + e];
      mean[u][e] = row_mean[8 * u + 2 * t + e];
    }
  // Fragment of plane 0 (high) or 1 (low). Loops over them stay loops: instructions, too, have to be fetched.
  const uint2* fragments = reinterpret_cast<const uint2*>(shared) + lane;
  const auto fragment = [&](int plane, int step, int u) { return fragments[((plane * kSteps + step) * Eights + u) * 32]; };

  float o[Eights][D / 32][2][4] = {};
  float top_score[Eights][2], sum_l[Eights][2] = {}, sum_weights[Eights][2] = {};
#pragma unroll
  for (int u = 0; u < Eights; ++u) top_score[u][0] = top_score[u][1] = kNone;
  float gain_top = 0, gain_unit = 0;  // largest gain met, as a power of two, and kFull over it
  for (int i = 0; first_tile + i * kWarps < last_tile; ++i) {
    const int tile = first_tile + i * kWarps;
    wait_copies<2 * Shape::kK - 1>();
    __syncwarp();
    const uint8_t* k = k_slot(i);
    float s[Eights][2][4][2];  // h, x, row
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int high[Eights][2][4] = {}, low[Eights][2][4] = {};
      const int quad = V::quad(j, h);
      const auto step_of = [&](int step, const uint32_t(&b0)[4], const uint32_t(&b1)[4]) {
#pragma unroll
        for (int u = 0; u < Eights; ++u) {
          const uint2 q_high = fragment(0, step, u), q_low = fragment(1, step, u);
#pragma unroll
          for (int y = 0; y < 2; ++y) {
            const FragmentA a{{b0[2 * y], b0[2 * y + 1], b1[2 * y], b1[2 * y + 1]}};
            multiply_bytes(high[u][y], a, q_high);
            multiply_bytes(low[u][y], a, q_low);
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
#pragma unroll 1
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
      for (int u = 0; u < Eights; ++u)
#pragma unroll
        for (int x = 0; x < 4; ++x)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int c = x % 2 * 2 + e;
            const auto value = static_cast<float>(high[u][x / 2][c] * 128 + low[u][x / 2][c]);
            s[u][h][x][e] = fmaf(fmaf(value, factor[u][e], offset[u][e]), gain[x], mean[u][e]);
          }
    }
    __syncwarp();
    copy_k(i + Shape::kK);

    // Masks, where somebody is not to see something; gains that stand for nothing are 0.
    const int first_token = tile * static_cast<int>(kTileTokens), end_tile = first_token + static_cast<int>(kTileTokens);
    const bool whole =
        !ring && first_token >= first_all && end_tile <= end_all && end_tile <= live && (!paged || block_of(tile) >= 0);
    bool lives[2] = {true, true};  // of tokens 2 lane and 2 lane + 1
    uint32_t hidden[Eights] = {};  // bit (h, x, e)
    if (!whole || q.mask.softcap) {
      const bool there = block_of(tile) >= 0;
      const bool wrapped = ring && appended > q.index.rows;
      const RingPositions around(q.index, appended);
      const auto position = [&](int token) {
        const int row = first_token + token;
        return !there || row >= live ? -1 : wrapped ? around.of(row) : row;
      };
      lives[0] = position(2 * lane) >= 0;
      lives[1] = position(2 * lane + 1) >= 0;
#pragma unroll
      for (int u = 0; u < Eights; ++u)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = 8 * u + 2 * t + e;
          const Seen seen{__shfl_sync(0xffffffffu, mine.first, row), __shfl_sync(0xffffffffu, mine.end, row)};
#pragma unroll
          for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int x = 0; x < 4; ++x) {
              const int at = position(4 * V::quad(j, h) + x);
              float& score = s[u][h][x][e];
              if (q.mask.softcap) score = capped(score, q.mask) * kLog2e;
              if (at < 0 || at < seen.first || at >= seen.end) {
                score = kNone;
                hidden[u] |= 1u << (h * 8 + x * 2 + e);
              }
            }
        }
    }

    wait_copies<2 * Shape::kV - 1>();
    __syncwarp();
    const uint8_t* v = v_slot(i);
    // Weights are relative to the largest gain and the largest score so far.
    float common = 1;
    {
      const float2 gains = unpack<__half>(*reinterpret_cast<const uint32_t*>(v + V::kCodes + lane * 4));
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
    uint32_t weights[Eights][2][4];  // pairs of tokens of a query row, as f16
    float gain[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      read_gains(v + V::kCodes, V::quad(j, h), gain[h]);
#pragma unroll
      for (int x = 0; x < 4; ++x) gain[h][x] *= gain_unit;
    }
#pragma unroll
    for (int u = 0; u < Eights; ++u) {
      float rescale[2], base[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float top = kNone;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int x = 0; x < 4; ++x) top = fmaxf(top, s[u][h][x][e]);
#pragma unroll
        for (int apart = 4; apart < 32; apart *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, apart));
        rescale[e] = common;
        if (top > top_score[u][e]) {
          const float keep = exp2_fast(top_score[u][e] - top);
          sum_l[u][e] *= keep;
          rescale[e] *= keep;
          top_score[u][e] = top;
        }
        base[e] = top_score[u][e] == kNone ? 0.0f : top_score[u][e];
      }
      if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
        for (int e = 0; e < 2; ++e) sum_weights[u][e] *= rescale[e];
#pragma unroll
        for (int b = 0; b < D / 32; ++b)
#pragma unroll
          for (int y = 0; y < 2; ++y)
#pragma unroll
            for (int c = 0; c < 4; ++c) o[u][b][y][c] *= rescale[c % 2];
      }
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int x = 0; x < 4; ++x)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float weight = exp2_fast(s[u][h][x][e] - base[e]);
            sum_l[u][e] += weight;
            s[u][h][x][e] = weight * gain[h][x];
          }
      if (hidden[u]) {  // what is hidden may hold anything
#pragma unroll
        for (int i = 0; i < 16; ++i)
          if (hidden[u] >> i & 1) s[u][i / 8][i / 2 % 4][i % 2] = 0;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          sum_weights[u][0] += s[u][h][x][0];
          sum_weights[u][1] += s[u][h][x][1];
          weights[u][h][x] = transpose(pack<__half>(s[u][h][x][0], s[u][h][x][1]));
        }
    }
    // Tokens x and x + 1 of half h, for coordinates 2 y and 2 y + 1: first and second pair of the operands. The halves take turns where
    // a word of V holds but one.
    constexpr int kTurns = V::kWide == 2 ? 1 : 2;
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
      for (int b = 0; b < D / 32; ++b) {
        uint32_t pairs[4][8 / kTurns];  // coordinate, then pairs of tokens as f16
        if constexpr (VBits == 8) {
          const uint4 f = V::read(v, 4 * t + 2 * turn, 8 * b + j, t), g = V::read(v, 4 * t + 2 * turn + 1, 8 * b + j, t);
          const uint32_t near[4] = {f.x, f.y, f.z, f.w}, far[4] = {g.x, g.y, g.z, g.w};
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            widen(permute(near[x], far[x], 0x5140u), pairs[x][0], pairs[x][1]);
            widen(permute(near[x], far[x], 0x7362u), pairs[x][2], pairs[x][3]);
          }
        } else {
          const uint4 f = V::read(v, kTurns * t + turn, 8 * b + j, t);
          const uint32_t words[4] = {f.x, f.y, f.z, f.w};
          uint32_t more[4] = {};
          if constexpr (VBits == 3) {
            const uint4 bits = V::read_narrow(v, t / 2, 8 * b + j);
            const int shift = t % 2 * 4;
            more[0] = bits.x >> shift, more[1] = bits.y >> shift, more[2] = bits.z >> shift, more[3] = bits.w >> shift;
          }
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            if constexpr (Shape::kPairs) {
#pragma unroll
              for (int i = 0; i < 4; ++i) pairs[x][i] = pair_table[permute(words[x], 0, 0x4440u + i) * 32];
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
            for (int u = 0; u < Eights; ++u)
              multiply<__half>(o[u][b][y], a, weights[u][z / 2][z % 2 * 2], weights[u][z / 2][z % 2 * 2 + 1]);
          }
      }
#pragma unroll
      for (int u = 0; u < Eights; ++u)
#pragma unroll
        for (int x = 0; x < 4; ++x) weights[u][0][x] = weights[u][1][x];
    }
    __syncwarp();
    copy_v(i + Shape::kV);
  }

  // The warps join. Partials are in natural units and in those of V.
  wait_copies<0>();
#pragma unroll
  for (int u = 0; u < Eights; ++u)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int apart = 4; apart < 32; apart *= 2) {
        sum_l[u][e] += __shfl_xor_sync(0xffffffffu, sum_l[u][e], apart);
        sum_weights[u][e] += __shfl_xor_sync(0xffffffffu, sum_weights[u][e], apart);
      }
      if (j == 0) {
        row_m[warp][8 * u + 2 * t + e] = top_score[u][e];
        row_l[warp][8 * u + 2 * t + e] = sum_l[u][e];
      }
    }
  __syncthreads();
  float* join = reinterpret_cast<float*>(shared + Shape::kBefore);
#pragma unroll
  for (int u = 0; u < Eights; ++u)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int r = 8 * u + 2 * t + e;
      if (r >= rows.rows) continue;
      float top = kNone;
      for (int w = 0; w < kWarps; ++w) top = fmaxf(top, row_m[w][r]);
      const float own = top_score[u][e], l = sum_l[u][e];
      const float keep = own == kNone ? (l == l ? 0.0f : NAN) : exp2_fast(own - top);
      const float unit = keep * (gain_top / kFull) * p.v.step, half = 0.5f * sum_weights[u][e];
      float* row = join + (warp * kRowsHere + r) * D;
#pragma unroll
      for (int b = 0; b < D / 32; ++b)
        *reinterpret_cast<float4*>(row + 32 * b + 4 * j) = float4{(o[u][b][0][e] + half) * unit, (o[u][b][0][2 + e] + half) * unit,
                                                                  (o[u][b][1][e] + half) * unit, (o[u][b][1][2 + e] + half) * unit};
    }
  __syncthreads();
  const PartialsView& out = p.plan.out;
  for (int e = threadIdx.x; e < rows.rows * D; e += 32 * kWarps) {
    const int r = e / D, d = e % D;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += join[(w * kRowsHere + r) * D + d];
    const QueryRow row = query_row(rows, q.group, r);
    out.o[out.o_at(row.t, row.hq, part, d)] = sum;
    if (d == 0) {
      float top = kNone, l = 0;
      for (int w = 0; w < kWarps; ++w) top = fmaxf(top, row_m[w][r]);
      for (int w = 0; w < kWarps; ++w)
        if (row_m[w][r] != kNone || row_l[w][r] != row_l[w][r])
          l += row_l[w][r] * (row_m[w][r] == kNone ? 1.0f : exp2_fast(row_m[w][r] - top));
      out.m[out.m_at(row.t, row.hq, part)] = l != l ? NAN : top / kLog2e;
      out.l[out.l_at(row.t, row.hq, part)] = l;
    }
  }
}

template <int KBits, int VBits, int D, int Eights>
constexpr LanesKernel make_lanes_kernel() {
  using Shape = LanesShape<KBits, VBits, D, Eights>;
  return {KBits, VBits, D, Shape::kRowsHere, Shape::kWarps, [](const char* op, const Stream& stream, const LanesParams& p) {
            launch(op, stream, p.queries.queries.sequences.count * p.queries.Hk * p.plan.count * p.row_tiles, 32 * Shape::kWarps,
                   Shape::kShared, lanes_kernel<KBits, VBits, D, Eights>, p);
          }};
}

}  // namespace weft::cuda
