// Codes of numbers: search trees, arithmetic, or a guess and one comparison, whichever is quickest for a codebook.
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

// Codes of z, the number of boundaries below it: a walk down the tree, which ends at 2^bits + code. A NaN is above no boundary.
template <int kBits, int kDepth = 1>
HWY_INLINE VI walk_tree(const float* tree, VF z, VI e) {
  if constexpr (kDepth == kBits)
    return hn::Sub(e, hn::Set(I32(), 1 << kBits));
  else
    return walk_tree<kBits, kDepth + 1>(tree, z, add_mask(hn::Add(e, e), hn::Gt(z, tree_nodes<kDepth>(tree, e))));
}
template <class Levels>
HWY_INLINE VI search_codes(const EncodePlan& plan, const Levels&, VF z) {
  return walk_tree<Levels::kBits>(plan.tree, z, add_mask(hn::Set(I32(), 2), hn::Gt(z, hn::Set(F32(), plan.tree[1]))));
}

// Equidistant levels: a guess that is right or one too low, then the one boundary that tells, computed as its table would be.
template <int kBits>
HWY_INLINE VI search_codes(const EncodePlan& plan, const AffineLevels<kBits>& levels, VF z) {
  const F32 d;
  const VF one = hn::Set(d, 1.0f);
  VF guess = hn::MulAdd(z, hn::Set(d, plan.guess_factor), hn::Set(d, plan.guess_offset));
  guess = hn::Min(hn::Max(guess, hn::Zero(d)), hn::Set(d, static_cast<float>((1 << kBits) - 2)));  // a NaN becomes some code
  const VI code = hn::ConvertTo(I32(), guess);
  const VF low = hn::Add(hn::ConvertTo(d, code), levels.first);
  const VF boundary = hn::Mul(hn::Set(d, 0.5f), hn::Add(hn::Mul(low, levels.step), hn::Mul(hn::Add(low, one), levels.step)));
  return hn::IfThenElseZero(hn::RebindMask(I32(), hn::Eq(z, z)), add_mask(code, hn::Gt(z, boundary)));
}

// z inside [-most, most].
HWY_INLINE VF cut_off(VF z, VF most) {
#if HWY_MAX_BYTES >= 64
  return VF{_mm512_range_ps(z.raw, most.raw, 2)};  // the smaller magnitude, with the sign of z
#else
  return hn::Min(hn::Max(z, hn::Neg(most)), most);
#endif
}

// Levels of one vector whose codes can be guessed: one lookup finds the boundary that tells.
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
    origin = hn::Set(d, 0x1p23f + static_cast<float>(kMiddle - 1));  // in this binade, adding rounds to whole numbers
  }
  // The code in the low 16 bits, for z that is a number.
  HWY_INLINE VI find(VF z) const {
    const VF near = cut_off(z, most);
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

// Levels of two vectors that are the same above and below 0: magnitudes are searched, and fit one vector.
template <int kCodeBits>
struct FoldedLevels : TableLevels<kCodeBits> {
  static constexpr int kHalf = 1 << (kCodeBits - 1);
  VF boundary, size, most, slope, bend, origin;
  HWY_INLINE explicit FoldedLevels(const EncodePlan& plan) : TableLevels<kCodeBits>(plan.side) {
    const F32 d;
    const float* level = plan.side.levels() + kHalf;
    HWY_ALIGN float below[kHalf];
    below[0] = -1;
    for (int i = 1; i < kHalf; ++i) below[i] = 0.5f * (level[i - 1] + level[i]);
    boundary = hn::Load(d, below);
    size = hn::LoadU(d, level);
    most = hn::Set(d, plan.companding.most);
    slope = hn::Set(d, plan.companding.slope);
    bend = hn::Set(d, plan.companding.bend);
    origin = hn::Set(d, 0x1p23f + static_cast<float>(kHalf));
  }
  // kHalf + the place of |z| among the magnitudes, in the low bits, for z that is a number. The guess is right or one too high.
  HWY_INLINE VI find(VF size_of_z) const {
    const VF near = hn::Min(size_of_z, most);
    const VI guess = hn::BitCast(I32(), hn::MulAdd(near, hn::NegMulAdd(bend, near, slope), origin));
    const auto below = hn::Le(size_of_z, hn::TableLookupLanes(boundary, lane_indices(guess)));
    return hn::Add(guess, hn::VecFromMask(I32(), hn::RebindMask(I32(), below)));
  }
  HWY_INLINE VF size_of(VI found) const { return hn::TableLookupLanes(size, lane_indices(found)); }
  // The code, with the sign of z.
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

// Calls use(levels) with what finds and expands the codes of a side quickest.
template <class Use>
HWY_INLINE void with_searched_levels(const EncodePlan& plan, Use&& use) {
  with_levels(plan.side, [&](const auto& levels) {
    constexpr int kBits = std::decay_t<decltype(levels)>::kBits;
#if HWY_TARGET == HWY_AVX3_DL
    if constexpr (kBits == 4)
      if (plan.grid.fits) return plan.grid.far ? use(GridLevels<true>(plan)) : use(GridLevels<false>(plan));
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
