// The tensor-core prefill in one kernel, for calls with many heads: nothing passes through device memory between its stages.
//
// A block per sequence and value head. Two warpgroups prepare M, R and factors (prefill.cuh, in parts of 32 tokens) of every other
// chunk each, while two others, of 64 rows of the state each, walk through the chunks before. Rows of the state lie in accumulators and
// every product of the walk takes its left operand from registers, as in prefill_scan_wgmma.cu; of a part the tensor cores work on
// S (k, q) | S += W M | o += R W.
#include "cuda/common/pdl.cuh"
#include "cuda/delta/prefill_fused_producer.cuh"

namespace weft::cuda {
namespace fused {
namespace {

constexpr const char* kOp = "gated_delta_rule_prefill";
constexpr int kThreads = (kWalkers + kPreparers) * 128;

#if WEFT_HAS_WGMMA

// The warps of a walker, where one of them waits for the others.
__device__ inline void meet_group(int place, bool waits) {
  constexpr int kFirst = 2 * kPreparers + 1;
  if (waits)
    asm volatile("bar.sync %0, 128;" ::"r"(kFirst + place) : "memory");
  else
    asm volatile("bar.arrive %0, 128;" ::"r"(kFirst + place) : "memory");
}

// The chunks of a lane, by warps of 16 rows. Outputs of a part leave while the products of the next one run.
template <class Half>
__device__ void walk(const Prefill& p, const Maps& maps, const Lane& at, const StateSlots& slots, unsigned char* shared,
                     uint32_t base, const Barriers& barriers) {
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = static_cast<int>(kept(threadIdx.x % 32)),
            first_row = warp * 16;
  float state[K / 8][4] = {}, read[2 * kPart / 8][4], out[kPart / 8][4];  // S k and S q; outputs
  FragmentA s[K / 16], rounded[kPart / 16];                               // the state, and outputs
  if (slots.in >= 0) load_state<K>(p, at, slots.in, first_row, lane, state);
  // v of the warpgroup's 64 rows comes part after part; outputs leave from its place, of which a warp has 16 columns.
  const int group = warp / 4, parts = static_cast<int>((at.range.length() + kPart - 1) / kPart);
  const LdmatrixLane place(lane);
  const uint32_t ring = base + kValues + group * (ValueStage::kCount * ValueStage::kBytes),
                 full = barriers.values + group * (ValueStage::kCount * 8);
  const uint32_t turned = ring + Square::offset(place.row(), warp % 4 * 2 + place.piece());
  constexpr uint32_t kSixteen = 16 * 128;  // sixteen tokens further
  const bool leads = warp % 4 == 0 && lane == 0;
  const auto token_of = [&](int part) { return static_cast<int>(at.range.begin) + part * kPart; };
  const auto copy_values = [&](int part) {
    const int slot = part % ValueStage::kCount;
    if (!leads || part >= parts) return;
    mbarrier_arrive_expect_tx(full + slot * 8, ValueStage::kBytes);
    tma_load(ring + slot * ValueStage::kBytes, maps.v, group * 64, static_cast<int>(at.hv), token_of(part), full + slot * 8);
  };
  const auto turn_outputs = [&](int part) {
#pragma unroll
    for (int pair = 0; pair < kPart / 16; ++pair)
      stmatrix_trans(turned + part % ValueStage::kCount * ValueStage::kBytes + pair * kSixteen, rounded[pair].x);
  };
  // Outputs of a part that ends the sequence, of which there are so many, by the warp that turned them.
  const auto store_last = [&](int part, int count) {
    const Tensor& o = p.args.o;
    const uint32_t from = ring + part % ValueStage::kCount * ValueStage::kBytes;
    __syncwarp();
    for (int token = lane % 16; token < count; token += 16)
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(o.data) + (at.range.begin + part * kPart + token) * o.strides[0] +
                                at.hv * o.strides[1] + first_row + lane / 16 * 8) =
          load_shared(from + Square::offset(token, warp % 4 * 2 + lane / 16));
  };
  const uint32_t descriptor = smem_descriptor(base);
  Ring<KeyStage> tokens;
  Ring<UnitStage> units;
  int left = static_cast<int>(at.range.length());  // tokens from this part on
  copy_values(0);
  copy_values(1);
  round_state<Half, K>(state, s);
  // Not unrolled: its code shall stay in the instruction cache beside the preparers'.
#pragma unroll 1
  for (int i = 0; i < parts; ++i, left -= kPart) {
    const int part = i % kParts;
    const bool last = part == kParts - 1;  // of the chunk
    const uint32_t tile = descriptor + (tokens.offset() >> 4), unit = descriptor + ((kUnits + units.offset()) >> 4);
    const float* factors = reinterpret_cast<const float*>(shared + kUnits + units.offset() + UnitStage::kFactors);
    if (part == 0) mbarrier_wait(barriers.units.full_of(units.slot), units.parity);
    mbarrier_wait(barriers.keys.full_of(tokens.slot), tokens.parity);
    start_reads<Half, K>(read, s, tile);
    // The next part's values come where the outputs of the part before the last were, once these are gone.
    if (i > 0) {
      if (leads) tma_store_wait_read();
      copy_values(i + 1);
      __syncwarp();
    }
    decay_state<K>(state, factors[2 * kChunk + part]);
    pin(state);
    if (i > 0) turn_outputs(i - 1);
    mbarrier_wait(full + i % ValueStage::kCount * 8, i / ValueStage::kCount % 2);
    LaneOperands<kPart> given;
#pragma unroll
    for (int pair = 0; pair < kPart / 16; ++pair)
      ldmatrix_trans(given.v[pair], turned + i % ValueStage::kCount * ValueStage::kBytes + pair * kSixteen);
    wgmma_wait<0>();
    pin(read);
    leave_stage<1>(barriers.keys.empty_of(tokens.slot), lane);
    tokens.advance();
    load_factors(factors + part * kPart, lane, given.a);  // there were no registers for them before
    FragmentA w[kPart / 16];
    corrections<Half>(given, read, w);
    if (left < kPart) keep_tokens(w, left, lane);
    start_writes<Half>(state, w, unit + (part * kPart * 2 >> 4));
    float2 scales[kPart / 8];
    load_factors(factors + kChunk + part * kPart, lane, scales);
#pragma unroll
    for (int n = 0; n < kPart / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] = read[kPart / 8 + n][e] * (e % 2 ? scales[n].y : scales[n].x);
    pin(out);
    start_writes<Half>(out, w, unit + ((UnitStage::kR + part * kPart * 2) >> 4));
    // Outputs of the part before leave. Places to meet take turns, since a warp may come here while others have not been here for the part
    // before; to the same place it comes again when all have, for it waits for values that the first warp asks for behind its meeting.
    if (i > 0) {
      fence_proxy_async();
      meet_group(i % 2 * kWalkers + group, warp % 4 == 0);
      if (leads)
        tma_store(maps.o, group * 64, static_cast<int>(at.hv), token_of(i - 1),
                  ring + (i - 1) % ValueStage::kCount * ValueStage::kBytes);
    }
    wgmma_wait<1>();
    pin(state);
    round_state<Half, K>(state, s);
    wgmma_wait<0>();
    pin(out);
#pragma unroll
    for (int pair = 0; pair < kPart / 16; ++pair) rounded[pair] = operand<Half>(out[2 * pair], out[2 * pair + 1]);
    if (last) {
      leave_stage<kFactorLanes>(barriers.units.empty_of(units.slot), lane);
      units.advance();
    }
  }
  if (parts > 0) {
    turn_outputs(parts - 1);
    store_last(parts - 1, left + kPart);
  }
  const Tensor& final = p.args.states.out;
  if (slots.out >= 0) store_state<K>(p, final, slots.out * final.strides[0] + at.hv * final.strides[1], first_row, lane, state);
  if (leads) tma_store_wait_read();  // from memory that ends with the block
}

#endif  // WEFT_HAS_WGMMA

template <class Half>
__global__ void __launch_bounds__(kThreads, 1) fused_kernel(const __grid_constant__ Prefill p, const __grid_constant__ Maps maps) {
#if WEFT_HAS_WGMMA
  extern __shared__ __align__(1024) unsigned char raw[];
  unsigned char* shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
  const uint32_t base = kept(shared_address(shared));
  uint32_t next = kept(base + kBarriers);
  const auto take = [&](int count) {
    const StageBarriers taken{next, next + count * 8};
    next += count * 16;
    return taken;
  };
  const Barriers barriers{take(KeyStage::kCount), take(UnitStage::kCount), next};
  if (threadIdx.x == 0) {
    const auto init = [](const StageBarriers& of, int count, int full, int empty) {
      for (int i = 0; i < count; ++i) {
        mbarrier_init(of.full_of(i), full);
        mbarrier_init(of.empty_of(i), empty);
      }
    };
    init(barriers.keys, KeyStage::kCount, 1, kWalkers * 4);                       // warps
    init(barriers.units, UnitStage::kCount, 4 * 8, kWalkers * 4 * kFactorLanes);  // filled by eight lanes of every warp
    for (int i = 0; i < kWalkers * ValueStage::kCount; ++i) mbarrier_init(barriers.values + i * 8, 1);
    fence_proxy_async();
  }
  __syncthreads();
  pdl_wait();
  pdl_launch_dependents();
  StateSlots slots;
  Lane at;
  if (!find_lane<V>(p, slots, at)) return;
  // Warpgroups share the registers unevenly.
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (group < kWalkers) {
    setmaxnreg_inc<160>();
    walk<Half>(p, maps, at, slots, shared, base, barriers);
  } else {
    setmaxnreg_dec<96>();
    prepare_all<Half>(p, maps, at, shared, base, barriers, group - kWalkers, threadIdx.x % 128);
  }
#endif
}

}  // namespace
}  // namespace fused

// A lane takes as long alone as beside others, so there must be multiprocessors' worth of them, of sequences as long as the longest. What
// depends on the number of sequences is not for calls whose sequences shall not depend on each other.
bool takes_fused(const Stream& stream, const Prefill& p) {
  const int64_t long_ones = std::min(p.N, ceil_div(p.T, std::max<int64_t>(p.each, 1)));
  return p.K == fused::K && p.V == fused::V && p.T > 0 && plain(p) && p.args.schedule == Schedule::fastest &&
         4 * long_ones * p.Hv >= 3 * facts_of(stream).multiprocessors && takes_wgmma(stream, p);
}

PassPlan fused_plan(const Prefill& p) {
  PassPlan plan;
  plan.kernel = "fused";
  plan.rows = fused::V;
  plan.stages = fused::KeyStage::kCount / fused::kParts;
  plan.blocks = p.Hv * p.N;
  plan.shared = fused::kSharedBytes;
  return plan;
}

void launch_fused(const Stream& stream, const Prefill& p) {
  const PassPlan plan = fused_plan(p);
  const fused::Maps maps{token_map(p.args.q, fused::kPart), token_map(p.args.k, fused::kPart), token_map(p.args.v, fused::kPart),
                         token_map(p.args.o, fused::kPart)};
  launch_pdl(fused::kOp, stream, plan.blocks, fused::kThreads, plan.shared,
             p.args.k.dtype == DType::bf16 ? fused::fused_kernel<__nv_bfloat16> : fused::fused_kernel<__half>, p, maps);
}

}  // namespace weft::cuda
