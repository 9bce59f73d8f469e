// The GEMM kernel of a dense layer: a block of outputs as tiles of dot products, vectorised along K.
// Included once per target, after foreach_target.h.
#if defined(WEFT_MODEL_DENSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_MODEL_DENSE_INL_H_
#undef WEFT_MODEL_DENSE_INL_H_
#else
#define WEFT_MODEL_DENSE_INL_H_
#endif

#include <algorithm>

#include "common/blocks_256.h"
#include "common/blocks_32.h"
#include "cpu/runner-inl.h"
#include "model/network/cpu/dense_block.h"

HWY_BEFORE_NAMESPACE();
namespace weft::model::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using namespace weft::cpu::HWY_NAMESPACE;  // NOLINT: the vector functions of this target

// Rows of x in a tile. With 4 rows of weights, the sums and operands of a tile fill 32 vector registers (16 on AVX2). Weights are
// converted when they are loaded: with 6 rows, 6 multiplications hide one conversion, which is faster than a converted copy in the
// cache.
constexpr int64_t kTokens = HWY_TARGET == HWY_AVX2 ? 3 : 6;
constexpr int64_t kWeightRows = 4;

template <DType dtype>
HWY_INLINE VF load_weights(const void* row, int64_t i) {
  if constexpr (dtype == DType::bf16) return load_bf16(static_cast<const uint16_t*>(row) + i);
  if constexpr (dtype == DType::f16) return load_f16(static_cast<const uint16_t*>(row) + i);
  if constexpr (dtype == DType::f32) return hn::LoadU(F32(), static_cast<const float*>(row) + i);
}

// The last, partial vector of a row, padded with zeros.
HWY_INLINE VF load_tail(DType dtype, const void* row, int64_t first, int64_t count) {
  HWY_ALIGN float lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = load_one(dtype, row, first + i);
  return hn::Load(F32(), lanes);
}

// sums[m][n] = x_m . w_n over `count` numbers.
template <DType dtype, int64_t kM, int64_t kN>
HWY_INLINE void dot_tile(const float* HWY_RESTRICT x, int64_t x_stride, const void* const* w, int64_t count, float (*sums)[kN]) {
  const F32 d;
  VF tile[kM][kN];
  WEFT_UNROLL for (int64_t m = 0; m < kM; ++m) WEFT_UNROLL for (int64_t n = 0; n < kN; ++n) tile[m][n] = hn::Zero(d);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    VF value[kM];
    WEFT_UNROLL for (int64_t m = 0; m < kM; ++m) value[m] = hn::LoadU(d, x + m * x_stride + i);
    WEFT_UNROLL for (int64_t n = 0; n < kN; ++n) {
      const VF row = load_weights<dtype>(w[n], i);
      WEFT_UNROLL for (int64_t m = 0; m < kM; ++m) tile[m][n] = hn::MulAdd(value[m], row, tile[m][n]);
    }
  }
  if (i < count) {
    WEFT_UNROLL for (int64_t n = 0; n < kN; ++n) {
      const VF row = load_tail(dtype, w[n], i, count - i);
      WEFT_UNROLL for (int64_t m = 0; m < kM; ++m) tile[m][n] =
          hn::MulAdd(load_tail(DType::f32, x + m * x_stride, i, count - i), row, tile[m][n]);
    }
  }
  WEFT_UNROLL for (int64_t m = 0; m < kM; ++m) WEFT_UNROLL for (int64_t n = 0; n < kN; n += 4) sum_lanes4(tile[m] + n, sums[m] + n);
}

// kM rows of x times `rows` rows of weights, over `count` numbers of K.
template <DType dtype, int64_t kM, int64_t kN>
HWY_NOINLINE void dot_rows(const float* x, int64_t x_stride, const void* w, int64_t w_row_bytes, int64_t rows, int64_t count,
                           float* y, int64_t y_stride, bool add) {
  for (int64_t n = 0; n < rows; n += kN) {
    const void* row[kN];
    WEFT_UNROLL for (int64_t j = 0; j < kN; ++j)  // past the end: the last row again; its sums are discarded
        row[j] = static_cast<const char*>(w) + std::min(n + j, rows - 1) * w_row_bytes;
    float sums[kM][kN];
    dot_tile<dtype, kM, kN>(x, x_stride, row, count, sums);
    const int64_t live = std::min(kN, rows - n);
    for (int64_t m = 0; m < kM; ++m) {
      float* out = y + m * y_stride + n;
      for (int64_t j = 0; j < live; ++j) out[j] = add ? out[j] + sums[m][j] : sums[m][j];
    }
  }
}

template <DType dtype>
void dot_block(const float* x, int64_t x_stride, int64_t M, const void* w, int64_t w_row_bytes, int64_t rows, int64_t count,
               float* y, int64_t y_stride, bool add) {
  int64_t m = 0;
  const auto run = [&](auto kernel, int64_t step) {
    for (; m + step <= M; m += step)
      kernel(x + m * x_stride, x_stride, w, w_row_bytes, rows, count, y + m * y_stride, y_stride, add);
  };
  run(dot_rows<dtype, kTokens, kWeightRows>, kTokens);
  if constexpr (kTokens > 4) run(dot_rows<dtype, 4, kWeightRows>, 4);
  run(dot_rows<dtype, 2, kWeightRows>, 2);
  run(dot_rows<dtype, 1, 2 * kWeightRows>, 1);
}

// Rows of blocks as f32, `stride` numbers apart.
template <class Block>
void widen_rows(const uint8_t* from, int64_t row_bytes, int64_t rows, int64_t count, float* to, int64_t stride) {
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t k = 0; k < count; k += Block::kNumbers)
      Block::widen(from + n * row_bytes + k / Block::kNumbers * Block::kBytes, to + n * stride + k);
}

using WidenRows = void (*)(const uint8_t*, int64_t, int64_t, int64_t, float*, int64_t);
WidenRows widen_rows_of(WeightType type) {
  switch (type) {
    case WeightType::q8_0: return widen_rows<BlockQ80>;
    case WeightType::q4_0: return widen_rows<BlockQ40>;
    case WeightType::q4_1: return widen_rows<BlockQ41>;
    case WeightType::q5_0: return widen_rows<BlockQ50>;
    case WeightType::q5_1: return widen_rows<BlockQ51>;
    case WeightType::q4_k: return widen_rows<BlockQ4K>;
    case WeightType::q5_k: return widen_rows<BlockQ5K>;
    case WeightType::q6_k: return widen_rows<BlockQ6K>;
    case WeightType::f32:
    case WeightType::f16:
    case WeightType::bf16: break;
  }
  return nullptr;
}

void dense_block(const DenseTask& task, const DenseBlock& block) {
  const Matrix& w = task.w;
  const int64_t M = block.m_last - block.m_first, row_bytes = w.row_bytes();
  const WidenRows widen = widen_rows_of(w.type);
  const auto kernel = w.type == WeightType::bf16  ? dot_block<DType::bf16>
                      : w.type == WeightType::f16 ? dot_block<DType::f16>
                                                  : dot_block<DType::f32>;
  constexpr int64_t kTileRows = 2 * kWeightRows;  // 32 KB, which stay in the first-level cache
  HWY_ALIGN float tile[kTileRows * kBlockK];      // of widened blocks
  const int64_t step = widen ? kTileRows : kBlockRows;
  for (int64_t n = block.first; n < block.last; n += step) {
    const int64_t rows = std::min(step, block.last - n);
    for (int64_t k = 0; k < w.cols; k += kBlockK) {
      const int64_t count = std::min(kBlockK, w.cols - k);
      const char* weights = static_cast<const char*>(w.data) + n * row_bytes + weight_bytes(w.type, k);
      if (widen) widen(reinterpret_cast<const uint8_t*>(weights), row_bytes, rows, count, tile, kBlockK);
      kernel(task.x + block.m_first * task.x_stride + k, task.x_stride, M, widen ? static_cast<const void*>(tile) : weights,
             widen ? kBlockK * static_cast<int64_t>(sizeof(float)) : row_bytes, rows, count,
             task.y + block.m_first * task.y_stride + n, task.y_stride, task.add || k > 0);
    }
  }
}

}  // namespace weft::model::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
