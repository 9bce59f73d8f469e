// What kernels for tiles in lanes order are made for: their parameters, how they share a multiprocessor's memory.
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
  int64_t most_rows = 0;                                         // sequences with more are left alone
  unsigned items_per_block = 1, items = 0;                       // of a block; of all teams
  CodedFinish finish = CodedFinish::merge_kernel;
  MergeParams merge;  // where rows are finished here
};

// One kernel as the host finds it.
struct CodedKernel {
  int k_bits, v_bits, D, rows, warps, items_per_block;  // rows: of queries, of a team; teams: the most that a block can have
  int shared;
  void (*kernel)(CodedParams);
};
// Those of a pair of bits, in files of their own: they take long to compile.
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

// Rows: of queries, 4, 8 or 16. Instructions have 8 columns: 4 rows put both planes of q side by side there, 16 take two instructions.
template <int KBits, int VBits, int D, int Rows>
struct CodedShape {
  using K = CodedTile<KBits, D, KvRole::k>;
  using V = CodedTile<VBits, D, KvRole::v>;
  static constexpr int kD = D, kRows = Rows;
  static constexpr int kSteps = D / 32, kRowBlocks = (Rows + 7) / 8,
                       kRowsPerLane = Rows == 4 ? 1 : 2;  // kRowsPerLane: rows of a lane
  // V's bytes are looked up as pairs of f16 in shared memory: integer instructions are what is short. Every lane has a table in banks
  // of its own. Entries are 256 bytes apart, so that a byte and a lane are an address without arithmetic. A byte is two codes of 4 bits,
  // or of 3 with a bit of the narrow plane each, or four codes of 2.
  static constexpr bool kPairTable = VBits <= 4 && (KBits <= 4 || D <= 128);
  static constexpr int kTableBytes = kPairTable ? 256 * 256 : 0;
  static constexpr bool kTableGaps = kPairTable && VBits > 2;  // half of the table is empty
  // A warp holds K of a tile, and V, or half of it where heads are wide: the other half comes when the first is used up.
  static constexpr int kVHalves = D == 256 && VBits == 4 && kPairTable ? 2 : 1;
  static constexpr int kVBytes = V::kCodes / kVHalves + V::kGains;
  static constexpr int kQueryBytes = (Rows == 4 ? 1 : 2) * kSteps * kRowBlocks * 256;  // q in fragments
  static constexpr int kMaxItems = Rows <= 8 ? 2 : 1;                                  // into which a block's warps may be divided
  // A block of a cluster gets the sums of so many parts of rows at the end.
  static constexpr int kReceiveRows = 16, kReceiveBytes = kReceiveRows * D * static_cast<int>(sizeof(float));
  static constexpr int kStageRoom =
      (224 << 10) - kMaxItems * kQueryBytes - (kPairTable ? kTableBytes : kReceiveBytes);  // bytes for rings
  static constexpr int kFitWarps = kStageRoom / (K::kBytes + kVBytes), kMostWarps = Rows == 16 ? 8 : D == 256 ? 12 : 16;
  static constexpr int kWarps = kFitWarps >= kMostWarps ? kMostWarps
                                : kFitWarps >= 12       ? 12
                                : kFitWarps >= 8        ? 8
                                : kFitWarps >= 6        ? 6
                                                        : 4;
  // Tiles in flight of a warp. With one of each, K of the next tile loads while this one's values are summed.
  static constexpr int kWarpRoom = kStageRoom / kWarps, kBoth = kWarpRoom / (K::kBytes + kVBytes);
  static constexpr int kVStages = kVHalves == 2 || kBoth < 1 ? 1 : kBoth > 3 ? 3 : kBoth;
  static constexpr int kKStages =
      kVStages < 3 && kVStages * kVBytes + (kVStages + 1) * K::kBytes <= kWarpRoom ? kVStages + 1 : kVStages;
  static constexpr int kWarpBytes = kKStages * K::kBytes + kVStages * kVBytes;
  static constexpr int kLoopBytes = kMaxItems * kQueryBytes + kTableBytes + kWarps * kWarpBytes;
  // A warp's sums of all rows lie over its ring, which nobody else reads, or, where they are more, over the table and all rings.
  static constexpr int kSumsBytes = Rows * D * static_cast<int>(sizeof(float));
  static constexpr bool kSumsInOwnStages = kWarpBytes >= kSumsBytes;
  static constexpr int kSumsAt = kMaxItems * kQueryBytes + (kSumsInOwnStages ? kTableBytes : 0),
                       kSumsStride = kSumsInOwnStages ? kWarpBytes : kSumsBytes;
  // Parts lie where nothing else ever does, if there is such a place: in the gaps of the table, or behind the rings.
  static constexpr bool kReceiveSeparate = kSumsInOwnStages && (kTableGaps || !kPairTable);
  static constexpr int kReceiveAt = !kSumsInOwnStages ? kSumsAt + kWarps * kSumsBytes
                                    : kPairTable      ? kMaxItems * kQueryBytes
                                                      : kLoopBytes;
  static constexpr int kSharedBytes = kLoopBytes > kReceiveAt + kReceiveBytes ? kLoopBytes : kReceiveAt + kReceiveBytes;
  // Byte `i` of them.
  __device__ static int receive_offset(int i) {
    return kReceiveAt + (kReceiveSeparate && kTableGaps ? i / 128 * 256 + 128 + i % 128 : i);
  }
};

}  // namespace weft::cuda
