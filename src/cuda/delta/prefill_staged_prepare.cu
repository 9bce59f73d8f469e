// The prepare kernel of the staged prefill: see prefill_staged.cuh.
//
// A block prepares a chunk of one value head with four warps. A warp owns 16 tokens, block row a of L and P. K is walked in slices of 32
// channels: a warp computes its rows' operands, multiplies the diagonal block, publishes its keys as right operands for later block rows,
// and multiplies with those of earlier ones. Lane 4 g + t holds rows g and g + 8 and channels 4 t .. 4 t + 3 of every 16: an mma may sum
// channels in any order, and this one makes accesses of memory contiguous.
#include "cuda/delta/prefill_prepare.cuh"
#include "cuda/delta/prefill_staged.cuh"

namespace weft::cuda {
namespace {

using Split = __nv_bfloat16;  // dtype of split operands
constexpr int kSlice = 32, kSteps = kSlice / 16;
// Log decays in base 2. e^-100 is 0 in f32, and smaller sums have smaller rounding errors.
constexpr float kLeastLog = -100.0f * kLog2e;
// Largest range of the decay in a diagonal block that is multiplied on tensor cores: its halves are e^60 and e^-60.
constexpr float kMostRange = 120.0f * kLog2e;

// Followed by the keys k_j e^(G_C - G_j), split, in panels of 64 channels. M replaces them.
struct Shared {
  union {
    uint4 right[2][kBlocks - 1][kSteps][2][32];  // [buffer][block][k-step][high, low][lane]: right operands
    uint16_t tt[2][kChunk * kChunk];             // T transposed, split
  };
  uint16_t kk[2][kLowerBlocks * kBlockElements];  // L below the diagonal blocks, split
  float diagonal[kChunk][kDiagonalPitch];         // diagonal blocks of L
  char inverse[kInverseBytes];                    // diagonal blocks of (I + diag(beta) L)^-1, split
  float totals[2][kBlocks][kSlice];               // [buffer]: decays of the blocks of 16 tokens
  float G[kChunk], G_rest[kChunk];                // decays per head: the sum of two f32 numbers, in base 2
  float beta[kChunk];
};
static_assert(sizeof(Shared) % 128 == 0);

// Four neighbours as loaded: separate from the conversion, so that several loads are in flight before it.
struct RawFour {
  uint32_t words[4];

  __device__ __forceinline__ void load(const StridedView& t, int64_t at, bool fours, int count) {
    words[0] = words[1] = words[2] = words[3] = 0;
    if (count <= 0) return;
    if (fours && t.dtype == DType::f32) {
      const uint4 x = *reinterpret_cast<const uint4*>(static_cast<const uint32_t*>(t.data) + at);
      words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
    } else if (fours) {
      const uint2 x = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(t.data) + at);
      words[0] = x.x & 0xffffu, words[1] = x.x >> 16, words[2] = x.y & 0xffffu, words[3] = x.y >> 16;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (e < count) words[e] = load_bits(t, at + e);
    }
  }
  __device__ __forceinline__ void to(float (&x)[4], DType dtype) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = bits_to_float(words[e], dtype);
  }
};

// What a warp works on.
struct Rows {
  Chunk chunk;
  int64_t hv, hk;
  int a, g, t;          // block row, lane = 4 g + t
  float rk[2], rq[2];   // factors of rows g and g + 8: inverse norms, rq with the scale
  bool outputs;         // are there queries?
};

// Rows g and g + 8, four channels each.
using Quad = float[2][4];

__device__ __forceinline__ void load_quad(const StridedView& t, const Rows& rows, int64_t head, int c, int K, bool fours, RawFour (&raw)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int token = rows.a * kBlock + rows.g + 8 * h;
    raw[h].load(t, (rows.chunk.begin + token) * t.strides[0] + head * t.strides[1] + c, fours,
                token < rows.chunk.length() ? K - c : 0);
  }
}

// 1 / sqrt(sum x^2 + kKeyNormEps) of rows g and g + 8.
__device__ __forceinline__ void inverse_norms(const StridedView& t, const Rows& rows, int K, bool fours, float (&out)[2]) {
  float sums[2] = {};
#pragma unroll 4
  for (int c = rows.t * 4; c < K; c += 16) {
    RawFour raw[2];
    load_quad(t, rows, rows.hk, c, K, fours, raw);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[4];
      raw[h].to(x, t.dtype);
      sums[h] += fmaf(x[0], x[0], x[1] * x[1]) + fmaf(x[2], x[2], x[3] * x[3]);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sums[h] += __shfl_xor_sync(0xffffffffu, sums[h], 1);
    sums[h] += __shfl_xor_sync(0xffffffffu, sums[h], 2);
    out[h] = 1.0f / sqrtf(sums[h] + kKeyNormEps<float>);
  }
}

// Write strengths, and with decays per head their prefix sums G; by one warp.
template <bool PerChannel>
__device__ __forceinline__ void read_head_gates(Shared& s, const GateParams& gates, const Chunk& chunk, int64_t hv, int lane) {
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
    const float log = gates.decay_form == DecayForm::raw
                          ? log_decay(x, load(gates.a_log, hv * gates.a_log.strides[0]), load(gates.dt_bias, hv * gates.dt_bias.strides[0]))
                      : gates.decay_form == DecayForm::linear ? logf(x)
                                                              : x;
    g[i] = fmaxf(log * kLog2e, kLeastLog);
    upto += g[i];
  }
  if (PerChannel) return;
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

// e^(G_i - G_j) of decays per head.
__device__ float decay_between(const Shared& s, int i, int j) {
  return exp2_approx((s.G[i] - s.G[j]) + (s.G_rest[i] - s.G_rest[j]));
}

// Log decays per channel of the lane's rows and channels, in base 2, from the raw gates.
__device__ __forceinline__ void to_log_decays(const GateParams& gates, const Rows& rows, int c, int K, const RawFour (&raw)[2], Quad& g) {
  float bias[4] = {}, a_log = 0;
  if (gates.decay_form == DecayForm::raw) {
    a_log = load(gates.a_log, rows.hv * gates.a_log.strides[0]);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (c + e < K) bias[e] = load(gates.dt_bias, rows.hv * gates.dt_bias.strides[0] + c + e);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    raw[h].to(g[h], gates.decay.dtype);
    const bool there = rows.a * kBlock + rows.g + 8 * h < rows.chunk.length();
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float x = g[h][e];
      const float log = gates.decay_form == DecayForm::raw      ? log_decay(x, a_log, bias[e])
                        : gates.decay_form == DecayForm::linear ? logf(x)
                                                                : x;
      g[h][e] = there && c + e < K ? fmaxf(log * kLog2e, kLeastLog) : 0.0f;
    }
  }
}

// Prefix sums over the 16 tokens of the warp, and the sums of all 16.
__device__ __forceinline__ void prefix_sums(const Quad& g, int lane, Quad& upto, float (&total)[4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int e = 0; e < 4; ++e) upto[h][e] = g[h][e];
#pragma unroll
  for (int step = 4; step < 32; step *= 2)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float other = __shfl_up_sync(0xffffffffu, upto[h][e], step);
        if (lane >= step) upto[h][e] += other;
      }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    upto[1][e] += __shfl_sync(0xffffffffu, upto[0][e], 28 + lane % 4);
    total[e] = __shfl_sync(0xffffffffu, upto[1][e], 28 + lane % 4);
  }
}

// The lane's numbers as an operand of mma, split: four channels of a row are two of its low and two of its high channels. The same
// registers serve as a left operand, and as right operands of tokens 0 .. 7 (registers 0, 2) and 8 .. 15 (registers 1, 3).
__device__ __forceinline__ void split_quad(const Quad& x, FragmentA& high, FragmentA& low) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const float left = x[h][2 * pair], right = x[h][2 * pair + 1];
      const uint32_t both = pack<Split>(left, right);
      const float2 whole = unpack<Split>(both);
      high.x[2 * pair + h] = both;
      low.x[2 * pair + h] = pack<Split>(left - whole.x, right - whole.y);
    }
}

// c += left right^T over 16 channels, 16 x 16 tokens.
__device__ __forceinline__ void multiply_quads(float (&c)[2][4], const FragmentA& high, const FragmentA& low, const FragmentA& right_high,
                               const FragmentA& right_low) {
#pragma unroll
  for (int nt = 0; nt < 2; ++nt) multiply<Split>(c[nt], high, right_low.x[nt], right_low.x[2 + nt]);
#pragma unroll
  for (int nt = 0; nt < 2; ++nt) multiply<Split>(c[nt], low, right_high.x[nt], right_high.x[2 + nt]);
#pragma unroll
  for (int nt = 0; nt < 2; ++nt) multiply<Split>(c[nt], high, right_high.x[nt], right_high.x[2 + nt]);
}

// Block row a of L and P: [n] is block column a - n.
struct Scores {
  float l[kBlocks][2][4], p[kBlocks][2][4];
};

// Adds 16 channels of the diagonal block pair by pair. From the last token j to the first, `between` is the sum of g over j + 1 .. i.
__device__ __forceinline__ void add_exactly(const Quad& k, const Quad& q, const Quad& g, const Rows& rows, Scores& scores) {
  Quad between = {};
#pragma unroll 1
  for (int j = kBlock - 1; j >= 0; --j) {
    float l[2] = {}, p[2] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int from = j % 8 * 4 + rows.t;
      const float kj = __shfl_sync(0xffffffffu, j < 8 ? k[0][e] : k[1][e], from);
      const float gj = __shfl_sync(0xffffffffu, j < 8 ? g[0][e] : g[1][e], from);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float decayed = kj * exp2_approx(between[h][e]);
        l[h] = fmaf(k[h][e], decayed, l[h]);
        p[h] = fmaf(q[h][e], decayed, p[h]);
        if (rows.g + 8 * h >= j) between[h][e] += gj;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        l[h] += __shfl_xor_sync(0xffffffffu, l[h], step);
        p[h] += __shfl_xor_sync(0xffffffffu, p[h], step);
      }
#pragma unroll
    for (int nt = 0; nt < 2; ++nt)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (nt * 8 + rows.t * 2 + e == j) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            scores.l[0][nt][2 * h + e] += l[h];
            scores.p[0][nt][2 * h + e] += p[h];
          }
        }
  }
}

// Adds 16 channels of the diagonal block.
template <bool PerChannel>
__device__ __forceinline__ void add_diagonal(const Quad& k, const Quad& q, const Quad& g, const Quad& upto, const float (&total)[4],
                             const Rows& rows, Scores& scores) {
  Quad left, right, query;
  if constexpr (PerChannel) {
    const bool wide = fminf(fminf(total[0], total[1]), fminf(total[2], total[3])) < -kMostRange;
    if (__any_sync(0xffffffffu, wide)) return add_exactly(k, q, g, rows, scores);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if constexpr (!PerChannel) {
        left[h][e] = right[h][e] = k[h][e], query[h][e] = q[h][e];
        continue;
      }
      const float above = upto[h][e] - 0.5f * total[e], decay = exp2_approx(above);
      left[h][e] = k[h][e] * decay;
      query[h][e] = q[h][e] * decay;
      right[h][e] = k[h][e] * exp2_approx(-above);
    }
  FragmentA high, low, right_high, right_low;
  split_quad(right, right_high, right_low);
  split_quad(left, high, low);
  multiply_quads(scores.l[0], high, low, right_high, right_low);
  if (!rows.outputs) return;
  split_quad(query, high, low);
  multiply_quads(scores.p[0], high, low, right_high, right_low);
}

__device__ uint32_t pack_as(bool f16, float x, float y) { return f16 ? pack<__half>(x, y) : pack<__nv_bfloat16>(x, y); }

// Four channels of a row in a swizzled matrix of panels, as one or two matrices.
__device__ __forceinline__ void store_row(char* matrix, int matrix_bytes, int parts, bool f16, int row, int c, const float (&x)[4]) {
  char* const to = matrix + c / 64 * kPanel + Tile64::offset(row, c % 64 / 8) + c % 8 * 2;
  const uint2 high{pack_as(f16, x[0], x[1]), pack_as(f16, x[2], x[3])};
  *reinterpret_cast<uint2*>(to) = high;
  if (parts == 1) return;
  const float2 left = unpack<Split>(high.x), right = unpack<Split>(high.y);
  *reinterpret_cast<uint2*>(to + matrix_bytes) =
      uint2{pack<Split>(x[0] - left.x, x[1] - left.y), pack<Split>(x[2] - right.x, x[3] - right.y)};
}

// Two neighbours of a row, `at` bytes from the beginning of a matrix.
__device__ __forceinline__ void store_pair(char* matrix, int matrix_bytes, int parts, bool f16, uint32_t at, float x, float y) {
  const uint32_t high = pack_as(f16, x, y);
  *reinterpret_cast<uint32_t*>(matrix + at) = high;
  if (parts == 1) return;
  const float2 whole = unpack<Split>(high);
  *reinterpret_cast<uint32_t*>(matrix + matrix_bytes + at) = pack<Split>(x - whole.x, y - whole.y);
}

// What a warp keeps of a slice of channels between its two phases.
struct Slice {
  Quad k[kSteps], q[kSteps];  // decayed from the beginning of the block
  Quad right[kSteps];         // keys decayed to the end of the block
};

// First phase of a slice: operands of the warp's rows, the diagonal block, right operands and decays for the other warps.
template <bool PerChannel>
__device__ __forceinline__ void begin_slice(Shared& s, const StagedParams& params, const Rows& rows, int first, int buffer, int lane, Slice& slice,
                            Scores& scores) {
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
        *reinterpret_cast<float4*>(&s.totals[buffer][rows.a][ks * 16 + rows.t * 4]) =
            float4{exp2_approx(total[0]), exp2_approx(total[1]), exp2_approx(total[2]), exp2_approx(total[3])};
      add_diagonal<true>(k, q, g, upto, total, rows, scores);
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
      add_diagonal<false>(k, q, k, k, {0, 0, 0, 0}, rows, scores);
    }
    if (rows.a < kBlocks - 1) {
      FragmentA high, low;
      split_quad(right, high, low);
      s.right[buffer][rows.a][ks][0][lane] = uint4{high.x[0], high.x[1], high.x[2], high.x[3]};
      s.right[buffer][rows.a][ks][1][lane] = uint4{low.x[0], low.x[1], low.x[2], low.x[3]};
    }
  }
}

__device__ __forceinline__ void multiply_four(Quad& x, float4 by) {
#pragma unroll
  for (int h = 0; h < 2; ++h) x[h][0] *= by.x, x[h][1] *= by.y, x[h][2] *= by.z, x[h][3] *= by.w;
}

// Second phase: block columns before the diagonal, from near to far. The left operands then hold k e^G and q e^G, which are D and Q.
template <bool PerChannel>
__device__ __forceinline__ void finish_slice(Shared& s, char* keys, const StagedParams& params, const Rows& rows, int first, int buffer, int lane,
                             char* prepared, Slice& slice, Scores& scores) {
  const StagedLayout layout = params.layout();
  const bool f16 = params.p.k.dtype == DType::f16;
#pragma unroll
  for (int ks = 0; ks < kSteps; ++ks) {
    const int c = first + ks * 16 + rows.t * 4;
    Quad &k = slice.k[ks], &q = slice.q[ks], &right = slice.right[ks];
    const auto total = [&](int block) { return *reinterpret_cast<const float4*>(&s.totals[buffer][block][ks * 16 + rows.t * 4]); };
#pragma unroll
    for (int n = 1; n < kBlocks; ++n) {
      if (n > rows.a) break;
      const int b = rows.a - n;
      const uint4 x = s.right[buffer][b][ks][0][lane], y = s.right[buffer][b][ks][1][lane];
      const FragmentA right_high{{x.x, x.y, x.z, x.w}}, right_low{{y.x, y.y, y.z, y.w}};
      FragmentA high, low;
      split_quad(k, high, low);
      multiply_quads(scores.l[n], high, low, right_high, right_low);
      if (rows.outputs) {
        split_quad(q, high, low);
        multiply_quads(scores.p[n], high, low, right_high, right_low);
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
        const float upto = exp2_approx(s.G[row] + s.G_rest[row]), rest = decay_between(s, kChunk - 1, row);
#pragma unroll
        for (int e = 0; e < 4; ++e) k[h][e] *= upto, q[h][e] *= upto, right[h][e] *= rest;
      }
      store_row(prepared + layout.keys(), layout.matrix, params.parts, f16, row, c, k[h]);
      if (rows.outputs) store_row(prepared + layout.queries(), layout.matrix, params.parts, f16, row, c, q[h]);
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
      decay.x = decay.y = decay.z = decay.w = exp2_approx(s.G[kChunk - 1] + s.G_rest[kChunk - 1]);
    }
    *reinterpret_cast<float4*>(prepared + layout.tail() + layout.decays() + c * 4) = decay;
  }
}

// Decays per head factor out of the sums. L goes to shared memory, P stays; both without what lies above the diagonal.
template <bool PerChannel>
__device__ __forceinline__ void finish_scores(Shared& s, const Rows& rows, Scores& scores) {
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
          const float decay = PerChannel || !below ? 1.0f : decay_between(s, i, c + e);
          l[2 * h + e] = below ? l[2 * h + e] * decay : 0.0f;
          p[2 * h + e] = below ? p[2 * h + e] * decay : 0.0f;
        }
        store_kk<Split>(s, i, c, l[2 * h], l[2 * h + 1]);
      }
  }
}

// Stores block column b of T, transposed.
__device__ __forceinline__ void write_t(Shared& s, const Column& column, int b, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    if (b + n >= kBlocks) break;
#pragma unroll
    for (int nt = 0; nt < 2; ++nt)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int j = b * kBlock + g + 8 * h;
        const float beta = s.beta[j];
        store_split<Split>(s.tt[0], s.tt[1], Tile64::offset(j, (b + n) * 2 + nt) + t * 4, column.x[n][nt][2 * h] * beta,
                           column.x[n][nt][2 * h + 1] * beta);
      }
  }
}

// M = T^T keys for 16 channels. It replaces the keys, which this warp alone reads.
__device__ __forceinline__ void write_m(const Shared& s, char* keys, const StagedParams& params, int group, int lane) {
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
        store_pair(keys + group / 4 * kPanel, layout.matrix, params.parts, params.p.k.dtype == DType::f16,
                   Tile64::offset(m * kBlock + lane / 4 + 8 * h, piece + nt) + lane % 4 * 4, sum[nt][2 * h], sum[nt][2 * h + 1]);
  }
}

// Block row a of R = P T, on and below the diagonal block.
__device__ __forceinline__ void write_r(const Shared& s, const StagedParams& params, const Rows& rows, int lane, char* r, const Scores& scores) {
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
        store_pair(r, kPanel, params.parts, params.p.k.dtype == DType::f16,
                   Tile64::offset(rows.a * kBlock + rows.g + 8 * h, b * 2 + nt) + rows.t * 4, sum[nt][2 * h], sum[nt][2 * h + 1]);
  }
}

template <bool PerChannel>
__global__ void __launch_bounds__(kPrepareThreads, 3) staged_prepare_kernel(const __grid_constant__ StagedParams params) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  char* const keys = reinterpret_cast<char*>(raw) + sizeof(Shared);
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
  if (warp == 0) read_head_gates<PerChannel>(s, p.gates, rows.chunk, rows.hv, lane);
  rows.rk[0] = rows.rk[1] = rows.rq[0] = rows.rq[1] = 1.0f;
  if (p.l2_norm) {
    inverse_norms(p.k, rows, static_cast<int>(p.K), params.fours_k, rows.rk);
    if (rows.outputs) inverse_norms(p.q, rows, static_cast<int>(p.K), params.fours_q, rows.rq);
  }
  rows.rq[0] *= p.scale, rows.rq[1] *= p.scale;

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
    begin_slice<PerChannel>(s, params, rows, first, buffer, lane, slice, scores);
    __syncthreads();  // separates the writes of this buffer from its reads, and the reads of the other one from its next writes
    finish_slice<PerChannel>(s, keys, params, rows, first, buffer, lane, prepared, slice, scores);
  }
  finish_scores<PerChannel>(s, rows, scores);
  __syncthreads();
  if (lane < kBlock) invert_diagonal<Split>(s, s.inverse, s.beta, warp, lane);
  __syncthreads();
  {
    Column column;
    invert_column<Split>(s, s.inverse, s.beta, rows.a, lane, column);
    write_t(s, column, rows.a, lane);
  }
  __syncthreads();
  for (int group = warp; group < layout.channels / 16; group += kPrepareThreads / 32) write_m(s, keys, params, group, lane);
  if (rows.outputs) write_r(s, params, rows, lane, prepared + layout.tail(), scores);
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < layout.operand() / 16; i += kPrepareThreads)
    reinterpret_cast<uint4*>(prepared + layout.updates())[i] = reinterpret_cast<const uint4*>(keys)[i];
}

}  // namespace

size_t staged_prepare_shared(const StagedParams& s) { return sizeof(Shared) + 2 * static_cast<size_t>(s.layout().matrix); }

void launch_staged_prepare(const char* op, const Stream& stream, const StagedParams& s) {
  launch(op, stream, s.p.map.rows * s.p.Hv, kPrepareThreads, staged_prepare_shared(s),
         s.per_channel ? staged_prepare_kernel<true> : staged_prepare_kernel<false>, s);
}

}  // namespace weft::cuda
