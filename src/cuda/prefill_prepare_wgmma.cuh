// The chunk-parallel part of the tensor-core prefill by Hopper's warpgroup products: see prefill.cuh.
//
// A warpgroup prepares a chunk of a key head for all its value heads. Inverses are made as in the portable kernel; everything else is a
// product of the whole warpgroup: K K^T and Q K^T once, then for every value head, with X' = diag(rk) X transposed in shared memory,
// R from the scores in registers and M^T = K^T X' from the keys as they lie. The copy engine takes both away. The warpgroup meets only at
// its own barrier, so that several of them, or others, may share a block.
#pragma once

#include "cuda/prefill_prepare.cuh"
#include "cuda/wgmma.cuh"

namespace weft::cuda {

struct KeyMaps {
  CUtensorMap q, k;
};

// What one warpgroup works in.
template <int KP>
struct alignas(1024) PrepareShared {
  union {
    uint16_t q[kChunk * KP];
    uint16_t m[kChunk * KP];  // M on its way out, once q is no longer needed
  };
  uint16_t k[kChunk * KP];
  uint16_t x[2][kChunk * kChunk];  // X' transposed, two parts; blocks before the diagonal stay 0
  union {
    char inverse[2][kInverseBytes];  // diagonal blocks of X of two value heads
    uint16_t r[kChunk * kChunk];     // R on its way out
  };
  uint16_t kk[2][kBlocksBelow * kBlockElements];  // rk_i rk_j k_i.k_j, blocks below the diagonal; two parts
  float diagonal[kChunk][kDiagonalPitch];         // diagonal blocks of kk
  float G[kBatch][kChunk], beta[kBatch][kChunk];  // G in base 2
  float rk[kChunk], rq[kChunk];
  float carry[kChunk];  // beta_j e^(G_C - G_j) of the value head at work
  uint64_t arrived;     // q and k
};

#if WEFT_HAS_WGMMA

inline constexpr int kPanelBytes = kChunk * 128;  // 64 rows of 64 elements

// What the norms and the scores of a warp's 16 rows leave in registers: scale rq_i q_i.k_m for m <= i, as operands in two parts.
struct Scores {
  FragmentA high[4], low[4];
};

// Squared lengths of the warp's rows of q on the diagonal of their product with themselves.
template <class Half, int KP>
__device__ void square_rows(uint32_t q, int warp, int lane, float (&square)[2][4]) {
  const LanePlace at(lane);
#pragma unroll
  for (int ks = 0; ks < KP / 16; ++ks) {
    FragmentA a;
    load_matrices(a.x, q + ks / 4 * kPanelBytes + Square::offset(warp * kBlock + at.across_row(), ks % 4 * 2 + at.across_piece()));
    multiply<Half>(square[0], a, a.x[0], a.x[2]);
    multiply<Half>(square[1], a, a.x[1], a.x[3]);
  }
}

// K K^T with its norms to shared memory, as inverses want it; scores to registers.
template <class Half, int KP>
__device__ void products(PrepareShared<KP>& s, const Prefill& p, int warpgroup, int warp, int lane, Scores& scores) {
  const uint32_t q = matrix_descriptor(shared_address(s.q)), k = matrix_descriptor(shared_address(s.k));
  const int g = lane / 4, t = lane % 4;
  float kk[8][4], qk[8][4], square[2][4] = {};
  wgmma_fence();
#pragma unroll
  for (int ks = 0; ks < KP / 16; ++ks) {
    const uint32_t step = (ks / 4 * kPanelBytes + ks % 4 * 32) >> 4;
    if (ks == 0)
      wgmma_shared<Half, false, false>(kk, k + step, k + step);
    else
      wgmma_shared<Half, true, false>(kk, k + step, k + step);
  }
#pragma unroll
  for (int ks = 0; ks < KP / 16; ++ks) {
    const uint32_t step = (ks / 4 * kPanelBytes + ks % 4 * 32) >> 4;
    if (ks == 0)
      wgmma_shared<Half, false, false>(qk, q + step, k + step);
    else
      wgmma_shared<Half, true, false>(qk, q + step, k + step);
  }
  wgmma_commit();
  square_rows<Half, KP>(shared_address(s.q), warp, lane, square);
  wgmma_wait<0>();
  pin(kk);
  pin(qk);
  // The diagonal: row g has column g, of 8, in lane 4 g + g / 2.
  float own[2] = {};
#pragma unroll
  for (int nt = 0; nt < 8; ++nt)
    if (nt / 2 == warp) own[nt % 2] = nt % 2 == 0 ? (g % 2 ? kk[nt][1] : kk[nt][0]) : (g % 2 ? kk[nt][3] : kk[nt][2]);
  if (t == g / 2) {
    const int row = warp * kBlock + g;
    const auto factor = [&](float x) { return p.args.l2_norm ? 1.0f / sqrtf(x + 1e-6f) : 1.0f; };
    s.rk[row] = factor(own[0]);
    s.rk[row + 8] = factor(own[1]);
    s.rq[row] = factor(g % 2 ? square[0][1] : square[0][0]);
    s.rq[row + 8] = factor(g % 2 ? square[1][3] : square[1][2]);
  }
  meet(warpgroup);
#pragma unroll
  for (int nt = 0; nt < 8; ++nt) {
    if (nt / 2 > warp) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = warp * kBlock + half * 8 + g, c = nt * 8 + 2 * t;
      const float key = s.rk[i], x = kk[nt][half * 2] * key * s.rk[c], y = kk[nt][half * 2 + 1] * key * s.rk[c + 1];
      store_kk<Half>(s, i, c, x, y);
    }
  }
  const float read[2] = {p.scale * s.rq[warp * kBlock + g], p.scale * s.rq[warp * kBlock + g + 8]};
#pragma unroll
  for (int nt = 0; nt < 8; ++nt)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      qk[nt][e] = nt * 8 + 2 * t + e % 2 <= warp * kBlock + e / 2 * 8 + g ? qk[nt][e] * read[e / 2] : 0.0f;
#pragma unroll
  for (int ks = 0; ks < 4; ++ks) split<Half>(qk[2 * ks], qk[2 * ks + 1], scores.high[ks], scores.low[ks]);
}

// Half of an inverse in the registers of a warp, times rk, as rows of X' transposed. Two warps share a value head: one has the block
// columns 0 and 3, the other 1 and 2, five blocks either.
struct HalfInverse {
  FragmentA high[5], low[5];

  template <class Half, int KP>
  __device__ void make(const PrepareShared<KP>& s, const char* inverse, const float* beta, bool outer, int lane) {
    if (outer) {
      add<Half, 0, 0>(s, inverse, beta, lane);
      add<Half, 3, 4>(s, inverse, beta, lane);
    } else {
      add<Half, 1, 0>(s, inverse, beta, lane);
      add<Half, 2, 3>(s, inverse, beta, lane);
    }
  }
  template <int KP>
  __device__ void write(PrepareShared<KP>& s, bool outer, int lane) const {
    if (outer) {
      write_column<0, 0>(s, lane);
      write_column<3, 4>(s, lane);
    } else {
      write_column<1, 0>(s, lane);
      write_column<2, 3>(s, lane);
    }
  }

 private:
  template <class Half, int B, int First, int KP>
  __device__ void add(const PrepareShared<KP>& s, const char* inverse, const float* beta, int lane) {
    Column column;
    invert_column<Half>(s, inverse, beta, std::integral_constant<int, B>{}, lane, column);
#pragma unroll
    for (int n = 0; n < kBlocks - B; ++n) {
      float scaled[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 key = *reinterpret_cast<const float2*>(&s.rk[(B + n) * kBlock + half * 8 + lane % 4 * 2]);
#pragma unroll
        for (int e = 0; e < 4; ++e) scaled[half][e] = column.x[n][half][e] * (e % 2 ? key.y : key.x);
      }
      split<Half>(scaled[0], scaled[1], high[First + n], low[First + n]);
    }
  }
  template <int B, int First, int KP>
  __device__ void write_column(PrepareShared<KP>& s, int lane) const {
    const LanePlace at(lane);
#pragma unroll
    for (int n = 0; n < kBlocks - B; ++n) {
      const uint32_t to = Square::offset(B * kBlock + at.across_row(), (B + n) * 2 + at.across_piece());
      const FragmentA &h = high[First + n], &l = low[First + n];
      store_matrices(shared_address(s.x[0]) + to, h.x[0], h.x[1], h.x[2], h.x[3]);
      store_matrices(shared_address(s.x[1]) + to, l.x[0], l.x[1], l.x[2], l.x[3]);
    }
  }
};

// Sixteen rows of a product, rounded, to rows of 64 elements.
template <class Half>
__device__ void store_rows(uint32_t to, const LanePlace& at, const float (&d)[8][4]) {
#pragma unroll
  for (int pair = 0; pair < 4; ++pair)
    store_matrices(to + Square::offset(at.across_row(), pair * 2 + at.across_piece()), pack<Half>(d[2 * pair][0], d[2 * pair][1]),
                   pack<Half>(d[2 * pair][2], d[2 * pair][3]), pack<Half>(d[2 * pair + 1][0], d[2 * pair + 1][1]),
                   pack<Half>(d[2 * pair + 1][2], d[2 * pair + 1][3]));
}

// R of the warp's rows, its decays and strengths included.
template <class Half, int KP>
__device__ void write_r(PrepareShared<KP>& s, const float* G, const float* beta, int warp, int lane, float (&r)[8][4]) {
  const int g = lane / 4, t = lane % 4, i = warp * kBlock + g;
  const float upper = G[i], lower = G[i + 8];
#pragma unroll
  for (int nt = 0; nt < 8; ++nt) {
    const int j = nt * 8 + 2 * t;
    if (nt / 2 > warp) {
#pragma unroll
      for (int e = 0; e < 4; ++e) r[nt][e] = 0.0f;
      continue;
    }
    const float2 from = *reinterpret_cast<const float2*>(&G[j]), strength = *reinterpret_cast<const float2*>(&beta[j]);
    r[nt][0] = i >= j ? r[nt][0] * strength.x * power2(upper - from.x) : 0.0f;
    r[nt][1] = i > j ? r[nt][1] * strength.y * power2(upper - from.y) : 0.0f;
    r[nt][2] = i + 8 >= j ? r[nt][2] * strength.x * power2(lower - from.x) : 0.0f;
    r[nt][3] = i + 8 > j ? r[nt][3] * strength.y * power2(lower - from.y) : 0.0f;
  }
  store_rows<Half>(shared_address(s.r) + warp * kBlock * 128, LanePlace(lane), r);
}

// Sixteen rows (channels) of M transposed, from row `first` on, with what a correction's decay and strength add.
template <class Half, int KP>
__device__ void write_m(PrepareShared<KP>& s, int first, int lane, float (&m)[8][4]) {
#pragma unroll
  for (int nt = 0; nt < 8; ++nt) {
    const float2 carry = *reinterpret_cast<const float2*>(&s.carry[nt * 8 + lane % 4 * 2]);
    m[nt][0] *= carry.x;
    m[nt][1] *= carry.y;
    m[nt][2] *= carry.x;
    m[nt][3] *= carry.y;
  }
  store_rows<Half>(shared_address(s.m) + first * 128, LanePlace(lane), m);
}

// R and M of a value head from X' transposed, one product after the other: registers for more would be missed elsewhere.
template <class Half, int KP>
__device__ void multiply_out(PrepareShared<KP>& s, const float* G, const float* beta, int warp, int lane, const Scores& scores) {
  const uint32_t k = matrix_descriptor(shared_address(s.k));
  const uint32_t x[2] = {matrix_descriptor(shared_address(s.x[0])), matrix_descriptor(shared_address(s.x[1]))};
  float r[8][4], m[8][4];
  // Tokens are k: sixteen of them are 2048 bytes of keys, 32 of a row of X'.
  const auto start_m = [&](float(&to)[8][4], int half) {
    wgmma_fence();
#pragma unroll
    for (int ks = 0; ks < 4; ++ks) {
      const uint32_t keys = k + ((half * kPanelBytes + ks * 2048) >> 4), step = ks * 32 >> 4;
      if (ks == 0)
        wgmma_shared<Half, false, true>(to, keys, x[1] + step);
      else
        wgmma_shared<Half, true, true>(to, keys, x[1] + step);
      wgmma_shared<Half, true, true>(to, keys, x[0] + step);
    }
    wgmma_commit();
  };
  wgmma_fence();
#pragma unroll
  for (int ks = 0; ks < 4; ++ks) {
    const uint32_t step = ks * 32 >> 4;
    if (ks == 0)
      wgmma<Half, false>(r, scores.high[ks], x[1] + step);
    else
      wgmma<Half, true>(r, scores.high[ks], x[1] + step);
    wgmma<Half, true>(r, scores.low[ks], x[0] + step);
    wgmma<Half, true>(r, scores.high[ks], x[0] + step);
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(r);
  write_r<Half, KP>(s, G, beta, warp, lane, r);
#pragma unroll
  for (int half = 0; half < KP / 64; ++half) {
    start_m(m, half);
    wgmma_wait<0>();
    pin(m);
    write_m<Half, KP>(s, half * kChunk + warp * kBlock, lane, m);
  }
}

// Before its first chunk, by all threads of a warpgroup, 0 to 127; they see it once they have met.
template <int KP>
__device__ void begin_preparing(PrepareShared<KP>& s, unsigned thread) {
  if (thread == 0) {
    barrier_init(shared_address(&s.arrived), 1);
    fence_async();
  }
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(s.x) / 16) / kPrepareThreads; ++i)
    reinterpret_cast<uint4*>(s.x)[i * kPrepareThreads + thread] = uint4{0, 0, 0, 0};
}

// The units of a chunk, the row-th of all, for the value heads of a key head, by warps 4 `warpgroup` and following of a block. `parity` is
// how many chunks the warpgroup has prepared before, modulo 2. The first thread tells `publish` what was started with the copy engine:
// started(row, hv) for a unit on its way, and settle() where the engine has had time for what was started before.
template <class Half, int KP, class Publish>
__device__ void prepare_chunk(PrepareShared<KP>& s, const Prefill& p, const KeyMaps& maps, int warpgroup, uint32_t parity,
                              const Chunk& chunk, int64_t row, int64_t hk, Publish& publish) {
  const unsigned thread = threadIdx.x % kPrepareThreads;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const uint32_t arrived = shared_address(&s.arrived);
  if (thread == 0) {
    wait_stores_read();  // M of the chunk before lies where q comes
    barrier_arrive_expecting(arrived, 2 * KP / 64 * kPanelBytes);
#pragma unroll
    for (int panel = 0; panel < KP / 64; ++panel) {
      const int token = static_cast<int>(chunk.begin), head = static_cast<int>(hk);
      copy_tensor(shared_address(s.k) + panel * kPanelBytes, maps.k, panel * 64, head, token, arrived);
      copy_tensor(shared_address(s.q) + panel * kPanelBytes, maps.q, panel * 64, head, token, arrived);
    }
  }
  const int group = static_cast<int>(static_cast<uint32_t>(p.Hv) / static_cast<uint32_t>(p.Hk));
  const auto value_head = [&](int j) { return p.args.head_map == HeadMap::grouped ? hk * group + j : hk + j * p.Hk; };
  IncomingGates gates;
  if (warp < group) gates.load(p.args.gates, chunk, value_head(warp), lane);
  if (thread == 0) publish.settle();
  meet(warpgroup);
  barrier_wait(arrived, parity);
  if (chunk.length() < kChunk) {  // what lies behind the chunk is somebody else's
    for (int i = chunk.length() * 8 + thread; i < kChunk * 8; i += kPrepareThreads)
#pragma unroll
      for (int panel = 0; panel < KP / 64; ++panel) {
        reinterpret_cast<uint4*>(s.k)[panel * kChunk * 8 + i] = uint4{0, 0, 0, 0};
        reinterpret_cast<uint4*>(s.q)[panel * kChunk * 8 + i] = uint4{0, 0, 0, 0};
      }
    fence_async();
    meet(warpgroup);
  }
  Scores scores;
  products<Half, KP>(s, p, warpgroup, warp, lane, scores);
  if (warp < group) finish_gates(s.G[warp], s.beta[warp], p.args.gates, chunk, lane, gates);  // by now they have arrived
  meet(warpgroup);

  // Value heads in pairs: inverses of both at once, then one after the other what is made of them.
  const int other = warp / 2;  // which of the pair this warp inverts
  const bool outer = warp % 2 == 0;
  for (int first = 0; first < group; first += 2) {
    if (first > 0) {
      if (thread == 0) wait_stores_read();  // R is about to be overwritten, and M
      if (first % kBatch == 0 && first + warp < group)
        read_gates(s.G[warp], s.beta[warp], p.args.gates, chunk, value_head(first + warp), lane);
      meet(warpgroup);
    }
    const float* strengths = s.beta[(first + other) % kBatch];
    const bool there = first + other < group;
    if (there)
      invert_diagonal<Half>(s, s.inverse[other], strengths, lane < kBlock ? (outer ? 0 : 1) : (outer ? 3 : 2), lane % kBlock);
    meet(warpgroup);
    HalfInverse x;
    if (there) x.make<Half>(s, s.inverse[other], strengths, outer, lane);
    for (int which = 0; which < 2 && first + which < group; ++which) {
      const int j = first + which;
      const float *G = s.G[j % kBatch], *beta = s.beta[j % kBatch];
      if (other == which) {
        x.write(s, outer, lane);
        const int i = thread % kChunk;
        s.carry[i] = beta[i] * power2(G[kChunk - 1] - G[i]);
      }
      fence_async();
      meet(warpgroup);  // X' is there, and nobody reads diagonal blocks any more
      multiply_out<Half, KP>(s, G, beta, warp, lane, scores);
      fence_async();
      char* unit = p.units + (row * p.Hv + value_head(j)) * Unit<KP>::kBytes;
      if (thread < kChunk) write_factors(p, unit + Unit<KP>::kFactors, G, s.rk, s.rq, thread);
      meet(warpgroup);
      if (thread == 0) {
        publish.settle();
        store_bulk(unit + Unit<KP>::kM, shared_address(s.m), KP * kChunk * 2);
        store_bulk(unit + Unit<KP>::kR, shared_address(s.r), kChunk * kChunk * 2);
        publish.started(row, value_head(j));
        if (which == 0) wait_stores_read();
      }
    }
  }
}

#endif  // WEFT_HAS_WGMMA

}  // namespace weft::cuda
