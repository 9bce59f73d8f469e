// attention_scores, attention_values and attention_partials on cuda, in f32, for any format, layout and cache.
//
// A block decodes tiles of 32 tokens into shared memory once for all of its query rows.
#include "cuda/attention/attention_partials.cuh"

#include "cuda/common/launch.cuh"
#include "cuda/table.h"

namespace weft::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kTokens = 32;                                         // of a tile
constexpr int kRowsPerWarp = kRows / kWarps;                        // in softmax and scores
constexpr int kColumns = static_cast<int>(kMaxHeadDim) / kThreads;  // coordinates of o of a thread
constexpr int64_t kScoreSpan = 256;                                 // tokens of a block of attention_scores

// Floats between the rows of a tile: odd, so that neither a token in each lane nor a coordinate in each lane conflicts.
__host__ __device__ constexpr int tile_stride(int D) { return D + 1; }

// Dynamic shared memory in floats: levels, then a tile, then query rows, all 16-byte aligned. Query rows are rotated before the first
// tile is decoded and output rows after the last one, so both take their spare room from the tile.
struct Shape {
  int Dk = 0, Dv = 0;
  __host__ __device__ int D() const { return Dk > Dv ? Dk : Dv; }
  __host__ __device__ int tile() const { return (kTokens * tile_stride(D()) + 3) / 4 * 4; }
  size_t bytes(int rows) const { return static_cast<size_t>(512 + tile() + rows * D()) * sizeof(float); }
};
static_assert(kRows + kWarps * 2 <= kTokens, "output rows and spare rows fit a tile");

__device__ void load_levels(const SideView& side, float* levels) {
  for (int c = threadIdx.x; !side.passthrough && c < 1 << side.bits; c += kThreads) levels[c] = side.codebook[c];
}

// Live tokens [first, first + count) of a sequence: position and location of each. Position -1: the token does not exist.
struct TokenTile {
  int64_t block[kTokens], row[kTokens];
  int position[kTokens];
};
__device__ void locate_tokens(const CacheIndex& index, int64_t n, int64_t appended, int64_t first, int count, TokenTile& tokens) {
  if (threadIdx.x < kTokens) {
    KvLocation at;
    int64_t position = -1;
    if (static_cast<int>(threadIdx.x) < count) {
      position = live_position(index, appended, first + threadIdx.x);
      at = locate(index, n, position);
    }
    tokens.block[threadIdx.x] = at.block;
    tokens.row[threadIdx.x] = at.row;
    tokens.position[threadIdx.x] = at.exists() ? static_cast<int>(position) : -1;
  }
}

// Decodes the tile's tokens to y^; tokens that do not exist become zeros.
__device__ void decode_tile(const SideView& side, const float* levels, const TokenTile& tokens, int64_t hk, float* tile) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int token = warp; token < kTokens; token += kWarps) {
    float* row = tile + token * tile_stride(side.D);
    if (tokens.position[token] < 0) {
      for (int j = lane; j < side.D; j += 32) row[j] = 0;
      continue;
    }
    const RowAt at = row_at(side, tokens.block[token], hk, tokens.row[token]);
    for (int j = lane; j < side.D; j += 32) row[j] = value_at(side, at, levels, j);
  }
}

// The query rows of a block besides their coordinates.
struct RowInfo {
  float from_mean[kRows];
  VisibleRange seen[kRows];
};

// q is [block_rows][Dk].
__device__ void load_rows(const QueryParams& p, const RowTile& tile, int block_rows, int64_t appended, float* q, float* spare,
                          RowInfo& rows) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, D = p.k_rotate.D;
  for (int r = warp; r < kRows; r += kWarps) {
    if (r >= tile.rows) {
      for (int j = lane; r < block_rows && j < D; j += 32) q[r * D + j] = 0;
      if (lane == 0) rows.seen[r] = {0, 0};
      continue;
    }
    const QueryRow row = query_row(tile, p.group, r);
    const float from_mean = load_query(p, row, tile.hk, q + r * D, spare + warp * 2 * D, lane);
    if (lane == 0) {
      rows.from_mean[r] = from_mean;
      rows.seen[r] = seen_by(p, tile, appended, row.t);
    }
  }
}

// Every position that some row sees lies in this range.
__device__ VisibleRange seen_by_any(const RowInfo& rows) {
  VisibleRange any{0x7fffffff, 0};
  for (const VisibleRange& seen : rows.seen)
    if (seen.first < seen.end) any = {min(any.first, seen.first), max(any.end, seen.end)};
  return any;
}

// Scores of the thread's token (its lane) for the rows of its warp; -inf where masked. A warp whose rows the block does not have reads
// the first rows instead: its own see nothing.
__device__ void score_tile(const QueryParams& p, const float* queries, int block_rows, const RowInfo& rows, const TokenTile& tokens,
                           const float* tile, float (&score)[kRowsPerWarp]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, D = p.k_rotate.D;
  const float* k = tile + lane * tile_stride(D);
  const float* q = queries + (warp * kRowsPerWarp < block_rows ? warp * kRowsPerWarp * D : 0);
  float sum[kRowsPerWarp] = {};
  for (int j = 0; j < D; j += 4) {  // D is a multiple of 8
    const float k0 = k[j], k1 = k[j + 1], k2 = k[j + 2], k3 = k[j + 3];
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
      const float4 four = *reinterpret_cast<const float4*>(q + r * D + j);
      sum[r] = fmaf(four.w, k3, fmaf(four.z, k2, fmaf(four.y, k1, fmaf(four.x, k0, sum[r]))));
    }
  }
  const int position = tokens.position[lane];
#pragma unroll
  for (int r = 0; r < kRowsPerWarp; ++r) {
    const int row = warp * kRowsPerWarp + r;
    const bool seen = position >= 0 && position >= rows.seen[row].first && position < rows.seen[row].end;
    score[r] = seen ? softcapped(p.scale * (sum[r] + rows.from_mean[row]), p.mask) : kMasked;
  }
}

// o[c][r] += weight[token][r] * tile[token][column c]. A weight of 0 skips a token that the row does not see, whose value may be
// NaN.
__device__ void add_tile(const float (&weight)[kTokens][kRows], const float* tile, int D, int rows, float (&o)[kColumns][kRows]) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int d = threadIdx.x + c * kThreads;
    if (d >= D) continue;
    for (int token = 0; token < kTokens; ++token) {
      const float value = tile[token * tile_stride(D) + d];
#pragma unroll
      for (int r4 = 0; r4 < kRows; r4 += 4) {
        if (r4 >= rows) break;
        const float4 w = *reinterpret_cast<const float4*>(&weight[token][r4]);
        if (w.x != 0) o[c][r4] = fmaf(w.x, value, o[c][r4]);
        if (w.y != 0) o[c][r4 + 1] = fmaf(w.y, value, o[c][r4 + 1]);
        if (w.z != 0) o[c][r4 + 2] = fmaf(w.z, value, o[c][r4 + 2]);
        if (w.w != 0) o[c][r4 + 3] = fmaf(w.w, value, o[c][r4 + 3]);
      }
    }
  }
}

// --- attention_scores ---------------------------------------------------------------------------------------------------------

struct ScoresParams {
  QueryParams queries;
  SideView k;
  void* scores = nullptr;  // [T, Hq, context]
  DType dtype = DType::f32;
  int64_t token = 0, head = 0, context = 0;  // token, head: strides of scores
  int64_t spans = 0;
};

__global__ void __launch_bounds__(kThreads) scores_kernel(const __grid_constant__ ScoresParams p) {
  extern __shared__ float shared[];
  __shared__ TokenTile tokens;
  __shared__ RowInfo rows;
  const QueryParams& q = p.queries;
  int64_t item = blockIdx.x;
  const int64_t tile_index = item % q.row_tiles, span = (item /= q.row_tiles) % p.spans, hk = (item /= p.spans) % q.Hk,
                n = item / q.Hk;
  const RowTile tile = row_tile(q.queries.sequences, q.T, q.longest, q.group, n, hk, tile_index);
  if (tile.rows == 0) return;
  const int64_t appended = appended_tokens(q.index, n), live = live_tokens(q.index, appended);
  const Shape shape{p.k.D, p.k.D};
  float *levels = shared, *decoded = shared + 512, *q_rows = decoded + shape.tile();
  load_levels(p.k, levels);
  load_rows(q, tile, kRows, appended, q_rows, decoded, rows);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t last = (span + 1) * kScoreSpan < p.context ? (span + 1) * kScoreSpan : p.context;
  for (int64_t first = span * kScoreSpan; first < last; first += kTokens) {
    float score[kRowsPerWarp];
#pragma unroll
    for (float& s : score) s = kMasked;
    if (first < live) {
      __syncthreads();
      locate_tokens(q.index, n, appended, first, static_cast<int>(live - first < kTokens ? live - first : kTokens), tokens);
      __syncthreads();
      decode_tile(p.k, levels, tokens, hk, decoded);
      __syncthreads();
      score_tile(q, q_rows, kRows, rows, tokens, decoded, score);
    }
    if (first + lane >= last) continue;
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
      if (warp * kRowsPerWarp + r >= tile.rows) break;
      const QueryRow row = query_row(tile, q.group, warp * kRowsPerWarp + r);
      store(p.scores, p.dtype, row.t * p.token + row.hq * p.head + first + lane, score[r]);
    }
  }
}

void attention_scores(const Stream& stream, const AttentionScoresArgs& args) {
  const Tensor& scores = args.scores;
  const ScoresParams p{query_params(args.queries, args.cache, args.mask),
                       side_view(args.cache, KvRole::k),
                       scores.data,
                       scores.dtype,
                       scores.stride(0),
                       scores.stride(1),
                       scores.size(2),
                       ceil_div(scores.size(2), kScoreSpan)};
  launch("attention_scores", stream, args.queries.sequences.count * p.queries.Hk * p.spans * p.queries.row_tiles, kThreads,
         Shape{p.k.D, p.k.D}.bytes(kRows), scores_kernel, p);
}

// --- attention_values ---------------------------------------------------------------------------------------------------------

struct ValuesParams {
  const void* weights = nullptr;  // [T, Hq, context]
  void* o = nullptr;              // [T, Hq, Dv]
  DType weights_dtype = DType::f32, o_dtype = DType::f32;
  int64_t weights_token = 0, weights_head = 0, context = 0, o_token = 0, o_head = 0;  // strides, but for context
  SequencesView sequences;
  CacheIndex index;
  SideView v;
  RotateView rotate;
  MeanView mean;
  float threshold = kMasked;
  bool has_threshold = false;
  int64_t T = 0, longest = 0, Hk = 0, group = 1, row_tiles = 0;
};

__global__ void __launch_bounds__(kThreads) values_kernel(const __grid_constant__ ValuesParams p) {
  extern __shared__ float shared[];
  __shared__ TokenTile tokens;
  __shared__ __align__(16) float weight[kTokens][kRows];
  __shared__ float total[kRows];
  int64_t item = blockIdx.x;
  const int64_t tile_index = item % p.row_tiles, hk = (item /= p.row_tiles) % p.Hk, n = item / p.Hk;
  const RowTile tile = row_tile(p.sequences, p.T, p.longest, p.group, n, hk, tile_index);
  if (tile.rows == 0) return;
  const int64_t appended = appended_tokens(p.index, n), live = live_tokens(p.index, appended);
  const int64_t columns = live < p.context ? live : p.context;
  const int D = p.v.D, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float *levels = shared, *decoded = shared + 512, *rows = decoded;  // the rows replace the last tile
  load_levels(p.v, levels);
  float o[kColumns][kRows] = {}, sum[kRowsPerWarp] = {};
  for (int64_t first = 0; first < columns; first += kTokens) {
    __syncthreads();
    locate_tokens(p.index, n, appended, first, static_cast<int>(columns - first < kTokens ? columns - first : kTokens), tokens);
    __syncthreads();
    decode_tile(p.v, levels, tokens, hk, decoded);
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
      const int row_index = warp * kRowsPerWarp + r;
      float w = 0;
      if (row_index < tile.rows && tokens.position[lane] >= 0) {
        const QueryRow row = query_row(tile, p.group, row_index);
        w = load(p.weights, p.weights_dtype, row.t * p.weights_token + row.hq * p.weights_head + first + lane);
        if (p.has_threshold && !(w >= p.threshold)) w = 0;
      }
      weight[lane][row_index] = w;
      sum[r] += sum_warp(w);
    }
    __syncthreads();
    add_tile(weight, decoded, D, tile.rows, o);
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int d = threadIdx.x + c * kThreads;
    if (d >= D) continue;
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows[r * D + d] = o[c][r];
  }
  if (lane == 0)
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) total[warp * kRowsPerWarp + r] = sum[r];
  __syncthreads();
  const float* mean = p.mean.data ? p.mean.data + hk * p.mean.head : nullptr;
  for (int r = warp; r < tile.rows; r += kWarps) {
    float* x = rows + r * D;
    rotate_row(p.rotate, true, x, rows + kRows * D + warp * 2 * D, lane);
    const QueryRow row = query_row(tile, p.group, r);
    for (int j = lane; j < D; j += 32)
      store(p.o, p.o_dtype, row.t * p.o_token + row.hq * p.o_head + j, x[j] + (mean ? total[r] * mean[j] : 0.0f));
  }
}

void attention_values(const Stream& stream, const AttentionValuesArgs& args) {
  ValuesParams p;
  p.weights = args.weights.data, p.weights_dtype = args.weights.dtype;
  p.weights_token = args.weights.stride(0), p.weights_head = args.weights.stride(1), p.context = args.weights.size(2);
  p.o = args.o.data, p.o_dtype = args.o.dtype, p.o_token = args.o.stride(0), p.o_head = args.o.stride(1);
  p.sequences = view_of(args.sequences);
  p.index = cache_index(args.cache);
  p.v = side_view(args.cache, KvRole::v);
  leave_rotated(args.cache.v.format, args.domain, p.rotate, p.mean);
  p.has_threshold = args.threshold.has_value();
  p.threshold = args.threshold.value_or(0.0f);
  p.T = args.o.size(0);
  p.Hk = args.cache.heads();
  p.group = args.o.size(1) / p.Hk;
  p.longest = max_tokens(args.sequences, p.T);
  p.row_tiles = ceil_div(p.longest * p.group, kRows);
  launch("attention_values", stream, args.sequences.count * p.Hk * p.row_tiles, kThreads, Shape{p.v.D, p.v.D}.bytes(0),
         values_kernel, p);
}

// --- partials -----------------------------------------------------------------------------------------------------------------

struct PartialsParams {
  QueryParams queries;
  SideView k, v;
  PartialsPlan plan;
  int64_t most_rows = 0;   // sequences with more query rows are skipped
  int block_rows = kRows;  // query rows of a block: a multiple of kRowsPerWarp
};

__global__ void __launch_bounds__(kThreads) partials_kernel(const __grid_constant__ PartialsParams p) {
  extern __shared__ float shared[];
  __shared__ TokenTile tokens;
  __shared__ RowInfo rows;
  __shared__ __align__(16) float weight[kTokens][kRows];
  __shared__ float keep[kRows];
  const QueryParams& q = p.queries;
  int64_t item = blockIdx.x;
  const int64_t tile_index = item % q.row_tiles, split = (item /= q.row_tiles) % p.plan.splits, hk = (item /= p.plan.splits) % q.Hk,
                n = item / q.Hk;
  const RowTile tile = row_tile(q.queries.sequences, q.T, q.longest, q.group, n, hk, tile_index, p.block_rows);
  if (tile.rows == 0 || tile.range.length() * q.group > p.most_rows) return;
  const int64_t appended = appended_tokens(q.index, n), live = live_tokens(q.index, appended), each = p.plan.block_tokens;
  Span span = split_of(live, split, p.plan.splits, kTokens);
  if (each > 0) {  // split * each may overflow when there are more splits than tokens
    span.begin = split <= live / each ? split * each : live;
    span.end = live - span.begin < each ? live : span.begin + each;
  }
  const Shape shape{p.k.D, p.v.D};
  float *levels = shared, *decoded = shared + 512, *q_rows = decoded + shape.tile();
  load_levels(p.k, levels);
  load_levels(p.v, levels + 256);
  load_rows(q, tile, p.block_rows, appended, q_rows, decoded, rows);
  __syncthreads();
  const VisibleRange seen = seen_by_any(rows);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float o[kColumns][kRows] = {}, m[kRowsPerWarp], l[kRowsPerWarp] = {};
#pragma unroll
  for (float& top : m) top = kMasked;
  for (int64_t first = span.begin; first < span.end; first += kTokens) {
    __syncthreads();
    locate_tokens(q.index, n, appended, first, static_cast<int>(span.end - first < kTokens ? span.end - first : kTokens), tokens);
    const int mine = threadIdx.x < kTokens ? tokens.position[threadIdx.x] : -1;
    if (!__syncthreads_or(mine >= seen.first && mine < seen.end)) continue;
    decode_tile(p.k, levels, tokens, hk, decoded);
    __syncthreads();
    float score[kRowsPerWarp];
    score_tile(q, q_rows, p.block_rows, rows, tokens, decoded, score);
    bool any = false;
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) any |= score[r] != kMasked;
    if (!__syncthreads_or(any)) continue;  // no row sees any of these tokens
    decode_tile(p.v, levels + 256, tokens, hk, decoded);
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
      const float top = fmaxf(m[r], max_warp(score[r]));
      // NaN scores do not take part in the maximum and reach l and o through their weights.
      const float reference = top == kMasked ? 0.0f : top, scale = m[r] == kMasked ? 0.0f : expf(m[r] - reference);
      const float w = score[r] == kMasked ? 0.0f : expf(score[r] - reference);
      l[r] = l[r] * scale + sum_warp(w);
      m[r] = top;
      weight[lane][warp * kRowsPerWarp + r] = w;
      if (lane == 0) keep[warp * kRowsPerWarp + r] = scale;
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
      for (int r = 0; r < kRows; ++r) o[c][r] *= keep[r];
    add_tile(weight, decoded, p.v.D, tile.rows, o);
  }
  const PartialsView& out = p.plan.out;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= tile.rows) break;
    const QueryRow row = query_row(tile, q.group, r);
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (const int d = threadIdx.x + c * kThreads; d < p.v.D) out.o[out.o_at(row.t, row.hq, split, d)] = o[c][r];
  }
  if (lane == 0)
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
      if (warp * kRowsPerWarp + r >= tile.rows) break;
      const QueryRow row = query_row(tile, q.group, warp * kRowsPerWarp + r);
      out.m[out.m_at(row.t, row.hq, split)] = m[r] == kMasked && l[r] != l[r] ? NAN : m[r];
      out.l[out.l_at(row.t, row.hq, split)] = l[r];
    }
}

void attention_partials(const Stream& stream, const AttentionPartialsArgs& args) {
  const Tensor& q = args.queries.q;
  launch_partials(
      "attention_partials", stream, query_params(args.queries, args.cache, args.mask), args.cache,
      {partials_view(args.partials, q.size(0), q.size(1), args.cache.v.format.head_dim), args.partials.count, args.block_tokens},
      q.size(0) * q.size(1));
}

}  // namespace

void launch_partials(const char* op, const Stream& stream, const QueryParams& queries, const KvCache& cache,
                     const PartialsPlan& plan, int64_t most_rows) {
  PartialsParams p{queries, side_view(cache, KvRole::k), side_view(cache, KvRole::v), plan, most_rows};
  const Shape shape{p.k.D, p.v.D};
  constexpr size_t kStatic = sizeof(TokenTile) + sizeof(RowInfo) + (kTokens + 1) * kRows * sizeof(float);
  while (p.block_rows > kRowsPerWarp && shape.bytes(p.block_rows) + kStatic > static_cast<size_t>(facts_of(stream).shared_bytes))
    p.block_rows -= kRowsPerWarp;
  p.queries.row_tiles = ceil_div(std::min(queries.longest * queries.group, most_rows), p.block_rows);
  launch(op, stream, queries.queries.sequences.count * queries.Hk * plan.splits * p.queries.row_tiles, kThreads,
         shape.bytes(p.block_rows), partials_kernel, p);
}

OpEntry<AttentionScoresArgs> attention_scores_entry() { return entry<attention_scores>(kAllFloats); }
OpEntry<AttentionValuesArgs> attention_values_entry() { return entry<attention_values>(kAllFloats); }
OpEntry<AttentionPartialsArgs> attention_partials_entry() { return entry<attention_partials>(kAllFloats); }

}  // namespace weft::cuda
