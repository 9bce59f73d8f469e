// Encoding rows: load, rotate, normalise, search the codes, find the gain, store.
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_KV_ENCODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_KV_ENCODE_INL_H_
#undef WEFT_CPU_KV_ENCODE_INL_H_
#else
#define WEFT_CPU_KV_ENCODE_INL_H_
#endif

#include <cmath>
#include <limits>

#include "cpu/kv_plans.h"
#include "cpu/kv_store-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

// Nodes of depth kDepth: entry e of the tree, 2^kDepth <= e < 2^(kDepth + 1).
template <int kDepth>
HWY_INLINE VF tree_nodes(const float* tree, VI e) {
  const F32 d;
  constexpr int64_t kNodes = int64_t{1} << kDepth, kTables = kNodes < kLanes ? 1 : kNodes / kLanes;
  if constexpr (WEFT_EMULATED || kTables > kMaxTables) {
    return hn::GatherIndex(d, tree, e);
  } else {
    VF table[kTables];
    WEFT_UNROLL for (int64_t i = 0; i < kTables; ++i) table[i] = hn::Load(d, tree + (kNodes < kLanes ? 0 : kNodes) + i * kLanes);
    return lookup<static_cast<int>(kTables)>(table, e);
  }
}

// 2^kBits + code: the number of boundaries below z. A NaN is above none.
template <int kBits, int kDepth = 1>
HWY_INLINE VI walk_tree(const float* tree, VF z, VI e) {
  if constexpr (kDepth == kBits) {
    return e;
  } else {
    const I32 di;
    const auto above = hn::RebindMask(di, hn::Gt(z, tree_nodes<kDepth>(tree, e)));
    return walk_tree<kBits, kDepth + 1>(tree, z, hn::Sub(hn::Add(e, e), hn::VecFromMask(di, above)));
  }
}
template <int kBits>
HWY_INLINE VI search_codes(const float* tree, VF z) {
  const I32 di;
  const auto above = hn::RebindMask(di, hn::Gt(z, hn::Set(F32(), tree[1])));
  const VI e = hn::Sub(hn::Set(di, 2), hn::VecFromMask(di, above));
  return hn::Sub(walk_tree<kBits>(tree, z, e), hn::Set(di, 1 << kBits));
}

// What a gain follows from: |y|^2, |c|^2 and <y, c>.
struct GroupSums {
  float yy = 0, cc = 0, yc = 0;
};

// Four sums, each of few terms: rounding stays far below the 1e-6 by which codes may differ, on narrow vectors, too.
HWY_INLINE float sum_squares(const float* y, int64_t count) {
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
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]))));
}

// Codes of a group of g coordinates, z = y * inverse, and what its gain needs. y is aligned and zero from g on to a whole vector;
// codes may be written as far.
template <class Levels>
HWY_INLINE void quantise_group(const EncodePlan& plan, const Levels& levels, const float* y, int64_t g, float inverse,
                               uint8_t* codes, GroupSums& sums) {
  const F32 d;
  const hn::Rebind<uint8_t, F32> d8;
  const VF factor = hn::Set(d, inverse);
  const bool rms = plan.side.format->gain_rule == GainRule::rms;
  VF cc = hn::Zero(d), yc = hn::Zero(d);
  for (int64_t j = 0; j < g; j += kLanes) {
    const VF v = hn::Load(d, y + j);
    const VI code = search_codes<Levels::kBits>(plan.tree, hn::Mul(v, factor));
    hn::StoreU(hn::DemoteTo(d8, code), d8, codes + j);
    if (rms) continue;
    VF c = levels.of(code);
    if (j + kLanes > g) c = hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(g - j)), c);
    cc = hn::MulAdd(c, c, cc);
    yc = hn::MulAdd(v, c, yc);
  }
  sums.cc = hn::GetLane(hn::SumOfLanes(d, cc));
  sums.yc = hn::GetLane(hn::SumOfLanes(d, yc));
}

HWY_INLINE double gain_by_rule(GainRule rule, const GroupSums& sums, int64_t g, bool tiny) {
  const double yy = sums.yy, cc = sums.cc, yc = sums.yc;
  if (!std::isfinite(yy)) return std::numeric_limits<double>::quiet_NaN();
  switch (rule) {
    case GainRule::rms: break;
    case GainRule::matched:
      if (cc > 0) return std::sqrt(yy / cc);
      break;
    case GainRule::least_squares: return !tiny && cc > 0 ? yc / cc : 0;
    case GainRule::unbiased: return !tiny && yc > 0 ? yy / yc : 0;
  }
  return std::sqrt(yy / static_cast<double>(g));
}

HWY_INLINE double largest_finite(DType dtype) {
  return dtype == DType::f16 ? 65504 : dtype == DType::bf16 ? 0x1.FEp127 : std::numeric_limits<float>::max();
}

// Squares of f32 numbers leave its range long before the numbers do. Outside of these bounds a group is brought near 1 first, by a
// power of two, which is exact; all gain rules follow by the same power.
constexpr float kLeastSquares = 1e-25f, kMostSquares = 1e30f;

// y, aligned and padded with zeros, is 2^-exponent of the group. False: y has overflowed.
template <class Levels>
HWY_INLINE bool encode_group(const EncodePlan& plan, const Levels& levels, float* y, int exponent, uint8_t* codes, uint8_t* gain) {
  const KvFormat& format = *plan.side.format;
  const int64_t g = format.gain_group;
  GroupSums sums;
  sums.yy = sum_squares(y, g);
  if (!(sums.yy > kLeastSquares && sums.yy < kMostSquares)) {
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
      sums.yy = sum_squares(y, g);
    }
  }
  const double scale = std::ldexp(1.0, exponent);
  const bool tiny = std::sqrt(static_cast<double>(sums.yy)) * scale <= static_cast<double>(format.tiny_norm);
  quantise_group(plan, levels, y, g, tiny ? 0 : plan.root / std::sqrt(sums.yy), codes, sums);
  double value = gain_by_rule(format.gain_rule, sums, g, tiny) * scale;
  if (format.gain_units == GainUnits::unit_vector) value *= static_cast<double>(plan.root);
  const double limit = largest_finite(format.gain_dtype);
  value = value > limit ? limit : value < -limit ? -limit : value;  // NaN passes
  store_one(format.gain_dtype, gain, 0, static_cast<float>(value));
  return true;
}

// Rows whose rotation overflows f32 are encoded as 2^-kDown of themselves.
constexpr int kDown = 64;
constexpr float kDownFactor = 0x1p-64f;

// The row of token t: codes (a byte each) and gains.
template <class Levels>
HWY_INLINE void encode_row(const EncodePlan& plan, const Levels& levels, int64_t t, int64_t head, uint8_t* codes, uint8_t* gains) {
  const int64_t D = plan.side.D, g = plan.side.format->gain_group, padded = padded_dim(D);
  const int64_t gain_bytes = dtype_bytes(plan.side.format->gain_dtype);
  HWY_ALIGN float y[kPaddedHeadDim], group[kPaddedHeadDim];
  for (int down : {0, kDown}) {
    unpack_row(plan.x.dtype, plan.x.data, plan.x.at(t, head), D, y);
    const float factor = down > 0 ? kDownFactor : 1.0f;
    if (const float* mean = plan.mean.of(head))
      for (int64_t j = 0; j < D; ++j) y[j] = y[j] * factor - mean[j] * factor;
    else if (down > 0)
      for (int64_t j = 0; j < D; ++j) y[j] *= factor;
    rotate_row(plan.rotate, y);
    fill_row(y + D, padded - D, 0);
    bool whole = true;
    for (int64_t i = 0; whole && i < plan.side.groups; ++i) {
      float* from = y + i * g;
      uint8_t group_codes[kPaddedHeadDim];
      const bool apart = plan.side.groups > 1 && g % kLanes != 0;
      if (apart) {
        std::copy_n(from, g, group);
        fill_row(group + g, padded_dim(g) - g, 0);
      }
      whole = encode_group(plan, levels, apart ? group : from, down, apart ? group_codes : codes + i * g, gains + i * gain_bytes);
      if (apart) std::copy_n(group_codes, g, codes + i * g);
    }
    if (whole) return;
  }
}

// Tokens of one sequence and head, in order.
void encode_tokens(const EncodePlan& plan, const TokenPlaces& tokens, int64_t head) {
  const SideView& side = plan.side;
  if (side.passthrough()) {
    HWY_ALIGN float row[kPaddedHeadDim];
    const DType dtype = *side.format->passthrough;
    for (int64_t i = 0; i < tokens.count; ++i) {
      const KvLocation& to = tokens.at[i];
      if (!to.exists()) continue;
      const int64_t from = plan.x.at(tokens.first + i, head);
      uint8_t* bytes = side.codes_at(to.block, head, to.row);
      if (dtype == plan.x.dtype) {  // bit by bit
        std::memcpy(bytes, static_cast<const uint8_t*>(plan.x.data) + from * dtype_bytes(dtype),
                    static_cast<size_t>(side.row_code_bytes));
      } else {
        unpack_row(plan.x.dtype, plan.x.data, from, side.D, row);
        pack_row(row, side.D, dtype, bytes, 0);
      }
    }
    return;
  }
  with_levels(side, [&](const auto& levels) {
    CodeWriter writer(side);
    for (int64_t i = 0; i < tokens.count; ++i) {
      const KvLocation& to = tokens.at[i];
      if (!to.exists()) continue;
      uint8_t* codes = writer.next(to.block, head, to.row);
      encode_row(plan, levels, tokens.first + i, head, codes, side.gains_at(to.block, head, to.row));
      writer.put(to.block, head, to.row);
    }
    writer.finish();
  });
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
