// The prepare kernel with mma instructions, for every device: see prefill.cuh.
//
// A block prepares one chunk of a key head for all its value heads. A warp computes one block column of the inverse X and
// multiplies keys and scores with it from the same registers.
#include "cuda/delta/prefill_prepare.cuh"

namespace weft::cuda {
namespace {

template <int KP>
struct Shared {
  union {
    alignas(128) uint16_t q[kChunk * KP];
    alignas(128) uint16_t m[kChunk * KP];  // M transposed, replaces q
  };
  alignas(128) uint16_t k[kChunk * KP];
  alignas(128) uint16_t kk[2][kLowerBlocks * kBlockElements];  // rk_i rk_j k_i.k_j, blocks below the diagonal, split
  alignas(128) uint16_t qk[2][kChunk * kChunk];                // scale rq_i rk_j q_i.k_j for j <= i, split
  union {
    alignas(128) char inverse[kInverseBytes];  // diagonal blocks of X, split
    alignas(128) uint16_t r[kChunk * kChunk];  // R, replaces inverse
  };
  alignas(16) float diagonal[kChunk][kDiagonalPitch];     // rk_i rk_j k_i.k_j, diagonal blocks
  float G[kGateBatch][kChunk], beta[kGateBatch][kChunk];  // G in base 2
  float rk[kChunk], rq[kChunk];
};

// 1 / sqrt(sum x^2 + kKeyNormEps) of a row.
template <class Half, int KP>
__device__ float inverse_norm(const uint16_t* tile, int row) {
  float sum = 0;
#pragma unroll 4
  for (int piece = 0; piece < KP / 8; ++piece) {
    const uint4 x = *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(tile) + (piece / 8) * (kChunk * 128) +
                                                    Tile64::offset(row, piece % 8));
    for (uint32_t pair : {x.x, x.y, x.z, x.w}) {
      const float2 both = unpack<Half>(pair);
      sum = fmaf(both.x, both.x, fmaf(both.y, both.y, sum));
    }
  }
  return 1.0f / sqrtf(sum + kKeyNormEps<float>);
}

// Computes rows 16 w .. of K K^T and of the masked scores Q K^T, on and below the diagonal blocks, scaled, into shared memory; by
// warp w.
template <class Half, int KP>
__device__ void compute_scores(Shared<KP>& s, int warp, int lane, float scale) {
  const uint32_t q = shared_address(s.q), k = shared_address(s.k);
  const LdmatrixLane at(lane);
  const int g = lane / 4, t = lane % 4;
  float kk[8][4] = {}, qk[8][4] = {};
#pragma unroll
  for (int ks = 0; ks < KP / 16; ++ks) {
    const uint32_t panel = (ks / 4) * (kChunk * 128);
    FragmentA ak, aq;
    const uint32_t from = panel + Tile64::offset(warp * kBlock + at.across_row(), ks % 4 * 2 + at.across_piece());
    ldmatrix(ak.x, k + from);
    ldmatrix(aq.x, q + from);
#pragma unroll
    for (int pair = 0; pair < kBlocks; ++pair) {
      if (pair > warp) break;
      uint32_t b[4];
      ldmatrix(b, k + panel + Tile64::offset(pair * kBlock + at.row(), ks % 4 * 2 + at.piece()));
      multiply<Half>(kk[pair * 2], ak, b[0], b[1]);
      multiply<Half>(kk[pair * 2 + 1], ak, b[2], b[3]);
      multiply<Half>(qk[pair * 2], aq, b[0], b[1]);
      multiply<Half>(qk[pair * 2 + 1], aq, b[2], b[3]);
    }
  }
#pragma unroll
  for (int nt = 0; nt < 8; ++nt) {
    if (nt / 2 > warp) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = warp * kBlock + half * 8 + g, c = nt * 8 + 2 * t;
      const float key = s.rk[i], read = scale * s.rq[i], left = s.rk[c], right = s.rk[c + 1];
      const float x = kk[nt][half * 2] * key * left, y = kk[nt][half * 2 + 1] * key * right;
      store_kk<Half>(s, i, c, x, y);
      store_split<Half>(s.qk[0], s.qk[1], Tile64::offset(i, c / 8) + c % 8 * 2, c <= i ? qk[nt][half * 2] * read * left : 0.0f,
                        c + 1 <= i ? qk[nt][half * 2 + 1] * read * right : 0.0f);
    }
  }
}

// Computes M = diag(beta e^(G_C - G)) X^T diag(rk) K for the rows of block b, transposed into s.m.
template <class Half, int KP>
__device__ void write_m(Shared<KP>& s, const float* G, const float* beta, int b, int lane, const Column& column) {
  const LdmatrixLane at(lane);
  const int g = lane / 4, t = lane % 4;
  const uint32_t k = shared_address(s.k);
  FragmentA high[kBlocks], low[kBlocks];
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    if (b + n >= kBlocks) break;
    float scaled[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float left = s.rk[(b + n) * kBlock + half * 8 + 2 * t], right = s.rk[(b + n) * kBlock + half * 8 + 2 * t + 1];
#pragma unroll
      for (int e = 0; e < 4; ++e) scaled[half][e] = column.x[n][half][e] * (e % 2 ? right : left);
    }
    split<Half>(scaled[0], scaled[1], high[n], low[n]);
  }
  const float last = G[kChunk - 1];
  const int j = b * kBlock + g;
  const float upper = beta[j] * exp2_approx(last - G[j]), lower = beta[j + 8] * exp2_approx(last - G[j + 8]);
#pragma unroll
  for (int panel = 0; panel < KP / 32; ++panel) {  // 32 channels at a time
    float sum[4][4] = {};
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      if (b + n >= kBlocks) break;
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t x[4];
        ldmatrix_trans(x, k + (panel / 2) * (kChunk * 128) +
                              Tile64::offset((b + n) * kBlock + at.across_row(), panel % 2 * 4 + pair * 2 + at.across_piece()));
        multiply<Half>(sum[2 * pair], low[n], x[0], x[1]);
        multiply<Half>(sum[2 * pair + 1], low[n], x[2], x[3]);
        multiply<Half>(sum[2 * pair], high[n], x[0], x[1]);
        multiply<Half>(sum[2 * pair + 1], high[n], x[2], x[3]);
      }
    }
#pragma unroll
    for (int nt = 0; nt < 4; ++nt) {
      const int c = panel * 32 + nt * 8 + g;
      char* to = reinterpret_cast<char*>(s.m) + t * 4;
      *reinterpret_cast<uint32_t*>(to + Tile64::offset(c, b * 2)) = transpose(pack<Half>(sum[nt][0] * upper, sum[nt][1] * upper));
      *reinterpret_cast<uint32_t*>(to + Tile64::offset(c, b * 2 + 1)) =
          transpose(pack<Half>(sum[nt][2] * lower, sum[nt][3] * lower));
    }
  }
}

// Computes R for the columns of block b, transposed in accumulators, without decays and beta.
template <class Half, int KP>
__device__ void compute_r(const Shared<KP>& s, int b, int lane, const Column& column, float (&r)[kBlocks][2][4]) {
  const LdmatrixLane at(lane);
  const uint32_t qk[2] = {shared_address(s.qk[0]), shared_address(s.qk[1])};
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) r[n][i][e] = 0.0f;
    if (b + n >= kBlocks) continue;
#pragma unroll
    for (int m = 0; m <= n; ++m) {
      const uint32_t from = Tile64::offset((b + n) * kBlock + at.row(), (b + m) * 2 + at.piece());
      multiply_split_smem<Half>(r[n], column.high[m], column.low[m], qk[0] + from, qk[1] + from);
    }
  }
}

// Stores R with its decays and beta into s.r; blocks above the diagonal are zero.
template <class Half, int KP>
__device__ void write_r(Shared<KP>& s, const float* G, const float* beta, int b, int lane, const float (&r)[kBlocks][2][4]) {
  const int g = lane / 4, t = lane % 4, j = b * kBlock + g;
  char* to = reinterpret_cast<char*>(s.r) + t * 4;
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    if (b + n >= kBlocks) break;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = (b + n) * kBlock + tile * 8 + 2 * t + e % 2, column = j + e / 2 * 8;
        x[e] = i >= column ? r[n][tile][e] * beta[column] * exp2_approx(G[i] - G[column]) : 0.0f;
      }
      const int row = (b + n) * kBlock + tile * 8 + g;
      *reinterpret_cast<uint32_t*>(to + Tile64::offset(row, b * 2)) = transpose(pack<Half>(x[0], x[1]));
      *reinterpret_cast<uint32_t*>(to + Tile64::offset(row, b * 2 + 1)) = transpose(pack<Half>(x[2], x[3]));
    }
  }
  for (int row = lane / 2; row < b * kBlock; row += 16)
    *reinterpret_cast<uint4*>(reinterpret_cast<char*>(s.r) + Tile64::offset(row, b * 2 + lane % 2)) = uint4{0, 0, 0, 0};
}

template <class Half, int KP>
__global__ void __launch_bounds__(kPrepareThreads, 3) prepare_mma_kernel(const __grid_constant__ Prefill p) {
  extern __shared__ __align__(128) unsigned char raw[];
  Shared<KP>& s = *reinterpret_cast<Shared<KP>*>(raw);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t key_heads = static_cast<uint32_t>(p.Hk);
  const int64_t hk = blockIdx.x % key_heads, row = blockIdx.x / key_heads;
  const Chunk chunk = chunk_at(p.map, row);
  if (chunk.n < 0) return;
  load_rows<KP>(p.k, chunk, hk, static_cast<int>(p.K), s.k);
  load_rows<KP>(p.q, chunk, hk, static_cast<int>(p.K), s.q);
  cp_async_commit();
  const int group = static_cast<int>(static_cast<uint32_t>(p.Hv) / key_heads);
  const auto value_head = [&](int j) { return p.head_map == HeadMap::grouped ? hk * group + j : hk + j * p.Hk; };
  if (warp < group) read_gates(s.G[warp], s.beta[warp], p.gates, chunk, value_head(warp), lane);
  cp_async_wait<0>();
  __syncthreads();
  {
    const int mine = threadIdx.x % kChunk;
    const bool key = threadIdx.x < kChunk;
    (key ? s.rk : s.rq)[mine] = p.l2_norm ? inverse_norm<Half, KP>(key ? s.k : s.q, mine) : 1.0f;
  }
  __syncthreads();
  compute_scores<Half, KP>(s, warp, lane, p.scale);
  __syncthreads();

  for (int j = 0; j < group; ++j) {
    if (j > 0 && j % kGateBatch == 0) {
      if (j + warp < group) read_gates(s.G[warp], s.beta[warp], p.gates, chunk, value_head(j + warp), lane);
      __syncthreads();
    }
    const float *G = s.G[j % kGateBatch], *beta = s.beta[j % kGateBatch];
    // The first block column has the most work. Rotating it over the warps spreads it over the schedulers.
    const int b = (warp + j + static_cast<int>(blockIdx.x)) % kBlocks;
    if (lane < kBlock) invert_diagonal<Half>(s, s.inverse, beta, b, lane);
    __syncthreads();
    float r[kBlocks][2][4];
    {
      Column column;
      invert_column<Half>(s, s.inverse, beta, b, lane, column);
      compute_r<Half, KP>(s, b, lane, column, r);
      write_m<Half, KP>(s, G, beta, b, lane, column);
    }
    __syncthreads();  // all warps have read s.inverse, which R replaces
    write_r<Half, KP>(s, G, beta, b, lane, r);
    char* prepared = p.prepared + (row * p.Hv + value_head(j)) * PreparedChunk<KP>::kBytes;
    if (threadIdx.x < kChunk) write_factors(p, prepared + PreparedChunk<KP>::kFactors, G, s.rk, s.rq, threadIdx.x);
    __syncthreads();
    constexpr int kPiecesM = KP * kChunk / 8, kPiecesR = kChunk * kChunk / 8;
#pragma unroll 4
    for (int i = threadIdx.x; i < kPiecesM; i += kPrepareThreads)
      reinterpret_cast<uint4*>(prepared + PreparedChunk<KP>::kM)[i] = reinterpret_cast<const uint4*>(s.m)[i];
#pragma unroll
    for (int i = threadIdx.x; i < kPiecesR; i += kPrepareThreads)
      reinterpret_cast<uint4*>(prepared + PreparedChunk<KP>::kR)[i] = reinterpret_cast<const uint4*>(s.r)[i];
    __syncthreads();
  }
}

}  // namespace

size_t prepare_mma_shared(const Prefill& p) { return p.K <= 64 ? sizeof(Shared<64>) : sizeof(Shared<128>); }

void launch_prepare_mma(const Stream& stream, const Prefill& p) {
  dispatch_types(p, [&]<class Half, int KP>() {
    launch("gated_delta_rule_prefill", stream, p.map.rows * p.Hk, kPrepareThreads, prepare_mma_shared(p),
           prepare_mma_kernel<Half, KP>, p);
  });
}

}  // namespace weft::cuda
