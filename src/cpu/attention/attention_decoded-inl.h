// Attention in f32 on decoded KV rows: up to 64 tokens at a time are decoded to f32, and all query rows of a work item share them.
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_ATTENTION_DECODED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_ATTENTION_DECODED_INL_H_
#undef WEFT_CPU_ATTENTION_DECODED_INL_H_
#else
#define WEFT_CPU_ATTENTION_DECODED_INL_H_
#endif

#include "cpu/attention/query_rows-inl.h"
#include "cpu/common/gemm-inl.h"
#include "cpu/kv/kv_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

static_assert(kTileRows == kDotRows);

// Decodes the next tokens of a sequence from live token j on: up to 64 that are in the cache at consecutive positions. Their KV
// rows go to k and v (null: not wanted). Rows of v past the last token are zeros, so that a weight of 0 meets no NaN. Returns the
// live token after them.
inline int64_t decode_tile(const AttentionCall& call, int64_t n, int64_t hk, int64_t appended, int64_t j, int64_t end,
                           TokenTile& tile, float* k, float* v) {
  tile.begin = tile.end = 0;
  while (j < end && tile.end < kTileTokens) {
    const TokenRun run = token_run(*call.cache, n, appended, j, std::min(end, j + kTileTokens - tile.end));
    if (tile.end > 0 && (!run.at.exists() || run.position != tile.position + tile.end)) break;
    if (!run.at.exists()) {
      j += run.count;
      continue;
    }
    if (tile.end == 0) tile.position = run.position;
    if (k) decode_rows(call.k, run.at.block, hk, run.at.row, run.count, k + tile.end * buffer_dim(call.Dk), buffer_dim(call.Dk));
    if (v) decode_rows(call.v, run.at.block, hk, run.at.row, run.count, v + tile.end * buffer_dim(call.Dv), buffer_dim(call.Dv));
    tile.end += run.count;
    j += run.count;
  }
  if (v) fill_row(v + tile.end * buffer_dim(call.Dv), (kTileTokens - tile.end) * buffer_dim(call.Dv), 0);
  return j;
}

// Dot products of four query rows with the tile's keys: s[4, 64].
HWY_INLINE void decoded_dots(const AttentionCall& call, const TokenTile& tile, int64_t g, AttentionBuffers& buffers) {
  const int64_t stride = buffer_dim(call.Dk);
  for (int64_t c = 0; c < tile.end; c += kDotRows)
    dots_4x4(buffers.q + g * stride, stride, buffers.k + c * stride, stride, padded_dim(call.Dk), buffers.s + c, kTileTokens);
}

HWY_INLINE void decoded_scores(const QueryRowState& rows, int64_t r, float* s) {
  const F32 d;
  const VF scale = hn::Set(d, rows.unit[r]), mean = hn::Set(d, rows.mean[r]);
  for (int64_t i = 0; i < kTileTokens; i += kLanes) hn::Store(hn::MulAdd(hn::Load(d, s + i), scale, mean), d, s + i);
}

// o[r] += sum_t weight[r][t] v[t] for four query rows. A V row of weight 0 may hold NaN or infinity, and 0 times that is NaN. Where
// the tile is not finite, tokens are added one by one and those of weight 0 skipped.
HWY_INLINE void add_decoded(const AttentionCall& call, const float* weights, int64_t count, bool finite, const float* v, float* o) {
  const F32 d;
  const int64_t stride = buffer_dim(call.Dv), Dv = padded_dim(call.Dv);
  if (finite) return multiply(weights, kTileTokens, 1, v, stride, kDotRows, Dv, kTileTokens, o, stride, true);
  for (int64_t r = 0; r < count; ++r)
    for (int64_t t = 0; t < kTileTokens; ++t) {
      const float weight = weights[r * kTileTokens + t];
      for (int64_t i = 0; i < Dv && weight != 0; i += kLanes) {
        float* to = o + r * stride + i;
        hn::Store(hn::MulAdd(hn::Set(d, weight), hn::Load(d, v + t * stride + i), hn::Load(d, to)), d, to);
      }
    }
}

// Are all V rows of the tile finite? This matters only where some query row does not see the whole tile.
HWY_INLINE bool all_finite(const AttentionCall& call, const TokenTile& tile, const float* v) {
  const int64_t stride = buffer_dim(call.Dv);
  float poison = 0;
  for (int64_t t = tile.begin; t < tile.end; ++t) poison += poison_of(v + t * stride, padded_dim(call.Dv));
  return poison == 0;
}

// Online-softmax step: adds the tokens of a tile to the current block of every query row.
inline void decoded_tile(const AttentionCall& call, const TokenTile& tile, int64_t count, AttentionBuffers& buffers) {
  QueryRowState& rows = *buffers.rows;
  const int64_t Dv = call.Dv, stride = buffer_dim(Dv);
  const bool finite = find_visible_slots(tile, count, rows) || all_finite(call, tile, buffers.v);
  for (int64_t g = 0; g < count; g += kDotRows) {
    const int64_t end = std::min(count, g + kDotRows);
    if (none_visible(rows, g, end)) continue;
    decoded_dots(call, tile, g, buffers);
    for (int64_t r = g; r < end; ++r) decoded_scores(rows, r, buffers.s + (r - g) * kTileTokens);
    if (call.mask.softcap) cap_scores(*call.mask.softcap, (end - g) * kTileTokens, buffers.s);
    with_rows(end - g,
              [&](auto n) HWY_ATTR { softmax_step<decltype(n)::value>(rows, g, buffers.s, buffers.block_o + g * stride, Dv); });
    fill_row(buffers.s + (end - g) * kTileTokens, (g + kDotRows - end) * kTileTokens, 0);
    add_decoded(call, buffers.s, end - g, finite, buffers.v, buffers.block_o + g * stride);
  }
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
