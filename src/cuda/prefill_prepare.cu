// The chunk-parallel part of the tensor-core prefill: see prefill.cuh.
#include "cuda/elements.cuh"
#include "cuda/gate_math.cuh"
#include "cuda/mma.cuh"
#include "cuda/prefill.cuh"

namespace weft::cuda {
namespace {

constexpr int kThreads = 128, kPitch = kChunk + 4, kBlock = 16;  // kPitch keeps rows aligned to 16 bytes
constexpr float kLog2e = 1.4426950408889634f;
// Below this a decay is 0 in f32; as a number, unlike minus infinity, it can be subtracted from itself.
constexpr float kFloor = -300.0f;

template <int KP>
struct Shared {
  alignas(128) uint16_t q[kChunk * KP];
  alignas(128) uint16_t k[kChunk * KP];
  alignas(16) float lower[kChunk][kPitch];
  alignas(16) float inverse[kChunk][kPitch];              // lower blocks; those above the diagonal are room for invert_level
  float G[kChunk], beta[kChunk], rk[kChunk], rq[kChunk];  // G in base 2
};

template <int KP>
__device__ void load_rows(const Tensor& t, const Chunk& chunk, int64_t head, int K, uint16_t* tile) {
  const uint32_t base = shared_address(tile);
  for (int at = threadIdx.x; at < kChunk * KP / 8; at += kThreads) {
    const int row = at / (KP / 8), piece = at % (KP / 8);
    const bool there = row < chunk.length() && piece * 8 < K;
    const int64_t offset = there ? (chunk.begin + row) * t.strides[0] + head * t.strides[1] + piece * 8 : 0;
    copy_async(base + Tile<KP>::offset(row, piece), static_cast<const uint16_t*>(t.data) + offset, there);
  }
}

// 1 / sqrt(sum x^2 + 1e-6) of a row.
template <class Half, int KP>
__device__ float inverse_norm(const uint16_t* tile, int row) {
  float sum = 0;
  for (int piece = 0; piece < KP / 8; ++piece) {
    const uint4 x = *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(tile) + Tile<KP>::offset(row, piece));
    for (uint32_t pair : {x.x, x.y, x.z, x.w}) {
      const float2 both = unpack<Half>(pair);
      sum = fmaf(both.x, both.x, fmaf(both.y, both.y, sum));
    }
  }
  return 1.0f / sqrtf(sum + 1e-6f);
}

// The lower blocks of K K^T and Q K^T: rows 16 w .. of warp w, columns up to the diagonal block.
template <class Half, int KP>
__device__ void products(const Shared<KP>& s, int warp, int lane, float (&kk)[8][4], float (&qk)[8][4]) {
  const uint32_t q = shared_address(s.q), k = shared_address(s.k);
  const int matrix = lane / 8, r = lane % 8;
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) kk[i][j] = qk[i][j] = 0.0f;
#pragma unroll
  for (int ks = 0; ks < KP / 16; ++ks) {
    // A: rows 0-7, 8-15 of the left half, then of the right half.
    FragmentA ak, aq;
    const uint32_t at = Tile<KP>::offset(warp * kBlock + (matrix & 1) * 8 + r, ks * 2 + (matrix >> 1));
    load_matrices(ak.x, k + at);
    load_matrices(aq.x, q + at);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      if (pair > warp) break;
      uint32_t b[4];
      load_matrices(b, k + Tile<KP>::offset(pair * kBlock + (matrix >> 1) * 8 + r, ks * 2 + (matrix & 1)));
      multiply<Half>(kk[pair * 2], ak, b[0], b[1]);
      multiply<Half>(kk[pair * 2 + 1], ak, b[2], b[3]);
      multiply<Half>(qk[pair * 2], aq, b[0], b[1]);
      multiply<Half>(qk[pair * 2 + 1], aq, b[2], b[3]);
    }
  }
}

// Prefix sums of the log decay (base 2) and write strengths of a value head, by the first warp: two tokens per lane.
template <int KP>
__device__ void read_gates(Shared<KP>& s, const DeltaGateInputs& gates, const Chunk& chunk, int64_t hv, int lane) {
  float g[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = lane * 2 + i;
    const bool there = row < chunk.length();
    g[i] = there ? fmaxf(log_decay_of(gates, chunk.begin + row, hv, 0), kFloor) : 0.0f;
    s.beta[row] = there ? strength_of(gates, chunk.begin + row, hv) : 0.0f;
  }
  float upto = g[0] + g[1];
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, upto, step);
    if (lane >= step) upto += other;
  }
  s.G[lane * 2 + 1] = upto * kLog2e;
  s.G[lane * 2] = (upto - g[1]) * kLog2e;
}

// The inverse of the diagonal block of a warp: a lane per column, by substitution.
template <int KP>
__device__ void invert_diagonal(Shared<KP>& s, int warp, int lane) {
  if (lane >= kBlock) return;
  const int first = warp * kBlock;
  float x[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    float sum = i == lane ? 1.0f : 0.0f;
#pragma unroll
    for (int m = 0; m < i; ++m) sum = fmaf(-s.lower[first + i][first + m], x[m], sum);
    x[i] = sum;
    s.inverse[first + i][first + lane] = sum;
  }
}

// Blocks (b + Level, b) of the inverse: X_ab = -X_aa (sum_{b <= m < a} L_am X_mb). A thread takes a row and some columns.
template <int Level, int KP>
__device__ void invert_level(Shared<KP>& s) {
  constexpr int kCount = 4 - Level, kColumns = Level == 1 ? 8 : Level == 2 ? 4 : 2, kParts = kBlock / kColumns;
  const int part = threadIdx.x % kParts, row = threadIdx.x / kParts % kBlock, b = threadIdx.x / kParts / kBlock;
  const int i = (b + Level) * kBlock + row, first = b * kBlock, column = first + part * kColumns;
  const int spare = (b + Level) * kBlock + part * kColumns;  // of the block across the diagonal, which holds the bracket
  if (b < kCount) {
    float sums[kColumns] = {};
    for (int m = first; m < first + Level * kBlock; ++m) {
      const float l = s.lower[i][m];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[c] = fmaf(l, s.inverse[m][column + c], sums[c]);
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) s.inverse[first + row][spare + c] = sums[c];
  }
  __syncthreads();
  if (b < kCount) {
    float sums[kColumns] = {};
    for (int m = 0; m < kBlock; ++m) {
      const float x = s.inverse[i][(b + Level) * kBlock + m];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[c] = fmaf(-x, s.inverse[first + m][spare + c], sums[c]);
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) s.inverse[i][column + c] = sums[c];
  }
  __syncthreads();
}

template <class Half, int KP>
__global__ void __launch_bounds__(kThreads, 3) prepare_kernel(const __grid_constant__ Prefill p) {
  extern __shared__ __align__(128) unsigned char raw[];
  Shared<KP>& s = *reinterpret_cast<Shared<KP>*>(raw);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t hk = blockIdx.x % p.Hk, row = blockIdx.x / p.Hk;
  const Chunk chunk = chunk_at(p.map, row);
  if (chunk.n < 0) return;
  load_rows<KP>(p.args.k, chunk, hk, static_cast<int>(p.K), s.k);
  load_rows<KP>(p.args.q, chunk, hk, static_cast<int>(p.K), s.q);
  commit_copies();
  wait_copies<0>();
  __syncthreads();
  {
    const int mine = threadIdx.x % kChunk;
    const bool key = threadIdx.x < kChunk;
    (key ? s.rk : s.rq)[mine] = p.args.l2_norm ? inverse_norm<Half, KP>(key ? s.k : s.q, mine) : 1.0f;
  }
  float kk[8][4], qk[8][4];
  products<Half, KP>(s, warp, lane, kk, qk);

  const int64_t group = p.Hv / p.Hk;
  for (int64_t j = 0; j < group; ++j) {
    const int64_t hv = p.args.head_map == HeadMap::grouped ? hk * group + j : hk + j * p.Hk;
    if (warp == 0) read_gates(s, p.args.gates, chunk, hv, lane);
    __syncthreads();
    uint16_t* matrices = p.matrices + (row * p.Hv + hv) * 2 * kMatrix;
    float* factors = p.factors + (row * p.Hv + hv) * kFactors;
    if (threadIdx.x < kChunk) {
      const int i = threadIdx.x;
      const float decay = exp2f(s.G[i]);
      factors[i] = decay * s.rk[i];
      factors[kChunk + i] = p.scale * s.rq[i] * decay;
      factors[2 * kChunk + i] = exp2f(s.G[kChunk - 1] - s.G[i]) * s.rk[i];
      if (i == 0) factors[3 * kChunk] = exp2f(s.G[kChunk - 1]);
    }
    // L to shared memory, P to device memory, from the accumulators.
#pragma unroll
    for (int nt = 0; nt < 8; ++nt) {
      if (nt / 2 > warp) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = warp * kBlock + half * 8 + g, c = nt * 8 + 2 * t;
        const float factor = s.beta[i] * s.rk[i], read = p.scale * s.rq[i], Gi = s.G[i];
        float weights[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          s.lower[i][c + e] = factor * s.rk[c + e] * kk[nt][half * 2 + e];
          weights[e] = c + e <= i ? read * s.rk[c + e] * exp2f(Gi - s.G[c + e]) * qk[nt][half * 2 + e] : 0.0f;
        }
        *reinterpret_cast<uint32_t*>(matrices + kMatrix + i * kChunk + c) = pack<Half>(weights[0], weights[1]);
      }
    }
    __syncwarp();
    invert_diagonal(s, warp, lane);
    __syncthreads();
    invert_level<1>(s);
    invert_level<2>(s);
    invert_level<3>(s);
    // T: half a row per thread, blocks on and below the diagonal.
    {
      const int i = threadIdx.x / 2, first = threadIdx.x % 2 * 32;
      const float Gi = s.G[i];
#pragma unroll
      for (int piece = 0; piece < 4; ++piece) {
        const int c = first + piece * 8;
        if (c / kBlock > i / kBlock) break;
        uint4 out;
        uint32_t* words = &out.x;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int c0 = c + 2 * e, c1 = c0 + 1;
          const float x0 = c0 <= i ? s.inverse[i][c0] * exp2f(Gi - s.G[c0]) * s.beta[c0] : 0.0f;
          const float x1 = c1 <= i ? s.inverse[i][c1] * exp2f(Gi - s.G[c1]) * s.beta[c1] : 0.0f;
          words[e] = pack<Half>(x0, x1);
        }
        *reinterpret_cast<uint4*>(matrices + i * kChunk + c) = out;
      }
    }
    __syncthreads();
  }
}

}  // namespace

void launch_prepare(const Stream& stream, const Prefill& p) {
  const auto run = [&](auto kernel, size_t shared) {
    launch("gated_delta_rule_prefill", stream, p.map.rows * p.Hk, kThreads, shared, kernel, p);
  };
  const bool bf16 = p.args.k.dtype == DType::bf16;
  if (p.K <= 64) return run(bf16 ? prepare_kernel<__nv_bfloat16, 64> : prepare_kernel<__half, 64>, sizeof(Shared<64>));
  run(bf16 ? prepare_kernel<__nv_bfloat16, 128> : prepare_kernel<__half, 128>, sizeof(Shared<128>));
}

}  // namespace weft::cuda
