// Decoding of KV cache rows to f32 in the rotated domain, shared by attention and kv_decode.
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_KV_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_KV_ROWS_INL_H_
#undef WEFT_CPU_KV_ROWS_INL_H_
#else
#define WEFT_CPU_KV_ROWS_INL_H_
#endif

#include "cpu/kv/kv_levels-inl.h"
#include "cpu/kv/kv_rotate-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

HWY_INLINE float load_gain(DType dtype, const uint8_t* gains, int64_t i) {
#if !WEFT_EMULATED
  if (dtype == DType::f16) {
    const hn::CappedTag<float, 1> d1;
    const hn::Rebind<hwy::float16_t, decltype(d1)> d16;
    return hn::GetLane(hn::PromoteTo(d1, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(gains) + i)));
  }
#endif
  return load_one(dtype, gains, i);
}

// Expands one cache row: out[j] = gain of j's group * level_at(j), a vector at a time. out is padded with zeros to whole vectors.
template <class LevelAt>
HWY_INLINE void expand_row(const SideView& side, const uint8_t* gains, const LevelAt& level_at, float* HWY_RESTRICT out) {
  const F32 d;
  const DType dtype = side.format->gain_dtype;
  const int64_t D = side.D, padded = padded_dim(D);
  if (side.groups == 1) {
    const VF factor = hn::Set(d, load_gain(dtype, gains, 0) * side.gain_factor);
    for (int64_t j = 0; j < D; j += kLanes) hn::StoreU(hn::Mul(factor, level_at(j)), d, out + j);
  } else {
    const int64_t g = side.format->gain_group;
    HWY_ALIGN float factors[kPaddedHeadDim];
    for (int64_t i = 0; i < side.groups; ++i) fill_row(factors + i * g, g, load_gain(dtype, gains, i) * side.gain_factor);
    fill_row(factors + D, padded - D, 0);
    for (int64_t j = 0; j < D; j += kLanes) hn::StoreU(hn::Mul(hn::Load(d, factors + j), level_at(j)), d, out + j);
  }
  for (int64_t j = D; j < padded; ++j) out[j] = 0;
}

// ---- codes loaded straight into 32-bit lanes

#if HWY_MAX_BYTES >= 32
// Loads kLanes dense 4-bit codes: both lanes of a pair hold their byte, shifted right by 4 in the odd lane. Bits above the code are
// not cleared, since table lookups ignore them.
HWY_INLINE VI load_nibbles(const uint8_t* packed) {
  const hn::Repartition<uint64_t, F32> d64;
  const hn::Rebind<uint32_t, decltype(d64)> d32;
  const hn::Rebind<uint8_t, decltype(d64)> d8;
  const auto bytes = hn::PromoteTo(d64, hn::PromoteTo(d32, hn::LoadU(d8, packed)));
  return hn::BitCast(I32(), hn::Or(bytes, hn::ShiftLeft<28>(bytes)));
}
#endif

// Loads kLanes codes of one token of a V tile in lanes order, where lanes are coordinates.
template <int kBits>
HWY_INLINE VI load_lane_values(const uint8_t* tile, int64_t D, int64_t token, int64_t j) {
  const I32 di;
  return join_planes<kBits>(hn::Zero(di), [&](auto width, auto shift) {
    constexpr int w = decltype(width)::value;
    const uint8_t* from = tile + plane_offset(D, decltype(shift)::value) + token * w / 32 * (4 * D) + 4 * j;
    const auto down = static_cast<int>(token % 4 * 8 + token / 4 % (8 / w) * w);
    const VI lanes = hn::LoadU(di, reinterpret_cast<const int32_t*>(from));  // aligned, as tiles are
    return hn::And(hn::ShiftRightSame(lanes, down), hn::Set(di, (1 << w) - 1));
  });
}

// ---- decode_rows

template <class Levels>
HWY_INLINE void decode_coded_rows(const SideView& side, const Levels& levels, int64_t block, int64_t head, int64_t first,
                                  int64_t count, float* HWY_RESTRICT out, int64_t stride) {
  constexpr int kBits = Levels::kBits;
  const int64_t D = side.D;
  HWY_ALIGN uint8_t codes[kQuadTokens * kCodeStride];
  // Vector loads may reach past D: the bytes there must be valid codes.
  for (int64_t i = 0; i < kQuadTokens; ++i) std::memset(codes + i * kCodeStride + D, 0, 16);
  if (side.storage == KvStorage::lane_tiles && side.role == KvRole::v) {
    for (int64_t row = first; row < first + count; ++row) {
      const uint8_t* tile = side.tile(block, head, row);
      const int64_t token = row % kTileTokens;
      expand_row(
          side, side.gains_at(block, head, row), [&](int64_t j) { return levels.of(load_lane_values<kBits>(tile, D, token, j)); },
          out + (row - first) * stride);
    }
    return;
  }
  if (side.storage == KvStorage::lane_tiles) {
    for (int64_t row = first; row < first + count;) {
      const int64_t quad = row / kQuadTokens * kQuadTokens, end = std::min(quad + kQuadTokens, first + count);
      unpack_lane_quad<kBits>(side, side.tile(block, head, quad), quad % kTileTokens, codes);
      for (; row < end; ++row) {
        const uint8_t* from = codes + (row - quad) * kCodeStride;
        expand_row(
            side, side.gains_at(block, head, row), [&](int64_t j) { return levels.at(from + j); }, out + (row - first) * stride);
      }
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t *row = side.codes_at(block, head, first + i), *gains = side.gains_at(block, head, first + i);
#if HWY_MAX_BYTES >= 32
    if constexpr (kBits == 4)
      if (side.format->packing == Packing::dense && D % kLanes == 0) {
        expand_row(
            side, gains, [&](int64_t j) { return levels.of(load_nibbles(row + j / 2)); }, out + i * stride);
        continue;
      }
#endif
    const bool bytes = kBits == 8 && D % kLanes == 0;
    if (!bytes) unpack_codes_row(side, row, codes);
    const uint8_t* from = bytes ? row : codes;
    expand_row(
        side, gains, [&](int64_t j) { return levels.at(from + j); }, out + i * stride);
  }
}

// Decodes cache rows [first, first + count) of a block and head: y^ in the rotated domain without the mean (passthrough: the row
// itself). Row first + i goes to out + i * stride, stride >= padded_dim(D). Rows are physical: tokens that wrap around a ring or
// cross pages need one call per contiguous range.
inline void decode_rows(const SideView& side, int64_t block, int64_t head, int64_t first, int64_t count, float* HWY_RESTRICT out,
                        int64_t stride) {
  if (!side.passthrough())
    return with_levels(side, [&](const auto& levels) { decode_coded_rows(side, levels, block, head, first, count, out, stride); });
  const int64_t D = side.D;
  for (int64_t i = 0; i < count; ++i) {
    unpack_row(*side.format->passthrough, side.codes_at(block, head, first + i), 0, D, out + i * stride);
    fill_row(out + i * stride + D, padded_dim(D) - D, 0);
  }
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
