// Device functions of the staged prefill's prepare kernel: operands of L and P in registers, and the diagonal blocks. See prefill_staged.cuh.
//
// A warp owns 16 tokens, block row a. Lane 4 g + t holds rows g and g + 8 and channels 4 t .. 4 t + 3 of every 16: an mma may sum channels in
// any order, and this one makes accesses of memory contiguous.
#pragma once

#include "cuda/delta/prefill_prepare.cuh"
#include "cuda/delta/prefill_staged.cuh"

namespace weft::cuda {

using Split = __nv_bfloat16;  // dtype of split operands
// Log decays in base 2. e^-100 is 0 in f32, and smaller sums have smaller rounding errors.
inline constexpr float kLeastLog = -100.0f * kLog2e;
// Largest range of the decay in a diagonal block that is multiplied on tensor cores: its halves are e^60 and e^-60.
inline constexpr float kMostRange = 120.0f * kLog2e;

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
  int a, g, t;         // block row, lane = 4 g + t
  float rk[2], rq[2];  // factors of rows g and g + 8: inverse norms
  bool outputs;        // are there queries?
};

// Rows g and g + 8, four channels each.
using Quad = float[2][4];

__device__ __forceinline__ void load_quad(const StridedView& t, const Rows& rows, int64_t head, int c, int K, bool fours,
                                          RawFour (&raw)[2]) {
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

// Log decays per channel of the lane's rows and channels, in base 2, from the raw gates.
__device__ __forceinline__ void to_log_decays(const GateParams& gates, const Rows& rows, int c, int K, const RawFour (&raw)[2],
                                              Quad& g) {
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

// x and y as sums of Parts bf16 numbers, high to low.
template <int Parts>
__device__ __forceinline__ void split_pair(float x, float y, uint32_t (&parts)[Parts]) {
#pragma unroll
  for (int i = 0; i < Parts; ++i) {
    parts[i] = pack<Split>(x, y);
    const float2 whole = unpack<Split>(parts[i]);
    x -= whole.x, y -= whole.y;
  }
}

// An operand of mma in Parts bf16 numbers.
template <int Parts>
struct Operand {
  FragmentA part[Parts];
};

// The lane's numbers as an operand: four channels of a row are two of its low and two of its high channels. The same registers serve as a
// left operand, and as right operands of tokens 0 .. 7 (registers 0, 2) and 8 .. 15 (registers 1, 3).
template <int Parts>
__device__ __forceinline__ void split_quad(const Quad& x, Operand<Parts>& out) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t parts[Parts];
      split_pair<Parts>(x[h][2 * pair], x[h][2 * pair + 1], parts);
#pragma unroll
      for (int i = 0; i < Parts; ++i) out.part[i].x[2 * pair + h] = parts[i];
    }
}

// c += left right^T over 16 channels, 16 x 16 tokens. Products of parts below the precision of the sum are left out.
template <int Parts>
__device__ __forceinline__ void multiply_quads(float (&c)[2][4], const Operand<Parts>& left, const Operand<Parts>& right) {
#pragma unroll
  for (int order = Parts - 1; order >= 0; --order)
#pragma unroll
    for (int i = 0; i <= order; ++i)
#pragma unroll
      for (int nt = 0; nt < 2; ++nt)
        multiply<Split>(c[nt], left.part[i], right.part[order - i].x[nt], right.part[order - i].x[2 + nt]);
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
template <bool PerChannel, int Parts>
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
  Operand<Parts> keys, operand;
  split_quad(right, keys);
  split_quad(left, operand);
  multiply_quads(scores.l[0], operand, keys);
  if (!rows.outputs) return;
  split_quad(query, operand);
  multiply_quads(scores.p[0], operand, keys);
}

__device__ inline uint32_t pack_as(bool f16, float x, float y) { return f16 ? pack<__half>(x, y) : pack<__nv_bfloat16>(x, y); }

// Four channels of a row in a swizzled matrix of panels, as one or two matrices.
__device__ __forceinline__ void store_row(char* matrix, int matrix_bytes, int parts, bool f16, int row, int c,
                                          const float (&x)[4]) {
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

}  // namespace weft::cuda
