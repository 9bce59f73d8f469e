// The prepare kernel with wgmma, for sm_90a: see prefill.cuh.
//
// A block is one warpgroup. It prepares a chunk of a key head for all its value heads, then the next chunk. Step 1 runs once per
// chunk, steps 2 to 4 run for one or two value heads at a time.
//   1. scores K K^T and Q K^T, and norms                                  all warps, wgmma
//   2. inverses of the 16 x 16 diagonal blocks                            a lane per column
//   3. block column w of the inverse, transposed in the registers of warp w
//   4. M and R: the block columns (A operand) times keys and scores (shared memory); transposed to shared memory, TMA store
// The inverted matrix is diag(1/rk) + diag(beta) L with L = tril_{-1}(rk_i k_i.k_j). Its inverse is X' = diag(rk) X, which
// multiplies keys as given.
//
// mbarriers k_full and q_full say that an item's keys and queries have landed. The loads of the next item start when the last
// products that read the current keys, or scores, are complete. warpgroup_sync(0) separates all other uses of shared memory.
#include "cuda/common/pdl.cuh"
#include "cuda/delta/prefill_prepare_inverse.cuh"

namespace weft::cuda {
namespace {

constexpr int kWarpgroups = 3;  // per multiprocessor, one block each

#if WEFT_HAS_WGMMA

// Items of a block: every gridDim.x-th chunk of a key head.
struct RoundRobin {
  const Prefill& p;
  uint32_t index = blockIdx.x;

  __device__ PrepareItem next() {
    const uint32_t key_heads = static_cast<uint32_t>(p.Hk);
    PrepareItem item{static_cast<int>(index / key_heads), static_cast<int>(index % key_heads), 0, 0};
    index += gridDim.x;
    if (item.row >= p.map.rows) return item;
    const Chunk chunk = chunk_at(p.map, item.row);
    if (chunk.n < 0) return item;  // no chunks follow
    item.token = static_cast<int>(chunk.begin);
    item.length = chunk.length();
    return item;
  }
};

// Starts M: the tokens of a block column as rows, by 64 channels. `keys` is the smem descriptor of a panel of keys.
template <class Half>
__device__ void start_m(float (&d)[8][4], const BlockColumn& x, uint32_t keys) {
  wgmma_fence();
#pragma unroll
  for (int ks = 0; ks < kBlocks; ++ks) {
    const uint32_t b = keys + (ks * kBlock * 128 >> 4);
    if (ks == 0)
      wgmma<Half, false, true>(d, x.low[ks], b);
    else
      wgmma<Half, true, true>(d, x.low[ks], b);
    wgmma<Half, true, true>(d, x.high[ks], b);
  }
  wgmma_commit();
}

// Starts R transposed: tokens j of a block column as rows, by tokens i. `high` and `low` are smem descriptors of the split scores.
template <class Half, int Tiles>
__device__ void start_r(float (&d)[Tiles][4], const BlockColumn& x, uint32_t high, uint32_t low) {
  wgmma_fence();
#pragma unroll
  for (int ks = 0; ks < kBlocks; ++ks) {
    const uint32_t step = ks * 32 >> 4;
    if (ks == 0)
      wgmma<Half, false>(d, x.high[ks], low + step);
    else
      wgmma<Half, true>(d, x.high[ks], low + step);
    wgmma<Half, true>(d, x.low[ks], high + step);
    wgmma<Half, true>(d, x.high[ks], high + step);
  }
  wgmma_commit();
}

// Stores the warp's 16 rows of a product transposed and rounded: as 16 columns of a tile.
template <int Pairs>
__device__ void store_transposed(uint32_t to, const LdmatrixLane& at, int warp, const FragmentA (&x)[Pairs]) {
  to += Tile64::offset(at.row(), warp * 2 + at.piece());
#pragma unroll
  for (int pair = 0; pair < Pairs; ++pair) stmatrix_trans(to + pair * 2048, x[pair].x);
}
template <class Half, int Tiles>
__device__ void store_transposed(uint32_t to, const LdmatrixLane& at, int warp, const float (&d)[Tiles][4]) {
  FragmentA x[Tiles / 2];
#pragma unroll
  for (int pair = 0; pair < Tiles / 2; ++pair) x[pair] = operand<Half>(d[2 * pair], d[2 * pair + 1]);
  store_transposed(to, at, warp, x);
}

// Stores 64 channels of M, transposed, with decays and beta.
template <class Half>
__device__ void write_m(uint32_t to, const float* G, const float* beta, const LdmatrixLane& at, int warp, int lane,
                        float (&m)[8][4]) {
  const int j = warp * kBlock + lane / 4;
  const float scale[2] = {beta[j] * exp2_approx(G[kChunk - 1] - G[j]), beta[j + 8] * exp2_approx(G[kChunk - 1] - G[j + 8])};
#pragma unroll
  for (int nt = 0; nt < 8; ++nt)
#pragma unroll
    for (int e = 0; e < 4; ++e) m[nt][e] *= scale[e / 2];
  store_transposed<Half>(to, at, warp, m);
}

// Stores R with decays and beta. Below the diagonal blocks, e^(G_i - G_j) is the product of e^(G_i - G_l) and e^(G_l - G_j),
// neither above 1, where l is the last token of block column j. Blocks above the diagonal are zero and stay zero.
template <class Half>
__device__ void write_r(uint32_t to, const float* G, const float* beta, const LdmatrixLane& at, int warp, int lane,
                        float (&r)[8][4]) {
  const int j = warp * kBlock + lane / 4;
  const float from[2] = {G[j], G[j + 8]}, strength[2] = {beta[j], beta[j + 8]}, last = G[warp * kBlock + kBlock - 1];
  const float row[2] = {strength[0] * exp2_approx(last - from[0]), strength[1] * exp2_approx(last - from[1])};
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    if (n < warp) continue;
    float2 upto[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) upto[i] = *reinterpret_cast<const float2*>(&G[n * kBlock + i * 8 + lane % 4 * 2]);
    if (n == warp) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          r[2 * n + i][e] *= strength[e / 2] * exp2_approx(fminf((e % 2 ? upto[i].y : upto[i].x) - from[e / 2], 0.0f));
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float column[2] = {exp2_approx(upto[i].x - last), exp2_approx(upto[i].y - last)};
#pragma unroll
        for (int e = 0; e < 4; ++e) r[2 * n + i][e] *= row[e / 2] * column[e % 2];
      }
    }
  }
  store_transposed<Half>(to, at, warp, r);
}

// Computes M and R of one or two value heads from the block columns of X'. One product runs ahead of the one that is stored. One
// thread calls store_m(head) and store_r(head) when M or R is complete in shared memory. At the last store_m all warps have read
// the keys, at the last store_r the scores.
template <class Half, int KP, int Heads, class StoreM, class StoreR>
__device__ void compute_m_and_r(PrepareShared<KP>& s, const HeadGates (&heads)[Heads], int warp, int lane,
                                const BlockColumn (&x)[Heads], StoreM&& store_m, StoreR&& store_r) {
  constexpr int kHalves = KP / 64, kEach = kHalves + 1, kProducts = Heads * kEach;
  const LdmatrixLane at(lane);
  const uint32_t keys = smem_descriptor(shared_address(s.k)), scores = smem_descriptor(shared_address(s.scores[0]));
  const uint32_t m_at = shared_address(s.m), r_at = shared_address(s.r);
  float d[2][8][4];
  const auto start = [&](int n) {
    const int half = n % kEach;
    if (half < kHalves)
      start_m<Half>(d[n % 2], x[n / kEach], keys + (half * kPanel >> 4));
    else
      start_r<Half>(d[n % 2], x[n / kEach], scores, scores + (kPanel >> 4));
  };
  start(0);
#pragma unroll
  for (int n = 0; n < kProducts; ++n) {
    if (n + 1 < kProducts) {
      start(n + 1);
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    pin(d[n % 2]);
    const int half = n % kEach;
    const HeadGates& head = heads[n / kEach];
    if (half < kHalves) {
      write_m<Half>(m_at + half * kPanel, head.G, head.beta, at, warp, lane, d[n % 2]);
      if (half + 1 < kHalves) continue;
    } else {
      write_r<Half>(r_at, head.G, head.beta, at, warp, lane, d[n % 2]);
    }
    // The previous TMA store has read its buffer; M and R alternate between two buffers. R replaces the inverses, which all warps
    // have read before the first M is complete.
    fence_proxy_async();
    if (warp == 0 && lane == 0) tma_store_wait_read();
    warpgroup_sync(0);
    if (warp == 0 && lane == 0) {
      if (half < kHalves)
        store_m(n / kEach);
      else
        store_r(n / kEach);
    }
  }
}

// Computes K K^T, Q K^T and the inverse norms, and stores the first two scaled: K K^T for the inverse, Q K^T for R.
template <class Half, int KP>
__device__ void compute_scores(PrepareShared<KP>& s, const Prefill& p, int warp, int lane, uint32_t parity) {
  const LdmatrixLane at(lane);
  const int g = lane / 4, t = lane % 4;
  const uint32_t k = smem_descriptor(shared_address(s.k)), q = smem_descriptor(shared_address(s.q));
  float kk[8][4], qk[8][4], square[2][4] = {};
  start_scores<Half, KP>(kk, k, k);
  mbarrier_wait(shared_address(&s.q_full), parity);
  start_scores<Half, KP>(qk, q, k);
  squared_norms<Half, KP>(shared_address(s.q), warp, lane, square);
  wgmma_wait<1>();
  pin(kk);
  // The diagonal element of row g, of 8, is in lane 4 g + g / 2.
  float own[2] = {};
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
    if (n == warp) {
      own[0] = g % 2 ? kk[2 * n][1] : kk[2 * n][0];
      own[1] = g % 2 ? kk[2 * n + 1][3] : kk[2 * n + 1][2];
    }
  float rk[2] = {1.0f, 1.0f}, rq[2] = {1.0f, 1.0f};
  if (p.l2_norm) {
    const int from = lane - t + g / 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float mine = i == 0 ? (g % 2 ? square[0][1] : square[0][0]) : (g % 2 ? square[1][3] : square[1][2]);
      rk[i] = rsqrtf(__shfl_sync(0xffffffffu, own[i], from) + kKeyNormEps<float>);
      rq[i] = rsqrtf(__shfl_sync(0xffffffffu, mine, from) + kKeyNormEps<float>);
    }
  }
  if (t == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      s.rk[warp * kBlock + i * 8 + g] = rk[i];
      s.rq[warp * kBlock + i * 8 + g] = rq[i];
    }
  }
  write_kk<Half>(s, at, warp, lane, rk, kk);
  wgmma_wait<0>();
  pin(qk);
  if (warp == 0 && lane == 0) tma_store_wait_read();  // the TMA store of the previous R, which inverses replace
  warpgroup_sync(0);                                  // all warps have read q, which scores replace
  const float read[2] = {p.scale * rq[0], p.scale * rq[1]};
  write_scores<Half>(s, at, warp, lane, read, qk);
}

// Loads the gates of an item's value heads `from` .., at most kGateBatch of them, into a buffer; by one warp.
template <int KP>
__device__ void read_item_gates(PrepareShared<KP>& s, const Prefill& p, const PrepareItem& item, int from, int lane,
                                uint32_t buffer) {
  const Chunk chunk{0, 0, item.token, int64_t{item.token} + item.length};
  const int count = min(value_heads(p) - from, kGateBatch);
  RawGates<> now, then;
  now.load(p.gates, chunk, value_head(p, item.head, from), lane);
#pragma unroll 1
  for (int j = 0; j < count; ++j) {
    if (j + 1 < count) then.load(p.gates, chunk, value_head(p, item.head, from + j + 1), lane);
    finish_gates(s.G[buffer][j], s.beta[buffer][j], p.gates, chunk, lane, now);
    now = then;
  }
}

// Sets the rows beyond a short chunk, which belong to the next sequence, to 0.
template <int KP>
__device__ __forceinline__ void clear_tail(PrepareShared<KP>& s, int length, unsigned thread) {
  for (int i = length * 8 + thread; i < kChunk * 8; i += kPrepareThreads)
#pragma unroll
    for (int panel = 0; panel < KP / 64; ++panel) {
      reinterpret_cast<uint4*>(s.k)[panel * kChunk * 8 + i] = uint4{0, 0, 0, 0};
      reinterpret_cast<uint4*>(s.q)[panel * kChunk * 8 + i] = uint4{0, 0, 0, 0};
    }
  fence_proxy_async();
  warpgroup_sync(0);
}

// Loads the next batch of gates, by the last warp. After the item's last batch it finds the next item, which becomes `next`,
// prefetches its keys and queries into the L2 and loads its first gates.
template <int KP>
__device__ __forceinline__ void read_next_gates(PrepareShared<KP>& s, const Prefill& p, const KeyTensorMaps& maps,
                                                RoundRobin& source, const PrepareItem& item, PrepareItem& next, int first,
                                                int group, int lane, uint32_t buffer) {
  int from = first + kGateBatch;
  PrepareItem coming = item;
  if (from >= group) {
    from = 0;
    coming = source.next();
    if (lane == 0) next = coming;
    if (lane == 0 && coming.length > 0) {
#pragma unroll
      for (int panel = 0; panel < KP / 64; ++panel) {
        tma_prefetch(maps.k, panel * 64, coming.head, coming.token);
        tma_prefetch(maps.q, panel * 64, coming.head, coming.token);
      }
    }
  }
  if (coming.length > 0) read_item_gates(s, p, coming, from, lane, buffer);
}

// Prepares the block's items, `Heads` value heads at once; the number of value heads per key head is a multiple of `Heads`.
template <class Half, int Heads, int KP>
__device__ void prepare_items(PrepareShared<KP>& s, const Prefill& p, const KeyTensorMaps& maps, unsigned thread) {
  RoundRobin source{p};  // used by the last warp
  const int warp = thread / 32, lane = thread % 32, group = value_heads(p);
  const uint32_t k_full = shared_address(&s.k_full), q_full = shared_address(&s.q_full);
  if (warp == 3) {
    const PrepareItem item = source.next();
    if (lane == 0) s.items[0] = item;
    if (item.length > 0) read_item_gates(s, p, item, 0, lane, 0);
  }
  if (thread == 0) {
    mbarrier_init(k_full, 1);
    mbarrier_init(q_full, 1);
    fence_proxy_async();
  }
  warpgroup_sync(0);
  if (thread == 0 && s.items[0].length > 0) {
    load_tokens<KP>(s.items[0], s.k, maps.k, k_full);
    load_tokens<KP>(s.items[0], s.q, maps.q, q_full);
  }
  uint32_t buffer = 0;  // of gates
  for (uint32_t parity = 0;; parity ^= 1, buffer ^= 1) {
    const PrepareItem &item = s.items[parity], &next = s.items[parity ^ 1];
    const int length = item.length;
    if (length == 0) break;
    mbarrier_wait(k_full, parity);
    if (length < kChunk) {
      mbarrier_wait(q_full, parity);
      clear_tail(s, length, thread);
    }
    compute_scores<Half>(s, p, warp, lane, parity);
    for (int first = 0; first < group; first += Heads) {
      if (first > 0) {
        if (first % kGateBatch == 0) buffer ^= 1;
        if (thread == 0) tma_store_wait_read();
        warpgroup_sync(0);
      }
      const auto gates_of = [&](int h) {
        return HeadGates{s.G[buffer][(first + h) % kGateBatch], s.beta[buffer][(first + h) % kGateBatch]};
      };
      const auto prepared = [&](int h) {
        return p.prepared + (item.row * p.Hv + value_head(p, item.head, first + h)) * PreparedChunk<KP>::kBytes;
      };
      if (warp / 2 < Heads)
        invert_block<Half>(s, s.inverse[warp / 2], gates_of(warp / 2).beta, warp % 2 * 2 + lane / kBlock, lane % kBlock);
      fence_proxy_async();  // scores
      warpgroup_sync(0);
      // The last two warps have the shortest block columns, so they write the factors and load ahead.
      if (warp == 2) {
#pragma unroll 1
        for (int h = 0; h < Heads; ++h)
          for (int i = lane; i < kChunk; i += 32)
            write_factors(p, prepared(h) + PreparedChunk<KP>::kFactors, gates_of(h).G, s.rk, s.rq, i);
      }
      if (warp == 3 && first % kGateBatch == 0)
        read_next_gates(s, p, maps, source, item, s.items[parity ^ 1], first, group, lane, buffer ^ 1);
      HeadGates heads[Heads];
#pragma unroll
      for (int h = 0; h < Heads; ++h) heads[h] = gates_of(h);
      BlockColumn x[Heads];
      compute_block_columns<Half>(s, heads, warp, lane, x);
      const auto is_last = [&](int h) { return first + h + 1 == group && next.length > 0; };
      compute_m_and_r<Half>(
          s, heads, warp, lane, x,
          [&](int h) {
            tma_store_bulk(prepared(h) + PreparedChunk<KP>::kM, shared_address(s.m), KP * kChunk * 2);
            if (is_last(h)) load_tokens<KP>(next, s.k, maps.k, k_full);
          },
          [&](int h) {
            tma_store_bulk(prepared(h) + PreparedChunk<KP>::kR, shared_address(s.r), kChunk * kChunk * 2);
            if (is_last(h)) load_tokens<KP>(next, s.q, maps.q, q_full);
          });
    }
  }
  if (thread == 0) tma_store_wait_read();  // shared memory ends with the block
}

#endif  // WEFT_HAS_WGMMA

template <class Half, int KP, int Heads>
__global__ void __launch_bounds__(kPrepareThreads, kWarpgroups)
    prepare_wgmma_kernel(const __grid_constant__ Prefill p, const __grid_constant__ KeyTensorMaps maps) {
#if WEFT_HAS_WGMMA
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& s = *reinterpret_cast<PrepareShared<KP>*>(raw);
  if (shared_address(raw) % 1024 != 0) __trap();  // wgmma requires aligned tiles; there is no other shared memory
  pdl_launch_dependents();
  prepare_items<Half, Heads>(s, p, maps, threadIdx.x);
#endif
}

}  // namespace

void launch_prepare_wgmma(const Stream& stream, const Prefill& p) {
  if (p.T == 0) return;
  dispatch_types(p, [&]<class Half, int KP>() {
    const int64_t most = int64_t{kWarpgroups} * facts_of(stream).multiprocessors;
    launch("gated_delta_rule_prefill", stream, std::min(most, p.map.rows * p.Hk), kPrepareThreads, sizeof(PrepareShared<KP>),
           p.Hv / p.Hk % 2 ? prepare_wgmma_kernel<Half, KP, 1> : prepare_wgmma_kernel<Half, KP, 2>, p,
           KeyTensorMaps{token_tensor_map(p.q, p.T, p.Hk, p.K), token_tensor_map(p.k, p.T, p.Hk, p.K)});
  });
}

}  // namespace weft::cuda
