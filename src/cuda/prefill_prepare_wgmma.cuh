// The chunk-parallel part of the tensor-core prefill by Hopper's warpgroup products: see prefill.cuh.
//
// A warpgroup prepares a chunk of a key head for all its value heads, chunk after chunk. Warp w makes block column w of the inverse,
// which then lies transposed in its registers as the left operand of two products of the whole warpgroup, with keys and with scores in
// shared memory: M and R, turned on their way to where the copy engine takes them. What is inverted is diag(1/rk) + diag(beta) L with
// L = tril_{-1}(rk_i k_i.k_j), so that the inverse is X' = diag(rk) X, which is what multiplies keys as they are given.
//
// A warpgroup meets only at its own barrier, so that several of them, or others, may share a block.
#pragma once

#include <type_traits>

#include "cuda/prefill_prepare.cuh"
#include "cuda/wgmma.cuh"

namespace weft::cuda {

struct KeyMaps {
  CUtensorMap q, k;
};

// A chunk of a key head. The copy engine counts tokens in 32 bits, and so may these.
struct alignas(16) PrepareItem {
  int row, head, token, length;  // length 0: there are no more
};

// What one warpgroup works in.
template <int KP>
struct alignas(1024) PrepareShared {
  uint16_t k[kChunk * KP];
  union {
    uint16_t q[kChunk * KP];
    uint16_t scores[2][kChunk * kChunk];  // scale rq_i q_i.k_m for m <= i, two parts, once q is no longer needed
  };
  uint16_t m[kChunk * KP];  // M on its way out
  union {
    char inverse[2][kInverseBytes];  // diagonal blocks of X' of two value heads, transposed
    uint16_t r[kChunk * kChunk];     // R on its way out
  };
  uint16_t kk[2][kBlocksBelow * kBlockElements];  // rk_i k_i.k_j, blocks below the diagonal; two parts
  float diagonal[kChunk][kDiagonalPitch];         // diagonal blocks of it
  float G[2][kBatch][kChunk];                     // in base 2; of the value heads at work and of the next, in turns
  float beta[2][kBatch][kChunk];
  float rk[kChunk], rq[kChunk];
  PrepareItem items[2];  // the one at work and the next, in turns
  uint64_t k_arrived, q_arrived;
};

#if WEFT_HAS_WGMMA

inline constexpr int kPanelBytes = kChunk * 128;  // 64 rows of 64 elements

// Value heads of a key head, and the j-th of them.
__device__ inline int value_heads(const Prefill& p) {
  return static_cast<int>(static_cast<uint32_t>(p.Hv) / static_cast<uint32_t>(p.Hk));
}
__device__ inline int64_t value_head(const Prefill& p, int head, int j) {
  return p.args.head_map == HeadMap::grouped ? int64_t{head * value_heads(p) + j} : head + j * p.Hk;
}

// Keys or queries of an item to shared memory.
template <int KP>
__device__ void copy_rows(const PrepareItem& item, uint16_t* to, const CUtensorMap& map, uint32_t arrived) {
  barrier_arrive_expecting(arrived, KP / 64 * kPanelBytes);
#pragma unroll
  for (int panel = 0; panel < KP / 64; ++panel)
    copy_tensor(shared_address(to) + panel * kPanelBytes, map, panel * 64, item.head, item.token, arrived);
}

// Squared lengths of the warp's rows of q on the diagonal of their product with themselves.
template <class Half, int KP>
__device__ void square_rows(uint32_t q, int warp, int lane, float (&square)[2][4]) {
  const LanePlace at(lane);
#pragma unroll
  for (int ks = 0; ks < KP / 16; ++ks) {
    FragmentA a;
    load_matrices(a.x, q + ks / 4 * kPanelBytes + Square::offset(warp * kBlock + at.across_row(), ks % 4 * 2 + at.across_piece()));
    multiply<Half>(square[0], a, a.x[0], a.x[2]);
    multiply<Half>(square[1], a, a.x[1], a.x[3]);
  }
}

// d = rows k^T, 64 by 64 or fewer.
template <class Half, int KP, int Tiles>
__device__ void start_scores(float (&d)[Tiles][4], uint32_t rows, uint32_t k) {
  wgmma_fence();
#pragma unroll
  for (int ks = 0; ks < KP / 16; ++ks) {
    const uint32_t step = (ks / 4 * kPanelBytes + ks % 4 * 32) >> 4;
    if (ks == 0)
      wgmma_shared<Half, false>(d, rows + step, k + step);
    else
      wgmma_shared<Half, true>(d, rows + step, k + step);
  }
  wgmma_commit();
}

// The unit of K K^T below the diagonal blocks: normed on one side only, long keys would be beyond f16.
template <class Half>
constexpr float kKeyUnit = std::is_same_v<Half, __half> ? 16.0f : 1.0f;

// Rows 16 w .. of K K^T with the norms of these rows, as inverses want them.
template <class Half, int KP>
__device__ void write_kk(PrepareShared<KP>& s, const LanePlace& at, int warp, int lane, const float (&rk)[2], float (&kk)[8][4]) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    if (n > warp) break;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) kk[2 * n + i][e] *= n == warp ? rk[e / 2] : rk[e / 2] * (1 / kKeyUnit<Half>);
    if (n == warp) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        *reinterpret_cast<float2*>(&s.diagonal[warp * kBlock + i % 2 * 8 + g][i / 2 * 8 + 2 * t]) =
            float2{kk[2 * n + i / 2][i % 2 * 2], kk[2 * n + i / 2][i % 2 * 2 + 1]};
    } else {
      FragmentA high, low;
      split<Half>(kk[2 * n], kk[2 * n + 1], high, low);
      const uint32_t to =
          static_cast<uint32_t>(block_below(warp, n)) * kBlockBytes + Small::offset(at.across_row(), at.across_piece());
      store_matrices(shared_address(s.kk[0]) + to, high.x[0], high.x[1], high.x[2], high.x[3]);
      store_matrices(shared_address(s.kk[1]) + to, low.x[0], low.x[1], low.x[2], low.x[3]);
    }
  }
}

// Rows 16 w .. of the scores.
template <class Half, int KP>
__device__ void write_scores(PrepareShared<KP>& s, const LanePlace& at, int warp, int lane, const float (&read)[2],
                             float (&qk)[8][4]) {
  const int g = lane / 4, t = lane % 4;
  const uint32_t to = shared_address(s.scores[0]) + warp * kBlock * 128;
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    FragmentA high{}, low{};
    if (n <= warp) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          qk[2 * n + i][e] = n < warp || i * 8 + 2 * t + e % 2 <= e / 2 * 8 + g ? qk[2 * n + i][e] * read[e / 2] : 0.0f;
      split<Half>(qk[2 * n], qk[2 * n + 1], high, low);
    }
    const uint32_t place = to + Square::offset(at.across_row(), n * 2 + at.across_piece());
    store_matrices(place, high.x[0], high.x[1], high.x[2], high.x[3]);
    store_matrices(place + kPanelBytes, low.x[0], low.x[1], low.x[2], low.x[3]);
  }
}

// The inverse of a diagonal block, a lane per column, by substitution in f32; in two parts, a column as a row of `inverse`, where blocks
// lie one after another.
template <class Half, int KP>
__device__ void invert_block(const PrepareShared<KP>& s, char* inverse, const float* beta, int block, int column) {
  const int first = block * kBlock;
  float x[kBlock];
#pragma unroll
  for (int four = 0; four < kBlock; four += 4) {
    const float4 strength = *reinterpret_cast<const float4*>(&beta[first + four]),
                 key = *reinterpret_cast<const float4*>(&s.rk[first + four]);
#pragma unroll
    for (int i = four; i < four + 4; ++i) {
      float even = 0, odd = 0;
#pragma unroll
      for (int m = 0; m < i; m += 4) {
        const float4 row = *reinterpret_cast<const float4*>(&s.diagonal[first + i][m]);
        even = fmaf(row.x, x[m], even);
        if (m + 1 < i) odd = fmaf(row.y, x[m + 1], odd);
        if (m + 2 < i) even = fmaf(row.z, x[m + 2], even);
        if (m + 3 < i) odd = fmaf(row.w, x[m + 3], odd);
      }
      const int e = i - four;
      x[i] = (e == 0   ? key.x
              : e == 1 ? key.y
              : e == 2 ? key.z
                       : key.w) *
             ((i == column ? 1.0f : 0.0f) - (e == 0   ? strength.x
                                             : e == 1 ? strength.y
                                             : e == 2 ? strength.z
                                                      : strength.w) *
                                                (even + odd));
    }
  }
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = &x[piece * 8 + i * 2];
      high[i] = pack<Half>(pair[0], pair[1]);
      const float2 whole = unpack<Half>(high[i]);
      low[i] = pack<Half>(pair[0] - whole.x, pair[1] - whole.y);
    }
    char* const to = inverse + block * kBlockBytes + Small::offset(column, piece);
    *reinterpret_cast<uint4*>(to) = uint4{high[0], high[1], high[2], high[3]};
    *reinterpret_cast<uint4*>(to + kInverseBytes / 2) = uint4{low[0], low[1], low[2], low[3]};
  }
}

// The gates of a value head.
struct HeadGates {
  const float *G, *beta;
};

// A block column of X' transposed: 16 rows (columns of X') by the tokens of the chunk.
struct BlockColumn {
  FragmentA high[kBlocks], low[kBlocks];
};

// c += a b for operands in two parts, 16 x 16 x 16; the product of both low parts is beyond f32.
template <class Half>
__device__ void multiply_parts(float (&c)[2][4], const FragmentA& high, const FragmentA& low, const uint32_t (&b_high)[4],
                               const uint32_t (&b_low)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) multiply<Half>(c[i], high, b_low[2 * i], b_low[2 * i + 1]);
#pragma unroll
  for (int i = 0; i < 2; ++i) multiply<Half>(c[i], low, b_high[2 * i], b_high[2 * i + 1]);
#pragma unroll
  for (int i = 0; i < 2; ++i) multiply<Half>(c[i], high, b_high[2 * i], b_high[2 * i + 1]);
}

// Block column b of one or two value heads, whose strengths differ; what they share is read once.
template <class Half, int Heads, int KP>
__device__ void make_columns(const PrepareShared<KP>& s, const HeadGates (&heads)[Heads], int b, int lane,
                             BlockColumn (&x)[Heads]) {
  const LanePlace at(lane);
  const uint32_t kk = shared_address(s.kk[0]) + Small::offset(at.row(), at.piece()),
                 inverse = shared_address(s.inverse[0]) + Small::offset(at.across_row(), at.across_piece());
#pragma unroll
  for (int a = 0; a < kBlocks; ++a) {
    if (a < b) {
#pragma unroll
      for (int h = 0; h < Heads; ++h) x[h].high[a] = x[h].low[a] = FragmentA{};
      continue;
    }
    if (a == b) {
#pragma unroll
      for (int h = 0; h < Heads; ++h) {
        load_matrices(x[h].high[a].x, inverse + h * kInverseBytes + a * kBlockBytes);
        load_matrices(x[h].low[a].x, inverse + h * kInverseBytes + a * kBlockBytes + kInverseBytes / 2);
      }
      continue;
    }
    float sum[Heads][2][4] = {};
#pragma unroll
    for (int m = 0; m < a; ++m) {
      if (m < b) continue;
      uint32_t high[4], low[4];
      load_matrices(high, kk + block_below(a, m) * kBlockBytes);
      load_matrices(low, kk + block_below(a, m) * kBlockBytes + sizeof(s.kk[0]));
#pragma unroll
      for (int h = 0; h < Heads; ++h) multiply_parts<Half>(sum[h], x[h].high[m], x[h].low[m], high, low);
    }
#pragma unroll
    for (int h = 0; h < Heads; ++h) {
      uint32_t high[4], low[4];
      load_matrices_transposed(high, inverse + h * kInverseBytes + a * kBlockBytes);
      load_matrices_transposed(low, inverse + h * kInverseBytes + a * kBlockBytes + kInverseBytes / 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 strength = *reinterpret_cast<const float2*>(&heads[h].beta[a * kBlock + half * 8 + lane % 4 * 2]);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[h][half][e] *= (e % 2 ? -strength.y : -strength.x) * kKeyUnit<Half>;
      }
      FragmentA sum_high, sum_low;
      split<Half>(sum[h][0], sum[h][1], sum_high, sum_low);
      float block[2][4] = {};
      multiply_parts<Half>(block, sum_high, sum_low, high, low);
      split<Half>(block[0], block[1], x[h].high[a], x[h].low[a]);
    }
  }
}

// M's rows (tokens) of a block column by 64 channels, from the descriptor of the first keys.
template <class Half>
__device__ void start_m(float (&d)[8][4], const BlockColumn& x, uint32_t keys) {
  wgmma_fence();
#pragma unroll
  for (int ks = 0; ks < kBlocks; ++ks) {
    const uint32_t b = keys + (ks * kBlock * 128 >> 4);
    if (ks == 0)
      wgmma<Half, false, true>(d, x.low[ks], b);
    else
      wgmma<Half, true, true>(d, x.low[ks], b);
    wgmma<Half, true, true>(d, x.high[ks], b);
  }
  wgmma_commit();
}

// R transposed: tokens j of a block column by tokens i, from descriptors of the scores' parts.
template <class Half, int Tiles>
__device__ void start_r(float (&d)[Tiles][4], const BlockColumn& x, uint32_t high, uint32_t low) {
  wgmma_fence();
#pragma unroll
  for (int ks = 0; ks < kBlocks; ++ks) {
    const uint32_t step = ks * 32 >> 4;
    if (ks == 0)
      wgmma<Half, false>(d, x.high[ks], low + step);
    else
      wgmma<Half, true>(d, x.high[ks], low + step);
    wgmma<Half, true>(d, x.low[ks], high + step);
    wgmma<Half, true>(d, x.high[ks], high + step);
  }
  wgmma_commit();
}

// The warp's 16 rows of a product as 16 columns of 64, or fewer, rows, rounded.
template <int Pairs>
__device__ void store_turned(uint32_t to, const LanePlace& at, int warp, const FragmentA (&x)[Pairs]) {
  to += Square::offset(at.row(), warp * 2 + at.piece());
#pragma unroll
  for (int pair = 0; pair < Pairs; ++pair) store_matrices_transposed(to + pair * 2048, x[pair].x);
}
template <class Half, int Tiles>
__device__ void store_turned(uint32_t to, const LanePlace& at, int warp, const float (&d)[Tiles][4]) {
  FragmentA x[Tiles / 2];
#pragma unroll
  for (int pair = 0; pair < Tiles / 2; ++pair) x[pair] = operand<Half>(d[2 * pair], d[2 * pair + 1]);
  store_turned(to, at, warp, x);
}

template <class Half>
__device__ void write_m(uint32_t to, const float* G, const float* beta, const LanePlace& at, int warp, int lane, float (&m)[8][4]) {
  const int j = warp * kBlock + lane / 4;
  const float carry[2] = {beta[j] * power2(G[kChunk - 1] - G[j]), beta[j + 8] * power2(G[kChunk - 1] - G[j + 8])};
#pragma unroll
  for (int nt = 0; nt < 8; ++nt)
#pragma unroll
    for (int e = 0; e < 4; ++e) m[nt][e] *= carry[e / 2];
  store_turned<Half>(to, at, warp, m);
}

// R with its decays and strengths. Blocks below the diagonal take e^(G_i - G_j) as the product of two factors, neither above 1, from the
// last token of block column j on; before the diagonal there are zeros, which stay zeros.
template <class Half>
__device__ void write_r(uint32_t to, const float* G, const float* beta, const LanePlace& at, int warp, int lane, float (&r)[8][4]) {
  const int j = warp * kBlock + lane / 4;
  const float from[2] = {G[j], G[j + 8]}, strength[2] = {beta[j], beta[j + 8]}, last = G[warp * kBlock + kBlock - 1];
  const float row[2] = {strength[0] * power2(last - from[0]), strength[1] * power2(last - from[1])};
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    if (n < warp) continue;
    float2 upto[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) upto[i] = *reinterpret_cast<const float2*>(&G[n * kBlock + i * 8 + lane % 4 * 2]);
    if (n == warp) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          r[2 * n + i][e] *= strength[e / 2] * power2(fminf((e % 2 ? upto[i].y : upto[i].x) - from[e / 2], 0.0f));
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float column[2] = {power2(upto[i].x - last), power2(upto[i].y - last)};
#pragma unroll
        for (int e = 0; e < 4; ++e) r[2 * n + i][e] *= row[e / 2] * column[e % 2];
      }
    }
  }
  store_turned<Half>(to, at, warp, r);
}

// R and M of one or two value heads from the inverses' block columns, one product ahead of what is written. One
// thread calls store_m(head) and store_r(head) where they lie in shared memory; at the last of each nobody reads keys, or scores, any
// more.
template <class Half, int KP, int Heads, class StoreM, class StoreR>
__device__ void multiply_out(PrepareShared<KP>& s, const HeadGates (&heads)[Heads], int warpgroup, int warp, int lane,
                             const BlockColumn (&x)[Heads], StoreM&& store_m, StoreR&& store_r) {
  constexpr int kHalves = KP / 64, kEach = kHalves + 1, kProducts = Heads * kEach;
  const LanePlace at(lane);
  const uint32_t keys = matrix_descriptor(shared_address(s.k)), scores = matrix_descriptor(shared_address(s.scores[0]));
  const uint32_t m_at = shared_address(s.m), r_at = shared_address(s.r);
  float d[2][8][4];
  const auto start = [&](int n) {
    const int half = n % kEach;
    if (half < kHalves)
      start_m<Half>(d[n % 2], x[n / kEach], keys + (half * kPanelBytes >> 4));
    else
      start_r<Half>(d[n % 2], x[n / kEach], scores, scores + (kPanelBytes >> 4));
  };
  start(0);
#pragma unroll
  for (int n = 0; n < kProducts; ++n) {
    if (n + 1 < kProducts) {
      start(n + 1);
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    pin(d[n % 2]);
    const int half = n % kEach;
    const HeadGates& head = heads[n / kEach];
    if (half < kHalves) {
      write_m<Half>(m_at + half * kPanelBytes, head.G, head.beta, at, warp, lane, d[n % 2]);
      if (half + 1 < kHalves) continue;
    } else {
      write_r<Half>(r_at, head.G, head.beta, at, warp, lane, d[n % 2]);
    }
    // What the copy engine took before has left: M's place and R's take turns. Behind the first M nobody reads inverses any more.
    fence_async();
    if (warp == 0 && lane == 0) wait_stores_read();
    meet(warpgroup);
    if (warp == 0 && lane == 0) {
      if (half < kHalves)
        store_m(n / kEach);
      else
        store_r(n / kEach);
    }
  }
}

// Products of keys with keys and queries, with their norms, to where inverses and R want them.
template <class Half, int KP>
__device__ void multiply_keys(PrepareShared<KP>& s, const Prefill& p, int warpgroup, int warp, int lane, uint32_t parity) {
  const LanePlace at(lane);
  const int g = lane / 4, t = lane % 4;
  const uint32_t k = matrix_descriptor(shared_address(s.k)), q = matrix_descriptor(shared_address(s.q));
  float kk[8][4], qk[8][4], square[2][4] = {};
  start_scores<Half, KP>(kk, k, k);
  barrier_wait(shared_address(&s.q_arrived), parity);
  start_scores<Half, KP>(qk, q, k);
  square_rows<Half, KP>(shared_address(s.q), warp, lane, square);
  wgmma_wait<1>();
  pin(kk);
  // The diagonal: row g has column g, of 8, in lane 4 g + g / 2.
  float own[2] = {};
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
    if (n == warp) {
      own[0] = g % 2 ? kk[2 * n][1] : kk[2 * n][0];
      own[1] = g % 2 ? kk[2 * n + 1][3] : kk[2 * n + 1][2];
    }
  float rk[2] = {1.0f, 1.0f}, rq[2] = {1.0f, 1.0f};
  if (p.args.l2_norm) {
    const int from = lane - t + g / 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float mine = i == 0 ? (g % 2 ? square[0][1] : square[0][0]) : (g % 2 ? square[1][3] : square[1][2]);
      rk[i] = rsqrtf(__shfl_sync(0xffffffffu, own[i], from) + kKeyNormEps<float>);
      rq[i] = rsqrtf(__shfl_sync(0xffffffffu, mine, from) + kKeyNormEps<float>);
    }
  }
  if (t == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      s.rk[warp * kBlock + i * 8 + g] = rk[i];
      s.rq[warp * kBlock + i * 8 + g] = rq[i];
    }
  }
  write_kk<Half>(s, at, warp, lane, rk, kk);
  wgmma_wait<0>();
  pin(qk);
  if (warp == 0 && lane == 0) wait_stores_read();  // R of the chunk before, where inverses go
  meet(warpgroup);                                 // nobody reads q any more
  const float read[2] = {p.scale * rq[0], p.scale * rq[1]};
  write_scores<Half>(s, at, warp, lane, read, qk);
}

// By one warp: gates of an item's value heads from `from` on, as many as there is room for.
template <int KP>
__device__ void fetch_gates(PrepareShared<KP>& s, const Prefill& p, const PrepareItem& item, int from, int lane, uint32_t slot) {
  const Chunk chunk{0, 0, item.token, int64_t{item.token} + item.length};
  const int count = min(value_heads(p) - from, kBatch);
  IncomingGates<> now, then;
  now.load(p.args.gates, chunk, value_head(p, item.head, from), lane);
#pragma unroll 1
  for (int j = 0; j < count; ++j) {
    if (j + 1 < count) then.load(p.args.gates, chunk, value_head(p, item.head, from + j + 1), lane);
    finish_gates(s.G[slot][j], s.beta[slot][j], p.args.gates, chunk, lane, now);
    now = then;
  }
}

// Prepares items as long as `source` has some, by the threads of a warpgroup, which know the block's barrier by its number. `Heads` value
// heads of a key head are made at once; it has a multiple of them. One warp calls source.next(), one thread tells `publish` what was
// started with the copy engine: started(row, hv) for a unit on its way, and settle() where the engine has had time for what was started
// before.
template <class Half, int Heads, int KP, class Source, class Publish>
__device__ void prepare_items(PrepareShared<KP>& s, const Prefill& p, const KeyMaps& maps, int warpgroup, unsigned thread,
                              Source& source, Publish& publish) {
  const int warp = thread / 32, lane = thread % 32, group = value_heads(p);
  const uint32_t k_arrived = shared_address(&s.k_arrived), q_arrived = shared_address(&s.q_arrived);
  if (warp == 3) {
    const PrepareItem item = source.next();
    if (lane == 0) s.items[0] = item;
    if (item.length > 0) fetch_gates(s, p, item, 0, lane, 0);
  }
  if (thread == 0) {
    barrier_init(k_arrived, 1);
    barrier_init(q_arrived, 1);
    fence_async();
  }
  meet(warpgroup);
  if (thread == 0 && s.items[0].length > 0) {
    copy_rows<KP>(s.items[0], s.k, maps.k, k_arrived);
    copy_rows<KP>(s.items[0], s.q, maps.q, q_arrived);
  }
  uint32_t slot = 0;  // of gates
  for (uint32_t parity = 0;; parity ^= 1, slot ^= 1) {
    const PrepareItem &item = s.items[parity], &next = s.items[parity ^ 1];
    const int length = item.length;
    if (length == 0) break;
    barrier_wait(k_arrived, parity);
    if (length < kChunk) {  // what lies behind the chunk is somebody else's
      barrier_wait(q_arrived, parity);
      for (int i = length * 8 + thread; i < kChunk * 8; i += kPrepareThreads)
#pragma unroll
        for (int panel = 0; panel < KP / 64; ++panel) {
          reinterpret_cast<uint4*>(s.k)[panel * kChunk * 8 + i] = uint4{0, 0, 0, 0};
          reinterpret_cast<uint4*>(s.q)[panel * kChunk * 8 + i] = uint4{0, 0, 0, 0};
        }
      fence_async();
      meet(warpgroup);
    }
    multiply_keys<Half>(s, p, warpgroup, warp, lane, parity);
    for (int first = 0; first < group; first += Heads) {
      if (first > 0) {
        if (first % kBatch == 0) slot ^= 1;
        if (thread == 0) wait_stores_read();
        meet(warpgroup);
      }
      const auto gates_of = [&](int h) { return HeadGates{s.G[slot][(first + h) % kBatch], s.beta[slot][(first + h) % kBatch]}; };
      const auto unit = [&](int h) { return p.units + (item.row * p.Hv + value_head(p, item.head, first + h)) * Unit<KP>::kBytes; };
      if (warp / 2 < Heads)
        invert_block<Half>(s, s.inverse[warp / 2], gates_of(warp / 2).beta, warp % 2 * 2 + lane / kBlock, lane % kBlock);
      fence_async();  // scores
      meet(warpgroup);
      // The last two warps have the least to invert.
      if (warp == 2) {
#pragma unroll 1
        for (int h = 0; h < Heads; ++h)
          for (int i = lane; i < kChunk; i += 32) write_factors(p, unit(h) + Unit<KP>::kFactors, gates_of(h).G, s.rk, s.rq, i);
      }
      if (warp == 3 && first % kBatch == 0) {
        int from = first + kBatch;
        PrepareItem coming = item;
        if (from >= group) {
          from = 0;
          coming = source.next();
          if (lane == 0) s.items[parity ^ 1] = coming;
          if (lane == 0 && coming.length > 0) {
#pragma unroll
            for (int panel = 0; panel < KP / 64; ++panel) {
              prefetch_tensor(maps.k, panel * 64, coming.head, coming.token);
              prefetch_tensor(maps.q, panel * 64, coming.head, coming.token);
            }
          }
        }
        if (coming.length > 0) fetch_gates(s, p, coming, from, lane, slot ^ 1);
      }
      HeadGates heads[Heads];
#pragma unroll
      for (int h = 0; h < Heads; ++h) heads[h] = gates_of(h);
      BlockColumn x[Heads];
      make_columns<Half>(s, heads, warp, lane, x);
      const auto is_last = [&](int h) { return first + h + 1 == group && next.length > 0; };
      multiply_out<Half>(
          s, heads, warpgroup, warp, lane, x,
          [&](int h) {
            publish.settle();
            store_bulk(unit(h) + Unit<KP>::kM, shared_address(s.m), KP * kChunk * 2);
            if (is_last(h)) copy_rows<KP>(next, s.k, maps.k, k_arrived);
          },
          [&](int h) {
            store_bulk(unit(h) + Unit<KP>::kR, shared_address(s.r), kChunk * kChunk * 2);
            publish.started(item.row, value_head(p, item.head, first + h));
            if (is_last(h)) copy_rows<KP>(next, s.q, maps.q, q_arrived);
          });
    }
  }
  if (thread == 0) wait_stores_read();  // from memory that may end here
}

#endif  // WEFT_HAS_WGMMA

}  // namespace weft::cuda
