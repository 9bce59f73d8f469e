// Quantisation of kManyRows rows together: search of their codes, and storing them in the cache.
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_KV_QUANTISE_MANY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_KV_QUANTISE_MANY_INL_H_
#undef WEFT_CPU_KV_QUANTISE_MANY_INL_H_
#else
#define WEFT_CPU_KV_QUANTISE_MANY_INL_H_
#endif

#include "cpu/common/prefetch.h"
#include "cpu/kv/kv_encode-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

#if HWY_MAX_BYTES >= 32

// Rows encoded together: the tokens whose codes fill a cache line of a K tile in lanes order. kManyDim is the largest head size
// of this path.
constexpr int64_t kManyRows = 16, kManyDim = 256;

// Tokens whose TLB misses are overlapped.
constexpr int64_t kTlbTokens = 128;

// Prefetches the input rows of all heads of the next kManyRows tokens, a few lines at a time between the steps of the current
// batch, so that memory is busy throughout.
struct RowPrefetcher {
  uintptr_t row;                      // address of the current row; may be past the last token, since prefetches do not fault
  int64_t bytes, head, token, heads;  // bytes of a row; strides in bytes; number of heads
  int64_t at = 0, heads_done = 0;

  HWY_INLINE RowPrefetcher(const EncodePlan& plan, int64_t first_token, int64_t first_head, int64_t head_count)
      : bytes(plan.side.D * dtype_bytes(plan.x.dtype)),
        head(plan.x.head * dtype_bytes(plan.x.dtype)),
        token(plan.x.token * dtype_bytes(plan.x.dtype)),
        heads(head_count) {
    row = reinterpret_cast<uintptr_t>(plan.x.data) + static_cast<uintptr_t>(first_token * token + first_head * head);
  }
  // A token often begins a page, and a TLB miss stalls everything behind it, but page walks overlap. So this prefetches one line of
  // each of the next tokens. Tokens 8 apart come first: a cache line holds 8 page table entries.
  HWY_INLINE void warm_tlb(int64_t tokens) const {
    constexpr int64_t kEntriesPerLine = 8;
    for (int64_t first = 0; first < kEntriesPerLine; ++first)
      for (int64_t t = first; t < tokens; t += kEntriesPerLine) fetch_line(row + static_cast<uintptr_t>(t * token));
  }
  HWY_INLINE void prefetch(int64_t lines) {
    for (; lines > 0; --lines) {
      fetch_line(row + static_cast<uintptr_t>(at));
      at += kCacheLine;
      if (at < bytes) continue;
      at = 0;
      row += static_cast<uintptr_t>(head);
      if (++heads_done < heads) continue;
      heads_done = 0;
      row += static_cast<uintptr_t>(token - heads * head);
    }
  }
  static HWY_INLINE void fetch_line(uintptr_t line) { prefetch_line(reinterpret_cast<const void*>(line)); }
};

// Working set of one batch, which fits in the L1 cache.
struct ManyRows {
  alignas(64) float y[kManyRows * kManyDim];  // [rows, D]
  alignas(64) float yy[kManyRows];
  alignas(64) float inverse[kManyRows];             // z = y * inverse
  alignas(64) VF sums[kManyRows];                   // |y|^2, then <y, c>, one partial sum per lane
  alignas(64) uint8_t codes[kManyRows * kManyDim];  // [rows], a byte per code or packed
};

// Finds the codes of all rows, as bytes in rows.codes, and <y, c>.
template <class Levels>
HWY_NOINLINE void quantise_bytes(const EncodePlan& plan, const Levels& levels, ManyRows& rows, RowPrefetcher& prefetcher) {
  const F32 d;
  const int64_t D = plan.side.D;
  const int64_t lines = prefetcher.bytes / (2 * kCacheLine);
  for (int64_t r = 0; r < kManyRows; ++r) {
    const VF factor = hn::Set(d, rows.inverse[r]);
    VF yc = hn::Zero(d);
    for (int64_t j = 0; j < D; j += 4 * kLanes) {
#if HWY_TARGET == HWY_AVX3_DL
      if constexpr (kOnGrid<Levels>) {
        const float* y = rows.y + r * D + j;
        const __m512i found = levels.find(y, hn::Set(d, rows.inverse[r] * levels.unit));
        yc = hn::Add(yc, levels.products(y, found));
        store_grid_codes(found, rows.codes + r * D + j);
        continue;
      }
#endif
      VI code[4];
      WEFT_UNROLL for (int64_t i = 0; i < 4; ++i) {
        const VF v = hn::Load(d, rows.y + r * D + j + i * kLanes);
        if constexpr (kIsFolded<Levels>) {
          const VF magnitude = hn::Abs(v);
          const VI found = levels.find(hn::Mul(magnitude, factor));
          yc = hn::MulAdd(magnitude, levels.magnitude_of(found), yc);
          code[i] = levels.code_of(found, v);
        } else {
          code[i] = search_codes(plan, levels, hn::Mul(v, factor));
          yc = hn::MulAdd(v, levels.of(code[i]), yc);
        }
      }
      store_codes4(code, rows.codes + r * D + j);
    }
    rows.sums[r] = yc;
    prefetcher.prefetch(lines);
  }
}

#if HWY_TARGET == HWY_AVX3_DL
// Permutation indices of the codes that become low and high nibbles. GridLevels::find() leaves coordinate 16 i + l in byte 4 l + i
// of a register of 64 codes; the indices select from two such registers.
struct NibbleIndices {
  alignas(64) uint8_t low[64], high[64];
};
constexpr NibbleIndices nibble_indices(bool lanes) {
  NibbleIndices indices{};
  for (int i = 0; i < 64; ++i) {
    const int low = lanes ? i / 4 * 8 + i % 4 : 2 * i, high = lanes ? low + 4 : low + 1;
    indices.low[i] = static_cast<uint8_t>(low / 64 * 64 + low % 16 * 4 + low % 64 / 16);
    indices.high[i] = static_cast<uint8_t>(high / 64 * 64 + high % 16 * 4 + high % 64 / 16);
  }
  return indices;
}
inline constexpr NibbleIndices kDenseNibbles = nibble_indices(false), kLaneNibbles = nibble_indices(true);

// Permutations that interleave two vectors: low (high) takes bytes 0 and 1 (2 and 3) of each 32-bit lane, even (odd) the first
// (second) 16 bits.
struct ByteQuads {
  alignas(64) uint8_t low[64], high[64];
  alignas(64) uint16_t even[32], odd[32];
};
constexpr ByteQuads byte_quads() {
  ByteQuads quads{};
  for (int i = 0; i < 64; ++i) {
    quads.low[i] = static_cast<uint8_t>(i % 2 * 64 + i / 4 * 4 + i % 4 / 2);
    quads.high[i] = static_cast<uint8_t>(quads.low[i] + 2);
  }
  for (int i = 0; i < 32; ++i) {
    quads.even[i] = static_cast<uint16_t>(i % 2 * 32 + i / 2 * 2);
    quads.odd[i] = static_cast<uint16_t>(quads.even[i] + 1);
  }
  return quads;
}
inline constexpr ByteQuads kByteQuads = byte_quads();

// Bits of a where mask is 1, else bits of b.
HWY_INLINE __m512i select_bits(__m512i mask, __m512i a, __m512i b) { return _mm512_ternarylogic_epi32(mask, a, b, 0xca); }

// Calls use(r, codes) with the codes of every row, kVectors registers of 64, and computes <y, c> of all rows. A row is a long chain
// of dependent instructions, so the search of one row overlaps the rest of the row before it.
template <int64_t kVectors, class Levels, class Use>
HWY_INLINE void find_codes(const Levels& given, ManyRows& rows, RowPrefetcher& prefetcher, const Use& use) {
  constexpr int64_t kDim = kVectors * kGridVector;
  const Levels levels = given;  // a copy stays in registers
  const int64_t lines = prefetcher.bytes / (2 * kCacheLine);
  const auto find = [&](int64_t r, __m512i* codes) HWY_ATTR {
    const VF factor = hn::Set(F32(), rows.inverse[r] * levels.unit);
    WEFT_UNROLL for (int64_t i = 0; i < kVectors; ++i) codes[i] = levels.find(rows.y + r * kDim + i * kGridVector, factor);
  };
  const auto finish = [&](int64_t r, const __m512i* codes) HWY_ATTR {
    const float* y = rows.y + r * kDim;
    VF yc = levels.products(y, codes[0]);
    WEFT_UNROLL for (int64_t i = 1; i < kVectors; ++i) yc = hn::Add(yc, levels.products(y + i * kGridVector, codes[i]));
    use(r, codes);
    rows.sums[r] = yc;
    prefetcher.prefetch(lines);
  };
  __m512i codes[kVectors];
  find(0, codes);
  for (int64_t r = 0; r + 1 < kManyRows; ++r) {
    __m512i next[kVectors];
    find(r + 1, next);
    finish(r, codes);
    WEFT_UNROLL for (int64_t i = 0; i < kVectors; ++i) codes[i] = next[i];
  }
  finish(kManyRows - 1, codes);
}

// 4-bit codes packed two to a byte, in the order of a dense row or of the 32-bit lanes of a K tile.
template <int64_t kVectors, class Levels>
HWY_NOINLINE void quantise_nibbles(const Levels& levels, const NibbleIndices& indices, ManyRows& rows, RowPrefetcher& prefetcher) {
  const __m512i low = _mm512_load_si512(indices.low), high = _mm512_load_si512(indices.high), low_half = _mm512_set1_epi8(15);
  uint8_t* to = rows.codes;
  find_codes<kVectors>(levels, rows, prefetcher, [&](int64_t, const __m512i* codes) HWY_ATTR {
    WEFT_UNROLL for (int64_t i = 0; i < kVectors; i += 2, to += kGridVector) {
      const __m512i even = _mm512_permutex2var_epi8(codes[i], low, codes[i + 1]),
                    odd = _mm512_permutex2var_epi8(codes[i], high, codes[i + 1]);
      _mm512_store_si512(to, select_bits(low_half, even, _mm512_slli_epi16(odd, 4)));
    }
  });
}

// 4-bit codes into a V tile in lanes order, eight tokens to a vector.
template <int64_t kVectors, class Levels>
HWY_NOINLINE void quantise_values(const Levels& levels, ManyRows& rows, RowPrefetcher& prefetcher, uint8_t* HWY_RESTRICT to) {
  constexpr int64_t D = kVectors * kGridVector;
  find_codes<kVectors>(levels, rows, prefetcher, [&](int64_t r, const __m512i* codes) HWY_ATTR {
    WEFT_UNROLL for (int64_t i = 0; i < kVectors; ++i) _mm512_store_si512(rows.codes + r * D + i * kGridVector, codes[i]);
  });
  const __m512i low_half = _mm512_set1_epi8(15), low = _mm512_load_si512(kByteQuads.low), high = _mm512_load_si512(kByteQuads.high),
                even = _mm512_load_si512(kByteQuads.even), odd = _mm512_load_si512(kByteQuads.odd);
  for (const uint8_t* from = rows.codes; from < rows.codes + kManyRows * D; from += 7 * D)
    for (int64_t j = 0; j < D; j += kGridVector, from += kGridVector, to += 4 * kLaneVectorBytes) {
      __m512i two[4];  // two[i]: tokens i and i + 4
      WEFT_UNROLL for (int64_t i = 0; i < 4; ++i) two[i] =
          select_bits(low_half, _mm512_load_si512(from + i * D), _mm512_slli_epi16(_mm512_load_si512(from + (i + 4) * D), 4));
      // Byte i of vector v becomes byte v of vector i.
      const __m512i a = _mm512_permutex2var_epi8(two[0], low, two[1]), b = _mm512_permutex2var_epi8(two[0], high, two[1]);
      const __m512i c = _mm512_permutex2var_epi8(two[2], low, two[3]), e = _mm512_permutex2var_epi8(two[2], high, two[3]);
      _mm512_store_si512(to, _mm512_permutex2var_epi16(a, even, c));
      _mm512_store_si512(to + kLaneVectorBytes, _mm512_permutex2var_epi16(a, odd, c));
      _mm512_store_si512(to + 2 * kLaneVectorBytes, _mm512_permutex2var_epi16(b, even, e));
      _mm512_store_si512(to + 3 * kLaneVectorBytes, _mm512_permutex2var_epi16(b, odd, e));
    }
}

#endif

#if HWY_MAX_BYTES >= 64

// 4-bit codes into a V tile in lanes order, found by companding, eight tokens at a time.
HWY_NOINLINE void quantise_values(const CompandedLevels<4>& given, int64_t D, ManyRows& rows, RowPrefetcher& prefetcher,
                                  uint8_t* HWY_RESTRICT to) {
  const F32 d;
  const hn::RebindToUnsigned<I32> du;
  const CompandedLevels<4> levels = given;  // a copy stays in registers
  constexpr int64_t kTokens = 8;
  const int64_t lines = prefetcher.bytes / D;
  for (int64_t first = 0; first < kManyRows; first += kTokens) {
    VF yc[kTokens];
    WEFT_UNROLL for (int64_t r = 0; r < kTokens; ++r) yc[r] = hn::Zero(d);
    for (int64_t j = 0; j < D; j += kLanes, to += kLaneVectorBytes) {
      VI word = hn::Zero(I32());
      WEFT_UNROLL for (int64_t nibble = 0; nibble < kTokens; ++nibble) {
        const int64_t r = nibble % 2 * 4 + nibble / 2;
        const VF y = hn::Load(d, rows.y + (first + r) * D + j);
        const VI code = levels.find(hn::Mul(y, hn::Set(d, rows.inverse[first + r])));
        yc[r] = hn::MulAdd(y, levels.of(code), yc[r]);
        word = hn::Or(hn::BitCast(I32(), hn::ShiftRight<4>(hn::BitCast(du, word))), hn::ShiftLeft<28>(code));
      }
      hn::Store(word, I32(), reinterpret_cast<int32_t*>(to));
      prefetcher.prefetch(lines);
    }
    WEFT_UNROLL for (int64_t r = 0; r < kTokens; ++r) rows.sums[first + r] = yc[r];
  }
}

// Transposes words [0, 16) of 16 rows: word w of all rows becomes a vector at to + w * apart.
HWY_NOINLINE void store_transposed(const uint8_t* HWY_RESTRICT rows, int64_t stride, uint8_t* HWY_RESTRICT to, int64_t apart) {
  __m512i a[16], b[16];
  WEFT_UNROLL for (int64_t i = 0; i < 16; ++i) a[i] = _mm512_load_si512(rows + i * stride);
  WEFT_UNROLL for (int64_t i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  WEFT_UNROLL for (int64_t i = 0; i < 16; i += 4) {  // block w / 4 of a[4 (row / 4) + w % 4] holds word w of four rows
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  WEFT_UNROLL for (int64_t w = 0; w < 4; ++w) {
    const __m512i low01 = _mm512_shuffle_i32x4(a[w], a[4 + w], 0x44), low23 = _mm512_shuffle_i32x4(a[8 + w], a[12 + w], 0x44);
    const __m512i high01 = _mm512_shuffle_i32x4(a[w], a[4 + w], 0xee), high23 = _mm512_shuffle_i32x4(a[8 + w], a[12 + w], 0xee);
    _mm512_store_si512(to + w * apart, _mm512_shuffle_i32x4(low01, low23, 0x88));
    _mm512_store_si512(to + (4 + w) * apart, _mm512_shuffle_i32x4(low01, low23, 0xdd));
    _mm512_store_si512(to + (8 + w) * apart, _mm512_shuffle_i32x4(high01, high23, 0x88));
    _mm512_store_si512(to + (12 + w) * apart, _mm512_shuffle_i32x4(high01, high23, 0xdd));
  }
}

// Stores packed rows in a K tile in lanes order, starting at token `token`.
HWY_INLINE void store_keys(const ManyRows& rows, int64_t bytes, uint8_t* tile, int64_t token) {
  constexpr int64_t kApart = kTileTokens / kLaneTokens * kLaneVectorBytes;
  uint8_t* to = tile + token / kLaneTokens * kLaneVectorBytes;
  for (int64_t i = 0; i < bytes; i += 64) store_transposed(rows.codes + i, bytes, to + i / 4 * kApart, kApart);
}

#else

// Stores 4-bit codes in a V tile in lanes order. Tokens i and i + 4 share a byte, and eight tokens fill a 32-bit lane.
HWY_INLINE void store_values(const ManyRows& rows, int64_t D, uint8_t* HWY_RESTRICT to) {
  const hn::ScalableTag<uint8_t> d8;
  const hn::Repartition<uint16_t, decltype(d8)> d16;
  const hn::Repartition<uint32_t, decltype(d8)> d32;
  constexpr int64_t kBytes = 4 * kLanes;
  for (const uint8_t* from = rows.codes; from < rows.codes + kManyRows * D; from += 7 * D)
    for (int64_t j = 0; j < D; j += kBytes, from += kBytes) {
      const auto two = [&](int64_t i) HWY_ATTR {
        const auto high = hn::ShiftLeft<4>(hn::BitCast(d16, hn::Load(d8, from + (i + 4) * D)));
        return hn::Or(hn::Load(d8, from + i * D), hn::BitCast(d8, high));
      };
      const auto two0 = two(0), two1 = two(1), two2 = two(2), two3 = two(3);
      const auto a = hn::BitCast(d16, hn::InterleaveLower(d8, two0, two1)),
                 b = hn::BitCast(d16, hn::InterleaveUpper(d8, two0, two1));
      const auto c = hn::BitCast(d16, hn::InterleaveLower(d8, two2, two3)),
                 e = hn::BitCast(d16, hn::InterleaveUpper(d8, two2, two3));
      const auto q0 = hn::BitCast(d32, hn::InterleaveLower(d16, a, c)), q1 = hn::BitCast(d32, hn::InterleaveUpper(d16, a, c));
      const auto q2 = hn::BitCast(d32, hn::InterleaveLower(d16, b, e)), q3 = hn::BitCast(d32, hn::InterleaveUpper(d16, b, e));
      auto* lanes = reinterpret_cast<uint32_t*>(to);
      hn::Store(hn::ConcatLowerLower(d32, q1, q0), d32, lanes);
      hn::Store(hn::ConcatLowerLower(d32, q3, q2), d32, lanes + kLanes);
      hn::Store(hn::ConcatUpperUpper(d32, q1, q0), d32, lanes + 2 * kLanes);
      hn::Store(hn::ConcatUpperUpper(d32, q3, q2), d32, lanes + 3 * kLanes);
      to += 4 * kBytes;
    }
}

// Transposes words [0, 8) of eight rows: word w of all rows becomes a vector at to + w * apart.
HWY_INLINE void store_transposed(const uint32_t* HWY_RESTRICT rows, int64_t stride, uint8_t* HWY_RESTRICT to, int64_t apart) {
  const hn::ScalableTag<uint32_t> d;
  const hn::Repartition<uint64_t, decltype(d)> d64;
  using V = hn::Vec<decltype(d)>;
  V a[8], b[8];
  WEFT_UNROLL for (int64_t i = 0; i < 8; ++i) a[i] = hn::Load(d, rows + i * stride);
  WEFT_UNROLL for (int64_t i = 0; i < 8; i += 2) {
    b[i] = hn::InterleaveLower(d, a[i], a[i + 1]);
    b[i + 1] = hn::InterleaveUpper(d, a[i], a[i + 1]);
  }
  const auto lower = [&](V x, V y)
                         HWY_ATTR { return hn::BitCast(d, hn::InterleaveLower(d64, hn::BitCast(d64, x), hn::BitCast(d64, y))); };
  const auto upper = [&](V x, V y)
                         HWY_ATTR { return hn::BitCast(d, hn::InterleaveUpper(d64, hn::BitCast(d64, x), hn::BitCast(d64, y))); };
  WEFT_UNROLL for (int64_t i = 0; i < 8; i += 4) {  // block w / 4 of a[4 (row / 4) + w % 4] holds word w of four rows
    a[i] = lower(b[i], b[i + 2]);
    a[i + 1] = upper(b[i], b[i + 2]);
    a[i + 2] = lower(b[i + 1], b[i + 3]);
    a[i + 3] = upper(b[i + 1], b[i + 3]);
  }
  WEFT_UNROLL for (int64_t w = 0; w < 4; ++w) {
    hn::Store(hn::ConcatLowerLower(d, a[4 + w], a[w]), d, reinterpret_cast<uint32_t*>(to + w * apart));
    hn::Store(hn::ConcatUpperUpper(d, a[4 + w], a[w]), d, reinterpret_cast<uint32_t*>(to + (4 + w) * apart));
  }
}

// Stores 4-bit codes in a K tile in lanes order, starting at token `token`. A word holds eight coordinates, the first four in the
// low nibbles of its bytes.
HWY_INLINE void store_keys(const ManyRows& rows, int64_t D, uint8_t* tile, int64_t token) {
  const hn::ScalableTag<uint32_t> d32;
  const hn::Repartition<uint64_t, decltype(d32)> d64;
  constexpr int64_t kApart = kTileTokens / kLaneTokens * kLaneVectorBytes, kWords = 8;
  alignas(64) uint32_t words[kManyRows * kWords];
  uint8_t* to = tile + token / kLaneTokens * kLaneVectorBytes;
  for (int64_t j = 0; j < D; j += 8 * kWords, to += kWords * kApart) {
    for (int64_t r = 0; r < kManyRows; ++r) {
      const auto eight = [&](int64_t i) HWY_ATTR {
        const auto codes = hn::Load(d64, reinterpret_cast<const uint64_t*>(rows.codes + r * D + j + i));
        return hn::BitCast(d32, hn::Or(codes, hn::ShiftRight<28>(codes)));
      };
      hn::Store(hn::ConcatEven(d32, eight(4 * kWords), eight(0)), d32, words + r * kWords);
    }
    store_transposed(words, kWords, to, kApart);
    store_transposed(words + kManyRows / 2 * kWords, kWords, to + kLaneVectorBytes / 2, kApart);
  }
}

#endif  // HWY_MAX_BYTES >= 64

#if HWY_TARGET == HWY_AVX3_DL
// quantise_many for codes on a grid, kVectors * 64 a row. Returns false, having done nothing, for a packing it does not support.
template <int64_t kVectors, class Levels>
HWY_INLINE bool quantise_on_grid(const SideView& side, const Levels& levels, const KvLocation& to, int64_t head, ManyRows& rows,
                                 RowPrefetcher& prefetcher) {
  constexpr int64_t kBytes = kVectors * kGridVector / 2;
  const bool in_lanes = side.storage == KvStorage::lane_tiles;
  const int64_t token = to.row % kTileTokens;
  if (in_lanes && side.role == KvRole::v) {
    quantise_values<kVectors>(levels, rows, prefetcher, side.tile(to.block, head, to.row) + token * kBytes);
    return true;
  }
  if constexpr (kVectors % 2 == 0) {
    if (side.format->packing != Packing::dense) return false;
    quantise_nibbles<kVectors>(levels, in_lanes ? kLaneNibbles : kDenseNibbles, rows, prefetcher);
    if (in_lanes) {
      store_keys(rows, kBytes, side.tile(to.block, head, to.row), token);
    } else {
      for (int64_t r = 0; r < kManyRows; ++r)
        std::memcpy(side.codes_at(to.block, head, to.row + r), rows.codes + r * kBytes, kBytes);
    }
    return true;
  }
  return false;
}
#endif

// Finds and stores the codes of all rows, and computes <y, c> for their gains.
template <class Levels>
HWY_INLINE void quantise_many(const EncodePlan& plan, const Levels& levels, const KvLocation& to, int64_t head, ManyRows& rows,
                              RowPrefetcher& prefetcher, CodeWriter& writer) {
  const SideView& side = plan.side;
  const int64_t D = side.D, token = to.row % kTileTokens;
  const bool in_lanes = side.storage == KvStorage::lane_tiles, keys = side.role == KvRole::k;
  uint8_t* tile = in_lanes ? side.tile(to.block, head, to.row) : nullptr;
#if HWY_TARGET == HWY_AVX3_DL
  if constexpr (kOnGrid<Levels>) {
    const bool done = D == 64    ? quantise_on_grid<1>(side, levels, to, head, rows, prefetcher)
                      : D == 128 ? quantise_on_grid<2>(side, levels, to, head, rows, prefetcher)
                                 : quantise_on_grid<4>(side, levels, to, head, rows, prefetcher);
    if (done) return;
  }
#endif
#if HWY_MAX_BYTES >= 64
  if constexpr (std::is_same_v<Levels, CompandedLevels<4>>)
    if (in_lanes && !keys) return quantise_values(levels, D, rows, prefetcher, tile + token / 2 * D);
#endif
  quantise_bytes(plan, levels, rows, prefetcher);
#if HWY_MAX_BYTES >= 64
  if (Levels::kBits == 8 && in_lanes && keys) return store_keys(rows, D, tile, token);
#else
  if (Levels::kBits == 4 && in_lanes) return keys ? store_keys(rows, D, tile, token) : store_values(rows, D, tile + token / 2 * D);
#endif
  for (int64_t r = 0; r < kManyRows; ++r) writer.put(to.block, head, to.row + r, rows.codes + r * D);
}

#endif  // HWY_MAX_BYTES >= 32

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
