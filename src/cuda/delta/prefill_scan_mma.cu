// The state scan with mma instructions, for every device: see prefill.cuh.
//
// A consumer warp owns 16 rows of the state, in accumulators, and shares them with no other warp. Every product has rows of V as
// its rows, so a result becomes the next product's operand without moving. Two producer warps load the next chunks into shared
// memory with cp.async. __syncthreads() separates the chunks: it publishes the loaded stage and releases the previous one.
//
// Where two stages do not fit (K > 64 on devices with 99 KB of shared memory), a stage is used in halves: k and q are read in the
// first half of a chunk's work, everything else in the second. Each half of the stage is loaded while the other half is read.
#include "cuda/delta/prefill_scan.cuh"

namespace weft::cuda {
namespace {

constexpr int kRows = 16, kProducerThreads = 64;

// Uses operands 0 .. Count - 1, each loaded three uses ahead, so that products do not wait for shared memory.
template <int Count, class Load, class Use>
__device__ void with_operands(Load&& load, Use&& use) {
  constexpr int kAhead = 3;
  uint32_t b[kAhead + 1][4];
#pragma unroll
  for (int i = 0; i < kAhead && i < Count; ++i) load(i, b[i]);
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    if (i + kAhead < Count) load(i + kAhead, b[(i + kAhead) % (kAhead + 1)]);
    use(i, b[i % (kAhead + 1)]);
  }
}

// One chunk of the scan for the warp's 16 state rows: `out` becomes the chunk's outputs, `state` the state after it. Calls
// keys_read() between the last read of k and q and the first read of the rest of the stage.
template <class Half, int KP, int Warps, class KeysRead>
__device__ void scan_chunk(float (&state)[KP / 8][4], uint32_t stage, const float* factors, int warp, int lane, float (&out)[8][4],
                           KeysRead&& keys_read) {
  using S = ScanStage<KP, Warps * kRows>;
  const LdmatrixLane at(lane);
  float u[8][4];
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) u[i][e] = out[i][e] = 0.0f;
  // S k and S q of every token.
  FragmentA a;
  with_operands<KP / 16 * 8>(
      [&](int i, uint32_t(&b)[4]) {
        ldmatrix(b, stage + (i % 2 ? S::kQ : S::kK) + S::key(i / 2 % 4 * 16 + at.row(), i / 8 * 2 + at.piece()));
      },
      [&](int i, const uint32_t(&b)[4]) {
        if (i % 8 == 0) a = operand<Half>(state[i / 8 * 2], state[i / 8 * 2 + 1]);
        float(&left)[4] = i % 2 ? out[i / 2 % 4 * 2] : u[i / 2 % 4 * 2];
        float(&right)[4] = i % 2 ? out[i / 2 % 4 * 2 + 1] : u[i / 2 % 4 * 2 + 1];
        multiply<Half>(left, a, b[0], b[1]);
        multiply<Half>(right, a, b[2], b[3]);
      });
  keys_read();
  LaneOperands<> operands;
  operands.load<KP, Warps * kRows>(stage, factors, warp, lane);
  FragmentA w[4];
  compute_corrections<Half>(operands, u, w);
  const float decay = factors[2 * kChunk];
#pragma unroll
  for (int nt = 0; nt < KP / 8; ++nt)
#pragma unroll
    for (int e = 0; e < 4; ++e) state[nt][e] *= decay;
  // S += W^T M.
  with_operands<4 * (KP / 16)>(
      [&](int i, uint32_t(&b)[4]) {
        ldmatrix(b, stage + PreparedChunk<KP>::kM + Tile64::offset(i % (KP / 16) * 16 + at.row(), i / (KP / 16) * 2 + at.piece()));
      },
      [&](int i, const uint32_t(&b)[4]) {
        multiply<Half>(state[i % (KP / 16) * 2], w[i / (KP / 16)], b[0], b[1]);
        multiply<Half>(state[i % (KP / 16) * 2 + 1], w[i / (KP / 16)], b[2], b[3]);
      });
  // o += R W: the ten blocks of R on and below the diagonal, by (tokens, corrections).
  float2 reads[8];
  load_factors(factors + kChunk, lane, reads);
  scale_outputs(reads, out);
  constexpr int kTokens[10] = {0, 1, 2, 3, 1, 2, 3, 2, 3, 3}, kCorrections[10] = {0, 0, 0, 0, 1, 1, 1, 2, 2, 3};
  with_operands<10>(
      [&](int i, uint32_t(&b)[4]) {
        ldmatrix(b, stage + PreparedChunk<KP>::kR + Tile64::offset(kTokens[i] * 16 + at.row(), kCorrections[i] * 2 + at.piece()));
      },
      [&](int i, const uint32_t(&b)[4]) {
        multiply<Half>(out[kTokens[i] * 2], w[kCorrections[i]], b[0], b[1]);
        multiply<Half>(out[kTokens[i] * 2 + 1], w[kCorrections[i]], b[2], b[3]);
      });
}

// A barrier of the whole block at which producers and consumers arrive from different places in the code.
template <int Warps>
__device__ void halves_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(Warps * 32 + kProducerThreads) : "memory");
}

template <class Half, int KP, int Warps, bool InHalves>
__global__ void __launch_bounds__(Warps * 32 + kProducerThreads) scan_mma_kernel(const __grid_constant__ Prefill p, int stages) {
  extern __shared__ __align__(1024) unsigned char raw[];
  constexpr int VT = Warps * kRows;
  using S = ScanStage<KP, VT>;
  StateSlots slots;
  WorkTile work;
  if (!find_work<VT>(p, slots, work)) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = work.first_v + warp * kRows;
  const bool is_producer = warp >= Warps;
  const uint32_t base = shared_address(raw);
  const auto load_keys = [&](int64_t index, uint32_t to) {
    load_chunk_keys<KP, VT, kProducerThreads>(p, work, index, threadIdx.x - Warps * 32, to);
  };
  const auto load_rest = [&](int64_t index, uint32_t to) {
    const int thread = threadIdx.x - Warps * 32;
    load_chunk_values<KP, VT, kProducerThreads>(p, work, index, thread, to);
    const char* prepared = prepared_of<KP>(p, work, index);
#pragma unroll 4
    for (int i = thread; i < PreparedChunk<KP>::kBytes / 16; i += kProducerThreads) cp_async(to + i * 16, prepared + i * 16, true);
  };
  const auto load_chunk = [&](int64_t index, int stage) {
    if (index < work.chunks) {
      const uint32_t to = base + static_cast<uint32_t>(stage * S::kBytes);
      load_keys(index, to);
      load_rest(index, to);
    }
    cp_async_commit();
  };
  float state[KP / 8][4] = {};
  const auto consume_chunk = [&](int64_t c, int stage, auto&& keys_read) {
    float out[8][4];
    scan_chunk<Half, KP, Warps>(state, base + static_cast<uint32_t>(stage * S::kBytes),
                                reinterpret_cast<const float*>(raw + stage * S::kBytes + PreparedChunk<KP>::kFactors), warp, lane,
                                out, keys_read);
    if (p.o.dtype == p.q.dtype) {
      uint32_t rounded[8][2];
      round_outputs<Half>(out, rounded);
      store_rounded(p, work, c, rounded, first_row, lane);
    } else {
      store_unrounded(p, work, c, out, first_row, lane);
    }
    store_checkpoint<KP>(p, work, c, first_row, lane, state);
  };
  if (!is_producer && slots.in >= 0) load_state<KP>(p, work, slots.in, first_row, lane, state);
  if constexpr (InHalves) {
    const auto publish = [] {  // waits for this thread's loads, then for the block
      cp_async_commit();
      cp_async_wait<0>();
      halves_sync<Warps>();
    };
    if (is_producer && work.chunks > 0) load_keys(0, base);
    for (int64_t c = 0; c < work.chunks; ++c) {
      if (is_producer) {
        publish();  // k and q of chunk c are loaded, and all warps have read the rest of chunk c - 1
        load_rest(c, base);
        publish();  // the rest of chunk c is loaded, and all warps have read k and q of chunk c
        if (c + 1 < work.chunks) load_keys(c + 1, base);
      } else {
        halves_sync<Warps>();
        consume_chunk(c, 0, [] { halves_sync<Warps>(); });
      }
    }
  } else {
    if (is_producer)
      for (int c = 0; c < stages - 1; ++c) load_chunk(c, c);
    int stage = 0;
    for (int64_t c = 0; c < work.chunks; ++c) {
      if (is_producer) {
        if (stages == 3)
          cp_async_wait<1>();
        else
          cp_async_wait<0>();
      }
      __syncthreads();  // chunk c is loaded, and all warps have read chunk c - 1
      if (is_producer)
        load_chunk(c + stages - 1, stage == 0 ? stages - 1 : stage - 1);
      else
        consume_chunk(c, stage, [] {});
      stage = stage + 1 == stages ? 0 : stage + 1;
    }
  }
  const StridedView& out = p.states.out;
  if (!is_producer && slots.out >= 0)
    store_state<KP>(p, out, slots.out * out.strides[0] + work.hv * out.strides[1], first_row, lane, state);
}

// Two stages with K <= 64 fit every device; with more channels one stage does, used in halves.
constexpr int fewest_stages(int KP) { return KP <= 64 ? 2 : 1; }

template <int KP>
size_t stage_bytes(int warps) {
  return static_cast<size_t>(warps == 2   ? ScanStage<KP, 32>::kBytes
                             : warps == 4 ? ScanStage<KP, 64>::kBytes
                                          : ScanStage<KP, 128>::kBytes);
}

template <class Half, int KP, int Warps>
void launch_typed(const Stream& stream, const Prefill& p, const ScanPlan& plan) {
  const auto run = [&](auto kernel) {
    launch("gated_delta_rule_prefill", stream, plan.blocks, Warps * 32 + kProducerThreads, plan.shared, kernel, p, plan.stages);
  };
  if constexpr (fewest_stages(KP) == 1)
    if (plan.stages == 1) return run(scan_mma_kernel<Half, KP, Warps, true>);
  run(scan_mma_kernel<Half, KP, Warps, false>);
}

}  // namespace

// A block has the fewest rows for which every block gets a multiprocessor, since blocks that share one also share its tensor cores.
// More rows must not cost the second stage.
ScanPlan scan_plan_mma(const Stream& stream, const Prefill& p) {
  const DeviceFacts& facts = facts_of(stream);
  constexpr int kMostStages = 3;
  ScanPlan plan;
  plan.kernel = "mma";
  for (int warps : {2, 4, 8}) {
    const size_t stage = p.K <= 64 ? stage_bytes<64>(warps) : stage_bytes<128>(warps);
    const int stages = static_cast<int>(std::min<size_t>(static_cast<size_t>(facts.shared_bytes) / stage, kMostStages));
    if (stages < fewest_stages(p.K <= 64 ? 64 : 128) || stages < std::min(plan.stages, 2)) break;
    plan.rows = warps * kRows;
    plan.blocks = ceil_div(p.V, plan.rows) * p.Hv * p.N;
    plan.stages = stages;
    plan.shared = stage * static_cast<size_t>(stages);
    if (plan.blocks <= facts.multiprocessors || p.V <= plan.rows) break;
  }
  return plan;
}

bool can_use_mma(const Stream& stream, const Prefill& p) {
  return scan_plan_mma(stream, p).rows > 0 && prepare_mma_shared(p) <= static_cast<size_t>(facts_of(stream).shared_bytes);
}

void launch_scan_mma(const Stream& stream, const Prefill& p) {
  const ScanPlan plan = scan_plan_mma(stream, p);
  dispatch_types(p, [&]<class Half, int KP>() {
    if (plan.rows == 2 * kRows) return launch_typed<Half, KP, 2>(stream, p, plan);
    if (plan.rows == 4 * kRows) return launch_typed<Half, KP, 4>(stream, p, plan);
    launch_typed<Half, KP, 8>(stream, p, plan);
  });
}

}  // namespace weft::cuda
