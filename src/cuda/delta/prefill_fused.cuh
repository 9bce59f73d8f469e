// The tensor-core prefill in one kernel, for calls with many heads: what its roles share. See prefill_fused.cu.
#pragma once

#include <cstddef>

#include "cuda/delta/prefill_prepare_wgmma.cuh"
#include "cuda/delta/prefill_scan_wgmma.cuh"

namespace weft::cuda::fused {

inline constexpr int K = 128, V = 128;
inline constexpr int kPart = 32, kParts = kChunk / kPart;  // tokens whose corrections are made at once
inline constexpr int kWalkers = 2, kPreparers = 2;         // warpgroups

// Keys and queries of a part: panels of 64 channels, of which each has the part's keys and then its queries as rows, so that one product
// multiplies both with the keys, or the state with both. Offsets in bytes. Seven parts: two that the walk is at, four of the two chunks
// that are prepared, and one more, so that keys can be asked for before the chunk before is done.
struct KeyStage {
  static constexpr int kCount = 7, kQueries = kPart * 128, kBytes = K / 64 * kPanel;
  static_assert(kBytes % 1024 == 0 && 2 * kQueries == kPanel);
  __device__ static constexpr int slot(int part) { return part % kCount; }
  __device__ static constexpr uint32_t parity(int part) { return part / kCount % 2; }
  __device__ static constexpr uint32_t offset(int part) { return slot(part) * kBytes; }
};

// v of a part, which outputs replace: 64 columns for every walker. Of three parts, one is at work, one on its way in and one out.
struct ValueStage {
  static constexpr int kCount = 3, kBytes = kPart * 128, kAll = kWalkers * kCount * kBytes;
};

// What is prepared of a chunk, in a place for every preparer: M transposed, [K][64 tokens]; R, of which row i has the rows i of either
// part; then factors of W and of S q, and the decay of either part. Behind those of the first unit lie all barriers.
struct UnitStage {
  static constexpr int kCount = kPreparers, kR = K * kChunk * 2, kFactors = kR + kPart * kChunk * 2, kBytes = kFactors + 1024,
                       kSpare = kFactors + (2 * kChunk + kParts) * static_cast<int>(sizeof(float));
};

// Gates of a chunk: prefix sums of the log decay in a part, in base 2, and strengths.
struct Gates {
  float G[kChunk], beta[kChunk];
};

// What a preparer works in. Rows of 64 elements are 32 high parts of 16 bits and then the 32 low parts of the same numbers.
struct alignas(1024) Workplace {
  uint16_t scores[kChunk][kChunk];                // of token i with those of its part
  uint16_t inverse[kChunk][kChunk];               // of a part, transposed: row j is its column j
  float diagonal[2][kParts][kBlock][kBlock + 4];  // blocks of the matrix to be inverted, transposed
  float carry[kChunk];                            // strengths with the decay of what comes behind in the part
  Gates gates[2];                                 // of the chunk at work and the preparer's next one, in turns
  uint4 below[2 * 32];                            // N_21 of the first part, from one warp to another as it lies in registers
};
inline constexpr uint32_t kLow = 64;  // what the place of a low part differs in

inline constexpr int kUnits = KeyStage::kCount * KeyStage::kBytes, kWorkplaces = kUnits + UnitStage::kCount * UnitStage::kBytes,
                     kValues = kWorkplaces + kPreparers * static_cast<int>(sizeof(Workplace)), kEnd = kValues + ValueStage::kAll;
inline constexpr size_t kSharedBytes = kEnd + 1024;  // to begin at a multiple of 1024
static_assert(kSharedBytes <= 227 << 10, "what a block of sm_90 can have");
inline constexpr int kBarriers = kUnits + (UnitStage::kSpare + 7) / 8 * 8,
                     kBarrierCount = 2 * (KeyStage::kCount + UnitStage::kCount) + kWalkers * ValueStage::kCount;
static_assert(kBarriers + kBarrierCount * 8 <= kUnits + UnitStage::kBytes);

struct Maps {
  CUtensorMap q, k, v, o;  // boxes of 32 tokens
};

#if WEFT_HAS_WGMMA
struct Barriers {
  StageBarriers keys, units;
  uint32_t values;  // of the first walker's first part; the others follow
};
#endif

}  // namespace weft::cuda::fused
