// The chunk-parallel part of the tensor-core prefill by Hopper's warpgroup products, before the pass: see prefill.cuh.
//
// A warpgroup prepares a chunk of a key head for all its value heads, chunk after chunk. Warp w makes block column w of the inverse,
// which then lies transposed in its registers as the left operand of two products of the whole warpgroup, with keys and with scores in
// shared memory: M and R, turned on their way to where the copy engine takes them. What is inverted is diag(1/rk) + diag(beta) L with
// L = tril_{-1}(rk_i k_i.k_j), so that the inverse is X' = diag(rk) X, which is what multiplies keys as they are given.
#include "cuda/common/pdl.cuh"
#include "cuda/delta/prefill_prepare_inverse.cuh"

namespace weft::cuda {
namespace {

constexpr int kWarpgroups = 3;  // on a multiprocessor, a block each

#if WEFT_HAS_WGMMA

// Chunks of key heads in order, one for every block in turn.
struct InTurns {
  const Prefill& p;
  uint32_t index = blockIdx.x;

  __device__ PrepareItem next() {
    const uint32_t key_heads = static_cast<uint32_t>(p.Hk);
    PrepareItem item{static_cast<int>(index / key_heads), static_cast<int>(index % key_heads), 0, 0};
    index += gridDim.x;
    if (item.row >= p.map.rows) return item;
    const Chunk chunk = chunk_at(p.map, item.row);
    if (chunk.n < 0) return item;  // nor are there chunks behind
    item.token = static_cast<int>(chunk.begin);
    item.length = chunk.length();
    return item;
  }
};

// M's rows (tokens) of a block column by 64 channels, from the descriptor of the first keys.
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

// R transposed: tokens j of a block column by tokens i, from descriptors of the scores' parts.
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

// The warp's 16 rows of a product as 16 columns of 64, or fewer, rows, rounded.
template <int Pairs>
__device__ void store_turned(uint32_t to, const LdmatrixLane& at, int warp, const FragmentA (&x)[Pairs]) {
  to += Square::offset(at.row(), warp * 2 + at.piece());
#pragma unroll
  for (int pair = 0; pair < Pairs; ++pair) stmatrix_trans(to + pair * 2048, x[pair].x);
}
template <class Half, int Tiles>
__device__ void store_turned(uint32_t to, const LdmatrixLane& at, int warp, const float (&d)[Tiles][4]) {
  FragmentA x[Tiles / 2];
#pragma unroll
  for (int pair = 0; pair < Tiles / 2; ++pair) x[pair] = operand<Half>(d[2 * pair], d[2 * pair + 1]);
  store_turned(to, at, warp, x);
}

template <class Half>
__device__ void write_m(uint32_t to, const float* G, const float* beta, const LdmatrixLane& at, int warp, int lane,
                        float (&m)[8][4]) {
  const int j = warp * kBlock + lane / 4;
  const float carry[2] = {beta[j] * power2(G[kChunk - 1] - G[j]), beta[j + 8] * power2(G[kChunk - 1] - G[j + 8])};
#pragma unroll
  for (int nt = 0; nt < 8; ++nt)
#pragma unroll
    for (int e = 0; e < 4; ++e) m[nt][e] *= carry[e / 2];
  store_turned<Half>(to, at, warp, m);
}

// R with its decays and strengths. Blocks below the diagonal take e^(G_i - G_j) as the product of two factors, neither above 1, from the
// last token of block column j on; before the diagonal there are zeros, which stay zeros.
template <class Half>
__device__ void write_r(uint32_t to, const float* G, const float* beta, const LdmatrixLane& at, int warp, int lane,
                        float (&r)[8][4]) {
  const int j = warp * kBlock + lane / 4;
  const float from[2] = {G[j], G[j + 8]}, strength[2] = {beta[j], beta[j + 8]}, last = G[warp * kBlock + kBlock - 1];
  const float row[2] = {strength[0] * power2(last - from[0]), strength[1] * power2(last - from[1])};
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
          r[2 * n + i][e] *= strength[e / 2] * power2(fminf((e % 2 ? upto[i].y : upto[i].x) - from[e / 2], 0.0f));
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float column[2] = {power2(upto[i].x - last), power2(upto[i].y - last)};
#pragma unroll
        for (int e = 0; e < 4; ++e) r[2 * n + i][e] *= row[e / 2] * column[e % 2];
      }
    }
  }
  store_turned<Half>(to, at, warp, r);
}

// R and M of one or two value heads from the inverses' block columns, one product ahead of what is written. One
// thread calls store_m(head) and store_r(head) where they lie in shared memory; at the last of each nobody reads keys, or scores, any
// more.
template <class Half, int KP, int Heads, class StoreM, class StoreR>
__device__ void multiply_out(PrepareShared<KP>& s, const HeadGates (&heads)[Heads], int warp, int lane,
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
    // What the copy engine took before has left: M's place and R's take turns. Behind the first M nobody reads inverses any more.
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

// Products of keys with keys and queries, with their norms, to where inverses and R want them.
template <class Half, int KP>
__device__ void multiply_keys(PrepareShared<KP>& s, const Prefill& p, int warp, int lane, uint32_t parity) {
  const LdmatrixLane at(lane);
  const int g = lane / 4, t = lane % 4;
  const uint32_t k = smem_descriptor(shared_address(s.k)), q = smem_descriptor(shared_address(s.q));
  float kk[8][4], qk[8][4], square[2][4] = {};
  start_scores<Half, KP>(kk, k, k);
  mbarrier_wait(shared_address(&s.q_arrived), parity);
  start_scores<Half, KP>(qk, q, k);
  square_rows<Half, KP>(shared_address(s.q), warp, lane, square);
  wgmma_wait<1>();
  pin(kk);
  // The diagonal: row g has column g, of 8, in lane 4 g + g / 2.
  float own[2] = {};
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
    if (n == warp) {
      own[0] = g % 2 ? kk[2 * n][1] : kk[2 * n][0];
      own[1] = g % 2 ? kk[2 * n + 1][3] : kk[2 * n + 1][2];
    }
  float rk[2] = {1.0f, 1.0f}, rq[2] = {1.0f, 1.0f};
  if (p.args.l2_norm) {
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
  if (warp == 0 && lane == 0) tma_store_wait_read();  // R of the chunk before, where inverses go
  warpgroup_sync(0);                                  // nobody reads q any more
  const float read[2] = {p.scale * rq[0], p.scale * rq[1]};
  write_scores<Half>(s, at, warp, lane, read, qk);
}

// By one warp: gates of an item's value heads from `from` on, as many as there is room for.
template <int KP>
__device__ void fetch_gates(PrepareShared<KP>& s, const Prefill& p, const PrepareItem& item, int from, int lane, uint32_t slot) {
  const Chunk chunk{0, 0, item.token, int64_t{item.token} + item.length};
  const int count = min(value_heads(p) - from, kBatch);
  IncomingGates<> now, then;
  now.load(p.args.gates, chunk, value_head(p, item.head, from), lane);
#pragma unroll 1
  for (int j = 0; j < count; ++j) {
    if (j + 1 < count) then.load(p.args.gates, chunk, value_head(p, item.head, from + j + 1), lane);
    finish_gates(s.G[slot][j], s.beta[slot][j], p.args.gates, chunk, lane, now);
    now = then;
  }
}

// Prepares the block's items. `Heads` value heads of a key head are made at once; it has a multiple of them.
template <class Half, int Heads, int KP>
__device__ void prepare_items(PrepareShared<KP>& s, const Prefill& p, const KeyMaps& maps, unsigned thread) {
  InTurns source{p};  // of the last warp
  const int warp = thread / 32, lane = thread % 32, group = value_heads(p);
  const uint32_t k_arrived = shared_address(&s.k_arrived), q_arrived = shared_address(&s.q_arrived);
  if (warp == 3) {
    const PrepareItem item = source.next();
    if (lane == 0) s.items[0] = item;
    if (item.length > 0) fetch_gates(s, p, item, 0, lane, 0);
  }
  if (thread == 0) {
    mbarrier_init(k_arrived, 1);
    mbarrier_init(q_arrived, 1);
    fence_proxy_async();
  }
  warpgroup_sync(0);
  if (thread == 0 && s.items[0].length > 0) {
    copy_rows<KP>(s.items[0], s.k, maps.k, k_arrived);
    copy_rows<KP>(s.items[0], s.q, maps.q, q_arrived);
  }
  uint32_t slot = 0;  // of gates
  for (uint32_t parity = 0;; parity ^= 1, slot ^= 1) {
    const PrepareItem &item = s.items[parity], &next = s.items[parity ^ 1];
    const int length = item.length;
    if (length == 0) break;
    mbarrier_wait(k_arrived, parity);
    if (length < kChunk) {  // what lies behind the chunk is somebody else's
      mbarrier_wait(q_arrived, parity);
      for (int i = length * 8 + thread; i < kChunk * 8; i += kPrepareThreads)
#pragma unroll
        for (int panel = 0; panel < KP / 64; ++panel) {
          reinterpret_cast<uint4*>(s.k)[panel * kChunk * 8 + i] = uint4{0, 0, 0, 0};
          reinterpret_cast<uint4*>(s.q)[panel * kChunk * 8 + i] = uint4{0, 0, 0, 0};
        }
      fence_proxy_async();
      warpgroup_sync(0);
    }
    multiply_keys<Half>(s, p, warp, lane, parity);
    for (int first = 0; first < group; first += Heads) {
      if (first > 0) {
        if (first % kBatch == 0) slot ^= 1;
        if (thread == 0) tma_store_wait_read();
        warpgroup_sync(0);
      }
      const auto gates_of = [&](int h) { return HeadGates{s.G[slot][(first + h) % kBatch], s.beta[slot][(first + h) % kBatch]}; };
      const auto unit = [&](int h) { return p.units + (item.row * p.Hv + value_head(p, item.head, first + h)) * Unit<KP>::kBytes; };
      if (warp / 2 < Heads)
        invert_block<Half>(s, s.inverse[warp / 2], gates_of(warp / 2).beta, warp % 2 * 2 + lane / kBlock, lane % kBlock);
      fence_proxy_async();  // scores
      warpgroup_sync(0);
      // The last two warps have the least to invert.
      if (warp == 2) {
#pragma unroll 1
        for (int h = 0; h < Heads; ++h)
          for (int i = lane; i < kChunk; i += 32) write_factors(p, unit(h) + Unit<KP>::kFactors, gates_of(h).G, s.rk, s.rq, i);
      }
      if (warp == 3 && first % kBatch == 0) {
        int from = first + kBatch;
        PrepareItem coming = item;
        if (from >= group) {
          from = 0;
          coming = source.next();
          if (lane == 0) s.items[parity ^ 1] = coming;
          if (lane == 0 && coming.length > 0) {
#pragma unroll
            for (int panel = 0; panel < KP / 64; ++panel) {
              tma_prefetch(maps.k, panel * 64, coming.head, coming.token);
              tma_prefetch(maps.q, panel * 64, coming.head, coming.token);
            }
          }
        }
        if (coming.length > 0) fetch_gates(s, p, coming, from, lane, slot ^ 1);
      }
      HeadGates heads[Heads];
#pragma unroll
      for (int h = 0; h < Heads; ++h) heads[h] = gates_of(h);
      BlockColumn x[Heads];
      make_columns<Half>(s, heads, warp, lane, x);
      const auto is_last = [&](int h) { return first + h + 1 == group && next.length > 0; };
      multiply_out<Half>(
          s, heads, warp, lane, x,
          [&](int h) {
            tma_store_bulk(unit(h) + Unit<KP>::kM, shared_address(s.m), KP * kChunk * 2);
            if (is_last(h)) copy_rows<KP>(next, s.k, maps.k, k_arrived);
          },
          [&](int h) {
            tma_store_bulk(unit(h) + Unit<KP>::kR, shared_address(s.r), kChunk * kChunk * 2);
            if (is_last(h)) copy_rows<KP>(next, s.q, maps.q, q_arrived);
          });
    }
  }
  if (thread == 0) tma_store_wait_read();  // from memory that may end here
}

#endif  // WEFT_HAS_WGMMA

template <class Half, int KP, int Heads>
__global__ void __launch_bounds__(kPrepareThreads, kWarpgroups)
    prepare_wgmma_kernel(const __grid_constant__ Prefill p, const __grid_constant__ KeyMaps maps) {
#if WEFT_HAS_WGMMA
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& s = *reinterpret_cast<PrepareShared<KP>*>(raw);
  if (shared_address(raw) % 1024 != 0) __trap();  // products want their tiles so; nothing else lies in shared memory
  pdl_launch_dependents();
  prepare_items<Half, Heads>(s, p, maps, threadIdx.x);
#endif
}

}  // namespace

void launch_wgmma_prepare(const Stream& stream, const Prefill& p) {
  if (p.T == 0) return;
  for_types(p, [&]<class Half, int KP>() {
    const int64_t most = int64_t{kWarpgroups} * facts_of(stream).multiprocessors;
    launch("gated_delta_rule_prefill", stream, std::min(most, p.map.rows * p.Hk), kPrepareThreads, sizeof(PrepareShared<KP>),
           p.Hv / p.Hk % 2 ? prepare_wgmma_kernel<Half, KP, 1> : prepare_wgmma_kernel<Half, KP, 2>, p,
           KeyMaps{token_map(p.args.q), token_map(p.args.k)});
  });
}

}  // namespace weft::cuda
