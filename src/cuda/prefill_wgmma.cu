// The sequential part of the tensor-core prefill by Hopper's warpgroup products: see prefill.cuh.
//
// A warpgroup owns 64 rows of the state, in accumulators. Every product has rows of V as its rows and takes its left operand from
// registers, so that results become operands where they lie; keys, queries, M and R are right operands in shared memory. Per chunk the
// tensor cores work on  S k | S q | S += W M | o += R W,  and W, decays, rounding and stores happen while one of them runs. The other
// warps copy the chunks to come.
#include "cuda/prefill_pass.cuh"
#include "cuda/wgmma.cuh"

namespace weft::cuda {
namespace {

constexpr int kRows = 64, kStages = 3;

constexpr int kCopyThreads = 128;

template <int KP, int Groups>
constexpr size_t kSharedBytes = kStages* Stage<KP, Groups * kRows>::kBytes + 1024;

#if WEFT_HAS_WGMMA

struct Barriers {
  uint32_t full, empty;  // of stage 0; the others follow
  __device__ uint32_t full_of(int slot) const { return full + slot * 8; }
  __device__ uint32_t empty_of(int slot) const { return empty + slot * 8; }
};

template <int KP, int Groups>
__device__ void copy_all(const Prefill& p, const Lane& at, uint32_t base, const Barriers& barriers, int thread) {
  constexpr int VT = Groups * kRows;
  using S = Stage<KP, VT>;
  int slot = 0;
  uint32_t parity = 1;  // the first round finds every stage free
  for (int64_t c = 0; c < at.chunks; ++c) {
    const uint32_t stage = base + static_cast<uint32_t>(slot * S::kBytes);
    barrier_wait(barriers.empty_of(slot), parity);
    if (thread == 0) {
      barrier_arrive_expecting(barriers.full_of(slot), Unit<KP>::kBytes);
      copy_bulk(stage, unit_of<KP>(p, at, c), Unit<KP>::kBytes, barriers.full_of(slot));
    }
    copy_tokens<KP, VT, kCopyThreads>(p, at, c, thread, stage);
    commit_copies();
    // Chunk c - 1 has had the time of a chunk to arrive.
    if (c > 0) {
      wait_copies<1>();
      fence_async();
      barrier_arrive(barriers.full_of(slot == 0 ? kStages - 1 : slot - 1));
    }
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
  if (at.chunks > 0) {
    wait_copies<0>();
    fence_async();
    barrier_arrive(barriers.full_of(slot == 0 ? kStages - 1 : slot - 1));
  }
}

template <class Half, int KP, int Groups>
__device__ void walk(const Prefill& p, const Lane& at, const StateSlots& slots, const unsigned char* shared, uint32_t base,
                     const Barriers& barriers) {
  constexpr int VT = Groups * kRows;
  using S = Stage<KP, VT>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = at.first_v + warp * 16;
  float state[KP / 8][4] = {}, u[8][4], out[8][4];
  FragmentA s[KP / 16];
  if (slots.in >= 0) load_state<KP>(p, at, slots.in, first_row, lane, state);
  // The state as the next chunk's operand, and as what the chunk adds to: its registers may not change while a product runs.
  const auto round_and_decay = [&](float decay) {
#pragma unroll
    for (int ks = 0; ks < KP / 16; ++ks) s[ks] = operand<Half>(state[2 * ks], state[2 * ks + 1]);
#pragma unroll
    for (int nt = 0; nt < KP / 8; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) state[nt][e] *= decay;
  };
  if (at.chunks > 0) {
    barrier_wait(barriers.full_of(0), 0);
    round_and_decay(reinterpret_cast<const float*>(shared + Unit<KP>::kFactors)[2 * kChunk]);
  }
  const auto release = [&](int slot) {
    fence_async();  // what was written here before the copy engine may write it
    __syncwarp();
    if (lane == 0) barrier_arrive(barriers.empty_of(slot));
  };
  const bool same_type = p.args.o.dtype == p.args.q.dtype;
  // Outputs are turned from rows of V to tokens where the chunk's v lay, which nobody reads any more, and leave in pieces of 16 bytes:
  // a thread takes one piece of every 16th token.
  uint4 pieces[4];
  const int group = threadIdx.x / 128, piece = threadIdx.x % 8, first_token = threadIdx.x % 128 / 8;
  const auto turn_outputs = [&](uint32_t stage) {
    const LanePlace place(lane);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const uint32_t x[4] = {pack<Half>(out[2 * pair][0], out[2 * pair][1]), pack<Half>(out[2 * pair][2], out[2 * pair][3]),
                             pack<Half>(out[2 * pair + 1][0], out[2 * pair + 1][1]),
                             pack<Half>(out[2 * pair + 1][2], out[2 * pair + 1][3])};
      store_matrices_transposed(stage + S::kV + S::value(pair * 16 + place.row(), warp * 2 + place.piece()), x);
    }
    meet(group);
    const unsigned char* tile = shared + (stage - base) + S::kV;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      pieces[i] = *reinterpret_cast<const uint4*>(tile + S::value(i * 16 + first_token, group * 8 + piece));
  };
  const auto store_pieces = [&](int64_t index) {
    const OutputPlace place(p, at, index);
    const Tensor& o = p.args.o;
    const int row = at.first_v + group * kRows + piece * 8;
    uint16_t* to = static_cast<uint16_t*>(o.data) + place.base + first_token * o.strides[0] + row;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i * 16 + first_token < place.length && row < p.V) *reinterpret_cast<uint4*>(to + i * 16 * o.strides[0]) = pieces[i];
  };
  int slot = 0;
  uint32_t parity = 0;
  for (int64_t c = 0; c < at.chunks; ++c) {
    const uint32_t stage = base + static_cast<uint32_t>(slot * S::kBytes);
    const float* factors = reinterpret_cast<const float*>(shared + slot * S::kBytes + Unit<KP>::kFactors);
    // Descriptors count addresses in 16 bytes.
    const uint64_t tile = matrix_descriptor(stage);
    barrier_wait(barriers.full_of(slot), parity);
    wgmma_fence();
#pragma unroll
    for (int ks = 0; ks < KP / 16; ++ks) {
      const uint64_t k = tile + ((S::kK + ks / 4 * kPanel + ks % 4 * 32) >> 4);
      if (ks == 0)
        wgmma<Half, false>(u, s[ks], k);
      else
        wgmma<Half, true>(u, s[ks], k);
    }
    wgmma_commit();
    if (c > 0 && same_type) store_pieces(c - 1);
    pin(out);
    wgmma_fence();
#pragma unroll
    for (int ks = 0; ks < KP / 16; ++ks) {
      const uint64_t q = tile + ((S::kQ + ks / 4 * kPanel + ks % 4 * 32) >> 4);
      if (ks == 0)
        wgmma<Half, false>(out, s[ks], q);
      else
        wgmma<Half, true>(out, s[ks], q);
    }
    wgmma_commit();
    wgmma_wait<1>();  // S k
    pin(u);
    FragmentA w[4];
    corrections<Half, KP, VT>(stage, factors, warp, lane, u, w);
    wgmma_fence();
#pragma unroll
    for (int js = 0; js < 4; ++js) wgmma<Half, true>(state, w[js], tile + ((Unit<KP>::kM + js * 32) >> 4));
    wgmma_commit();
    wgmma_wait<1>();  // S q
    pin(out);
    scale_outputs(factors, lane, out);
    pin(out);
    wgmma_fence();
#pragma unroll
    for (int js = 0; js < 4; ++js) wgmma<Half, true>(out, w[js], tile + ((Unit<KP>::kR + js * 32) >> 4));
    wgmma_commit();
    wgmma_wait<1>();  // the state
    pin(state);
    store_checkpoint<KP>(p, at, c, first_row, lane, state);
    round_and_decay(c + 1 < at.chunks ? factors[2 * kChunk + 1] : 1.0f);
    pin(state);
    wgmma_wait<0>();  // the outputs; they are stored while the next product runs
    pin(out);
    if (same_type)
      turn_outputs(stage);
    else
      store_unrounded(p, at, c, out, first_row, lane);
    release(slot);
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
  if (at.chunks > 0 && same_type) store_pieces(at.chunks - 1);
  const Tensor& to = p.args.states.out;
  if (slots.out >= 0) store_state<KP>(p, to, slots.out * to.strides[0] + at.hv * to.strides[1], first_row, lane, state);
}

#endif  // WEFT_HAS_WGMMA

template <class Half, int KP, int Groups>
__global__ void __launch_bounds__(Groups * 128 + kCopyThreads, 1) wgmma_kernel(const __grid_constant__ Prefill p) {
#if WEFT_HAS_WGMMA
  extern __shared__ __align__(1024) unsigned char raw[];
  __shared__ alignas(8) uint64_t counters[2 * kStages];
  StateSlots slots;
  Lane at;
  if (!find_lane<Groups * kRows>(p, slots, at)) return;
  unsigned char* shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
  const Barriers barriers{shared_address(counters), shared_address(counters + kStages)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(barriers.full_of(i), kCopyThreads + 1);
      barrier_init(barriers.empty_of(i), Groups * 4);
    }
    fence_async();
  }
  __syncthreads();
  const uint32_t base = shared_address(shared);
  // Three warpgroups share the registers unevenly.
  if (threadIdx.x >= Groups * 128) {
    if constexpr (Groups == 2) give_registers<40>();
    copy_all<KP, Groups>(p, at, base, barriers, threadIdx.x - Groups * 128);
  } else {
    if constexpr (Groups == 2) take_registers<232>();
    walk<Half, KP, Groups>(p, at, slots, shared, base, barriers);
  }
#endif
}

template <class Half, int KP>
void launch_typed(const Stream& stream, const Prefill& p, const PassPlan& plan) {
  const auto run = [&](auto kernel, int threads) {
    launch("gated_delta_rule_prefill", stream, plan.blocks, threads, plan.shared, kernel, p);
  };
  if (plan.rows == kRows) return run(wgmma_kernel<Half, KP, 1>, 128 + kCopyThreads);
  run(wgmma_kernel<Half, KP, 2>, 256 + kCopyThreads);
}

// Was the kernel compiled for Hopper's own instructions, not from the PTX for older devices?
bool built_for_hopper() {
  static const bool built = [] {
    cudaFuncAttributes attributes{};
    const auto kernel = wgmma_kernel<__nv_bfloat16, 128, 1>;
    if (cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)) == cudaSuccess)
      return attributes.ptxVersion >= 90;
    cudaGetLastError();
    return false;
  }();
  return built;
}

}  // namespace

bool takes_wgmma(const Stream& stream, const Prefill& p) { return facts_of(stream).major == 9 && p.V > 16 && built_for_hopper(); }

// 64 rows per block while there are multiprocessors for them, then 128.
PassPlan wgmma_plan(const Stream& stream, const Prefill& p) {
  PassPlan plan;
  plan.kernel = "wgmma";
  plan.rows = p.V <= kRows || ceil_div(p.V, kRows) * p.Hv * p.N <= facts_of(stream).multiprocessors ? kRows : 2 * kRows;
  plan.blocks = ceil_div(p.V, plan.rows) * p.Hv * p.N;
  plan.stages = kStages;
  plan.shared = p.K <= 64 ? (plan.rows == kRows ? kSharedBytes<64, 1> : kSharedBytes<64, 2>)
                          : (plan.rows == kRows ? kSharedBytes<128, 1> : kSharedBytes<128, 2>);
  return plan;
}

void launch_wgmma_pass(const Stream& stream, const Prefill& p) {
  const PassPlan plan = wgmma_plan(stream, p);
  const bool bf16 = p.args.k.dtype == DType::bf16;
  if (p.K <= 64) return bf16 ? launch_typed<__nv_bfloat16, 64>(stream, p, plan) : launch_typed<__half, 64>(stream, p, plan);
  bf16 ? launch_typed<__nv_bfloat16, 128>(stream, p, plan) : launch_typed<__half, 128>(stream, p, plan);
}

}  // namespace weft::cuda
