// What coded-tile decode kernels are instantiated for: their parameters, and how they divide a block's warps and shared memory.
#pragma once

#include <span>

#include "cuda/attention/coded_tile.cuh"
#include "cuda/attention/decode_coded.h"

namespace weft::cuda {

struct CodedParams {
  QueryParams queries;
  CodedSide k, v;
  PartialsPlan plan;
  Divisor by_row_tiles, by_splits, by_heads, by_group, by_page;  // by_page: tiles of a page
  int64_t most_rows = 0;                                         // sequences with more query rows are skipped
  unsigned items_per_block = 1, items = 0;                       // work items of a block, and of the grid
  CodedFinish finish = CodedFinish::merge_kernel;
  MergeParams merge;  // for rows that this kernel finishes
};

// A kernel as the host finds it.
struct CodedKernel {
  int k_bits, v_bits, D, rows, warps, max_items;  // rows: query rows of a work item; max_items: most items of a block
  int shared;                                     // bytes
  void (*kernel)(CodedParams);
};
// The kernels of a pair of bits. Each pair has a file of its own, since the kernels take long to compile.
std::span<const CodedKernel> coded_kernels_8v8();
std::span<const CodedKernel> coded_kernels_8v4();
std::span<const CodedKernel> coded_kernels_4v4();
std::span<const CodedKernel> coded_kernels_4v2();
std::span<const CodedKernel> coded_kernels_3v3();
std::span<const CodedKernel> coded_kernels_2v2();

__device__ inline void multiply_bytes(int (&c)[4], const FragmentA& a, const uint2& b) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x), "r"(b.y));
}

// Rows: query rows of a work item, 4, 8 or 16. Instructions have 8 columns: 4 rows put both planes of q side by side, 16 rows take
// two instructions.
template <int KBits, int VBits, int D, int Rows>
struct CodedShape {
  using K = CodedTile<KBits, D, KvRole::k>;
  using V = CodedTile<VBits, D, KvRole::v>;
  static constexpr int kKBits = KBits, kVBits = VBits, kD = D, kRows = Rows;
  static constexpr int kSteps = D / 32;                                                // k-steps of the product with K
  static constexpr int kRowBlocks = (Rows + 7) / 8, kRowsPerLane = Rows == 4 ? 1 : 2;  // of a row block
  // Registers of a lane: scores [row block][h][x][e] of token x of piece quad(j, h) and row lane_row(); weights of pairs of tokens,
  // as f16; sums of values.
  using Scores = float[kRowBlocks][2][4][kRowsPerLane];
  using Weights = uint32_t[kRowBlocks][2][4];
  using Values = float[kRowBlocks][D / 32][2][4];
  __device__ static int lane_row(int u, int e, int t) { return Rows == 4 ? t : 8 * u + 2 * t + e; }

  // Bytes of V are looked up as pairs of f16 in a table in shared memory, because integer instructions are the bottleneck. Every
  // lane has a copy of the table in banks of its own. Entries are 256 bytes apart, so that a byte and a lane make an address
  // without arithmetic. A byte is two codes of 4 bits, or two of 3 bits that include their bits of the narrow plane, or four codes
  // of 2 bits.
  static constexpr bool kPairTable = VBits <= 4 && (KBits <= 4 || D <= 128);
  static constexpr int kTableBytes = kPairTable ? 256 * 256 : 0;
  static constexpr bool kTableGaps = kPairTable && VBits > 2;  // half of the table is empty

  // A stage holds K of a tile, or V, or half of V where heads are wide: the second half is loaded once the first is used up.
  static constexpr int kVHalves = D == 256 && VBits == 4 && kPairTable ? 2 : 1;
  static constexpr int kVBytes = V::kCodes / kVHalves + V::kGains;
  static constexpr int kQueryBytes = (Rows == 4 ? 1 : 2) * kSteps * kRowBlocks * 256;  // fragments of q
  static constexpr int kMaxItems = Rows <= 8 ? 2 : 1;                                  // work items of a block
  // A block of a cluster receives the sums of this many (row, split) pairs at the end.
  static constexpr int kReceiveRows = 16, kReceiveBytes = kReceiveRows * D * static_cast<int>(sizeof(float));
  static constexpr int kStageRoom = (224 << 10) - kMaxItems * kQueryBytes - (kPairTable ? kTableBytes : kReceiveBytes);
  static constexpr int kFitWarps = kStageRoom / (K::kBytes + kVBytes), kMostWarps = Rows == 16 ? 8 : D == 256 ? 12 : 16;
  static constexpr int kWarps = kFitWarps >= kMostWarps ? kMostWarps
                                : kFitWarps >= 12       ? 12
                                : kFitWarps >= 8        ? 8
                                : kFitWarps >= 6        ? 6
                                                        : 4;
  // Stages of a warp. Even with one of each, K of the next tile loads while the values of this tile are summed.
  static constexpr int kWarpRoom = kStageRoom / kWarps, kBoth = kWarpRoom / (K::kBytes + kVBytes);
  static constexpr int kVStages = kVHalves == 2 || kBoth < 1 ? 1 : kBoth > 3 ? 3 : kBoth;
  static constexpr int kKStages =
      kVStages < 3 && kVStages * kVBytes + (kVStages + 1) * K::kBytes <= kWarpRoom ? kVStages + 1 : kVStages;
  static constexpr int kWarpBytes = kKStages * K::kBytes + kVStages * kVBytes;
  static constexpr int kLoopBytes = kMaxItems * kQueryBytes + kTableBytes + kWarps * kWarpBytes;

  // At the end, a warp's sums of all rows lie over its own stages, which no other warp reads. If they do not fit there, the sums of
  // all warps lie over the table and all stages.
  static constexpr int kSumsBytes = Rows * D * static_cast<int>(sizeof(float));
  static constexpr bool kSumsInOwnStages = kWarpBytes >= kSumsBytes;
  static constexpr int kSumsAt = kMaxItems * kQueryBytes + (kSumsInOwnStages ? kTableBytes : 0);
  static constexpr int kSumsStride = kSumsInOwnStages ? kWarpBytes : kSumsBytes;
  // Received sums have memory of their own where there is some: the gaps of the table, or space behind the stages.
  static constexpr bool kReceiveSeparate = kSumsInOwnStages && (kTableGaps || !kPairTable);
  static constexpr int kReceiveAt = !kSumsInOwnStages ? kSumsAt + kWarps * kSumsBytes
                                    : kPairTable      ? kMaxItems * kQueryBytes
                                                      : kLoopBytes;
  static constexpr int kSharedBytes = kLoopBytes > kReceiveAt + kReceiveBytes ? kLoopBytes : kReceiveAt + kReceiveBytes;
  // Where byte `i` of the received sums lies.
  __device__ static int receive_offset(int i) {
    return kReceiveAt + (kReceiveSeparate && kTableGaps ? i / 128 * 256 + 128 + i % 128 : i);
  }
};

}  // namespace weft::cuda
