// What a warpgroup works in that prepares chunks before the pass, and its inverses: see prefill_prepare_wgmma.cu.
#pragma once

#include "cuda/delta/prefill_prepare_wgmma.cuh"

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
  mbarrier_arrive_expect_tx(arrived, KP / 64 * kPanel);
#pragma unroll
  for (int panel = 0; panel < KP / 64; ++panel)
    tma_load(shared_address(to) + panel * kPanel, map, panel * 64, item.head, item.token, arrived);
}

// Squared lengths of the warp's rows of q on the diagonal of their product with themselves.
template <class Half, int KP>
__device__ void square_rows(uint32_t q, int warp, int lane, float (&square)[2][4]) {
  const LdmatrixLane at(lane);
#pragma unroll
  for (int ks = 0; ks < KP / 16; ++ks) {
    FragmentA a;
    ldmatrix(a.x, q + ks / 4 * kPanel + Square::offset(warp * kBlock + at.across_row(), ks % 4 * 2 + at.across_piece()));
    multiply<Half>(square[0], a, a.x[0], a.x[2]);
    multiply<Half>(square[1], a, a.x[1], a.x[3]);
  }
}

// Rows 16 w .. of K K^T with the norms of these rows, as inverses want them.
template <class Half, int KP>
__device__ void write_kk(PrepareShared<KP>& s, const LdmatrixLane& at, int warp, int lane, const float (&rk)[2],
                         float (&kk)[8][4]) {
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
      stmatrix(shared_address(s.kk[0]) + to, high.x[0], high.x[1], high.x[2], high.x[3]);
      stmatrix(shared_address(s.kk[1]) + to, low.x[0], low.x[1], low.x[2], low.x[3]);
    }
  }
}

// Rows 16 w .. of the scores.
template <class Half, int KP>
__device__ void write_scores(PrepareShared<KP>& s, const LdmatrixLane& at, int warp, int lane, const float (&read)[2],
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
    stmatrix(place, high.x[0], high.x[1], high.x[2], high.x[3]);
    stmatrix(place + kPanel, low.x[0], low.x[1], low.x[2], low.x[3]);
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
      const float sum = sum_of_row(s.diagonal[first + i], x, i);
      const int e = i - four;
      x[i] = (e == 0   ? key.x
              : e == 1 ? key.y
              : e == 2 ? key.z
                       : key.w) *
             ((i == column ? 1.0f : 0.0f) - (e == 0   ? strength.x
                                             : e == 1 ? strength.y
                                             : e == 2 ? strength.z
                                                      : strength.w) *
                                                sum);
    }
  }
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
    char* const to = inverse + block * kBlockBytes + Small::offset(column, piece);
    store_eight<Half>(to, to + kInverseBytes / 2, x + piece * 8);
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

// Block column b of one or two value heads, whose strengths differ; what they share is read once.
template <class Half, int Heads, int KP>
__device__ void make_columns(const PrepareShared<KP>& s, const HeadGates (&heads)[Heads], int b, int lane,
                             BlockColumn (&x)[Heads]) {
  const LdmatrixLane at(lane);
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
        ldmatrix(x[h].high[a].x, inverse + h * kInverseBytes + a * kBlockBytes);
        ldmatrix(x[h].low[a].x, inverse + h * kInverseBytes + a * kBlockBytes + kInverseBytes / 2);
      }
      continue;
    }
    float sum[Heads][2][4] = {};
#pragma unroll
    for (int m = 0; m < a; ++m) {
      if (m < b) continue;
      uint32_t high[4], low[4];
      ldmatrix(high, kk + block_below(a, m) * kBlockBytes);
      ldmatrix(low, kk + block_below(a, m) * kBlockBytes + sizeof(s.kk[0]));
#pragma unroll
      for (int h = 0; h < Heads; ++h) multiply_parts<Half>(sum[h], x[h].high[m], x[h].low[m], high, low);
    }
#pragma unroll
    for (int h = 0; h < Heads; ++h) {
      uint32_t high[4], low[4];
      ldmatrix_trans(high, inverse + h * kInverseBytes + a * kBlockBytes);
      ldmatrix_trans(low, inverse + h * kInverseBytes + a * kBlockBytes + kInverseBytes / 2);
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

#endif  // WEFT_HAS_WGMMA

}  // namespace weft::cuda
