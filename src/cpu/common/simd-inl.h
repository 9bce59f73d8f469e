// Vector helpers that all cpu kernels share: loads and stores with conversion, reductions, dot products, exponentials.
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

#include "common/half.h"
#include "weft/tensor.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using VF = hn::Vec<F32>;
constexpr int64_t kLanes = static_cast<int64_t>(HWY_LANES(float));

#define WEFT_UNROLL _Pragma("GCC unroll 16")
// Targets without hardware vectors. Many Highway ops are loops there, and some are missing.
#define WEFT_EMULATED (HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128)

// ---- 16-bit floats as raw bits, converted from and to one vector of f32 lanes

HWY_INLINE VF load_bf16(const uint16_t* p) {
  const hn::Rebind<uint16_t, F32> d16;
  const hn::RebindToUnsigned<F32> d32;
  return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, p))));
}

HWY_INLINE VF load_f16(const uint16_t* p) {
#if WEFT_EMULATED
  float lanes[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = f16_to_f32(p[i]);
  return hn::LoadU(F32(), lanes);
#else
  const hn::Rebind<hwy::float16_t, F32> d16;
  return hn::PromoteTo(F32(), hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
#endif
}

// Rounds to nearest even; a NaN keeps its sign and becomes quiet. kNoNan: v must hold no NaN, which saves a third of the work.
template <bool kNoNan = false>
HWY_INLINE void store_bf16(VF v, uint16_t* p) {
  const hn::RebindToUnsigned<F32> d32;
  const hn::Rebind<uint16_t, F32> d16;
  const auto bits = hn::BitCast(d32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1u));
  auto upper = hn::Add(hn::Add(bits, hn::Set(d32, 0x7fffu)), odd);  // bf16 in the upper half of every lane
  if constexpr (!kNoNan) upper = hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(v)), hn::Or(bits, hn::Set(d32, 0x400000u)), upper);
#if WEFT_EMULATED
  const hn::RebindToSigned<F32> di;
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, hn::ShiftRight<16>(upper))), d16, p);
#else
  const hn::Repartition<uint16_t, F32> halves;
  const auto both = hn::BitCast(halves, upper);
  hn::StoreU(hn::LowerHalf(d16, hn::ConcatOdd(halves, both, both)), d16, p);
#endif
}

HWY_INLINE void store_f16(VF v, uint16_t* p) {
#if WEFT_EMULATED
  float lanes[kLanes];
  hn::StoreU(v, F32(), lanes);
  for (int64_t i = 0; i < kLanes; ++i) p[i] = f32_to_f16(lanes[i]);
#else
  const hn::Rebind<hwy::float16_t, F32> d16;
  hn::StoreU(hn::DemoteTo(d16, v), d16, reinterpret_cast<hwy::float16_t*>(p));
#endif
}

// Views of rows stored as f32, f16 or bf16, with one interface: loads and stores convert a vector of f32 at a time. x of
// store_no_nan must hold no NaN.
struct F32Rows {
  float* data;
  int64_t stride;
  HWY_INLINE F32Rows from(int64_t row) const { return {data + row * stride, stride}; }
  HWY_INLINE VF load(int64_t row, int64_t i) const { return hn::LoadU(F32(), data + row * stride + i); }
  HWY_INLINE void store(int64_t row, int64_t i, VF x) const { hn::StoreU(x, F32(), data + row * stride + i); }
  HWY_INLINE void store_no_nan(int64_t row, int64_t i, VF x) const { store(row, i, x); }
};
struct F16Rows {
  uint16_t* data;
  int64_t stride;
  HWY_INLINE F16Rows from(int64_t row) const { return {data + row * stride, stride}; }
  HWY_INLINE VF load(int64_t row, int64_t i) const { return load_f16(data + row * stride + i); }
  HWY_INLINE void store(int64_t row, int64_t i, VF x) const { store_f16(x, data + row * stride + i); }
  HWY_INLINE void store_no_nan(int64_t row, int64_t i, VF x) const { store(row, i, x); }
};
struct Bf16Rows {
  uint16_t* data;
  int64_t stride;
  HWY_INLINE Bf16Rows from(int64_t row) const { return {data + row * stride, stride}; }
  HWY_INLINE VF load(int64_t row, int64_t i) const { return load_bf16(data + row * stride + i); }
  HWY_INLINE void store(int64_t row, int64_t i, VF x) const { store_bf16(x, data + row * stride + i); }
  HWY_INLINE void store_no_nan(int64_t row, int64_t i, VF x) const { store_bf16<true>(x, data + row * stride + i); }
};

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

// Converts `count` elements of any float dtype, starting at element `first`, to f32 (unpack_row) or back (pack_row).
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

// ---- reductions and dot products

#if !WEFT_EMULATED
// Sum of the 128-bit blocks of a vector.
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

// Reductions: operator() combines two vectors lane by lane, all() reduces the lanes of one vector.
struct AddReduction {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::Add(a, b);
  }
  HWY_INLINE float all(VF v) const { return hn::GetLane(hn::SumOfLanes(F32(), v)); }
};
struct MaxReduction {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::Max(a, b);
  }
  // Not hn::MaxOfLanes: on emulated vectors it returns the lowest finite float where every lane is minus infinity.
  HWY_INLINE float all(VF v) const {
    HWY_ALIGN float lanes[kLanes];
    hn::Store(v, F32(), lanes);
    float top = lanes[0];
    for (int64_t i = 1; i < kLanes; ++i) top = lanes[i] > top ? lanes[i] : top;
    return top;
  }
};

// out[r] = reduction of all lanes of v[r], r < 4.
template <class Reduce>
HWY_INLINE void reduce_lanes4(const VF* v, float* out, Reduce reduce) {
#if WEFT_EMULATED
  for (int r = 0; r < 4; ++r) out[r] = reduce.all(v[r]);
#else
  const F32 d;
  const hn::Repartition<double, F32> dd;
  // A 4 x 4 transpose inside every 128-bit block, fused with the reduction.
  const auto a = reduce(hn::InterleaveLower(d, v[0], v[1]), hn::InterleaveUpper(d, v[0], v[1]));  // 0 1 0 1
  const auto b = reduce(hn::InterleaveLower(d, v[2], v[3]), hn::InterleaveUpper(d, v[2], v[3]));  // 2 3 2 3
  const auto low = hn::BitCast(d, hn::InterleaveLower(dd, hn::BitCast(dd, a), hn::BitCast(dd, b)));
  const auto high = hn::BitCast(d, hn::InterleaveUpper(dd, hn::BitCast(dd, a), hn::BitCast(dd, b)));
  HWY_ALIGN float blocks[kLanes];
  hn::Store(reduce(low, high), d, blocks);
  const hn::Full128<float> d4;
  auto reduced = hn::Load(d4, blocks);
  WEFT_UNROLL for (int64_t i = 4; i < kLanes; i += 4) reduced = reduce(reduced, hn::Load(d4, blocks + i));
  hn::StoreU(reduced, d4, out);
#endif
}
HWY_INLINE void sum_lanes4(const VF* v, float* out) { reduce_lanes4(v, out, AddReduction()); }
HWY_INLINE void max_lanes4(const VF* v, float* out) { reduce_lanes4(v, out, MaxReduction()); }

// sum_i a[i] b[i]; count must be a multiple of kLanes.
HWY_INLINE float dot_padded(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, int64_t count) {
  const F32 d;
  VF sum = hn::Zero(d);
  for (int64_t i = 0; i < count; i += kLanes) sum = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum);
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// out[r * stride + c] = a_r . b_c for four rows of a and four of b; count must be a multiple of kLanes.
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

// e^x for x <= 0; 0 where the result is below the f32 range, minus infinity included. NaN stays NaN.
HWY_INLINE VF exp_nonpositive(VF x) {
  const F32 d;
  const VF floor = hn::Set(d, -104.0f);
  const VF result = hn::IfThenElseZero(hn::Gt(x, floor), hn::Exp(d, hn::Max(x, floor)));
  return hn::IfThenElse(hn::IsNaN(x), x, result);
}

// Adding 1.5 * 2^23 to a float of magnitude below 2^22 leaves it, rounded to the nearest integer, in the low bits of the sum.
constexpr float kToInteger = 0x1.8p23f;
constexpr int32_t kToIntegerBits = 0x4b400000;

// Each of the functions below is a chain of about 24 dependent instructions. Loops with several vectors at hand pass kChains of
// them at once, so that the chains are interleaved in the code: out-of-order windows are too short to overlap them.
constexpr int kChains = HWY_MAX_BYTES >= 64 || HWY_ARCH_ARM_A64 ? 4 : 2;

#define WEFT_EACH WEFT_UNROLL for (int i = 0; i < kCount; ++i)

// e^x for x <= 0 with a relative error of 4e-7, in place. Below -87, minus infinity included, the result is e^-87 = 2e-38. NaN
// stays NaN. kInRange: x must be within [-87, 0], and not NaN.
template <int kCount, bool kInRange = false>
HWY_INLINE void exp_weights(VF* x) {
  const F32 d;
  const hn::RebindToSigned<F32> di;
  const VF least = hn::Set(d, -87.0f), offset = hn::Set(d, kInRange ? kToInteger : kToInteger + 127);
  VF shifted[kCount], p[kCount];
  if constexpr (!kInRange) WEFT_EACH x[i] = hn::IfThenElse(hn::Lt(x[i], least), least, x[i]);
  // x = n ln 2 + f with |f| <= ln(2) / 2, and e^f = 1 + f p(f) with a minimax polynomial p (error 1.2e-7). n + 127 shifted into the
  // exponent field is 2^n. With kInRange, adding n to the exponent field of e^f multiplies by 2^n.
  WEFT_EACH shifted[i] = hn::MulAdd(x[i], hn::Set(d, 0x1.715476p+0f), offset);
  WEFT_EACH p[i] = hn::Sub(shifted[i], offset);
#if WEFT_EMULATED  // no fused multiply-add: n ln 2 in two terms, of which the larger is exact
  WEFT_EACH x[i] = hn::NegMulAdd(p[i], hn::Set(d, 0x1.7f7d1cp-20f), hn::NegMulAdd(p[i], hn::Set(d, 0x1.62e4p-1f), x[i]));
#else  // the f32 constant of ln 2 is off by 1.9e-9, n times that by at most 2.4e-7
  WEFT_EACH x[i] = hn::NegMulAdd(p[i], hn::Set(d, 0x1.62e43p-1f), x[i]);
#endif
  WEFT_EACH p[i] = hn::MulAdd(hn::Set(d, 0x1.0fa83ap-7f), x[i], hn::Set(d, 0x1.573a58p-5f));
  WEFT_EACH p[i] = hn::MulAdd(p[i], x[i], hn::Set(d, 0x1.555a6ap-3f));
  WEFT_EACH p[i] = hn::MulAdd(p[i], x[i], hn::Set(d, 0x1.fffdc6p-2f));
  WEFT_EACH p[i] = hn::MulAdd(p[i], x[i], hn::Set(d, 0x1.fffff8p-1f));
  WEFT_EACH p[i] = hn::MulAdd(p[i], x[i], hn::Set(d, 1.0f));
  if constexpr (kInRange)
    WEFT_EACH x[i] = hn::BitCast(d, hn::Add(hn::BitCast(di, p[i]), hn::ShiftLeft<23>(hn::BitCast(di, shifted[i]))));
  else
    WEFT_EACH x[i] = hn::Mul(p[i], hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(di, shifted[i]))));
}
HWY_INLINE VF exp_weight(VF x) {
  exp_weights<1>(&x);
  return x;
}

// 1 / (1 + e) for 0 < e <= 1. On AVX-512, whose approximate reciprocal has 14 bits, one Newton step takes a third of the time of a
// division. Other targets have 8 to 12 bits, too few for one step, and divide.
template <int kCount>
HWY_INLINE void reciprocals_1_plus(const VF* e, VF* out) {
  const F32 d;
  const VF one = hn::Set(d, 1.0f);
  VF sum[kCount];
  WEFT_EACH sum[i] = hn::Add(one, e[i]);
#if HWY_TARGET <= HWY_AVX3
  WEFT_EACH out[i] = hn::ApproximateReciprocal(sum[i]);
  WEFT_EACH sum[i] = hn::NegMulAdd(sum[i], out[i], one);
  WEFT_EACH out[i] = hn::MulAdd(out[i], sum[i], out[i]);
#else
  WEFT_EACH out[i] = hn::Div(one, sum[i]);
#endif
}

// 1 / (1 + e^-x), from e^-|x| in (0, 1]: no overflow. In place.
template <int kCount>
HWY_INLINE void sigmoids(VF* x) {
  const F32 d;
  VF e[kCount], reciprocal[kCount];
  WEFT_EACH e[i] = hn::Neg(hn::Abs(x[i]));
  exp_weights<kCount>(e);
  reciprocals_1_plus<kCount>(e, reciprocal);
  WEFT_EACH x[i] = hn::Mul(hn::IfThenElse(hn::Ge(x[i], hn::Zero(d)), hn::Set(d, 1.0f), e[i]), reciprocal[i]);
}
HWY_INLINE VF sigmoid(VF x) {
  sigmoids<1>(&x);
  return x;
}

// x sigmoid(x) = max(x, 0) - |x| e / (1 + e) with e = e^-|x|, in place. |x| is clamped to 87 in both e and the product. Minimum and
// maximum are taken on integer bits, which other ports execute than the multiplications. They lose NaN, so the last line restores
// it.
template <int kCount>
HWY_INLINE void silus(VF* x) {
  const F32 d;
  const hn::RebindToSigned<F32> di;
  const auto most = hn::BitCast(di, hn::Set(d, 87.0f));
  VF magnitude[kCount], e[kCount], reciprocal[kCount];
  WEFT_EACH magnitude[i] = hn::BitCast(d, hn::Min(hn::BitCast(di, hn::Abs(x[i])), most));
  WEFT_EACH e[i] = hn::Neg(magnitude[i]);
  exp_weights<kCount, true>(e);
  reciprocals_1_plus<kCount>(e, reciprocal);
  WEFT_EACH reciprocal[i] = hn::Mul(e[i], reciprocal[i]);
  WEFT_EACH e[i] = hn::BitCast(d, hn::Max(hn::BitCast(di, x[i]), hn::Zero(di)));
  WEFT_EACH x[i] = hn::IfThenElse(hn::IsNaN(x[i]), x[i], hn::NegMulAdd(magnitude[i], reciprocal[i], e[i]));
}
HWY_INLINE VF silu(VF x) {
  silus<1>(&x);
  return x;
}

#undef WEFT_EACH

// log(1 + e^x) = max(x, 0) + log1p(e^-|x|)
HWY_INLINE VF softplus(VF x) {
  const F32 d;
  const VF result = hn::Add(hn::Max(x, hn::Zero(d)), hn::Log1p(d, exp_nonpositive(hn::Neg(hn::Abs(x)))));
  return hn::IfThenElse(hn::IsNaN(x), x, result);
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
