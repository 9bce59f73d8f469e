// The chunk-parallel part of the tensor-core prefill by Hopper's warpgroup products: see prefill.cuh.
//
// A warpgroup prepares a chunk of a key head for all its value heads. Inverses are made as in the portable kernel; everything else is a
// product of the whole warpgroup: K K^T and Q K^T once, then for every value head, with X' = diag(rk) X transposed in shared memory,
// R from the scores in registers and M^T = K^T X' from the keys as they lie. The copy engine takes both away.
#include "cuda/prefill_prepare.cuh"
#include "cuda/wgmma.cuh"

namespace weft::cuda {
namespace {

template <int KP>
struct alignas(1024) Shared {
  union {
    uint16_t q[kChunk * KP];
    uint16_t m[kChunk * KP];  // M on its way out, once q is no longer needed
  };
  uint16_t k[kChunk * KP];
  uint16_t x[2][kChunk * kChunk];              // X' transposed, two parts; blocks before the diagonal stay 0
  uint16_t kk[2][(kChunk - kBlock) * kChunk];  // rk_i rk_j k_i.k_j below the diagonal blocks, from row 16; two parts
  union {
    uint16_t inverse[2][kChunk * kInversePitch];  // diagonal blocks of X, two parts
    uint16_t r[kChunk * kChunk];                  // R on its way out
  };
  float diagonal[kChunk][kDiagonalPitch];         // diagonal blocks of kk
  float G[kBatch][kChunk], beta[kBatch][kChunk];  // G in base 2
  float rk[kChunk], rq[kChunk];
};

#if WEFT_HAS_WGMMA

constexpr int kPanelBytes = kChunk * 128;  // 64 rows of 64 elements

// What the norms and the scores of a warp's 16 rows leave in registers: scale rq_i q_i.k_m for m <= i, as operands in two parts.
struct Scores {
  FragmentA high[4], low[4];
};

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

// K K^T with its norms to shared memory, as inverses want it; scores to registers.
template <class Half, int KP>
__device__ void products(Shared<KP>& s, const Prefill& p, int warp, int lane, Scores& scores) {
  const uint32_t q = matrix_descriptor(shared_address(s.q)), k = matrix_descriptor(shared_address(s.k));
  const int g = lane / 4, t = lane % 4;
  float kk[8][4], qk[8][4], square[2][4] = {};
  wgmma_fence();
#pragma unroll
  for (int ks = 0; ks < KP / 16; ++ks) {
    const uint32_t step = (ks / 4 * kPanelBytes + ks % 4 * 32) >> 4;
    if (ks == 0)
      wgmma_shared<Half, false, false>(kk, k + step, k + step);
    else
      wgmma_shared<Half, true, false>(kk, k + step, k + step);
  }
#pragma unroll
  for (int ks = 0; ks < KP / 16; ++ks) {
    const uint32_t step = (ks / 4 * kPanelBytes + ks % 4 * 32) >> 4;
    if (ks == 0)
      wgmma_shared<Half, false, false>(qk, q + step, k + step);
    else
      wgmma_shared<Half, true, false>(qk, q + step, k + step);
  }
  wgmma_commit();
  square_rows<Half, KP>(shared_address(s.q), warp, lane, square);
  wgmma_wait<0>();
  pin(kk);
  pin(qk);
  // The diagonal: row g has column g, of 8, in lane 4 g + g / 2.
  float own[2] = {};
#pragma unroll
  for (int nt = 0; nt < 8; ++nt)
    if (nt / 2 == warp) own[nt % 2] = nt % 2 == 0 ? (g % 2 ? kk[nt][1] : kk[nt][0]) : (g % 2 ? kk[nt][3] : kk[nt][2]);
  if (t == g / 2) {
    const int row = warp * kBlock + g;
    const auto factor = [&](float x) { return p.args.l2_norm ? 1.0f / sqrtf(x + 1e-6f) : 1.0f; };
    s.rk[row] = factor(own[0]);
    s.rk[row + 8] = factor(own[1]);
    s.rq[row] = factor(g % 2 ? square[0][1] : square[0][0]);
    s.rq[row + 8] = factor(g % 2 ? square[1][3] : square[1][2]);
  }
  __syncthreads();
#pragma unroll
  for (int nt = 0; nt < 8; ++nt) {
    if (nt / 2 > warp) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = warp * kBlock + half * 8 + g, c = nt * 8 + 2 * t;
      const float key = s.rk[i], x = kk[nt][half * 2] * key * s.rk[c], y = kk[nt][half * 2 + 1] * key * s.rk[c + 1];
      if (nt / 2 == warp) {
        s.diagonal[i][c - warp * kBlock] = x;
        s.diagonal[i][c - warp * kBlock + 1] = y;
      } else {
        store_split<Half>(s.kk[0], s.kk[1], i - kBlock, c, x, y);
      }
    }
  }
  const float read[2] = {p.scale * s.rq[warp * kBlock + g], p.scale * s.rq[warp * kBlock + g + 8]};
#pragma unroll
  for (int nt = 0; nt < 8; ++nt)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      qk[nt][e] = nt * 8 + 2 * t + e % 2 <= warp * kBlock + e / 2 * 8 + g ? qk[nt][e] * read[e / 2] : 0.0f;
#pragma unroll
  for (int ks = 0; ks < 4; ++ks) split<Half>(qk[2 * ks], qk[2 * ks + 1], scores.high[ks], scores.low[ks]);
}

// A block column of the inverse, times rk, as rows of X' transposed.
template <class Half, int KP>
__device__ void write_column(Shared<KP>& s, int b, int lane, const Column& column) {
  const LanePlace at(lane);
  const int t = lane % 4;
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    if (b + n >= kBlocks) break;
    float scaled[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 key = *reinterpret_cast<const float2*>(&s.rk[(b + n) * kBlock + half * 8 + 2 * t]);
#pragma unroll
      for (int e = 0; e < 4; ++e) scaled[half][e] = column.x[n][half][e] * (e % 2 ? key.y : key.x);
    }
    FragmentA high, low;
    split<Half>(scaled[0], scaled[1], high, low);
    const uint32_t to = Square::offset(b * kBlock + at.across_row(), (b + n) * 2 + at.across_piece());
    store_matrices(shared_address(s.x[0]) + to, high.x[0], high.x[1], high.x[2], high.x[3]);
    store_matrices(shared_address(s.x[1]) + to, low.x[0], low.x[1], low.x[2], low.x[3]);
  }
}

// Sixteen rows of a product, rounded, to rows of 64 elements.
template <class Half>
__device__ void store_rows(uint32_t to, const LanePlace& at, const float (&d)[8][4]) {
#pragma unroll
  for (int pair = 0; pair < 4; ++pair)
    store_matrices(to + Square::offset(at.across_row(), pair * 2 + at.across_piece()), pack<Half>(d[2 * pair][0], d[2 * pair][1]),
                   pack<Half>(d[2 * pair][2], d[2 * pair][3]), pack<Half>(d[2 * pair + 1][0], d[2 * pair + 1][1]),
                   pack<Half>(d[2 * pair + 1][2], d[2 * pair + 1][3]));
}

// R of the warp's rows, its decays and strengths included.
template <class Half, int KP>
__device__ void write_r(Shared<KP>& s, const float* G, const float* beta, int warp, int lane, float (&r)[8][4]) {
  const int g = lane / 4, t = lane % 4, i = warp * kBlock + g;
  const float upper = G[i], lower = G[i + 8];
#pragma unroll
  for (int nt = 0; nt < 8; ++nt) {
    const int j = nt * 8 + 2 * t;
    const float2 from = *reinterpret_cast<const float2*>(&G[j]), strength = *reinterpret_cast<const float2*>(&beta[j]);
    r[nt][0] = i >= j ? r[nt][0] * strength.x * power2(upper - from.x) : 0.0f;
    r[nt][1] = i > j ? r[nt][1] * strength.y * power2(upper - from.y) : 0.0f;
    r[nt][2] = i + 8 >= j ? r[nt][2] * strength.x * power2(lower - from.x) : 0.0f;
    r[nt][3] = i + 8 > j ? r[nt][3] * strength.y * power2(lower - from.y) : 0.0f;
  }
  store_rows<Half>(shared_address(s.r) + warp * kBlock * 128, LanePlace(lane), r);
}

// Sixteen rows (channels) of M transposed, from row `first` on, with what a correction's decay and strength add.
template <class Half, int KP>
__device__ void write_m(Shared<KP>& s, const float* G, const float* beta, int first, int lane, float (&m)[8][4]) {
  const int t = lane % 4;
  const float last = G[kChunk - 1];
#pragma unroll
  for (int nt = 0; nt < 8; ++nt) {
    const int j = nt * 8 + 2 * t;
    const float2 from = *reinterpret_cast<const float2*>(&G[j]), strength = *reinterpret_cast<const float2*>(&beta[j]);
    const float left = strength.x * power2(last - from.x), right = strength.y * power2(last - from.y);
    m[nt][0] *= left;
    m[nt][1] *= right;
    m[nt][2] *= left;
    m[nt][3] *= right;
  }
  store_rows<Half>(shared_address(s.m) + first * 128, LanePlace(lane), m);
}

// R and M of a value head from X' transposed.
template <class Half, int KP>
__device__ void multiply_out(Shared<KP>& s, const float* G, const float* beta, int warp, int lane, const Scores& scores) {
  const uint32_t k = matrix_descriptor(shared_address(s.k));
  const uint32_t x[2] = {matrix_descriptor(shared_address(s.x[0])), matrix_descriptor(shared_address(s.x[1]))};
  float r[8][4], m[8][4];
  // Tokens are k: sixteen of them are 2048 bytes of keys, 32 of a row of X'.
  const auto start_m = [&](int half) {
#pragma unroll
    for (int ks = 0; ks < 4; ++ks) {
      const uint32_t keys = k + ((half * kPanelBytes + ks * 2048) >> 4), step = ks * 32 >> 4;
      if (ks == 0)
        wgmma_shared<Half, false, true>(m, keys, x[1] + step);
      else
        wgmma_shared<Half, true, true>(m, keys, x[1] + step);
      wgmma_shared<Half, true, true>(m, keys, x[0] + step);
    }
    wgmma_commit();
  };
  wgmma_fence();
#pragma unroll
  for (int ks = 0; ks < 4; ++ks) {
    const uint32_t step = ks * 32 >> 4;
    if (ks == 0)
      wgmma<Half, false>(r, scores.high[ks], x[1] + step);
    else
      wgmma<Half, true>(r, scores.high[ks], x[1] + step);
    wgmma<Half, true>(r, scores.low[ks], x[0] + step);
    wgmma<Half, true>(r, scores.high[ks], x[0] + step);
  }
  start_m(0);
  wgmma_wait<0>();
  pin(r);
  pin(m);
  write_r<Half, KP>(s, G, beta, warp, lane, r);
  write_m<Half, KP>(s, G, beta, warp * kBlock, lane, m);
  if constexpr (KP == 128) {
    pin(m);
    wgmma_fence();
    start_m(1);
    wgmma_wait<0>();
    pin(m);
    write_m<Half, KP>(s, G, beta, kChunk + warp * kBlock, lane, m);
  }
}

#endif  // WEFT_HAS_WGMMA

template <class Half, int KP>
__global__ void __launch_bounds__(kPrepareThreads, 3) prepare_wgmma_kernel(const __grid_constant__ Prefill p) {
#if WEFT_HAS_WGMMA
  extern __shared__ __align__(1024) unsigned char raw[];
  Shared<KP>& s = *reinterpret_cast<Shared<KP>*>(raw);
  if (shared_address(raw) % 1024 != 0) __trap();  // products want their tiles so; nothing else lies in shared memory
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t key_heads = static_cast<uint32_t>(p.Hk);
  const int64_t hk = blockIdx.x % key_heads, row = blockIdx.x / key_heads;
  const Chunk chunk = chunk_at(p.map, row);
  if (chunk.n < 0) return;
  const int group = static_cast<int>(static_cast<uint32_t>(p.Hv) / key_heads);
  const auto value_head = [&](int j) { return p.args.head_map == HeadMap::grouped ? hk * group + j : hk + j * p.Hk; };
  IncomingGates gates;
  if (warp < group) gates.load(p.args.gates, chunk, value_head(warp), lane);
  load_rows<KP>(p.args.k, chunk, hk, static_cast<int>(p.K), s.k);
  load_rows<KP>(p.args.q, chunk, hk, static_cast<int>(p.K), s.q);
  commit_copies();
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(s.x) / 16) / kPrepareThreads; ++i)
    reinterpret_cast<uint4*>(s.x)[i * kPrepareThreads + threadIdx.x] = uint4{0, 0, 0, 0};
  if (warp < group) finish_gates(s.G[warp], s.beta[warp], p.args.gates, chunk, lane, gates);
  wait_copies<0>();
  fence_async();
  __syncthreads();
  Scores scores;
  products<Half, KP>(s, p, warp, lane, scores);
  __syncthreads();

  for (int j = 0; j < group; ++j) {
    if (j > 0) {
      if (threadIdx.x == 0) wait_stores_read();  // R is about to be overwritten, and M
      if (j % kBatch == 0 && j + warp < group) read_gates(s.G[warp], s.beta[warp], p.args.gates, chunk, value_head(j + warp), lane);
      __syncthreads();
    }
    const float *G = s.G[j % kBatch], *beta = s.beta[j % kBatch];
    // The first column has the most work: another warp, and with it another scheduler, takes it every time.
    const int b = (warp + j + static_cast<int>(blockIdx.x)) % kBlocks;
    invert_diagonal<Half>(s, beta, b, lane);
    __syncthreads();
    {
      Column column;
      invert_column<Half>(s, beta, b, lane, column);
      write_column<Half, KP>(s, b, lane, column);
    }
    fence_async();
    __syncthreads();  // X' is there, and nobody reads s.inverse any more
    multiply_out<Half, KP>(s, G, beta, warp, lane, scores);
    fence_async();
    char* unit = p.units + (row * p.Hv + value_head(j)) * Unit<KP>::kBytes;
    if (threadIdx.x < kChunk)
      write_factors(p, chunk, unit + Unit<KP>::kFactors, p.Hv * Unit<KP>::kBytes, G, s.rk, s.rq, threadIdx.x);
    __syncthreads();
    if (threadIdx.x == 0) {
      store_bulk(unit + Unit<KP>::kM, shared_address(s.m), KP * kChunk * 2);
      store_bulk(unit + Unit<KP>::kR, shared_address(s.r), kChunk * kChunk * 2);
    }
  }
  if (threadIdx.x == 0) wait_stores_read();
#endif
}

}  // namespace

void launch_wgmma_prepare(const Stream& stream, const Prefill& p) {
  for_types(p, [&]<class Half, int KP>() {
    launch("gated_delta_rule_prefill", stream, p.map.rows * p.Hk, kPrepareThreads, sizeof(Shared<KP>),
           prepare_wgmma_kernel<Half, KP>, p);
  });
}

}  // namespace weft::cuda
