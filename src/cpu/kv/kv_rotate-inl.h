// Rotation of one row: fast Walsh-Hadamard transform (FWHT), with Hadamard factors of order 12, 20 and 28, or a dense matrix.
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_KV_ROTATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_KV_ROTATE_INL_H_
#undef WEFT_CPU_KV_ROTATE_INL_H_
#else
#define WEFT_CPU_KV_ROTATE_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "cpu/common/simd-inl.h"
#include "cpu/kv/kv_rotation.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

// Floats of a row padded to whole vectors, and an upper bound of it for a row or a group.
constexpr int64_t padded_dim(int64_t D) { return (D + kLanes - 1) / kLanes * kLanes; }
constexpr int64_t kPaddedHeadDim = kMaxHeadDim + 16;
constexpr int64_t kMaxHadamardBase = 28;

// Vectors that one pass of the FWHT holds in registers.
constexpr int64_t kPassVectors = 8;
// Vectors of the first of several passes, whose input may come from DRAM. A pass waits for all the lines it loads: with 8 or 16
// vectors, f32 rows of 256 take up to 1.4 times as long from DRAM (with 16, slightly less time from a cache).
constexpr int64_t kFirstVectors = HWY_MAX_BYTES >= 64 ? 4 : kPassVectors;

// Butterflies between lanes kHalf apart inside a vector: lane i becomes v[i] + v[i + kHalf], or v[i - kHalf] - v[i] in the upper
// lanes.
template <int64_t kHalf>
HWY_INLINE VF lane_butterfly(VF v) {
#if HWY_TARGET == HWY_SCALAR
  return v;
#else
  const F32 d;
  const hn::RebindToSigned<F32> di;
  const auto upper = hn::RebindMask(d, hn::TestBit(hn::Iota(di, 0), hn::Set(di, static_cast<int32_t>(kHalf))));
  const VF sign = hn::IfThenElse(upper, hn::Set(d, -1.0f), hn::Set(d, 1.0f));
  VF other = v;
  if constexpr (kHalf == 1) other = hn::Shuffle2301(v);
  if constexpr (kHalf == 2) other = hn::Shuffle1032(v);
#if HWY_MAX_BYTES >= 32
  if constexpr (kHalf == 4 && kLanes > 4) other = hn::SwapAdjacentBlocks(v);
  if constexpr (kHalf == 8 && kLanes > 8) other = hn::ConcatLowerUpper(d, v, v);
#endif
  return hn::MulAdd(v, sign, other);
#endif
}

// All butterflies of H_run between lanes of a vector.
HWY_INLINE VF lane_butterflies(VF v, int64_t run) {
  if constexpr (kLanes > 1) {
    if (run > 1) v = lane_butterfly<1>(v);
    if (run > 2) v = lane_butterfly<2>(v);
  }
  if constexpr (kLanes > 4)
    if (run > 4) v = lane_butterfly<4>(v);
  if constexpr (kLanes > 8)
    if (run > 8) v = lane_butterfly<8>(v);
  return v;
}

// H_kCount across kCount vectors, lane by lane.
template <int64_t kCount>
HWY_INLINE void vector_butterflies(VF* v) {
  WEFT_UNROLL for (int64_t half = 1; half < kCount; half *= 2) {
    WEFT_UNROLL for (int64_t i = 0; i < kCount; ++i) {
      if (i & half) continue;
      const VF low = v[i], high = v[i + half];
      v[i] = hn::Add(low, high);
      v[i + half] = hn::Sub(low, high);
    }
  }
}

// FWHT pass over kCount neighbouring vectors at `from`, into x: multiplies by signs (unless null), then does the butterflies inside
// and between the vectors.
template <int64_t kCount>
HWY_INLINE void near_pass(const float* from, float* x, const float* signs, int64_t run) {
  const F32 d;
  VF v[kCount];
  WEFT_UNROLL for (int64_t i = 0; i < kCount; ++i) v[i] = hn::LoadU(d, from + i * kLanes);
  if (signs) WEFT_UNROLL for (int64_t i = 0; i < kCount; ++i) v[i] = hn::Mul(v[i], hn::Load(d, signs + i * kLanes));
  WEFT_UNROLL for (int64_t i = 0; i < kCount; ++i) v[i] = lane_butterflies(v[i], run);
  vector_butterflies<kCount>(v);
  WEFT_UNROLL for (int64_t i = 0; i < kCount; ++i) hn::StoreU(v[i], d, x + i * kLanes);
}

// FWHT pass between kCount points that are `apart` floats from each other, for all offsets in [0, apart).
template <int64_t kCount>
HWY_INLINE void far_pass(float* x, int64_t apart) {
  const F32 d;
  for (int64_t o = 0; o < apart; o += kLanes) {
    VF v[kCount];
    WEFT_UNROLL for (int64_t i = 0; i < kCount; ++i) v[i] = hn::LoadU(d, x + o + i * apart);
    vector_butterflies<kCount>(v);
    WEFT_UNROLL for (int64_t i = 0; i < kCount; ++i) hn::StoreU(v[i], d, x + o + i * apart);
  }
}

// x = H_run times every run of `run` floats at `from`, multiplied by signs first (unless null). `from` may be x; both are padded to
// whole vectors.
HWY_INLINE void sylvester(const float* from, float* x, const float* signs, int64_t D, int64_t run) {
  const int64_t vectors = run / kLanes;
  const auto near = [&](auto count, int64_t inner) {
    constexpr int64_t kCount = decltype(count)::value;
    for (int64_t i = 0; i < D; i += kCount * kLanes) near_pass<kCount>(from + i, x + i, signs ? signs + i : nullptr, inner);
  };
  switch (vectors) {
    case 0:
    case 1: return near(std::integral_constant<int64_t, 1>(), run);
    case 2: return near(std::integral_constant<int64_t, 2>(), kLanes);
    case 4: return near(std::integral_constant<int64_t, 4>(), kLanes);
    case kPassVectors:
      if constexpr (kFirstVectors != kPassVectors) return near(std::integral_constant<int64_t, kPassVectors>(), kLanes);
      [[fallthrough]];
    default: near(std::integral_constant<int64_t, kFirstVectors>(), kLanes);
  }
  for (int64_t apart = kFirstVectors * kLanes; apart < run;) {
    const int64_t left = run / apart, count = std::min<int64_t>(left, kPassVectors);
    for (int64_t i = 0; i < D; i += apart * count) {
      if (count == 2) far_pass<2>(x + i, apart);
      if (count == 4) far_pass<4>(x + i, apart);
      if (count == 8) far_pass<8>(x + i, apart);
    }
    apart *= count;
  }
}

// A vector that repeats a run shorter than itself.
HWY_INLINE VF repeat_run(const float* x, [[maybe_unused]] int64_t run) {
  const F32 d;
#if HWY_TARGET != HWY_SCALAR
  if (run == 2) {
    uint64_t both;
    std::memcpy(&both, x, sizeof(both));
    return hn::BitCast(d, hn::Set(hn::Repartition<uint64_t, F32>(), both));
  }
  if (run == 4) return hn::LoadDup128(d, x);
#if HWY_MAX_BYTES >= 64
  if (run == 8) {
    const hn::Half<F32> dh;
    const auto half = hn::LoadU(dh, x);
    return hn::Combine(d, half, half);
  }
#endif
#endif
  return hn::Set(d, x[0]);
}

// H_base between the runs of a group: out[j] = sum_i +-x[i run + j % run], signs from plan.mix. Writes whole vectors.
HWY_INLINE void mix_runs(const RotatePlan& plan, const float* x, float* HWY_RESTRICT out) {
  const F32 d;
  const hn::RebindToUnsigned<F32> du;
  const int64_t run = plan.run, base = plan.base;
  const bool narrow = run < kLanes;
  // Short runs are repeated to whole vectors, so that every output vector is a sum of input vectors.
  HWY_ALIGN float repeated[kMaxHadamardBase * kLanes];
  for (int64_t i = 0; narrow && i < base; ++i) hn::Store(repeat_run(x + i * run, run), d, repeated + i * kLanes);
  const int64_t step = narrow ? kLanes : run;
  const auto top = hn::Set(du, 0x80000000u);
  for (int64_t j = 0; j < base * run; j += kLanes) {
    const float* from = narrow ? repeated : x + j % run;
    auto bits = hn::Load(du, plan.mix + j);
    VF even = hn::Zero(d), odd = hn::Zero(d);
    for (int64_t i = 0; i < base; i += 2) {  // base is even
      even = hn::Add(even, hn::Xor(hn::LoadU(d, from + i * step), hn::BitCast(d, hn::And(bits, top))));
      bits = hn::Add(bits, bits);
      odd = hn::Add(odd, hn::Xor(hn::LoadU(d, from + (i + 1) * step), hn::BitCast(d, hn::And(bits, top))));
      bits = hn::Add(bits, bits);
    }
    hn::StoreU(hn::Add(even, odd), d, out + j);
  }
}

// x = R from, or R^T from in the inverse. `from` may be x. Both have padded_dim(D) floats.
HWY_INLINE void rotate_srht(const RotatePlan& plan, const float* from, float* x) {
  const F32 d;
  const int64_t D = plan.D, group = plan.base * plan.run;
  sylvester(from, x, plan.inverse ? nullptr : plan.signs, D, plan.run);
  if (plan.base > 1) {
    HWY_ALIGN float mixed[kPaddedHeadDim];
    for (int64_t first = 0; first < D; first += group) mix_runs(plan, x + first, mixed + first);
    for (int64_t j = 0; j < D; j += kLanes) hn::StoreU(hn::Load(d, mixed + j), d, x + j);
  }
  if (plan.inverse)
    for (int64_t j = 0; j < D; j += kLanes) hn::StoreU(hn::Mul(hn::LoadU(d, x + j), hn::Load(d, plan.signs + j)), d, x + j);
}

// Vectors of at most 8 lanes: D is a multiple of 8, and nothing may be read past the end of a row of the matrix.
HWY_INLINE void rotate_dense(const RotatePlan& plan, float* x) {
  const hn::CappedTag<float, 8> d;
  using V = hn::Vec<decltype(d)>;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr int64_t kSums = 8;  // independent sums of few terms each keep rounding small on narrow vectors, too
  HWY_ALIGN float y[kPaddedHeadDim];
  if (plan.inverse) {  // y = sum_i x_i row_i
    for (int64_t j = 0; j < plan.D; j += lanes) {
      V sum[kSums];
      WEFT_UNROLL for (int64_t s = 0; s < kSums; ++s) sum[s] = hn::Zero(d);
      for (int64_t i = 0; i < plan.D; i += kSums)
        WEFT_UNROLL for (int64_t s = 0; s < kSums; ++s) sum[s] =
            hn::MulAdd(hn::Set(d, x[i + s]), hn::LoadU(d, plan.dense + (i + s) * plan.dense_row + j), sum[s]);
      WEFT_UNROLL for (int64_t half = kSums / 2; half > 0; half /= 2) WEFT_UNROLL for (int64_t s = 0; s < half; ++s) sum[s] =
          hn::Add(sum[s], sum[s + half]);
      hn::Store(sum[0], d, y + j);
    }
  } else {  // y_i = row_i . x
    for (int64_t i = 0; i < plan.D; ++i) {
      const float* row = plan.dense + i * plan.dense_row;
      V sum[kSums];
      WEFT_UNROLL for (int64_t s = 0; s < kSums; ++s) sum[s] = hn::Zero(d);
      for (int64_t j = 0; j < plan.D; j += kSums * lanes)
        WEFT_UNROLL for (int64_t s = 0; s < kSums; ++s) if (j + s * lanes < plan.D) sum[s] =
            hn::MulAdd(hn::LoadU(d, row + j + s * lanes), hn::Load(d, x + j + s * lanes), sum[s]);
      WEFT_UNROLL for (int64_t half = kSums / 2; half > 0; half /= 2) WEFT_UNROLL for (int64_t s = 0; s < half; ++s) sum[s] =
          hn::Add(sum[s], sum[s + half]);
      y[i] = hn::GetLane(hn::SumOfLanes(d, sum[0]));
    }
  }
  std::copy_n(y, plan.D, x);
}

// x <- R x or R^T x. x must be aligned as HWY_ALIGN and have padded_dim(D) floats. Floats past D may change.
inline void rotate_row(const RotatePlan& plan, float* x) {
  if (plan.rotation == Rotation::srht) rotate_srht(plan, x, x);
  if (plan.rotation == Rotation::dense) rotate_dense(plan, x);
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
