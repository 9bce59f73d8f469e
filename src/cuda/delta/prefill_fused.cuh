// Shared memory layout and barriers of the fused prefill kernel: see prefill_fused.cu.
#pragma once

#include <cstddef>

#include "cuda/delta/prefill_prepare_wgmma.cuh"
#include "cuda/delta/prefill_scan_wgmma.cuh"

namespace weft::cuda::fused {

inline constexpr int K = 128, V = 128;
inline constexpr int kSubchunk = 32, kSubchunks = kChunk / kSubchunk;  // tokens whose corrections are computed at once
inline constexpr int kConsumers = 2, kProducers = 2;                   // warpgroups

// Pipeline stage: keys and queries of a subchunk in panels of 64 channels. The rows of a panel are the keys, then the queries, so
// that one product multiplies both with the keys, or the state with both. Offsets in bytes. There are seven stages: two that the
// consumers read, four of the two chunks that the producers prepare, and one so that a load can start before the previous chunk is
// complete.
struct KeyStage {
  static constexpr int kCount = 7, kQueries = kSubchunk * 128, kBytes = K / 64 * kPanel;
  static_assert(kBytes % 1024 == 0 && 2 * kQueries == kPanel);
  __device__ static constexpr int index(int sub) { return sub % kCount; }
  __device__ static constexpr uint32_t parity(int sub) { return sub / kCount % 2; }
  __device__ static constexpr uint32_t offset(int sub) { return index(sub) * kBytes; }
};

// Pipeline stage of a consumer: 64 columns of v of a subchunk, which the outputs replace. There are three stages: one is read, one
// is being loaded and one is being stored.
struct ValueStage {
  static constexpr int kCount = 3, kBytes = kSubchunk * 128, kAll = kConsumers * kCount * kBytes;
};

// Pipeline stage of a producer, one each: a prepared chunk. M transposed, [K][64 tokens]; R, whose row i holds rows i of both
// subchunks; then the factors a and c, and the decay of each subchunk. All mbarriers lie in the spare bytes behind the factors of
// the first stage.
struct PreparedStage {
  static constexpr int kCount = kProducers, kR = K * kChunk * 2, kFactors = kR + kSubchunk * kChunk * 2, kBytes = kFactors + 1024,
                       kSpare = kFactors + (2 * kChunk + kSubchunks) * static_cast<int>(sizeof(float));
};

// Gates of a chunk: prefix sums of the log decay in each subchunk, in base 2, and write strengths.
struct Gates {
  float G[kChunk], beta[kChunk];
};

// Shared memory of one producer. Rows of 64 elements are 32 high halves and then the 32 low halves of split numbers.
struct alignas(1024) ProducerShared {
  uint16_t scores[kChunk][kChunk];                    // row i: scores of token i with the tokens of its subchunk
  uint16_t inverse[kChunk][kChunk];                   // X' of each subchunk, transposed: row j is its column j
  float diagonal[2][kSubchunks][kBlock][kBlock + 4];  // diagonal blocks of rk N, transposed: see invert_diagonal_blocks
  float m_scale[kChunk];                              // beta_j e^(G_C - G_j), where C ends the subchunk
  Gates gates[2];                                     // double buffer for the current chunk and the producer's next one
  uint4 below[2 * 32];                                // N_21 of the first subchunk, in register order, from one warp to another
};
inline constexpr uint32_t kLow = 64;  // XOR-ed to the offset of a high half, it gives the offset of the low half

inline constexpr int kPreparedStages = KeyStage::kCount * KeyStage::kBytes,
                     kProducerShared = kPreparedStages + PreparedStage::kCount * PreparedStage::kBytes,
                     kValues = kProducerShared + kProducers * static_cast<int>(sizeof(ProducerShared)),
                     kEnd = kValues + ValueStage::kAll;
inline constexpr size_t kSharedBytes = kEnd + 1024;  // to align the first byte to 1024
static_assert(kSharedBytes <= 227 << 10, "limit of a block on sm_90");
inline constexpr int kBarriers = kPreparedStages + (PreparedStage::kSpare + 7) / 8 * 8,
                     kBarrierCount = 2 * (KeyStage::kCount + PreparedStage::kCount) + kConsumers * ValueStage::kCount;
static_assert(kBarriers + kBarrierCount * 8 <= kPreparedStages + PreparedStage::kBytes);

struct TensorMaps {
  CUtensorMap q, k, v, o;  // boxes of 32 tokens
};

#if WEFT_HAS_WGMMA
struct Barriers {
  StageBarriers keys, prepared;
  uint32_t values;  // full barrier of the first consumer's first value stage; the others follow
};
#endif

}  // namespace weft::cuda::fused
