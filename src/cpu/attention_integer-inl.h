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

#include <utility>

#include "cpu/attention_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

// ---- codes to bytes

// Eight quads of packed indices are what a vector of the plane of single bits holds.
constexpr int64_t kOctet = 8;

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

// Codes of quad kQuad8 of an octet from the vectors of its planes, low bits in the widest plane.
template <int kBits, int kQuad8, bool kDirty>
HWY_INLINE ByteVector octet_codes(const ByteVector* four, const ByteVector* two, const ByteVector* one) {
  ByteVector codes = hn::Zero(U8());
  // Where a table ignores high bits, a single plane needs no mask.
  constexpr bool kKeep = kDirty && (kBits == 4 || kBits == 2);
  if constexpr (kBits & 4) codes = move_bits<kQuad8 % 2 * 4, 0, kKeep ? 8 : 4>(four[kQuad8 / 2]);
  if constexpr (kBits & 2) {
    const auto field = move_bits<kQuad8 % 4 * 2, kBits & 4, kKeep ? 8 : 2>(two[kQuad8 / 4]);
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
  for (int p = 0; p < planes.count; ++p) plane[planes.plane[p].width == 4 ? 0 : planes.plane[p].width == 2 ? 1 : 2] = tile + planes.plane[p].offset;
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

struct TileBytes {
  const uint8_t* bytes;
  int64_t lanes, quads;
};

// The levels of a tile as bytes, in `buffer` or, where its codes are such bytes, in the tile itself.
HWY_NOINLINE TileBytes tile_levels(const SideView& side, const LevelBytes& levels, const uint8_t* tile, uint8_t* buffer) {
  const bool keys = side.role == KvRole::k;
  const int64_t lanes = keys ? kTileTokens : side.D, quads = (keys ? side.D : kTileTokens) / 4;
  const int bits = side.format->bits;
  if (bits == 8) return {tile, lanes, quads};
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
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
  const auto expand = [&](auto count, const auto& table) HWY_ATTR {
    expand_planes<decltype(count)::value>(side.planes, tile, quads, 4 * lanes, table, buffer);
  };
  switch (bits) {
    case 2: expand(std::integral_constant<int, 2>(), ByteTable<2>(levels.of_code)); break;
    case 3: expand(std::integral_constant<int, 3>(), ByteTable<3>(levels.of_code)); break;
    case 4: expand(std::integral_constant<int, 4>(), ByteTable<4>(levels.of_code)); break;
    case 5: expand(std::integral_constant<int, 5>(), ByteTable<5>(levels.of_code)); break;
    case 6: expand(std::integral_constant<int, 6>(), ByteTable<6>(levels.of_code)); break;
    default: expand(std::integral_constant<int, 7>(), ShiftedCodes()); break;
  }
#endif
  return {buffer, lanes, quads};
}

// ---- a tile

HWY_INLINE void load_gains(const SideView& side, const uint8_t* tile, float* gains) {
  unpack_row(side.format->gain_dtype, tile + side.planes.bytes, 0, kTileTokens, gains);
  if (side.gain_factor != 1) scale_vectors(gains, kTileTokens, side.gain_factor);
}

// Scores of a row from its sums; those of slots without a token are anything.
HWY_INLINE void integer_scores(const AttentionCall& call, const AttentionRows& rows, int64_t r, const int32_t* HWY_RESTRICT sums,
                               const float* HWY_RESTRICT gains, float* HWY_RESTRICT s) {
  const F32 d;
  const VF half = hn::Set(d, rows.half[r]), unit = hn::Set(d, rows.unit[r]), mean = hn::Set(d, rows.mean[r]);
  WEFT_UNROLL for (int64_t i = 0; i < kTileTokens; i += kLanes) {
    VF score = hn::Mul(hn::Add(hn::ConvertTo(d, hn::LoadU(I32(), sums + i)), half), unit);
    score = hn::Add(hn::Mul(score, hn::LoadU(d, gains + i)), mean);
    hn::Store(shape_score(call.mask, score), d, s + i);
  }
}

// Weights p of a row times V's gains, as integers.
HWY_INLINE void integer_weights(const AttentionCall& call, AttentionRows& rows, int64_t r, SlotRange slots, float* HWY_RESTRICT p,
                                const float* HWY_RESTRICT gains, float gain_poison, int32_t* HWY_RESTRICT integers,
                                uint32_t* HWY_RESTRICT operands) {
  const F32 d;
  VF top = hn::Zero(d);
  WEFT_UNROLL for (int64_t i = 0; i < kTileTokens; i += kLanes) {
    const VF w = hn::Mul(hn::Load(d, p + i), hn::LoadU(d, gains + i));
    hn::Store(w, d, p + i);
    top = hn::Max(top, hn::Abs(w));
  }
  float poison = 0, largest_weight = hn::GetLane(hn::MaxOfLanes(d, top));
  if (gain_poison != 0) {  // some gain of the tile is not finite: is it of a token that the row sees?
    fill_outside(p, slots, 0);
    poison = poison_of(p, kTileTokens);
    largest_weight = largest(p, kTileTokens);
  }
  const float unit = to_integers(p, kTileTokens, largest_weight, operand_max(call.planes), integers, rows.w_sum[r]);
  rows.w_unit[r] = (unit + poison) * call.v_levels.step;
  make_operands(integers, kTileTokens, call.planes, operands);
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

// Enters the tokens of a tile into the block of every row.
inline void integer_tile(const AttentionCall& call, const TokenTile& tile, const uint8_t* k_tile, const uint8_t* v_tile,
                         int64_t count, AttentionMemory& m) {
  AttentionRows& rows = *m.rows;
  const int64_t Dv = call.Dv, o_stride = buffer_dim(Dv);
  HWY_ALIGN float gains[kTileTokens];
  HWY_ALIGN float v_gains[kTileTokens];
  SlotRange slots[kRowBlock];
  for (int64_t r = 0; r < count; ++r) slots[r] = visible_slots(tile, rows.first[r], rows.end[r]);
  const auto blind = [&](int64_t g, int64_t n) HWY_ATTR {
    for (int64_t r = g; r < g + n; ++r)
      if (!slots[r].empty()) return false;
    return true;
  };

  load_gains(call.k, k_tile, gains);
  load_gains(call.v, v_tile, v_gains);
  const float gain_poison = poison_of(v_gains, kTileTokens);
  const TileBytes k = tile_levels(call.k, call.k_levels, k_tile, m.levels);
  const ByteDots k_dots{k.bytes, k.lanes, k.quads, call.planes, operand_words(call.Dk), kTileTokens};
  for (int64_t g = 0; g < count; g += kDotRows) {
    const int64_t n = std::min(count - g, kDotRows);
    if (blind(g, n)) continue;
    byte_dots(k_dots, m.q_operands + g * operand_words(call.Dk), rows.q_sum + g, n, m.dots);
    for (int64_t r = g; r < g + n; ++r) {
      uint32_t* operands = m.w_operands + r * operand_words(kTileTokens);
      if (slots[r].empty()) {
        rows.w_unit[r] = 0;
        rows.w_sum[r] = 0;
        std::fill_n(operands, operand_words(kTileTokens), 0u);
        continue;
      }
      int32_t* sums = m.dots + (r - g) * kTileTokens;
      integer_scores(call, rows, r, sums, gains, m.s);
      softmax_step(rows, r, slots[r], m.s, m.block_o + r * o_stride, Dv);
      integer_weights(call, rows, r, slots[r], m.s, v_gains, gain_poison, sums, operands);
    }
  }
  const TileBytes v = tile_levels(call.v, call.v_levels, v_tile, m.levels);
  const ByteDots v_dots{v.bytes, v.lanes, v.quads, call.planes, operand_words(kTileTokens), Dv};
  for (int64_t g = 0; g < count; g += kDotRows) {
    const int64_t n = std::min(count - g, kDotRows);
    if (blind(g, n)) continue;
    byte_dots(v_dots, m.w_operands + g * operand_words(kTileTokens), rows.w_sum + g, n, m.dots);
    for (int64_t r = g; r < g + n; ++r) add_values(rows, r, m.dots + (r - g) * Dv, m.block_o + r * o_stride, Dv);
  }
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
