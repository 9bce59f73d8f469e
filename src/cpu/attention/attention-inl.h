// The kernels of attention: a piece of rows over blocks of live tokens.
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

// A piece, looked up: which rows there are and which tokens live.
struct LivePiece {
  TokenRange range;
  int64_t rows = 0;  // 0: nothing to do
  int64_t appended = 0, live = 0;
};

HWY_INLINE LivePiece live_piece(const AttentionCall& call, const AttentionPiece& piece) {
  LivePiece found;
  found.range = tokens_of(call.sequences, piece.n, call.T);
  found.rows = std::clamp<int64_t>(found.range.length() * call.R - piece.first_row, 0, kRowBlock);
  if (found.rows == 0) return found;
  found.appended = appended_tokens(*call.cache, piece.n);
  found.live = live_tokens(*call.cache, found.appended);
  return found;
}

HWY_INLINE RowAt row_at(const AttentionCall& call, const AttentionPiece& piece, const LivePiece& found, int64_t r) {
  return row_at(call, found.range, piece.hk, piece.first_row + r);
}

HWY_INLINE LaneTile lane_tile(const AttentionCall& call, const AttentionPiece& piece, const TokenRun& run) {
  if (!run.at.exists()) return {};
  return {call.k.tile(run.at.block, piece.hk, run.at.row), call.v.tile(run.at.block, piece.hk, run.at.row)};
}

// Calls visit(j, tile, bytes, next bytes) for every lane tile of live tokens [begin, end) that exists.
template <class Visit>
HWY_INLINE void for_each_lane_tile(const AttentionCall& call, const AttentionPiece& piece, const LivePiece& found, int64_t begin,
                                   int64_t end, Visit&& visit) {
  const auto run_at = [&](int64_t j) HWY_ATTR {
    return j < found.live ? token_run(*call.cache, piece.n, found.appended, j, found.live) : TokenRun{};
  };
  TokenRun run = run_at(begin);
  for (int64_t j = begin; j < end;) {
    const int64_t count = std::min(run.count, end - j);
    const TokenRun next = run_at(j + count);
    if (run.at.exists()) {
      const int64_t slot = run.at.row % kTileTokens;
      visit(j, TokenTile{slot, slot + count, run.position}, lane_tile(call, piece, run), lane_tile(call, piece, next));
    }
    j += count;
    run = next;
  }
}

// Live tokens [begin, end) into the block of every row. False: no row sees any of them.
HWY_INLINE bool walk_block(const AttentionCall& call, const AttentionPiece& piece, const LivePiece& found, int64_t begin,
                           int64_t end, AttentionMemory& m) {
  if (begin >= end) return false;
  const AttentionRows& rows = *m.rows;
  const KvCache& cache = *call.cache;
  const int64_t first = live_position(cache, found.appended, begin), last = live_position(cache, found.appended, end - 1);
  if (last < rows.first_of_all || first >= rows.end_of_all) return false;
  start_block(call, m, found.rows);
  if (call.integer) {
    for_each_lane_tile(call, piece, found, begin, end,
                       [&](int64_t, const TokenTile& tile, const LaneTile& bytes, const LaneTile& next) HWY_ATTR {
                         if (visible_slots(tile, rows.first_of_all, rows.end_of_all).empty()) return;
                         integer_tile(call, tile, bytes, next, found.rows, m);
                       });
    return true;
  }
  TokenTile tile;
  for (int64_t j = begin; j < end;) {
    // Tokens that no row sees are not decoded.
    const int64_t ahead = std::min(end, j + kTileTokens);
    if (live_position(cache, found.appended, ahead - 1) < rows.first_of_all ||
        live_position(cache, found.appended, j) >= rows.end_of_all) {
      j = ahead;
      continue;
    }
    j = decode_tile(call, piece.n, piece.hk, found.appended, j, end, tile, m.k, m.v);
    if (tile.end > 0) decoded_tile(call, tile, found.rows, m);
  }
  return true;
}

void attention_partials_piece(const AttentionCall& call, const AttentionPiece& piece, const PartialsView& out, bool whole,
                              void* memory) {
  const LivePiece found = live_piece(call, piece);
  if (found.rows == 0) return;
  AttentionMemory m;
  lay_out(call, memory, m);
  const int64_t block = call.block(found.live), stride = buffer_dim(call.Dv);
  // Rows are not needed where all blocks are empty.
  if (piece.first_block * block < found.live)
    prepare_rows(call, piece.hk, found.range, found.appended, piece.first_row, found.rows, m);
  for (int64_t b = piece.first_block; b < piece.end_block; ++b) {
    const int64_t begin = std::min(b * block, found.live), end = std::min(begin + block, found.live);
    const bool any = walk_block(call, piece, found, begin, end, m);
    for (int64_t r = 0; r < found.rows; ++r) {
      const auto [t, h] = row_at(call, piece, found, r);
      const float l = any ? close_block(*m.rows, r) : 0;
      out.l[out.l_at(t, h, b)] = l;
      out.m[out.m_at(t, h, b)] = any ? m.rows->m[r] : kNoScore;
      if (l == 0 && !whole) continue;
      const float* o = m.block_o + r * stride;
      for (int64_t d = 0; d < call.Dv; d += 4)
        for (int64_t i = 0; i < 4; ++i) out.o[out.o_at(t, h, b, d) + i] = any ? o[d + i] : 0;
    }
  }
}

void attention_piece(const AttentionCall& call, const AttentionPiece& piece, const RowFinish& finish, void* memory) {
  const LivePiece found = live_piece(call, piece);
  if (found.rows == 0) return;
  AttentionMemory m;
  lay_out(call, memory, m);
  AttentionRows& rows = *m.rows;
  const int64_t block = call.block(found.live), stride = buffer_dim(call.Dv);
  if (call.integer && found.live > 0)
    prefetch_keys(call, lane_tile(call, piece, token_run(*call.cache, piece.n, found.appended, 0, found.live)));
  prepare_rows(call, piece.hk, found.range, found.appended, piece.first_row, found.rows, m);
  for (int64_t r = 0; r < found.rows; ++r) rows.sum[r] = {};
  fill_row(m.o, found.rows * stride, 0);
  for (int64_t begin = 0; begin < found.live; begin += block) {
    if (!walk_block(call, piece, found, begin, std::min(begin + block, found.live), m)) continue;
    for (int64_t r = 0; r < found.rows; ++r) {
      const float l = close_block(rows, r);
      join_row(rows.sum[r], m.o + r * stride, rows.m[r], l, m.block_o + r * stride, padded_dim(call.Dv));
    }
  }
  for (int64_t r = 0; r < found.rows; ++r) {
    const RowAt at = row_at(call, piece, found, r);
    finish_row(finish, rows.sum[r], m.o + r * stride, at.t, at.h);
  }
}

void attention_merge_row(const PartialsView& in, int64_t count, const RowFinish& finish, int64_t t, int64_t h) {
  HWY_ALIGN float o[kPaddedHeadDim];
  HWY_ALIGN float part[kPaddedHeadDim];
  const int64_t padded = padded_dim(finish.Dv);
  fill_row(o, padded, 0);
  fill_row(part, padded, 0);
  SoftmaxSum<float> sum;
  for (int64_t b = 0; b < count; ++b) {
    if (in.empty(t, h, b)) continue;
    for (int64_t d = 0; d < finish.Dv; d += 4)
      for (int64_t i = 0; i < 4; ++i) part[d + i] = in.o[in.o_at(t, h, b, d) + i];
    join_row(sum, o, in.m[in.m_at(t, h, b)], in.l[in.l_at(t, h, b)], part, padded);
  }
  finish_row(finish, sum, o, t, h);
}

// Scores of live tokens [first_block, end_block) * kBlockTokens, and minus infinity in columns without a token.
void attention_scores_piece(const AttentionCall& call, const AttentionPiece& piece, const Tensor& scores, void* memory) {
  const LivePiece found = live_piece(call, piece);
  if (found.rows == 0) return;
  AttentionMemory m;
  lay_out(call, memory, m);
  AttentionRows& rows = *m.rows;
  const int64_t context = scores.size(2);
  const int64_t first = piece.first_block * kBlockTokens, last = std::min(piece.end_block * kBlockTokens, context);
  const int64_t end = std::clamp(found.live, first, last);
  prepare_rows(call, piece.hk, found.range, found.appended, piece.first_row, found.rows, m);
  const RowsView view = rows_view(scores);
  const auto out_at = [&](int64_t r) HWY_ATTR {
    const RowAt at = row_at(call, piece, found, r);
    return view.at(at.t, at.h);
  };
  HWY_ALIGN float none[kTileTokens];
  fill_row(none, kTileTokens, kNoScore);
  for (int64_t r = 0; r < found.rows; ++r)
    for (int64_t j = first; j < last; j += kTileTokens)
      pack_row(none, std::min(kTileTokens, last - j), view.dtype, view.data, out_at(r) + j);
  // Scores of row r in s, of a tile whose first token is live token j.
  const auto store = [&](int64_t r, const TokenTile& tile, int64_t j, float* s) HWY_ATTR {
    const SlotRange slots = visible_slots(tile, rows.first[r], rows.end[r]);
    if (!slots.empty())
      pack_row(s + slots.begin, slots.end - slots.begin, view.dtype, view.data, out_at(r) + j + slots.begin - tile.begin);
  };
  if (call.integer) {
    for_each_lane_tile(call, piece, found, first, end,
                       [&](int64_t j, const TokenTile& tile, const LaneTile& bytes, const LaneTile& next) HWY_ATTR {
                         HWY_ALIGN float gains[kTileTokens];
                         load_gains(call.k, bytes.k, gains);
                         ByteDots dots = tile_dots(call, call.k, call.k_levels, bytes.k, found.rows, m.levels);
                         dots.ahead = next.k;
                         dots.ahead_bytes = tile_bytes(call.k);
                         for (int64_t g = 0; g < found.rows; g += kDotRows) {
                           const int64_t n = std::min(found.rows - g, kDotRows);
                           byte_dots(dots, m.q_operands + g * operand_words(call.Dk), rows.q_sum + g, n, m.dots);
                           for (int64_t r = g; r < g + n; ++r) {
                             integer_scores(rows, r, m.dots + (r - g) * kTileTokens, gains, m.s);
                             if (call.mask.softcap) cap_scores(*call.mask.softcap, kTileTokens, m.s);
                             store(r, tile, j, m.s);
                           }
                         }
                       });
    return;
  }
  TokenTile tile;
  for (int64_t j = first; j < end;) {
    j = decode_tile(call, piece.n, piece.hk, found.appended, j, end, tile, m.k, nullptr);
    for (int64_t g = 0; g < found.rows && tile.end > 0; g += kDotRows) {
      decoded_dots(call, tile, g, m);
      for (int64_t r = g; r < std::min(found.rows, g + kDotRows); ++r) {
        float* s = m.s + (r - g) * kTileTokens;
        decoded_scores(rows, r, s);
        if (call.mask.softcap) cap_scores(*call.mask.softcap, kTileTokens, s);
        store(r, tile, j - tile.end, s);
      }
    }
  }
}

// Weighted sums of V rows: the weights are the caller's.
void attention_values_piece(const AttentionCall& call, const AttentionPiece& piece, const AttentionValuesArgs& args,
                            const RowFinish& finish, void* memory) {
  const LivePiece found = live_piece(call, piece);
  if (found.rows == 0) return;
  AttentionMemory m;
  lay_out(call, memory, m);
  const int64_t stride = buffer_dim(call.Dv), end = std::min(found.live, args.weights.size(2));
  const RowsView weights = rows_view(args.weights);
  fill_row(m.o, (found.rows + kDotRows - 1) / kDotRows * kDotRows * stride, 0);
  double total[kRowBlock] = {};  // of the weights that count
  TokenTile tile;
  for (int64_t j = 0; j < end;) {
    j = decode_tile(call, piece.n, piece.hk, found.appended, j, end, tile, nullptr, m.v);
    if (tile.end == 0) continue;
    const bool finite = !args.threshold || all_finite(call, tile, m.v);
    for (int64_t g = 0; g < found.rows; g += kDotRows) {
      const int64_t n = std::min(found.rows - g, kDotRows);
      fill_row(m.s, kDotRows * kTileTokens, 0);
      for (int64_t r = g; r < g + n; ++r) {
        float* w = m.s + (r - g) * kTileTokens;
        const RowAt at = row_at(call, piece, found, r);
        unpack_row(weights.dtype, weights.data, weights.at(at.t, at.h) + j - tile.end, tile.end, w);
        for (int64_t i = 0; i < tile.end; ++i) {
          if (args.threshold && !(w[i] >= *args.threshold)) w[i] = 0;
          total[r] += w[i];
        }
      }
      add_decoded(call, m.s, n, finite, m.v, m.o + g * stride);
    }
  }
  for (int64_t r = 0; r < found.rows; ++r) {
    const RowAt at = row_at(call, piece, found, r);
    store_row(finish, m.o + r * stride, static_cast<float>(total[r]), at.t, at.h);
  }
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
