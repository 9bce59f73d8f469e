// out = x p + y for the matrices of affine maps.
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_AFFINE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_AFFINE_INL_H_
#undef WEFT_CPU_AFFINE_INL_H_
#else
#define WEFT_CPU_AFFINE_INL_H_
#endif

#include "cpu/common/gemm-inl.h"
#include "cpu/common/scratch.h"
#include "cpu/delta/chunk_scan.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

constexpr int64_t kMaxSide = kMaxDeltaHeadSize;
constexpr int64_t kSideStride = kMaxSide;  // kLanes divides it

struct AffineMemory {
  HWY_ALIGN float x[kMaxSide * kSideStride], p[kMaxSide * kSideStride], out[kMaxSide * kSideStride];
  HWY_ALIGN float row[kMaxSide];
};

size_t affine_bytes() { return align_scratch(sizeof(AffineMemory)); }

// A [rows, K] matrix, zero-padded to [round_up(rows, kTileRows)][kSideStride], whatever its dtype and layout. Absent: zeros.
HWY_INLINE void load_side(const MatrixAt& m, int64_t rows, int64_t K, float* row, float* to) {
  for (int64_t i = 0; i < kMaxSide * kSideStride; ++i) to[i] = 0;
  if (!m.view.data) return;
  if (m.view.layout == StateLayout::vk) {
    for (int64_t v = 0; v < rows; ++v) unpack_row(m.view.dtype, m.view.data, m.base + v * K, K, to + v * kSideStride);
    return;
  }
  for (int64_t k = 0; k < K; ++k) {
    unpack_row(m.view.dtype, m.view.data, m.base + k * rows, rows, row);
    for (int64_t v = 0; v < rows; ++v) to[v * kSideStride + k] = row[v];
  }
}

// out = x p + y; x and out may be the same matrix. x and y may be absent.
void affine_product(const MatrixAt& x, const MatrixAt& p, const MatrixAt& y, const MatrixAt& out, int64_t rows, int64_t K,
                    void* memory) {
  AffineMemory& m = *static_cast<AffineMemory*>(memory);
  load_side(y, rows, K, m.row, m.out);
  if (x.view.data) {
    load_side(x, rows, K, m.row, m.x);
    load_side(p, K, K, m.row, m.p);
    multiply(m.x, kSideStride, 1, m.p, kSideStride, (rows + kTileRows - 1) / kTileRows * kTileRows,
             (K + kLanes - 1) / kLanes * kLanes, K, m.out, kSideStride, true);
  }
  if (out.view.layout == StateLayout::vk) {
    for (int64_t v = 0; v < rows; ++v) pack_row(m.out + v * kSideStride, K, out.view.dtype, out.view.data, out.base + v * K);
    return;
  }
  for (int64_t k = 0; k < K; ++k) {
    for (int64_t v = 0; v < rows; ++v) m.row[v] = m.out[v * kSideStride + k];
    pack_row(m.row, rows, out.view.dtype, out.view.data, out.base + k * rows);
  }
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
