// The attention kernels: one work item, a block of query rows over blocks of live tokens.
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_ATTENTION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_ATTENTION_INL_H_
#undef WEFT_CPU_ATTENTION_INL_H_
#else
#define WEFT_CPU_ATTENTION_INL_H_
#endif

#include "cpu/attention/attention_decoded-inl.h"
#include "cpu/attention/attention_integer-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

// A work item with what the sequence and its cache say: how many query rows and live tokens there are.
struct ResolvedItem {
  TokenRange range;
  int64_t rows = 0;  // query rows; 0: nothing to do
  int64_t appended = 0, live = 0;
};

HWY_INLINE ResolvedItem resolve_item(const AttentionCall& call, const AttentionWorkItem& item) {
  ResolvedItem found;
  found.range = tokens_of(call.sequences, item.n, call.T);
  found.rows = std::clamp<int64_t>(found.range.length() * call.R - item.first_row, 0, kQueryBlock);
  if (found.rows == 0) return found;
  found.appended = appended_tokens(*call.cache, item.n);
  found.live = live_tokens(*call.cache, found.appended);
  return found;
}

HWY_INLINE QueryRow query_row(const AttentionCall& call, const AttentionWorkItem& item, const ResolvedItem& found, int64_t r) {
  return query_row(call, found.range, item.hk, item.first_row + r);
}

inline void prepare_queries(const AttentionCall& call, const AttentionWorkItem& item, const ResolvedItem& found,
                            AttentionBuffers& buffers) {
  prepare_rows(call, item.hk, found.range, found.appended, item.first_row, found.rows, buffers);
  if (!call.integer) interleave_queries(call, found.rows, buffers);
}

HWY_INLINE LaneTile lane_tile(const AttentionCall& call, const AttentionWorkItem& item, const TokenRun& run) {
  if (!run.at.exists()) return {};
  return {call.k.tile(run.at.block, item.hk, run.at.row), call.v.tile(run.at.block, item.hk, run.at.row)};
}

// Calls visit(j, tile, bytes, next bytes) for every lane tile of live tokens [begin, end) that is in the cache. j is the tile's
// first live token.
template <class Visit>
HWY_INLINE void for_each_lane_tile(const AttentionCall& call, const AttentionWorkItem& item, const ResolvedItem& found,
                                   int64_t begin, int64_t end, Visit&& visit) {
  const auto run_at = [&](int64_t j) HWY_ATTR {
    return j < found.live ? token_run(*call.cache, item.n, found.appended, j, found.live) : TokenRun{};
  };
  TokenRun run = run_at(begin);
  for (int64_t j = begin; j < end;) {
    const int64_t count = std::min(run.count, end - j);
    const TokenRun next = run_at(j + count);
    if (run.at.exists()) {
      const int64_t slot = run.at.row % kTileTokens;
      visit(j, TokenTile{slot, slot + count, run.position}, lane_tile(call, item, run), lane_tile(call, item, next));
    }
    j += count;
    run = next;
  }
}

// Computes the partial of live tokens [begin, end) for every query row. Returns false if no query row sees any of them.
HWY_INLINE bool accumulate_block(const AttentionCall& call, const AttentionWorkItem& item, const ResolvedItem& found, int64_t begin,
                                 int64_t end, AttentionBuffers& buffers) {
  if (begin >= end) return false;
  const QueryRowState& rows = *buffers.rows;
  const KvCache& cache = *call.cache;
  const int64_t first = live_position(cache, found.appended, begin), last = live_position(cache, found.appended, end - 1);
  if (last < rows.first_of_all || first >= rows.end_of_all) return false;
  start_block(call, buffers, found.rows);
  if (call.integer) {
    for_each_lane_tile(call, item, found, begin, end,
                       [&](int64_t, const TokenTile& tile, const LaneTile& bytes, const LaneTile& next) HWY_ATTR {
                         if (visible_slots(tile, rows.first_of_all, rows.end_of_all).empty()) return;
                         integer_tile(call, tile, bytes, next, found.rows, buffers);
                       });
    return true;
  }
  TokenTile tiles[2];
  TileRuns runs[2];
  // Finds the next tile that some query row may see.
  const auto find = [&](int i) HWY_ATTR {
    tiles[i].end = runs[i].count = 0;
    while (begin < end && tiles[i].end == 0) {
      const int64_t ahead = std::min(end, begin + kTileTokens);
      const bool seen = live_position(cache, found.appended, ahead - 1) >= rows.first_of_all &&
                        live_position(cache, found.appended, begin) < rows.end_of_all;
      begin = seen ? find_tile(call, item.n, found.appended, begin, end, tiles[i], runs[i]) : ahead;
    }
  };
  find(0);
  for (int i = 0; tiles[i].end > 0; i ^= 1) {
    find(i ^ 1);
    decoded_tile(call, item.hk, tiles[i], runs[i], runs[i ^ 1], found.rows, buffers);
  }
  return true;
}

void compute_partials(const AttentionCall& call, const AttentionWorkItem& item, const PartialsView& out, bool whole, void* memory) {
  const ResolvedItem found = resolve_item(call, item);
  if (found.rows == 0) return;
  AttentionBuffers buffers;
  lay_out_buffers(call, memory, buffers);
  const int64_t block = call.block(found.live), stride = buffer_dim(call.Dv);
  // Query rows are not needed where all blocks are empty.
  if (item.first_block * block < found.live) prepare_queries(call, item, found, buffers);
  for (int64_t b = item.first_block; b < item.end_block; ++b) {
    const int64_t begin = std::min(b * block, found.live), end = std::min(begin + block, found.live);
    const bool any = accumulate_block(call, item, found, begin, end, buffers);
    for (int64_t r = 0; r < found.rows; ++r) {
      const auto [t, h] = query_row(call, item, found, r);
      const float l = any ? close_block(*buffers.rows, r) : 0;
      out.l[out.l_at(t, h, b)] = l;
      out.m[out.m_at(t, h, b)] = any ? buffers.rows->m[r] : kNoScore;
      if (l == 0 && !whole) continue;
      const float* o = buffers.block_o + r * stride;
      for (int64_t d = 0; d < call.Dv; d += 4)
        for (int64_t i = 0; i < 4; ++i) out.o[out.o_at(t, h, b, d) + i] = any ? o[d + i] : 0;
    }
  }
}

void compute_attention(const AttentionCall& call, const AttentionWorkItem& item, const OutputEpilogue& epilogue, void* memory) {
  const ResolvedItem found = resolve_item(call, item);
  if (found.rows == 0) return;
  AttentionBuffers buffers;
  lay_out_buffers(call, memory, buffers);
  QueryRowState& rows = *buffers.rows;
  const int64_t block = call.block(found.live), stride = buffer_dim(call.Dv);
  if (call.integer && found.live > 0)
    prefetch_keys(call, lane_tile(call, item, token_run(*call.cache, item.n, found.appended, 0, found.live)));
  prepare_queries(call, item, found, buffers);
  for (int64_t r = 0; r < found.rows; ++r) rows.sum[r] = {};
  fill_row(buffers.o, found.rows * stride, 0);
  for (int64_t begin = 0; begin < found.live; begin += block) {
    if (!accumulate_block(call, item, found, begin, std::min(begin + block, found.live), buffers)) continue;
    for (int64_t r = 0; r < found.rows; ++r) {
      const float l = close_block(rows, r);
      merge_partial(rows.sum[r], buffers.o + r * stride, rows.m[r], l, buffers.block_o + r * stride, padded_dim(call.Dv));
    }
  }
  for (int64_t r = 0; r < found.rows; ++r) {
    const QueryRow at = query_row(call, item, found, r);
    finish_row(epilogue, rows.sum[r], buffers.o + r * stride, at.t, at.h);
  }
}

void merge_query_row(const PartialsView& in, int64_t count, const OutputEpilogue& epilogue, int64_t t, int64_t h) {
  HWY_ALIGN float o[kPaddedHeadDim];
  HWY_ALIGN float partial[kPaddedHeadDim];
  const int64_t padded = padded_dim(epilogue.Dv);
  fill_row(o, padded, 0);
  fill_row(partial, padded, 0);
  SoftmaxSum<float> sum;
  for (int64_t b = 0; b < count; ++b) {
    if (in.empty(t, h, b)) continue;
    for (int64_t d = 0; d < epilogue.Dv; d += 4)
      for (int64_t i = 0; i < 4; ++i) partial[d + i] = in.o[in.o_at(t, h, b, d) + i];
    merge_partial(sum, o, in.m[in.m_at(t, h, b)], in.l[in.l_at(t, h, b)], partial, padded);
  }
  finish_row(epilogue, sum, o, t, h);
}

// Scores of live tokens [first_block, end_block) * kBlockTokens. Columns without a visible token become minus infinity.
void compute_scores(const AttentionCall& call, const AttentionWorkItem& item, const Tensor& scores, void* memory) {
  const ResolvedItem found = resolve_item(call, item);
  if (found.rows == 0) return;
  AttentionBuffers buffers;
  lay_out_buffers(call, memory, buffers);
  QueryRowState& rows = *buffers.rows;
  const int64_t context = scores.size(2);
  const int64_t first = item.first_block * kBlockTokens, last = std::min(item.end_block * kBlockTokens, context);
  const int64_t end = std::clamp(found.live, first, last);
  prepare_queries(call, item, found, buffers);
  const RowsView view = rows_view(scores);
  const auto out_at = [&](int64_t r) HWY_ATTR {
    const QueryRow at = query_row(call, item, found, r);
    return view.at(at.t, at.h);
  };
  HWY_ALIGN float none[kTileTokens];
  fill_row(none, kTileTokens, kNoScore);
  for (int64_t r = 0; r < found.rows; ++r)
    for (int64_t j = first; j < last; j += kTileTokens)
      pack_row(none, std::min(kTileTokens, last - j), view.dtype, view.data, out_at(r) + j);
  // Stores the scores s of query row r and a tile whose first token is live token j.
  const auto store = [&](int64_t r, const TokenTile& tile, int64_t j, float* s) HWY_ATTR {
    const SlotRange slots = visible_slots(tile, rows.first[r], rows.end[r]);
    if (!slots.empty())
      pack_row(s + slots.begin, slots.end - slots.begin, view.dtype, view.data, out_at(r) + j + slots.begin - tile.begin);
  };
  if (call.integer) {
    for_each_lane_tile(call, item, found, first, end,
                       [&](int64_t j, const TokenTile& tile, const LaneTile& bytes, const LaneTile& next) HWY_ATTR {
                         HWY_ALIGN float gains[kTileTokens];
                         load_gains(call.k, bytes.k, gains);
                         ByteDots dots = tile_dots(call, call.k, call.k_levels, bytes.k, found.rows, buffers.levels);
                         dots.prefetch = next.k;
                         dots.prefetch_bytes = tile_bytes(call.k);
                         for (int64_t g = 0; g < found.rows; g += kDotRows) {
                           const int64_t n = std::min(found.rows - g, kDotRows);
                           byte_dots(dots, buffers.q_operands + g * operand_words(call.Dk), rows.q_sum + g, n, buffers.dots);
                           for (int64_t r = g; r < g + n; ++r) {
                             integer_scores(rows, r, buffers.dots + (r - g) * kTileTokens, gains, buffers.s);
                             if (call.mask.softcap) cap_scores(*call.mask.softcap, kTileTokens, buffers.s);
                             store(r, tile, j, buffers.s);
                           }
                         }
                       });
    return;
  }
  TokenTile tile;
  TileRuns runs;
  Ahead nothing;
  for (int64_t j = first; j < end;) {
    j = find_tile(call, item.n, found.appended, j, end, tile, runs);
    if (tile.end == 0) continue;
    decoded_scores(call, item.hk, tile, runs, found.rows, false, nothing, buffers);
    for (int64_t r = 0; r < found.rows; ++r) store(r, tile, j - tile.end, buffers.s + r * kTileTokens);
  }
}

// Weighted sums of V rows, with the caller's weights.
void compute_values(const AttentionCall& call, const AttentionWorkItem& item, const AttentionValuesArgs& args,
                    const OutputEpilogue& epilogue, void* memory) {
  const ResolvedItem found = resolve_item(call, item);
  if (found.rows == 0) return;
  AttentionBuffers buffers;
  lay_out_buffers(call, memory, buffers);
  const int64_t stride = buffer_dim(call.Dv), end = std::min(found.live, args.weights.size(2));
  const RowsView weights = rows_view(args.weights);
  fill_row(buffers.o, (found.rows + kDotRows - 1) / kDotRows * kDotRows * stride, 0);
  double total[kQueryBlock] = {};  // sums of the weights at or above the threshold
  TokenTile tile;
  TileRuns runs;
  Ahead nothing;
  for (int64_t j = 0; j < end;) {
    j = find_tile(call, item.n, found.appended, j, end, tile, runs);
    if (tile.end == 0) continue;
    for (int64_t r = 0; r < found.rows; ++r) {
      float* w = buffers.s + r * kTileTokens;
      const QueryRow at = query_row(call, item, found, r);
      unpack_row(weights.dtype, weights.data, weights.at(at.t, at.h) + j - tile.end, tile.end, w);
      for (int64_t i = 0; i < tile.end; ++i) {
        if (args.threshold && !(w[i] >= *args.threshold)) w[i] = 0;
        total[r] += w[i];
      }
    }
    add_values(call, item.hk, tile, runs, found.rows, args.threshold.has_value(), false, nothing, buffers, buffers.o);
  }
  for (int64_t r = 0; r < found.rows; ++r) {
    const QueryRow at = query_row(call, item, found, r);
    store_row(epilogue, buffers.o + r * stride, static_cast<float>(total[r]), at.t, at.h);
  }
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
