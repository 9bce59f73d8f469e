// The fused prefill kernel: prepare and state scan in one kernel without scratch, for calls with many heads.
//
// A block has one sequence and value head. The math is that of prefill.cuh with C = 32, for the two subchunks of a chunk.
//
//   warpgroups    role (file)                                 produces                                  for
//   2 producers   prefill_fused_producer.cuh                  loads of k and q; M, R and factors        consumers
//                 (every other chunk of 64 tokens each)
//   2 consumers   this file (64 state rows each)              loads of v; outputs and the final state   device memory
//
//   mbarriers             full                                        empty
//   keys (KeyStage)       the TMA loads of k and q have landed        both consumers have computed S k and S q
//   prepared              all warps of a producer have written it     both consumers have read it
//   values (ValueStage)   the TMA load of v has landed                none: the TMA store of outputs has read the stage
//
//   named barriers   1 .. 2  all warps of a producer (warpgroup_sync)
//                    3 .. 4  the two warps of a producer that invert
//                    5 .. 8  the warps of a consumer, when outputs are in shared memory
//
// As in prefill_scan_wgmma.cu, state rows stay in accumulators and every product takes its A operand from registers. Per subchunk
// the tensor cores run  S (k, q) | S += W M | o += R W  for the consumers.
#include "cuda/common/pdl.cuh"
#include "cuda/delta/prefill_fused_producer.cuh"

namespace weft::cuda {
namespace fused {
namespace {

constexpr const char* kOp = "gated_delta_rule_prefill";
constexpr int kThreads = (kConsumers + kProducers) * 128;

#if WEFT_HAS_WGMMA

// Named barrier of a consumer's warps: one of them syncs, the others arrive.
__device__ inline void outputs_barrier(int index, bool syncs) {
  constexpr int kFirst = 2 * kProducers + 1;
  if (syncs)
    asm volatile("bar.sync %0, 128;" ::"r"(kFirst + index) : "memory");
  else
    asm volatile("bar.arrive %0, 128;" ::"r"(kFirst + index) : "memory");
}

// The value stages of a consumer: TMA loads v of its 64 state rows into them and stores outputs from them. A warp has 16 columns.
struct ValuePipeline {
  const TensorMaps& maps;
  const WorkTile& work;
  int warp, lane, group, subchunks;
  bool leads;               // the thread that starts TMA loads and stores
  uint32_t stages, full;    // first stage, and its mbarrier
  uint32_t matrix_address;  // the lane's address in the first stage for ldmatrix and stmatrix

  __device__ __forceinline__ ValuePipeline(const TensorMaps& maps, const WorkTile& work, uint32_t base, uint32_t values, int warp,
                                           int lane)
      : maps(maps),
        work(work),
        warp(warp),
        lane(lane),
        group(warp / 4),
        subchunks(static_cast<int>((work.range.length() + kSubchunk - 1) / kSubchunk)),
        leads(warp % 4 == 0 && lane == 0),
        stages(base + kValues + group * (ValueStage::kCount * ValueStage::kBytes)),
        full(values + group * (ValueStage::kCount * 8)) {
    const LdmatrixLane at(lane);
    matrix_address = stages + Tile64::offset(at.row(), warp % 4 * 2 + at.piece());
  }

  __device__ __forceinline__ uint32_t offset(int sub) const { return sub % ValueStage::kCount * ValueStage::kBytes; }
  __device__ __forceinline__ int token(int sub) const { return static_cast<int>(work.range.begin) + sub * kSubchunk; }

  __device__ __forceinline__ void load(int sub) const {
    const int stage = sub % ValueStage::kCount;
    if (!leads || sub >= subchunks) return;
    mbarrier_arrive_expect_tx(full + stage * 8, ValueStage::kBytes);
    tma_load(stages + stage * ValueStage::kBytes, maps.v, group * 64, static_cast<int>(work.hv), token(sub), full + stage * 8);
  }
  // The lane's v, transposed to rows of V.
  __device__ __forceinline__ void read(int sub, uint32_t (&v)[kSubchunk / 16][4]) const {
    mbarrier_wait(full + sub % ValueStage::kCount * 8, sub / ValueStage::kCount % 2);
#pragma unroll
    for (int pair = 0; pair < kSubchunk / 16; ++pair) ldmatrix_trans(v[pair], matrix_address + offset(sub) + pair * (16 * 128));
  }
  // Rounded outputs, transposed to rows of tokens.
  __device__ __forceinline__ void write_outputs(int sub, const FragmentA (&rounded)[kSubchunk / 16]) const {
#pragma unroll
    for (int pair = 0; pair < kSubchunk / 16; ++pair)
      stmatrix_trans(matrix_address + offset(sub) + pair * (16 * 128), rounded[pair].x);
  }
  // Starts the TMA store of a subchunk's outputs when all warps of the consumer have written them. Two named barriers alternate,
  // since a warp may come here before others have passed the previous subchunk. All warps have passed a barrier before a warp comes
  // to it again: that warp waits for values, and the first warp loads these after its sync.
  __device__ __forceinline__ void store_outputs(int sub) const {
    fence_proxy_async();
    outputs_barrier((sub + 1) % 2 * kConsumers + group, warp % 4 == 0);
    if (leads) tma_store(maps.o, group * 64, static_cast<int>(work.hv), token(sub), stages + offset(sub));
  }
  // Stores the outputs of the last subchunk, which has `count` tokens; a warp stores what it has written.
  __device__ __forceinline__ void store_last_outputs(const StridedView& o, int sub, int count) const {
    const uint32_t from = stages + offset(sub);
    __syncwarp();
    for (int token = lane % 16; token < count; token += 16)
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(o.data) + (work.range.begin + sub * kSubchunk + token) * o.strides[0] +
                                work.hv * o.strides[1] + warp * 16 + lane / 16 * 8) =
          load_shared(from + Tile64::offset(token, warp % 4 * 2 + lane / 16));
  }
};

// Outputs before R W is added: o = c (S q). `read` holds S k, then S q.
__device__ __forceinline__ void scale_state_reads(const float* factors, int lane, const float (&read)[2 * kSubchunk / 8][4],
                                                  float (&out)[kSubchunk / 8][4]) {
  float2 scales[kSubchunk / 8];
  load_factors(factors, lane, scales);
#pragma unroll
  for (int n = 0; n < kSubchunk / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) out[n][e] = read[kSubchunk / 8 + n][e] * (e % 2 ? scales[n].y : scales[n].x);
}

// Scans all subchunks of the block's sequence; by the consumers, of which a warp has 16 state rows. The outputs of a subchunk are
// stored while the products of the next one run.
template <class Half>
__device__ void consume(const Prefill& p, const TensorMaps& maps, const WorkTile& work, const StateSlots& slots,
                        unsigned char* shared, uint32_t base, const Barriers& barriers) {
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = static_cast<int>(opaque(threadIdx.x % 32)),
            first_row = warp * 16;
  float state[K / 8][4] = {}, read[2 * kSubchunk / 8][4], out[kSubchunk / 8][4];  // read: S k and S q
  FragmentA s[K / 16], rounded[kSubchunk / 16];                                   // the rounded state, and rounded outputs
  if (slots.in >= 0) load_state<K>(p, work, slots.in, first_row, lane, state);
  const ValuePipeline values(maps, work, base, barriers.values, warp, lane);
  const uint32_t descriptor = smem_descriptor(base);
  PipelineState<KeyStage> keys;
  PipelineState<PreparedStage> prepared;
  int left = static_cast<int>(work.range.length());  // tokens from this subchunk on
  values.load(0);
  values.load(1);
  round_state<Half, K>(state, s);
  // Not unrolled: the code has to fit into the instruction cache beside the producers'.
#pragma unroll 1
  for (int i = 0; i < values.subchunks; ++i, left -= kSubchunk) {
    const int sub = i % kSubchunks;  // in its chunk
    const bool ends_chunk = sub == kSubchunks - 1;
    const uint32_t key_tile = descriptor + (keys.offset() >> 4),
                   prepared_tile = descriptor + ((kPreparedStages + prepared.offset()) >> 4);
    const float* factors = reinterpret_cast<const float*>(shared + kPreparedStages + prepared.offset() + PreparedStage::kFactors);
    if (sub == 0) mbarrier_wait(barriers.prepared.full_of(prepared.index), prepared.parity);
    mbarrier_wait(barriers.keys.full_of(keys.index), keys.parity);
    start_state_reads<Half, K>(read, s, key_tile);
    // The next v replaces the outputs of subchunk i - 2, when their TMA store has read them.
    if (i > 0) {
      if (values.leads) tma_store_wait_read();
      values.load(i + 1);
      __syncwarp();
    }
    decay_state<K>(state, factors[2 * kChunk + sub]);
    pin(state);
    if (i > 0) values.write_outputs(i - 1, rounded);
    LaneOperands<kSubchunk> operands;
    values.read(i, operands.v);
    wgmma_wait<0>();  // S k and S q
    pin(read);
    release_stage<1>(barriers.keys.empty_of(keys.index), lane);
    keys.advance();
    load_factors(factors + sub * kSubchunk, lane, operands.a);  // loaded this late for lack of registers
    FragmentA w[kSubchunk / 16];
    compute_corrections<Half>(operands, read, w);
    if (left < kSubchunk) mask_tokens(w, left, lane);
    start_updates<Half>(state, w, prepared_tile + (sub * kSubchunk * 2 >> 4));
    scale_state_reads(factors + kChunk + sub * kSubchunk, lane, read, out);
    pin(out);
    start_updates<Half>(out, w, prepared_tile + ((PreparedStage::kR + sub * kSubchunk * 2) >> 4));
    if (i > 0) values.store_outputs(i - 1);
    wgmma_wait<1>();  // the state
    pin(state);
    round_state<Half, K>(state, s);
    wgmma_wait<0>();  // the outputs
    pin(out);
#pragma unroll
    for (int pair = 0; pair < kSubchunk / 16; ++pair) rounded[pair] = operand<Half>(out[2 * pair], out[2 * pair + 1]);
    if (ends_chunk) {
      release_stage<kFactorLanes>(barriers.prepared.empty_of(prepared.index), lane);
      prepared.advance();
    }
  }
  if (values.subchunks > 0) {
    values.write_outputs(values.subchunks - 1, rounded);
    values.store_last_outputs(p.o, values.subchunks - 1, left + kSubchunk);
  }
  const StridedView& final = p.states.out;
  if (slots.out >= 0) store_state<K>(p, final, slots.out * final.strides[0] + work.hv * final.strides[1], first_row, lane, state);
  if (values.leads) tma_store_wait_read();  // shared memory ends with the block
}

#endif  // WEFT_HAS_WGMMA

template <class Half>
__global__ void __launch_bounds__(kThreads, 1)
    fused_kernel(const __grid_constant__ Prefill p, const __grid_constant__ TensorMaps maps) {
#if WEFT_HAS_WGMMA
  extern __shared__ __align__(1024) unsigned char raw[];
  unsigned char* shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
  const uint32_t base = opaque(shared_address(shared));
  uint32_t next = opaque(base + kBarriers);
  const auto take = [&](int count) {
    const StageBarriers taken{next, next + count * 8};
    next += count * 16;
    return taken;
  };
  const Barriers barriers{take(KeyStage::kCount), take(PreparedStage::kCount), next};
  if (threadIdx.x == 0) {
    const auto init = [](const StageBarriers& of, int count, int full, int empty) {
      for (int i = 0; i < count; ++i) {
        mbarrier_init(of.full_of(i), full);
        mbarrier_init(of.empty_of(i), empty);
      }
    };
    init(barriers.keys, KeyStage::kCount, 1, kConsumers * 4);  // empty: every consumer warp
    // full: eight lanes of every warp of a producer
    init(barriers.prepared, PreparedStage::kCount, 4 * 8, kConsumers * 4 * kFactorLanes);
    for (int i = 0; i < kConsumers * ValueStage::kCount; ++i) mbarrier_init(barriers.values + i * 8, 1);
    fence_proxy_async();
  }
  __syncthreads();
  pdl_wait();
  pdl_launch_dependents();
  StateSlots slots;
  WorkTile work;
  if (!find_work<V>(p, slots, work)) return;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (group < kConsumers) {
    setmaxnreg_inc<160>();
    consume<Half>(p, maps, work, slots, shared, base, barriers);
  } else {
    setmaxnreg_dec<96>();
    produce<Half>(p, maps, work, shared, base, barriers, group - kConsumers, threadIdx.x % 128);
  }
#endif
}

}  // namespace
}  // namespace fused

// A block takes equally long alone and beside others, so the kernel pays when blocks of the longest sequences fill three quarters
// of the multiprocessors. The choice depends on the number of sequences, which Schedule::invariant forbids.
bool use_fused(const Stream& stream, const Prefill& p) {
  const int64_t longest = std::min(p.N, ceil_div(p.T, std::max<int64_t>(p.max_tokens, 1)));
  return p.K == fused::K && p.V == fused::V && p.T > 0 && simple_output(p) && p.schedule == Schedule::fastest &&
         4 * longest * p.Hv >= 3 * facts_of(stream).multiprocessors && can_use_wgmma(stream, p);
}

ScanPlan fused_plan(const Prefill& p) {
  ScanPlan plan;
  plan.kernel = "fused";
  plan.rows = fused::V;
  plan.stages = fused::KeyStage::kCount / fused::kSubchunks;
  plan.blocks = p.Hv * p.N;
  plan.shared = fused::kSharedBytes;
  return plan;
}

void launch_fused(const Stream& stream, const Prefill& p) {
  const ScanPlan plan = fused_plan(p);
  const fused::TensorMaps maps{
      token_tensor_map(p.q, p.T, p.Hk, p.K, fused::kSubchunk), token_tensor_map(p.k, p.T, p.Hk, p.K, fused::kSubchunk),
      token_tensor_map(p.v, p.T, p.Hv, p.V, fused::kSubchunk), token_tensor_map(p.o, p.T, p.Hv, p.V, fused::kSubchunk)};
  launch_pdl(fused::kOp, stream, plan.blocks, fused::kThreads, plan.shared,
             p.k.dtype == DType::bf16 ? fused::fused_kernel<__nv_bfloat16> : fused::fused_kernel<__half>, p, maps);
}

}  // namespace weft::cuda
