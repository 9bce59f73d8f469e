// The kernel of kv_encode: runs of 16 tokens of a head are encoded together on targets with 256- and 512-bit vectors, all other
// tokens row by row. Both paths give the same bytes.
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_KV_ENCODE_MANY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_KV_ENCODE_MANY_INL_H_
#undef WEFT_CPU_KV_ENCODE_MANY_INL_H_
#else
#define WEFT_CPU_KV_ENCODE_MANY_INL_H_
#endif

#include <utility>

#include "cpu/kv/kv_quantise_many-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

#if HWY_MAX_BYTES >= 32

// Sums the lanes of every row's partial sums, in the order of sum_lanes4.
HWY_INLINE void join_sums(const VF* sums, float* out) {
#if HWY_MAX_BYTES >= 64
  const F32 d;
  const hn::Repartition<double, F32> dd;
  VF four[4];  // four[i]: sums of rows 4 i to 4 i + 3, in every 128-bit block
  WEFT_UNROLL for (int64_t i = 0; i < 4; ++i) {
    const VF* v = sums + 4 * i;
    const auto a = hn::BitCast(dd, hn::Add(hn::InterleaveLower(d, v[0], v[1]), hn::InterleaveUpper(d, v[0], v[1])));
    const auto b = hn::BitCast(dd, hn::Add(hn::InterleaveLower(d, v[2], v[3]), hn::InterleaveUpper(d, v[2], v[3])));
    four[i] = hn::Add(hn::BitCast(d, hn::InterleaveLower(dd, a, b)), hn::BitCast(d, hn::InterleaveUpper(dd, a, b)));
  }
  const __m512 low01 = _mm512_shuffle_f32x4(four[0].raw, four[1].raw, 0x44),
               high01 = _mm512_shuffle_f32x4(four[0].raw, four[1].raw, 0xee);
  const __m512 low23 = _mm512_shuffle_f32x4(four[2].raw, four[3].raw, 0x44),
               high23 = _mm512_shuffle_f32x4(four[2].raw, four[3].raw, 0xee);
  const VF block0{_mm512_shuffle_f32x4(low01, low23, 0x88)}, block1{_mm512_shuffle_f32x4(low01, low23, 0xdd)};
  const VF block2{_mm512_shuffle_f32x4(high01, high23, 0x88)}, block3{_mm512_shuffle_f32x4(high01, high23, 0xdd)};
  hn::Store(hn::Add(hn::Add(hn::Add(block0, block1), block2), block3), d, out);
#else
  for (int64_t first = 0; first < kManyRows; first += 4) sum_lanes4(sums + first, out + first);
#endif
}

// ---- rotation

// Butterfly number kAt, in the order of vector_butterflies, of H_kVectors across kVectors vectors. Does nothing past the last one.
template <int64_t kAt, int64_t kVectors>
HWY_INLINE void one_vector_butterfly(VF* v) {
  constexpr int64_t kHalf = int64_t{1} << kAt / (kVectors / 2), kPair = kAt % (kVectors / 2);
  if constexpr (kHalf < kVectors) {
    constexpr int64_t kLow = kPair / kHalf * 2 * kHalf + kPair % kHalf;
    const VF low = v[kLow], high = v[kLow + kHalf];
    v[kLow] = hn::Add(low, high);
    v[kLow + kHalf] = hn::Sub(low, high);
  }
}

// rotate_many for rows that do not fit in registers. loaded(x, i) returns vector i of a row, with the butterflies inside the vector
// done.
template <int64_t kVectors, class Loaded>
HWY_INLINE void rotate_long(const EncodePlan& plan, int64_t token, int64_t head, const Loaded& loaded, ManyRows& rows,
                            RowPrefetcher& prefetcher, int64_t lines) {
  const F32 d;
  constexpr int64_t kPass = kPassVectors, kPasses = kVectors / kPass;
  for (int64_t r = 0; r < kManyRows; ++r) {
    float* y = rows.y + r * kVectors * kLanes;
    VF v[kPass];
    for (int64_t pass = 0; pass < kPasses; ++pass) {
      WEFT_UNROLL for (int64_t i = 0; i < kPass; ++i) v[i] = loaded(plan.x.at(token + r, head), pass * kPass + i);
      vector_butterflies<kPass>(v);
      if (kPasses != 2 || pass == 0)
        WEFT_UNROLL for (int64_t i = 0; i < kPass; ++i) hn::Store(v[i], d, y + (pass * kPass + i) * kLanes);
    }
    if constexpr (kPasses == 2) {  // v still holds the upper half
      VF sum[4];
      WEFT_UNROLL for (int64_t i = 0; i < kPass; ++i) {
        const VF lower = hn::Load(d, y + i * kLanes), low = hn::Add(lower, v[i]);
        v[i] = hn::Sub(lower, v[i]);
        hn::Store(low, d, y + i * kLanes);
        sum[i % 4] = hn::MulAdd(low, low, i < 4 ? hn::Zero(d) : sum[i % 4]);
      }
      WEFT_UNROLL for (int64_t i = 0; i < kPass; ++i) {
        hn::Store(v[i], d, y + (kPass + i) * kLanes);
        sum[i % 4] = hn::MulAdd(v[i], v[i], sum[i % 4]);
      }
      rows.sums[r] = hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]));
    } else {
      far_pass<kPasses>(y, kPass * kLanes);
      rows.sums[r] = sum_squares(y, kVectors * kLanes);
    }
    prefetcher.prefetch(lines);
  }
}

// y = R (x - mean), and |y|^2 as one partial sum per lane, with the operation order of load_rotated and sum_squares.
template <int64_t kVectors, class Load>
HWY_NOINLINE void rotate_many(const EncodePlan& plan, int64_t token, int64_t head, const Load& load, ManyRows& rows,
                              RowPrefetcher& prefetcher) {
  const F32 d;
  const float* mean = plan.mean.of(head);
  const int64_t lines = prefetcher.bytes / (2 * kCacheLine);
  const auto loaded = [&](int64_t x, int64_t i) HWY_ATTR {
    VF v = load(x + i * kLanes);
    if (mean) v = hn::Sub(v, hn::LoadU(d, mean + i * kLanes));
    return lane_butterflies(hn::Mul(v, hn::Load(d, plan.rotate.signs + i * kLanes)), kLanes);
  };
  const auto store = [&](int64_t r, const VF* v) HWY_ATTR {
    VF sum[4];
    WEFT_UNROLL for (int64_t i = 0; i < kVectors; ++i) {
      hn::Store(v[i], d, rows.y + (r * kVectors + i) * kLanes);
      sum[i % 4] = hn::MulAdd(v[i], v[i], i < 4 ? hn::Zero(d) : sum[i % 4]);
    }
    rows.sums[r] = hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]));
  };
  VF v[kVectors];
  if constexpr (kVectors == 8 && HWY_MAX_BYTES >= 64) {
    // Butterflies inside vectors use other ports than butterflies between them. The latter, of one row, are interleaved with the
    // former, of the next row.
    WEFT_UNROLL for (int64_t i = 0; i < kVectors; ++i) v[i] = loaded(plan.x.at(token, head), i);
    for (int64_t r = 0; r < kManyRows; ++r) {
      const int64_t next = plan.x.at(token + std::min(r + 1, kManyRows - 1), head);
      VF after[kVectors];
      const auto steps = [&]<int64_t... i>(std::integer_sequence<int64_t, i...>) HWY_ATTR {
        ((after[i] = loaded(next, i), one_vector_butterfly<2 * i, kVectors>(v), one_vector_butterfly<2 * i + 1, kVectors>(v)), ...);
      };
      steps(std::make_integer_sequence<int64_t, kVectors>());
      store(r, v);
      WEFT_UNROLL for (int64_t i = 0; i < kVectors; ++i) v[i] = after[i];
      prefetcher.prefetch(lines);
    }
  } else if constexpr (kVectors <= kPassVectors || HWY_MAX_BYTES >= 64) {
    for (int64_t r = 0; r < kManyRows; ++r) {
      WEFT_UNROLL for (int64_t i = 0; i < kVectors; ++i) v[i] = loaded(plan.x.at(token + r, head), i);
      vector_butterflies<kVectors>(v);
      store(r, v);
      prefetcher.prefetch(lines);
    }
  } else {
    rotate_long<kVectors>(plan, token, head, loaded, rows, prefetcher, lines);
  }
}

template <int64_t kVectors>
HWY_INLINE void rotate_any(const EncodePlan& plan, int64_t token, int64_t head, ManyRows& rows, RowPrefetcher& prefetcher) {
  const void* data = plan.x.data;
  if (plan.x.dtype == DType::f32)
    return rotate_many<kVectors>(
        plan, token, head, [data](int64_t i) HWY_ATTR { return hn::LoadU(F32(), static_cast<const float*>(data) + i); }, rows,
        prefetcher);
  if (plan.x.dtype == DType::bf16)
    return rotate_many<kVectors>(
        plan, token, head, [data](int64_t i) HWY_ATTR { return load_bf16(static_cast<const uint16_t*>(data) + i); }, rows,
        prefetcher);
  rotate_many<kVectors>(
      plan, token, head, [data](int64_t i) HWY_ATTR { return load_f16(static_cast<const uint16_t*>(data) + i); }, rows, prefetcher);
}

// Rotates all rows and computes the factors of z. Returns false if a row's squares are out of f32's range or the row is tiny: such
// rows need the row-by-row path.
HWY_NOINLINE bool normalise_many(const EncodePlan& plan, int64_t token, int64_t head, ManyRows& rows, RowPrefetcher& prefetcher) {
  const F32 d;
  switch (plan.side.D) {
    case 64: rotate_any<64 / kLanes>(plan, token, head, rows, prefetcher); break;
    case 128: rotate_any<128 / kLanes>(plan, token, head, rows, prefetcher); break;
    default: rotate_any<256 / kLanes>(plan, token, head, rows, prefetcher); break;
  }
  join_sums(rows.sums, rows.yy);
  bool ordinary = true;
  WEFT_UNROLL for (int64_t i = 0; i < kManyRows; i += kLanes) {
    const VF yy = hn::Load(d, rows.yy + i), norm = hn::Sqrt(yy);
    const auto in_range = hn::And(hn::Gt(yy, hn::Set(d, kLeastSquares)), hn::Lt(yy, hn::Set(d, kMostSquares)));
    ordinary &= hn::AllTrue(d, hn::And(in_range, hn::Gt(norm, hn::Set(d, plan.side.format->tiny_norm))));
    hn::Store(hn::Div(hn::Set(d, plan.root), norm), d, rows.inverse + i);
  }
  return ordinary;
}

// ---- gains

// store_gain for all rows, which must be in range and not tiny.
HWY_NOINLINE void store_gains(const EncodePlan& plan, const KvLocation& to, int64_t head, ManyRows& rows) {
  const F32 d;
  const KvFormat& format = *plan.side.format;
  const VF limit = hn::Set(d, static_cast<float>(largest_finite(format.gain_dtype)));
  const VF factor = hn::Set(d, format.gain_units == GainUnits::unit_vector ? plan.root : 1);
  alignas(64) float value[kManyRows];
  join_sums(rows.sums, value);
  WEFT_UNROLL for (int64_t i = 0; i < kManyRows; i += kLanes) {
    const VF yc = hn::Load(d, value + i);
    const VF gain = hn::IfThenElseZero(hn::Gt(yc, hn::Zero(d)), hn::Div(hn::Load(d, rows.yy + i), yc));
    hn::Store(hn::Min(hn::Mul(gain, factor), limit), d, value + i);
  }
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

// Prefetches the lines that a batch will write, long before it does, since stores miss one line after another.
HWY_INLINE void prefetch_destination(const SideView& side, const KvLocation& to, int64_t head) {
  if (side.storage != KvStorage::lane_tiles) {
    for (int64_t r = 0; r < kManyRows; ++r) {
      const uint8_t* row = side.codes_at(to.block, head, to.row + r);
      for (int64_t i = 0; i < side.row_code_bytes; i += kCacheLine) prefetch_line(row + i);
    }
    return;
  }
  const int64_t token = to.row % kTileTokens, lines = side.row_code_bytes / 4;  // lines of kManyRows tokens
  const bool keys = side.role == KvRole::k;
  const uint8_t* first =
      side.tile(to.block, head, to.row) + (keys ? token / kLaneTokens * kCacheLine : token * side.row_code_bytes);
  for (int64_t i = 0; i < lines; ++i) prefetch_line(first + i * (keys ? kTileTokens / kLaneTokens : 1) * kCacheLine);
}

// Can rows of this side be encoded together?
HWY_INLINE bool encodes_runs(const EncodePlan& plan) {
  const RotatePlan& rotate = plan.rotate;
  const int64_t D = plan.side.D;
  return rotate.rotation == Rotation::srht && rotate.run == D && plan.side.groups == 1 && (D == 64 || D == 128 || D == 256) &&
         plan.side.format->gain_rule == GainRule::unbiased;
}
// How many of `tokens`, starting at the first, can be encoded together: a multiple of kManyRows in consecutive cache rows.
HWY_INLINE int64_t run_length(const EncodePlan& plan, const TokenLocations& tokens) {
  const KvLocation& first = tokens.at[0];
  if (!first.exists() || (plan.side.storage == KvStorage::lane_tiles && first.row % kManyRows != 0)) return 0;
  int64_t count = 1;
  while (count < tokens.count && tokens.at[count].block == first.block && tokens.at[count].row == first.row + count) ++count;
  return count / kManyRows * kManyRows;
}

// Encodes a run of tokens: all heads of kManyRows tokens, then the next tokens, so that the input is read in memory order.
template <class Levels>
HWY_INLINE void encode_run(const EncodePlan& plan, const Levels& levels, const TokenLocations& tokens, int64_t first_head,
                           int64_t last_head, CodeWriter& writer) {
  ManyRows rows;
  for (int64_t i = 0; i < tokens.count; i += kManyRows) {
    const int64_t token = tokens.first + i;
    RowPrefetcher prefetcher(plan, token + kManyRows, first_head, last_head - first_head);
    if (i % kTlbTokens == 0) prefetcher.warm_tlb(std::min(kTlbTokens, tokens.count - i));
    for (int64_t head = first_head; head < last_head; ++head)  // gains may be in other pages: overlaps their TLB misses
      prefetch_line(plan.side.gains_at(tokens.at[i].block, head, tokens.at[i].row));
    for (int64_t head = first_head; head < last_head; ++head) {
      prefetch_destination(plan.side, tokens.at[i], head);
      if (normalise_many(plan, token, head, rows, prefetcher)) {
        quantise_many(plan, levels, tokens.at[i], head, rows, prefetcher, writer);
        store_gains(plan, tokens.at[i], head, rows);
      } else {
        for_each_batch(plan, {token, kManyRows, tokens.at + i}, head, head + 1,
                       [&](const EncodeRow* row, int64_t count) HWY_ATTR { encode_batch(plan, levels, row, count, writer); });
        writer.finish();
      }
    }
  }
  writer.finish();
}

#endif  // HWY_MAX_BYTES >= 32

// Encodes tokens of one sequence in order, for heads [first_head, last_head).
void encode_tokens(const EncodePlan& plan, const TokenLocations& tokens, int64_t first_head, int64_t last_head) {
  if (plan.side.passthrough())
    return for_each_batch(plan, tokens, first_head, last_head, [&](const EncodeRow* rows, int64_t count) {
      for (int64_t r = 0; r < count; ++r) store_passthrough(plan, rows[r]);
    });
  with_searched_levels(plan, [&](const auto& levels) {
    CodeWriter writer(plan.side);
    const auto one_by_one = [&](const TokenLocations& some) {
      for_each_batch(plan, some, first_head, last_head,
                     [&](const EncodeRow* rows, int64_t count) { encode_batch(plan, levels, rows, count, writer); });
      writer.finish();
    };
#if HWY_MAX_BYTES >= 32
    if (encodes_runs(plan) && tokens.count >= kManyRows) {
      const auto from = [&](int64_t i) { return TokenLocations{tokens.first + i, tokens.count - i, tokens.at + i}; };
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
