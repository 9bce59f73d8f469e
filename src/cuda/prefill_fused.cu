// The tensor-core prefill in one kernel, for calls with many heads: nothing passes through device memory between its stages.
//
// A block per sequence and value head. One warpgroup prepares M, R and factors of a chunk (prefill.cuh, in parts of 32 tokens) while two
// others, of 64 rows of the state each, walk through the chunk before; single warps copy tokens, read gates and store outputs. Rows of
// the state lie in accumulators and every product takes its left operand from registers, as in prefill_wgmma.cu; of a part the tensor
// cores work on  S (k, q) | S += W M | o += R W.
#include "cuda/prefill_fused_prepare.cuh"

namespace weft::cuda {
namespace fused {
namespace {

constexpr const char* kOp = "gated_delta_rule_prefill";
constexpr int kWalkers = 2, kThreads = (kWalkers + 2) * 128;

struct Maps {
  TokenMaps tokens;  // boxes of 64 tokens
  CUtensorMap q, k;  // of 32
};

#if WEFT_HAS_WGMMA

// By one thread. Rows beyond a sequence are those of the next one; what comes of them is set aside later.
__device__ void copy_all(const Maps& maps, const Lane& at, uint32_t base, const Barriers& barriers) {
  Ring<TokenStage> ring{0, 1};  // the first round finds every stage free
  for (int64_t c = 0; c < at.chunks; ++c, ring.advance()) {
    const int token = static_cast<int>(at.range.begin + c * kChunk), hk = static_cast<int>(at.hk), hv = static_cast<int>(at.hv);
    const uint32_t stage = base + ring.offset(), keys = barriers.keys.full_of(ring.slot),
                   values = barriers.values.full_of(ring.slot);
    barrier_wait(barriers.keys.empty_of(ring.slot), ring.parity);
    barrier_arrive_expecting(keys, TokenStage::kKeyBytes);
#pragma unroll
    for (int i = 0; i < kParts * K / 64; ++i) {
      const int part = i / (K / 64), panel = i % (K / 64);
      const uint32_t to = stage + part * TokenStage::kPartBytes + panel * kPanel;
      copy_tensor(to, maps.k, panel * 64, hk, token + part * kPart, keys);
      copy_tensor(to + TokenStage::kQueries, maps.q, panel * 64, hk, token + part * kPart, keys);
    }
    barrier_wait(barriers.values.empty_of(ring.slot), ring.parity);
    barrier_arrive_expecting(values, kWalkers * kPanel);
#pragma unroll
    for (int panel = 0; panel < kWalkers; ++panel)
      copy_tensor(stage + TokenStage::kV + panel * kPanel, maps.tokens.v, panel * 64, hv, token, values);
  }
}

// By one warp, which reads a chunk ahead.
__device__ void read_all_gates(const Prefill& p, const Lane& at, unsigned char* shared, const Barriers& barriers, int lane) {
  const auto chunk_of = [&](int64_t c) {
    const int64_t begin = at.range.begin + c * kChunk;
    return Chunk{at.n, c, begin, min(begin + kChunk, at.range.end)};
  };
  Ring<Gates> ring{0, 1};
  IncomingGates now, then;
  if (at.chunks > 0) now.load(p.args.gates, chunk_of(0), at.hv, lane);
  for (int64_t c = 0; c < at.chunks; ++c, ring.advance()) {
    if (c + 1 < at.chunks) then.load(p.args.gates, chunk_of(c + 1), at.hv, lane);
    Gates& gates = *reinterpret_cast<Gates*>(shared + kGates + ring.offset());
    barrier_wait(barriers.gates.empty_of(ring.slot), ring.parity);
    finish_gates<kPart>(gates.G, gates.beta, p.args.gates, chunk_of(c), lane, now);
    __syncwarp();
    if (lane == 0) barrier_arrive(barriers.gates.full_of(ring.slot));
    now = then;
  }
}

// The chunks of a lane, by warps of 16 rows. Outputs of a part leave while the products of the next one run.
template <class Half>
__device__ void walk(const Prefill& p, const Lane& at, const StateSlots& slots, unsigned char* shared, uint32_t base,
                     const Barriers& barriers) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = warp * 16, group = warp / 4;
  const int chunks = static_cast<int>(at.chunks);
  float state[K / 8][4] = {}, reads[8][4], out[kPart / 8][4] = {};
  FragmentA s[K / 16];
  if (slots.in >= 0) load_state<K>(p, at, slots.in, first_row, lane, state);
  const LanePlace place(lane);
  // v of the warp's rows, which outputs replace; in a stage.
  const uint32_t values = base + TokenStage::kV + group * kPanel + Square::offset(place.row(), warp % 4 * 2 + place.piece());
  constexpr uint32_t kSixteen = 16 * 128;  // sixteen tokens further
  const auto turn_outputs = [&](uint32_t to) {
#pragma unroll
    for (int pair = 0; pair < kPart / 16; ++pair) {
      const uint32_t x[4] = {pack<Half>(out[2 * pair][0], out[2 * pair][1]), pack<Half>(out[2 * pair][2], out[2 * pair][3]),
                             pack<Half>(out[2 * pair + 1][0], out[2 * pair + 1][1]),
                             pack<Half>(out[2 * pair + 1][2], out[2 * pair + 1][3])};
      store_matrices_transposed(to + pair * kSixteen, x);
    }
  };
  const auto release = [&](uint32_t barrier) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  };
  const uint32_t descriptor = matrix_descriptor(base);
  Ring<TokenStage> tokens;
  Ring<UnitStage> units;
  int left = static_cast<int>(at.range.length()), before = 0;  // tokens from this part on; the stage of the chunk before
  round_state<Half, K>(state, s);
  for (int c = 0; c < chunks; ++c, tokens.advance(), units.advance()) {
    const uint32_t tile = descriptor + (tokens.offset() >> 4), unit = descriptor + ((kUnits + units.offset()) >> 4);
    const float* factors = reinterpret_cast<const float*>(shared + kUnits + units.offset() + Unit<K>::kFactors);
    barrier_wait(barriers.keys.full_of(tokens.slot), tokens.parity);
    barrier_wait(barriers.units.full_of(units.slot), units.parity);
#pragma unroll
    for (int part = 0; part < kParts; ++part, left -= kPart) {
      start_reads<Half, K>(reads, s, tile + (part * TokenStage::kPartBytes >> 4));
      decay_state<K>(state, factors[2 * kChunk + part]);
      pin(state);
      if (c > 0 || part > 0) {
        turn_outputs(values + (part > 0 ? tokens.offset() + kPart * (part - 1) * 128
                                        : before * TokenStage::kBytes + kPart * (kParts - 1) * 128));
        if (part == 0) release(barriers.units.empty_of(units.slot ^ 1));
      }
      if (part == 0) barrier_wait(barriers.values.full_of(tokens.slot), tokens.parity);
      LaneOperands<kPart> given;
      given.load(values + tokens.offset() + part * kPart * 128, kSixteen, factors + part * kPart, lane);
      if (part == 0 && c > 0) {  // some time after they were turned, since a fence waits for whatever is on its way
        fence_async();
        arrive_at(store_barrier(before, group));
      }
      wgmma_wait<0>();
      pin(reads);
      FragmentA w[kPart / 16];
      corrections<Half>(given, reads, w);
      if (__any_sync(0xffffffffu, left < kPart)) keep_tokens(w, left, lane);
      start_writes<Half>(state, w, unit + ((Unit<K>::kM + part * kPart * 2) >> 4));
      float2 scales[kPart / 8];
      load_factors(factors + kChunk + part * kPart, lane, scales);
#pragma unroll
      for (int i = 0; i < kPart / 8; ++i) {
        const float2 scale = scales[i];
        const float(&read)[4] = reads[kPart / 8 + i];
        out[i][0] = read[0] * scale.x;
        out[i][1] = read[1] * scale.y;
        out[i][2] = read[2] * scale.x;
        out[i][3] = read[3] * scale.y;
      }
      pin(out);
      start_writes<Half>(out, w, unit + ((Unit<K>::kR + part * (kPart * 128 + kPart * 2)) >> 4));
      if (part == kParts - 1) release(barriers.keys.empty_of(tokens.slot));
      wgmma_wait<1>();
      pin(state);
      round_state<Half, K>(state, s);
      wgmma_wait<0>();
      pin(out);
    }
    before = tokens.slot;
  }
  if (chunks > 0) {
    turn_outputs(values + before * TokenStage::kBytes + kPart * (kParts - 1) * 128);
    __syncwarp();
    store_last(p, at, shared + before * TokenStage::kBytes + TokenStage::kV + group * kPanel, warp, lane);
  }
  const Tensor& final = p.args.states.out;
  if (slots.out >= 0) store_state<K>(p, final, slots.out * final.strides[0] + at.hv * final.strides[1], first_row, lane, state);
}

#endif  // WEFT_HAS_WGMMA

template <class Half>
__global__ void __launch_bounds__(kThreads, 1) fused_kernel(const __grid_constant__ Prefill p, const __grid_constant__ Maps maps) {
#if WEFT_HAS_WGMMA
  extern __shared__ __align__(1024) unsigned char raw[];
  __shared__ alignas(8) uint64_t counters[2 * (2 * TokenStage::kCount + UnitStage::kCount + Gates::kCount)];
  StateSlots slots;
  Lane at;
  if (!find_lane<V>(p, slots, at)) return;
  unsigned char* shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
  const uint32_t base = kept(shared_address(shared));
  uint32_t next = kept(shared_address(counters));
  const auto take = [&](int count) {
    const StageBarriers taken{next, next + count * 8};
    next += count * 16;
    return taken;
  };
  const Barriers barriers{take(TokenStage::kCount), take(TokenStage::kCount), take(UnitStage::kCount), take(Gates::kCount)};
  if (threadIdx.x == 0) {
    const auto init = [](const StageBarriers& of, int count, int full, int empty) {
      for (int i = 0; i < count; ++i) {
        barrier_init(of.full_of(i), full);
        barrier_init(of.empty_of(i), empty);
      }
    };
    init(barriers.keys, TokenStage::kCount, 1, kWalkers * 4);  // warps
    init(barriers.values, TokenStage::kCount, 1, kWalkers);    // warps that store
    init(barriers.units, UnitStage::kCount, 4, kWalkers * 4);
    init(barriers.gates, Gates::kCount, 1, 4);
    fence_async();
  }
  __syncthreads();
  // Warpgroups share the registers unevenly.
  if (threadIdx.x < kWalkers * 128) {
    take_registers<176>();
    walk<Half>(p, at, slots, shared, base, barriers);
  } else if (threadIdx.x < (kWalkers + 1) * 128) {
    give_registers<128>();
    prepare_all<Half>(p, at, shared, base, barriers, threadIdx.x - kWalkers * 128);
  } else {
    give_registers<32>();
    const int warp = threadIdx.x / 32 - (kWalkers + 1) * 4, lane = threadIdx.x % 32;
    if (warp == 0 && lane == 0) copy_all(maps, at, base, barriers);
    if (warp == 1) read_all_gates(p, at, shared, barriers, lane);
    if (warp >= 2)
      store_all<false>(p, maps.tokens, at, warp - 2, barriers.values,
                       [=](int slot) { return base + slot * TokenStage::kBytes + TokenStage::kV; });
  }
#endif
}

}  // namespace
}  // namespace fused

// A lane takes as long alone as beside others, so there must be multiprocessors' worth of them, of sequences as long as the longest. What
// depends on the number of sequences is not for calls whose sequences shall not depend on each other.
bool takes_fused(const Stream& stream, const Prefill& p) {
  const int64_t long_ones = std::min(p.N, ceil_div(p.T, std::max<int64_t>(p.each, 1)));
  return p.K == fused::K && p.V == fused::V && p.T > 0 && p.args.o.dtype == p.args.q.dtype && p.args.checkpoint_every == 0 &&
         p.args.schedule == Schedule::fastest && 4 * long_ones * p.Hv >= 3 * facts_of(stream).multiprocessors &&
         takes_wgmma(stream, p);
}

PassPlan fused_plan(const Prefill& p) {
  PassPlan plan;
  plan.kernel = "fused";
  plan.rows = fused::V;
  plan.stages = fused::TokenStage::kCount;
  plan.blocks = p.Hv * p.N;
  plan.shared = fused::kSharedBytes;
  return plan;
}

void launch_fused(const Stream& stream, const Prefill& p) {
  const PassPlan plan = fused_plan(p);
  const fused::Maps maps{{CUtensorMap{}, CUtensorMap{}, token_map(p.args.v), token_map(p.args.o)},
                         token_map(p.args.q, fused::kPart),
                         token_map(p.args.k, fused::kPart)};
  launch(fused::kOp, stream, plan.blocks, fused::kThreads, plan.shared,
         p.args.k.dtype == DType::bf16 ? fused::fused_kernel<__nv_bfloat16> : fused::fused_kernel<__half>, p, maps);
}

}  // namespace weft::cuda
