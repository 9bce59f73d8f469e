// Register-level steps of the fused producer: inverse norms, the inverse of a subchunk, M and R. See prefill_fused_producer.cuh.
//
// With blocks 1 and 2 of 16 tokens, X' = diag(rk) X as in prefill_prepare_wgmma.cu, and N = -diag(beta rk) K K^T below the
// diagonal, the inverse of a subchunk is X'_11, X'_22 and X'_21 = X'_22 N_21 X'_11.
#pragma once

#include "cuda/delta/prefill_fused.cuh"

#if WEFT_HAS_WGMMA

namespace weft::cuda::fused {

// Accumulators of 16 x 16 as a split A operand. The same registers are the B operand of a product over their columns.
template <class Half>
struct SplitBlock {
  FragmentA high, low;
  __device__ void split_of(const float (&left)[4], const float (&right)[4]) { split<Half>(left, right, high, low); }
  __device__ void load(uint32_t at) {
    ldmatrix(high.x, at);
    ldmatrix(low.x, at ^ kLow);
  }
  __device__ void store(uint32_t at) const {
    stmatrix(at, high.x[0], high.x[1], high.x[2], high.x[3]);
    stmatrix(at ^ kLow, low.x[0], low.x[1], low.x[2], low.x[3]);
  }
};

// 1 / sqrt(x + kKeyNormEps).
__device__ inline float rsqrt_eps(float x) {
  float root;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x + kKeyNormEps<float>));
  return root;
}

// Inverse norms from the diagonal of a 16 x 16 block of K K^T, to every lane for its rows. The diagonal element of row g, of 8, is
// in lane 4 g + g / 2.
__device__ inline void diagonal_inverse_norms(const float (&x)[2][4], int lane, float (&out)[2]) {
  const int g = lane / 4, from = lane - lane % 4 + g / 2;
  const float own[2] = {g % 2 ? x[0][1] : x[0][0], g % 2 ? x[1][3] : x[1][2]};
#pragma unroll
  for (int i = 0; i < 2; ++i) out[i] = rsqrt_eps(__shfl_sync(0xffffffffu, own[i], from));
}

// Inverse norms of 16 rows of queries of both subchunks, to every lane for its rows. The rows of the second subchunk lie `next_sub`
// bytes further. Tensor cores would have to finish other products first, so the sums are ordinary arithmetic. The outer loop is not
// unrolled, to save instruction cache.
template <class Half>
__device__ void query_inverse_norms(uint32_t first_row, uint32_t next_sub, int lane, float (&out)[kSubchunks][2]) {
  uint32_t row = first_row + lane / 16 * kPanel + lane % 16 * 128;
  float roots[kSubchunks] = {};
#pragma unroll 1
  for (int sub = 0; sub < kSubchunks; ++sub, row += next_sub) {
    float even = 0, odd = 0;
#pragma unroll 4
    for (int piece = 0; piece < 8; ++piece) {
      const uint4 x = load_shared(row ^ (piece ^ lane % 8) << 4);
      const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 y = unpack<Half>(pairs[i]);
        even = fmaf(y.x, y.x, even);
        odd = fmaf(y.y, y.y, odd);
      }
    }
    const float half = even + odd, root = rsqrt_eps(half + __shfl_xor_sync(0xffffffffu, half, 16));
    roots[0] = sub ? roots[0] : root;
    roots[1] = root;
  }
#pragma unroll
  for (int i = 0; i < 2 * kSubchunks; ++i) out[i / 2][i % 2] = __shfl_sync(0xffffffffu, roots[i / 2], lane / 4 + i % 2 * 8);
}

// Inverts the diagonal block diag(1 / rk) - N of 16 tokens of both subchunks by substitution in f32, one lane per subchunk and
// column. `columns` are the columns of rk N. A column of the result becomes a row of `inverse`, split.
template <class Half>
__device__ void invert_diagonal_blocks(const float (&columns)[kSubchunks][kBlock][kBlock + 4], const float (&rk)[kSubchunks][2],
                                       char* inverse, int block, int lane) {
  const int column = lane % kBlock, sub = lane / kBlock, from = column % 8 * 4;
  float root[kSubchunks][2];
#pragma unroll
  for (int i = 0; i < 2 * kSubchunks; ++i) root[i / 2][i % 2] = __shfl_sync(0xffffffffu, rk[i / 2][i % 2], from);
  const float own = sub ? (column < 8 ? root[1][0] : root[1][1]) : (column < 8 ? root[0][0] : root[0][1]);
  float x[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) x[i] = i == column ? own : 0.0f;
#pragma unroll
  for (int m = 0; m + 1 < kBlock; ++m)
#pragma unroll
    for (int four = (m + 1) / 4 * 4; four < kBlock; four += 4) {
      const float4 n = *reinterpret_cast<const float4*>(&columns[sub][m][four]);
      if (four > m) x[four] = fmaf(n.x, x[m], x[four]);
      if (four + 1 > m) x[four + 1] = fmaf(n.y, x[m], x[four + 1]);
      if (four + 2 > m) x[four + 2] = fmaf(n.z, x[m], x[four + 2]);
      if (four + 3 > m) x[four + 3] = fmaf(n.w, x[m], x[four + 3]);
    }
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
    const uint32_t to = Tile64::offset(sub * kSubchunk + block * kBlock + column, block * 2 + piece);
    store_eight<Half>(inverse + to, inverse + (to ^ kLow), x + piece * 8);
  }
}

// Computes X'_21^T = X'_11^T N_21^T X'_22^T of a subchunk from `below` = N_21. `inverse` is the subchunk's first row.
template <class Half>
__device__ void invert_below(uint32_t inverse, const LdmatrixLane& at, SplitBlock<Half>& below) {
  const uint32_t first_at = inverse + Tile64::offset(at.across_row(), at.across_piece()),
                 below_at = inverse + Tile64::offset(at.across_row(), 2 + at.across_piece()), second_at = below_at + kBlock * 128;
  SplitBlock<Half> first, sum;
  first.load(first_at);
  float z[2][4] = {}, x[2][4] = {};
  const uint32_t n_high[4] = {below.high.x[0], below.high.x[2], below.high.x[1], below.high.x[3]},
                 n_low[4] = {below.low.x[0], below.low.x[2], below.low.x[1], below.low.x[3]};
  multiply_split<Half>(z, first.high, first.low, n_high, n_low);
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int e = 0; e < 4; ++e) z[m][e] *= kGramScale<Half>;
  sum.split_of(z[0], z[1]);
  uint32_t high[4], low[4];
  ldmatrix_trans(high, second_at);
  ldmatrix_trans(low, second_at ^ kLow);
  multiply_split<Half>(x, sum.high, sum.low, high, low);
  below.split_of(x[0], x[1]);
  below.store(below_at);
}

// Starts R without decays and beta: d = scores of all tokens times the inverses of both subchunks, 64 by 64. Rows and columns of
// different subchunks give values that are not used.
template <class Half>
__device__ void start_r(float (&d)[8][4], uint32_t scores, uint32_t inverse) {
  wgmma_fence();
#pragma unroll
  for (int ks = 0; ks < kSubchunk / 16; ++ks) {
    const uint32_t high = ks * 32 >> 4, low = (kLow + ks * 32) >> 4;
    if (ks == 0)
      wgmma_shared<Half, false>(d, scores + high, inverse + low);
    else
      wgmma_shared<Half, true>(d, scores + high, inverse + low);
    wgmma_shared<Half, true>(d, scores + low, inverse + high);
    wgmma_shared<Half, true>(d, scores + high, inverse + high);
  }
  wgmma_commit();
}

// Starts M transposed, without decays and beta: 64 channels by the tokens of a subchunk, from smem descriptors of its keys and its
// inverse.
template <class Half>
__device__ void start_m(float (&d)[kSubchunk / 8][4], uint32_t keys, uint32_t inverse) {
  wgmma_fence();
#pragma unroll
  for (int ks = 0; ks < kSubchunk / 16; ++ks) {
    const uint32_t a = keys + (ks * kBlock * 128 >> 4), high = inverse + (ks * 32 >> 4), low = high + (kLow >> 4);
    if (ks == 0)
      wgmma_shared<Half, false, true>(d, a, low);
    else
      wgmma_shared<Half, true, true>(d, a, low);
    wgmma_shared<Half, true, true>(d, a, high);
  }
  wgmma_commit();
}

// A lane's prefix sums G for the decays of R: of its rows i (`upto`), of the columns j (`from`), and of the last token of the first
// block. Decays between the blocks are the product of a factor up to that token and a factor from it on, neither above 1.
struct RowDecays {
  float upto[2], last;
  float2 from[kSubchunk / 8];
  __device__ RowDecays(const Gates& gates, int warp, int lane)
      : upto{gates.G[warp * kBlock + lane / 4], gates.G[warp * kBlock + lane / 4 + 8]},
        last(gates.G[warp / 2 * kSubchunk + kBlock - 1]) {
    load_factors(gates.G + warp / 2 * kSubchunk, lane, from);
  }
};

// Stores the warp's 16 rows i of R, with decays and beta. Columns j > i are zero and stay zero.
template <class Half>
__device__ void finish_r(uint32_t to, const RowDecays& decays, const float* beta, const LdmatrixLane& at, int warp, int lane,
                         const float (&r)[8][4]) {
  const int sub = warp / 2, block = warp % 2;
  to += Tile64::offset(block * kBlock + at.across_row(), sub * 4 + at.across_piece());
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    float own[2][4] = {};
    if (n <= block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 strength = *reinterpret_cast<const float2*>(&beta[sub * kSubchunk + n * kBlock + half * 8 + lane % 4 * 2]);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          own[half][e] = (sub ? r[4 + 2 * n + half][e] : r[2 * n + half][e]) * (e % 2 ? strength.y : strength.x);
      }
      if (n == block) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float2 from = decays.from[2 * n + half];
            own[half][e] *= exp2_approx(fminf(decays.upto[e / 2] - (e % 2 ? from.y : from.x), 0.0f));
          }
      } else {
        const float row[2] = {exp2_approx(decays.upto[0] - decays.last), exp2_approx(decays.upto[1] - decays.last)};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 from = decays.from[2 * n + half];
          const float column[2] = {exp2_approx(decays.last - from.x), exp2_approx(decays.last - from.y)};
#pragma unroll
          for (int e = 0; e < 4; ++e) own[half][e] *= row[e / 2] * column[e % 2];
        }
      }
    }
    const FragmentA rounded = operand<Half>(own[0], own[1]);
    stmatrix(to ^ n * 32, rounded.x[0], rounded.x[1], rounded.x[2], rounded.x[3]);
  }
}

// Stores M transposed with decays and beta: 16 of 64 channels per warp, by the tokens of a subchunk.
template <class Half>
__device__ void finish_m(uint32_t to, const float2 (&m_scale)[kSubchunk / 8], float (&m)[kSubchunk / 8][4]) {
  pin(m);
#pragma unroll
  for (int pair = 0; pair < kSubchunk / 16; ++pair) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int e = 0; e < 4; ++e) m[pair * 2 + half][e] *= e % 2 ? m_scale[pair * 2 + half].y : m_scale[pair * 2 + half].x;
    const FragmentA rounded = operand<Half>(m[pair * 2], m[pair * 2 + 1]);
    stmatrix(to ^ pair * 32, rounded.x[0], rounded.x[1], rounded.x[2], rounded.x[3]);
  }
}

// Sets keys and queries of a chunk beyond the sequence to 0. Their weights are 0, but a NaN would still spread.
__device__ inline void clear_tokens(unsigned char* first, unsigned char* second, int length, int thread) {
  for (int i = length * 8 + thread; i < kChunk * 8; i += 128)
#pragma unroll
    for (int panel = 0; panel < K / 64; ++panel) {
      unsigned char* key = (i < kSubchunk * 8 ? first : second) + panel * kPanel + i % (kSubchunk * 8) * 16;
      *reinterpret_cast<uint4*>(key) = uint4{0, 0, 0, 0};
      *reinterpret_cast<uint4*>(key + KeyStage::kQueries) = uint4{0, 0, 0, 0};
    }
  fence_proxy_async();
}

}  // namespace weft::cuda::fused

#endif  // WEFT_HAS_WGMMA
