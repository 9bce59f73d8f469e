// Byte dot products: rows of 15-bit integers against bytes that lie four to a lane, and the byte tables that make those bytes.
// Included once per target, after foreach_target.h.
//
// out[row][lane] = sum over quads c and bytes i of x[row][4 c + i] * (bytes[c][lane][i] - 128), exact in 32 bits on every target as
// long as |x| <= operand_max(planes) and there are at most 128 quads. Targets differ in how they take a row x apart ("operands", two words for
// every quad of x) and in their sums:
//   VNNI   planes x >> 7 and x & 127 as bytes: one instruction for 16 lanes of a plane. One plane does for |x| <= 127.
//   pairs  (x0, x2) and (x1, x3) as 16-bit numbers against the even and the odd bytes.
#if defined(WEFT_CPU_BYTE_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_BYTE_DOT_INL_H_
#undef WEFT_CPU_BYTE_DOT_INL_H_
#else
#define WEFT_CPU_BYTE_DOT_INL_H_
#endif

#include <cstring>

#include "cpu/byte_dot.h"
#include "cpu/prefetch.h"
#include "cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

using I32 = hn::ScalableTag<int32_t>;

#if WEFT_EMULATED
// Four lanes in a plain array.
struct ByteVector {
  uint8_t byte[16];
};
constexpr int64_t kDotLanes = 4;
HWY_INLINE ByteVector load_bytes(const uint8_t* p) {
  ByteVector v;
  std::memcpy(v.byte, p, sizeof(v.byte));
  return v;
}
#else
using U8 = hn::ScalableTag<uint8_t>;
using ByteVector = hn::Vec<U8>;
constexpr int64_t kDotLanes = kLanes;
HWY_INLINE ByteVector load_bytes(const uint8_t* p) { return hn::LoadU(U8(), p); }
#endif

// ---- byte tables

#if !WEFT_EMULATED

// table[code] for codes of kBits bits, at most 6. Tables have 64 bytes, the entries over and over.
template <int kBits>
struct ByteTable {
#if HWY_TARGET == HWY_AVX3_DL
  // One instruction looks up 64 entries by the low 6 bits of a byte; tables are repeated up to there, so higher bits may be anything.
  static constexpr bool kIgnoresHighBits = true;
  ByteVector all;
  explicit HWY_INLINE ByteTable(const uint8_t* table) : all(hn::LoadU(U8(), table)) {}
  HWY_INLINE ByteVector operator()(ByteVector codes) const { return ByteVector{_mm512_permutexvar_epi8(codes.raw, all.raw)}; }
#else
  static constexpr bool kIgnoresHighBits = false;
  static constexpr int kTables = kBits > 4 ? 1 << (kBits - 4) : 1;
  ByteVector part[kTables];
  explicit HWY_INLINE ByteTable(const uint8_t* table) {
    for (int t = 0; t < kTables; ++t) part[t] = hn::LoadDup128(U8(), table + 16 * t);
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

// ---- where the bytes of a product come from: a turn of the loop takes kQuads quads

// The bytes themselves.
struct PlainSource {
  static constexpr int64_t kQuads = 2;
  const uint8_t* bytes;
  int64_t quad_bytes;
  explicit HWY_INLINE PlainSource(const ByteDots& p) : bytes(p.bytes), quad_bytes(4 * p.lanes) {}
  HWY_INLINE int64_t turn_bytes() const { return kQuads * quad_bytes; }
  template <int kQuad>
  HWY_INLINE ByteVector get(const uint8_t* turn) const {
    return load_bytes(turn + kQuad * quad_bytes);
  }
};

// Codes of four or two bits; those of a byte make a turn.
template <int kBits>
struct CodeSource {
  static constexpr int64_t kQuads = 8 / kBits;
  const uint8_t* bytes;
  int64_t quad_bytes;
#if WEFT_EMULATED
  const uint8_t* table;
#else
  ByteTable<kBits> table;
#endif
  explicit HWY_INLINE CodeSource(const ByteDots& p) : bytes(p.bytes), quad_bytes(4 * p.lanes), table(p.table) {}
  HWY_INLINE int64_t turn_bytes() const { return quad_bytes; }
  template <int kQuad>
  HWY_INLINE ByteVector get(const uint8_t* turn) const {
#if WEFT_EMULATED
    ByteVector v = load_bytes(turn);
    for (uint8_t& byte : v.byte) byte = table[byte >> (kBits * kQuad) & ((1 << kBits) - 1)];
    return v;
#else
    constexpr int kWidth = ByteTable<kBits>::kIgnoresHighBits ? 8 : kBits;
    return table(move_bits<kBits * kQuad, 0, kWidth>(load_bytes(turn)));
#endif
  }
};

// ---- operands

// Where the word of a plane and quad lies.
constexpr bool kDotByPairs = HWY_TARGET != HWY_AVX3_DL;
constexpr int64_t plane_step(int64_t quads) { return kDotByPairs ? 1 : quads; }
constexpr int64_t kQuadStep = kDotByPairs ? 2 : 1;

// Takes a row of integers apart: `count` of them, a multiple of 32, become operand_words(count) words. |x| <= operand_max(planes).
HWY_INLINE void make_operands(const int32_t* HWY_RESTRICT x, int64_t count, int planes, uint32_t* HWY_RESTRICT operands) {
#if WEFT_EMULATED
  static_cast<void>(planes);
  for (int64_t i = 0; i < count; i += 4)
    for (int64_t p = 0; p < 2; ++p)
      operands[i / 2 + p] = static_cast<uint32_t>(x[i + p] & 0xffff) | static_cast<uint32_t>(x[i + 2 + p] & 0xffff) << 16;
#elif HWY_TARGET == HWY_AVX3_DL
  // Packing leaves 4-byte groups in the order of 128-bit blocks.
  alignas(64) static constexpr int32_t kUnblock[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  const __m512i unblock = _mm512_load_si512(kUnblock), low_bits = _mm512_set1_epi16(127);
  auto* bytes = reinterpret_cast<uint8_t*>(operands);
  for (int64_t i = 0; i < count; i += 64) {
    const int64_t half = count - i >= 64 ? 32 : 0;  // the last 32 go twice
    const __m512i a = _mm512_packs_epi32(_mm512_loadu_si512(x + i), _mm512_loadu_si512(x + i + 16));
    const __m512i b = _mm512_packs_epi32(_mm512_loadu_si512(x + i + half), _mm512_loadu_si512(x + i + half + 16));
    const __mmask16 stored = half ? 0xffff : 0xff;
    const auto store = [&](uint8_t* to, __m512i even, __m512i odd) HWY_ATTR {
      _mm512_mask_storeu_epi32(to, stored, _mm512_permutexvar_epi32(unblock, _mm512_packs_epi16(even, odd)));
    };
    if (planes == 1) {
      store(bytes + i, a, b);
    } else {
      store(bytes + i, _mm512_srai_epi16(a, 7), _mm512_srai_epi16(b, 7));
      store(bytes + count + i, _mm512_and_si512(a, low_bits), _mm512_and_si512(b, low_bits));
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

// ---- sums: DotSum<kPlanes>, of a row and a vector of lanes

#if HWY_TARGET == HWY_AVX3_DL

template <int kPlanes>
struct DotSum {
  hn::Vec<I32> plane[kPlanes];
  HWY_INLINE void clear() { WEFT_UNROLL for (int p = 0; p < kPlanes; ++p) plane[p] = hn::Zero(I32()); }
  HWY_INLINE void store(int32_t bias, int32_t* out) const {
    auto sum = plane[0];
    if constexpr (kPlanes > 1) sum = hn::Add(hn::ShiftLeft<7>(sum), plane[1]);
    hn::StoreU(hn::Sub(sum, hn::Set(I32(), bias)), I32(), out);
  }
};
using DotColumn = ByteVector;
template <int kPlane>
HWY_INLINE DotColumn dot_column(ByteVector v) {
  return v;
}
template <int kPlane, int kPlanes>
HWY_INLINE void add_dots(DotSum<kPlanes>& sum, const DotColumn& column, uint32_t operand) {
  // As an intrinsic, GCC copies every sum in every turn of the loop, and Highway's attributes of this target lack VNNI.
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.plane[kPlane].raw) : "v"(column.raw), "v"(_mm512_set1_epi32(static_cast<int>(operand))));
}
// Sums and columns fit 32 registers.
constexpr int dot_vectors(int rows, int planes) { return rows * planes <= 4 ? 4 : 2; }

#elif WEFT_EMULATED

template <int kPlanes>
struct DotSum {
  int32_t lane[kDotLanes];
  HWY_INLINE void clear() { std::memset(lane, 0, sizeof(lane)); }
  HWY_INLINE void store(int32_t bias, int32_t* out) const {
    for (int64_t l = 0; l < kDotLanes; ++l) out[l] = lane[l] - bias;
  }
};
using DotColumn = ByteVector;
template <int kPlane>
HWY_INLINE DotColumn dot_column(const ByteVector& v) {
  return v;
}
template <int kPlane, int kPlanes>
HWY_INLINE void add_dots(DotSum<kPlanes>& sum, const DotColumn& column, uint32_t operand) {
  const auto low = static_cast<int16_t>(operand & 0xffff), high = static_cast<int16_t>(operand >> 16);
  for (int64_t l = 0; l < kDotLanes; ++l) sum.lane[l] += column.byte[4 * l + kPlane] * low + column.byte[4 * l + 2 + kPlane] * high;
}
constexpr int dot_vectors(int, int) { return 1; }

#else

using I16 = hn::ScalableTag<int16_t>;

// Even (plane 0) or odd bytes as 16-bit numbers.
using DotColumn = hn::Vec<I16>;
template <int kPlane>
HWY_INLINE DotColumn dot_column(ByteVector v) {
  const hn::RebindToUnsigned<I16> du;
  const auto both = hn::BitCast(du, v);
  return hn::BitCast(I16(), kPlane == 0 ? hn::And(both, hn::Set(du, uint16_t{255})) : hn::ShiftRight<8>(both));
}

#if HWY_ARCH_ARM
// Products stay where they are: a lane's two numbers are added at the end.
template <int kPlanes>
struct DotSum {
  int32x4_t low, high;
  HWY_INLINE void clear() { low = high = vdupq_n_s32(0); }
  HWY_INLINE void store(int32_t bias, int32_t* out) const { vst1q_s32(out, vsubq_s32(vpaddq_s32(low, high), vdupq_n_s32(bias))); }
};
template <int kPlane, int kPlanes>
HWY_INLINE void add_dots(DotSum<kPlanes>& sum, const DotColumn& column, uint32_t operand) {
  const int16x8_t pairs = column.raw, x = vreinterpretq_s16_u32(vdupq_n_u32(operand));
  sum.low = vmlal_s16(sum.low, vget_low_s16(pairs), vget_low_s16(x));
  sum.high = vmlal_high_s16(sum.high, pairs, x);
}
#else
template <int kPlanes>
struct DotSum {
  hn::Vec<I32> lanes;
  HWY_INLINE void clear() { lanes = hn::Zero(I32()); }
  HWY_INLINE void store(int32_t bias, int32_t* out) const { hn::StoreU(hn::Sub(lanes, hn::Set(I32(), bias)), I32(), out); }
};
template <int kPlane, int kPlanes>
HWY_INLINE void add_dots(DotSum<kPlanes>& sum, const DotColumn& column, uint32_t operand) {
  const auto x = hn::BitCast(I16(), hn::Set(hn::RebindToUnsigned<I32>(), operand));
  // As intrinsics, GCC keeps more products in flight than there are registers.
  hn::Vec<I32> products;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sum.lanes.raw), "=&v"(products.raw) : "v"(column.raw), "v"(x.raw));
}
#endif  // HWY_ARCH_ARM
constexpr int dot_vectors(int rows, int) { return HWY_TARGET == HWY_AVX3 || rows == 1 ? 4 : 2; }

#endif

// ---- the product

// Brings the lines of a block of bytes into the cache, equally many in every turn of a loop: more at once than the processor has
// places for would make everything wait. What is left over goes first. Without a block, the same line again and again: the loop stays
// one.
class Prefetcher {
 public:
  HWY_INLINE Prefetcher(const ByteDots& p, int64_t turns)
      : next_(p.ahead ? p.ahead : p.bytes), lines_(1), step_(p.ahead ? kLine : 0) {
    if (!p.ahead || turns == 0) return;
    lines_ = p.ahead_bytes / (kLine * turns);
    for (int64_t at = lines_ * turns * kLine; at < p.ahead_bytes; at += kLine) prefetch_line(next_ + at);
  }
  HWY_INLINE void turn() {
    for (int64_t i = 0; i < lines_; ++i, next_ += step_) prefetch_line(next_);
  }

 private:
  static constexpr int64_t kLine = 64;
  const uint8_t* next_;
  int64_t lines_, step_;
};

template <int kPlane, int kRows, int kVectors, int kPlanes>
HWY_INLINE void add_plane(DotSum<kPlanes> (&sum)[kRows][kVectors], const ByteVector (&bytes)[kVectors], const uint32_t* x,
                          int64_t row_words) {
  DotColumn column[kVectors];
  WEFT_UNROLL for (int v = 0; v < kVectors; ++v) column[v] = dot_column<kPlane>(bytes[v]);
  WEFT_UNROLL for (int r = 0; r < kRows; ++r) {
    const uint32_t operand = x[r * row_words];
    WEFT_UNROLL for (int v = 0; v < kVectors; ++v) add_dots<kPlane>(sum[r][v], column[v], operand);
  }
}

template <int kQuad, int kRows, int kVectors, int kPlanes, class Source>
HWY_INLINE void add_quad(DotSum<kPlanes> (&sum)[kRows][kVectors], const Source& source, const uint8_t* turn, const uint32_t* x,
                         int64_t row_words, int64_t second) {
  x += kQuad * kQuadStep;
  ByteVector bytes[kVectors];
  WEFT_UNROLL for (int v = 0; v < kVectors; ++v) bytes[v] = source.template get<kQuad>(turn + v * 4 * kDotLanes);
  add_plane<0>(sum, bytes, x, row_words);
  if constexpr (kDotByPairs || kPlanes > 1) add_plane<1>(sum, bytes, x + second, row_words);
}

template <int kRows, int kVectors, int kPlanes, class Source>
HWY_INLINE void dot_block(const ByteDots& p, const Source& source, int64_t lane, const uint32_t* HWY_RESTRICT operands,
                          const int32_t* sums, int32_t* HWY_RESTRICT out, Prefetcher& ahead) {
  DotSum<kPlanes> sum[kRows][kVectors];
  WEFT_UNROLL for (int r = 0; r < kRows; ++r) WEFT_UNROLL for (int v = 0; v < kVectors; ++v) sum[r][v].clear();
  const int64_t second = plane_step(p.quads);
  const uint32_t* x = operands;
  const uint8_t* turn = source.bytes + 4 * lane;
  for (int64_t c = 0; c < p.quads; c += Source::kQuads) {
    ahead.turn();
    add_quad<0>(sum, source, turn, x, p.row_words, second);
    add_quad<1>(sum, source, turn, x, p.row_words, second);
    if constexpr (Source::kQuads == 4) {
      add_quad<2>(sum, source, turn, x, p.row_words, second);
      add_quad<3>(sum, source, turn, x, p.row_words, second);
    }
    x += Source::kQuads * kQuadStep;
    turn += source.turn_bytes();
  }
  WEFT_UNROLL for (int r = 0; r < kRows; ++r) WEFT_UNROLL for (int v = 0; v < kVectors; ++v) sum[r][v].store(
      static_cast<int32_t>(128u * static_cast<uint32_t>(sums[r])), out + r * p.out_stride + lane + v * kDotLanes);
}

// A function for each kind of product: in one for all of them, the loops would have to share registers.
template <int kPlanes, int kRows, class Source>
HWY_NOINLINE void dot_lanes(const ByteDots& p, const uint32_t* operands, const int32_t* sums, int32_t* out) {
  const Source source(p);
  constexpr int kVectors = dot_vectors(kRows, kPlanes);
  Prefetcher ahead(p, p.quads / Source::kQuads * (p.lanes / (kVectors * kDotLanes)));
  int64_t lane = 0;
  for (; lane + kVectors * kDotLanes <= p.lanes; lane += kVectors * kDotLanes)
    dot_block<kRows, kVectors, kPlanes>(p, source, lane, operands, sums, out, ahead);
  for (; lane < p.lanes; lane += kDotLanes) dot_block<kRows, 1, kPlanes>(p, source, lane, operands, sums, out, ahead);
}

template <int kPlanes, class Source>
HWY_INLINE void dot_rows(const ByteDots& p, const uint32_t* operands, const int32_t* sums, int64_t rows, int32_t* out) {
  switch (rows) {
    case 1: return dot_lanes<kPlanes, 1, Source>(p, operands, sums, out);
    case 2: return dot_lanes<kPlanes, 2, Source>(p, operands, sums, out);
    case 3: return dot_lanes<kPlanes, 3, Source>(p, operands, sums, out);
    default: return dot_lanes<kPlanes, 4, Source>(p, operands, sums, out);
  }
}

template <class Source>
HWY_INLINE void dot_planes(const ByteDots& p, const uint32_t* operands, const int32_t* sums, int64_t rows, int32_t* out) {
  if constexpr (!kDotByPairs)
    if (p.planes == 1) return dot_rows<1, Source>(p, operands, sums, rows, out);
  dot_rows<2, Source>(p, operands, sums, rows, out);
}

// Up to kDotRows rows of operands against one block of bytes; sums[r] is the sum of row r.
HWY_INLINE void byte_dots(const ByteDots& p, const uint32_t* operands, const int32_t* sums, int64_t rows, int32_t* out) {
  switch (p.bits) {
    case 2: return dot_planes<CodeSource<2>>(p, operands, sums, rows, out);
    case 4: return dot_planes<CodeSource<4>>(p, operands, sums, rows, out);
    default: return dot_planes<PlainSource>(p, operands, sums, rows, out);
  }
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
