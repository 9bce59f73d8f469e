// One chunk of the gated delta rule applied to a panel of state columns: the register-tiled inner kernel of the cpu prefill.
// Included once per target, after foreach_target.h.
//
// The working state is M = S^T, [K][V], stored as column panels. A panel is a dense [K][w] block of w columns (w = kPanel, or
// kLanes at the end). Every product broadcasts one number of a token row and multiplies it with vectors of state columns, so there
// are no transposes and no horizontal sums. Let gamma_i be the decay from the start of the chunk to token i, and D_ij the decay
// from token j to token i; L and P are defined at ChunkOperands. With x_i = beta_i (v_i - gamma_i k_i M):
//   u_i = x_i - sum_{j<i} L_ij u_j          forward substitution; neither the inverse nor w is formed
//   o_i = gamma'_i q_i M + sum_{j<=i} P_ij u_j
//   M   = decay M + sum_i k'_i^T u_i
#if defined(WEFT_CPU_DELTA_PANEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_DELTA_PANEL_INL_H_
#undef WEFT_CPU_DELTA_PANEL_INL_H_
#else
#define WEFT_CPU_DELTA_PANEL_INL_H_
#endif

#include "cpu/common/gemm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

// Tokens of a chunk, C. 16 needs the fewest operations (6 K V + 2 C V + 2 C K Hk/Hv per token), and one AVX-512 vector holds a row
// of a C x C matrix. 32 is 2 to 8 % slower (bench/README.md).
constexpr int64_t kChunk = 16;
// Operands of one chunk and value head, f32. Rows past the end of the chunk are zero and do not change the state.
struct ChunkOperands {
  const float* k_read;   // [kChunk][k_stride] rows that read the state before the chunk, for x
  const float* q_read;   // [kChunk][k_stride] rows that read the state before the chunk, for o; null: no output wanted
  const float* k_write;  // [kChunk][k_stride] rows of the state update
  int64_t k_stride;      // a multiple of kLanes and kTileRows
  int64_t k_rows;        // K rounded up to kTileRows: rows of the state
  const float* lower;    // [kChunk][kChunk] L_ij = beta_i D_ij (k_i . k_j), strictly lower
  const float* weights;  // [kChunk][kChunk] P_ij = scale D_ij (q_i . k_j), lower with diagonal
  const float* read_k;   // [kChunk] beta_i gamma_i
  const float* read_q;   // [kChunk] scale gamma_i
  const float* beta;     // [kChunk]
  const float* to_end;   // [kChunk] decay from token i to the end of the chunk
  const float* decay;    // [k_rows] decay over the whole chunk, per channel
};

// One panel of kVectors * kLanes columns: updates `state` in place and overwrites v (rows of the same columns) with o.
template <int64_t kVectors>
HWY_NOINLINE void chunk_panel_of(const ChunkOperands& c, float* HWY_RESTRICT state, float* HWY_RESTRICT v, int64_t v_stride) {
  constexpr int64_t kWidth = kVectors * kLanes;
  const F32 d;
  HWY_ALIGN float u[kChunk * kWidth];

  for (int64_t i = 0; i < kChunk; i += kTileRows) {  // x = beta (v - gamma k M)
    VF tile[kTileRows][kVectors];
    WEFT_UNROLL for (int64_t r = 0; r < kTileRows; ++r) WEFT_UNROLL for (int64_t n = 0; n < kVectors; ++n) tile[r][n] = hn::Zero(d);
    multiply_tile<kVectors>(tile, c.k_read + i * c.k_stride, c.k_stride, 1, state, kWidth, c.k_rows);
    WEFT_UNROLL for (int64_t r = 0; r < kTileRows; ++r) {
      const VF beta = hn::Set(d, c.beta[i + r]), factor = hn::Set(d, c.read_k[i + r]);
      WEFT_UNROLL for (int64_t n = 0; n < kVectors; ++n) {
        const VF value = hn::Mul(beta, hn::LoadU(d, v + (i + r) * v_stride + n * kLanes));
        hn::Store(hn::NegMulAdd(factor, tile[r][n], value), d, u + (i + r) * kWidth + n * kLanes);
      }
    }
  }

  for (int64_t i = 1; i < kChunk; ++i) {  // u = (I + L)^-1 x
    VF row[kVectors];
    WEFT_UNROLL for (int64_t n = 0; n < kVectors; ++n) row[n] = hn::Load(d, u + i * kWidth + n * kLanes);
    for (int64_t j = 0; j < i; ++j) {
      const VF factor = hn::Set(d, c.lower[i * kChunk + j]);
      WEFT_UNROLL for (int64_t n = 0; n < kVectors; ++n) row[n] =
          hn::NegMulAdd(factor, hn::Load(d, u + j * kWidth + n * kLanes), row[n]);
    }
    WEFT_UNROLL for (int64_t n = 0; n < kVectors; ++n) hn::Store(row[n], d, u + i * kWidth + n * kLanes);
  }

  if (c.q_read) {
    for (int64_t i = 0; i < kChunk; i += kTileRows) {  // o = gamma' q M + P u
      VF tile[kTileRows][kVectors];
      WEFT_UNROLL for (int64_t r = 0; r < kTileRows; ++r) WEFT_UNROLL for (int64_t n = 0; n < kVectors; ++n) tile[r][n] =
          hn::Zero(d);
      multiply_tile<kVectors>(tile, c.q_read + i * c.k_stride, c.k_stride, 1, state, kWidth, c.k_rows);
      WEFT_UNROLL for (int64_t r = 0; r < kTileRows; ++r) {
        const VF factor = hn::Set(d, c.read_q[i + r]);
        WEFT_UNROLL for (int64_t n = 0; n < kVectors; ++n) tile[r][n] = hn::Mul(factor, tile[r][n]);
      }
      multiply_tile<kVectors>(tile, c.weights + i * kChunk, kChunk, 1, u, kWidth, i + kTileRows);
      WEFT_UNROLL for (int64_t r = 0; r < kTileRows; ++r) WEFT_UNROLL for (int64_t n = 0; n < kVectors; ++n)
          hn::StoreU(tile[r][n], d, v + (i + r) * v_stride + n * kLanes);
    }
  }

  for (int64_t i = 0; i < kChunk; ++i) {
    const VF factor = hn::Set(d, c.to_end[i]);
    WEFT_UNROLL for (int64_t n = 0; n < kVectors; ++n) {
      float* p = u + i * kWidth + n * kLanes;
      hn::Store(hn::Mul(factor, hn::Load(d, p)), d, p);
    }
  }
  for (int64_t p = 0; p < c.k_rows; p += kTileRows) {  // M = decay M + k^T u
    VF tile[kTileRows][kVectors];
    WEFT_UNROLL for (int64_t r = 0; r < kTileRows; ++r) {
      const VF factor = hn::Set(d, c.decay[p + r]);
      WEFT_UNROLL for (int64_t n = 0; n < kVectors; ++n) tile[r][n] =
          hn::Mul(factor, hn::Load(d, state + (p + r) * kWidth + n * kLanes));
    }
    multiply_tile<kVectors>(tile, c.k_write + p, 1, c.k_stride, u, kWidth, kChunk);
    WEFT_UNROLL for (int64_t r = 0; r < kTileRows; ++r) WEFT_UNROLL for (int64_t n = 0; n < kVectors; ++n)
        hn::Store(tile[r][n], d, state + (p + r) * kWidth + n * kLanes);
  }
}

HWY_INLINE void chunk_panel(const ChunkOperands& c, float* state, float* v, int64_t v_stride, int64_t width) {
  if (width == kPanel)
    chunk_panel_of<kTileVectors>(c, state, v, v_stride);
  else
    chunk_panel_of<1>(c, state, v, v_stride);
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
