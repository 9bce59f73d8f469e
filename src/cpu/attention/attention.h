// Attention over a KV cache on the cpu: what its kernels read, their buffers, and their entry points.
//
// Query row r of a sequence and kv head hk is query token r / R of the sequence and query head hk R + r % R. Up to kQueryBlock
// query rows share one pass over the live tokens of the sequence. The pass goes by blocks of tokens (split-KV): each block gives a
// partial (o, m, l) per query row, and partials are merged in order. Blocks depend on the length of the sequence alone, so results
// depend neither on threads nor on the batch, nor on whether one worker or run_merge() merges the partials.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "common/attention_mask.h"
#include "common/conventions.h"
#include "common/grid_levels.h"
#include "common/partials.h"
#include "cpu/attention/byte_dot.h"
#include "cpu/kv/kv_plans.h"
#include "weft/device.h"

namespace weft::cpu {

// Query rows of a work item, which share every tile.
inline constexpr int64_t kQueryBlock = 64;
// Fewest tokens of a block, and most blocks of a sequence. Beyond kBlockTokens * kMaxBlocks tokens, blocks are longer.
inline constexpr int64_t kBlockTokens = 512;
inline constexpr int64_t kMaxBlocks = 64;

// Tokens per block of a sequence of `live` tokens: whole tiles.
constexpr int64_t default_block(int64_t live) {
  const int64_t tiles = (live + kMaxBlocks * kTileTokens - 1) / (kMaxBlocks * kTileTokens);
  return std::max(kBlockTokens, tiles * kTileTokens);
}
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Floats of a row in buffers: a whole number of vectors on every target.
constexpr int64_t buffer_dim(int64_t D) { return (D + 15) / 16 * 16; }

// ---- integer arithmetic on codes

// The levels of a side as bytes: level = (byte - 128 + 1/2) step.
struct LevelBytes {
  float step = 0;  // 0: the side's levels are not on such a grid, or its tiles are not in lanes order
  // The byte of every code, repeated to the end of the array. Unused for 8-bit codes, which are their own bytes.
  alignas(64) uint8_t of_code[128] = {};
};

// Can the levels of a side be bytes? `gains`: per cache row.
inline bool has_level_bytes(const KvFormat& format, KvStorage storage, int64_t gains) {
  if (storage != KvStorage::lane_tiles || !format.grid_step || gains != 1) return false;
  return format.bits < 7 || levels_are_neighbours(format);  // no target has byte tables of 128 or 256 entries
}
inline bool has_level_bytes(const KvCache& cache, const KvFormat& format) {
  return has_level_bytes(format, kv_storage(cache, format), gains_per_row(format));
}

inline LevelBytes level_bytes(const SideView& side) {
  const KvFormat& format = *side.format;
  LevelBytes levels;
  if (!has_level_bytes(format, side.storage, side.groups)) return levels;
  const int codes = 1 << format.bits;
  for (int i = 0; i < 128 && format.bits < 8; ++i)
    levels.of_code[i] = i < codes ? static_cast<uint8_t>(grid_point(format, i) + 128) : levels.of_code[i - codes];
  levels.step = *format.grid_step;
  return levels;
}

// ---- the call, lowered from the argument structs

// The sizes and the arithmetic of a call, from which its plan is made.
struct AttentionShape {
  const KvCache* cache = nullptr;
  Sequences sequences;
  int64_t T = 0, Hq = 0, Hk = 0, R = 1, Dk = 0, Dv = 0;
  bool integer = false;  // integer dot products on codes, else products in f32
  RowInts ints = RowInts::wide;
  int64_t block_tokens = 0;  // 0: default_block() of each sequence

  int64_t block(int64_t live) const { return block_tokens > 0 ? block_tokens : default_block(live); }
  int64_t max_query_rows() const { return R * max_tokens(sequences, T); }
  int64_t query_blocks() const { return ceil_div(max_query_rows(), kQueryBlock); }
};

inline AttentionShape attention_shape(const KvCache& cache, const Sequences& sequences, int64_t T, int64_t Hq) {
  AttentionShape shape;
  shape.cache = &cache;
  shape.sequences = sequences;
  shape.T = T;
  shape.Hq = Hq;
  shape.Hk = cache.heads();
  shape.R = shape.Hk > 0 ? Hq / shape.Hk : 1;
  shape.Dk = cache.k.format.head_dim;
  shape.Dv = cache.v.format.head_dim;
  return shape;
}

// What the kernels read. Only a launch makes it: its tables of levels and signs cost more than a plan may.
struct AttentionCall : AttentionShape {
  SideView k, v;

  const AttentionQueries* queries = nullptr;
  RowsView q;
  AttentionMask mask;
  float scale = 1;
  MeanView k_mean;
  RotatePlan k_rotation;

  LevelBytes k_levels, v_levels;  // integer
};

inline AttentionCall attention_call(const AttentionShape& shape) {
  AttentionCall call;
  static_cast<AttentionShape&>(call) = shape;
  call.k = side_view(*shape.cache, KvRole::k);
  call.v = side_view(*shape.cache, KvRole::v);
  return call;
}

inline AttentionCall attention_call(const AttentionShape& shape, const AttentionQueries& queries, const AttentionMask& mask) {
  AttentionCall call = attention_call(shape);
  const KvFormat& format = shape.cache->k.format;
  call.queries = &queries;
  call.q = rows_view(queries.q);
  call.mask = mask;
  call.scale = scale_or_default(queries.scale, call.Dk);
  call.k_mean = mean_view(format);
  call.k_rotation = rotate_plan(format, false);
  if (call.integer) {
    call.k_levels = level_bytes(call.k);
    call.v_levels = level_bytes(call.v);
  }
  return call;
}

// From the softmax sum of a query row to its output: sinks, the inverse of V's rotation, V's mean.
struct OutputEpilogue {
  RowsView o, lse;
  const float* sinks = nullptr;
  int64_t sink_stride = 0;
  RotatePlan rotation;  // none where o stays rotated
  MeanView mean;
  int64_t R = 1, Dv = 0;
};

inline OutputEpilogue output_epilogue(const KvFormat& v_format, KvDomain domain, const Tensor& o, const Tensor& lse,
                                      const Tensor& sinks, int64_t Hk) {
  OutputEpilogue epilogue;
  epilogue.o = rows_view(o);
  epilogue.lse = rows_view(lse);
  if (sinks.present()) {
    epilogue.sinks = static_cast<const float*>(sinks.data);
    epilogue.sink_stride = sinks.stride(0);
  }
  if (domain == KvDomain::original) {
    epilogue.rotation = rotate_plan(v_format, true);
    epilogue.mean = mean_view(v_format);
  }
  epilogue.R = Hk > 0 ? o.size(1) / Hk : 1;
  epilogue.Dv = o.size(2);
  return epilogue;
}

// ---- live tokens

// Tokens at consecutive positions in consecutive cache rows of one tile.
struct TokenRun {
  KvLocation at;  // cache row of the first token; without a row, none of the tokens has one
  int64_t count = 0, position = 0;
};

// The longest run that begins with live token j of a sequence and ends at or before live token `end`.
inline TokenRun token_run(const KvCache& cache, int64_t n, int64_t appended, int64_t j, int64_t end) {
  TokenRun run;
  run.position = live_position(cache, appended, j);
  run.at = locate(cache, n, run.position);
  const int64_t capacity = cache.capacity();
  const int64_t row = cache.kind == CacheKind::ring ? ring_row(run.position, capacity, cache.pinned)
                                                    : run.position % std::max<int64_t>(1, capacity);
  run.count = std::min({end - j, kTileTokens - row % kTileTokens, capacity - row});
  if (run.position < cache.pinned) run.count = std::min(run.count, cache.pinned - run.position);
  return run;
}

// ---- buffers of a worker

// Token slots of a tile that a query row sees.
struct SlotRange {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
  bool whole() const { return begin == 0 && end == kTileTokens; }
};

// State of the query rows of a work item.
struct QueryRowState {
  // Positions [first, end) that a query row sees.
  int32_t first[kQueryBlock], end[kQueryBlock];
  int64_t first_of_all, end_of_all;
  // Scores from dot products: (dot + half) * unit * gain + mean for integers, dot * unit + mean for f32.
  float unit[kQueryBlock], half[kQueryBlock], mean[kQueryBlock];
  int32_t q_sum[kQueryBlock];
  // Online softmax of the current block: running maximum m, and l as one partial sum per lane.
  float m[kQueryBlock];
  alignas(64) float l[kQueryBlock][16];
  // Visible slots of the current tile.
  SlotRange slots[kQueryBlock];
  // Softmax weights of the current tile as integers: kind, value of one unit, and sum of the integers.
  RowInts w_ints[kQueryBlock];
  float w_unit[kQueryBlock];
  int32_t w_sum[kQueryBlock];
  // Merged partials of all blocks so far.
  SoftmaxSum<float> sum[kQueryBlock];
};

struct AttentionBuffers {
  QueryRowState* rows = nullptr;
  float* q = nullptr;              // [rows, Dk]; not integer: groups of kDotRows rows interleaved by interleave_queries()
  uint32_t* q_operands = nullptr;  // integer: [rows, operand_words(Dk)]
  uint32_t* w_operands = nullptr;  // integer: [rows, operand_words(64)]
  uint8_t* levels = nullptr;       // integer: levels of a tile of K or V as bytes
  int32_t* dots = nullptr;         // integer: [kDotRows, max(64, Dv)]
  float* decoded = nullptr;        // [64, max(Dk, Dv)], rows of K or V
  float* s = nullptr;              // [rows, 64], integer: [kDotRows, 64]
  float* block_o = nullptr;        // [rows, Dv]
  float* o = nullptr;              // [rows, Dv]
};

// Places the buffers of a worker at `data` and returns their size in bytes. With data null it only computes the size.
size_t lay_out_buffers(const AttentionShape& shape, void* data, AttentionBuffers& buffers);
size_t attention_worker_bytes(const AttentionShape& shape);

// ---- kernels

// A block of query rows of one sequence and kv head, and a range of blocks of its live tokens.
struct AttentionWorkItem {
  int64_t n = 0, hk = 0;
  int64_t first_row = 0;  // first query row; the item has up to kQueryBlock of them
  int64_t first_block = 0, end_block = 0;
};

// Computes the partials of blocks [first_block, end_block). o of an empty block is written only if `whole`.
void run_partials(Isa isa, const AttentionCall& call, const AttentionWorkItem& item, const PartialsView& out, bool whole,
                  void* memory);
// Computes outputs over all blocks of the sequence; first_block and end_block are not read.
void run_attention(Isa isa, const AttentionCall& call, const AttentionWorkItem& item, const OutputEpilogue& epilogue, void* memory);
// Merges `count` partials of query row (t, h) and computes its output.
void run_merge(Isa isa, const PartialsView& in, int64_t count, const OutputEpilogue& epilogue, int64_t t, int64_t h);
// Computes the scores of blocks [first_block, end_block) of kBlockTokens columns.
void run_scores(Isa isa, const AttentionCall& call, const AttentionWorkItem& item, const Tensor& scores, void* memory);
// Computes weighted sums of V rows over all live tokens.
void run_values(Isa isa, const AttentionCall& call, const AttentionWorkItem& item, const AttentionValuesArgs& args,
                const OutputEpilogue& epilogue, void* memory);

}  // namespace weft::cpu
