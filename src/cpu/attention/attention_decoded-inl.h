// Attention in f32 on KV rows: f16, bf16 and f32 rows are read in place by few query rows, all others are decoded to f32 first. Every way
// computes the same sums in the same order.
// Included once per target, after foreach_target.h.
#if defined(WEFT_CPU_ATTENTION_DECODED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_CPU_ATTENTION_DECODED_INL_H_
#undef WEFT_CPU_ATTENTION_DECODED_INL_H_
#else
#define WEFT_CPU_ATTENTION_DECODED_INL_H_
#endif

#include "cpu/attention/query_rows-inl.h"
#include "cpu/common/gemm-inl.h"
#include "cpu/common/prefetch.h"
#include "cpu/kv/kv_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::cpu::HWY_NAMESPACE {

static_assert(kTileRows == kDotRows);

// ---- rows of a tile

// Where the tokens of a tile are: runs of consecutive cache rows of one block and tile.
struct TileRuns {
  struct Run {
    KvLocation at;
    int64_t slot, count;
  };
  Run runs[kTileTokens];
  int64_t count = 0;
};

// Finds the next tokens of a sequence from live token j on: up to 64 that are in the cache at consecutive positions. Returns the live
// token after them.
inline int64_t find_tile(const AttentionCall& call, int64_t n, int64_t appended, int64_t j, int64_t end, TokenTile& tile,
                         TileRuns& runs) {
  tile.begin = tile.end = 0;
  runs.count = 0;
  while (j < end && tile.end < kTileTokens) {
    const TokenRun run = token_run(*call.cache, n, appended, j, std::min(end, j + kTileTokens - tile.end));
    if (tile.end > 0 && (!run.at.exists() || run.position != tile.position + tile.end)) break;
    j += run.count;
    if (!run.at.exists()) continue;
    if (tile.end == 0) tile.position = run.position;
    runs.runs[runs.count++] = {run.at, tile.end, run.count};
    tile.end += run.count;
  }
  return j;
}

struct LoadF32 {
  static HWY_INLINE VF at(const uint8_t* row, int64_t i) { return hn::LoadU(F32(), reinterpret_cast<const float*>(row) + i); }
};
struct LoadF16 {
  static HWY_INLINE VF at(const uint8_t* row, int64_t i) { return load_f16(reinterpret_cast<const uint16_t*>(row) + i); }
};
struct LoadBf16 {
  static HWY_INLINE VF at(const uint8_t* row, int64_t i) { return load_bf16(reinterpret_cast<const uint16_t*>(row) + i); }
};

// Consecutive slots [begin, end) of a tile. row[t - begin] is the row of slot t. The last row is repeated up to a multiple of kDotRows
// slots.
struct RowChunk {
  const uint8_t* row[kTileTokens];
  int64_t begin, end;

  void repeat_last() {
    for (int64_t t = end; t > begin && (t - begin) % kDotRows != 0; ++t) row[t - begin] = row[end - 1 - begin];
  }
};

// Rows that many query rows share are decoded once, since a conversion per use would cost more.
constexpr int64_t kMostRowsInPlace = 2 * kDotRows;
// One group of query rows uses decoded rows once: so few of them stay in the L1 cache.
constexpr int64_t kFewTokens = 16;

HWY_INLINE bool reads_in_place(const SideView& side, int64_t query_rows) {
  return side.passthrough() && side.D % kLanes == 0 && query_rows <= kMostRowsInPlace;
}

// Decodes slots [chunk.begin, chunk.end) to `buffer`.
inline void decode_chunk(const SideView& side, int64_t hk, const TileRuns& runs, RowChunk& chunk, float* buffer) {
  const int64_t stride = buffer_dim(side.D);
  for (int64_t i = 0; i < runs.count; ++i) {
    const TileRuns::Run& run = runs.runs[i];
    const int64_t first = std::max(run.slot, chunk.begin), last = std::min(run.slot + run.count, chunk.end);
    if (first < last)
      decode_rows(side, run.at.block, hk, run.at.row + first - run.slot, last - first, buffer + (first - chunk.begin) * stride,
                  stride);
  }
  for (int64_t t = chunk.begin; t < chunk.end; ++t)
    chunk.row[t - chunk.begin] = reinterpret_cast<const uint8_t*>(buffer + (t - chunk.begin) * stride);
}

// Calls use(load, chunk) for all slots of a tile, in order. `load` reads a vector of a row.
template <class Use>
HWY_INLINE void for_row_chunks(const SideView& side, int64_t hk, const TokenTile& tile, const TileRuns& runs, int64_t query_rows,
                               float* buffer, Use&& use) {
  RowChunk chunk;
  if (reads_in_place(side, query_rows)) {
    chunk.begin = 0;
    chunk.end = tile.end;
    for (int64_t i = 0; i < runs.count; ++i) {
      const TileRuns::Run& run = runs.runs[i];
      const uint8_t* first = side.codes_at(run.at.block, hk, run.at.row);
      const int64_t stride = side.storage == KvStorage::rows ? side.code_row : side.row_code_bytes;
      for (int64_t t = 0; t < run.count; ++t) chunk.row[run.slot + t] = first + t * stride;
    }
    chunk.repeat_last();
    switch (*side.format->passthrough) {
      case DType::f16: return use(LoadF16(), chunk);
      case DType::bf16: return use(LoadBf16(), chunk);
      default: return use(LoadF32(), chunk);
    }
  }
  const int64_t most = query_rows <= kDotRows ? kFewTokens : kTileTokens;
  for (int64_t t = 0; t < tile.end; t += most) {
    chunk.begin = t;
    chunk.end = std::min(t + most, tile.end);
    decode_chunk(side, hk, runs, chunk, buffer);
    chunk.repeat_last();
    use(LoadF32(), chunk);
  }
}

// Rows that the next pass reads. The current pass prefetches them in steps, because the hardware prefetches too few rows by itself.
class Ahead {
 public:
  Ahead() = default;  // prefetches nothing
  Ahead(const SideView& side, int64_t hk, const TileRuns& runs) {
    const bool lanes = side.storage == KvStorage::lane_tiles;  // tokens share bytes there: each gets a part of the tile
    bytes_ = lanes ? ceil_div(tile_bytes(side), kTileTokens) : side.row_code_bytes;
    for (int64_t i = 0; i < runs.count; ++i) {
      const TileRuns::Run& run = runs.runs[i];
      const int64_t stride = lanes ? bytes_ : side.storage == KvStorage::rows ? side.code_row : side.row_code_bytes;
      const uint8_t* first = lanes ? side.tile(run.at.block, hk, run.at.row) + run.at.row % kTileTokens * bytes_
                                   : side.codes_at(run.at.block, hk, run.at.row);
      for (int64_t t = 0; t < run.count; ++t) row_[run.slot + t] = first + t * stride;
      end_ += run.count;
    }
  }
  HWY_INLINE void step(int64_t rows) {
    for (; rows > 0 && next_ < end_; --rows, ++next_)
      for (int64_t i = 0; i < bytes_; i += 64) prefetch_line(row_[next_] + i);
  }

 private:
  int64_t bytes_ = 0, next_ = 0, end_ = 0;
  const uint8_t* row_[kTileTokens];
};

// ---- scores

// Interleaves the prepared queries for dots_of_rows(): vector i of the four rows of a group, then vector i + 1.
inline void interleave_queries(const AttentionCall& call, int64_t count, AttentionBuffers& buffers) {
  const F32 d;
  const int64_t stride = buffer_dim(call.Dk);
  HWY_ALIGN float rows[kDotRows * kPaddedHeadDim];
  for (int64_t g = 0; g < count; g += kDotRows) {
    float* q = buffers.q + g * stride;
    std::copy_n(q, kDotRows * stride, rows);
    for (int64_t i = 0; i < stride; i += kLanes)
      for (int64_t r = 0; r < kDotRows; ++r) hn::Store(hn::Load(d, rows + r * stride + i), d, q + kDotRows * i + r * kLanes);
  }
}

// Dot products of four interleaved query rows with four rows of K: s[r * 64 + c].
template <class Load>
HWY_INLINE void dots_of_rows(const float* HWY_RESTRICT q, const uint8_t* const* rows, int64_t count, float* HWY_RESTRICT s) {
  const F32 d;
  const uint8_t *k0 = rows[0], *k1 = rows[1], *k2 = rows[2], *k3 = rows[3];
  VF sum[4][4];
  WEFT_UNROLL for (int r = 0; r < 4; ++r) WEFT_UNROLL for (int c = 0; c < 4; ++c) sum[r][c] = hn::Zero(d);
  for (int64_t i = 0; i < count; i += kLanes, q += kDotRows * kLanes) {
    const VF row[4] = {Load::at(k0, i), Load::at(k1, i), Load::at(k2, i), Load::at(k3, i)};
    WEFT_UNROLL for (int r = 0; r < 4; ++r) {
      const VF x = hn::Load(d, q + r * kLanes);
      WEFT_UNROLL for (int c = 0; c < 4; ++c) sum[r][c] = hn::MulAdd(x, row[c], sum[r][c]);
    }
  }
  WEFT_UNROLL for (int r = 0; r < 4; ++r) sum_lanes4(sum[r], s + r * kTileTokens);
}

// Scores of all query rows with a tile: s[rows, 64]. Query rows that see nothing of the tile are left out if `visible_only`.
inline void decoded_scores(const AttentionCall& call, int64_t hk, const TokenTile& tile, const TileRuns& runs, int64_t count,
                           bool visible_only, Ahead& ahead, AttentionBuffers& buffers) {
  const F32 d;
  const QueryRowState& rows = *buffers.rows;
  const int64_t stride = buffer_dim(call.Dk), Dk = padded_dim(call.Dk);
  const auto skipped = [&](int64_t g) HWY_ATTR { return visible_only && none_visible(rows, g, std::min(count, g + kDotRows)); };
  for_row_chunks(call.k, hk, tile, runs, count, buffers.decoded, [&](auto load, const RowChunk& chunk) HWY_ATTR {
    for (int64_t g = 0; g < count; g += kDotRows)
      for (int64_t t = chunk.begin; t < chunk.end && !skipped(g); t += kDotRows) {
        dots_of_rows<decltype(load)>(buffers.q + g * stride, chunk.row + (t - chunk.begin), Dk, buffers.s + g * kTileTokens + t);
        ahead.step(kDotRows);
      }
  });
  for (int64_t r = 0; r < count; ++r) {
    if (skipped(r / kDotRows * kDotRows)) continue;
    float* s = buffers.s + r * kTileTokens;
    const VF scale = hn::Set(d, rows.unit[r]), mean = hn::Set(d, rows.mean[r]);
    for (int64_t i = 0; i < kTileTokens; i += kLanes) hn::Store(hn::MulAdd(hn::Load(d, s + i), scale, mean), d, s + i);
    if (call.mask.softcap) cap_scores(*call.mask.softcap, kTileTokens, s);
  }
}

// ---- values

// o[r][0, kVectors) += sum_t weights[r][t] row_t for four query rows. o and the rows begin at coordinate `column`.
template <class Load, int64_t kVectors>
HWY_INLINE void add_columns(const float* HWY_RESTRICT weights, const RowChunk& chunk, int64_t column, float* HWY_RESTRICT o,
                            int64_t stride, Ahead& ahead) {
  const F32 d;
  VF sum[kDotRows][kVectors];
  WEFT_UNROLL for (int64_t r = 0; r < kDotRows; ++r) WEFT_UNROLL for (int64_t n = 0; n < kVectors; ++n) sum[r][n] =
      hn::LoadU(d, o + r * stride + n * kLanes);
  for (int64_t t = chunk.begin; t < chunk.end; ++t) {
    const uint8_t* row = chunk.row[t - chunk.begin];
    ahead.step(1);
    VF v[kVectors];
    WEFT_UNROLL for (int64_t n = 0; n < kVectors; ++n) v[n] = Load::at(row, column + n * kLanes);
    WEFT_UNROLL for (int64_t r = 0; r < kDotRows; ++r) {
      const VF weight = hn::Set(d, weights[r * kTileTokens + t]);
      WEFT_UNROLL for (int64_t n = 0; n < kVectors; ++n) sum[r][n] = hn::MulAdd(weight, v[n], sum[r][n]);
    }
  }
  WEFT_UNROLL for (int64_t r = 0; r < kDotRows; ++r) WEFT_UNROLL for (int64_t n = 0; n < kVectors; ++n)
      hn::StoreU(sum[r][n], d, o + r * stride + n * kLanes);
}

// o[r] += sum_t weight[r][t] v[t] for four query rows, of which `count` exist. A V row of weight 0 may hold NaN or infinity, and 0 times
// that is NaN. Where the chunk is not finite, tokens are added one by one and those of weight 0 skipped.
template <class Load>
HWY_INLINE void add_rows(const AttentionCall& call, const float* weights, int64_t count, bool finite, const RowChunk& chunk,
                         Ahead& ahead, float* o) {
  const F32 d;
  const int64_t stride = buffer_dim(call.Dv), Dv = padded_dim(call.Dv);
  if (finite) {
    int64_t column = 0;
    for (; column + kPanel <= Dv; column += kPanel)
      add_columns<Load, kTileVectors>(weights, chunk, column, o + column, stride, ahead);
    for (; column < Dv; column += kLanes) add_columns<Load, 1>(weights, chunk, column, o + column, stride, ahead);
    return;
  }
  for (int64_t r = 0; r < count; ++r)
    for (int64_t t = chunk.begin; t < chunk.end; ++t) {
      const float weight = weights[r * kTileTokens + t];
      for (int64_t i = 0; i < Dv && weight != 0; i += kLanes) {
        float* to = o + r * stride + i;
        hn::Store(hn::MulAdd(hn::Set(d, weight), Load::at(chunk.row[t - chunk.begin], i), hn::Load(d, to)), d, to);
      }
    }
}

template <class Load>
HWY_INLINE bool all_finite(const RowChunk& chunk, int64_t Dv) {
  const F32 d;
  VF sum = hn::Zero(d);
  for (int64_t t = chunk.begin; t < chunk.end; ++t)
    for (int64_t i = 0; i < Dv; i += kLanes) sum = hn::MulAdd(Load::at(chunk.row[t - chunk.begin], i), hn::Zero(d), sum);
  return hn::GetLane(hn::SumOfLanes(d, sum)) == 0;
}

// o[r] += sum_t s[r][t] v[t] for all query rows and a tile. weightless: may a token that is in the tile have weight 0, and not count?
// s is written only behind the last query row. visible_only as in decoded_scores().
inline void add_values(const AttentionCall& call, int64_t hk, const TokenTile& tile, const TileRuns& runs, int64_t count,
                       bool weightless, bool visible_only, Ahead& ahead, AttentionBuffers& buffers, float* o) {
  const int64_t stride = buffer_dim(call.Dv), all = (count + kDotRows - 1) / kDotRows * kDotRows;
  fill_row(buffers.s + count * kTileTokens, (all - count) * kTileTokens, 0);
  for_row_chunks(call.v, hk, tile, runs, count, buffers.decoded, [&](auto load, const RowChunk& chunk) HWY_ATTR {
    using Load = decltype(load);
    const bool finite = !weightless || all_finite<Load>(chunk, padded_dim(call.Dv));
    for (int64_t g = 0; g < count; g += kDotRows) {
      const int64_t end = std::min(count, g + kDotRows);
      if (!visible_only || !none_visible(*buffers.rows, g, end))
        add_rows<Load>(call, buffers.s + g * kTileTokens, end - g, finite, chunk, ahead, o + g * stride);
    }
  });
}

// Online-softmax step: adds the tokens of a tile to the current block of every query row.
// `next` is the tile after it.
inline void decoded_tile(const AttentionCall& call, int64_t hk, const TokenTile& tile, const TileRuns& runs, const TileRuns& next,
                         int64_t count, AttentionBuffers& buffers) {
  QueryRowState& rows = *buffers.rows;
  const int64_t Dv = call.Dv, stride = buffer_dim(Dv);
  const bool all_visible = find_visible_slots(tile, count, rows);
  Ahead values(call.v, hk, runs);
  decoded_scores(call, hk, tile, runs, count, true, values, buffers);
  for (int64_t g = 0; g < count; g += kDotRows) {
    const int64_t end = std::min(count, g + kDotRows);
    if (none_visible(rows, g, end)) continue;
    with_rows(end - g, [&](auto n) HWY_ATTR {
      softmax_step<decltype(n)::value>(rows, g, buffers.s + g * kTileTokens, buffers.block_o + g * stride, Dv);
    });
  }
  Ahead next_keys(call.k, hk, next);
  add_values(call, hk, tile, runs, count, !all_visible, true, next_keys, buffers, buffers.block_o);
}

}  // namespace weft::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
