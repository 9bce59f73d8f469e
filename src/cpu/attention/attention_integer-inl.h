// Attention in integer arithmetic on lane tiles: codes become bytes, and both Q K^T and P V are byte dot products.
// Included once per target, after foreach_target.h.
//
// Levels are (n + 1/2) step. A query is q ~ unit x, and weights are w_t = p_t gain_t ~ unit' y_t, with x and y integers:
//   <q, k^> = unit step gain (sum x n + 1/2 sum x),   sum_t w_t v^_t = unit' step (sum y n + 1/2 sum y)
// The sums of x n and y n are exact. All query rows of a tile share its bytes.
#if defined(WEFT_CPU_ATTENTION_INTEGER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_ATTENTION_INTEGER_INL_H_
#undef WEFT_CPU_ATTENTION_INTEGER_INL_H_
#else
#define WEFT_CPU_ATTENTION_INTEGER_INL_H_
#endif

#include <limits>
#include <utility>

#include "cpu/attention/query_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

// ---- codes to bytes

// Eight quads share a byte of the 1-bit plane, so that one vector of it covers eight vectors of codes.
constexpr int64_t kOctet = 8;

#if !WEFT_EMULATED

// Codes of quad kQuad8 of an octet, from the vectors of its planes. Low bits are in the widest plane.
template <int kBits, int kQuad8, bool kDirty>
HWY_INLINE ByteVector octet_codes(const ByteVector* four, const ByteVector* two, const ByteVector* one) {
  // A single plane needs no mask where the table ignores high bits.
  constexpr bool kKeep = kDirty && (kBits == 4 || kBits == 2);
  constexpr int kFourWidth = kKeep ? 8 : 4, kTwoWidth = kKeep ? 8 : 2;
  ByteVector codes = hn::Zero(U8());
  if constexpr (kBits & 4) codes = move_bits<kQuad8 % 2 * 4, 0, kFourWidth>(four[kQuad8 / 2]);
  if constexpr (kBits & 2) {
    const auto field = move_bits<kQuad8 % 4 * 2, kBits & 4, kTwoWidth>(two[kQuad8 / 4]);
    codes = kBits & 4 ? hn::Or(codes, field) : field;
  }
  if constexpr (kBits & 1) codes = hn::Or(codes, move_bits<kQuad8, kBits & 6, 1>(one[0]));
  return codes;
}

// Expands a tile's codes to the bytes of their levels: bytes[quad][lane][4].
template <int kBits, class Levels>
HWY_INLINE void expand_planes(const LanePlanes& planes, const uint8_t* HWY_RESTRICT tile, int64_t quads, int64_t quad_bytes,
                              const Levels& levels, uint8_t* HWY_RESTRICT bytes) {
  const U8 d;
  const uint8_t* plane[3] = {};  // of width 4, 2, 1
  for (int p = 0; p < planes.count; ++p)
    plane[planes.plane[p].width == 4 ? 0 : planes.plane[p].width == 2 ? 1 : 2] = tile + planes.plane[p].offset;
  for (int64_t octet = 0; octet < quads / kOctet; ++octet) {
    for (int64_t b = 0; b < quad_bytes; b += 4 * kDotLanes) {
      ByteVector four[4], two[2], one[1];
      if constexpr (kBits & 4)
        WEFT_UNROLL for (int i = 0; i < 4; ++i) four[i] = hn::Load(d, plane[0] + (4 * octet + i) * quad_bytes + b);
      if constexpr (kBits & 2)
        WEFT_UNROLL for (int i = 0; i < 2; ++i) two[i] = hn::Load(d, plane[1] + (2 * octet + i) * quad_bytes + b);
      if constexpr (kBits & 1) one[0] = hn::Load(d, plane[2] + octet * quad_bytes + b);
      uint8_t* to = bytes + octet * kOctet * quad_bytes + b;
      const auto each = [&]<size_t... i>(std::index_sequence<i...>) {
        (hn::Store(levels(octet_codes<kBits, i, Levels::kIgnoresHighBits>(four, two, one)), d, to + i * quad_bytes), ...);
      };
      each(std::make_index_sequence<kOctet>());
    }
  }
}

// Levels of 7-bit codes are neighbours, n = code - 64: no table is needed.
struct ShiftedCodes {
  static constexpr bool kIgnoresHighBits = false;
  HWY_INLINE ByteVector operator()(ByteVector codes) const { return hn::Add(codes, hn::Set(U8(), uint8_t{64})); }
};

#endif

// Up to this many query rows, codes of 4 and 2 bits are looked up inside the dot product; with more, expanding a tile once pays.
constexpr int64_t kFusedRows = 4 * kDotRows;

// Expands the codes of a tile, of fewer than 8 bits, to the bytes of their levels. Returns `buffer`.
inline HWY_NOINLINE const uint8_t* expand_levels(const SideView& side, const LevelBytes& levels, const uint8_t* tile, int64_t lanes,
                                                 int64_t quads, uint8_t* buffer) {
#if WEFT_EMULATED
  for (int64_t c = 0; c < quads; ++c)
    for (int64_t b = 0; b < 4 * lanes; ++b) {
      int code = 0;
      for (int p = 0; p < side.planes.count; ++p) {
        const LanePlane& plane = side.planes.plane[p];
        const int w = plane.width, field = static_cast<int>(c % (8 / w)) * w;
        code |= (tile[plane.offset + c * w / 8 * 4 * lanes + b] >> field & ((1 << w) - 1)) << plane.shift;
      }
      buffer[c * 4 * lanes + b] = levels.of_code[code];
    }
#else
  const auto expand = [&](auto count, const auto& table)
                          HWY_ATTR { expand_planes<decltype(count)::value>(side.planes, tile, quads, 4 * lanes, table, buffer); };
  switch (side.format->bits) {
    case 2: expand(std::integral_constant<int, 2>(), ByteTable<2>(levels.of_code)); break;
    case 3: expand(std::integral_constant<int, 3>(), ByteTable<3>(levels.of_code)); break;
    case 4: expand(std::integral_constant<int, 4>(), ByteTable<4>(levels.of_code)); break;
    case 5: expand(std::integral_constant<int, 5>(), ByteTable<5>(levels.of_code)); break;
    case 6: expand(std::integral_constant<int, 6>(), ByteTable<6>(levels.of_code)); break;
    default: expand(std::integral_constant<int, 7>(), ShiftedCodes()); break;
  }
#endif
  return buffer;
}

// ---- a tile

HWY_INLINE void load_gains(const SideView& side, const uint8_t* tile, float* gains) {
  unpack_row(side.format->gain_dtype, tile + side.planes.bytes, 0, kTileTokens, gains);
  if (side.gain_factor != 1) scale_vectors(gains, kTileTokens, side.gain_factor);
}

// Scores of a query row from its integer dot products, before softcap. Scores of slots without a token are unspecified.
HWY_INLINE void integer_scores(const QueryRowState& rows, int64_t r, const int32_t* HWY_RESTRICT sums,
                               const float* HWY_RESTRICT gains, float* HWY_RESTRICT s) {
  const F32 d;
  const VF half = hn::Set(d, rows.half[r]), unit = hn::Set(d, rows.unit[r]), mean = hn::Set(d, rows.mean[r]);
  WEFT_TILE_UNROLL for (int64_t i = 0; i < kTileTokens; i += kLanes) {
    VF score = hn::Mul(hn::Add(hn::ConvertTo(d, hn::LoadU(I32(), sums + i)), half), unit);
    score = hn::Add(hn::Mul(score, hn::LoadU(d, gains + i)), mean);
    hn::Store(score, d, s + i);
  }
}

// Are all gains of a tile finite and none negative? (Negative gains matter to short sums alone. On other targets they only cost the
// slower check.)
HWY_INLINE bool finite_nonnegative(const float* gains) {
  const hn::RebindToUnsigned<F32> d;
  constexpr uint32_t kInfinity = 0x7f800000;
  auto top = hn::Zero(d);
  for (int64_t i = 0; i < kTileTokens; i += kLanes) top = hn::Max(top, hn::BitCast(d, hn::Load(F32(), gains + i)));
  return hn::GetLane(hn::MaxOfLanes(d, top)) < kInfinity;
}

// What bounds the scale of integer weights: their magnitudes, or, for short sums, the sums of four that are added in 16 bits.
template <bool kShort>
HWY_INLINE VF weight_sizes(VF w) {
#if WEFT_SHORT_SUMS
  if constexpr (kShort) {
    const VF pairs = hn::Add(w, hn::Shuffle2301(w));
    return hn::Add(pairs, hn::SwapAdjacentBlocks(pairs));
  }
#endif
  return hn::Abs(w);
}

// The largest of a query row's weight_sizes, where weights may be negative or not finite. Short sums allow no negative weights:
// `ints` then becomes wide. NaN if a weight is not finite.
template <bool kShort>
HWY_INLINE float checked_weights_top(const float* p, RowInts& ints) {
  const F32 d;
  VF least = hn::Zero(d), top = hn::Zero(d), size = hn::Zero(d);
  for (int64_t i = 0; i < kTileTokens; i += kLanes) {
    const VF w = hn::Load(d, p + i);
    least = hn::Min(least, w);
    size = hn::Max(size, hn::Abs(w));
    top = hn::Max(top, weight_sizes<kShort>(w));
  }
  const bool negative = kShort && hn::GetLane(hn::MinOfLanes(d, least)) < 0;
  if (negative) ints = RowInts::wide;
  return hn::GetLane(hn::MaxOfLanes(d, negative ? size : top)) + poison_of(p, kTileTokens);
}

// Quantises the softmax weights p[kRows, 64] of query rows [r, r + kRows) times V's gains. safe_gains: finite_nonnegative() holds
// for the tile.
template <int kRows, bool kShort>
HWY_INLINE void integer_weights(const AttentionCall& call, QueryRowState& rows, int64_t r, float* HWY_RESTRICT p,
                                const float* HWY_RESTRICT gains, bool safe_gains, int32_t* HWY_RESTRICT integers,
                                uint32_t* HWY_RESTRICT operands) {
  const F32 d;
  const I32 di;
  VF top[4], sum[4];
  WEFT_UNROLL for (int i = 0; i < 4; ++i) top[i] = sum[i] = hn::Zero(d);
  WEFT_UNROLL for (int i = 0; i < kRows; ++i) {
    float* row = p + i * kTileTokens;
    WEFT_TILE_UNROLL for (int64_t j = 0; j < kTileTokens; j += kLanes) {
      const VF w = hn::Mul(hn::Load(d, row + j), hn::LoadU(d, gains + j));
      hn::Store(w, d, row + j);
      top[i] = hn::Max(top[i], weight_sizes<kShort>(w));
    }
  }
  HWY_ALIGN float row_top[4], factor[4], total[4];
  max_lanes4(top, row_top);
  RowInts ints[kRows];
  WEFT_UNROLL for (int i = 0; i < kRows; ++i) ints[i] = kShort ? RowInts::weights : call.ints;
  if (!safe_gains)  // only gains of visible tokens count
    for (int i = 0; i < kRows; ++i) {
      fill_outside(p + i * kTileTokens, rows.slots[r + i], 0);
      row_top[i] = checked_weights_top<kShort>(p + i * kTileTokens, ints[i]);
    }
  if (kShort)
    for (int i = 0; i < kRows; ++i)
      if (row_top[i] > std::numeric_limits<float>::max()) {  // a sum of four finite weights overflowed
        ints[i] = RowInts::wide;
        row_top[i] = largest(p + i * kTileTokens, kTileTokens);
      }
  WEFT_UNROLL for (int i = 0; i < kRows; ++i) {
    const auto most = static_cast<float>(operand_max(ints[i]));
    if (kShortSums) rows.w_ints[r + i] = ints[i];
    const bool nothing = row_top[i] < kSmallestTop;
    factor[i] = nothing ? 0.0f : most / row_top[i];
    rows.w_unit[r + i] = nothing ? 0.0f : row_top[i] * (1 / most) * call.v_levels.step;
  }
  WEFT_UNROLL for (int i = 0; i < kRows; ++i) {
    const VF by = hn::Set(d, factor[i]);
    auto all = hn::Zero(di);
    WEFT_TILE_UNROLL for (int64_t j = 0; j < kTileTokens; j += kLanes) {
      const VF shifted = hn::MulAdd(hn::Load(d, p + i * kTileTokens + j), by, hn::Set(d, kToInteger));
      const auto w = hn::Sub(hn::BitCast(di, shifted), hn::Set(di, kToIntegerBits));
      all = hn::Add(all, w);
      hn::Store(w, di, integers + i * kTileTokens + j);
    }
    sum[i] = hn::ConvertTo(d, all);
    make_operands(integers + i * kTileTokens, kTileTokens, ints[i], operands + i * operand_words(kTileTokens));
  }
  sum_lanes4(sum, total);              // exact: integers below 2^24
  constexpr float kMostSum = 0x1p20f;  // exceeded only after a NaN, which makes the row's output NaN anyway
  WEFT_UNROLL for (int i = 0; i < kRows; ++i) rows.w_sum[r + i] = static_cast<int32_t>(std::clamp(total[i], -kMostSum, kMostSum));
}

// Adds a tile's integer sums to the output of a query row: o += unit (sums + half).
HWY_INLINE void add_values(const QueryRowState& rows, int64_t r, const int32_t* HWY_RESTRICT sums, float* HWY_RESTRICT o,
                           int64_t Dv) {
  const F32 d;
  const VF half = hn::Set(d, 0.5f * static_cast<float>(rows.w_sum[r])), unit = hn::Set(d, rows.w_unit[r]);
  for (int64_t i = 0; i < Dv; i += kLanes) {
    const VF sum = hn::Add(hn::ConvertTo(d, hn::LoadU(I32(), sums + i)), half);
    hn::Store(hn::MulAdd(sum, unit, hn::Load(d, o + i)), d, o + i);
  }
}

// The end of the query rows, from r on, whose weights are integers of one kind. With short sums, rows of negative weights are wide.
HWY_INLINE int64_t same_ints(const QueryRowState& rows, int64_t r, int64_t end) {
  if (!kShortSums) return end;
  int64_t next = r + 1;
  while (next < end && rows.w_ints[next] == rows.w_ints[r]) ++next;
  return next;
}

// The dot products of a side's tile with up to `count` query rows.
HWY_INLINE ByteDots tile_dots(const AttentionCall& call, const SideView& side, const LevelBytes& levels, const uint8_t* tile,
                              int64_t count, uint8_t* buffer) {
  const bool keys = side.role == KvRole::k;
  ByteDots dots;
  dots.lanes = keys ? kTileTokens : side.D;
  dots.quads = (keys ? side.D : kTileTokens) / 4;
  dots.ints = call.ints;
  dots.row_words = operand_words(4 * dots.quads);
  dots.out_stride = dots.lanes;
  dots.bytes = tile;
  const int bits = side.format->bits;
  if ((bits == 4 || bits == 2) && count <= kFusedRows) {
    dots.bits = bits;
    dots.table = levels.of_code;
  } else if (bits < 8) {
    dots.bytes = expand_levels(side, levels, tile, dots.lanes, dots.quads, buffer);
  }
  return dots;
}

// The two sides of a lane tile; null where there is no tile.
struct LaneTile {
  const uint8_t* k = nullptr;
  const uint8_t* v = nullptr;
};

// Prefetches the keys of a work item's first tile.
HWY_INLINE void prefetch_keys(const AttentionCall& call, const LaneTile& tile) {
  for (int64_t i = 0; tile.k && i < tile_bytes(call.k); i += 64) prefetch_line(tile.k + i);
}

// Online-softmax step: adds the tokens of a tile to the current block of every query row. `next` is the tile to prefetch.
inline void integer_tile(const AttentionCall& call, const TokenTile& tile, const LaneTile& bytes, const LaneTile& next,
                         int64_t count, AttentionBuffers& buffers) {
  QueryRowState& rows = *buffers.rows;
  const int64_t Dv = call.Dv, o_stride = buffer_dim(Dv);
  HWY_ALIGN float gains[kTileTokens];
  HWY_ALIGN float v_gains[kTileTokens];
  find_visible_slots(tile, count, rows);
  load_gains(call.k, bytes.k, gains);
  ByteDots k = tile_dots(call, call.k, call.k_levels, bytes.k, count, buffers.levels);
  // The product with K prefetches V; the product with V prefetches the next K.
  k.prefetch = bytes.v;
  k.prefetch_bytes = tile_bytes(call.v);
  bool first = true, safe_gains = true;
  for (int64_t g = 0; g < count; g += kDotRows) {
    const int64_t end = std::min(count, g + kDotRows);
    if (none_visible(rows, g, end)) continue;
    byte_dots(k, buffers.q_operands + g * k.row_words, rows.q_sum + g, end - g, buffers.dots);
    if (first) {
      first = false;
      k.prefetch = nullptr;
      load_gains(call.v, bytes.v, v_gains);
      safe_gains = finite_nonnegative(v_gains);
    }
    with_rows(end - g, [&](auto n) HWY_ATTR {
      constexpr int kRows = decltype(n)::value;
      for (int i = 0; i < kRows; ++i)
        integer_scores(rows, g + i, buffers.dots + i * kTileTokens, gains, buffers.s + i * kTileTokens);
      if (call.mask.softcap) cap_scores(*call.mask.softcap, kRows * kTileTokens, buffers.s);
      softmax_step<kRows>(rows, g, buffers.s, buffers.block_o + g * o_stride, Dv);
      uint32_t* operands = buffers.w_operands + g * operand_words(kTileTokens);
      if (is_short(call.ints))
        integer_weights<kRows, kShortSums>(call, rows, g, buffers.s, v_gains, safe_gains, buffers.dots, operands);
      else
        integer_weights<kRows, false>(call, rows, g, buffers.s, v_gains, safe_gains, buffers.dots, operands);
    });
  }
  ByteDots v = tile_dots(call, call.v, call.v_levels, bytes.v, count, buffers.levels);
  v.prefetch = next.k;
  v.prefetch_bytes = tile_bytes(call.k);
  for (int64_t g = 0; g < count; g += kDotRows) {
    const int64_t end = std::min(count, g + kDotRows);
    if (none_visible(rows, g, end)) continue;
    for (int64_t r = g, other; r < end; r = other) {
      other = same_ints(rows, r, end);
      if (kShortSums) v.ints = rows.w_ints[r];
      byte_dots(v, buffers.w_operands + r * v.row_words, rows.w_sum + r, other - r, buffers.dots);
      v.prefetch = nullptr;
      for (int64_t i = r; i < other; ++i) add_values(rows, i, buffers.dots + (i - r) * Dv, buffers.block_o + i * o_stride, Dv);
    }
  }
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
