// The sequential part of the tensor-core prefill by Hopper's warpgroup products: see prefill.cuh.
//
// A warpgroup owns 64 rows of the state, in accumulators. Every product has rows of V as its rows and takes its left operand from
// registers, so that results become operands where they lie; keys, queries, M and R are right operands in shared memory. Per chunk the
// tensor cores work on  S k | S q | S += W M | o += R W,  and W, decays, rounding and stores happen while one of them runs. The other
// warps copy the chunks to come.
//
// Two blocks for the halves of a head's rows read the same unit, keys and queries. As a pair, a cluster of two, each copies a half of them
// to both: a stage is full when both halves and the block's own v are there, and free for either half when both blocks are done with it.
#include "cuda/common/cluster.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/delta/prefill_scan_wgmma.cuh"

namespace weft::cuda {
namespace {

constexpr const char* kOp = "gated_delta_rule_prefill";
constexpr int kRows = 64, kStages = kOutputStages;

// Threads of the warps that copy: one for what comes, one for every warpgroup's outputs. Where warpgroups share registers unevenly, they
// take a whole one.
template <int Groups>
constexpr int kCopyThreads = Groups == 2 ? 128 : 64;

// Do outputs on their way out lie aside of the stages? Otherwise where the chunk's v lay, which nobody reads any more.
template <int Groups>
constexpr bool kOutputsAside = Groups == 1;

template <int KP, int Groups>
constexpr size_t kSharedBytes = kStages* Stage<KP, Groups * kRows>::kBytes + (kOutputsAside<Groups> ? kStages * kPanel : 0) + 1024;

#if WEFT_HAS_WGMMA

// By one thread. Rows beyond a sequence are those of the next one; what comes of them is set aside later.
// Pair: bytes of the other block's half may be counted here before this thread says how many to expect, but never while the chunk before
// in that stage is expected: the other block waits for arrivals from here as well. The barrier for v and units also counts the warp that
// stores this block's outputs; that of the other one has no part in it.
template <int KP, int Groups, bool Pair>
__device__ void copy_all(const Prefill& p, const TokenMaps& maps, const Lane& at, uint32_t base, const StageBarriers& barriers,
                         uint32_t keys_free) {
  using S = Stage<KP, Groups * kRows>;
  static_assert(!Pair || (KP == 128 && Groups == 1), "a panel of keys for either block");
  const int half = at.first_v / kRows;  // which block of a pair
  int slot = 0;
  uint32_t parity = 1;  // the first round finds every stage free
  for (int64_t c = 0; c < at.chunks; ++c) {
    const uint32_t stage = base + static_cast<uint32_t>(slot * S::kBytes), full = barriers.full_of(slot);
    mbarrier_wait(keys_free + slot * 8, parity);  // keys and queries are done with before the rest
    mbarrier_arrive_expect_tx(full, Unit<KP>::kBytes + (2 * KP / 64 + Groups) * kPanel);
    const int token = static_cast<int>(at.range.begin + c * kChunk), hk = static_cast<int>(at.hk), hv = static_cast<int>(at.hv);
    if constexpr (Pair) {
      tma_load_multicast(stage + S::kK + half * kPanel, maps.k, half * 64, hk, token, full);
      tma_load_multicast(stage + S::kQ + half * kPanel, maps.q, half * 64, hk, token, full);
    } else {
#pragma unroll
      for (int panel = 0; panel < KP / 64; ++panel) tma_load(stage + S::kK + panel * kPanel, maps.k, panel * 64, hk, token, full);
#pragma unroll
      for (int panel = 0; panel < KP / 64; ++panel) tma_load(stage + S::kQ + panel * kPanel, maps.q, panel * 64, hk, token, full);
    }
    mbarrier_wait(barriers.empty_of(slot), parity);
#pragma unroll
    for (int panel = 0; panel < Groups; ++panel)
      tma_load(stage + S::kV + panel * kPanel, maps.v, at.first_v + panel * 64, hv, token, full);
    if constexpr (Pair) {
      constexpr int kHalf = Unit<KP>::kBytes / 2;
      tma_load_bulk_multicast(stage + half * kHalf, unit_of<KP>(p, at, c) + half * kHalf, kHalf, full);
    } else {
      tma_load_bulk(stage, unit_of<KP>(p, at, c), Unit<KP>::kBytes, full);
    }
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
}

// Where the outputs of the chunk in a stage are turned, from the first stage on.
template <int KP, int Groups>
__device__ uint32_t turned_at(int stage) {
  using S = Stage<KP, Groups * kRows>;
  return kOutputsAside<Groups> ? static_cast<uint32_t>(kStages * S::kBytes + stage * kPanel)
                               : static_cast<uint32_t>(stage * S::kBytes + S::kV);
}

// The chunks of a lane. S k of the next one starts as soon as its state is rounded, before the chunk's outputs are there: they are
// rounded and turned while it runs. Copies are waited for as late as that, since chunks arrive just in time.
// Plain: outputs have the inputs' dtype, and there are no checkpoints.
template <class Half, int KP, int Groups, bool Plain, bool Pair>
__device__ void walk(const Prefill& p, const Lane& at, const StateSlots& slots, unsigned char* shared, uint32_t base,
                     const StageBarriers& barriers, uint32_t keys_free) {
  constexpr int VT = Groups * kRows;
  using S = Stage<KP, VT>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = at.first_v + warp * 16;
  const int chunks = static_cast<int>(at.chunks);
  float state[KP / 8][4] = {}, u[8][4];
  FragmentA s[KP / 16];
  if (!at.start && slots.in >= 0) load_state<KP>(p, at, slots.in, first_row, lane, state);
  pdl_wait();
  if (p.ranges.end < p.ranges.count) pdl_launch_dependents();
  if (at.start) load_rows_of<KP>(at.start, first_row, lane, static_cast<int>(p.K), static_cast<int>(p.V), state);
  const Tensor& final = p.args.states.out;
  const auto finish = [&] {
    if (at.next) store_rows_to<KP>(at.next, first_row, lane, static_cast<int>(p.K), static_cast<int>(p.V), state);
    if (slots.out >= 0 && at.last)
      store_state<KP>(p, final, slots.out * final.strides[0] + at.hv * final.strides[1], first_row, lane, state);
  };
  if (chunks == 0) return finish();
  const auto factors_of = [&](uint32_t offset) { return reinterpret_cast<const float*>(shared + offset + Unit<KP>::kFactors); };
  // Outputs of a chunk are turned from rows of V to tokens in shared memory, from where another warp stores them; those of the last
  // chunk, which may be short, leave in pieces of 16 bytes.
  const bool same_type = Plain || p.args.o.dtype == p.args.q.dtype;
  const int group = warp / 4;
  const LdmatrixLane place(lane);
  const uint32_t turn_to = base + S::value(place.row(), warp * 2 + place.piece());
  constexpr uint32_t kSixteen = S::value(16, 0);  // sixteen tokens further
  // A vote, so that the compiler knows that all lanes agree; and a value anew, so that what is made of it takes no registers before.
  const auto any = [](bool x) { return __any_sync(0xffffffffu, x); };
  const auto afresh = [](int x) { return static_cast<int>(kept(static_cast<uint32_t>(x))); };
  const uint32_t descriptor = smem_descriptor(base);
  int slot = 0, before = 0, left = static_cast<int>(at.range.length());  // tokens from this chunk on
  uint32_t parity = 0;
  const auto start = [&] { start_reads<Half, KP>(u, s, descriptor + ((slot * S::kBytes + S::kK) >> 4)); };
  mbarrier_wait(barriers.full_of(0), 0);
  round_and_decay<Half, KP>(state, factors_of(0)[2 * kChunk], s);
  pin(state);
  start();
  for (int c = 0; any(c < chunks); ++c) {
    const uint32_t offset = static_cast<uint32_t>(slot * S::kBytes), tile = descriptor + (offset >> 4);
    LaneOperands<> given;
    given.load<KP, VT>(base + offset, factors_of(offset), warp, lane);
    float out[8][4];
    start_reads<Half, KP>(out, s, tile + (S::kQ >> 4));
    wgmma_wait<0>();  // S k and S q: of products that began a turn before, compilers know no other end
    pin(u);
    FragmentA w[4];
    corrections<Half>(given, u, w);
    if (any(left < kChunk)) keep_tokens(w, left, afresh(lane));
    left -= kChunk;
    float2 reads[8];
    load_factors(factors_of(offset) + kChunk, lane, reads);
    start_writes<Half>(state, w, tile + (Unit<KP>::kM >> 4));
    wgmma_wait<1>();  // S q is there; this keeps its scaling behind the start of what the next state waits for
    pin(out);
    scale_outputs(reads, out);
    pin(out);
    start_writes<Half>(out, w, tile + (Unit<KP>::kR >> 4));
    leave_stage<1, Pair>(keys_free + slot * 8, lane);
    if (c > 0) {  // some time after they were turned, since a fence waits for whatever is on its way
      fence_proxy_async();
      arrive_at(store_barrier(before, group));
    }
    before = slot;
    parity ^= slot == kStages - 1;
    slot = slot == kStages - 1 ? 0 : slot + 1;
    const bool more = any(c + 1 < chunks);
    if (more) mbarrier_wait(barriers.full_of(slot), parity);
    const float decay = more ? factors_of(static_cast<uint32_t>(slot * S::kBytes))[2 * kChunk] : 1.0f;
    wgmma_wait<1>();  // the state
    pin(state);
    if constexpr (!Plain) store_checkpoint<KP>(p, at, c, afresh(first_row), afresh(lane), state);
    round_state<Half, KP>(state, s);
    start();  // after the last chunk with whatever lies there, for nothing
    decay_state<KP>(state, decay);
    pin(state);
    wgmma_wait<1>();  // the outputs
    pin(out);
    if (same_type) {
      const uint32_t to = turn_to + (more ? turned_at<KP, Groups>(before) : offset + S::kV);
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) stmatrix_trans(to + pair * kSixteen, operand<Half>(out[2 * pair], out[2 * pair + 1]).x);
    }
    if (!Plain && !same_type) store_unrounded(p, at, c, out, afresh(first_row), afresh(lane));
    if (kOutputsAside<Groups>) leave_stage<kFactorLanes, Pair>(barriers.empty_of(before), lane);
  }
  wgmma_wait<0>();
  pin(u);
  if (same_type) {
    __syncwarp();
    store_last(p, at, shared + before * S::kBytes + S::kV + group * kPanel, warp, lane);
  }
  finish();
}

#endif  // WEFT_HAS_WGMMA

template <class Half, int KP, int Groups, bool Plain, bool Pair = false>
__global__ void __launch_bounds__(Groups * 128 + kCopyThreads<Groups>, 1)
    wgmma_kernel(const __grid_constant__ Prefill p, const __grid_constant__ TokenMaps maps) {
#if WEFT_HAS_WGMMA
  extern __shared__ __align__(1024) unsigned char raw[];
  __shared__ alignas(8) uint64_t counters[3 * kStages];
  StateSlots slots;
  Lane at;
  // Sequences and states were there before prepare began, and nobody else writes them. Both blocks of a pair find the same of theirs.
  if (!find_lane<Groups * kRows>(p, slots, at)) {
    pdl_wait();  // whoever waits for this one relies on those before, too
    return;
  }
  unsigned char* shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
  const StageBarriers barriers{kept(shared_address(counters)), kept(shared_address(counters + kStages))};
  const uint32_t keys_free = kept(shared_address(counters + 2 * kStages));
  if (threadIdx.x == 0) {
    constexpr int kReaders = Groups * 4 * (Pair ? 2 : 1);  // warps
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(barriers.full_of(i), 1);
      mbarrier_init(keys_free + i * 8, kReaders);
      // The warps that are done with it, and with its outputs; or only these.
      mbarrier_init(barriers.empty_of(i), kOutputsAside<Groups> ? kReaders * kFactorLanes + 1 : Groups);
    }
    fence_proxy_async();
  }
  if constexpr (Pair)
    cluster_sync<true>();
  else
    __syncthreads();
  const uint32_t base = shared_address(shared);
  // Three warpgroups share the registers unevenly.
  if (threadIdx.x >= Groups * 128) {
    if constexpr (Groups == 2) setmaxnreg_dec<40>();
    const int warp = threadIdx.x / 32 - Groups * 4;
    pdl_wait();
    if (p.ranges.end < p.ranges.count) pdl_launch_dependents();  // summaries, which rely on this wait
    if (threadIdx.x == Groups * 128) copy_all<KP, Groups, Pair>(p, maps, at, base, barriers, keys_free);
    if (warp >= 1 && warp <= Groups)
      store_all<kOutputsAside<Groups>>(p, maps, at, warp - 1, barriers,
                                       [=](int slot) { return base + turned_at<KP, Groups>(slot); });
  } else {
    if constexpr (Groups == 2) setmaxnreg_inc<232>();
    walk<Half, KP, Groups, Plain, Pair>(p, at, slots, shared, base, barriers, keys_free);
  }
  if constexpr (Pair) cluster_sync<true>();  // the other block may still arrive at barriers of this one
#endif
}

// The driver's function that writes maps; null when there is none.
using Encode = decltype(&cuTensorMapEncodeTiled);
Encode encoder() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const auto error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    if (error != cudaSuccess) cudaGetLastError();
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  return found;
}

template <class Half, int KP>
void launch_typed(const Stream& stream, const Prefill& p, const PassPlan& plan) {
  TokenMaps maps{};
  if (p.T > 0) maps = {token_map(p.args.q), token_map(p.args.k), token_map(p.args.v), CUtensorMap{}};
  if (p.T > 0 && p.args.o.dtype == p.args.q.dtype) maps.o = token_map(p.args.o);
  // Without tokens nothing was prepared, and what came before the call may still run.
  const auto run = [&](auto kernel, int threads) {
    enqueue(kOp, stream,
            {.blocks = plan.blocks, .threads = threads, .shared = plan.shared, .cluster = plan.cluster, .pdl = p.T > 0}, kernel, p,
            maps);
  };
  if constexpr (KP == 128)
    if (plan.cluster == 2) return run(wgmma_kernel<Half, KP, 1, true, true>, 128 + kCopyThreads<1>);
  if (plan.rows == kRows)
    return run(plain(p) ? wgmma_kernel<Half, KP, 1, true> : wgmma_kernel<Half, KP, 1, false>, 128 + kCopyThreads<1>);
  run(plain(p) ? wgmma_kernel<Half, KP, 2, true> : wgmma_kernel<Half, KP, 2, false>, 256 + kCopyThreads<2>);
}

}  // namespace

CUtensorMap token_map(const Tensor& t, int tokens) {
  const auto size = [&](int d) { return static_cast<cuuint64_t>(t.size(d)); };
  // Strides of dimensions with one element mean nothing, but must be legal.
  const auto stride = [&](int d) { return static_cast<cuuint64_t>(t.size(d) > 1 ? t.strides[static_cast<size_t>(d)] * 2 : 16); };
  const cuuint64_t sizes[3] = {size(2), size(1), size(0)}, strides[2] = {stride(1), stride(0)};
  const cuuint32_t box[3] = {64, 1, static_cast<cuuint32_t>(tokens)}, steps[3] = {1, 1, 1};
  CUtensorMap map{};
  const CUresult result =
      encoder()(&map, t.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, t.data, sizes,
                strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw Error(fail(Code::device_error, kOp, "q, k, v",
                     "cannot be mapped for the copy engine, driver error " + std::to_string(static_cast<int>(result))));
  return map;
}

// The copy engine counts tokens in 32 bits.
bool takes_wgmma(const Stream& stream, const Prefill& p) {
  if (facts_of(stream).major != 9) return false;
  static const bool built = compiled_for_hopper(reinterpret_cast<const void*>(wgmma_kernel<__nv_bfloat16, 128, 1, true>));
  return built && p.V > 16 && p.T <= INT32_MAX && encoder();
}

// 64 rows per block while there are multiprocessors for them, then 128. Blocks are pairs from two thirds of the multiprocessors on: so many
// ask the L2 for chunks that it pays to ask once for two, although these then wait for each other. With half of them both are worth the
// same, and passes through ranges only lose. Pairs are compiled for keys of more than 64 channels.
PassPlan wgmma_plan(const Stream& stream, const Prefill& p) {
  PassPlan plan;
  plan.kernel = "wgmma";
  const int multiprocessors = facts_of(stream).multiprocessors;
  plan.rows = p.V <= kRows || ceil_div(p.V, kRows) * p.Hv * p.N <= multiprocessors ? kRows : 2 * kRows;
  plan.ranges = p.ranges.count;
  plan.blocks = ceil_div(p.V, plan.rows) * p.Hv * p.N * (p.ranges.end - p.ranges.begin);
  if (plan.rows == kRows && p.V == 2 * kRows && p.K > 64 && plain(p) && p.ranges.count == 1 &&
      3 * plan.blocks >= 2 * multiprocessors)
    plan.cluster = 2;
  plan.stages = kStages;
  plan.shared = for_types(p, [&]<class Half, int KP>() { return plan.rows == kRows ? kSharedBytes<KP, 1> : kSharedBytes<KP, 2>; });
  return plan;
}

void launch_wgmma_pass(const Stream& stream, const Prefill& p) {
  for_types(p, [&]<class Half, int KP>() { launch_typed<Half, KP>(stream, p, wgmma_plan(stream, p)); });
}

}  // namespace weft::cuda
