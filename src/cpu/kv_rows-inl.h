// Rows of a KV cache from bytes to f32 in the rotated domain: codes to bytes, bytes to levels, levels times gains.
// Included once per target, after foreach_target.h.
//
// decode_rows() is what attention and kv_decode share. Codes first become a byte each in a small buffer of the first-level cache; one
// expansion by table then serves every layout and packing.
#if defined(WEFT_CPU_KV_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_KV_ROWS_INL_H_
#undef WEFT_CPU_KV_ROWS_INL_H_
#else
#define WEFT_CPU_KV_ROWS_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "cpu/kv_params.h"
#include "cpu/kv_rotate-inl.h"
#include "cpu/simd-inl.h"
#include "shared/bit_pack.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

#define WEFT_EMULATED (HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128)

// Bytes of a row of codes in a buffer: expansion reads whole vectors.
constexpr int64_t kCodeStride = kMaxHeadDim + 16;
// Tokens that the bytes of a lane tile hold together.
constexpr int64_t kQuad = 4;

// ---- dense bit streams to bytes

#if !WEFT_EMULATED
using Block8 = hn::Full128<uint8_t>;
using Block16 = hn::Full128<uint16_t>;
using Block32 = hn::Full128<uint32_t>;
using Block64 = hn::Full128<uint64_t>;

// 16 codes of b bits are 2 b bytes. Code j begins in byte j b / 8 and ends in it or the next: a shuffle brings both into a 16-bit
// lane, a multiplication moves the code to bit 8. Even and odd codes apart, so that two vectors of 16-bit lanes become one of bytes.
struct DenseShuffle {
  uint8_t bytes[2][16];
  uint16_t factor[2][8];
};
struct DenseShuffles {
  DenseShuffle of[9];  // by bits
};
constexpr DenseShuffles make_dense_shuffles() {
  DenseShuffles all{};
  for (int bits = 2; bits <= 8; ++bits)
    for (int j = 0; j < 16; ++j) {
      const int byte = j * bits / 8, shift = j * bits % 8;
      DenseShuffle& s = all.of[bits];
      s.bytes[j % 2][j / 2 * 2] = static_cast<uint8_t>(byte);
      s.bytes[j % 2][j / 2 * 2 + 1] = static_cast<uint8_t>(byte < 15 ? byte + 1 : 15);
      s.factor[j % 2][j / 2] = static_cast<uint16_t>(1 << (8 - shift));
    }
  return all;
}
inline constexpr DenseShuffles kDenseShuffles = make_dense_shuffles();
#endif

// Codes of a dense row as bytes. Reads no byte past the row; may write up to 16 bytes past the last code.
inline void unpack_dense(const uint8_t* HWY_RESTRICT row, int64_t count, int bits, uint8_t* HWY_RESTRICT codes) {
#if WEFT_EMULATED
  unpack_codes(row, count, bits, codes);
#else
  const Block8 d8;
  const Block16 d16;
  const int64_t bytes = packed_bytes(count, bits);
  if (bytes < 16) return unpack_codes(row, count, bits, codes);
  if (bits == 4 && bytes % 16 == 0) {
    const auto low = hn::Set(d8, uint8_t{15});
    for (int64_t i = 0; i < bytes; i += 16) {
      const auto v = hn::LoadU(d8, row + i);
      const auto even = hn::And(v, low);
      const auto odd = hn::And(hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(d16, v))), low);
      hn::StoreU(hn::InterleaveLower(d8, even, odd), d8, codes + 2 * i);
      hn::StoreU(hn::InterleaveUpper(d8, even, odd), d8, codes + 2 * i + 16);
    }
    return;
  }
  const DenseShuffle& s = kDenseShuffles.of[bits];
  const auto even_bytes = hn::LoadU(d8, s.bytes[0]), odd_bytes = hn::LoadU(d8, s.bytes[1]), last = hn::Set(d8, uint8_t{15});
  const auto even_factor = hn::LoadU(d16, s.factor[0]), odd_factor = hn::LoadU(d16, s.factor[1]);
  const auto mask = hn::Set(d8, static_cast<uint8_t>((1 << bits) - 1));
  const auto high = hn::Set(d16, uint16_t{0xff00});
  for (int64_t j = 0; j < count; j += 16) {
    // The last chunks read the row's last 16 bytes and look for their codes further up.
    const int64_t offset = j / 8 * bits, base = std::min(offset, bytes - 16);
    const auto up = hn::Set(d8, static_cast<uint8_t>(offset - base));
    const auto v = hn::LoadU(d8, row + base);
    const auto even = hn::TableLookupBytes(v, hn::Min(hn::Add(even_bytes, up), last));
    const auto odd = hn::TableLookupBytes(v, hn::Min(hn::Add(odd_bytes, up), last));
    const auto even16 = hn::Mul(hn::BitCast(d16, even), even_factor), odd16 = hn::Mul(hn::BitCast(d16, odd), odd_factor);
    const auto both = hn::Or(hn::ShiftRight<8>(even16), hn::And(odd16, high));
    hn::StoreU(hn::And(hn::BitCast(d8, both), mask), d8, codes + j);
  }
#endif
}

// Codes of a row in rows or plain tiles as bytes.
inline void unpack_codes_row(const SideView& side, const uint8_t* row, uint8_t* HWY_RESTRICT codes) {
  const int bits = side.format->bits;
  if (side.format->packing == Packing::dense && bits < 8) return unpack_dense(row, side.D, bits, codes);
  const hn::CappedTag<uint8_t, 8> d;  // D is a multiple of 8
  const auto mask = hn::Set(d, static_cast<uint8_t>((1 << bits) - 1));
  for (int64_t j = 0; j < side.D; j += static_cast<int64_t>(hn::Lanes(d)))
    hn::StoreU(hn::And(hn::LoadU(d, row + j), mask), d, codes + j);
}

// ---- lane tiles to bytes

// Field `index` (a token quad or a coordinate quad) of the 16 bytes that start at lane 4 `block` of vector row `spread`: as bytes, all
// planes joined. K: 4 tokens of 4 coordinates each; V: 4 coordinates of 4 tokens each.
template <class D8>
HWY_INLINE hn::Vec<D8> lane_quads(D8 d8, const SideView& side, const uint8_t* tile, int64_t index, int64_t vectors, int64_t byte) {
  const hn::Repartition<uint32_t, D8> d32;
  auto codes = hn::Zero(d32);
  for (int p = 0; p < side.planes.count; ++p) {
    const LanePlane& plane = side.planes.plane[p];
    const int w = plane.width;
    const uint8_t* from = tile + plane.offset + index * w / 8 * vectors * kLaneVectorBytes + byte;
    const auto field = hn::ShiftRightSame(hn::BitCast(d32, hn::LoadU(d8, from)), static_cast<int>(index % (8 / w)) * w);
    const auto mask = hn::Set(d32, ((1u << w) - 1) * 0x01010101u);
    codes = hn::Or(codes, hn::ShiftLeftSame(hn::And(field, mask), plane.shift));
  }
  return hn::BitCast(d8, codes);
}

// Tokens token .. token + 3 (token a multiple of 4) of a lane tile: codes[i * kCodeStride + j] is coordinate j of token + i.
inline void unpack_lane_quad(const SideView& side, const uint8_t* tile, int64_t token, uint8_t* HWY_RESTRICT codes) {
#if WEFT_EMULATED
  for (int64_t j = 0; j < side.D; ++j)
    for (int64_t i = 0; i < kQuad; ++i) {
      int code = 0;
      for (int p = 0; p < side.planes.count; ++p) {
        const LanePlane& plane = side.planes.plane[p];
        const LaneField at = lane_field(side.role, plane.width, side.D, token + i, j);
        code |= (tile[plane.offset + at.byte] >> at.bit & ((1 << plane.width) - 1)) << plane.shift;
      }
      codes[i * kCodeStride + j] = static_cast<uint8_t>(code);
    }
#else
  const Block8 d8;
  const Block32 d32;
  const Block64 d64;
  alignas(16) static constexpr uint8_t kTranspose[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  const auto transpose = hn::Load(d8, kTranspose);
  for (int64_t j = 0; j < side.D; j += 16) {
    // part[b], lane i: token i, coordinates j + 4 b ..
    hn::Vec<Block32> part[4];
    WEFT_UNROLL for (int64_t b = 0; b < 4; ++b) {
      if (side.role == KvRole::k) {
        const int64_t byte = token / kLaneTokens * kLaneVectorBytes + token % kLaneTokens * 4;
        part[b] = hn::BitCast(d32, lane_quads(d8, side, tile, j / 4 + b, kTileTokens / kLaneTokens, byte));
      } else {
        const int64_t byte = j / kLaneTokens * kLaneVectorBytes + 16 * b;
        const auto bytes = lane_quads(d8, side, tile, token / 4, side.D / kLaneTokens, byte);
        part[b] = hn::BitCast(d32, hn::TableLookupBytes(bytes, transpose));
      }
    }
    const auto a = hn::BitCast(d64, hn::InterleaveLower(d32, part[0], part[1]));
    const auto b = hn::BitCast(d64, hn::InterleaveUpper(d32, part[0], part[1]));
    const auto c = hn::BitCast(d64, hn::InterleaveLower(d32, part[2], part[3]));
    const auto d = hn::BitCast(d64, hn::InterleaveUpper(d32, part[2], part[3]));
    hn::StoreU(hn::BitCast(d8, hn::InterleaveLower(d64, a, c)), d8, codes + j);
    hn::StoreU(hn::BitCast(d8, hn::InterleaveUpper(d64, a, c)), d8, codes + kCodeStride + j);
    hn::StoreU(hn::BitCast(d8, hn::InterleaveLower(d64, b, d)), d8, codes + 2 * kCodeStride + j);
    hn::StoreU(hn::BitCast(d8, hn::InterleaveUpper(d64, b, d)), d8, codes + 3 * kCodeStride + j);
  }
#endif
}

// ---- bytes to levels

using I32 = hn::RebindToSigned<F32>;
using VI = hn::Vec<I32>;

HWY_INLINE VI load_codes(const uint8_t* codes) { return hn::PromoteTo(I32(), hn::LoadU(hn::Rebind<uint8_t, F32>(), codes)); }

// Lane numbers from the lowest bits of an index.
HWY_INLINE auto lane_indices(VI index) {
#if HWY_IS_DEBUG_BUILD || HWY_MAX_BYTES < 32
  index = hn::And(index, hn::Set(I32(), static_cast<int32_t>(kLanes - 1)));
#endif  // else: the instruction looks at no other bits
  return hn::IndicesFromVec(F32(), index);
}

// Entry `index` of kTables vectors: the lowest bits choose the lane, those above the table.
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
// More tables than this are slower than loads.
constexpr int64_t kMaxTables = 4;

// How levels come from codes of kBits bits: tables in registers, arithmetic, or loads. of(code) for codes in a vector, at(codes) for
// bytes.
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

// Calls use(levels) with the quickest source of levels of a side.
template <class Use>
HWY_INLINE void with_levels(const SideView& side, Use&& use) {
  switch (side.format->bits) {
    case 2: return with_levels_of<2>(side, use);
    case 3: return with_levels_of<3>(side, use);
    case 4: return with_levels_of<4>(side, use);
    case 5: return with_levels_of<5>(side, use);
    case 6: return with_levels_of<6>(side, use);
    case 7: return with_levels_of<7>(side, use);
    default: return with_levels_of<8>(side, use);
  }
}

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

// One row: out[j] = gain of j's group * level of codes[j]; out is padded with zeros to whole vectors.
template <class Levels>
HWY_INLINE void expand_row(const SideView& side, const Levels& levels, const uint8_t* HWY_RESTRICT codes, const uint8_t* gains,
                           float* HWY_RESTRICT out) {
  const F32 d;
  const DType dtype = side.format->gain_dtype;
  const int64_t D = side.D, padded = padded_dim(D);
  if (side.groups == 1) {
    const VF factor = hn::Set(d, load_gain(dtype, gains, 0) * side.gain_factor);
    for (int64_t j = 0; j < D; j += kLanes) hn::StoreU(hn::Mul(factor, levels.at(codes + j)), d, out + j);
  } else {
    const int64_t g = side.format->gain_group;
    HWY_ALIGN float factors[kMaxHeadDim + kLanes];
    for (int64_t i = 0; i < side.groups; ++i) fill_row(factors + i * g, g, load_gain(dtype, gains, i) * side.gain_factor);
    fill_row(factors + D, padded - D, 0);
    for (int64_t j = 0; j < D; j += kLanes) hn::StoreU(hn::Mul(hn::Load(d, factors + j), levels.at(codes + j)), d, out + j);
  }
  fill_row(out + D, padded - D, 0);
}

// ---- decode_rows

// Rows [first, first + count) of a block and head, y^ in the rotated domain without the mean (passthrough: the row itself): row i at
// out + i * stride, stride >= padded_dim(D). Rows are physical: a run of a ring or of pages is one call per contiguous piece.
inline void decode_rows(const SideView& side, int64_t block, int64_t head, int64_t first, int64_t count, float* HWY_RESTRICT out,
                        int64_t stride) {
  const int64_t D = side.D;
  if (side.passthrough()) {
    for (int64_t i = 0; i < count; ++i) {
      unpack_row(*side.format->passthrough, side.codes_at(block, head, first + i), 0, D, out + i * stride);
      fill_row(out + i * stride + D, padded_dim(D) - D, 0);
    }
    return;
  }
  with_levels(side, [&](const auto& levels) {
    HWY_ALIGN uint8_t codes[kQuad * kCodeStride];
    // Expansion reads whole vectors: what lies past D must be codes, too.
    for (int64_t i = 0; i < kQuad; ++i) std::memset(codes + i * kCodeStride + D, 0, static_cast<size_t>(kCodeStride - D));
    if (side.storage != KvStorage::lane_tiles) {
      for (int64_t i = 0; i < count; ++i) {
        unpack_codes_row(side, side.codes_at(block, head, first + i), codes);
        expand_row(side, levels, codes, side.gains_at(block, head, first + i), out + i * stride);
      }
      return;
    }
    for (int64_t row = first; row < first + count;) {
      const int64_t quad = row / kQuad * kQuad, end = std::min(quad + kQuad, first + count);
      unpack_lane_quad(side, side.tile(block, head, quad), quad % kTileTokens, codes);
      for (; row < end; ++row)
        expand_row(side, levels, codes + (row - quad) * kCodeStride, side.gains_at(block, head, row), out + (row - first) * stride);
    }
  });
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
