// The prepare kernel of the staged prefill: see prefill_staged.cuh.
//
// A block prepares a chunk of one value head with four warps. A warp owns 16 tokens, block row a of L and P. K is walked in slices of 32
// channels: a warp computes its rows' operands, multiplies the diagonal block, publishes its keys as right operands for later block rows,
// and multiplies with those of earlier ones.
#include "cuda/delta/prefill_staged_exact.cuh"

namespace weft::cuda {
namespace {

constexpr int kSlice = 32, kSteps = kSlice / 16;

// What both precisions need.
struct SharedGates {
  float totals[2][kBlocks][kSlice];  // [buffer]: decays of the blocks of 16 tokens
  float G[kChunk], G_rest[kChunk];   // decays per head: the sum of two f32 numbers, in base 2
  float beta[kChunk];
};

// [buffer][block][k-step][part][lane]: right operands.
template <int Parts>
using RightOperands = uint4[2][kBlocks - 1][kSteps][Parts][32];

// Followed by the keys k_j e^(G_C - G_j). 16-bit inputs: split, in panels of 64 channels; M replaces them.
template <int Parts>
struct Shared {
  union {
    RightOperands<2> right;
    uint16_t tt[2][kChunk * kChunk];  // T transposed, split
  };
  uint16_t kk[2][kLowerBlocks * kBlockElements];  // L below the diagonal blocks, split
  float diagonal[kChunk][kDiagonalPitch];         // diagonal blocks of L
  char inverse[kInverseBytes];                    // diagonal blocks of (I + diag(beta) L)^-1, split
  SharedGates gates;
  __host__ __device__ static int keys_bytes(int channels) { return 2 * 2 * kChunk * channels; }
};
// f32 inputs: in f32.
template <>
struct Shared<kExactParts> {
  union {
    RightOperands<kExactParts> right;
    float tt[kChunk][kExactPitch];  // T transposed
  };
  float lt[kChunk][kExactPitch];  // L transposed
  SharedGates gates;
  __host__ __device__ static int keys_pitch(int channels) { return channels + 4; }
  __host__ __device__ static int keys_bytes(int channels) { return 4 * kChunk * keys_pitch(channels); }
};
static_assert(sizeof(Shared<2>) % 128 == 0 && sizeof(Shared<kExactParts>) % 128 == 0);

// Write strengths, and with decays per head their prefix sums G; by one warp.
template <bool PerChannel>
__device__ __forceinline__ void read_head_gates(SharedGates& s, const GateParams& gates, const Chunk& chunk, int64_t hv, int lane) {
  double g[2] = {}, upto = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = lane * 2 + i;
    const int64_t t = chunk.begin + row;
    const bool there = row < chunk.length();
    float strength = there ? load(gates.strength, t * gates.strength.strides[0] + hv * gates.strength.strides[1]) : 0.0f;
    if (there && gates.raw_strength) strength = gates.beta_scale * sigmoid(strength);
    s.beta[row] = strength;
    if (PerChannel || !there) continue;
    const float x = load(gates.decay, t * gates.decay.strides[0] + hv * gates.decay.strides[1]);
    const float log = gates.decay_form == DecayForm::raw      ? log_decay(x, load(gates.a_log, hv * gates.a_log.strides[0]),
                                                                          load(gates.dt_bias, hv * gates.dt_bias.strides[0]))
                      : gates.decay_form == DecayForm::linear ? logf(x)
                                                              : x;
    g[i] = fmaxf(log * kLog2e, kLeastLog);
    upto += g[i];
  }
  if constexpr (!PerChannel) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const double other = __shfl_up_sync(0xffffffffu, upto, step);
      if (lane >= step) upto += other;
    }
#pragma unroll
    for (int i = 1; i >= 0; --i) {
      const float high = static_cast<float>(upto);
      s.G[lane * 2 + i] = high;
      s.G_rest[lane * 2 + i] = static_cast<float>(upto - high);
      upto -= g[i];
    }
  }
}

// e^(G_i - G_j) of decays per head.
__device__ float decay_between(const SharedGates& s, int i, int j) {
  return exp2_approx((s.G[i] - s.G[j]) + (s.G_rest[i] - s.G_rest[j]));
}

// What a warp keeps of a slice of channels between its two phases.
struct Slice {
  Quad k[kSteps], q[kSteps];  // decayed from the beginning of the block
  Quad right[kSteps];         // keys decayed to the end of the block
};

// First phase of a slice: operands of the warp's rows, the diagonal block, right operands and decays for the other warps.
template <bool PerChannel, int Parts>
__device__ __forceinline__ void begin_slice(Shared<Parts>& s, const StagedParams& params, const Rows& rows, int first, int buffer,
                                            int lane, Slice& slice, Scores& scores) {
  const Prefill& p = params.p;
  const int K = static_cast<int>(p.K);
  RawFour keys[kSteps][2], queries[kSteps][2], gates[kSteps][2];
#pragma unroll
  for (int ks = 0; ks < kSteps; ++ks) {
    const int c = first + ks * 16 + rows.t * 4;
    load_quad(p.k, rows, rows.hk, c, K, params.fours_k, keys[ks]);
    if (rows.outputs) load_quad(p.q, rows, rows.hk, c, K, params.fours_q, queries[ks]);
    if (PerChannel) load_quad(p.gates.decay, rows, rows.hv, c, K, params.fours_gate, gates[ks]);
  }
#pragma unroll
  for (int ks = 0; ks < kSteps; ++ks) {
    const int c = first + ks * 16 + rows.t * 4;
    Quad &k = slice.k[ks], &q = slice.q[ks], &right = slice.right[ks];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      keys[ks][h].to(k[h], p.k.dtype);
      if (rows.outputs) queries[ks][h].to(q[h], p.k.dtype);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        k[h][e] *= rows.rk[h];
        q[h][e] = rows.outputs ? q[h][e] * rows.rq[h] : 0.0f;
        right[h][e] = k[h][e];
      }
    }
    if constexpr (PerChannel) {
      Quad g, upto;
      float total[4];
      to_log_decays(p.gates, rows, c, K, gates[ks], g);
      prefix_sums(g, lane, upto, total);
      if (rows.g == 0)
        *reinterpret_cast<float4*>(&s.gates.totals[buffer][rows.a][ks * 16 + rows.t * 4]) =
            float4{exp2_approx(total[0]), exp2_approx(total[1]), exp2_approx(total[2]), exp2_approx(total[3])};
      add_diagonal<true, Parts>(k, q, g, upto, total, rows, scores);
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float decay = exp2_approx(upto[h][e]);
          k[h][e] *= decay;
          q[h][e] *= decay;
          right[h][e] *= exp2_approx(total[e] - upto[h][e]);
        }
    } else {
      add_diagonal<false, Parts>(k, q, k, k, {0, 0, 0, 0}, rows, scores);
    }
    if (rows.a < kBlocks - 1) {
      Operand<Parts> operand;
      split_quad(right, operand);
#pragma unroll
      for (int i = 0; i < Parts; ++i) {
        const uint32_t(&x)[4] = operand.part[i].x;
        s.right[buffer][rows.a][ks][i][lane] = uint4{x[0], x[1], x[2], x[3]};
      }
    }
  }
}

__device__ __forceinline__ void multiply_four(Quad& x, float4 by) {
#pragma unroll
  for (int h = 0; h < 2; ++h) x[h][0] *= by.x, x[h][1] *= by.y, x[h][2] *= by.z, x[h][3] *= by.w;
}

// Second phase: block columns before the diagonal, from near to far. The left operands then hold k e^G and q e^G, which are D and Q.
template <bool PerChannel, int Parts>
__device__ __forceinline__ void finish_slice(Shared<Parts>& s, char* keys, const StagedParams& params, const Rows& rows, int first,
                                             int buffer, int lane, char* prepared, Slice& slice, Scores& scores) {
  const StagedLayout layout = params.layout();
#pragma unroll
  for (int ks = 0; ks < kSteps; ++ks) {
    const int c = first + ks * 16 + rows.t * 4;
    Quad &k = slice.k[ks], &q = slice.q[ks], &right = slice.right[ks];
    const auto total = [&](int block) {
      return *reinterpret_cast<const float4*>(&s.gates.totals[buffer][block][ks * 16 + rows.t * 4]);
    };
#pragma unroll
    for (int n = 1; n < kBlocks; ++n) {
      if (n > rows.a) break;
      const int b = rows.a - n;
      Operand<Parts> other, operand;
#pragma unroll
      for (int i = 0; i < Parts; ++i) {
        const uint4 x = s.right[buffer][b][ks][i][lane];
        other.part[i] = FragmentA{{x.x, x.y, x.z, x.w}};
      }
      split_quad(k, operand);
      multiply_quads(scores.l[n], operand, other);
      if (rows.outputs) {
        split_quad(q, operand);
        multiply_quads(scores.p[n], operand, other);
      }
      if (PerChannel) {
        multiply_four(k, total(b));
        multiply_four(q, total(b));
      }
    }
    if constexpr (PerChannel) {
      for (int b = rows.a + 1; b < kBlocks; ++b) multiply_four(right, total(b));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = rows.a * kBlock + rows.g + 8 * h;
      if constexpr (!PerChannel) {
        const float upto = exp2_approx(s.gates.G[row] + s.gates.G_rest[row]), rest = decay_between(s.gates, kChunk - 1, row);
#pragma unroll
        for (int e = 0; e < 4; ++e) k[h][e] *= upto, q[h][e] *= upto, right[h][e] *= rest;
      }
      store_row(prepared + layout.keys(), layout.matrix, params.parts, params.f16(), row, c, k[h]);
      if (rows.outputs) store_row(prepared + layout.queries(), layout.matrix, params.parts, params.f16(), row, c, q[h]);
      if constexpr (Parts == kExactParts)
        *reinterpret_cast<float4*>(keys + (row * Shared<Parts>::keys_pitch(layout.channels) + c) * 4) =
            float4{right[h][0], right[h][1], right[h][2], right[h][3]};
      else
        store_row(keys, layout.matrix, 2, false, row, c, right[h]);
    }
    if (rows.a > 0 || rows.g > 0) continue;
    float4 decay{1, 1, 1, 1};
    if constexpr (PerChannel) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const float4 by = total(b);
        decay.x *= by.x, decay.y *= by.y, decay.z *= by.z, decay.w *= by.w;
      }
    } else {
      decay.x = decay.y = decay.z = decay.w = exp2_approx(s.gates.G[kChunk - 1] + s.gates.G_rest[kChunk - 1]);
    }
    *reinterpret_cast<float4*>(prepared + layout.tail() + layout.decays() + c * 4) = decay;
  }
}

// Decays per head factor out of the sums. L goes to shared memory, P stays; both without what lies above the diagonal.
template <bool PerChannel, int Parts>
__device__ __forceinline__ void finish_scores(Shared<Parts>& s, const Rows& rows, Scores& scores) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    if (n > rows.a) break;
#pragma unroll
    for (int nt = 0; nt < 2; ++nt)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = rows.a * kBlock + rows.g + 8 * h, c = (rows.a - n) * kBlock + nt * 8 + rows.t * 2;
        float(&l)[4] = scores.l[n][nt];
        float(&p)[4] = scores.p[n][nt];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool below = c + e <= i;
          const float decay = PerChannel || !below ? 1.0f : decay_between(s.gates, i, c + e);
          l[2 * h + e] = below ? l[2 * h + e] * decay : 0.0f;
          p[2 * h + e] = below ? p[2 * h + e] * decay : 0.0f;
        }
        if constexpr (Parts == kExactParts)
          s.lt[c][i] = l[2 * h], s.lt[c + 1][i] = l[2 * h + 1];
        else
          store_kk<Split>(s, i, c, l[2 * h], l[2 * h + 1]);
      }
  }
}

// Stores block column b of T, transposed.
__device__ __forceinline__ void write_t(Shared<2>& s, const Column& column, int b, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    if (b + n >= kBlocks) break;
#pragma unroll
    for (int nt = 0; nt < 2; ++nt)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int j = b * kBlock + g + 8 * h;
        const float beta = s.gates.beta[j];
        store_split<Split>(s.tt[0], s.tt[1], Tile64::offset(j, (b + n) * 2 + nt) + t * 4, column.x[n][nt][2 * h] * beta,
                           column.x[n][nt][2 * h + 1] * beta);
      }
  }
}

// M = T^T keys for 16 channels. It replaces the keys, which this warp alone reads.
__device__ __forceinline__ void write_m(const Shared<2>& s, char* keys, const StagedParams& params, int group, int lane) {
  const StagedLayout layout = params.layout();
  const LdmatrixLane at(lane);
  const uint32_t tt = shared_address(s.tt[0]), from = shared_address(keys) + group / 4 * kPanel;
  const int piece = group % 4 * 2;
  uint32_t high[kBlocks][4], low[kBlocks][4];
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    const uint32_t offset = Tile64::offset(n * kBlock + at.across_row(), piece + at.across_piece());
    ldmatrix_trans(high[n], from + offset);
    ldmatrix_trans(low[n], from + layout.matrix + offset);
  }
  __syncwarp();  // all lanes have read before one writes
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    float sum[2][4] = {};
#pragma unroll
    for (int n = m; n < kBlocks; ++n) {
      FragmentA a_high, a_low;
      const uint32_t offset = Tile64::offset(m * kBlock + at.across_row(), n * 2 + at.across_piece());
      ldmatrix(a_high.x, tt + offset);
      ldmatrix(a_low.x, tt + kPanel + offset);
      for (int nt = 0; nt < 2; ++nt) multiply<Split>(sum[nt], a_low, high[n][2 * nt], high[n][2 * nt + 1]);
      for (int nt = 0; nt < 2; ++nt) multiply<Split>(sum[nt], a_high, low[n][2 * nt], low[n][2 * nt + 1]);
      for (int nt = 0; nt < 2; ++nt) multiply<Split>(sum[nt], a_high, high[n][2 * nt], high[n][2 * nt + 1]);
    }
#pragma unroll
    for (int nt = 0; nt < 2; ++nt)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        store_pair(keys + group / 4 * kPanel, layout.matrix, params.parts, params.f16(),
                   Tile64::offset(m * kBlock + lane / 4 + 8 * h, piece + nt) + lane % 4 * 4, sum[nt][2 * h], sum[nt][2 * h + 1]);
  }
}

// Block row a of R = P T, on and below the diagonal block.
__device__ __forceinline__ void write_r(const Shared<2>& s, const StagedParams& params, const Rows& rows, int lane, char* r,
                                        const Scores& scores) {
  const LdmatrixLane at(lane);
  const uint32_t tt = shared_address(s.tt[0]);
  FragmentA high[kBlocks], low[kBlocks];
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
    if (n <= rows.a) split<Split>(scores.p[n][0], scores.p[n][1], high[n], low[n]);
#pragma unroll
  for (int column = 0; column < kBlocks; ++column) {
    if (column > rows.a) break;
    const int b = rows.a - column;
    float sum[2][4] = {};
#pragma unroll
    for (int n = 0; n <= column; ++n) {
      const uint32_t from = tt + Tile64::offset(b * kBlock + at.row(), (rows.a - n) * 2 + at.piece());
      multiply_split_smem<Split>(sum, high[n], low[n], from, from + kPanel);
    }
#pragma unroll
    for (int nt = 0; nt < 2; ++nt)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        store_pair(r, kPanel, params.parts, params.f16(), Tile64::offset(rows.a * kBlock + rows.g + 8 * h, b * 2 + nt) + rows.t * 4,
                   sum[nt][2 * h], sum[nt][2 * h + 1]);
  }
}

// T, M and R from L and P.
template <int Parts>
__device__ __forceinline__ void finish_chunk(Shared<Parts>& s, char* keys, const StagedParams& params, const Rows& rows, int warp,
                                             int lane, char* prepared, Scores& scores) {
  const StagedLayout layout = params.layout();
  constexpr int kWarps = kPrepareThreads / 32;
  if constexpr (Parts == kExactParts) {
    __syncthreads();
    if (threadIdx.x < kChunk) solve_column(s.lt, s.gates.beta, s.tt, threadIdx.x);
    __syncthreads();
    for (int group = warp; group < layout.channels / 16; group += kWarps)
      write_m_exact(s.tt, reinterpret_cast<const float*>(keys), Shared<Parts>::keys_pitch(layout.channels),
                    prepared + layout.updates(), layout.matrix, group, lane);
    if (rows.outputs) write_r_exact(s.tt, rows, prepared + layout.tail(), scores);
  } else {
    __syncthreads();
    if (lane < kBlock) invert_diagonal<Split>(s, s.inverse, s.gates.beta, warp, lane);
    __syncthreads();
    {
      Column column;
      invert_column<Split>(s, s.inverse, s.gates.beta, rows.a, lane, column);
      write_t(s, column, rows.a, lane);
    }
    __syncthreads();
    for (int group = warp; group < layout.channels / 16; group += kWarps) write_m(s, keys, params, group, lane);
    if (rows.outputs) write_r(s, params, rows, lane, prepared + layout.tail(), scores);
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < layout.operand() / 16; i += kPrepareThreads)
      reinterpret_cast<uint4*>(prepared + layout.updates())[i] = reinterpret_cast<const uint4*>(keys)[i];
  }
}

template <bool PerChannel, int Parts>
__global__ void __launch_bounds__(kPrepareThreads, Parts == 2 ? 3 : 2)
    staged_prepare_kernel(const __grid_constant__ StagedParams params) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& s = *reinterpret_cast<Shared<Parts>*>(raw);
  char* const keys = reinterpret_cast<char*>(raw) + sizeof(s);
  const Prefill& p = params.p;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t heads = static_cast<uint32_t>(p.Hv);
  const int64_t row = blockIdx.x / heads;
  Rows rows;
  rows.hv = blockIdx.x % heads;
  rows.hk = key_head(rows.hv, p.Hv, p.Hk, p.head_map);
  rows.chunk = chunk_at(p.map, row);
  if (rows.chunk.n < 0) return;
  // Later block rows have more work: spread them over the schedulers.
  rows.a = (warp + static_cast<int>(blockIdx.x)) % kBlocks;
  rows.g = lane / 4, rows.t = lane % 4;
  rows.outputs = p.q.present();
  const StagedLayout layout = params.layout();
  char* const prepared = p.prepared + (row * p.Hv + rows.hv) * layout.bytes();
  if (warp == 0) read_head_gates<PerChannel>(s.gates, p.gates, rows.chunk, rows.hv, lane);
  rows.rk[0] = rows.rk[1] = rows.rq[0] = rows.rq[1] = 1.0f;
  if (p.l2_norm) {
    inverse_norms(p.k, rows, static_cast<int>(p.K), params.fours_k, rows.rk);
    if (rows.outputs) inverse_norms(p.q, rows, static_cast<int>(p.K), params.fours_q, rows.rq);
  }

  Scores scores;
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
#pragma unroll
    for (int nt = 0; nt < 2; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores.l[n][nt][e] = scores.p[n][nt][e] = 0.0f;
#pragma unroll 1
  for (int first = 0, buffer = 0; first < layout.channels; first += kSlice, buffer ^= 1) {
    Slice slice;
    begin_slice<PerChannel, Parts>(s, params, rows, first, buffer, lane, slice, scores);
    __syncthreads();  // separates the writes of this buffer from its reads, and the reads of the other one from its next writes
    finish_slice<PerChannel, Parts>(s, keys, params, rows, first, buffer, lane, prepared, slice, scores);
  }
  finish_scores<PerChannel, Parts>(s, rows, scores);
  finish_chunk<Parts>(s, keys, params, rows, warp, lane, prepared, scores);
}

}  // namespace

size_t staged_prepare_shared(const StagedParams& s) {
  return s.parts == 2 ? sizeof(Shared<kExactParts>) + static_cast<size_t>(Shared<kExactParts>::keys_bytes(s.padded))
                      : sizeof(Shared<2>) + static_cast<size_t>(Shared<2>::keys_bytes(s.padded));
}

void launch_staged_prepare(const char* op, const Stream& stream, const StagedParams& s) {
  const auto run = [&](auto kernel) {
    launch(op, stream, s.p.map.rows * s.p.Hv, kPrepareThreads, staged_prepare_shared(s), kernel, s);
  };
  if (s.parts == 2)
    return run(s.per_channel ? staged_prepare_kernel<true, kExactParts> : staged_prepare_kernel<false, kExactParts>);
  run(s.per_channel ? staged_prepare_kernel<true, 2> : staged_prepare_kernel<false, 2>);
}

}  // namespace weft::cuda
