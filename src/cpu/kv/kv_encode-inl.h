// Row-by-row encoding: load, rotate, normalise, search the codes, compute the gain, store.
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_KV_ENCODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_KV_ENCODE_INL_H_
#undef WEFT_CPU_KV_ENCODE_INL_H_
#else
#define WEFT_CPU_KV_ENCODE_INL_H_
#endif

#include <hwy/cache_control.h>

#include <cmath>
#include <limits>
#include <utility>

#include "cpu/kv/kv_search-inl.h"
#include "cpu/kv/kv_store-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

// The sums that determine a gain: |y|^2, |c|^2 and <y, c>, where c are the levels of the codes.
struct GroupSums {
  float yy = 0, cc = 0, yc = 0;
};

// |y|^2 as one partial sum per lane. Four independent sums of few terms each keep rounding far below the 1e-6 within which a code
// may differ from the reference's, on narrow vectors, too.
HWY_INLINE VF sum_squares(const float* y, int64_t count) {
  const F32 d;
  constexpr int64_t kSums = 4;
  VF sum[kSums];
  WEFT_UNROLL for (int64_t s = 0; s < kSums; ++s) sum[s] = hn::Zero(d);
  int64_t j = 0;
  for (; j + kSums * kLanes <= count; j += kSums * kLanes) WEFT_UNROLL for (int64_t s = 0; s < kSums; ++s) {
      const VF v = hn::Load(d, y + j + s * kLanes);
      sum[s] = hn::MulAdd(v, v, sum[s]);
    }
  for (; j < count; j += kLanes) {
    const VF v = hn::Load(d, y + j);
    sum[0] = hn::MulAdd(v, v, sum[0]);
  }
  return hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]));
}

// Stores four vectors of codes as bytes, in order.
HWY_INLINE void store_codes4(const VI* code, uint8_t* codes) {
#if HWY_TARGET == HWY_SCALAR
  for (int64_t i = 0; i < 4; ++i) codes[i] = static_cast<uint8_t>(hn::GetLane(code[i]));
#else
  const I32 di;
  const hn::Repartition<uint8_t, I32> d8;
  constexpr int64_t kBlocks = kLanes / 4;
#if HWY_TARGET == HWY_AVX2  // as below in fewer instructions
  VI blocks{_mm256_packus_epi16(_mm256_packs_epi32(code[0].raw, code[1].raw), _mm256_packs_epi32(code[2].raw, code[3].raw))};
#else
  alignas(16) static constexpr uint8_t kTranspose[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  // Byte i of a lane comes from vector i. Each 128-bit block is transposed to 4 lanes of each vector; then the lanes of each vector
  // are brought together.
  const VI all = hn::Or(hn::Or(code[0], hn::ShiftLeft<8>(code[1])), hn::Or(hn::ShiftLeft<16>(code[2]), hn::ShiftLeft<24>(code[3])));
  VI blocks = hn::BitCast(di, hn::TableLookupBytes(hn::BitCast(d8, all), hn::LoadDup128(d8, kTranspose)));
#endif
  if constexpr (kBlocks > 1) {
    HWY_ALIGN int32_t order[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) order[i] = static_cast<int32_t>(i % kBlocks * 4 + i / kBlocks);
    blocks = hn::TableLookupLanes(blocks, hn::SetTableIndices(di, order));
  }
  hn::StoreU(hn::BitCast(d8, blocks), d8, codes);
#endif
}

// Codes of a group of g coordinates with z = y * inverse, and |c|^2 and <y, c> as one partial sum per lane. y must be aligned, and
// zero from g to the end of the last vector. codes may be written up to there, too.
template <class Levels>
HWY_INLINE void quantise_group(const EncodePlan& plan, const Levels& levels, const float* y, int64_t g, float inverse,
                               uint8_t* codes, VF& sum_cc, VF& sum_yc) {
  const F32 d;
  const hn::Rebind<uint8_t, F32> d8;
  const VF factor = hn::Set(d, inverse);
  const bool rms = plan.side.format->gain_rule == GainRule::rms;  // needs no sums over levels
  VF cc = hn::Zero(d), yc = hn::Zero(d);
  int64_t j = 0;
#if HWY_TARGET == HWY_AVX3_DL
  if constexpr (kOnGrid<Levels>) {
    if (inverse > 0)  // implies that y is finite
      for (; j < g; j += kGridVector) {
        const __m512i found = levels.find(y + j, hn::Set(d, inverse * levels.unit));
        store_grid_codes(found, codes + j);
        yc = hn::Add(yc, levels.products(y + j, found));
        if (!rms) cc = levels.add_squares(found, cc);
      }
  }
#endif
  for (; j + 4 * kLanes <= g; j += 4 * kLanes) {
    VI code[4];
    WEFT_UNROLL for (int64_t i = 0; i < 4; ++i) code[i] =
        search_codes(plan, levels, hn::Mul(hn::Load(d, y + j + i * kLanes), factor));
    store_codes4(code, codes + j);
    if (rms) continue;
    WEFT_UNROLL for (int64_t i = 0; i < 4; ++i) {
      const VF c = levels.of(code[i]);
      cc = hn::MulAdd(c, c, cc);
      yc = hn::MulAdd(hn::Load(d, y + j + i * kLanes), c, yc);
    }
  }
  for (; j < g; j += kLanes) {
    const VF v = hn::Load(d, y + j);
    const VI code = search_codes(plan, levels, hn::Mul(v, factor));
    hn::StoreU(hn::U8FromU32(hn::BitCast(hn::RebindToUnsigned<F32>(), code)), d8, codes + j);
    if (rms) continue;
    VF c = levels.of(code);
    if (j + kLanes > g) c = hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(g - j)), c);
    cc = hn::MulAdd(c, c, cc);
    yc = hn::MulAdd(v, c, yc);
  }
  sum_cc = cc;
  sum_yc = yc;
}

HWY_INLINE float gain_by_rule(GainRule rule, const GroupSums& sums, int64_t g, bool tiny) {
  if (!std::isfinite(sums.yy)) return std::numeric_limits<float>::quiet_NaN();
  switch (rule) {
    case GainRule::rms: break;
    case GainRule::matched:
      if (sums.cc > 0) return std::sqrt(sums.yy / sums.cc);
      break;
    case GainRule::least_squares: return !tiny && sums.cc > 0 ? sums.yc / sums.cc : 0;
    case GainRule::unbiased: return !tiny && sums.yc > 0 ? sums.yy / sums.yc : 0;
  }
  return std::sqrt(sums.yy / static_cast<float>(g));
}

HWY_INLINE double largest_finite(DType dtype) {
  return dtype == DType::f16 ? 65504 : dtype == DType::bf16 ? 0x1.FEp127 : std::numeric_limits<float>::max();
}

// Stores the gain of a group that is `scale` times the group of the sums.
HWY_INLINE void store_gain(const EncodePlan& plan, const GroupSums& sums, bool tiny, double scale, uint8_t* gain) {
  const KvFormat& format = *plan.side.format;
  double value = static_cast<double>(gain_by_rule(format.gain_rule, sums, format.gain_group, tiny)) * scale;
  if (format.gain_units == GainUnits::unit_vector) value *= static_cast<double>(plan.root);
  const double limit = largest_finite(format.gain_dtype);
  value = value > limit ? limit : value < -limit ? -limit : value;  // NaN stays
  store_one(format.gain_dtype, gain, 0, static_cast<float>(value));
}

HWY_INLINE bool is_tiny(const EncodePlan& plan, float norm, double scale) {
  return static_cast<double>(norm) * scale <= static_cast<double>(plan.side.format->tiny_norm);
}

// Squares overflow or underflow f32 long before the values do. Where |y|^2 is outside of these bounds, the group is first scaled
// near 1 by a power of two, which is exact. Under every gain rule the gain scales by the same power.
constexpr float kLeastSquares = 1e-25f, kMostSquares = 1e30f;
HWY_INLINE bool squares_in_range(float yy) { return yy > kLeastSquares && yy < kMostSquares; }

// Encodes one group, in range or not. y is the group times 2^-exponent, aligned and padded with zeros. Returns false if y has
// overflowed, which can happen at exponent 0 only.
template <class Levels>
HWY_INLINE bool encode_group(const EncodePlan& plan, const Levels& levels, float* y, int exponent, uint8_t* codes, uint8_t* gain) {
  const F32 d;
  const int64_t g = plan.side.format->gain_group;
  GroupSums sums;
  sums.yy = hn::GetLane(hn::SumOfLanes(d, sum_squares(y, g)));
  if (!squares_in_range(sums.yy)) {
    float most = 0;
    bool finite = true;
    for (int64_t j = 0; j < g; ++j) {
      most = std::max(most, std::fabs(y[j]));
      finite &= std::isfinite(y[j]);
    }
    if (!finite && exponent == 0) return false;
    if (finite && most > 0) {
      const int up = std::ilogb(most);
      for (int64_t j = 0; j < g; ++j) y[j] = std::ldexp(y[j], -up);
      exponent += up;
      sums.yy = hn::GetLane(hn::SumOfLanes(d, sum_squares(y, g)));
    }
  }
  const double scale = std::ldexp(1.0, exponent);
  const float norm = std::sqrt(sums.yy);
  const bool tiny = is_tiny(plan, norm, scale);
  VF cc, yc;
  quantise_group(plan, levels, y, g, tiny ? 0 : plan.root / norm, codes, cc, yc);
  sums.cc = hn::GetLane(hn::SumOfLanes(d, cc));
  sums.yc = hn::GetLane(hn::SumOfLanes(d, yc));
  store_gain(plan, sums, tiny, scale, gain);
  return true;
}

// An input row and the cache row it goes to.
struct EncodeRow {
  int64_t x = 0;  // first element in the input
  int64_t head = 0;
  KvLocation to;
};

// y = factor R (x - mean), zero past D.
inline HWY_NOINLINE void load_rotated(const EncodePlan& plan, const EncodeRow& row, float factor, float* y) {
  const int64_t D = plan.side.D;
  unpack_row(plan.x.dtype, plan.x.data, row.x, D, y);
  if (const float* mean = plan.mean.of(row.head))
    for (int64_t j = 0; j < D; ++j) y[j] = y[j] * factor - mean[j] * factor;
  else if (factor != 1)
    for (int64_t j = 0; j < D; ++j) y[j] *= factor;
  rotate_row(plan.rotate, y);
  fill_row(y + D, padded_dim(D) - D, 0);
}

// Rows whose rotation overflows f32 are encoded as 2^-kDownExponent times the row.
constexpr int kDownExponent = 64;

// Encodes a row of any format. y holds the rotated row.
template <class Levels>
void encode_row(const EncodePlan& plan, const Levels& levels, const EncodeRow& row, float* y, uint8_t* codes, uint8_t* gains) {
  const int64_t g = plan.side.format->gain_group, gain_bytes = dtype_bytes(plan.side.format->gain_dtype);
  const bool apart = plan.side.groups > 1 && g % kLanes != 0;  // in place, vectors would reach into the next group
  HWY_ALIGN float group[kPaddedHeadDim];
  uint8_t group_codes[kPaddedHeadDim];
  bool whole = true;
  const auto encode_groups = [&](int exponent) {
    for (int64_t i = 0; whole && i < plan.side.groups; ++i) {
      float* from = y + i * g;
      if (apart) {
        std::copy_n(from, g, group);
        fill_row(group + g, padded_dim(g) - g, 0);
      }
      whole =
          encode_group(plan, levels, apart ? group : from, exponent, apart ? group_codes : codes + i * g, gains + i * gain_bytes);
      if (apart) std::copy_n(group_codes, g, codes + i * g);
    }
  };
  encode_groups(0);
  if (whole) return;
  whole = true;
  load_rotated(plan, row, std::ldexp(1.0f, -kDownExponent), y);
  encode_groups(kDownExponent);
}

// Rows whose encoding is interleaved: each is one long chain of dependent instructions.
constexpr int64_t kRowBatch = 4;

template <class Levels>
HWY_NOINLINE void encode_batch(const EncodePlan& plan, const Levels& levels, const EncodeRow* rows, int64_t count,
                               CodeWriter& writer) {
  const SideView& side = plan.side;
  const int64_t D = side.D;
  HWY_ALIGN float y[kRowBatch * kPaddedHeadDim];
  HWY_ALIGN uint8_t codes[kRowBatch * kCodeStride];
  const auto gains = [&](int64_t r) { return side.gains_at(rows[r].to.block, rows[r].head, rows[r].to.row); };
  for (int64_t r = 0; r < count; ++r) load_rotated(plan, rows[r], 1, y + r * kPaddedHeadDim);
  if (side.groups == 1) {
    VF yy[kRowBatch], cc[kRowBatch], yc[kRowBatch];
    HWY_ALIGN float sum_yy[kRowBatch], sum_cc[kRowBatch], sum_yc[kRowBatch];
    float norm[kRowBatch];
    WEFT_UNROLL for (int64_t r = 0; r < kRowBatch; ++r) yy[r] = cc[r] = yc[r] = hn::Zero(F32());
    for (int64_t r = 0; r < count; ++r) yy[r] = sum_squares(y + r * kPaddedHeadDim, D);
    sum_lanes4(yy, sum_yy);
    WEFT_UNROLL for (int64_t r = 0; r < kRowBatch; ++r) norm[r] = std::sqrt(sum_yy[r]);
    for (int64_t r = 0; r < count; ++r)
      if (squares_in_range(sum_yy[r]))
        quantise_group(plan, levels, y + r * kPaddedHeadDim, D, is_tiny(plan, norm[r], 1) ? 0 : plan.root / norm[r],
                       codes + r * kCodeStride, cc[r], yc[r]);
    sum_lanes4(cc, sum_cc);
    sum_lanes4(yc, sum_yc);
    for (int64_t r = 0; r < count; ++r) {
      if (squares_in_range(sum_yy[r]))
        store_gain(plan, {sum_yy[r], sum_cc[r], sum_yc[r]}, is_tiny(plan, norm[r], 1), 1, gains(r));
      else
        encode_row(plan, levels, rows[r], y + r * kPaddedHeadDim, codes + r * kCodeStride, gains(r));
    }
  } else {
    for (int64_t r = 0; r < count; ++r)
      encode_row(plan, levels, rows[r], y + r * kPaddedHeadDim, codes + r * kCodeStride, gains(r));
  }
  for (int64_t r = 0; r < count; ++r) writer.put(rows[r].to.block, rows[r].head, rows[r].to.row, codes + r * kCodeStride);
}

// Stores a row of an uncompressed side, converted to the side's dtype.
HWY_INLINE void store_passthrough(const EncodePlan& plan, const EncodeRow& row) {
  const SideView& side = plan.side;
  const DType dtype = *side.format->passthrough;
  uint8_t* to = side.codes_at(row.to.block, row.head, row.to.row);
  if (dtype == plan.x.dtype) {
    std::memcpy(to, static_cast<const uint8_t*>(plan.x.data) + row.x * dtype_bytes(dtype),
                static_cast<size_t>(side.row_code_bytes));
    return;
  }
  HWY_ALIGN float values[kPaddedHeadDim];
  unpack_row(plan.x.dtype, plan.x.data, row.x, side.D, values);
  pack_row(values, side.D, dtype, to, 0);
}

// Rows of one head are a token's stride apart, too far for the hardware prefetcher.
constexpr int64_t kAhead = 2 * kRowBatch, kCacheLine = 64;
HWY_INLINE void prefetch_row(const EncodePlan& plan, int64_t t, int64_t head) {
  const int64_t element = dtype_bytes(plan.x.dtype), bytes = plan.side.D * element;
  const uint8_t* row = static_cast<const uint8_t*>(plan.x.data) + plan.x.at(t, head) * element;
  for (int64_t i = 0; i < bytes; i += kCacheLine) hwy::Prefetch(row + i);
}

// Calls use(rows, count) with up to kRowBatch rows at a time: all tokens of a head in order, then those of the next head. Inert
// tokens are left out.
template <class Use>
HWY_INLINE void for_each_batch(const EncodePlan& plan, const TokenLocations& tokens, int64_t first_head, int64_t last_head,
                               Use&& use) {
  EncodeRow rows[kRowBatch];
  int64_t count = 0;
  for (int64_t head = first_head; head < last_head; ++head)
    for (int64_t i = 0; i < tokens.count; ++i) {
      if (i + kAhead < tokens.count) prefetch_row(plan, tokens.first + i + kAhead, head);
      if (!tokens.at[i].exists()) continue;
      rows[count++] = {plan.x.at(tokens.first + i, head), head, tokens.at[i]};
      if (count == kRowBatch) use(rows, std::exchange(count, 0));
    }
  if (count > 0) use(rows, count);
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
