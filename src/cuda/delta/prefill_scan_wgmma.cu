// The state scan with wgmma, for sm_90a: see prefill.cuh.
//
// Consumer warpgroups: each owns 64 rows of the state, in accumulators. Every product has rows of V as its rows and takes its A
// operand from registers, so a result becomes the next operand without moving. Keys, queries, M and R are B operands in shared
// memory. Per chunk the tensor cores run  S k | S q | S += W M | o += R W.  W, decays, rounding and stores overlap with one of
// these products.
// Producer warps: one thread loads chunks with TMA, one warp per consumer warpgroup stores outputs with TMA.
//
// Barriers of a pipeline stage (mbarriers):
//   full        the TMA loads of the chunk have landed
//   keys_free   the consumers have read keys and queries
//   empty       v and the PreparedChunk are read, and an output buffer is free; see store_outputs
// Named barriers (store_barrier): the outputs of a chunk are in shared memory.
//
// Two blocks for the halves of a head's state rows read the same PreparedChunk, keys and queries. As a pair, which is a cluster of
// two, each block loads one half and multicasts it to both. A stage is then full when both halves and the block's own v have
// landed, and free when both blocks have released it.
#include "cuda/common/cluster.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/delta/prefill_scan_wgmma.cuh"

namespace weft::cuda {
namespace {

constexpr const char* kOp = "gated_delta_rule_prefill";
constexpr int kRows = 64, kStages = kOutputStages;

// Threads of the producer warps: one warp for loads and one per consumer warpgroup for stores. With two consumer warpgroups they
// are a whole warpgroup, which setmaxnreg needs.
template <int Groups>
constexpr int kProducerThreads = Groups == 2 ? 128 : 64;

// Do outputs have buffers outside the pipeline stages? Otherwise they overwrite the v of their chunk.
template <int Groups>
constexpr bool kSeparateOutputs = Groups == 1;

template <int KP, int Groups>
constexpr size_t kSharedBytes = kStages* ScanStage<KP, Groups * kRows>::kBytes + (kSeparateOutputs<Groups> ? kStages * kPanel : 0) +
                                1024;

#if WEFT_HAS_WGMMA

// Loads all chunks; by one thread. Rows beyond a sequence are those of the next one; the consumers mask them (mask_tokens).
// Pair: bytes of the other block's half may count on `full` before this thread expects them, but never for the previous chunk of
// the stage: the other block waits for this block's arrivals too. `empty` also counts the warp that stores this block's outputs,
// but not the other block's store warp.
template <int KP, int Groups, bool Pair>
__device__ void load_chunks(const Prefill& p, const TokenTensorMaps& maps, const WorkTile& work, uint32_t base,
                            const StageBarriers& barriers, uint32_t keys_free) {
  using S = ScanStage<KP, Groups * kRows>;
  static_assert(!Pair || (KP == 128 && Groups == 1), "each block of a pair loads one panel of keys");
  const int half = work.first_v / kRows;  // rank of the block in its pair
  int stage = 0;
  uint32_t parity = 1;  // in the first round every stage is free
  for (int64_t c = 0; c < work.chunks; ++c) {
    const uint32_t to = base + static_cast<uint32_t>(stage * S::kBytes), full = barriers.full_of(stage);
    mbarrier_wait(keys_free + stage * 8, parity);  // consumers release keys and queries before the rest
    mbarrier_arrive_expect_tx(full, PreparedChunk<KP>::kBytes + (2 * KP / 64 + Groups) * kPanel);
    const int token = static_cast<int>(work.range.begin + c * kChunk), hk = static_cast<int>(work.hk),
              hv = static_cast<int>(work.hv);
    if constexpr (Pair) {
      tma_load_multicast(to + S::kK + half * kPanel, maps.k, half * 64, hk, token, full);
      tma_load_multicast(to + S::kQ + half * kPanel, maps.q, half * 64, hk, token, full);
    } else {
#pragma unroll
      for (int panel = 0; panel < KP / 64; ++panel) tma_load(to + S::kK + panel * kPanel, maps.k, panel * 64, hk, token, full);
#pragma unroll
      for (int panel = 0; panel < KP / 64; ++panel) tma_load(to + S::kQ + panel * kPanel, maps.q, panel * 64, hk, token, full);
    }
    mbarrier_wait(barriers.empty_of(stage), parity);
#pragma unroll
    for (int panel = 0; panel < Groups; ++panel)
      tma_load(to + S::kV + panel * kPanel, maps.v, work.first_v + panel * 64, hv, token, full);
    if constexpr (Pair) {
      constexpr int kHalf = PreparedChunk<KP>::kBytes / 2;
      tma_load_bulk_multicast(to + half * kHalf, prepared_of<KP>(p, work, c) + half * kHalf, kHalf, full);
    } else {
      tma_load_bulk(to, prepared_of<KP>(p, work, c), PreparedChunk<KP>::kBytes, full);
    }
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// Offset in shared memory of the output buffer of a stage.
template <int KP, int Groups>
__device__ uint32_t output_offset(int stage) {
  using S = ScanStage<KP, Groups * kRows>;
  return kSeparateOutputs<Groups> ? static_cast<uint32_t>(kStages * S::kBytes + stage * kPanel)
                                  : static_cast<uint32_t>(stage * S::kBytes + S::kV);
}

// Stores the state after the block's chunks: for the next range, and as the sequence's final state.
template <int KP>
__device__ __forceinline__ void store_end_state(const Prefill& p, const WorkTile& work, const StateSlots& slots, int first_row,
                                                int lane, float (&state)[KP / 8][4]) {
  if (work.next) store_rows_to<KP>(work.next, first_row, lane, static_cast<int>(p.K), static_cast<int>(p.V), state);
  const StridedView& final = p.states.out;
  if (slots.out >= 0 && work.last)
    store_state<KP>(p, final, slots.out * final.strides[0] + work.hv * final.strides[1], first_row, lane, state);
}

// A vote tells the compiler that all lanes of the warp agree.
__device__ __forceinline__ bool uniform(bool x) { return __any_sync(0xffffffffu, x); }
// An opaque value keeps the addresses that depend on it out of registers until here.
__device__ __forceinline__ int opaque_int(int x) { return static_cast<int>(opaque(static_cast<uint32_t>(x))); }

// Scans the chunks of the block's work; by the consumer warpgroups, of which a warp has 16 state rows. S k of the next chunk starts
// as soon as the new state is rounded, before the chunk's outputs are complete; the outputs are rounded and transposed while it
// runs. The wait for the next chunk is equally late, since chunks arrive just in time. SimpleOutput: outputs have the inputs'
// dtype, and there are no checkpoints.
template <class Half, int KP, int Groups, bool SimpleOutput, bool Pair>
__device__ void consume(const Prefill& p, const WorkTile& work, const StateSlots& slots, unsigned char* shared, uint32_t base,
                        const StageBarriers& barriers, uint32_t keys_free) {
  constexpr int VT = Groups * kRows;
  using S = ScanStage<KP, VT>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = work.first_v + warp * 16;
  const int chunks = static_cast<int>(work.chunks);
  float state[KP / 8][4] = {}, u[8][4];
  FragmentA s[KP / 16];
  if (!work.start && slots.in >= 0) load_state<KP>(p, work, slots.in, first_row, lane, state);
  pdl_wait();
  if (p.ranges.end < p.ranges.count) pdl_launch_dependents();
  if (work.start) load_rows_of<KP>(work.start, first_row, lane, static_cast<int>(p.K), static_cast<int>(p.V), state);
  if (chunks == 0) return store_end_state<KP>(p, work, slots, first_row, lane, state);
  const auto factors_of = [&](uint32_t offset) {
    return reinterpret_cast<const float*>(shared + offset + PreparedChunk<KP>::kFactors);
  };
  const bool same_type = SimpleOutput || p.o.dtype == p.q.dtype;
  const int group = warp / 4;
  const LdmatrixLane at(lane);
  const uint32_t transposed = base + S::value(at.row(), warp * 2 + at.piece());  // the lane's stmatrix address in output buffer 0
  constexpr uint32_t kSixteenTokens = S::value(16, 0);
  const uint32_t descriptor = smem_descriptor(base);
  int stage = 0, previous = 0, left = static_cast<int>(work.range.length());  // left: tokens from this chunk on
  uint32_t parity = 0;
  const auto start_next_reads = [&] { start_state_reads<Half, KP>(u, s, descriptor + ((stage * S::kBytes + S::kK) >> 4)); };
  mbarrier_wait(barriers.full_of(0), 0);
  round_and_decay<Half, KP>(state, factors_of(0)[2 * kChunk], s);
  pin(state);
  start_next_reads();
  for (int c = 0; uniform(c < chunks); ++c) {
    const uint32_t offset = static_cast<uint32_t>(stage * S::kBytes), tile = descriptor + (offset >> 4);
    LaneOperands<> operands;
    operands.load<KP, VT>(base + offset, factors_of(offset), warp, lane);
    float out[8][4];
    start_state_reads<Half, KP>(out, s, tile + (S::kQ >> 4));
    wgmma_wait<0>();  // S k and S q. The compiler accepts no weaker wait for products started in the previous iteration
    pin(u);
    FragmentA w[4];
    compute_corrections<Half>(operands, u, w);
    if (uniform(left < kChunk)) mask_tokens(w, left, opaque_int(lane));
    left -= kChunk;
    float2 reads[8];
    load_factors(factors_of(offset) + kChunk, lane, reads);
    start_updates<Half>(state, w, tile + (PreparedChunk<KP>::kM >> 4));
    wgmma_wait<1>();  // S q is complete; the wait keeps its scaling behind the start of the state update
    pin(out);
    scale_outputs(reads, out);
    pin(out);
    start_updates<Half>(out, w, tile + (PreparedChunk<KP>::kR >> 4));
    release_stage<1, Pair>(keys_free + stage * 8, lane);
    if (c > 0) {  // long after the stores to shared memory, since the fence waits for those in flight
      fence_proxy_async();
      store_barrier_arrive(store_barrier(previous, group));
    }
    previous = stage;
    parity ^= stage == kStages - 1;
    stage = stage == kStages - 1 ? 0 : stage + 1;
    const bool more = uniform(c + 1 < chunks);
    if (more) mbarrier_wait(barriers.full_of(stage), parity);
    const float decay = more ? factors_of(static_cast<uint32_t>(stage * S::kBytes))[2 * kChunk] : 1.0f;
    wgmma_wait<1>();  // the state
    pin(state);
    if constexpr (!SimpleOutput) store_checkpoint<KP>(p, work, c, opaque_int(first_row), opaque_int(lane), state);
    round_state<Half, KP>(state, s);
    start_next_reads();  // after the last chunk on stale data; the result is not used
    decay_state<KP>(state, decay);
    pin(state);
    wgmma_wait<1>();  // the outputs
    pin(out);
    if (same_type) {
      const uint32_t to = transposed + (more ? output_offset<KP, Groups>(previous) : offset + S::kV);
#pragma unroll
      for (int pair = 0; pair < 4; ++pair)
        stmatrix_trans(to + pair * kSixteenTokens, operand<Half>(out[2 * pair], out[2 * pair + 1]).x);
    }
    if (!SimpleOutput && !same_type) store_unrounded(p, work, c, out, opaque_int(first_row), opaque_int(lane));
    if (kSeparateOutputs<Groups>) release_stage<kFactorLanes, Pair>(barriers.empty_of(previous), lane);
  }
  wgmma_wait<0>();
  pin(u);
  if (same_type) {
    __syncwarp();
    store_last_outputs(p, work, shared + previous * S::kBytes + S::kV + group * kPanel, warp, lane);
  }
  store_end_state<KP>(p, work, slots, first_row, lane, state);
}

#endif  // WEFT_HAS_WGMMA

template <class Half, int KP, int Groups, bool SimpleOutput, bool Pair = false>
__global__ void __launch_bounds__(Groups * 128 + kProducerThreads<Groups>, 1)
    scan_wgmma_kernel(const __grid_constant__ Prefill p, const __grid_constant__ TokenTensorMaps maps) {
#if WEFT_HAS_WGMMA
  extern __shared__ __align__(1024) unsigned char raw[];
  __shared__ alignas(8) uint64_t counters[3 * kStages];
  StateSlots slots;
  WorkTile work;
  // Sequences and states were complete before prepare began, and no other kernel writes them, so find_work needs no pdl_wait. Both
  // blocks of a pair get the same answer.
  if (!find_work<Groups * kRows>(p, slots, work)) {
    pdl_wait();  // a kernel that waits for this one relies on the kernels before it, too
    return;
  }
  unsigned char* shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
  const StageBarriers barriers{opaque(shared_address(counters)), opaque(shared_address(counters + kStages))};
  const uint32_t keys_free = opaque(shared_address(counters + 2 * kStages));
  if (threadIdx.x == 0) {
    constexpr int kReaders = Groups * 4 * (Pair ? 2 : 1);  // warps
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(barriers.full_of(i), 1);
      mbarrier_init(keys_free + i * 8, kReaders);
      // With separate outputs: the consumer warps and the store warp. Otherwise the store warps alone.
      mbarrier_init(barriers.empty_of(i), kSeparateOutputs<Groups> ? kReaders * kFactorLanes + 1 : Groups);
    }
    fence_proxy_async();
  }
  if constexpr (Pair)
    cluster_sync<true>();
  else
    __syncthreads();
  const uint32_t base = shared_address(shared);
  if (threadIdx.x >= Groups * 128) {
    if constexpr (Groups == 2) setmaxnreg_dec<40>();
    const int warp = threadIdx.x / 32 - Groups * 4;
    pdl_wait();
    if (p.ranges.end < p.ranges.count) pdl_launch_dependents();  // summarize_kernel, which relies on this wait
    if (threadIdx.x == Groups * 128) load_chunks<KP, Groups, Pair>(p, maps, work, base, barriers, keys_free);
    if (warp >= 1 && warp <= Groups)
      store_outputs<kSeparateOutputs<Groups>>(p, maps, work, warp - 1, barriers,
                                              [=](int stage) { return base + output_offset<KP, Groups>(stage); });
  } else {
    if constexpr (Groups == 2) setmaxnreg_inc<232>();
    consume<Half, KP, Groups, SimpleOutput, Pair>(p, work, slots, shared, base, barriers, keys_free);
  }
  if constexpr (Pair) cluster_sync<true>();  // the other block may still arrive at barriers of this one
#endif
}

template <class Half, int KP>
void launch_typed(const Stream& stream, const Prefill& p, const ScanPlan& plan) {
  TokenTensorMaps maps{};
  if (p.T > 0)
    maps = {token_tensor_map(p.q, p.T, p.Hk, p.K), token_tensor_map(p.k, p.T, p.Hk, p.K), token_tensor_map(p.v, p.T, p.Hv, p.V),
            CUtensorMap{}};
  if (p.T > 0 && p.o.dtype == p.q.dtype) maps.o = token_tensor_map(p.o, p.T, p.Hv, p.V);
  // Without tokens prepare was not launched, so the kernel before this one is not of this call: no PDL.
  const auto run = [&](auto kernel, int threads) {
    enqueue(kOp, stream,
            {.blocks = plan.blocks, .threads = threads, .shared = plan.shared, .cluster = plan.cluster, .pdl = p.T > 0}, kernel, p,
            maps);
  };
  if constexpr (KP == 128)
    if (plan.cluster == 2) return run(scan_wgmma_kernel<Half, KP, 1, true, true>, 128 + kProducerThreads<1>);
  if (plan.rows == kRows)
    return run(simple_output(p) ? scan_wgmma_kernel<Half, KP, 1, true> : scan_wgmma_kernel<Half, KP, 1, false>,
               128 + kProducerThreads<1>);
  run(simple_output(p) ? scan_wgmma_kernel<Half, KP, 2, true> : scan_wgmma_kernel<Half, KP, 2, false>, 256 + kProducerThreads<2>);
}

}  // namespace

CUtensorMap token_tensor_map(const StridedView& rows, int64_t T, int64_t heads, int64_t D, int tokens) {
  // The stride of a dimension with one element has no meaning, but TMA requires a legal one.
  const auto bytes = [](int64_t size, int64_t stride) { return static_cast<cuuint64_t>(size > 1 ? stride * 2 : 16); };
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(D), static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(T)},
                   strides[2] = {bytes(heads, rows.strides[1]), bytes(T, rows.strides[0])};
  const cuuint32_t box[3] = {64, 1, static_cast<cuuint32_t>(tokens)}, steps[3] = {1, 1, 1};
  CUtensorMap map{};
  const CUresult result =
      tensor_map_encoder()(&map, rows.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3,
                           rows.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw Error(fail(Code::device_error, kOp, "q, k, v",
                     "have no TMA tensor map, driver error " + std::to_string(static_cast<int>(result))));
  return map;
}

// TMA coordinates have 32 bits.
bool can_use_wgmma(const Stream& stream, const Prefill& p) {
  if (facts_of(stream).major != 9) return false;
  static const bool built =
      compiled_for_hopper(reinterpret_cast<const void*>(scan_wgmma_kernel<__nv_bfloat16, 128, 1, true>), stream.device);
  return built && p.V > 16 && p.T <= INT32_MAX && tensor_map_encoder();
}

// A block has 64 state rows while every block gets a multiprocessor, else 128. Blocks form pairs from two thirds of the
// multiprocessors on: with so many blocks the saved L2 reads are worth more than the wait of a pair's blocks for each other. At
// half of the multiprocessors both are equal, and scans of ranges only lose. Pairs are compiled for keys of more than 64 channels.
ScanPlan scan_plan_wgmma(const Stream& stream, const Prefill& p) {
  ScanPlan plan;
  plan.kernel = "wgmma";
  const int multiprocessors = facts_of(stream).multiprocessors;
  plan.rows = p.V <= kRows || ceil_div(p.V, kRows) * p.Hv * p.N <= multiprocessors ? kRows : 2 * kRows;
  plan.ranges = p.ranges.count;
  plan.blocks = ceil_div(p.V, plan.rows) * p.Hv * p.N * (p.ranges.end - p.ranges.begin);
  if (plan.rows == kRows && p.V == 2 * kRows && p.K > 64 && simple_output(p) && p.ranges.count == 1 &&
      3 * plan.blocks >= 2 * multiprocessors)
    plan.cluster = 2;
  plan.stages = kStages;
  plan.shared =
      dispatch_types(p, [&]<class Half, int KP>() { return plan.rows == kRows ? kSharedBytes<KP, 1> : kSharedBytes<KP, 2>; });
  return plan;
}

void launch_scan_wgmma(const Stream& stream, const Prefill& p) {
  dispatch_types(p, [&]<class Half, int KP>() { launch_typed<Half, KP>(stream, p, scan_plan_wgmma(stream, p)); });
}

}  // namespace weft::cuda
