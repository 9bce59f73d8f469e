// What the general decode kernel reads: lowered sides of a cache, and how a block divides shared memory.
#pragma once

#include "cuda/attention/decode_general.h"
#include "cuda/attention/work_split.cuh"

namespace weft::cuda {

// How a side becomes operands of an mma. Levels are f16 numbers in a table in shared memory.
enum class SideKind : int {
  f16,
  bf16,
  f32,
  pairs,         // exact levels, codes of at most 4 bits in a bit stream: two codes make one index
  levels,        // exact levels
  split_levels,  // levels as the sum of two f16 numbers
  linear,        // exact levels that are neighbours on the grid: computed
};
constexpr bool is_coded(SideKind kind) { return kind >= SideKind::pairs; }

// A side is copied in pieces: the coordinates [i piece, (i + 1) piece) of the 16 rows of a unit.
struct GeneralSide : SideAddresses {  // tile: 64 rows
  SideAddresses gains;
  int64_t row = 0, gains_row = 0;  // bytes between rows; `row` is not used in lanes order
  LanePlanes planes;               // lanes order
  SideKind kind = SideKind::f16;
  DType gain = DType::f16;
  bool lanes = false;
  bool adjacent = false;           // the 16 rows are copied as they are, one behind another. Else row i goes to place staged_row(i)
  int gain_groups = 0;             // of a row: 1 or 2; 0: no gains
  int D = 0, bits = 0, field = 0;  // field: bits from code to code in a row
  int piece = 0, pieces = 0;       // coordinates of a piece, pieces of a row
  int copy = 0;                    // bytes of a copy: 16, 8 or 4; 0: the kernel does not read this side
  int piece_bytes = 0, stride = 0;  // of a row of a piece in memory; from row to row in shared memory
  int copies[2] = {};               // of a row of a piece, of the last piece
  int row_lanes = 2;                // 2^row_lanes lanes copy a row together
  int table_at = 0;                 // in shared memory
  float unit = 1;                   // what products are multiplied by besides the gain
  uint32_t levels[256] = {};        // by code: f16, and for split_levels the rest in the upper half
};

// Copied rows lie so that lanes which read rows 4 t + k, and rows 4 (g / 2) + g % 2, access different banks.
__device__ inline int staged_row(int row) { return row >> 2 | (row & 3) << 2; }

// Shared memory: GeneralShared, tables (K's first), query fragments, and the slots of each warp. In the end the sums of warps lie over
// all but the first.
struct GeneralParams {
  QueryParams queries;
  GeneralSide sides[2];  // K, V
  PartialsPlan plan;
  Divisor page_units;                    // units of a page
  int64_t row_tiles = 0, most_rows = 0;  // most_rows: sequences with more query rows are skipped
  int planes = 1;                        // numbers that a number of q is the sum of
  int queries_at = 0, slots_at = 0;
  int slots = 0, slot_bytes = 0, warp_bytes = 0;
  int early_slots = 0;  // slots that are loaded before the queries are rotated; the others are spare memory until then
  int shared_bytes = 0;
  WEFT_HOST_DEVICE const GeneralSide& k() const { return sides[0]; }
  WEFT_HOST_DEVICE const GeneralSide& v() const { return sides[1]; }
};
static_assert(sizeof(GeneralParams) <= 4096, "the limit of kernel parameters");

inline constexpr int kGeneralGainBytes = 128;  // of a slot: gains of its 16 rows as f32, before the piece
inline constexpr int kGeneralMostSlots = 6;
inline constexpr int kLevelStride = 256;  // bytes from level to level: a copy for every lane, of K's and of V's table
inline constexpr int kPairStride = 128;   // from pair to pair

WEFT_HOST_DEVICE constexpr int general_tables_at(int U) { return (2 + 2 * kGeneralWarps) * 8 * U * 4 + 127 & ~127; }

// What a block's threads share besides fragments, tables and slots. U: blocks of 8 query rows.
template <int U>
struct GeneralShared {
  static constexpr int kRows = 8 * U;
  float factor[kRows], offset[kRows];  // a score is sum * gain * factor + offset
  float m[kGeneralWarps][kRows], l[kGeneralWarps][kRows];
};
static_assert(sizeof(GeneralShared<4>) <= general_tables_at(4));

// The tokens of a unit that a lane = 4 g + t holds. As rows of an mma (scores): tokens 4 (g / 2) + g % 2 and 2 more; as its
// columns (values): tokens 4 t to 4 t + 3. A transposition of weights leads from one to the other.
struct LaneTokens {
  int first, second;  // of scores
  int base;           // of values
  __device__ explicit LaneTokens(int lane) : first(lane / 8 * 4 + lane / 4 % 2), second(first + 2), base(lane % 4 * 4) {}
};

// The kernel for values of at most 64 Sweeps coordinates and blocks of 8 U query rows.
template <int Sweeps, int U>
__global__ void decode_general_kernel(const __grid_constant__ GeneralParams p);

// Every kernel, smallest first: see instantiations/.
struct GeneralKernel {
  int sweeps, row_blocks, blocks;  // blocks: that a multiprocessor holds
  void (*kernel)(GeneralParams);
};
GeneralKernel general_kernel_128_1();
GeneralKernel general_kernel_128_4();
GeneralKernel general_kernel_256_1();
GeneralKernel general_kernel_256_2();
GeneralKernel general_kernel_512_1();

}  // namespace weft::cuda
