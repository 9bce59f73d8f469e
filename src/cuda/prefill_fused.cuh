// The tensor-core prefill in one kernel, for calls with many heads: what its roles share. See prefill_fused.cu.
#pragma once

#include <cstddef>

#include "cuda/prefill_prepare_wgmma.cuh"
#include "cuda/prefill_wgmma.cuh"

namespace weft::cuda::fused {

inline constexpr int K = 128, V = 128;
inline constexpr int kPart = 32, kParts = kChunk / kPart;  // tokens whose corrections are made at once

// Keys and queries of a chunk, part after part: panels of 64 channels, of which each has the part's keys and then its queries as rows,
// so that one product reads the state for both. Then v. Offsets in bytes.
struct TokenStage {
  static constexpr int kCount = kOutputStages, kPartBytes = 2 * kPart * K * 2, kQueries = kPart * 128;  // in a panel
  static constexpr int kKeyBytes = kParts * kPartBytes, kV = kKeyBytes, kBytes = kV + kChunk * V * 2;
  static_assert(kBytes % 1024 == 0 && 2 * kQueries == kPanel);
};

// What is prepared of a chunk: Unit's M and R, of which those blocks of R that belong to two parts are never read, and the factors with
// decays of either part.
struct UnitStage {
  static constexpr int kCount = 2, kBytes = (Unit<K>::kBytes + 1023) / 1024 * 1024;
};

// Gates of a chunk: prefix sums of the log decay in a part, in base 2, and strengths.
struct Gates {
  static constexpr int kCount = 3, kBytes = 2 * kChunk * 4;
  float G[kChunk], beta[kChunk];
};

// What the warps that prepare work in.
struct alignas(1024) Workplace {
  // Scores, two parts of 16 bits: row i has those of token i of either part of the chunk, 32 by 32.
  uint16_t scores[2][kPart * kChunk];
  // Blocks of the inverse of a part, transposed, in two parts of 16 bits: rows are its columns.
  static constexpr int kFirst = 0, kSecond = kBlockBytes, kBelow = 2 * kBlockBytes, kLow = 3 * kBlockBytes;
  char inverse[kParts][2 * kLow];
  float diagonal[2][kParts][kBlock][kBlock + 4];  // of the matrix to be inverted, transposed
};

inline constexpr int kUnits = TokenStage::kCount * TokenStage::kBytes, kWorkplace = kUnits + UnitStage::kCount * UnitStage::kBytes,
                     kGates = kWorkplace + static_cast<int>(sizeof(Workplace)), kEnd = kGates + Gates::kCount * Gates::kBytes;
inline constexpr size_t kSharedBytes = kEnd + 1024;

#if WEFT_HAS_WGMMA
struct Barriers {
  StageBarriers keys, values, units, gates;
};
#endif

}  // namespace weft::cuda::fused
