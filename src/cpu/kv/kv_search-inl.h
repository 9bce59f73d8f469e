// Code search: by search tree, arithmetic, or a guess and one comparison, whichever is fastest for a codebook.
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_KV_SEARCH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_KV_SEARCH_INL_H_
#undef WEFT_CPU_KV_SEARCH_INL_H_
#else
#define WEFT_CPU_KV_SEARCH_INL_H_
#endif

#include <limits>
#include <type_traits>

#include "cpu/kv/kv_grid-inl.h"
#include "cpu/kv/kv_plans.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

// Boundaries at nodes e of depth kDepth: 2^kDepth <= e < 2^(kDepth + 1).
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

// x + 1 where `mask`, else x.
template <class Mask>
HWY_INLINE VI add_mask(VI x, Mask mask) {
  const I32 di;
  const auto more = hn::RebindMask(di, mask);
#if HWY_MAX_BYTES >= 64
  return hn::IfThenElse(more, hn::Add(x, hn::Set(di, 1)), x);
#else
  return hn::Sub(x, hn::VecFromMask(di, more));
#endif
}

// The code of z is the number of boundaries below it. The descent of the tree ends at node 2^kBits + code. NaN is above no
// boundary.
template <int kBits, int kDepth = 1>
HWY_INLINE VI descend_tree(const float* tree, VF z, VI e) {
  if constexpr (kDepth == kBits)
    return hn::Sub(e, hn::Set(I32(), 1 << kBits));
  else
    return descend_tree<kBits, kDepth + 1>(tree, z, add_mask(hn::Add(e, e), hn::Gt(z, tree_nodes<kDepth>(tree, e))));
}
template <class Levels>
HWY_INLINE VI search_codes(const EncodePlan& plan, const Levels&, VF z) {
  return descend_tree<Levels::kBits>(plan.tree, z, add_mask(hn::Set(I32(), 2), hn::Gt(z, hn::Set(F32(), plan.tree[1]))));
}

// Equidistant levels: the guess is the code or one less. The boundary that decides is computed exactly as EncodePlan::tree has it.
template <int kBits>
HWY_INLINE VI search_codes(const EncodePlan& plan, const AffineLevels<kBits>& levels, VF z) {
  const F32 d;
  const VF one = hn::Set(d, 1.0f);
  VF guess = hn::MulAdd(z, hn::Set(d, plan.guess_factor), hn::Set(d, plan.guess_offset));
  guess = hn::Min(hn::Max(guess, hn::Zero(d)), hn::Set(d, static_cast<float>((1 << kBits) - 2)));  // NaN becomes any valid code
  const VI code = hn::ConvertTo(I32(), guess);
  const VF low = hn::Add(hn::ConvertTo(d, code), levels.first);
  const VF boundary = hn::Mul(hn::Set(d, 0.5f), hn::Add(hn::Mul(low, levels.step), hn::Mul(hn::Add(low, one), levels.step)));
  return hn::IfThenElseZero(hn::RebindMask(I32(), hn::Eq(z, z)), add_mask(code, hn::Gt(z, boundary)));
}

// z clamped to [-most, most].
HWY_INLINE VF clamp_magnitude(VF z, VF most) {
#if HWY_MAX_BYTES >= 64
  return VF{_mm512_range_ps(z.raw, most.raw, 2)};  // the smaller magnitude, with the sign of z
#else
  return hn::Min(hn::Max(z, hn::Neg(most)), most);
#endif
}

// Levels that fit in one vector and whose codes Companding can guess: one lookup finds the boundary that decides.
template <int kCodeBits>
struct CompandedLevels : TableLevels<kCodeBits> {
  VF boundary, most, slope, bend, origin;
  HWY_INLINE explicit CompandedLevels(const EncodePlan& plan) : TableLevels<kCodeBits>(plan.side) {
    const F32 d;
    constexpr int kCodes = 1 << kCodeBits, kMiddle = kCodes / 2;
    HWY_ALIGN float between[kLanes];
    fill_row(between, kLanes, std::numeric_limits<float>::infinity());
    for (int i = 0; i + 1 < kCodes; ++i) between[i] = 0.5f * (plan.side.levels()[i] + plan.side.levels()[i + 1]);
    boundary = hn::Load(d, between);
    most = hn::Set(d, plan.companding.most);
    slope = hn::Set(d, plan.companding.slope);
    bend = hn::Set(d, plan.companding.bend);
    origin = hn::Set(d, 0x1p23f + static_cast<float>(kMiddle - 1));  // a sum in this binade is rounded to an integer
  }
  // The code of z in the low 16 bits. z must not be NaN.
  HWY_INLINE VI find(VF z) const {
    const VF near = clamp_magnitude(z, most);
    const VF guess = hn::MulAdd(near, hn::NegMulAdd(bend, hn::Abs(near), slope), origin);
    const VI code = hn::BitCast(I32(), guess);
    return add_mask(code, hn::Gt(z, hn::TableLookupLanes(boundary, lane_indices(code))));
  }
};
template <int kBits>
HWY_INLINE VI search_codes(const EncodePlan&, const CompandedLevels<kBits>& levels, VF z) {
  const I32 di;
  const VI code = hn::And(levels.find(z), hn::Set(di, (1 << kBits) - 1));
  return hn::IfThenElseZero(hn::RebindMask(di, hn::Eq(z, z)), code);
}

// Levels that take two vectors and are symmetric about 0: the search is over magnitudes, which fit in one vector.
template <int kCodeBits>
struct FoldedLevels : TableLevels<kCodeBits> {
  static constexpr int kHalf = 1 << (kCodeBits - 1);
  VF boundary, magnitude, most, slope, bend, origin;
  HWY_INLINE explicit FoldedLevels(const EncodePlan& plan) : TableLevels<kCodeBits>(plan.side) {
    const F32 d;
    const float* level = plan.side.levels() + kHalf;
    HWY_ALIGN float below[kHalf];
    below[0] = -1;
    for (int i = 1; i < kHalf; ++i) below[i] = 0.5f * (level[i - 1] + level[i]);
    boundary = hn::Load(d, below);
    magnitude = hn::LoadU(d, level);
    most = hn::Set(d, plan.companding.most);
    slope = hn::Set(d, plan.companding.slope);
    bend = hn::Set(d, plan.companding.bend);
    origin = hn::Set(d, 0x1p23f + static_cast<float>(kHalf));
  }
  // kHalf + the index of |z| among the magnitudes, in the low bits. z must not be NaN. The guess is that index or one more.
  HWY_INLINE VI find(VF abs_z) const {
    const VF near = hn::Min(abs_z, most);
    const VI guess = hn::BitCast(I32(), hn::MulAdd(near, hn::NegMulAdd(bend, near, slope), origin));
    const auto below = hn::Le(abs_z, hn::TableLookupLanes(boundary, lane_indices(guess)));
    return hn::Add(guess, hn::VecFromMask(I32(), hn::RebindMask(I32(), below)));
  }
  HWY_INLINE VF magnitude_of(VI found) const { return hn::TableLookupLanes(magnitude, lane_indices(found)); }
  // The code of z, from find(|z|) and the sign of z.
  HWY_INLINE VI code_of(VI found, VF z) const {
    const VI negative = hn::BitCast(I32(), hn::VecFromMask(F32(), hn::Le(z, hn::Zero(F32()))));
    return hn::And(hn::Xor(found, negative), hn::Set(I32(), (1 << kCodeBits) - 1));
  }
};
template <class Levels>
constexpr bool kIsFolded = std::is_base_of_v<FoldedLevels<Levels::kBits>, Levels>;
template <int kBits>
HWY_INLINE VI search_codes(const EncodePlan&, const FoldedLevels<kBits>& levels, VF z) {
  return hn::IfThenElseZero(hn::RebindMask(I32(), hn::Eq(z, z)), levels.code_of(levels.find(hn::Abs(z)), z));
}

// Calls use(levels) with the fastest way to search and expand the codes of a side.
template <class Use>
HWY_INLINE void with_searched_levels(const EncodePlan& plan, Use&& use) {
  with_levels(plan.side, [&](const auto& levels) {
    constexpr int kBits = std::decay_t<decltype(levels)>::kBits;
#if HWY_TARGET == HWY_AVX3_DL
    if constexpr (kBits == 4)
      if (plan.grid.fits) return plan.grid.needs_clamp ? use(GridLevels<true>(plan)) : use(GridLevels<false>(plan));
#endif
    if constexpr (!WEFT_EMULATED && (1 << kBits) <= kLanes)
      if (plan.companding.fits) return use(CompandedLevels<kBits>(plan));
    if constexpr (HWY_MAX_BYTES >= 32 && kBits <= kCompandedBits && (1 << kBits) == 2 * kLanes)
      if (plan.companding.fits && plan.companding.symmetric) return use(FoldedLevels<kBits>(plan));
    use(levels);
  });
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
