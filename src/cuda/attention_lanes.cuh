// Attention over tiles in lanes order: integer tensor-core products for scores, f16 ones for values, codes looked up in registers.
//
// A warp takes tiles of 64 tokens of its own, which it copies into a ring of shared memory ahead of time; the warps of a block join
// their sums at the end. For lane = 4 j + t a warp's operands lie so that nothing ever moves between lanes but row maxima:
//   K as B of m16n8k32: a 16-byte piece of K holds 4 tokens of one group of coordinates. Lane (j, t) takes tokens 16 (j/2) + 8 h +
//     4 (j%2) + i, i = 0..3, of group t of a k-step: column j of product i. Which coordinate a byte is decides where q puts its own.
//   S: lane (j, t) then holds rows j and j + 8, and in products i of both halves h the tokens 16 t + 8 h + i and + 4.
//   V as B of m16n8k16: a word of V holds one coordinate of just those tokens. A 16-byte piece is 4 coordinates 32 b + 4 j + i: column
//     j of product i. The weights of S, rounded to f16, are A without a shuffle; the pairs that a word decodes to decide their order.
// q is two planes of int8, 128 hi + lo, so that scores are exact integers until the gain. A level is (n + 1/2) step: half the sum of
// q, and half the sum of the weights, stand for the 1/2. Weights carry V's gain, relative to the largest that the warp has met.
#pragma once

#include "cuda/attention_parts.cuh"
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
};

__device__ inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(selector));
  return x;
}

__device__ inline void multiply_bytes(int (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// Entries of a table of 16 bytes for the 8 nibbles of a word, in their order.
__device__ inline void look_up_16(const uint32_t (&table)[4], uint32_t word, uint32_t& low, uint32_t& high) {
  const uint32_t shifted = word << 4, index = word & 0x77777777u, rest = index >> 16;
  const uint32_t upper0 = permute(shifted, word, 0xD9C8u), upper1 = permute(shifted, word, 0xFBEAu);  // 0xFF where the code is >= 8
  const uint32_t a0 = permute(table[0], table[1], index), b0 = permute(table[2], table[3], index);
  const uint32_t a1 = permute(table[0], table[1], rest), b1 = permute(table[2], table[3], rest);
  low = (a0 & ~upper0) | (b0 & upper0);
  high = (a1 & ~upper1) | (b1 & upper1);
}

// As f16: bytes n + 128 become n.
__device__ inline void widen(uint32_t bytes, uint32_t& first, uint32_t& second) {
  const __half2 bias = __half2half2(__ushort_as_half(0x6480));  // 1152
  const uint32_t a = permute(bytes, 0x64646464u, 0x4140u), b = permute(bytes, 0x64646464u, 0x4342u);  // 1024 + byte
  const __half2 x = __hsub2(*reinterpret_cast<const __half2*>(&a), bias), y = __hsub2(*reinterpret_cast<const __half2*>(&b), bias);
  first = *reinterpret_cast<const uint32_t*>(&x);
  second = *reinterpret_cast<const uint32_t*>(&y);
}

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <int Bits, int D, KvRole Role>
struct LaneTile {
  static constexpr int kCodes = static_cast<int>(kTileTokens) * D * Bits / 8, kGains = static_cast<int>(kTileTokens) * 2;
  static constexpr int kBytes = kCodes + kGains, kPieces = kCodes / 16;
  static constexpr int kGroupPieces = Role == KvRole::k ? 16 : D / 4;
  // Lanes t of one access are kSpread groups apart; pieces are permuted so that their banks differ.
  static constexpr int kSpread = Role == KvRole::k ? 1 : Bits / 2;
  __device__ static constexpr int place(int piece) { return piece ^ ((piece / kGroupPieces / kSpread & 3) << 1); }

  __device__ static void copy(uint32_t to, const uint8_t* from, int lane) {
#pragma unroll
    for (int i = 0; i < kPieces / 32; ++i) {
      const int piece = lane + 32 * i;
      copy_async(to + place(piece) * 16, from + piece * 16, true);
    }
    if (lane < kGains / 16) copy_async(to + kCodes + lane * 16, from + kCodes + lane * 16, true);
  }
  __device__ static uint4 read(const uint8_t* tile, int piece) { return *reinterpret_cast<const uint4*>(tile + place(piece) * 16); }
};

template <int KBits, int VBits, int D>
struct LanesShape {
  using K = LaneTile<KBits, D, KvRole::k>;
  using V = LaneTile<VBits, D, KvRole::v>;
  static constexpr int kWarps = K::kBytes + V::kBytes > 28 << 10 ? 4 : 8, kPrologueWarps = 4;
  static constexpr int kSteps = D / 32;
  // Tiles in flight of a warp. With one of each, K of the next tile loads while this one's values are summed.
  static constexpr int kRoom = (196 << 10) / kWarps;
  static constexpr int kBoth = kRoom / (K::kBytes + V::kBytes);
  static constexpr int kV = kBoth < 1 ? 1 : kBoth > 4 ? 4 : kBoth;
  static constexpr int kK = kV < 3 && kV * V::kBytes + (kV + 1) * K::kBytes <= kRoom ? kV + 1 : kV;
  static constexpr int kRing = kK * K::kBytes + kV * V::kBytes;
  static constexpr int kPlanes = 2 * kSteps * 512;                                 // q in fragments
  static constexpr int kSpare = kPrologueWarps * 3 * D * static_cast<int>(sizeof(float));
  static constexpr int kJoin = kWarps * kRows * D * static_cast<int>(sizeof(float));  // lies over the ring
  static constexpr int kShared = kPlanes + kSpare + (kWarps * kRing > kJoin ? kWarps * kRing : kJoin);
};

// Where q's coordinate c goes: k-step, register pair, lane t and byte of the A operand.
struct QueryPlace {
  int step, pair, t, byte;
};
template <int KBits>
__device__ inline QueryPlace query_place(int c) {
  if constexpr (KBits == 8) return {c / 32, c / 16 % 2, c / 4 % 4, c % 4};
  const int group = c / (32 / KBits), i = c % 4, s = c / 4 % (8 / KBits);
  if constexpr (KBits == 4) return {group / 4, i / 2, group % 4, i % 2 * 2 + s};
  return {group / 4 * 2 + s % 2, i / 2, group % 4, i % 2 * 2 + s / 2};
}

// Position of the token in row `row` of its block; -1: none lives there.
__device__ inline int64_t position_in(const KvIndex& index, int64_t appended, int64_t row) {
  const int64_t capacity = index.rows;
  if (row >= capacity) return -1;
  if (appended <= capacity) return row < appended ? row : -1;
  if (row < index.pinned) return row;
  const int64_t ring = capacity - index.pinned, lost = appended - capacity;  // positions pinned .. pinned + lost - 1 are gone
  return index.pinned + lost + ((row - index.pinned - lost) % ring + ring) % ring;
}

// Two integers of a product's scores, and the weights they become.
struct RowSums {
  float m = -INFINITY, l = 0, weights = 0;  // in log2 units; sums of this lane alone
};

template <int KBits, int VBits, int D>
__global__ void __launch_bounds__(32 * LanesShape<KBits, VBits, D>::kWarps, 1) lanes_kernel(const __grid_constant__ LanesParams p) {
  using Shape = LanesShape<KBits, VBits, D>;
  using K = typename Shape::K;
  using V = typename Shape::V;
  constexpr int kWarps = Shape::kWarps, kSteps = Shape::kSteps;
  constexpr float kLog2e = 1.4426950408889634f, kNone = -INFINITY, kFull = 0x1p15f;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ float row_factor[kRows], row_offset[kRows], row_mean[kRows], row_m[kWarps][kRows], row_l[kWarps][kRows];
  const QueryParams& q = p.queries;
  int64_t item = blockIdx.x;
  const int64_t tile_index = item % q.row_tiles, part = (item /= q.row_tiles) % p.plan.count, hk = (item /= p.plan.count) % q.Hk,
                n = item / q.Hk;
  const RowTile rows = row_tile(q.queries.sequences, q.T, q.group, n, hk, tile_index);
  if (rows.rows == 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, j = lane / 4, t = lane % 4;
  const bool ring = q.index.kind == CacheKind::ring, paged = q.index.kind == CacheKind::paged, wide = rows.rows > 8;
  const int64_t appended = appended_tokens(q.index, n), live = live_tokens(q.index, appended);

  // What the rows see: of all, and of this lane's two.
  Seen mine{0x7fffffff, 0};
  if (lane < rows.rows) mine = seen_by(q, rows, appended, query_row(rows, q.group, lane).t);
  const Seen seen0{__shfl_sync(0xffffffffu, mine.first, j), __shfl_sync(0xffffffffu, mine.end, j)};
  const Seen seen1{__shfl_sync(0xffffffffu, mine.first, j + 8), __shfl_sync(0xffffffffu, mine.end, j + 8)};
  const bool some = lane < rows.rows && mine.first < mine.end;
  const int first_seen = __reduce_min_sync(0xffffffffu, some ? mine.first : 0x7fffffff);
  const int end_seen = __reduce_max_sync(0xffffffffu, some ? mine.end : 0);
  const int first_all = __reduce_max_sync(0xffffffffu, lane < rows.rows ? mine.first : 0);  // what every row sees
  const int end_all = __reduce_min_sync(0xffffffffu, lane < rows.rows ? mine.end : 0x7fffffff);

  // This block's tiles, of which the warps take turns.
  const int64_t slot = paged ? 0 : slot_of(q.index.slots, n, q.index.blocks);
  const int64_t end_token = ring || end_seen > live ? live : end_seen;
  int64_t tile_begin = ring ? 0 : first_seen / kTileTokens, tile_end = (end_token + kTileTokens - 1) / kTileTokens;
  if (slot < 0 || first_seen >= end_seen || tile_begin > tile_end) tile_begin = tile_end = 0;
  const Span span = part_of(tile_end - tile_begin, part, p.plan.count, 1);
  const int64_t first_tile = tile_begin + span.begin + warp, last_tile = tile_begin + span.end;
  const int64_t tiles_per_page = q.index.rows / kTileTokens;
  const auto block_of = [&](int64_t tile) -> int64_t {
    if (!paged) return slot;
    const KvLocation at = locate(q.index, n, tile * kTileTokens);
    return at.block;
  };
  uint8_t* const warp_ring = shared + Shape::kPlanes + Shape::kSpare + warp * Shape::kRing;
  const auto k_slot = [&](int i) { return warp_ring + i % Shape::kK * K::kBytes; };
  const auto v_slot = [&](int i) { return warp_ring + Shape::kK * K::kBytes + i % Shape::kV * V::kBytes; };
  const auto source = [&](const LanesSide& side, int64_t tile, int64_t block) {
    return side.data + block * side.block + hk * side.head + (paged ? tile % tiles_per_page : tile) * side.tile;
  };
  const auto copy_k = [&](int i) {
    const int64_t tile = first_tile + int64_t{i} * kWarps;
    if (i >= 0 && tile < last_tile)
      if (const int64_t block = block_of(tile); block >= 0) K::copy(shared_address(k_slot(i)), source(p.k, tile, block), lane);
    commit_copies();
  };
  const auto copy_v = [&](int i) {
    const int64_t tile = first_tile + int64_t{i} * kWarps;
    if (i >= 0 && tile < last_tile)
      if (const int64_t block = block_of(tile); block >= 0) V::copy(shared_address(v_slot(i)), source(p.v, tile, block), lane);
    commit_copies();
  };
  constexpr int kAhead = Shape::kK > Shape::kV ? Shape::kK : Shape::kV;
#pragma unroll
  for (int i = -kAhead; i < 0; ++i) {
    copy_k(i + Shape::kK);
    copy_v(i + Shape::kV);
  }

  // The queries: rotated, in two planes of int8, in fragments.
  if (warp < Shape::kPrologueWarps) {
    float* x = reinterpret_cast<float*>(shared + Shape::kPlanes) + warp * 3 * D;
    for (int r = warp; r < kRows; r += Shape::kPrologueWarps) {
      float step = 0, from_mean = 0;
      if (r < rows.rows) {
        from_mean = load_query(q, query_row(rows, q.group, r), hk, x, x + D, lane);
        float top = 0;
        for (int c = lane; c < D; c += 32) top = fmaxf(top, fabsf(x[c]));
        step = max_warp(top) / 16256.0f;  // 127 * 128
      }
      int sum = 0;
      for (int c = lane; c < D; c += 32) {
        const int value = step > 0 ? __float2int_rn(x[c] / step) : 0, low = ((value + 64) & 127) - 64, high = (value - low) >> 7;
        sum += value;
        const QueryPlace at = query_place<KBits>(c);
        const int byte = (at.step * 32 + r % 8 * 4 + at.t) * 16 + (2 * at.pair + r / 8) * 4 + at.byte;
        shared[byte] = static_cast<uint8_t>(high);
        shared[kSteps * 512 + byte] = static_cast<uint8_t>(low);
      }
      sum = __reduce_add_sync(0xffffffffu, sum);
      if (lane == 0) {
        const float unit = q.mask.softcap ? q.scale : q.scale * kLog2e;  // softcap wants natural units
        row_factor[r] = step * p.k.step * unit;
        row_offset[r] = 0.5f * static_cast<float>(sum);
        row_mean[r] = from_mean * unit;
        // A row that holds NaN or infinity is NaN throughout.
        if (r < rows.rows && !(step <= 3e38f)) row_mean[r] = NAN;
      }
      __syncwarp();
    }
  }
  __syncthreads();
  const float factor[2] = {row_factor[j], row_factor[j + 8]}, offset[2] = {row_offset[j], row_offset[j + 8]};
  const float mean[2] = {row_mean[j], row_mean[j + 8]};
  const uint4* fragments = reinterpret_cast<const uint4*>(shared) + lane;

  float o[D / 32][4][4] = {};
  RowSums sums[2];
  float gain_top = 0, gain_unit = 0;  // largest gain met, as a power of two, and kFull over it
  for (int i = 0; first_tile + int64_t{i} * kWarps < last_tile; ++i) {
    const int64_t tile = first_tile + int64_t{i} * kWarps;
    wait_copies<2 * Shape::kK - 1>();
    __syncwarp();
    const uint8_t* k = k_slot(i);
    float s[2][4][4];  // half, product, row and token
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int high[4][4] = {}, low[4][4] = {};
      const int quad = j / 2 * 4 + 2 * h + j % 2;
      const auto step_of = [&](int step, const uint32_t (&b0)[4], const uint32_t (&b1)[4]) {
        const uint4 a_high = fragments[step * 32], a_low = fragments[(kSteps + step) * 32];
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          multiply_bytes(high[x], a_high, b0[x], b1[x]);
          multiply_bytes(low[x], a_low, b0[x], b1[x]);
        }
      };
      if constexpr (KBits == 2) {
#pragma unroll
        for (int pair = 0; pair < kSteps / 2; ++pair) {
          const uint4 four = K::read(k, (4 * pair + t) * 16 + quad);
          const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int field = 0; field < 2; ++field) {
            uint32_t b0[4], b1[4];
#pragma unroll
            for (int x = 0; x < 4; ++x) {
              const uint32_t index = words[x] >> 2 * field & 0x33333333u;
              b0[x] = permute(p.k.table[0], 0, index);
              b1[x] = permute(p.k.table[0], 0, index >> 16);
            }
            step_of(2 * pair + field, b0, b1);
          }
        }
      } else {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          uint32_t b0[4], b1[4];
          if constexpr (KBits == 4) {
            const uint4 four = K::read(k, (4 * step + t) * 16 + quad);
            look_up_16(p.k.table, four.x, b0[0], b1[0]);
            look_up_16(p.k.table, four.y, b0[1], b1[1]);
            look_up_16(p.k.table, four.z, b0[2], b1[2]);
            look_up_16(p.k.table, four.w, b0[3], b1[3]);
          } else {
            const uint4 x = K::read(k, (8 * step + t) * 16 + quad), y = K::read(k, (8 * step + 4 + t) * 16 + quad);
            constexpr uint32_t kFlip = 0x80808080u;
            b0[0] = x.x ^ kFlip, b0[1] = x.y ^ kFlip, b0[2] = x.z ^ kFlip, b0[3] = x.w ^ kFlip;
            b1[0] = y.x ^ kFlip, b1[1] = y.y ^ kFlip, b1[2] = y.z ^ kFlip, b1[3] = y.w ^ kFlip;
          }
          step_of(step, b0, b1);
        }
      }
      const uint4 packed = *reinterpret_cast<const uint4*>(k + K::kCodes + (16 * t + 8 * h) * 2);
      const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float2 near = unpack<__half>(pairs[x / 2]), far = unpack<__half>(pairs[2 + x / 2]);
        const float gain[2] = {x % 2 ? near.y : near.x, x % 2 ? far.y : far.x};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float value = static_cast<float>(high[x][e] * 128 + low[x][e]) + offset[e / 2];
          s[h][x][e] = fmaf(value * factor[e / 2], gain[e % 2], mean[e / 2]);
        }
      }
    }
    __syncwarp();
    copy_k(i + Shape::kK);

    // Masks, where somebody is not to see something; gains that stand for nothing are 0.
    const int64_t first_token = tile * kTileTokens;
    const bool whole = !ring && first_token >= first_all && first_token + kTileTokens <= end_all && first_token + kTileTokens <= live &&
                       (!paged || block_of(tile) >= 0);
    bool lives[2] = {true, true};  // of tokens 2 lane and 2 lane + 1
    if (!whole || q.mask.softcap) {
      const bool there = block_of(tile) >= 0;
      const auto position = [&](int token) -> int64_t {
        if (!there) return -1;
        if (ring) return position_in(q.index, appended, first_token + token);
        return first_token + token < live ? first_token + token : -1;
      };
      lives[0] = position(2 * lane) >= 0;
      lives[1] = position(2 * lane + 1) >= 0;
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int x = 0; x < 4; ++x)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int64_t at = position(16 * t + 8 * h + 4 * (e % 2) + x);
            const Seen& seen = e / 2 ? seen1 : seen0;
            float& score = s[h][x][e];
            if (q.mask.softcap) score = capped(score, q.mask) * kLog2e;
            if (at < 0 || at < seen.first || at >= seen.end) score = kNone;
          }
    }

    wait_copies<2 * Shape::kV - 1>();
    __syncwarp();
    const uint8_t* v = v_slot(i);
    // Weights are relative to the largest gain and the largest score so far.
    float rescale[2] = {1, 1};
    {
      const float2 gains = unpack<__half>(*reinterpret_cast<const uint32_t*>(v + V::kCodes + lane * 4));
      const float top = fmaxf(lives[0] ? fabsf(gains.x) : 0.0f, lives[1] ? fabsf(gains.y) : 0.0f);
      if (__any_sync(0xffffffffu, top > gain_top)) {
        const float raised = exp2f(ceilf(log2f(fmaxf(max_warp(top), 0x1p-24f))));
        if (raised > gain_top) {
          rescale[0] = rescale[1] = gain_top / raised;
          gain_top = raised;
          gain_unit = kFull / raised;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (r == 1 && !wide) continue;
      float top = kNone;
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int x = 0; x < 4; ++x) top = fmaxf(top, fmaxf(s[h][x][2 * r], s[h][x][2 * r + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      if (top > sums[r].m) {
        const float keep = exp2_fast(sums[r].m - top);
        sums[r].l *= keep;
        rescale[r] *= keep;
        sums[r].m = top;
      }
      sums[r].weights *= rescale[r];
    }
    if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
      for (int b = 0; b < D / 32; ++b)
#pragma unroll
        for (int x = 0; x < 4; ++x)
#pragma unroll
          for (int e = 0; e < 4; ++e) o[b][x][e] *= rescale[e / 2];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 packed = *reinterpret_cast<const uint4*>(v + V::kCodes + (16 * t + 8 * h) * 2);
      const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float2 near = unpack<__half>(pairs[x / 2]), far = unpack<__half>(pairs[2 + x / 2]);
        const float gain[2] = {(x % 2 ? near.y : near.x) * gain_unit, (x % 2 ? far.y : far.x) * gain_unit};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (r == 1 && !wide) {
            s[h][x][2] = s[h][x][3] = 0;
            continue;
          }
          const float base = sums[r].m == kNone ? 0.0f : sums[r].m;
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& score = s[h][x][2 * r + c];
            const float weight = exp2_fast(score - base);
            sums[r].l += weight;
            score = whole || score != kNone ? weight * gain[c] : 0.0f;
            sums[r].weights += score;
          }
        }
      }
    }
    // Products over 16 tokens: `pairs` of tokens as the words of V decode to them.
    FragmentA a[4];
    if constexpr (VBits == 4) {  // [h][i / 2]: tokens i and i + 4
#pragma unroll
      for (int y = 0; y < 4; ++y) {
        const float(&first)[4] = s[y / 2][y % 2 * 2], (&second)[4] = s[y / 2][y % 2 * 2 + 1];
        a[y] = {{pack<__half>(first[0], first[1]), pack<__half>(first[2], first[3]), pack<__half>(second[0], second[1]),
                 pack<__half>(second[2], second[3])}};
      }
    } else if constexpr (VBits == 8) {  // [h][c]: tokens i and i + 1
#pragma unroll
      for (int y = 0; y < 4; ++y) {
        const int h = y / 2, c = y % 2;
        a[y] = {{pack<__half>(s[h][0][c], s[h][1][c]), pack<__half>(s[h][0][2 + c], s[h][1][2 + c]),
                 pack<__half>(s[h][2][c], s[h][3][c]), pack<__half>(s[h][2][2 + c], s[h][3][2 + c])}};
      }
    } else {  // [c][i / 2]: tokens i and i + 8
#pragma unroll
      for (int y = 0; y < 4; ++y) {
        const int c = y / 2, x = y % 2 * 2;
        a[y] = {{pack<__half>(s[0][x][c], s[1][x][c]), pack<__half>(s[0][x][2 + c], s[1][x][2 + c]),
                 pack<__half>(s[0][x + 1][c], s[1][x + 1][c]), pack<__half>(s[0][x + 1][2 + c], s[1][x + 1][2 + c])}};
      }
    }
#pragma unroll
    for (int b = 0; b < D / 32; ++b) {
      constexpr int kLoads = VBits == 8 ? 4 : VBits == 4 ? 2 : 1;
#pragma unroll
      for (int y = 0; y < kLoads; ++y) {
        const uint4 four = V::read(v, (t * kLoads + y) * V::kGroupPieces + 8 * b + j);
        const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          uint32_t bytes[4 / kLoads], b0, b1;
          if constexpr (VBits == 8) bytes[0] = words[x];
          if constexpr (VBits == 4) look_up_16(p.v.table, words[x], bytes[0], bytes[1]);
          if constexpr (VBits == 2) {
            const uint32_t even = words[x] & 0x33333333u, odd = words[x] >> 2 & 0x33333333u;
            bytes[0] = permute(p.v.table[0], 0, even);
            bytes[1] = permute(p.v.table[0], 0, even >> 16);
            bytes[2] = permute(p.v.table[0], 0, odd);
            bytes[3] = permute(p.v.table[0], 0, odd >> 16);
          }
#pragma unroll
          for (int z = 0; z < 4 / kLoads; ++z) {
            widen(bytes[z], b0, b1);
            multiply<__half>(o[b][x], a[y * (4 / kLoads) + z], b0, b1);
          }
        }
      }
    }
    __syncwarp();
    copy_v(i + Shape::kV);
  }

  // The warps join. Partials are in natural units and in those of V.
  wait_copies<0>();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    for (int apart = 1; apart < 4; apart *= 2) {
      sums[r].l += __shfl_xor_sync(0xffffffffu, sums[r].l, apart);
      sums[r].weights += __shfl_xor_sync(0xffffffffu, sums[r].weights, apart);
    }
    if (t == 0) {
      row_m[warp][j + 8 * r] = sums[r].m;
      row_l[warp][j + 8 * r] = sums[r].l;
    }
  }
  __syncthreads();
  float* join = reinterpret_cast<float*>(shared + Shape::kPlanes + Shape::kSpare);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (r == 1 && !wide) continue;
    float top = kNone;
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, row_m[w][j + 8 * r]);
    const float keep = sums[r].m == kNone ? (sums[r].l == sums[r].l ? 0.0f : NAN) : exp2_fast(sums[r].m - top);
    const float unit = keep * (gain_top / kFull) * p.v.step, half = 0.5f * sums[r].weights;
    float* row = join + (warp * kRows + j + 8 * r) * D;
#pragma unroll
    for (int b = 0; b < D / 32; ++b)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        *reinterpret_cast<float4*>(row + 32 * b + 8 * t + 4 * c) =
            float4{(o[b][0][2 * r + c] + half) * unit, (o[b][1][2 * r + c] + half) * unit, (o[b][2][2 * r + c] + half) * unit,
                   (o[b][3][2 * r + c] + half) * unit};
  }
  __syncthreads();
  const PartialsView& out = p.plan.out;
  for (int e = threadIdx.x; e < rows.rows * D; e += 32 * kWarps) {
    const int r = e / D, d = e % D;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += join[(w * kRows + r) * D + d];
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

}  // namespace weft::cuda
