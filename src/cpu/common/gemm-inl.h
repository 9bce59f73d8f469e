// Register-tiled GEMM of small f32 matrices: elements of A are broadcast and multiplied by vectors of B's columns.
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_GEMM_INL_H_
#undef WEFT_CPU_GEMM_INL_H_
#else
#define WEFT_CPU_GEMM_INL_H_
#endif

#include "cpu/common/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

// Rows and vectors of a register tile. Operands fit beside 4 x 4 accumulators in 32 registers, and beside 4 x 2 in AVX2's 16.
constexpr int64_t kTileRows = 4;
constexpr int64_t kTileVectors = HWY_TARGET == HWY_AVX2 ? 2 : 4;
constexpr int64_t kPanel = kTileVectors * kLanes;

// Width of the panel that starts at `column`: a full panel while `columns` (a multiple of kLanes) leaves room for it, else one
// vector.
HWY_INLINE int64_t panel_width(int64_t column, int64_t columns) { return columns - column >= kPanel ? kPanel : kLanes; }

// tile[r][n] += sum_p a[r * a_row + p * a_step] * b[p * b_step + n * kLanes]
template <int64_t kVectors>
HWY_INLINE void multiply_tile(VF (&tile)[kTileRows][kVectors], const float* HWY_RESTRICT a, int64_t a_row, int64_t a_step,
                              const float* HWY_RESTRICT b, int64_t b_step, int64_t count) {
  const F32 d;
  for (int64_t p = 0; p < count; ++p) {
    VF column[kVectors];
    WEFT_UNROLL for (int64_t n = 0; n < kVectors; ++n) column[n] = hn::LoadU(d, b + n * kLanes);
    WEFT_UNROLL for (int64_t r = 0; r < kTileRows; ++r) {
      const VF x = hn::Set(d, a[r * a_row]);
      WEFT_UNROLL for (int64_t n = 0; n < kVectors; ++n) tile[r][n] = hn::MulAdd(x, column[n], tile[r][n]);
    }
    a += a_step;
    b += b_step;
  }
}

// out[r][c] = (accumulate ? out[r][c] : 0) + sum_p a[r * a_row + p * a_step] * b[p * b_step + c]
// rows must be a multiple of kTileRows and columns a multiple of kLanes. out must not overlap a or b.
template <int64_t kVectors>
HWY_INLINE void multiply_columns(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_step, int64_t rows,
                                 int64_t count, float* out, int64_t out_row, bool accumulate) {
  const F32 d;
  for (int64_t r = 0; r < rows; r += kTileRows) {
    VF tile[kTileRows][kVectors];
    WEFT_UNROLL for (int64_t i = 0; i < kTileRows; ++i) WEFT_UNROLL for (int64_t n = 0; n < kVectors; ++n) tile[i][n] =
        accumulate ? hn::LoadU(d, out + (r + i) * out_row + n * kLanes) : hn::Zero(d);
    multiply_tile<kVectors>(tile, a + r * a_row, a_row, a_step, b, b_step, count);
    WEFT_UNROLL for (int64_t i = 0; i < kTileRows; ++i) WEFT_UNROLL for (int64_t n = 0; n < kVectors; ++n)
        hn::StoreU(tile[i][n], d, out + (r + i) * out_row + n * kLanes);
  }
}

HWY_INLINE void multiply(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_step, int64_t rows,
                         int64_t columns, int64_t count, float* out, int64_t out_row, bool accumulate) {
  for (int64_t c = 0; c < columns;) {
    const int64_t width = panel_width(c, columns);
    if (width == kPanel)
      multiply_columns<kTileVectors>(a, a_row, a_step, b + c, b_step, rows, count, out + c, out_row, accumulate);
    else
      multiply_columns<1>(a, a_row, a_step, b + c, b_step, rows, count, out + c, out_row, accumulate);
    c += width;
  }
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
