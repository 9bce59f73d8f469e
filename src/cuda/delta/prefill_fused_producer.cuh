// The producer warpgroups of the fused prefill kernel: they load keys and queries and compute M, R and factors of a chunk.
//
// A producer prepares every other chunk, both subchunks of 32 tokens at once. Per chunk:
//   1. scores: keys and queries of a subchunk, in adjacent rows, times its keys. Warps 0, 1 get K K^T, warps 2, 3 get Q K^T.
//   2. warps 0, 1 invert (prefill_fused_math.cuh); warps 2, 3 store masked scores and finish the gates of the next chunk.
//   3. M transposed = keys times inverse and R = scores times inverse, with operands in shared memory.
//   4. factors, R and M go to the producer's PreparedStage.
// warpgroup_sync separates step 2 from the previous chunk and step 3 from step 2. For the mbarriers see prefill_fused.cu.
#pragma once

#include "cuda/delta/prefill_fused_math.cuh"

#if WEFT_HAS_WGMMA

namespace weft::cuda::fused {

// Named barrier of the two warps of a producer that invert.
__device__ inline void inverse_barrier_sync(int index) {
  asm volatile("bar.sync %0, 64;" ::"r"(kProducers + 1 + index) : "memory");
}

// A thread's view of its producer, and where the producer is in the sequence.
struct Producer {
  static constexpr int kStep = kProducers * kChunk;  // tokens from one chunk of the producer to its next

  const Prefill& p;
  const TensorMaps& maps;
  const WorkTile& work;
  const Barriers& barriers;
  unsigned char* shared;
  uint32_t base;
  int index, thread, warp, self;  // index: which producer; self: the lane
  int block = warp % 2;           // which 16 tokens of a subchunk the warp has
  bool has_keys = warp < 2;       // the other warps have queries, and the gates of subchunk `block`
  bool starts_loads = warp == 3 && self == 0;
  uint32_t own = kProducerShared + index * static_cast<uint32_t>(sizeof(ProducerShared));  // offset of the producer's memory
  ProducerShared& memory = *reinterpret_cast<ProducerShared*>(shared + own);
  uint32_t scores = base + own + offsetof(ProducerShared, scores), inverse = base + own + offsetof(ProducerShared, inverse);
  uint32_t prepared = kPreparedStages + index * PreparedStage::kBytes;           // offset of the producer's stage
  int c = index, left = static_cast<int>(work.range.length()) - index * kChunk;  // chunk, and tokens from it on

  __device__ __forceinline__ int buffer() const { return c / kProducers % 2; }  // of gates; also the parity of the stage

  // The subchunk of the warp's gates in the chunk `further` tokens after this one; empty where the sequence ends before.
  __device__ __forceinline__ Chunk gate_tokens(int further) const {
    const int64_t begin = work.range.end - left + further + block * kSubchunk;
    return Chunk{work.n, 0, begin, min(begin + kSubchunk, work.range.end)};
  }
  __device__ __forceinline__ void finish_gates_to(Gates& to, const RawGates<1>& raw, int further, int lane) const {
    finish_gates(to.G + block * kSubchunk, to.beta + block * kSubchunk, p.gates, gate_tokens(further), lane, raw);
  }

  // Starts the TMA loads of a subchunk's keys and queries. Rows beyond a sequence are those of the next one.
  __device__ __forceinline__ void load(int sub, int token) const {
    const uint32_t full = barriers.keys.full_of(KeyStage::index(sub)), to = base + KeyStage::offset(sub);
    // In the first round every stage is free.
    mbarrier_wait(barriers.keys.empty_of(KeyStage::index(sub)), KeyStage::parity(sub) ^ 1);
    mbarrier_arrive_expect_tx(full, KeyStage::kBytes);
#pragma unroll
    for (int i = 0; i < 2 * (K / 64); ++i)
      tma_load(to + i / 2 * kPanel + i % 2 * KeyStage::kQueries, i % 2 ? maps.q : maps.k, i / 2 * 64, static_cast<int>(work.hk),
               token, full);
  }
  // Starts the loads of subchunk `sub` of the producer's next chunk.
  __device__ __forceinline__ void load_next(int sub) const {
    if (starts_loads && left > kStep)
      load((c + kProducers) * kSubchunks + sub, static_cast<int>(work.range.end) - left + kStep + sub * kSubchunk);
    __syncwarp();
  }

  // Zeroes scores and inverse, whose elements for later tokens are never written, and starts the first chunk's loads and gates.
  __device__ __forceinline__ void start() const {
    for (int i = thread; i < static_cast<int>(offsetof(ProducerShared, diagonal)) / 16; i += 128)
      reinterpret_cast<uint4*>(&memory)[i] = uint4{};
    if (starts_loads && left > 0)
      for (int sub = 0; sub < kSubchunks; ++sub)
        load(c * kSubchunks + sub, static_cast<int>(work.range.end) - left + sub * kSubchunk);
    __syncwarp();
    if (!has_keys && left > 0) {
      RawGates<1> first;
      first.load(p.gates, gate_tokens(0), work.hv, self);
      finish_gates_to(memory.gates[0], first, 0, self);
    }
  }

  // Waits for the chunk's keys and queries, and clears those beyond the sequence.
  __device__ __forceinline__ void wait_for_keys(const uint32_t (&stage)[kSubchunks]) const {
#pragma unroll
    for (int sub = 0; sub < kSubchunks; ++sub) {
      const int i = KeyStage::index(c * kSubchunks + sub);
      const uint32_t parity = KeyStage::parity(c * kSubchunks + sub);
      // Without this wait `full` could still have the parity of seven subchunks before.
      mbarrier_wait(barriers.keys.empty_of(i), parity ^ 1);
      mbarrier_wait(barriers.keys.full_of(i), parity);
    }
    if (left < kChunk) {
      clear_tokens(shared + stage[0], shared + stage[1], static_cast<int>(opaque(left)), static_cast<int>(opaque(thread)));
      warpgroup_sync(index);
    }
  }
};

// A lane's registers of a chunk: K K^T or Q K^T of each subchunk, and rk or scale rq, of its rows.
using Scores = float[kSubchunks][kSubchunk / 8][4];
using RowNorms = float[kSubchunks][2];

// K K^T of a subchunk, by a warp that has keys: rk, and the diagonal block of rk N to shared memory. The first two tiles of the
// second warp's scores become N_21 / kGramScale.
template <class Half>
__device__ __forceinline__ void scale_keys(const Producer& producer, const Gates& gates, int sub, int lane, Scores& scores,
                                           RowNorms& inv_norm) {
  const int g = lane / 4, t = lane % 4, row = sub * kSubchunk + producer.block * kBlock + g;
  float(&d)[kSubchunk / 8][4] = scores[sub];
  float(&rk)[2] = inv_norm[sub];
  float own[2][4];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) own[i][e] = producer.block ? d[2 + i][e] : d[i][e];
  if (producer.p.l2_norm) diagonal_inverse_norms(own, lane, rk);
  const float write[2] = {-gates.beta[row] * rk[0], -gates.beta[row + 8] * rk[1]};
  const float both[2] = {rk[0] * write[0], rk[1] * write[1]};
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      producer.memory.diagonal[producer.block][sub][i * 8 + 2 * t + e % 2][e / 2 * 8 + g] = own[i][e] * both[e / 2];
      d[i][e] *= write[e / 2] * (1 / kGramScale<Half>);
    }
}

// Q K^T of a subchunk, by a warp that has queries: scale rq, and the masked scores to shared memory, split.
template <class Half>
__device__ __forceinline__ void store_scores(const Producer& producer, int sub, int lane, const Scores& scores,
                                             RowNorms& inv_norm) {
  const int g = lane / 4, t = lane % 4;
  float(&read)[2] = inv_norm[sub];
  read[0] *= producer.p.scale;
  read[1] *= producer.p.scale;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    if (n > producer.block) continue;
    float s[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s[i][e] = n < producer.block || i * 8 + 2 * t + e % 2 <= e / 2 * 8 + g ? scores[sub][2 * n + i][e] * read[e / 2] : 0.0f;
    SplitBlock<Half> x;
    x.split_of(s[0], s[1]);
    const LdmatrixLane at(lane);
    x.store(producer.scores +
            Tile64::offset(sub * kSubchunk + producer.block * kBlock + at.across_row(), n * 2 + at.across_piece()));
  }
}

// The inverse of both subchunks, by the two warps that have keys. The second warp has N_21 of both subchunks and passes the first
// one's to the first warp; each warp then computes X'_21 of one subchunk.
template <class Half>
__device__ __forceinline__ void invert(const Producer& producer, int lane, const Scores& scores, const RowNorms& inv_norm) {
  ProducerShared& memory = producer.memory;
  SplitBlock<Half> below;
  uint4* n21 = memory.below + lane;
  if (producer.block) {
    below.split_of(scores[0][0], scores[0][1]);
    n21[0] = uint4{below.high.x[0], below.high.x[1], below.high.x[2], below.high.x[3]};
    n21[32] = uint4{below.low.x[0], below.low.x[1], below.low.x[2], below.low.x[3]};
    below.split_of(scores[1][0], scores[1][1]);
  }
  __syncwarp();
  invert_diagonal_blocks<Half>(memory.diagonal[producer.block], inv_norm, reinterpret_cast<char*>(memory.inverse), producer.block,
                               lane);
  inverse_barrier_sync(producer.index);
  if (!producer.block) {
    const uint4 high = n21[0], low = n21[32];
    below.high = FragmentA{{high.x, high.y, high.z, high.w}};
    below.low = FragmentA{{low.x, low.y, low.z, low.w}};
  }
  invert_below<Half>(producer.inverse + producer.block * kSubchunk * 128, LdmatrixLane(lane), below);
}

// Factors to the PreparedStage, by the lanes that begin a row: a from the warps that have rk, c from the others, and the decay of
// each subchunk.
__device__ __forceinline__ void store_factors(const Producer& producer, const Gates& gates, int lane, const RowNorms& inv_norm) {
  if (lane % 4 != 0) return;
  float* factors = reinterpret_cast<float*>(producer.shared + producer.prepared + PreparedStage::kFactors);
#pragma unroll
  for (int i = 0; i < 2 * kSubchunks; ++i) {
    const int row = i / 2 * kSubchunk + producer.block * kBlock + i % 2 * 8 + lane / 4;
    const float decay = exp2_approx(gates.G[row]) * inv_norm[i / 2][i % 2];
    factors[producer.has_keys ? row : kChunk + row] = decay;
  }
  if (producer.warp < kSubchunks && lane == 0)
    factors[2 * kChunk + producer.warp] = exp2_approx(gates.G[producer.warp * kSubchunk + kSubchunk - 1]);
}

// Factors, R and M of a chunk to the PreparedStage. The quarters of M, each a panel of channels and a subchunk, alternate between
// two sets of accumulators. `keys` are smem descriptors.
template <class Half>
__device__ __forceinline__ void compute_prepared(const Producer& producer, const Gates& gates, const uint32_t (&keys)[kSubchunks],
                                                 int lane, const RowNorms& inv_norm) {
  const LdmatrixLane at(lane);
  const uint32_t inverse = smem_descriptor(opaque(producer.inverse));
  float r[8][4], m[2][kSubchunk / 8][4];
  const auto start_quarter = [&](int i) {
    const int panel = i / kSubchunks, sub = i % kSubchunks;
    start_m<Half>(m[i % 2], keys[sub] + (panel * kPanel >> 4), inverse + (sub * kSubchunk * 128 >> 4));
  };
  float2 m_scale[kSubchunks][kSubchunk / 8];
  const uint32_t rows =
      producer.base + producer.prepared + Tile64::offset(producer.warp * kBlock + at.across_row(), at.across_piece());
  const auto finish_quarter = [&](int i) {
    const int panel = i / kSubchunks, sub = i % kSubchunks;
    finish_m<Half>((rows + panel * kPanel) ^ sub * 64, m_scale[sub], m[i % 2]);
  };
  start_r<Half>(r, smem_descriptor(opaque(producer.scores)), inverse);
  start_quarter(0);
  mbarrier_wait(producer.barriers.prepared.empty_of(producer.index), producer.buffer() ^ 1);
  store_factors(producer, gates, lane, inv_norm);
  const RowDecays decays(gates, producer.warp, lane);
  wgmma_wait<1>();
  pin(r);
  finish_r<Half>(producer.base + producer.prepared + PreparedStage::kR, decays, gates.beta, at, producer.warp, lane, r);
#pragma unroll
  for (int sub = 0; sub < kSubchunks; ++sub) load_factors(producer.memory.m_scale + sub * kSubchunk, lane, m_scale[sub]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < 3) start_quarter(i + 1);
    if (i < 3)
      wgmma_wait<1>();
    else
      wgmma_wait<0>();
    finish_quarter(i);
    if (i == 0) producer.load_next(1);
  }
  fence_proxy_async();
  __syncwarp();
  // One arrival per warp would suffice, but racecheck follows threads, and these lanes have written factors.
  if (lane % 4 == 0) mbarrier_arrive(producer.barriers.prepared.full_of(producer.index));
}

// Prepares every other chunk of the block's sequence; by producer `index`. Addresses that depend on the lane are computed again for
// every step (opaque): as loop invariants they would not fit into registers.
template <class Half>
__device__ void produce(const Prefill& p, const TensorMaps& maps, const WorkTile& work, unsigned char* shared, uint32_t base,
                        const Barriers& barriers, int index, int thread) {
  Producer producer{p,
                    maps,
                    work,
                    barriers,
                    shared,
                    base,
                    index,
                    thread,
                    __shfl_sync(0xffffffffu, thread / 32, 0),
                    static_cast<int>(opaque(thread % 32))};
  producer.start();
  for (; producer.left > 0; producer.left -= Producer::kStep, producer.c += kProducers) {
    ProducerShared& memory = producer.memory;
    const Gates& gates = memory.gates[producer.buffer()];
    const uint32_t stage[kSubchunks] = {KeyStage::offset(producer.c * kSubchunks), KeyStage::offset(producer.c * kSubchunks + 1)};
    const uint32_t keys[kSubchunks] = {smem_descriptor(base + stage[0]), smem_descriptor(base + stage[1])};
    producer.wait_for_keys(stage);
    Scores scores;
#pragma unroll
    for (int sub = 0; sub < kSubchunks; ++sub) start_scores<Half, K>(scores[sub], keys[sub], keys[sub]);
    wgmma_wait<0>();
    warpgroup_sync(index);  // all warps have left the previous chunk
    int lane = static_cast<int>(opaque(producer.self));
    RawGates<1> coming;
    if (!producer.has_keys && producer.left > Producer::kStep)
      coming.load(p.gates, producer.gate_tokens(Producer::kStep), work.hv, lane);
    RowNorms inv_norm = {{1.0f, 1.0f}, {1.0f, 1.0f}};
    if (!producer.has_keys && p.l2_norm)
      query_inverse_norms<Half>(base + stage[0] + KeyStage::kQueries + producer.block * kBlock * 128, stage[1] - stage[0], lane,
                                inv_norm);
#pragma unroll
    for (int sub = 0; sub < kSubchunks; ++sub) {
      pin(scores[sub]);
      if (producer.has_keys)
        scale_keys<Half>(producer, gates, sub, lane, scores, inv_norm);
      else
        store_scores<Half>(producer, sub, lane, scores, inv_norm);
    }
    if (producer.has_keys) {
      invert<Half>(producer, lane, scores, inv_norm);
    } else {
      const int j = producer.block * kSubchunk + lane;
      memory.m_scale[j] = gates.beta[j] * exp2_approx(gates.G[producer.block * kSubchunk + kSubchunk - 1] - gates.G[j]);
      producer.load_next(0);
      if (producer.left > Producer::kStep)
        producer.finish_gates_to(memory.gates[producer.buffer() ^ 1], coming, Producer::kStep, lane);
    }
    fence_proxy_async();
    warpgroup_sync(index);  // scores and inverses are complete
    lane = static_cast<int>(opaque(producer.self));
    compute_prepared<Half>(producer, gates, keys, lane, inv_norm);
  }
}

}  // namespace weft::cuda::fused

#endif  // WEFT_HAS_WGMMA
