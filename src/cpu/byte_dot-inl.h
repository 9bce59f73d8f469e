// Byte dot products: rows of 15-bit integers against bytes that lie four to a lane, and the byte tables that make those bytes.
// Included once per target, after foreach_target.h.
//
// out[row][lane] = sum over quads c and bytes i of x[row][4 c + i] * (bytes[c][lane][i] - 128), exact in 32 bits on every target as
// long as |x| <= kOperandMax and there are at most 128 quads. Targets differ in how they take a row x apart ("operands", two words for
// every quad of x) and in their sums:
//   VNNI   a plane x >> 7 and a plane x & 127, as bytes: one instruction for 16 lanes and a plane. One plane does for |x| <= 127.
//   pairs  (x0, x2) and (x1, x3) as 16-bit pairs against the even and the odd bytes, on targets that multiply 16-bit numbers.
#if defined(WEFT_CPU_BYTE_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_BYTE_DOT_INL_H_
#undef WEFT_CPU_BYTE_DOT_INL_H_
#else
#define WEFT_CPU_BYTE_DOT_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "cpu/byte_dot.h"
#include "cpu/simd-inl.h"

// Highway's attributes of this target lack VNNI; only byte_dots() below is compiled with it.
#if HWY_TARGET == HWY_AVX3_DL
HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512vnni")
#else
HWY_BEFORE_NAMESPACE();
#endif
namespace weft::cpu::HWY_NAMESPACE {

using I32 = hn::ScalableTag<int32_t>;

#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

// ---- plain loops

constexpr int64_t kDotLanes = 4;
constexpr int64_t kDotVectors = 2;
constexpr bool kDotByPairs = true;

struct ByteVector {
  uint8_t byte[4 * kDotLanes];
};
struct DotSum {
  int32_t lane[kDotLanes];
};
HWY_INLINE DotSum zero_sum() { return {}; }
HWY_INLINE ByteVector load_bytes(const uint8_t* p) {
  ByteVector v;
  std::memcpy(v.byte, p, sizeof(v.byte));
  return v;
}
template <int kPlane>
HWY_INLINE void add_dots(DotSum& sum, const ByteVector& bytes, uint32_t operand) {
  const auto low = static_cast<int16_t>(operand & 0xffff), high = static_cast<int16_t>(operand >> 16);
  for (int64_t l = 0; l < kDotLanes; ++l) sum.lane[l] += bytes.byte[4 * l + kPlane] * low + bytes.byte[4 * l + 2 + kPlane] * high;
}
HWY_INLINE void store_sum(const DotSum& sum, int32_t bias, int32_t* out) {
  for (int64_t l = 0; l < kDotLanes; ++l) out[l] = sum.lane[l] - bias;
}

#else

using U8 = hn::ScalableTag<uint8_t>;
using ByteVector = hn::Vec<U8>;
constexpr int64_t kDotLanes = kLanes;
HWY_INLINE ByteVector load_bytes(const uint8_t* p) { return hn::LoadU(U8(), p); }

#if HWY_TARGET == HWY_AVX3_DL

// ---- VNNI

constexpr int64_t kDotVectors = 4;
constexpr bool kDotByPairs = false;

struct DotSum {
  hn::Vec<I32> lanes;
};
HWY_INLINE DotSum zero_sum() { return {hn::Zero(I32())}; }
template <int kPlane>
HWY_INLINE void add_dots(DotSum& sum, ByteVector bytes, uint32_t operand) {
  sum.lanes.raw = _mm512_dpbusd_epi32(sum.lanes.raw, bytes.raw, _mm512_set1_epi32(static_cast<int>(operand)));
}
HWY_INLINE void store_sum(DotSum sum, int32_t bias, int32_t* out) {
  hn::StoreU(hn::Sub(sum.lanes, hn::Set(I32(), bias)), I32(), out);
}

#else

// ---- pairs of 16-bit numbers

using I16 = hn::ScalableTag<int16_t>;
constexpr int64_t kDotVectors = HWY_TARGET == HWY_AVX2 ? 2 : 4;
constexpr bool kDotByPairs = true;

// Even (plane 0) or odd bytes as 16-bit numbers.
template <int kPlane>
HWY_INLINE hn::Vec<I16> byte_pairs(ByteVector bytes) {
  const hn::RebindToUnsigned<I16> du;
  const auto pairs = hn::BitCast(du, bytes);
  return hn::BitCast(I16(), kPlane == 0 ? hn::And(pairs, hn::Set(du, uint16_t{255})) : hn::ShiftRight<8>(pairs));
}

#if HWY_ARCH_ARM
// Products stay where they are: a lane's two numbers are added at the end.
struct DotSum {
  int32x4_t low, high;
};
HWY_INLINE DotSum zero_sum() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
template <int kPlane>
HWY_INLINE void add_dots(DotSum& sum, ByteVector bytes, uint32_t operand) {
  const int16x8_t pairs = byte_pairs<kPlane>(bytes).raw, x = vreinterpretq_s16_u32(vdupq_n_u32(operand));
  sum.low = vmlal_s16(sum.low, vget_low_s16(pairs), vget_low_s16(x));
  sum.high = vmlal_high_s16(sum.high, pairs, x);
}
HWY_INLINE void store_sum(const DotSum& sum, int32_t bias, int32_t* out) {
  vst1q_s32(out, vsubq_s32(vpaddq_s32(sum.low, sum.high), vdupq_n_s32(bias)));
}
#else
struct DotSum {
  hn::Vec<I32> lanes;
};
HWY_INLINE DotSum zero_sum() { return {hn::Zero(I32())}; }
template <int kPlane>
HWY_INLINE void add_dots(DotSum& sum, ByteVector bytes, uint32_t operand) {
  const auto x = hn::BitCast(I16(), hn::Set(hn::RebindToUnsigned<I32>(), operand));
  const auto pairs = byte_pairs<kPlane>(bytes);
#if HWY_TARGET == HWY_AVX2
  sum.lanes.raw = _mm256_add_epi32(sum.lanes.raw, _mm256_madd_epi16(pairs.raw, x.raw));
#else
  sum.lanes.raw = _mm512_add_epi32(sum.lanes.raw, _mm512_madd_epi16(pairs.raw, x.raw));
#endif
}
HWY_INLINE void store_sum(DotSum sum, int32_t bias, int32_t* out) {
  hn::StoreU(hn::Sub(sum.lanes, hn::Set(I32(), bias)), I32(), out);
}
#endif  // HWY_ARCH_ARM

#endif  // VNNI or pairs
#endif  // emulated

// ---- operands

// Where the word of a plane and quad lies.
constexpr int64_t plane_step(int64_t quads) { return kDotByPairs ? 1 : quads; }
constexpr int64_t kQuadStep = kDotByPairs ? 2 : 1;

// ---- the product

template <int kPlane, int kRows, int kVectors>
HWY_INLINE void add_plane(DotSum (&sum)[kRows][kVectors], const uint8_t* HWY_RESTRICT bytes, int64_t quad_bytes, int64_t quads,
                          const uint32_t* HWY_RESTRICT operands, int64_t row_words) {
  const uint32_t* x = operands + kPlane * plane_step(quads);
  for (int64_t c = 0; c < quads; ++c) {
    ByteVector column[kVectors];
    WEFT_UNROLL for (int v = 0; v < kVectors; ++v) column[v] = load_bytes(bytes + v * 4 * kDotLanes);
    WEFT_UNROLL for (int r = 0; r < kRows; ++r) {
      const uint32_t operand = x[r * row_words];
      WEFT_UNROLL for (int v = 0; v < kVectors; ++v) add_dots<kPlane>(sum[r][v], column[v], operand);
    }
    bytes += quad_bytes;
    x += kQuadStep;
  }
}

template <int kRows, int kVectors>
HWY_INLINE void dot_block(const ByteDots& p, int64_t lane, const uint32_t* operands, const int32_t* sums, int32_t* out) {
  DotSum sum[kRows][kVectors];
  WEFT_UNROLL for (int r = 0; r < kRows; ++r) WEFT_UNROLL for (int v = 0; v < kVectors; ++v) sum[r][v] = zero_sum();
  const uint8_t* bytes = p.bytes + 4 * lane;
  const int64_t quad_bytes = 4 * p.lanes;
  add_plane<0>(sum, bytes, quad_bytes, p.quads, operands, p.row_words);
  if (kDotByPairs || p.planes > 1) {
#if HWY_TARGET == HWY_AVX3_DL
    WEFT_UNROLL for (int r = 0; r < kRows; ++r) WEFT_UNROLL for (int v = 0; v < kVectors; ++v) sum[r][v].lanes =
        hn::ShiftLeft<7>(sum[r][v].lanes);
#endif
    add_plane<1>(sum, bytes, quad_bytes, p.quads, operands, p.row_words);
  }
  WEFT_UNROLL for (int r = 0; r < kRows; ++r) WEFT_UNROLL for (int v = 0; v < kVectors; ++v)
      store_sum(sum[r][v], 128 * sums[r], out + r * p.out_stride + lane + v * kDotLanes);
}

template <int kRows>
HWY_INLINE void dot_lanes(const ByteDots& p, const uint32_t* operands, const int32_t* sums, int32_t* out) {
  int64_t lane = 0;
  for (; lane + kDotVectors * kDotLanes <= p.lanes; lane += kDotVectors * kDotLanes)
    dot_block<kRows, kDotVectors>(p, lane, operands, sums, out);
  for (; lane < p.lanes; lane += kDotLanes) dot_block<kRows, 1>(p, lane, operands, sums, out);
}

// Rows of operands against one block of bytes. sums[r] = sum of x[r].
HWY_NOINLINE void byte_dots(const ByteDots& p, const uint32_t* operands, const int32_t* sums, int64_t rows, int32_t* out) {
  for (int64_t r = 0; r < rows; r += kDotRows) {
    const uint32_t* x = operands + r * p.row_words;
    int32_t* to = out + r * p.out_stride;
    switch (std::min(rows - r, kDotRows)) {
      case 1: dot_lanes<1>(p, x, sums + r, to); break;
      case 2: dot_lanes<2>(p, x, sums + r, to); break;
      case 3: dot_lanes<3>(p, x, sums + r, to); break;
      default: dot_lanes<4>(p, x, sums + r, to); break;
    }
  }
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

// Takes a row of integers apart: `count` of them, a multiple of 16, become operand_words(count) words. |x| <= operand_max(planes).
HWY_INLINE void make_operands(const int32_t* HWY_RESTRICT x, int64_t count, int planes, uint32_t* HWY_RESTRICT operands) {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  static_cast<void>(planes);
  for (int64_t i = 0; i < count; i += 4)
    for (int64_t p = 0; p < 2; ++p)
      operands[i / 2 + p] = static_cast<uint32_t>(x[i + p] & 0xffff) | static_cast<uint32_t>(x[i + 2 + p] & 0xffff) << 16;
#elif HWY_TARGET == HWY_AVX3_DL
  const I32 d;
  const hn::Rebind<int8_t, I32> d8;
  auto* high = reinterpret_cast<int8_t*>(operands);
  for (int64_t i = 0; i < count; i += kLanes) {
    const auto v = hn::LoadU(d, x + i);
    if (planes == 1) {
      hn::StoreU(hn::DemoteTo(d8, v), d8, high + i);
    } else {
      hn::StoreU(hn::DemoteTo(d8, hn::ShiftRight<7>(v)), d8, high + i);
      hn::StoreU(hn::DemoteTo(d8, hn::And(v, hn::Set(d, 127))), d8, high + count + i);
    }
  }
#else
  static_cast<void>(planes);
  const I32 d;
  const hn::Rebind<int16_t, I32> d16;
  auto* pairs = reinterpret_cast<int16_t*>(operands);
  for (int64_t i = 0; i < count; i += kLanes) {
    const auto v = hn::LoadU(d, x + i);
    hn::StoreU(hn::DemoteTo(d16, hn::InterleaveLower(d, v, hn::Shuffle1032(v))), d16, pairs + i);  // x0 x2 x1 x3
  }
#endif
}

// ---- byte tables

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

// table[code] for codes of kBits bits, at most 6.
template <int kBits>
struct ByteTable {
#if HWY_TARGET == HWY_AVX3_DL
  // One instruction looks up 64 entries by the low 6 bits of a byte; shorter tables are repeated, so that higher bits may be anything.
  static constexpr bool kIgnoresHighBits = true;
  ByteVector all;
  explicit HWY_INLINE ByteTable(const uint8_t* table) {
    alignas(64) uint8_t repeated[64];
    for (int i = 0; i < 64; ++i) repeated[i] = table[i & ((1 << kBits) - 1)];
    all = hn::Load(U8(), repeated);
  }
  HWY_INLINE ByteVector operator()(ByteVector codes) const { return ByteVector{_mm512_permutexvar_epi8(codes.raw, all.raw)}; }
#else
  static constexpr bool kIgnoresHighBits = false;
  static constexpr int kTables = kBits > 4 ? 1 << (kBits - 4) : 1;
  ByteVector part[kTables];
  explicit HWY_INLINE ByteTable(const uint8_t* table) {
    alignas(16) uint8_t sixteen[16] = {};
    for (int t = 0; t < kTables; ++t) {
      std::memcpy(sixteen, table + 16 * t, kBits < 4 ? size_t{1} << kBits : 16);
      part[t] = hn::LoadDup128(U8(), sixteen);
    }
  }
  HWY_INLINE ByteVector operator()(ByteVector codes) const {
    const U8 d;
    if constexpr (kTables == 1) return hn::TableLookupBytes(part[0], codes);
    const auto low = hn::And(codes, hn::Set(d, uint8_t{15}));
    ByteVector found[kTables];
    WEFT_UNROLL for (int t = 0; t < kTables; ++t) found[t] = hn::TableLookupBytes(part[t], low);
    WEFT_UNROLL for (int step = 1; step < kTables; step *= 2) {
      const auto upper = hn::TestBit(codes, hn::Set(d, static_cast<uint8_t>(16 * step)));
      WEFT_UNROLL for (int t = 0; t < kTables; t += 2 * step) found[t] = hn::IfThenElse(upper, found[t + step], found[t]);
    }
    return found[0];
  }
#endif
};

// Bits [kFrom, kFrom + kWidth) of every byte, moved to bit kTo, the rest 0.
template <int kFrom, int kTo, int kWidth>
HWY_INLINE ByteVector move_bits(ByteVector v) {
  const U8 d;
  const hn::Repartition<uint16_t, U8> d16;
  if constexpr (kFrom > kTo) v = hn::BitCast(d, hn::ShiftRight<kFrom - kTo>(hn::BitCast(d16, v)));
  if constexpr (kFrom < kTo) v = hn::BitCast(d, hn::ShiftLeft<kTo - kFrom>(hn::BitCast(d16, v)));
  if constexpr (kWidth < 8) v = hn::And(v, hn::Set(d, static_cast<uint8_t>(((1 << kWidth) - 1) << kTo)));
  return v;
}

#endif

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
