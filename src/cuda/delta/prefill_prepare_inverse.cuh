// Shared memory of the prepare kernel with wgmma, its scores and its inverse X': see prefill_prepare_wgmma.cu.
#pragma once

#include "cuda/delta/prefill_prepare_wgmma.cuh"

namespace weft::cuda {

struct KeyTensorMaps {
  CUtensorMap q, k;
};

// A chunk of a key head. 32 bits suffice for tokens, since TMA coordinates have 32 bits.
struct alignas(16) PrepareItem {
  int row, head, token, length;  // length 0: there are no more items
};

// Shared memory of a block, which is one warpgroup.
template <int KP>
struct alignas(1024) PrepareShared {
  uint16_t k[kChunk * KP];
  union {
    uint16_t q[kChunk * KP];
    uint16_t scores[2][kChunk * kChunk];  // scale rq_i q_i.k_m for m <= i, split; replaces q
  };
  uint16_t m[kChunk * KP];  // M, until its TMA store has read it
  union {
    char inverse[2][kInverseBytes];  // diagonal blocks of X' of two value heads, transposed, split
    uint16_t r[kChunk * kChunk];     // R, until its TMA store has read it
  };
  uint16_t kk[2][kLowerBlocks * kBlockElements];  // rk_i k_i.k_j / kGramScale, blocks below the diagonal, split
  float diagonal[kChunk][kDiagonalPitch];         // rk_i k_i.k_j, diagonal blocks
  float G[2][kGateBatch][kChunk];                 // in base 2; double buffer for the current and the next batch of value heads
  float beta[2][kGateBatch][kChunk];
  float rk[kChunk], rq[kChunk];
  PrepareItem items[2];     // double buffer for the current and the next item
  uint64_t k_full, q_full;  // mbarriers of the TMA loads
};

#if WEFT_HAS_WGMMA

// Number of value heads of a key head, and the j-th of them.
__device__ inline int value_heads(const Prefill& p) {
  return static_cast<int>(static_cast<uint32_t>(p.Hv) / static_cast<uint32_t>(p.Hk));
}
__device__ inline int64_t value_head(const Prefill& p, int head, int j) {
  return p.head_map == HeadMap::grouped ? int64_t{head * value_heads(p) + j} : head + j * p.Hk;
}

// Starts the TMA load of an item's keys or queries.
template <int KP>
__device__ void load_tokens(const PrepareItem& item, uint16_t* to, const CUtensorMap& map, uint32_t full) {
  mbarrier_arrive_expect_tx(full, KP / 64 * kPanel);
#pragma unroll
  for (int panel = 0; panel < KP / 64; ++panel)
    tma_load(shared_address(to) + panel * kPanel, map, panel * 64, item.head, item.token, full);
}

// Squared norms of the warp's 16 rows of q, as the diagonal of the product of these rows with themselves.
template <class Half, int KP>
__device__ void squared_norms(uint32_t q, int warp, int lane, float (&square)[2][4]) {
  const LdmatrixLane at(lane);
#pragma unroll
  for (int ks = 0; ks < KP / 16; ++ks) {
    FragmentA a;
    ldmatrix(a.x, q + ks / 4 * kPanel + Tile64::offset(warp * kBlock + at.across_row(), ks % 4 * 2 + at.across_piece()));
    multiply<Half>(square[0], a, a.x[0], a.x[2]);
    multiply<Half>(square[1], a, a.x[1], a.x[3]);
  }
}

// Stores rows 16 w .. of K K^T, multiplied by rk of the row: the diagonal block in f32, the blocks left of it split.
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
      for (int e = 0; e < 4; ++e) kk[2 * n + i][e] *= n == warp ? rk[e / 2] : rk[e / 2] * (1 / kGramScale<Half>);
    if (n == warp) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        *reinterpret_cast<float2*>(&s.diagonal[warp * kBlock + i % 2 * 8 + g][i / 2 * 8 + 2 * t]) =
            float2{kk[2 * n + i / 2][i % 2 * 2], kk[2 * n + i / 2][i % 2 * 2 + 1]};
    } else {
      FragmentA high, low;
      split<Half>(kk[2 * n], kk[2 * n + 1], high, low);
      const uint32_t to =
          static_cast<uint32_t>(lower_block(warp, n)) * kBlockBytes + Tile16::offset(at.across_row(), at.across_piece());
      stmatrix(shared_address(s.kk[0]) + to, high.x[0], high.x[1], high.x[2], high.x[3]);
      stmatrix(shared_address(s.kk[1]) + to, low.x[0], low.x[1], low.x[2], low.x[3]);
    }
  }
}

// Stores rows 16 w .. of the masked scores, multiplied by `read` of the row, split.
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
    const uint32_t block = to + Tile64::offset(at.across_row(), n * 2 + at.across_piece());
    stmatrix(block, high.x[0], high.x[1], high.x[2], high.x[3]);
    stmatrix(block + kPanel, low.x[0], low.x[1], low.x[2], low.x[3]);
  }
}

// Inverts a diagonal block by forward substitution in f32, one lane per column. `inverse` receives the blocks one after another,
// transposed and split.
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
      const float sum = dot_prefix(s.diagonal[first + i], x, i);
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
    char* const to = inverse + block * kBlockBytes + Tile16::offset(column, piece);
    store_eight<Half>(to, to + kInverseBytes / 2, x + piece * 8);
  }
}

// Gates of a value head, in shared memory.
struct HeadGates {
  const float *G, *beta;
};

// A block column of X', transposed and split: 16 columns of X' as rows, by the tokens of the chunk.
struct BlockColumn {
  FragmentA high[kBlocks], low[kBlocks];
};

// Computes block column b of X' for one or two value heads. Only beta differs between them, so K K^T is loaded once.
template <class Half, int Heads, int KP>
__device__ void compute_block_columns(const PrepareShared<KP>& s, const HeadGates (&heads)[Heads], int b, int lane,
                                      BlockColumn (&x)[Heads]) {
  const LdmatrixLane at(lane);
  const uint32_t kk = shared_address(s.kk[0]) + Tile16::offset(at.row(), at.piece()),
                 inverse = shared_address(s.inverse[0]) + Tile16::offset(at.across_row(), at.across_piece());
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
      ldmatrix(high, kk + lower_block(a, m) * kBlockBytes);
      ldmatrix(low, kk + lower_block(a, m) * kBlockBytes + sizeof(s.kk[0]));
#pragma unroll
      for (int h = 0; h < Heads; ++h) multiply_split<Half>(sum[h], x[h].high[m], x[h].low[m], high, low);
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
        for (int e = 0; e < 4; ++e) sum[h][half][e] *= (e % 2 ? -strength.y : -strength.x) * kGramScale<Half>;
      }
      FragmentA sum_high, sum_low;
      split<Half>(sum[h][0], sum[h][1], sum_high, sum_low);
      float block[2][4] = {};
      multiply_split<Half>(block, sum_high, sum_low, high, low);
      split<Half>(block[0], block[1], x[h].high[a], x[h].low[a]);
    }
  }
}

#endif  // WEFT_HAS_WGMMA

}  // namespace weft::cuda
