// The few vector verbs that all cpu kernels share: loads and stores with conversion, dot products, exponentials.
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_SIMD_INL_H_
#undef WEFT_CPU_SIMD_INL_H_
#else
#define WEFT_CPU_SIMD_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <cmath>
#include <cstdint>

#include "shared/half.h"
#include "weft/tensor.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using VF = hn::Vec<F32>;
constexpr int64_t kLanes = static_cast<int64_t>(HWY_LANES(float));

#define WEFT_UNROLL _Pragma("GCC unroll 16")

// ---- 16-bit floats, as raw bits; one vector of f32 lanes at a time

HWY_INLINE VF load_bf16(const uint16_t* p) {
  const hn::Rebind<uint16_t, F32> d16;
  const hn::RebindToUnsigned<F32> d32;
  return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, p))));
}

HWY_INLINE VF load_f16(const uint16_t* p) {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  float lanes[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = f16_to_f32(p[i]);
  return hn::LoadU(F32(), lanes);
#else
  const hn::Rebind<hwy::float16_t, F32> d16;
  return hn::PromoteTo(F32(), hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
#endif
}

// Round to nearest even; NaN keeps its sign and becomes quiet.
HWY_INLINE void store_bf16(VF v, uint16_t* p) {
  const hn::RebindToUnsigned<F32> d32;
  const hn::RebindToSigned<F32> di;
  const hn::Rebind<uint16_t, F32> d16;
  const auto bits = hn::BitCast(d32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7fffu))));
  const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(d32, 0x40u));
  const auto result = hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(v)), quiet, rounded);
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, result)), d16, p);
}

HWY_INLINE void store_f16(VF v, uint16_t* p) {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  float lanes[kLanes];
  hn::StoreU(v, F32(), lanes);
  for (int64_t i = 0; i < kLanes; ++i) p[i] = f32_to_f16(lanes[i]);
#else
  const hn::Rebind<hwy::float16_t, F32> d16;
  hn::StoreU(hn::DemoteTo(d16, v), d16, reinterpret_cast<hwy::float16_t*>(p));
#endif
}

HWY_INLINE float load_one(DType dtype, const void* p, int64_t i) {
  switch (dtype) {
    case DType::f16: return f16_to_f32(static_cast<const uint16_t*>(p)[i]);
    case DType::bf16: return bf16_to_f32(static_cast<const uint16_t*>(p)[i]);
    default: return static_cast<const float*>(p)[i];
  }
}

HWY_INLINE void store_one(DType dtype, void* p, int64_t i, float value) {
  switch (dtype) {
    case DType::f16: static_cast<uint16_t*>(p)[i] = f32_to_f16(value); break;
    case DType::bf16: static_cast<uint16_t*>(p)[i] = f32_to_bf16(value); break;
    default: static_cast<float*>(p)[i] = value; break;
  }
}

// `count` numbers of any float dtype, element `first` on, into f32 and back. Vectors first, then single elements.
HWY_INLINE void unpack_row(DType dtype, const void* from, int64_t first, int64_t count, float* HWY_RESTRICT to) {
  const F32 d;
  int64_t i = 0;
  if (dtype == DType::f32) {
    const float* p = static_cast<const float*>(from) + first;
    for (; i + kLanes <= count; i += kLanes) hn::StoreU(hn::LoadU(d, p + i), d, to + i);
  } else if (dtype == DType::bf16) {
    const uint16_t* p = static_cast<const uint16_t*>(from) + first;
    for (; i + kLanes <= count; i += kLanes) hn::StoreU(load_bf16(p + i), d, to + i);
  } else {
    const uint16_t* p = static_cast<const uint16_t*>(from) + first;
    for (; i + kLanes <= count; i += kLanes) hn::StoreU(load_f16(p + i), d, to + i);
  }
  for (; i < count; ++i) to[i] = load_one(dtype, from, first + i);
}

HWY_INLINE void pack_row(const float* HWY_RESTRICT from, int64_t count, DType dtype, void* to, int64_t first) {
  const F32 d;
  int64_t i = 0;
  if (dtype == DType::f32) {
    float* p = static_cast<float*>(to) + first;
    for (; i + kLanes <= count; i += kLanes) hn::StoreU(hn::LoadU(d, from + i), d, p + i);
  } else if (dtype == DType::bf16) {
    uint16_t* p = static_cast<uint16_t*>(to) + first;
    for (; i + kLanes <= count; i += kLanes) store_bf16(hn::LoadU(d, from + i), p + i);
  } else {
    uint16_t* p = static_cast<uint16_t*>(to) + first;
    for (; i + kLanes <= count; i += kLanes) store_f16(hn::LoadU(d, from + i), p + i);
  }
  for (; i < count; ++i) store_one(dtype, to, first + i, from[i]);
}

HWY_INLINE void fill_row(float* to, int64_t count, float value) {
  for (int64_t i = 0; i < count; ++i) to[i] = value;
}

// ---- sums

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
// Adds up the 128-bit blocks of a vector.
template <class V>
HWY_INLINE hn::Vec<hn::Full128<float>> sum_blocks(V v) {
  if constexpr (hn::MaxLanes(hn::DFromV<V>()) == 4) {
    return v;
  } else {
    const hn::Half<hn::DFromV<V>> half;
    return sum_blocks(hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}
#endif

// Two numbers of any vector into one, and all lanes of a vector.
struct AddLanes {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::Add(a, b);
  }
  HWY_INLINE float all(VF v) const { return hn::GetLane(hn::SumOfLanes(F32(), v)); }
};
struct MaxLanes {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::Max(a, b);
  }
  // By hand: Highway's own, over emulated vectors, finds the least finite number where all are minus infinity.
  HWY_INLINE float all(VF v) const {
    HWY_ALIGN float lanes[kLanes];
    hn::Store(v, F32(), lanes);
    float top = lanes[0];
    for (int64_t i = 1; i < kLanes; ++i) top = lanes[i] > top ? lanes[i] : top;
    return top;
  }
};

// Joins the lanes of four vectors: out[r] = all lanes of v[r].
template <class Join>
HWY_INLINE void join_lanes4(const VF* v, float* out, Join join) {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  for (int r = 0; r < 4; ++r) out[r] = join.all(v[r]);
#else
  const F32 d;
  const hn::Repartition<double, F32> dd;
  // Transpose 4 x 4 inside every block of 128 bits, joining on the way.
  const auto a = join(hn::InterleaveLower(d, v[0], v[1]), hn::InterleaveUpper(d, v[0], v[1]));  // 0 1 0 1
  const auto b = join(hn::InterleaveLower(d, v[2], v[3]), hn::InterleaveUpper(d, v[2], v[3]));  // 2 3 2 3
  const auto low = hn::BitCast(d, hn::InterleaveLower(dd, hn::BitCast(dd, a), hn::BitCast(dd, b)));
  const auto high = hn::BitCast(d, hn::InterleaveUpper(dd, hn::BitCast(dd, a), hn::BitCast(dd, b)));
  HWY_ALIGN float blocks[kLanes];
  hn::Store(join(low, high), d, blocks);
  const hn::Full128<float> d4;
  auto joined = hn::Load(d4, blocks);
  WEFT_UNROLL for (int64_t i = 4; i < kLanes; i += 4) joined = join(joined, hn::Load(d4, blocks + i));
  hn::StoreU(joined, d4, out);
#endif
}
HWY_INLINE void sum_lanes4(const VF* v, float* out) { join_lanes4(v, out, AddLanes()); }
HWY_INLINE void max_lanes4(const VF* v, float* out) { join_lanes4(v, out, MaxLanes()); }

// sum a[i] b[i]; count is a multiple of kLanes.
HWY_INLINE float dot_padded(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, int64_t count) {
  const F32 d;
  VF sum = hn::Zero(d);
  for (int64_t i = 0; i < count; i += kLanes) sum = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum);
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// out[r * stride + c] = a_r . b_c for four rows of a and four of b; count is a multiple of kLanes.
HWY_INLINE void dots_4x4(const float* HWY_RESTRICT a, int64_t a_stride, const float* HWY_RESTRICT b, int64_t b_stride,
                         int64_t count, float* HWY_RESTRICT out, int64_t stride) {
  const F32 d;
  VF sum[4][4];
  WEFT_UNROLL for (int r = 0; r < 4; ++r) WEFT_UNROLL for (int c = 0; c < 4; ++c) sum[r][c] = hn::Zero(d);
  for (int64_t i = 0; i < count; i += kLanes) {
    VF row[4];
    WEFT_UNROLL for (int c = 0; c < 4; ++c) row[c] = hn::LoadU(d, b + c * b_stride + i);
    WEFT_UNROLL for (int r = 0; r < 4; ++r) {
      const VF x = hn::LoadU(d, a + r * a_stride + i);
      WEFT_UNROLL for (int c = 0; c < 4; ++c) sum[r][c] = hn::MulAdd(x, row[c], sum[r][c]);
    }
  }
  WEFT_UNROLL for (int r = 0; r < 4; ++r) sum_lanes4(sum[r], out + r * stride);
}

// ---- functions

// e^x for x <= 0 (anything below the f32 range gives 0, minus infinity included). NaN stays NaN.
HWY_INLINE VF exp_nonpositive(VF x) {
  const F32 d;
  const VF floor = hn::Set(d, -104.0f);
  const VF result = hn::IfThenElseZero(hn::Gt(x, floor), hn::Exp(d, hn::Max(x, floor)));
  return hn::IfThenElse(hn::IsNaN(x), x, result);
}

// 1 / (1 + e^-x)
HWY_INLINE VF sigmoid(VF x) {
  const F32 d;
  const VF e = exp_nonpositive(hn::Neg(hn::Abs(x)));  // e^-|x|, in (0, 1]
  const VF one = hn::Set(d, 1.0f);
  return hn::Div(hn::IfThenElse(hn::Ge(x, hn::Zero(d)), one, e), hn::Add(one, e));
}

// x * sigmoid(x)
HWY_INLINE VF silu(VF x) { return hn::Mul(x, sigmoid(x)); }

// log(1 + e^x) = max(x, 0) + log1p(e^-|x|)
HWY_INLINE VF softplus(VF x) {
  const F32 d;
  const VF result = hn::Add(hn::Max(x, hn::Zero(d)), hn::Log1p(d, exp_nonpositive(hn::Neg(hn::Abs(x)))));
  return hn::IfThenElse(hn::IsNaN(x), x, result);
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
