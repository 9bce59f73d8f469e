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

#include "common/half.h"
#include "weft/tensor.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using VF = hn::Vec<F32>;
constexpr int64_t kLanes = static_cast<int64_t>(HWY_LANES(float));

#define WEFT_UNROLL _Pragma("GCC unroll 16")
// Targets without vectors of their own: what other targets do in one instruction takes a loop there, some of it is missing.
#define WEFT_EMULATED (HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128)

// ---- 16-bit floats, as raw bits; one vector of f32 lanes at a time

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

// Round to nearest even; NaN keeps its sign and becomes quiet. kNumbers: there is no NaN, which saves a third of the work.
template <bool kNumbers = false>
HWY_INLINE void store_bf16(VF v, uint16_t* p) {
  const hn::RebindToUnsigned<F32> d32;
  const hn::Rebind<uint16_t, F32> d16;
  const auto bits = hn::BitCast(d32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1u));
  auto upper = hn::Add(hn::Add(bits, hn::Set(d32, 0x7fffu)), odd);  // the upper half of every lane
  if constexpr (!kNumbers) upper = hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(v)), hn::Or(bits, hn::Set(d32, 0x400000u)), upper);
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

// Rows of numbers as they are stored, a vector of f32 at a time. The three look alike to the kernels.
// store_numbers: where no NaN is among them.
struct F32Rows {
  float* data;
  int64_t stride;
  HWY_INLINE F32Rows from(int64_t row) const { return {data + row * stride, stride}; }
  HWY_INLINE VF load(int64_t row, int64_t i) const { return hn::LoadU(F32(), data + row * stride + i); }
  HWY_INLINE void store(int64_t row, int64_t i, VF x) const { hn::StoreU(x, F32(), data + row * stride + i); }
  HWY_INLINE void store_numbers(int64_t row, int64_t i, VF x) const { store(row, i, x); }
};
struct F16Rows {
  uint16_t* data;
  int64_t stride;
  HWY_INLINE F16Rows from(int64_t row) const { return {data + row * stride, stride}; }
  HWY_INLINE VF load(int64_t row, int64_t i) const { return load_f16(data + row * stride + i); }
  HWY_INLINE void store(int64_t row, int64_t i, VF x) const { store_f16(x, data + row * stride + i); }
  HWY_INLINE void store_numbers(int64_t row, int64_t i, VF x) const { store(row, i, x); }
};
struct Bf16Rows {
  uint16_t* data;
  int64_t stride;
  HWY_INLINE Bf16Rows from(int64_t row) const { return {data + row * stride, stride}; }
  HWY_INLINE VF load(int64_t row, int64_t i) const { return load_bf16(data + row * stride + i); }
  HWY_INLINE void store(int64_t row, int64_t i, VF x) const { store_bf16(x, data + row * stride + i); }
  HWY_INLINE void store_numbers(int64_t row, int64_t i, VF x) const { store_bf16<true>(x, data + row * stride + i); }
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

#if !WEFT_EMULATED
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
#if WEFT_EMULATED
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

// Adding 1.5 2^23 to a float of less than 2^22 leaves it as an integer in the low bits, rounded to nearest.
constexpr float kToInteger = 0x1.8p23f;
constexpr int32_t kToIntegerBits = 0x4b400000;

// The functions that follow are chains of two dozen dependent instructions: loops that have several vectors at hand ask for kChains at a
// time, step by step side by side, because a processor does not look far enough ahead to do so by itself.
constexpr int kChains = HWY_MAX_BYTES >= 64 || HWY_ARCH_ARM_A64 ? 4 : 2;

#define WEFT_EACH WEFT_UNROLL for (int i = 0; i < kCount; ++i)

// e^x for x <= 0, to 4e-7 of its value; e^-87 = 2e-38 from there on down, minus infinity included. A NaN stays one, unless kNumbers:
// then x must be within [-87, 0]. In place.
template <int kCount, bool kNumbers = false>
HWY_INLINE void exp_weights(VF* x) {
  const F32 d;
  const hn::RebindToSigned<F32> di;
  const VF least = hn::Set(d, -87.0f), offset = hn::Set(d, kNumbers ? kToInteger : kToInteger + 127);
  VF shifted[kCount], p[kCount];
  if constexpr (!kNumbers) WEFT_EACH x[i] = hn::IfThenElse(hn::Lt(x[i], least), least, x[i]);
  // x = n ln 2 + f. The bits of n + 127, shifted to the exponent, are 2^n, and those of n multiply by it where they are added to a
  // number's bits; e^f = 1 + f p(f) on |f| <= ln(2) / 2, p by minimax: 1.2e-7.
  WEFT_EACH shifted[i] = hn::MulAdd(x[i], hn::Set(d, 0x1.715476p+0f), offset);
  WEFT_EACH p[i] = hn::Sub(shifted[i], offset);
#if WEFT_EMULATED  // a product is rounded before it is added: n ln 2 in two parts, of which the larger is exact
  WEFT_EACH x[i] = hn::NegMulAdd(p[i], hn::Set(d, 0x1.7f7d1cp-20f), hn::NegMulAdd(p[i], hn::Set(d, 0x1.62e4p-1f), x[i]));
#else  // ln 2 itself is 1.9e-9 off, n of them at most 2.4e-7
  WEFT_EACH x[i] = hn::NegMulAdd(p[i], hn::Set(d, 0x1.62e43p-1f), x[i]);
#endif
  WEFT_EACH p[i] = hn::MulAdd(hn::Set(d, 0x1.0fa83ap-7f), x[i], hn::Set(d, 0x1.573a58p-5f));
  WEFT_EACH p[i] = hn::MulAdd(p[i], x[i], hn::Set(d, 0x1.555a6ap-3f));
  WEFT_EACH p[i] = hn::MulAdd(p[i], x[i], hn::Set(d, 0x1.fffdc6p-2f));
  WEFT_EACH p[i] = hn::MulAdd(p[i], x[i], hn::Set(d, 0x1.fffff8p-1f));
  WEFT_EACH p[i] = hn::MulAdd(p[i], x[i], hn::Set(d, 1.0f));
  if constexpr (kNumbers)
    WEFT_EACH x[i] = hn::BitCast(d, hn::Add(hn::BitCast(di, p[i]), hn::ShiftLeft<23>(hn::BitCast(di, shifted[i]))));
  else
    WEFT_EACH x[i] = hn::Mul(p[i], hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(di, shifted[i]))));
}
HWY_INLINE VF exp_weight(VF x) {
  exp_weights<1>(&x);
  return x;
}

// 1 / (1 + e) for 0 < e <= 1. A step of Newton's from the 14 bits of AVX-512 takes a third of a division's time; other targets know 8 to
// 12 bits.
template <int kCount>
HWY_INLINE void shares_of_1(const VF* e, VF* out) {
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
  VF e[kCount], share[kCount];
  WEFT_EACH e[i] = hn::Neg(hn::Abs(x[i]));
  exp_weights<kCount>(e);
  shares_of_1<kCount>(e, share);
  WEFT_EACH x[i] = hn::Mul(hn::IfThenElse(hn::Ge(x[i], hn::Zero(d)), hn::Set(d, 1.0f), e[i]), share[i]);
}
HWY_INLINE VF sigmoid(VF x) {
  sigmoids<1>(&x);
  return x;
}

// x sigmoid(x) = max(x, 0) - |x| e / (1 + e), e = e^-|x| or e^-87. In place. Magnitudes are compared as integers, which other pipes do
// than those that multiply; a NaN is lost there and put back. Beyond 87 the magnitude stays there in the product, too: e does.
template <int kCount>
HWY_INLINE void silus(VF* x) {
  const F32 d;
  const hn::RebindToSigned<F32> di;
  const auto most = hn::BitCast(di, hn::Set(d, 87.0f));
  VF size[kCount], e[kCount], share[kCount];
  WEFT_EACH size[i] = hn::BitCast(d, hn::Min(hn::BitCast(di, hn::Abs(x[i])), most));
  WEFT_EACH e[i] = hn::Neg(size[i]);
  exp_weights<kCount, true>(e);
  shares_of_1<kCount>(e, share);
  WEFT_EACH share[i] = hn::Mul(e[i], share[i]);
  WEFT_EACH e[i] = hn::BitCast(d, hn::Max(hn::BitCast(di, x[i]), hn::Zero(di)));
  WEFT_EACH x[i] = hn::IfThenElse(hn::IsNaN(x[i]), x[i], hn::NegMulAdd(size[i], share[i], e[i]));
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
