// Byte dot products of rows of integers (RowInts) with bytes stored four to a 32-bit lane, and the byte tables that codes are
// looked up in.
// Included once per target, after foreach_target.h.
//
// out[row][lane] = sum over quads c and bytes i of x[row][4 c + i] * (bytes[c][lane][i] - 128), exact in 32 bits on every target as
// long as x is within RowInts' range and there are at most 128 quads. Targets differ in how they split a row x into operands (up to
// two words per quad of x) and in how they sum:
//   VNNI   x >> 7 and x & 127 as two planes of bytes; one instruction for 16 lanes of a plane. |x| <= 127 needs one plane.
//   pairs  (x0, x2) and (x1, x3) as 16-bit integers, multiplied by the even and the odd bytes.
//   short  x as bytes. Products of two neighbours are added in 16 bits; for weights, so are those of two quads. One factor must be
//          unsigned: the bytes, multiplied by signed x, or the weights, multiplied by the bytes minus 128.
#if defined(WEFT_CPU_BYTE_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_BYTE_DOT_INL_H_
#undef WEFT_CPU_BYTE_DOT_INL_H_
#else
#define WEFT_CPU_BYTE_DOT_INL_H_
#endif

#include <cstring>

#include "cpu/attention/byte_dot.h"
#include "cpu/common/prefetch.h"
#include "cpu/common/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

using I32 = hn::ScalableTag<int32_t>;

#define WEFT_SHORT_SUMS (HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3)

#if WEFT_EMULATED
// Four lanes in an array.
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
// Bytes minus 128, as signed bytes.
HWY_INLINE ByteVector less_128(ByteVector v) { return hn::Xor(v, hn::Set(U8(), uint8_t{128})); }
#endif

// ---- byte tables

#if !WEFT_EMULATED

// table[code] for codes of kBits <= 6 bits. A table has 64 bytes: its entries, repeated.
template <int kBits>
struct ByteTable {
#if HWY_TARGET == HWY_AVX3_DL
  // One instruction looks up 64 entries by the low 6 bits of a byte. Entries repeat up to 64, so the bits above a code are ignored.
  static constexpr bool kIgnoresHighBits = true;
  ByteVector all;
  explicit HWY_INLINE ByteTable(const uint8_t* table) : all(hn::LoadU(U8(), table)) {}
  HWY_INLINE ByteVector operator()(ByteVector codes) const { return ByteVector{_mm512_permutexvar_epi8(codes.raw, all.raw)}; }
#else
  static constexpr bool kIgnoresHighBits = false;
  static constexpr int kTables = kBits > 4 ? 1 << (kBits - 4) : 1;
  ByteVector tables[kTables];
  explicit HWY_INLINE ByteTable(const uint8_t* table) {
    for (int t = 0; t < kTables; ++t) tables[t] = hn::LoadDup128(U8(), table + 16 * t);
  }
  HWY_INLINE void make_signed() {
    for (int t = 0; t < kTables; ++t) tables[t] = less_128(tables[t]);
  }
  HWY_INLINE ByteVector operator()(ByteVector codes) const {
    const U8 d;
    if constexpr (kTables == 1) return hn::TableLookupBytes(tables[0], codes);
    const auto low = hn::And(codes, hn::Set(d, uint8_t{15}));
    ByteVector found[kTables];
    WEFT_UNROLL for (int t = 0; t < kTables; ++t) found[t] = hn::TableLookupBytes(tables[t], low);
    WEFT_UNROLL for (int step = 1; step < kTables; step *= 2) {
      const auto upper = hn::TestBit(codes, hn::Set(d, static_cast<uint8_t>(16 * step)));
      WEFT_UNROLL for (int t = 0; t < kTables; t += 2 * step) found[t] = hn::IfThenElse(upper, found[t + step], found[t]);
    }
    return found[0];
  }
#endif
};

// Bits [kFrom, kFrom + kWidth) of every byte moved to bit kTo, all other bits 0. With kWidth = 8 nothing is masked.
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

// ---- sources of the bytes of a product: an iteration of the loop takes kQuads quads

// Bytes in memory.
struct ByteSource {
  static constexpr int64_t kQuads = 2;
  const uint8_t* bytes;
  int64_t quad_bytes;
  explicit HWY_INLINE ByteSource(const ByteDots& p) : bytes(p.bytes), quad_bytes(4 * p.lanes) {}
  HWY_INLINE int64_t iteration_bytes() const { return kQuads * quad_bytes; }
  template <int kQuad>
  HWY_INLINE ByteVector get(const uint8_t* from) const {
    return load_bytes(from + kQuad * quad_bytes);
  }
};

// Codes of 4 or 2 bits, looked up. An iteration takes all codes of a byte.
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
  HWY_INLINE int64_t iteration_bytes() const { return quad_bytes; }
  template <int kQuad>
  HWY_INLINE ByteVector get(const uint8_t* from) const {
#if WEFT_EMULATED
    ByteVector v = load_bytes(from);
    for (uint8_t& byte : v.byte) byte = table[byte >> (kBits * kQuad) & ((1 << kBits) - 1)];
    return v;
#else
    constexpr int kWidth = ByteTable<kBits>::kIgnoresHighBits ? 8 : kBits;
    return table(move_bits<kBits * kQuad, 0, kWidth>(load_bytes(from)));
#endif
  }
};

#if WEFT_SHORT_SUMS

// The same bytes minus 128.
template <class Source>
struct SignedSource;

template <>
struct SignedSource<ByteSource> : ByteSource {
  explicit HWY_INLINE SignedSource(const ByteDots& p) : ByteSource(p) {}
  template <int kQuad>
  HWY_INLINE ByteVector get(const uint8_t* from) const {
    return less_128(ByteSource::get<kQuad>(from));
  }
};

template <int kBits>
struct SignedSource<CodeSource<kBits>> : CodeSource<kBits> {
  explicit HWY_INLINE SignedSource(const ByteDots& p) : CodeSource<kBits>(p) { this->table.make_signed(); }
};

#endif

// ---- operands

constexpr bool kShortSums = WEFT_SHORT_SUMS;
constexpr bool is_short(RowInts ints) { return kShortSums && ints != RowInts::wide; }

// Steps, in words, between the planes and between the quads of operands.
constexpr bool kDotByPairs = HWY_TARGET != HWY_AVX3_DL;
constexpr int64_t plane_step(int64_t quads) { return kDotByPairs ? 1 : quads; }
constexpr int64_t quad_step(RowInts ints) { return kDotByPairs && !is_short(ints) ? 2 : 1; }

// Splits a row of `count` integers, a multiple of 32, into at most operand_words(count) words.
HWY_INLINE void make_operands(const int32_t* HWY_RESTRICT x, int64_t count, RowInts ints, uint32_t* HWY_RESTRICT operands) {
#if WEFT_EMULATED
  static_cast<void>(ints);
  for (int64_t i = 0; i < count; i += 4)
    for (int64_t p = 0; p < 2; ++p)
      operands[i / 2 + p] = static_cast<uint32_t>(x[i + p] & 0xffff) | static_cast<uint32_t>(x[i + 2 + p] & 0xffff) << 16;
#elif HWY_TARGET == HWY_AVX3_DL
  // vpackss works inside 128-bit blocks; this restores the order of 4-byte groups.
  alignas(64) static constexpr int32_t kUnblock[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  const __m512i unblock = _mm512_load_si512(kUnblock), low_bits = _mm512_set1_epi16(127);
  auto* bytes = reinterpret_cast<uint8_t*>(operands);
  for (int64_t i = 0; i < count; i += 64) {
    const int64_t half = count - i >= 64 ? 32 : 0;  // of the last 32, the second half is a copy and not stored
    const __m512i a = _mm512_packs_epi32(_mm512_loadu_si512(x + i), _mm512_loadu_si512(x + i + 16));
    const __m512i b = _mm512_packs_epi32(_mm512_loadu_si512(x + i + half), _mm512_loadu_si512(x + i + half + 16));
    const __mmask16 stored = half ? 0xffff : 0xff;
    const auto store = [&](uint8_t* to, __m512i even, __m512i odd) HWY_ATTR {
      _mm512_mask_storeu_epi32(to, stored, _mm512_permutexvar_epi32(unblock, _mm512_packs_epi16(even, odd)));
    };
    if (ints == RowInts::bytes) {
      store(bytes + i, a, b);
    } else {
      store(bytes + i, _mm512_srai_epi16(a, 7), _mm512_srai_epi16(b, 7));
      store(bytes + count + i, _mm512_and_si512(a, low_bits), _mm512_and_si512(b, low_bits));
    }
  }
#else
  const I32 d;
  if (is_short(ints)) {
    const hn::RebindToUnsigned<I32> du;
    const hn::Rebind<uint8_t, I32> d8;
    auto* bytes = reinterpret_cast<uint8_t*>(operands);
    for (int64_t i = 0; i < count; i += kLanes) hn::StoreU(hn::TruncateTo(d8, hn::BitCast(du, hn::LoadU(d, x + i))), d8, bytes + i);
    return;
  }
  const hn::Rebind<int16_t, I32> d16;
  auto* pairs = reinterpret_cast<int16_t*>(operands);
  for (int64_t i = 0; i < count; i += kLanes) {
    const auto v = hn::LoadU(d, x + i);
    hn::StoreU(hn::DemoteTo(d16, hn::InterleaveLower(d, v, hn::Shuffle1032(v))), d16, pairs + i);  // x0 x2 x1 x3
  }
#endif
}

// ---- sums: DotSum<kInts> accumulates one row and one vector of lanes

#if HWY_TARGET == HWY_AVX3_DL

template <RowInts kInts>
struct DotSum {
  static constexpr int kPlanes = kInts == RowInts::wide ? 2 : 1;
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
template <int kPlane, RowInts kInts>
HWY_INLINE void add_dots(DotSum<kInts>& sum, const DotColumn& column, uint32_t operand) {
  // Not an intrinsic: GCC would copy every sum in every iteration, and Highway's attributes of this target lack VNNI.
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.plane[kPlane].raw) : "v"(column.raw), "v"(_mm512_set1_epi32(static_cast<int>(operand))));
}
// Sums and columns fit 32 registers.
constexpr int dot_vectors(int rows, RowInts ints) { return rows * (ints == RowInts::wide ? 2 : 1) <= 4 ? 4 : 2; }

#elif WEFT_EMULATED

template <RowInts kInts>
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
template <int kPlane, RowInts kInts>
HWY_INLINE void add_dots(DotSum<kInts>& sum, const DotColumn& column, uint32_t operand) {
  const auto low = static_cast<int16_t>(operand & 0xffff), high = static_cast<int16_t>(operand >> 16);
  for (int64_t l = 0; l < kDotLanes; ++l) sum.lane[l] += column.byte[4 * l + kPlane] * low + column.byte[4 * l + 2 + kPlane] * high;
}
constexpr int dot_vectors(int, RowInts) { return 1; }

#else

using I16 = hn::ScalableTag<int16_t>;

// Even (plane 0) or odd (plane 1) bytes as 16-bit integers.
using DotColumn = hn::Vec<I16>;
template <int kPlane>
HWY_INLINE DotColumn dot_column(ByteVector v) {
  const hn::RebindToUnsigned<I16> du;
  const auto both = hn::BitCast(du, v);
  return hn::BitCast(I16(), kPlane == 0 ? hn::And(both, hn::Set(du, uint16_t{255})) : hn::ShiftRight<8>(both));
}

#if HWY_ARCH_ARM
// One sum per 16-bit product: store() adds the two sums of each lane.
template <RowInts kInts>
struct DotSum {
  int32x4_t low, high;
  HWY_INLINE void clear() { low = high = vdupq_n_s32(0); }
  HWY_INLINE void store(int32_t bias, int32_t* out) const { vst1q_s32(out, vsubq_s32(vpaddq_s32(low, high), vdupq_n_s32(bias))); }
};
template <int kPlane, RowInts kInts>
HWY_INLINE void add_dots(DotSum<kInts>& sum, const DotColumn& column, uint32_t operand) {
  const int16x8_t pairs = column.raw, x = vreinterpretq_s16_u32(vdupq_n_u32(operand));
  sum.low = vmlal_s16(sum.low, vget_low_s16(pairs), vget_low_s16(x));
  sum.high = vmlal_high_s16(sum.high, pairs, x);
}
#else
template <RowInts kInts>
struct DotSum {
  hn::Vec<I32> lanes;
  HWY_INLINE void clear() { lanes = hn::Zero(I32()); }
  HWY_INLINE void store(int32_t bias, int32_t* out) const { hn::StoreU(hn::Sub(lanes, hn::Set(I32(), bias)), I32(), out); }
};
template <int kPlane, RowInts kInts>
HWY_INLINE void add_dots(DotSum<kInts>& sum, const DotColumn& column, uint32_t operand) {
  const auto x = hn::BitCast(I16(), hn::Set(hn::RebindToUnsigned<I32>(), operand));
  // Not intrinsics: GCC would keep more products live than there are registers.
  hn::Vec<I32> products;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sum.lanes.raw), "=&v"(products.raw) : "v"(column.raw), "v"(x.raw));
}

// Short sums of one quad of RowInts::bytes, and of two quads of RowInts::weights.
HWY_INLINE void add_short_dots(DotSum<RowInts::bytes>& sum, ByteVector bytes, uint32_t operand) {
  const auto x = hn::Set(hn::RebindToUnsigned<I32>(), operand);
  hn::Vec<I32> products;
  asm("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"
      : "+v"(sum.lanes.raw), "=&v"(products.raw)
      : "v"(bytes.raw), "v"(x.raw), "v"(hn::Set(I16(), int16_t{1}).raw));
}
HWY_INLINE void add_short_dots(DotSum<RowInts::weights>& sum, ByteVector first, ByteVector second, const uint32_t* operands) {
  hn::Vec<I32> x, y;
  asm("vpbroadcastd %5, %1\n\tvpbroadcastd %6, %2\n\t"
      "vpmaddubsw %3, %1, %1\n\tvpmaddubsw %4, %2, %2\n\tvpaddw %2, %1, %1\n\tvpmaddwd %7, %1, %1\n\tvpaddd %1, %0, %0"
      : "+v"(sum.lanes.raw), "=&v"(x.raw), "=&v"(y.raw)
      : "v"(first.raw), "v"(second.raw), "m"(operands[0]), "m"(operands[1]), "v"(hn::Set(I16(), int16_t{1}).raw));
}
#endif  // HWY_ARCH_ARM
constexpr int dot_vectors(int rows, RowInts) { return HWY_TARGET == HWY_AVX3 || rows == 1 ? 4 : 2; }

#endif

// ---- the product

// Prefetches the lines of a block of bytes, the same number in every iteration of a loop. More at once would fill the processor's
// miss buffers and stall it. Lines left over by the division are prefetched first. Without a block, each iteration prefetches the
// same line again, so that one loop serves both cases.
class Prefetcher {
 public:
  HWY_INLINE Prefetcher(const ByteDots& p, int64_t iterations)
      : next_(p.prefetch ? p.prefetch : p.bytes), lines_(1), stride_(p.prefetch ? kLine : 0) {
    if (!p.prefetch || iterations == 0) return;
    lines_ = p.prefetch_bytes / (kLine * iterations);
    for (int64_t at = lines_ * iterations * kLine; at < p.prefetch_bytes; at += kLine) prefetch_line(next_ + at);
  }
  HWY_INLINE void advance() {
    for (int64_t i = 0; i < lines_; ++i, next_ += stride_) prefetch_line(next_);
  }

 private:
  static constexpr int64_t kLine = 64;
  const uint8_t* next_;
  int64_t lines_, stride_;
};

template <int kPlane, int kRows, int kVectors, RowInts kInts>
HWY_INLINE void add_plane(DotSum<kInts> (&sum)[kRows][kVectors], const ByteVector (&bytes)[kVectors], const uint32_t* x,
                          int64_t row_words) {
  DotColumn column[kVectors];
  WEFT_UNROLL for (int v = 0; v < kVectors; ++v) column[v] = dot_column<kPlane>(bytes[v]);
  WEFT_UNROLL for (int r = 0; r < kRows; ++r) {
    const uint32_t operand = x[r * row_words];
    WEFT_UNROLL for (int v = 0; v < kVectors; ++v) add_dots<kPlane>(sum[r][v], column[v], operand);
  }
}

template <int kQuad, int kRows, int kVectors, RowInts kInts, class Source>
HWY_INLINE void add_quad(DotSum<kInts> (&sum)[kRows][kVectors], const Source& source, const uint8_t* from, const uint32_t* x,
                         int64_t row_words, int64_t second) {
  x += kQuad * quad_step(kInts);
  ByteVector bytes[kVectors];
  WEFT_UNROLL for (int v = 0; v < kVectors; ++v) bytes[v] = source.template get<kQuad>(from + v * 4 * kDotLanes);
  if constexpr (is_short(kInts)) {
    WEFT_UNROLL for (int r = 0; r < kRows; ++r) WEFT_UNROLL for (int v = 0; v < kVectors; ++v)
        add_short_dots(sum[r][v], bytes[v], x[r * row_words]);
  } else {
    add_plane<0>(sum, bytes, x, row_words);
    if constexpr (kDotByPairs || kInts == RowInts::wide) add_plane<1>(sum, bytes, x + second, row_words);
  }
}

// Adds quads kQuad and kQuad + 1.
template <int kQuad, int kRows, int kVectors, RowInts kInts, class Source>
HWY_INLINE void add_quads(DotSum<kInts> (&sum)[kRows][kVectors], const Source& source, const uint8_t* from, const uint32_t* x,
                          int64_t row_words, int64_t second) {
  if constexpr (kInts == RowInts::weights) {  // vector by vector: AVX2 has 16 registers
    WEFT_UNROLL for (int v = 0; v < kVectors; ++v) {
      const auto first = source.template get<kQuad>(from + v * 4 * kDotLanes);
      const auto next = source.template get<kQuad + 1>(from + v * 4 * kDotLanes);
      WEFT_UNROLL for (int r = 0; r < kRows; ++r) add_short_dots(sum[r][v], first, next, x + kQuad + r * row_words);
    }
  } else {
    add_quad<kQuad>(sum, source, from, x, row_words, second);
    add_quad<kQuad + 1>(sum, source, from, x, row_words, second);
  }
}

template <int kRows, int kVectors, RowInts kInts, class Source>
HWY_INLINE void dot_block(const ByteDots& p, const Source& source, int64_t lane, const uint32_t* HWY_RESTRICT operands,
                          const int32_t* sums, int32_t* HWY_RESTRICT out, Prefetcher& prefetcher) {
  DotSum<kInts> sum[kRows][kVectors];
  WEFT_UNROLL for (int r = 0; r < kRows; ++r) WEFT_UNROLL for (int v = 0; v < kVectors; ++v) sum[r][v].clear();
  const int64_t second = plane_step(p.quads);
  const uint32_t* x = operands;
  const uint8_t* from = source.bytes + 4 * lane;
  for (int64_t c = 0; c < p.quads; c += Source::kQuads) {
    prefetcher.advance();
    add_quads<0>(sum, source, from, x, p.row_words, second);
    if constexpr (Source::kQuads == 4) add_quads<2>(sum, source, from, x, p.row_words, second);
    x += Source::kQuads * quad_step(kInts);
    from += source.iteration_bytes();
  }
  constexpr uint32_t kOffset = kInts == RowInts::weights ? 0 : 128;  // offset of the bytes that were multiplied
  WEFT_UNROLL for (int r = 0; r < kRows; ++r) WEFT_UNROLL for (int v = 0; v < kVectors; ++v) sum[r][v].store(
      static_cast<int32_t>(kOffset * static_cast<uint32_t>(sums[r])), out + r * p.out_stride + lane + v * kDotLanes);
}

// Not inlined: in one function for all kinds of product, the loops would compete for registers.
template <RowInts kInts, int kRows, class Source>
HWY_NOINLINE void dot_lanes(const ByteDots& p, const uint32_t* operands, const int32_t* sums, int32_t* out) {
  const Source source(p);
  constexpr int kVectors = dot_vectors(kRows, kInts);
  Prefetcher prefetcher(p, p.quads / Source::kQuads * (p.lanes / (kVectors * kDotLanes)));
  int64_t lane = 0;
  for (; lane + kVectors * kDotLanes <= p.lanes; lane += kVectors * kDotLanes)
    dot_block<kRows, kVectors, kInts>(p, source, lane, operands, sums, out, prefetcher);
  for (; lane < p.lanes; lane += kDotLanes) dot_block<kRows, 1, kInts>(p, source, lane, operands, sums, out, prefetcher);
}

template <RowInts kInts, class Source>
HWY_INLINE void dot_rows(const ByteDots& p, const uint32_t* operands, const int32_t* sums, int64_t rows, int32_t* out) {
  switch (rows) {
    case 1: return dot_lanes<kInts, 1, Source>(p, operands, sums, out);
    case 2: return dot_lanes<kInts, 2, Source>(p, operands, sums, out);
    case 3: return dot_lanes<kInts, 3, Source>(p, operands, sums, out);
    default: return dot_lanes<kInts, 4, Source>(p, operands, sums, out);
  }
}

template <class Source>
HWY_INLINE void dot_ints(const ByteDots& p, const uint32_t* operands, const int32_t* sums, int64_t rows, int32_t* out) {
#if WEFT_SHORT_SUMS
  if (p.ints == RowInts::weights) return dot_rows<RowInts::weights, SignedSource<Source>>(p, operands, sums, rows, out);
#endif
  if constexpr (!kDotByPairs || kShortSums)
    if (p.ints == RowInts::bytes) return dot_rows<RowInts::bytes, Source>(p, operands, sums, rows, out);
  dot_rows<RowInts::wide, Source>(p, operands, sums, rows, out);
}

// Dot products of up to kDotRows rows of operands with one block of bytes. sums[r] is the sum of the integers of row r.
HWY_INLINE void byte_dots(const ByteDots& p, const uint32_t* operands, const int32_t* sums, int64_t rows, int32_t* out) {
  switch (p.bits) {
    case 2: return dot_ints<CodeSource<2>>(p, operands, sums, rows, out);
    case 4: return dot_ints<CodeSource<4>>(p, operands, sums, rows, out);
    default: return dot_ints<ByteSource>(p, operands, sums, rows, out);
  }
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
