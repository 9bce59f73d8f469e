// Levels of codes: from tables in registers, arithmetic, or loads, whichever is fastest for a codebook.
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_KV_LEVELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_KV_LEVELS_INL_H_
#undef WEFT_CPU_KV_LEVELS_INL_H_
#else
#define WEFT_CPU_KV_LEVELS_INL_H_
#endif

#include "cpu/kv/kv_codes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

using I32 = hn::RebindToSigned<F32>;
using VI = hn::Vec<I32>;

HWY_INLINE VI load_codes(const uint8_t* codes) { return hn::PromoteTo(I32(), hn::LoadU(hn::Rebind<uint8_t, F32>(), codes)); }

// Lane indices from the lowest bits of `index`.
HWY_INLINE auto lane_indices(VI index) {
#if HWY_IS_DEBUG_BUILD || HWY_MAX_BYTES < 32
  index = hn::And(index, hn::Set(I32(), static_cast<int32_t>(kLanes - 1)));
#endif  // else the instruction ignores the other bits
  return hn::IndicesFromVec(F32(), index);
}

// Entry `index` of a table of kTables vectors: the lowest bits select the lane, the bits above it the vector.
template <int kTables>
HWY_INLINE VF lookup(const VF* table, VI index) {
  const F32 d;
  const auto lane = lane_indices(index);
  VF found[kTables];
  WEFT_UNROLL for (int i = 0; i < kTables; ++i) found[i] = hn::TableLookupLanes(table[i], lane);
  WEFT_UNROLL for (int step = 1; step < kTables; step *= 2) {
    const auto upper = hn::RebindMask(d, hn::TestBit(index, hn::Set(I32(), static_cast<int32_t>(kLanes) * step)));
    WEFT_UNROLL for (int i = 0; i < kTables; i += 2 * step) found[i] = hn::IfThenElse(upper, found[i + step], found[i]);
  }
  return found[0];
}
// Tables of more vectors than this are slower than loads.
constexpr int64_t kMaxTables = 4;

// Three sources of the levels of codes of kBits bits. of(code) takes codes in vector lanes, at(codes) takes bytes in memory.
template <int kCodeBits>
struct TableLevels {
  static constexpr int kBits = kCodeBits;
  static constexpr int kTables = (1 << kBits) <= kLanes ? 1 : static_cast<int>((1 << kBits) / kLanes);
  VF table[kTables];
  HWY_INLINE explicit TableLevels(const SideView& side) {
    WEFT_UNROLL for (int i = 0; i < kTables; ++i) table[i] = hn::LoadU(F32(), side.levels() + i * kLanes);
  }
  HWY_INLINE VF of(VI code) const { return lookup<kTables>(table, code); }
  HWY_INLINE VF at(const uint8_t* codes) const { return of(load_codes(codes)); }
};

template <int kCodeBits>
struct AffineLevels {
  static constexpr int kBits = kCodeBits;
  VF first, step;
  HWY_INLINE explicit AffineLevels(const SideView& side)
      : first(hn::Set(F32(), side.affine_first)), step(hn::Set(F32(), side.affine_step)) {}
  HWY_INLINE VF of(VI code) const { return hn::Mul(hn::Add(hn::ConvertTo(F32(), code), first), step); }
  HWY_INLINE VF at(const uint8_t* codes) const { return of(load_codes(codes)); }
};

template <int kCodeBits>
struct LoadedLevels {
  static constexpr int kBits = kCodeBits;
  const float* levels;
  HWY_INLINE explicit LoadedLevels(const SideView& side) : levels(side.levels()) {}
  HWY_INLINE VF of(VI code) const { return hn::GatherIndex(F32(), levels, code); }
  HWY_INLINE VF at(const uint8_t* codes) const {
    HWY_ALIGN float found[kLanes];
    WEFT_UNROLL for (int64_t i = 0; i < kLanes; ++i) found[i] = levels[codes[i]];
    return hn::Load(F32(), found);
  }
};

template <int kBits, class Use>
HWY_INLINE void with_levels_of(const SideView& side, Use&& use) {
  constexpr bool kTables = !WEFT_EMULATED && (1 << kBits) <= kMaxTables * kLanes;
  if constexpr (kTables && (1 << kBits) <= kLanes) {
    use(TableLevels<kBits>(side));
  } else {
    if (side.affine) return use(AffineLevels<kBits>(side));
    if constexpr (kTables)
      use(TableLevels<kBits>(side));
    else
      use(LoadedLevels<kBits>(side));
  }
}

// Calls use(levels) with the fastest source of a side's levels.
template <class Use>
HWY_INLINE void with_levels(const SideView& side, Use&& use) {
  with_bits(side.format->bits, [&](auto bits) { with_levels_of<decltype(bits)::value>(side, use); });
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
