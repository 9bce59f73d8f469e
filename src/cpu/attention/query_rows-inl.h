// Query rows of attention: their preparation, the online softmax over a tile, merging of partials, and the output epilogue.
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_ATTENTION_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_ATTENTION_ROWS_INL_H_
#undef WEFT_CPU_ATTENTION_ROWS_INL_H_
#else
#define WEFT_CPU_ATTENTION_ROWS_INL_H_
#endif

#include <limits>
#include <type_traits>

#include "cpu/attention/attention.h"
#include "cpu/attention/byte_dot-inl.h"
#include "cpu/common/simd-inl.h"
#include "cpu/kv/kv_rotate-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

constexpr float kNoScore = -std::numeric_limits<float>::infinity();

// For loops over the 64 tokens of a tile, which are four vectors on the widest target.
#define WEFT_TILE_UNROLL _Pragma("GCC unroll 4")

// ---- functions

// Rescale factor of a sum when the running maximum moves: 0 where there was no maximum.
HWY_INLINE float rescale_factor(float old_m, float new_m) {
  return old_m == kNoScore ? 0.0f : hn::GetLane(exp_weight(hn::Set(F32(), old_m - new_m)));
}

HWY_INLINE void scale_vectors(float* x, int64_t count, float by) {
  const F32 d;
  const VF factor = hn::Set(d, by);
  for (int64_t i = 0; i < count; i += kLanes) hn::StoreU(hn::Mul(hn::LoadU(d, x + i), factor), d, x + i);
}

// NaN if any element is not finite, else 0.
HWY_INLINE float poison_of(const float* x, int64_t count) {
  const F32 d;
  VF sum = hn::Zero(d);
  for (int64_t i = 0; i < count; i += kLanes) sum = hn::MulAdd(hn::LoadU(d, x + i), hn::Zero(d), sum);
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

HWY_INLINE float largest(const float* x, int64_t count) {
  const F32 d;
  VF top = hn::Zero(d);
  for (int64_t i = 0; i < count; i += kLanes) top = hn::Max(top, hn::Abs(hn::LoadU(d, x + i)));
  return hn::GetLane(hn::MaxOfLanes(d, top));
}

// A query is scaled such that query_top() becomes query_scale(). query_top() is the largest magnitude, or, for short sums, the
// largest mean of two neighbours of one sign.
HWY_INLINE float query_top(const float* x, int64_t count, [[maybe_unused]] RowInts ints) {
#if WEFT_SHORT_SUMS
  if (is_short(ints)) {
    const F32 d;
    VF top = hn::Zero(d);
    for (int64_t i = 0; i < count; i += kLanes) {
      const VF v = hn::Mul(hn::LoadU(d, x + i), hn::Set(d, 0.5f)), above = hn::Max(v, hn::Zero(d)),
               below = hn::Max(hn::Neg(v), hn::Zero(d));
      top = hn::Max(top, hn::Max(hn::Add(above, hn::Shuffle2301(above)), hn::Add(below, hn::Shuffle2301(below))));
    }
    return hn::GetLane(hn::MaxOfLanes(d, top));
  }
#endif
  return largest(x, count);
}
HWY_INLINE float query_scale(RowInts ints) { return static_cast<float>(operand_max(ints)) * (is_short(ints) ? 0.5f : 1.0f); }

// Quantises a query: out = round(x / unit), with the unit returned. The sum of the integers goes to `sum`.
constexpr float kSmallestTop = 0x1p-110f;  // below, scale / top would overflow: such rows count as 0
HWY_INLINE float to_integers(const float* HWY_RESTRICT x, int64_t count, RowInts ints, int32_t* HWY_RESTRICT out, int32_t& sum) {
  const F32 d;
  const I32 di;
  const float top = query_top(x, count, ints), scale = query_scale(ints);
  const int32_t most = operand_max(ints);
  const bool nothing = top < kSmallestTop;
  const VF factor = hn::Set(d, nothing ? 0.0f : scale / top);
  auto total = hn::Zero(di);
  for (int64_t i = 0; i < count; i += kLanes) {
    // Values that are not finite convert to the extremes of int32, which would overflow the sums. The row's output is NaN in any
    // case.
    const auto any = hn::NearestInt(hn::Mul(hn::LoadU(d, x + i), factor));
    const auto n = hn::Min(hn::Max(any, hn::Set(di, -most)), hn::Set(di, most));
    total = hn::Add(total, n);
    hn::StoreU(n, di, out + i);
  }
  sum = hn::GetLane(hn::SumOfLanes(di, total));
  return nothing ? 0.0f : top / scale;
}

// ---- queries

// Token and query head of a query row.
struct QueryRow {
  int64_t t, h;
};
HWY_INLINE QueryRow query_row(const AttentionCall& call, const TokenRange& range, int64_t hk, int64_t row) {
  return {range.begin + row / call.R, hk * call.R + row % call.R};
}

// Loads the query rows of a work item into K's rotated domain, with their factors from dot products to scores and their visible
// positions.
inline void prepare_rows(const AttentionCall& call, int64_t hk, const TokenRange& range, int64_t appended, int64_t first_row,
                         int64_t count, AttentionBuffers& buffers) {
  const int64_t Dk = call.Dk, stride = buffer_dim(Dk);
  QueryRowState& rows = *buffers.rows;
  const bool rotated = call.queries->domain == KvDomain::rotated;
  HWY_ALIGN float mean[kPaddedHeadDim];
  const float* k_mean = call.k_mean.of(hk);
  if (k_mean) {  // in the domain of the caller's q
    std::copy_n(k_mean, Dk, mean);
    fill_row(mean + Dk, padded_dim(Dk) - Dk, 0);
    if (rotated) {
      rotate_row(call.k_rotation, mean);
      fill_row(mean + Dk, padded_dim(Dk) - Dk, 0);
    }
  }
  rows.first_of_all = std::numeric_limits<int64_t>::max();
  rows.end_of_all = 0;
  for (int64_t r = 0; r < count; ++r) {
    const auto [t, h] = query_row(call, range, hk, first_row + r);
    float* q = buffers.q + r * stride;
    unpack_row(call.q.dtype, call.q.data, call.q.at(t, h), Dk, q);
    fill_row(q + Dk, stride - Dk, 0);
    rows.mean[r] = k_mean ? call.scale * dot_padded(q, mean, padded_dim(Dk)) : 0;
    if (!rotated) {
      rotate_row(call.k_rotation, q);
      fill_row(q + Dk, stride - Dk, 0);
    }
    rows.unit[r] = call.scale;
    if (call.integer) {
      int32_t* integers = buffers.dots;
      const float unit = to_integers(q, Dk, call.ints, integers, rows.q_sum[r]);
      rows.unit[r] = (unit + poison_of(q, Dk)) * (call.scale * call.k_levels.step);
      rows.half[r] = 0.5f * static_cast<float>(rows.q_sum[r]);
      make_operands(integers, Dk, call.ints, buffers.q_operands + r * operand_words(Dk));
    }
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    const VisiblePositions seen = visible_positions(call.mask, query_position(*call.queries, range, appended, t));
    rows.first[r] = static_cast<int32_t>(std::clamp<int64_t>(seen.first, 0, kMost));
    rows.end[r] = static_cast<int32_t>(std::clamp<int64_t>(seen.end, 0, kMost));
    rows.first_of_all = std::min<int64_t>(rows.first_of_all, rows.first[r]);
    rows.end_of_all = std::max<int64_t>(rows.end_of_all, rows.end[r]);
  }
  // Dot products take query rows in fours.
  for (int64_t r = count; r % kDotRows != 0; ++r) fill_row(buffers.q + r * stride, stride, 0);
}

// ---- tiles

// Bytes of a side's tile in lanes order, including its gains.
HWY_INLINE int64_t tile_bytes(const SideView& side) { return side.planes.bytes + kTileTokens * side.row_gain_bytes; }

// Up to 64 tokens at consecutive positions, in slots [begin, end).
struct TokenTile {
  int64_t begin = 0, end = 0;
  int64_t position = 0;  // of slot `begin`
};

HWY_INLINE SlotRange visible_slots(const TokenTile& tile, int64_t first, int64_t end) {
  const int64_t shift = tile.begin - tile.position;
  const SlotRange slots{std::max(tile.begin, first + shift), std::min(tile.end, end + shift)};
  return slots.empty() ? SlotRange{0, 0} : slots;
}

// Sets the visible slots of every query row. Returns whether each of them sees the whole tile.
HWY_INLINE bool find_visible_slots(const TokenTile& tile, int64_t count, QueryRowState& rows) {
  bool all = true;
  for (int64_t r = 0; r < count; ++r) {
    rows.slots[r] = visible_slots(tile, rows.first[r], rows.end[r]);
    all &= rows.slots[r].begin == tile.begin && rows.slots[r].end == tile.end;
  }
  return all;
}

// Do query rows [r, end) see nothing of the tile?
HWY_INLINE bool none_visible(const QueryRowState& rows, int64_t r, int64_t end) {
  while (r < end && rows.slots[r].empty()) ++r;
  return r == end;
}

HWY_INLINE void fill_outside(float* x, SlotRange slots, float value) {
  for (int64_t i = 0; i < slots.begin; ++i) x[i] = value;
  for (int64_t i = slots.end; i < kTileTokens; ++i) x[i] = value;
}

// s = softcap tanh(s / softcap)
inline HWY_NOINLINE void cap_scores(float softcap, int64_t count, float* s) {
  const F32 d;
  const VF cap = hn::Set(d, softcap);
  for (int64_t i = 0; i < count; i += kLanes) hn::Store(hn::Mul(cap, hn::Tanh(d, hn::Div(hn::Load(d, s + i), cap))), d, s + i);
}

// Online-softmax step of query rows [r, r + kRows) with scores s[kRows, 64]: s becomes e^(s - m), 0 outside of the visible slots.
// Where the running maximum m moves, l and o are rescaled. All rows go through each phase together, since one row alone is a chain
// of latencies.
template <int kRows>
HWY_INLINE void softmax_step(QueryRowState& rows, int64_t r, float* HWY_RESTRICT s, float* HWY_RESTRICT o, int64_t Dv) {
  const F32 d;
  VF top[4];
  WEFT_UNROLL for (int i = kRows; i < 4; ++i) top[i] = hn::Zero(d);
  WEFT_UNROLL for (int i = 0; i < kRows; ++i) {
    float* row = s + i * kTileTokens;
    if (!rows.slots[r + i].whole()) fill_outside(row, rows.slots[r + i], kNoScore);
    top[i] = hn::Load(d, row);
    WEFT_TILE_UNROLL for (int64_t j = kLanes; j < kTileTokens; j += kLanes) top[i] = hn::Max(top[i], hn::Load(d, row + j));
  }
  HWY_ALIGN float tile_m[4];
  max_lanes4(top, tile_m);
  for (int i = 0; i < kRows; ++i) {
    float& m = rows.m[r + i];
    if (!(tile_m[i] > m)) continue;
    const float keep = rescale_factor(m, tile_m[i]);
    m = tile_m[i];
    scale_vectors(rows.l[r + i], kLanes, keep);
    scale_vectors(o + i * buffer_dim(Dv), padded_dim(Dv), keep);
  }
  WEFT_UNROLL for (int i = 0; i < kRows; ++i) {
    float* row = s + i * kTileTokens;
    // While every score is minus infinity, m is taken as 0, which avoids -inf - -inf; the weights are then about 2e-38.
    const VF m = hn::Set(d, rows.m[r + i] == kNoScore ? 0.0f : rows.m[r + i]);
    VF l = hn::LoadU(d, rows.l[r + i]);
    WEFT_TILE_UNROLL for (int64_t j = 0; j < kTileTokens; j += kLanes) {
      const VF weight = exp_weight(hn::Sub(hn::Load(d, row + j), m));
      l = hn::Add(l, weight);
      hn::Store(weight, d, row + j);
    }
    hn::StoreU(l, d, rows.l[r + i]);
    if (!rows.slots[r + i].whole()) fill_outside(row, rows.slots[r + i], 0);
  }
}

// Calls use(std::integral_constant<int, n>()), n = 1 to 4 query rows.
template <class Use>
HWY_INLINE void with_rows(int64_t n, Use&& use) {
  switch (n) {
    case 1: return use(std::integral_constant<int, 1>());
    case 2: return use(std::integral_constant<int, 2>());
    case 3: return use(std::integral_constant<int, 3>());
    default: return use(std::integral_constant<int, 4>());
  }
}

// ---- blocks

HWY_INLINE void start_block(const AttentionCall& call, AttentionBuffers& buffers, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    buffers.rows->m[r] = kNoScore;
    fill_row(buffers.rows->l[r], 16, 0);
  }
  fill_row(buffers.block_o, (rows + kDotRows - 1) / kDotRows * kDotRows * buffer_dim(call.Dv), 0);
}

// Returns l of a query row's block: 0 while the running maximum is minus infinity. A NaN in l also sets m to NaN.
HWY_INLINE float close_block(QueryRowState& rows, int64_t r) {
  const float l = hn::GetLane(hn::SumOfLanes(F32(), hn::LoadU(F32(), rows.l[r])));
  if (l != l) rows.m[r] = l;
  return rows.m[r] == kNoScore ? 0 : l;
}

// Merges the partial (other, m, l) into (o, sum). `o` and `other` are padded.
HWY_INLINE void merge_partial(SoftmaxSum<float>& sum, float* HWY_RESTRICT o, float m, float l, const float* HWY_RESTRICT other,
                              int64_t Dv) {
  const F32 d;
  if (l == 0 || m == kNoScore) return;
  const auto [keep, take] = sum.join(m, l);
  const VF old_factor = hn::Set(d, keep), new_factor = hn::Set(d, take);
  for (int64_t i = 0; i < Dv; i += kLanes)
    hn::StoreU(hn::MulAdd(old_factor, hn::LoadU(d, o + i), hn::Mul(new_factor, hn::LoadU(d, other + i))), d, o + i);
}

// Stores an output row: inverts V's rotation and adds V's mean times `tokens`, the weight of real tokens. o is padded, and
// overwritten.
inline void store_row(const OutputEpilogue& epilogue, float* o, float tokens, int64_t t, int64_t h) {
  rotate_row(epilogue.rotation, o);
  if (const float* mean = epilogue.mean.of(h / epilogue.R))
    for (int64_t i = 0; i < epilogue.Dv; ++i) o[i] += tokens * mean[i];
  pack_row(o, epilogue.Dv, epilogue.o.dtype, epilogue.o.data, epilogue.o.at(t, h));
}

// Adds the sink, normalises, and stores the output row and its LSE.
inline void finish_row(const OutputEpilogue& epilogue, SoftmaxSum<float> sum, float* o, int64_t t, int64_t h) {
  float tokens = sum.l, factor = 1;
  if (epilogue.sinks) factor = sum.join(epilogue.sinks[h * epilogue.sink_stride], 1).keep;
  factor *= sum.inverse();
  tokens *= factor;
  scale_vectors(o, padded_dim(epilogue.Dv), factor);
  store_row(epilogue, o, tokens, t, h);
  if (epilogue.lse.data) static_cast<float*>(epilogue.lse.data)[epilogue.lse.at(t, h)] = sum.log_sum();
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
