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

constexpr int64_t kMaxDim = kMaxDeltaHeadSize;
constexpr int64_t kMatrixStride = kMaxDim;  // kLanes divides it

struct AffineMemory {
  HWY_ALIGN float x[kMaxDim * kMatrixStride], p[kMaxDim * kMatrixStride], out[kMaxDim * kMatrixStride];
  HWY_ALIGN float row[kMaxDim];
};

size_t affine_bytes() { return align_scratch(sizeof(AffineMemory)); }

// Loads a [rows, K] matrix of any dtype and layout as f32 rows of kMatrixStride numbers, padded with zeros. Absent: all zeros.
HWY_INLINE void load_padded(const MatrixAt& m, int64_t rows, int64_t K, float* row, float* to) {
  for (int64_t i = 0; i < kMaxDim * kMatrixStride; ++i) to[i] = 0;
  if (!m.view.data) return;
  if (m.view.layout == StateLayout::vk) {
    for (int64_t v = 0; v < rows; ++v) unpack_row(m.view.dtype, m.view.data, m.base + v * K, K, to + v * kMatrixStride);
    return;
  }
  for (int64_t k = 0; k < K; ++k) {
    unpack_row(m.view.dtype, m.view.data, m.base + k * rows, rows, row);
    for (int64_t v = 0; v < rows; ++v) to[v * kMatrixStride + k] = row[v];
  }
}

// out = x p + y. x and y may be absent; x and out may be the same matrix.
void affine_product(const MatrixAt& x, const MatrixAt& p, const MatrixAt& y, const MatrixAt& out, int64_t rows, int64_t K,
                    void* memory) {
  AffineMemory& m = *static_cast<AffineMemory*>(memory);
  load_padded(y, rows, K, m.row, m.out);
  if (x.view.data) {
    load_padded(x, rows, K, m.row, m.x);
    load_padded(p, K, K, m.row, m.p);
    multiply(m.x, kMatrixStride, 1, m.p, kMatrixStride, (rows + kTileRows - 1) / kTileRows * kTileRows,
             (K + kLanes - 1) / kLanes * kLanes, K, m.out, kMatrixStride, true);
  }
  if (out.view.layout == StateLayout::vk) {
    for (int64_t v = 0; v < rows; ++v) pack_row(m.out + v * kMatrixStride, K, out.view.dtype, out.view.data, out.base + v * K);
    return;
  }
  for (int64_t k = 0; k < K; ++k) {
    for (int64_t v = 0; v < rows; ++v) m.row[v] = m.out[v * kMatrixStride + k];
    pack_row(m.row, rows, out.view.dtype, out.view.data, out.base + k * rows);
  }
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
