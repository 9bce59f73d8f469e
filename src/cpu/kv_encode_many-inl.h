// Encoding tokens: runs of 16 tokens of a head together in vectors of 512 bits, all others row by row. Both give the same bytes.
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_KV_ENCODE_MANY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_KV_ENCODE_MANY_INL_H_
#undef WEFT_CPU_KV_ENCODE_MANY_INL_H_
#else
#define WEFT_CPU_KV_ENCODE_MANY_INL_H_
#endif

#include "cpu/kv_encode-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

#if HWY_MAX_BYTES >= 64

// Rows that are encoded together: the tokens whose codes fill a line of a K tile, one for every lane of a vector of gains.
constexpr int64_t kManyRows = 16, kManyDim = 256;

// Rows of the next batch, on their way into the second-level cache: in the first they would push each other out, a token apart. Lines
// are asked for a few at a time, between the steps of all that is done with a batch: memory is busy throughout.
struct UpcomingRows {
  const uint8_t* row;
  int64_t stride, bytes, at = 0;
  HWY_INLINE void fetch(int64_t lines) {
    for (; lines > 0; --lines) {
      _mm_prefetch(reinterpret_cast<const char*>(row + at), _MM_HINT_T1);
      at += kCacheLine;
      if (at < bytes) continue;
      at = 0;
      row += stride;
    }
  }
};

// Brings in the lines that a batch will write, long before it does: stores wait for one line after another.
HWY_INLINE void fetch_destination(const SideView& side, const KvLocation& to, int64_t head) {
  if (side.storage != KvStorage::lane_tiles) {
    for (int64_t r = 0; r < kManyRows; ++r) {
      const uint8_t* row = side.codes_at(to.block, head, to.row + r);
      for (int64_t i = 0; i < side.row_code_bytes; i += kCacheLine) hwy::Prefetch(row + i);
    }
    return;
  }
  const int64_t token = to.row % kTileTokens, lines = side.row_code_bytes / 4;  // of kManyRows tokens
  const bool keys = side.role == KvRole::k;
  const uint8_t* first =
      side.tile(to.block, head, to.row) + (keys ? token / kLaneTokens * kCacheLine : token * side.row_code_bytes);
  for (int64_t i = 0; i < lines; ++i) hwy::Prefetch(first + i * (keys ? kTileTokens / kLaneTokens : 1) * kCacheLine);
}

// What one batch works on, in the first-level cache.
struct ManyRows {
  alignas(64) float y[kManyRows * kManyDim];  // rows of D
  alignas(64) float yy[kManyRows], yc[kManyRows];
  alignas(64) float inverse[kManyRows];             // z = y * inverse
  alignas(64) VF sums[kManyRows];                   // |y|^2, then <y, c>, by lanes
  alignas(64) uint8_t codes[kManyRows * kManyDim];  // rows of bytes, or of packed codes
};

HWY_INLINE void join_sums(const ManyRows& rows, float* out) {
  for (int64_t first = 0; first < kManyRows; first += 4) sum_lanes4(rows.sums + first, out + first);
}

// ---- rotation

// y = R (x - mean) and |y|^2 by lanes, in the order of load_rotated and sum_squares.
template <int64_t kVectors, class Load>
HWY_NOINLINE void rotate_many(const EncodePlan& plan, int64_t token, int64_t head, const Load& load, ManyRows& rows,
                              UpcomingRows& upcoming) {
  const F32 d;
  const float* mean = plan.mean.of(head);
  const int64_t lines = upcoming.bytes / (2 * kCacheLine);
  for (int64_t r = 0; r < kManyRows; ++r) {
    const int64_t x = plan.x.at(token + r, head);
    VF v[kVectors], sum[4];
    WEFT_UNROLL for (int64_t i = 0; i < kVectors; ++i) v[i] = load(x + i * kLanes);
    if (mean) WEFT_UNROLL for (int64_t i = 0; i < kVectors; ++i) v[i] = hn::Sub(v[i], hn::LoadU(d, mean + i * kLanes));
    WEFT_UNROLL for (int64_t i = 0; i < kVectors; ++i) v[i] =
        lane_butterflies(hn::Mul(v[i], hn::Load(d, plan.rotate.signs + i * kLanes)), kLanes);
    vector_butterflies<kVectors>(v);
    WEFT_UNROLL for (int64_t i = 0; i < kVectors; ++i) {
      hn::Store(v[i], d, rows.y + (r * kVectors + i) * kLanes);
      sum[i % 4] = hn::MulAdd(v[i], v[i], i < 4 ? hn::Zero(d) : sum[i % 4]);
    }
    rows.sums[r] = hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]));
    upcoming.fetch(lines);
  }
}

template <int64_t kVectors>
HWY_INLINE void rotate_any(const EncodePlan& plan, int64_t token, int64_t head, ManyRows& rows, UpcomingRows& upcoming) {
  const void* data = plan.x.data;
  if (plan.x.dtype == DType::f32)
    return rotate_many<kVectors>(
        plan, token, head, [data](int64_t i) HWY_ATTR { return hn::LoadU(F32(), static_cast<const float*>(data) + i); }, rows,
        upcoming);
  if (plan.x.dtype == DType::bf16)
    return rotate_many<kVectors>(
        plan, token, head, [data](int64_t i) HWY_ATTR { return load_bf16(static_cast<const uint16_t*>(data) + i); }, rows,
        upcoming);
  rotate_many<kVectors>(
      plan, token, head, [data](int64_t i) HWY_ATTR { return load_f16(static_cast<const uint16_t*>(data) + i); }, rows, upcoming);
}

// Rotates, and finds the factors of z. False: a row is too small or too large for squares in f32, or tiny.
HWY_NOINLINE bool normalise_many(const EncodePlan& plan, int64_t token, int64_t head, ManyRows& rows, UpcomingRows& upcoming) {
  const F32 d;
  switch (plan.side.D) {
    case 64: rotate_any<4>(plan, token, head, rows, upcoming); break;
    case 128: rotate_any<8>(plan, token, head, rows, upcoming); break;
    default: rotate_any<16>(plan, token, head, rows, upcoming); break;
  }
  join_sums(rows, rows.yy);
  const VF yy = hn::Load(d, rows.yy), norm = hn::Sqrt(yy);
  const auto ordinary = hn::And(hn::And(hn::Gt(yy, hn::Set(d, kLeastSquares)), hn::Lt(yy, hn::Set(d, kMostSquares))),
                                hn::Gt(norm, hn::Set(d, plan.side.format->tiny_norm)));
  hn::Store(hn::Div(hn::Set(d, plan.root), norm), d, rows.inverse);
  return hn::AllTrue(d, ordinary);
}

// ---- codes

// Moves kBits bits of `code` in from above.
template <int kBits>
HWY_INLINE VI shift_in(VI word, VI code) {
#if HWY_TARGET == HWY_AVX3_DL
  return VI{_mm512_shrdi_epi32(word.raw, code.raw, kBits)};
#else
  const hn::RebindToUnsigned<I32> du;
  return hn::Or(hn::BitCast(I32(), hn::ShiftRight<kBits>(hn::BitCast(du, word))), hn::ShiftLeft<32 - kBits>(code));
#endif
}

#if HWY_TARGET == HWY_AVX3_DL
// Where the coordinates of low and high nibbles are: four vectors of codes make bytes 4 lane + vector, eight make two such registers.
struct NibblePlaces {
  alignas(64) uint8_t low[64], high[64];
};
constexpr NibblePlaces nibble_places(bool lanes) {
  NibblePlaces places{};
  for (int i = 0; i < 64; ++i) {
    const int low = lanes ? i / 4 * 8 + i % 4 : 2 * i, high = lanes ? low + 4 : low + 1;
    places.low[i] = static_cast<uint8_t>(low / 64 * 64 + low % 16 * 4 + low % 64 / 16);
    places.high[i] = static_cast<uint8_t>(high / 64 * 64 + high % 16 * 4 + high % 64 / 16);
  }
  return places;
}
inline constexpr NibblePlaces kDenseNibbles = nibble_places(false), kLaneNibbles = nibble_places(true);

// Codes of four bits, D / 2 bytes a row in the order of a dense row or of the words of a K tile. D is a multiple of 128.
HWY_NOINLINE void quantise_nibbles(const CompandedLevels<4>& given, int64_t D, const NibblePlaces& places, ManyRows& rows,
                                   UpcomingRows& upcoming) {
  const F32 d;
  const CompandedLevels<4> levels = given;  // in registers
  const __m512i low = _mm512_load_si512(places.low), high = _mm512_load_si512(places.high);
  const int64_t lines = upcoming.bytes / (2 * kCacheLine);
  for (int64_t r = 0; r < kManyRows; ++r) {
    const VF factor = hn::Set(d, rows.inverse[r]);
    VF yc = hn::Zero(d);
    for (int64_t j = 0; j < D; j += 128) {
      VI bytes[2] = {hn::Zero(I32()), hn::Zero(I32())};
      WEFT_UNROLL for (int64_t i = 0; i < 8; ++i) {
        const VF v = hn::Load(d, rows.y + r * D + j + i * kLanes);
        const VI code = levels.find(hn::Mul(v, factor));
        yc = hn::MulAdd(v, levels.of(code), yc);
        bytes[i / 4] = shift_in<8>(bytes[i / 4], code);
      }
      const __m512i even = _mm512_permutex2var_epi8(bytes[0].raw, low, bytes[1].raw);
      const __m512i odd = _mm512_permutex2var_epi8(bytes[0].raw, high, bytes[1].raw);
      _mm512_store_si512(rows.codes + (r * D + j) / 2, _mm512_or_si512(even, _mm512_slli_epi16(odd, 4)));
    }
    rows.sums[r] = yc;
    upcoming.fetch(lines);
  }
}
#endif

// Codes as bytes, D a row.
template <class Levels>
HWY_NOINLINE void quantise_bytes(const EncodePlan& plan, const Levels& levels, ManyRows& rows, UpcomingRows& upcoming) {
  const F32 d;
  const int64_t D = plan.side.D;
  const int64_t lines = upcoming.bytes / (2 * kCacheLine);
  for (int64_t r = 0; r < kManyRows; ++r) {
    const VF factor = hn::Set(d, rows.inverse[r]);
    VF yc = hn::Zero(d);
    for (int64_t j = 0; j < D; j += 4 * kLanes) {
      VI code[4];
      WEFT_UNROLL for (int64_t i = 0; i < 4; ++i) {
        const VF v = hn::Load(d, rows.y + r * D + j + i * kLanes);
        code[i] = search_codes(plan, levels, hn::Mul(v, factor));
        yc = hn::MulAdd(v, levels.of(code[i]), yc);
      }
      store_codes4(code, rows.codes + r * D + j);
    }
    rows.sums[r] = yc;
    upcoming.fetch(lines);
  }
}

// Codes of four bits of a V tile, whose vectors eight tokens fill.
HWY_NOINLINE void quantise_values(const CompandedLevels<4>& given, int64_t D, ManyRows& rows, UpcomingRows& upcoming,
                                  uint8_t* HWY_RESTRICT to) {
  const F32 d;
  const CompandedLevels<4> levels = given;  // in registers
  constexpr int64_t kTokens = 8;
  const int64_t lines = upcoming.bytes / D;
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
        word = shift_in<4>(word, code);
      }
      hn::Store(word, I32(), reinterpret_cast<int32_t*>(to));
      upcoming.fetch(lines);
    }
    WEFT_UNROLL for (int64_t r = 0; r < kTokens; ++r) rows.sums[first + r] = yc[r];
  }
}

// Words [0, 16) of all rows: word w of all of them becomes a vector, `apart` bytes after that of word w - 1.
HWY_NOINLINE void store_transposed(const uint8_t* HWY_RESTRICT rows, int64_t stride, uint8_t* HWY_RESTRICT to, int64_t apart) {
  __m512i a[16], b[16];
  WEFT_UNROLL for (int64_t i = 0; i < 16; ++i) a[i] = _mm512_load_si512(rows + i * stride);
  WEFT_UNROLL for (int64_t i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  WEFT_UNROLL for (int64_t i = 0; i < 16; i += 4) {  // block w / 4 of a[4 (row / 4) + w % 4]: word w of four rows
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

// Packed rows into a K tile, from token `token` on.
HWY_INLINE void store_keys(const ManyRows& rows, int64_t bytes, uint8_t* tile, int64_t token) {
  constexpr int64_t kApart = kTileTokens / kLaneTokens * kLaneVectorBytes;
  uint8_t* to = tile + token / kLaneTokens * kLaneVectorBytes;
  for (int64_t i = 0; i < bytes; i += 64) store_transposed(rows.codes + i, bytes, to + i / 4 * kApart, kApart);
}

// Codes of all rows to where they belong, and the sums for their gains.
template <class Levels>
HWY_INLINE void quantise_many(const EncodePlan& plan, const Levels& levels, const KvLocation& to, int64_t head, ManyRows& rows,
                              UpcomingRows& upcoming, CodeWriter& writer) {
  const SideView& side = plan.side;
  const int64_t D = side.D, token = to.row % kTileTokens;
  const bool in_lanes = side.storage == KvStorage::lane_tiles;
  if constexpr (std::is_same_v<Levels, CompandedLevels<4>>) {
    if (in_lanes && side.role == KvRole::v)
      return quantise_values(levels, D, rows, upcoming, side.tile(to.block, head, to.row) + token / 2 * D);
#if HWY_TARGET == HWY_AVX3_DL
    if (D % 128 == 0 && side.format->packing == Packing::dense) {
      quantise_nibbles(levels, D, in_lanes ? kLaneNibbles : kDenseNibbles, rows, upcoming);
      if (in_lanes) return store_keys(rows, D / 2, side.tile(to.block, head, to.row), token);
      for (int64_t r = 0; r < kManyRows; ++r) {
        uint8_t* row = side.codes_at(to.block, head, to.row + r);
        for (int64_t i = 0; i < D / 2; i += 64) std::memcpy(row + i, rows.codes + r * (D / 2) + i, 64);
      }
      return;
    }
#endif
  }
  quantise_bytes(plan, levels, rows, upcoming);
  if (Levels::kBits == 8 && in_lanes && side.role == KvRole::k)
    return store_keys(rows, D, side.tile(to.block, head, to.row), token);
  for (int64_t r = 0; r < kManyRows; ++r) writer.put(to.block, head, to.row + r, rows.codes + r * D);
}

// ---- gains

// As store_gain for rows that are in range and not tiny.
HWY_NOINLINE void store_gains(const EncodePlan& plan, const KvLocation& to, int64_t head, ManyRows& rows) {
  const F32 d;
  const KvFormat& format = *plan.side.format;
  join_sums(rows, rows.yc);
  const VF yc = hn::Load(d, rows.yc), gain = hn::IfThenElseZero(hn::Gt(yc, hn::Zero(d)), hn::Div(hn::Load(d, rows.yy), yc));
  const VF limit = hn::Set(d, static_cast<float>(largest_finite(format.gain_dtype)));
  const VF factor = hn::Set(d, format.gain_units == GainUnits::unit_vector ? plan.root : 1);
  alignas(64) float value[kManyRows];
  hn::Store(hn::Min(hn::Mul(gain, factor), limit), d, value);
  alignas(64) uint8_t stored[kManyRows * sizeof(float)];
  pack_row(value, kManyRows, format.gain_dtype, stored, 0);
  const SideView& side = plan.side;
  const int64_t bytes = side.row_gain_bytes;
  uint8_t* first = side.gains_at(to.block, head, to.row);
  if (bytes == 2 && side.gains_at(to.block, head, to.row + kManyRows - 1) == first + 2 * (kManyRows - 1)) {
    std::memcpy(first, stored, 2 * kManyRows);
    return;
  }
  for (int64_t r = 0; r < kManyRows; ++r)
    std::memcpy(side.gains_at(to.block, head, to.row + r), stored + r * bytes, static_cast<size_t>(bytes));
}

// ---- runs

// Whether rows of a side can be encoded together at all, and how many of `tokens`, from the first on.
HWY_INLINE bool encodes_runs(const EncodePlan& plan) {
  const RotatePlan& rotate = plan.rotate;
  const int64_t D = plan.side.D;
  return rotate.rotation == Rotation::srht && rotate.run == D && plan.side.groups == 1 && (D == 64 || D == 128 || D == 256) &&
         plan.side.format->gain_rule == GainRule::unbiased;
}
HWY_INLINE int64_t run_length(const EncodePlan& plan, const TokenPlaces& tokens) {
  const KvLocation& first = tokens.at[0];
  if (!first.exists() || (plan.side.storage == KvStorage::lane_tiles && first.row % kManyRows != 0)) return 0;
  int64_t count = 1;
  while (count < tokens.count && tokens.at[count].block == first.block && tokens.at[count].row == first.row + count) ++count;
  return count / kManyRows * kManyRows;
}

// A run of tokens: all heads of a few, then the next, so that memory is read in order.
template <class Levels>
HWY_INLINE void encode_run(const EncodePlan& plan, const Levels& levels, const TokenPlaces& tokens, int64_t first_head,
                           int64_t last_head, CodeWriter& writer) {
  ManyRows rows;
  for (int64_t i = 0; i < tokens.count; i += kManyRows)
    for (int64_t head = first_head; head < last_head; ++head) {
      const int64_t token = tokens.first + i, element = dtype_bytes(plan.x.dtype);
      const bool more = head + 1 < last_head;
      const int64_t next =
          plan.x.at(more || i + kManyRows >= tokens.count ? token : token + kManyRows, more ? head + 1 : first_head);
      UpcomingRows upcoming{static_cast<const uint8_t*>(plan.x.data) + next * element, plan.x.token * element,
                            plan.side.D * element};
      fetch_destination(plan.side, tokens.at[i], head);
      if (normalise_many(plan, token, head, rows, upcoming)) {
        quantise_many(plan, levels, tokens.at[i], head, rows, upcoming, writer);
        store_gains(plan, tokens.at[i], head, rows);
      } else {
        for_each_batch(plan, {token, kManyRows, tokens.at + i}, head, head + 1,
                       [&](const EncodeRow* row, int64_t count) HWY_ATTR { encode_batch(plan, levels, row, count, writer); });
        writer.finish();
      }
    }
  writer.finish();
}

#endif  // HWY_MAX_BYTES >= 64

// Tokens of one sequence, in order, for heads [first_head, last_head).
void encode_tokens(const EncodePlan& plan, const TokenPlaces& tokens, int64_t first_head, int64_t last_head) {
  if (plan.side.passthrough())
    return for_each_batch(plan, tokens, first_head, last_head, [&](const EncodeRow* rows, int64_t count) {
      for (int64_t r = 0; r < count; ++r) store_passthrough(plan, rows[r]);
    });
  with_searched_levels(plan, [&](const auto& levels) {
    CodeWriter writer(plan.side);
    const auto one_by_one = [&](const TokenPlaces& some) {
      for_each_batch(plan, some, first_head, last_head,
                     [&](const EncodeRow* rows, int64_t count) { encode_batch(plan, levels, rows, count, writer); });
      writer.finish();
    };
#if HWY_MAX_BYTES >= 64
    if (encodes_runs(plan) && tokens.count >= kManyRows) {
      const auto from = [&](int64_t i) { return TokenPlaces{tokens.first + i, tokens.count - i, tokens.at + i}; };
      for (int64_t i = 0, left = 0; i < tokens.count; left = i) {
        int64_t run = 0;
        while (i < tokens.count && (run = run_length(plan, from(i))) == 0) ++i;
        if (i > left) one_by_one({tokens.first + left, i - left, tokens.at + left});
        if (run > 0) encode_run(plan, levels, {tokens.first + i, run, tokens.at + i}, first_head, last_head, writer);
        i += run;
      }
      return;
    }
#endif
    one_by_one(tokens);
  });
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
