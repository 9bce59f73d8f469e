// Attention over a compressed cache on the cpu: what its kernels read, the memory they work in, and how they are run.
//
// Rows of a sequence and kv head (row r is query r / R of the sequence, query head hk R + r % R) walk over its live tokens together, in
// blocks of tokens; each block gives a partial (o, m, l) per row, and partials are joined in order. Blocks follow from the sequence's
// own length, so results do not depend on threads, on the batch, or on who joins the partials.
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

// Rows that share every decoded tile.
inline constexpr int64_t kRowBlock = 64;
// Shortest block of tokens, and the most blocks of a sequence: longer sequences have longer blocks.
inline constexpr int64_t kBlockTokens = 512;
inline constexpr int64_t kMaxBlocks = 64;

constexpr int64_t attention_block(int64_t live) {
  const int64_t tiles = (live + kMaxBlocks * kTileTokens - 1) / (kMaxBlocks * kTileTokens);
  return std::max(kBlockTokens, tiles * kTileTokens);
}
constexpr int64_t blocks_of(int64_t tokens, int64_t block) { return (tokens + block - 1) / block; }

// Floats of a row in buffers: whole vectors of every target.
constexpr int64_t buffer_dim(int64_t D) { return (D + 15) / 16 * 16; }

// ---- integer arithmetic on codes

// The levels of a side as bytes: level = (byte - 128 + 1/2) step.
struct LevelBytes {
  float step = 0;  // 0: the side's levels are not on such a grid, or its tiles not in lanes
  // By code, over and over; codes of 8 bits are their own bytes.
  alignas(64) uint8_t of_code[128] = {};
};

inline LevelBytes level_bytes(const SideView& side) {
  const KvFormat& format = *side.format;
  LevelBytes levels;
  if (side.storage != KvStorage::lane_tiles || !format.grid_step || side.groups != 1) return levels;
  if (format.bits >= 7 && !levels_are_neighbours(format)) return levels;  // no table of so many entries on any target
  for (int i = 0; i < 128 && format.bits < 8; ++i)
    levels.of_code[i] = static_cast<uint8_t>(grid_point(format, i % (1 << format.bits)) + 128);
  levels.step = *format.grid_step;
  return levels;
}

// ---- a call, lowered

struct AttentionCall {
  const KvCache* cache = nullptr;
  Sequences sequences;
  int64_t T = 0, Hq = 0, Hk = 0, R = 1, Dk = 0, Dv = 0;
  SideView k, v;

  const AttentionQueries* queries = nullptr;
  RowsView q;
  AttentionMask mask;
  float scale = 1;
  MeanView k_mean;
  RotatePlan k_rotation;

  bool integer = false;  // products of integers on bytes, else of f32 on decoded rows
  RowInts ints = RowInts::wide;
  LevelBytes k_levels, v_levels;

  int64_t block_tokens = 0;  // 0: attention_block() of the sequence

  int64_t block(int64_t live) const { return block_tokens > 0 ? block_tokens : attention_block(live); }
  int64_t max_rows() const { return R * max_tokens(sequences, T); }
  int64_t row_blocks() const { return blocks_of(max_rows(), kRowBlock); }
};

inline AttentionCall attention_call(const KvCache& cache, const Sequences& sequences, int64_t T, int64_t Hq) {
  AttentionCall call;
  call.cache = &cache;
  call.sequences = sequences;
  call.T = T;
  call.Hq = Hq;
  call.Hk = cache.heads();
  call.R = call.Hk > 0 ? Hq / call.Hk : 1;
  call.k = side_view(cache, KvRole::k);
  call.v = side_view(cache, KvRole::v);
  call.Dk = call.k.D;
  call.Dv = call.v.D;
  return call;
}

inline AttentionCall attention_call(const AttentionQueries& queries, const KvCache& cache, const AttentionMask& mask) {
  AttentionCall call = attention_call(cache, queries.sequences, queries.q.size(0), queries.q.size(1));
  call.queries = &queries;
  call.q = rows_view(queries.q);
  call.mask = mask;
  call.scale = scale_or_default(queries.scale, call.Dk);
  call.k_mean = mean_view(cache.k.format);
  call.k_rotation = rotate_plan(cache.k.format, false);
  return call;
}

// What makes outputs of rows: sinks, V's rotation undone, V's mean.
struct RowFinish {
  RowsView o, lse;
  const float* sinks = nullptr;
  int64_t sink_stride = 0;
  RotatePlan rotation;  // does nothing where o stays rotated
  MeanView mean;
  int64_t R = 1, Dv = 0;
};

inline RowFinish row_finish(const KvFormat& v_format, KvDomain domain, const Tensor& o, const Tensor& lse, const Tensor& sinks,
                            int64_t Hk) {
  RowFinish finish;
  finish.o = rows_view(o);
  finish.lse = rows_view(lse);
  if (sinks.present()) {
    finish.sinks = static_cast<const float*>(sinks.data);
    finish.sink_stride = sinks.stride(0);
  }
  if (domain == KvDomain::original) {
    finish.rotation = rotate_plan(v_format, true);
    finish.mean = mean_view(v_format);
  }
  finish.R = Hk > 0 ? o.size(1) / Hk : 1;
  finish.Dv = o.size(2);
  return finish;
}

// ---- live tokens

// Tokens that lie one after another, in rows of one tile and at consecutive positions.
struct TokenRun {
  KvLocation at;  // of the first; nowhere: none of them exists
  int64_t count = 0, position = 0;
};

// The run that begins with live token j of a sequence and goes no further than live token `end`.
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

// ---- memory of a worker

// Slots of a tile that a row sees.
struct SlotRange {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
  bool whole() const { return begin == 0 && end == kTileTokens; }
};

struct AttentionRows {
  // Positions that a row sees.
  int32_t first[kRowBlock], end[kRowBlock];
  int64_t first_of_all, end_of_all;
  // Scores from sums: (sum + half) unit gain + mean for integers, sum scale + mean for f32.
  float unit[kRowBlock], half[kRowBlock], mean[kRowBlock];
  int32_t q_sum[kRowBlock];
  // The partial of the current block; l in lanes.
  float m[kRowBlock];
  alignas(64) float l[kRowBlock][16];
  // Of the current tile.
  SlotRange slots[kRowBlock];
  // Weights as integers: their kind, what a unit of them is worth, and their sum.
  RowInts w_ints[kRowBlock];
  float w_unit[kRowBlock];
  int32_t w_sum[kRowBlock];
  // All blocks so far.
  SoftmaxSum<float> sum[kRowBlock];
};

struct AttentionMemory {
  AttentionRows* rows = nullptr;
  float* q = nullptr;              // [rows, Dk]
  uint32_t* q_operands = nullptr;  // integer: [rows] of operand_words(Dk)
  uint32_t* w_operands = nullptr;  // integer: [rows] of operand_words(64)
  uint8_t* levels = nullptr;       // integer: a tile of K or of V
  int32_t* dots = nullptr;         // integer: [kDotRows, max(64, Dv)]
  float* k = nullptr;              // [64, Dk], decoded
  float* v = nullptr;              // [64, Dv], decoded
  float* s = nullptr;              // [kDotRows, 64]
  float* block_o = nullptr;        // [rows, Dv]
  float* o = nullptr;              // [rows, Dv]
};

// Lays the buffers out from `data` on and returns the bytes they take; with null, only that.
size_t lay_out(const AttentionCall& call, void* data, AttentionMemory& memory);
size_t attention_worker_bytes(const AttentionCall& call);

// ---- kernels

// Rows of one sequence and kv head, and blocks of its live tokens.
struct AttentionPiece {
  int64_t n = 0, hk = 0;
  int64_t first_row = 0;  // up to kRowBlock rows from here
  int64_t first_block = 0, end_block = 0;
};

// Partials of blocks [first_block, end_block) into `out`; o of empty blocks is written only if `whole`.
void run_partials(Isa isa, const AttentionCall& call, const AttentionPiece& piece, const PartialsView& out, bool whole,
                  void* memory);
// All blocks, joined and finished.
void run_attention(Isa isa, const AttentionCall& call, const AttentionPiece& piece, const RowFinish& finish, void* memory);
// Joins `count` partials of row (t, h) and finishes it.
void run_merge(Isa isa, const PartialsView& in, int64_t count, const RowFinish& finish, int64_t t, int64_t h);
// Scores of blocks of kBlockTokens columns, from the first on to the end of the row with the last.
void run_scores(Isa isa, const AttentionCall& call, const AttentionPiece& piece, const Tensor& scores, void* memory);
// Weighted sums of V rows over all live tokens.
void run_values(Isa isa, const AttentionCall& call, const AttentionPiece& piece, const AttentionValuesArgs& args,
                const RowFinish& finish, void* memory);

}  // namespace weft::cpu
