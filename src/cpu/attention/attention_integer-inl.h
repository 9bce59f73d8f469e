// Attention in integers on lane tiles: codes become bytes, and both products are byte dot products.
// Included once per target, after foreach_target.h.
//
// With levels (n + 1/2) step, a query q ~ unit x and weights w_t = p_t gain_t ~ unit' y_t (x, y integers):
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

// Eight quads of packed indices are what a vector of the plane of single bits holds.
constexpr int64_t kOctet = 8;

#if !WEFT_EMULATED

// Codes of quad kQuad8 of an octet from the vectors of its planes, low bits in the widest plane.
template <int kBits, int kQuad8, bool kDirty>
HWY_INLINE ByteVector octet_codes(const ByteVector* four, const ByteVector* two, const ByteVector* one) {
  // Where a table ignores high bits, a single plane needs no mask.
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

// A tile's codes as bytes: bytes[quad][lane][4].
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

// Codes of 7 bits: neighbouring levels, n = code - 64.
struct ShiftedCodes {
  static constexpr bool kIgnoresHighBits = false;
  HWY_INLINE ByteVector operator()(ByteVector codes) const { return hn::Add(codes, hn::Set(U8(), uint8_t{64})); }
};

#endif

// Up to so many rows, codes of 4 and 2 bits are looked up on their way into the product; beyond, a tile's levels are worth a buffer.
constexpr int64_t kFusedRows = 4 * kDotRows;

// The levels of a tile of less than 8 bits as bytes.
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

// Scores of a row from its sums, not capped; those of slots without a token are anything.
HWY_INLINE void integer_scores(const AttentionRows& rows, int64_t r, const int32_t* HWY_RESTRICT sums,
                               const float* HWY_RESTRICT gains, float* HWY_RESTRICT s) {
  const F32 d;
  const VF half = hn::Set(d, rows.half[r]), unit = hn::Set(d, rows.unit[r]), mean = hn::Set(d, rows.mean[r]);
  WEFT_TILE_UNROLL for (int64_t i = 0; i < kTileTokens; i += kLanes) {
    VF score = hn::Mul(hn::Add(hn::ConvertTo(d, hn::LoadU(I32(), sums + i)), half), unit);
    score = hn::Add(hn::Mul(score, hn::LoadU(d, gains + i)), mean);
    hn::Store(score, d, s + i);
  }
}

// Are all gains of a tile finite, and none negative? (Only short sums mind negative ones; the others may ask in vain.)
HWY_INLINE bool plain_gains(const float* gains) {
  const hn::RebindToUnsigned<F32> d;
  constexpr uint32_t kInfinity = 0x7f800000;
  auto top = hn::Zero(d);
  for (int64_t i = 0; i < kTileTokens; i += kLanes) top = hn::Max(top, hn::BitCast(d, hn::Load(F32(), gains + i)));
  return hn::GetLane(hn::MaxOfLanes(d, top)) < kInfinity;
}

// What limits the integers of weights: their magnitudes, for short sums all sums of four that are added in 16 bits.
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

// The largest of a row's weight_sizes, where some weights may not be finite or be negative: short sums take no negative ones.
template <bool kShort>
HWY_INLINE float odd_weights_top(const float* p, RowInts& ints) {
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

// Weights p[kRows, 64] of rows r, r + 1, ... times V's gains, as integers. `plain`: all gains of the tile are.
template <int kRows, bool kShort>
HWY_INLINE void integer_weights(const AttentionCall& call, AttentionRows& rows, int64_t r, float* HWY_RESTRICT p,
                                const float* HWY_RESTRICT gains, bool plain, int32_t* HWY_RESTRICT integers,
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
  if (!plain)  // of tokens that a row sees?
    for (int i = 0; i < kRows; ++i) {
      fill_outside(p + i * kTileTokens, rows.slots[r + i], 0);
      row_top[i] = odd_weights_top<kShort>(p + i * kTileTokens, ints[i]);
    }
  if (kShort)
    for (int i = 0; i < kRows; ++i)
      if (row_top[i] > std::numeric_limits<float>::max()) {  // a sum of four; each of them is finite, or the row has NaN
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
  sum_lanes4(sum, total);              // exact: below 2^24
  constexpr float kMostSum = 0x1p20f;  // reached only by what a NaN leaves, whose row is lost anyway
  WEFT_UNROLL for (int i = 0; i < kRows; ++i) rows.w_sum[r + i] = static_cast<int32_t>(std::clamp(total[i], -kMostSum, kMostSum));
}

// o += unit (sums + half): the sums of a tile.
HWY_INLINE void add_values(const AttentionRows& rows, int64_t r, const int32_t* HWY_RESTRICT sums, float* HWY_RESTRICT o,
                           int64_t Dv) {
  const F32 d;
  const VF half = hn::Set(d, 0.5f * static_cast<float>(rows.w_sum[r])), unit = hn::Set(d, rows.w_unit[r]);
  for (int64_t i = 0; i < Dv; i += kLanes) {
    const VF sum = hn::Add(hn::ConvertTo(d, hn::LoadU(I32(), sums + i)), half);
    hn::Store(hn::MulAdd(sum, unit, hn::Load(d, o + i)), d, o + i);
  }
}

// The end of the rows from r on whose weights are integers of one kind: short sums leave out rows with negative ones.
HWY_INLINE int64_t same_ints(const AttentionRows& rows, int64_t r, int64_t end) {
  if (!kShortSums) return end;
  int64_t next = r + 1;
  while (next < end && rows.w_ints[next] == rows.w_ints[r]) ++next;
  return next;
}

// Bytes of a side's tile, its gains included.
HWY_INLINE int64_t tile_bytes(const SideView& side) { return side.planes.bytes + kTileTokens * side.row_gain_bytes; }

// The product of a side's tile with up to `count` rows.
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

// The two sides of a lane tile; null: there is none.
struct LaneTile {
  const uint8_t* k = nullptr;
  const uint8_t* v = nullptr;
};

// Brings the keys of a tile into the cache before anything else is done.
HWY_INLINE void prefetch_keys(const AttentionCall& call, const LaneTile& tile) {
  for (int64_t i = 0; tile.k && i < tile_bytes(call.k); i += 64) prefetch_line(tile.k + i);
}

// Enters the tokens of a tile into the block of every row. `next` is what will probably be wanted next.
inline void integer_tile(const AttentionCall& call, const TokenTile& tile, const LaneTile& bytes, const LaneTile& next,
                         int64_t count, AttentionMemory& m) {
  AttentionRows& rows = *m.rows;
  const int64_t Dv = call.Dv, o_stride = buffer_dim(Dv);
  HWY_ALIGN float gains[kTileTokens];
  HWY_ALIGN float v_gains[kTileTokens];
  look_at(tile, count, rows);
  load_gains(call.k, bytes.k, gains);
  ByteDots k = tile_dots(call, call.k, call.k_levels, bytes.k, count, m.levels);
  // The product with K brings in V, that with V the next K.
  k.ahead = bytes.v;
  k.ahead_bytes = tile_bytes(call.v);
  bool first = true, plain = true;
  for (int64_t g = 0; g < count; g += kDotRows) {
    const int64_t end = std::min(count, g + kDotRows);
    if (blind(rows, g, end)) continue;
    byte_dots(k, m.q_operands + g * k.row_words, rows.q_sum + g, end - g, m.dots);
    if (first) {
      first = false;
      k.ahead = nullptr;
      load_gains(call.v, bytes.v, v_gains);
      plain = plain_gains(v_gains);
    }
    with_rows(end - g, [&](auto n) HWY_ATTR {
      constexpr int kRows = decltype(n)::value;
      for (int i = 0; i < kRows; ++i) integer_scores(rows, g + i, m.dots + i * kTileTokens, gains, m.s + i * kTileTokens);
      if (call.mask.softcap) cap_scores(*call.mask.softcap, kRows * kTileTokens, m.s);
      softmax_step<kRows>(rows, g, m.s, m.block_o + g * o_stride, Dv);
      uint32_t* operands = m.w_operands + g * operand_words(kTileTokens);
      if (is_short(call.ints))
        integer_weights<kRows, kShortSums>(call, rows, g, m.s, v_gains, plain, m.dots, operands);
      else
        integer_weights<kRows, false>(call, rows, g, m.s, v_gains, plain, m.dots, operands);
    });
  }
  ByteDots v = tile_dots(call, call.v, call.v_levels, bytes.v, count, m.levels);
  v.ahead = next.k;
  v.ahead_bytes = tile_bytes(call.k);
  for (int64_t g = 0; g < count; g += kDotRows) {
    const int64_t end = std::min(count, g + kDotRows);
    if (blind(rows, g, end)) continue;
    for (int64_t r = g, other; r < end; r = other) {
      other = same_ints(rows, r, end);
      if (kShortSums) v.ints = rows.w_ints[r];
      byte_dots(v, m.w_operands + r * v.row_words, rows.w_sum + r, other - r, m.dots);
      v.ahead = nullptr;
      for (int64_t i = r; i < other; ++i) add_values(rows, i, m.dots + (i - r) * Dv, m.block_o + i * o_stride, Dv);
    }
  }
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
