// The sequential part of the tensor-core prefill by Hopper's warpgroup products: see prefill.cuh.
//
// A warpgroup owns 64 rows of the state, in accumulators. Every product has rows of V as its rows and takes its left operand from
// registers, so that results become operands where they lie; keys, queries, M and R are right operands in shared memory. Per chunk the
// tensor cores work on  S k | S q | S += W M | o += R W,  and W, decays, rounding and stores happen while one of them runs. The other
// warps copy the chunks to come.
#include <cuda.h>

#include "cuda/prefill_pass.cuh"
#include "cuda/wgmma.cuh"

namespace weft::cuda {
namespace {

constexpr const char* kOp = "gated_delta_rule_prefill";
constexpr int kRows = 64, kStages = 3;

// Threads that copy: one works. Where warpgroups share registers unevenly, it takes a whole one.
template <int Groups>
constexpr int kCopyThreads = Groups == 2 ? 128 : 32;

// Tokens as boxes of 64 channels, one head and 64 tokens.
struct TokenMaps {
  CUtensorMap q, k, v, o;  // o only where it has the dtype of the others
};

template <int KP, int Groups>
constexpr size_t kSharedBytes = kStages* Stage<KP, Groups * kRows>::kBytes + 1024;

#if WEFT_HAS_WGMMA

// A value that the compiler keeps instead of deriving it again where it is used.
__device__ inline uint32_t kept(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

struct Barriers {
  uint32_t full, empty;  // of stage 0; the others follow
  __device__ uint32_t full_of(int slot) const { return full + slot * 8; }
  __device__ uint32_t empty_of(int slot) const { return empty + slot * 8; }
};

// By one thread. Rows beyond a sequence are those of the next one; what comes of them is set aside later.
template <int KP, int Groups>
__device__ void copy_all(const Prefill& p, const TokenMaps& maps, const Lane& at, uint32_t base, const Barriers& barriers) {
  using S = Stage<KP, Groups * kRows>;
  int slot = 0;
  uint32_t parity = 1;  // the first round finds every stage free
  for (int64_t c = 0; c < at.chunks; ++c) {
    const uint32_t stage = base + static_cast<uint32_t>(slot * S::kBytes), full = barriers.full_of(slot);
    barrier_wait(barriers.empty_of(slot), parity);
    barrier_arrive_expecting(full, Unit<KP>::kBytes + (2 * KP / 64 + Groups) * kPanel);
    const int token = static_cast<int>(at.range.begin + c * kChunk), hk = static_cast<int>(at.hk), hv = static_cast<int>(at.hv);
#pragma unroll
    for (int panel = 0; panel < KP / 64; ++panel) copy_tensor(stage + S::kK + panel * kPanel, maps.k, panel * 64, hk, token, full);
#pragma unroll
    for (int panel = 0; panel < Groups; ++panel)
      copy_tensor(stage + S::kV + panel * kPanel, maps.v, at.first_v + panel * 64, hv, token, full);
#pragma unroll
    for (int panel = 0; panel < KP / 64; ++panel) copy_tensor(stage + S::kQ + panel * kPanel, maps.q, panel * 64, hk, token, full);
    copy_bulk(stage, unit_of<KP>(p, at, c), Unit<KP>::kBytes, full);
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
}

// Plain: outputs have the inputs' dtype, and there are no checkpoints.
template <class Half, int KP, int Groups, bool Plain>
__device__ void walk(const Prefill& p, const TokenMaps& maps, const Lane& at, const StateSlots& slots, unsigned char* shared,
                     uint32_t base, const Barriers& barriers) {
  constexpr int VT = Groups * kRows;
  using S = Stage<KP, VT>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = at.first_v + warp * 16;
  const int chunks = static_cast<int>(at.chunks);
  float state[KP / 8][4] = {}, u[8][4], out[8][4] = {};
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
  if (chunks > 0) {
    barrier_wait(barriers.full_of(0), 0);
    round_and_decay(reinterpret_cast<const float*>(shared + Unit<KP>::kFactors)[2 * kChunk]);
  }
  // Outputs are turned from rows of V to tokens where the chunk's v lay, which nobody reads any more. From there the copy engine takes
  // them; those of the last chunk, which may be short, leave in pieces of 16 bytes.
  const Tensor& o = p.args.o;
  const bool same_type = Plain || o.dtype == p.args.q.dtype;
  const LanePlace place(lane);
  const uint32_t turn_to = S::kV + S::value(place.row(), warp * 2 + place.piece());
  constexpr uint32_t kSixteen = S::value(16, 0);  // sixteen tokens further
  const int group = threadIdx.x / 128;
  const bool leader = threadIdx.x % 128 == 0;
  const auto turn_outputs = [&](uint32_t offset) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const uint32_t x[4] = {pack<Half>(out[2 * pair][0], out[2 * pair][1]), pack<Half>(out[2 * pair][2], out[2 * pair][3]),
                             pack<Half>(out[2 * pair + 1][0], out[2 * pair + 1][1]),
                             pack<Half>(out[2 * pair + 1][2], out[2 * pair + 1][3])};
      store_matrices_transposed(base + offset + turn_to + pair * kSixteen, x);
    }
  };
  // Of outputs that were turned a while ago, since a fence waits for whatever is on its way.
  const auto start_stores = [&](int index, uint32_t offset) {
    if (same_type) fence_async();
    meet(group);  // also: nobody in the group reads the stage any more
    if (leader && same_type)
      store_tensor(maps.o, at.first_v + group * kRows, static_cast<int>(at.hv), static_cast<int>(at.range.begin) + index * kChunk,
                   base + offset + S::kV + group * kPanel);
  };
  const auto release = [&](int slot) {
    if (!leader) return;
    wait_stores_read();
    barrier_arrive(barriers.empty_of(slot));
  };
  const uint32_t descriptor = matrix_descriptor(base);
  int slot = 0, before = 0;
  uint32_t parity = 0;
  for (int c = 0; c < chunks; ++c) {
    const int remaining = static_cast<int>(min(at.range.length() - int64_t{c} * kChunk, int64_t{kChunk}));
    const uint32_t offset = static_cast<uint32_t>(slot * S::kBytes), tile = descriptor + (offset >> 4);
    const float* factors = reinterpret_cast<const float*>(shared + offset + Unit<KP>::kFactors);
    barrier_wait(barriers.full_of(slot), parity);
    wgmma_fence();
#pragma unroll
    for (int ks = 0; ks < KP / 16; ++ks) {
      const uint32_t k = tile + ((S::kK + ks / 4 * kPanel + ks % 4 * 32) >> 4);
      if (ks == 0)
        wgmma<Half, false>(u, s[ks], k);
      else
        wgmma<Half, true>(u, s[ks], k);
    }
    wgmma_commit();
    LaneOperands given;
    given.load<KP, VT>(base + offset, factors, warp, lane);
    const float next_decay = factors[2 * kChunk + 1];
    wgmma_fence();
#pragma unroll
    for (int ks = 0; ks < KP / 16; ++ks) {
      const uint32_t q = tile + ((S::kQ + ks / 4 * kPanel + ks % 4 * 32) >> 4);
      if (ks == 0)
        wgmma<Half, false>(out, s[ks], q);
      else
        wgmma<Half, true>(out, s[ks], q);
    }
    wgmma_commit();
    wgmma_wait<1>();  // S k
    pin(u);
    given.pin();
    FragmentA w[4];
    corrections<Half>(given, u, w);
    if (remaining < kChunk) keep_tokens(w, remaining, lane);
    wgmma_fence();
#pragma unroll
    for (int js = 0; js < 4; ++js) wgmma<Half, true>(state, w[js], tile + ((Unit<KP>::kM + js * 32) >> 4));
    wgmma_commit();
    if (c > 0) start_stores(c - 1, static_cast<uint32_t>(before * S::kBytes));  // while products run
    float2 reads[8];
    load_factors(factors + kChunk, lane, reads);
    wgmma_wait<1>();  // S q
    pin(out);
    scale_outputs(reads, out);
    pin(out);
    wgmma_fence();
#pragma unroll
    for (int js = 0; js < 4; ++js) wgmma<Half, true>(out, w[js], tile + ((Unit<KP>::kR + js * 32) >> 4));
    wgmma_commit();
    if (c > 0) release(before);
    wgmma_wait<1>();  // the state
    pin(state);
    if constexpr (!Plain) store_checkpoint<KP>(p, at, c, first_row, lane, state);
    round_and_decay(c + 1 < chunks ? next_decay : 1.0f);
    pin(state);
    wgmma_wait<0>();  // the outputs
    pin(out);
    if (same_type) turn_outputs(offset);
    if (!Plain && !same_type) store_unrounded(p, at, c, out, first_row, lane);
    before = slot;
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
  if (chunks > 0 && same_type) {
    const uint32_t offset = static_cast<uint32_t>(before * S::kBytes);
    const OutputPlace last(p, at, chunks - 1);
    __syncwarp();
    const int row = first_row + lane / 16 * 8;
    for (int token = lane % 16; token < last.length && row < p.V; token += 16)
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(o.data) + last.base + token * o.strides[0] + row) =
          *reinterpret_cast<const uint4*>(shared + offset + S::kV + S::value(token, warp * 2 + lane / 16));
  }
  const Tensor& final = p.args.states.out;
  if (slots.out >= 0) store_state<KP>(p, final, slots.out * final.strides[0] + at.hv * final.strides[1], first_row, lane, state);
}

#endif  // WEFT_HAS_WGMMA

template <class Half, int KP, int Groups, bool Plain>
__global__ void __launch_bounds__(Groups * 128 + kCopyThreads<Groups>, 1)
    wgmma_kernel(const __grid_constant__ Prefill p, const __grid_constant__ TokenMaps maps) {
#if WEFT_HAS_WGMMA
  extern __shared__ __align__(1024) unsigned char raw[];
  __shared__ alignas(8) uint64_t counters[2 * kStages];
  StateSlots slots;
  Lane at;
  if (!find_lane<Groups * kRows>(p, slots, at)) return;
  unsigned char* shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
  const Barriers barriers{kept(shared_address(counters)), kept(shared_address(counters + kStages))};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(barriers.full_of(i), 1);
      barrier_init(barriers.empty_of(i), Groups);
    }
    fence_async();
  }
  __syncthreads();
  const uint32_t base = kept(shared_address(shared));
  // Three warpgroups share the registers unevenly.
  if (threadIdx.x >= Groups * 128) {
    if constexpr (Groups == 2) give_registers<40>();
    if (threadIdx.x == Groups * 128) copy_all<KP, Groups>(p, maps, at, base, barriers);
  } else {
    if constexpr (Groups == 2) take_registers<232>();
    walk<Half, KP, Groups, Plain>(p, maps, at, slots, shared, base, barriers);
  }
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

// [T, heads, D] of 16-bit elements.
CUtensorMap map_of(const Tensor& t) {
  const auto size = [&](int d) { return static_cast<cuuint64_t>(t.size(d)); };
  // Strides of dimensions with one element mean nothing, but must be legal.
  const auto stride = [&](int d) { return static_cast<cuuint64_t>(t.size(d) > 1 ? t.strides[static_cast<size_t>(d)] * 2 : 16); };
  const cuuint64_t sizes[3] = {size(2), size(1), size(0)}, strides[2] = {stride(1), stride(0)};
  const cuuint32_t box[3] = {64, 1, kChunk}, steps[3] = {1, 1, 1};
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

template <class Half, int KP>
void launch_typed(const Stream& stream, const Prefill& p, const PassPlan& plan) {
  TokenMaps maps{};
  if (p.T > 0) maps = {map_of(p.args.q), map_of(p.args.k), map_of(p.args.v), CUtensorMap{}};
  if (p.T > 0 && p.args.o.dtype == p.args.q.dtype) maps.o = map_of(p.args.o);
  const auto run = [&](auto kernel, int threads) { launch(kOp, stream, plan.blocks, threads, plan.shared, kernel, p, maps); };
  const bool plain = p.args.o.dtype == p.args.q.dtype && p.args.checkpoint_every == 0;
  if (plan.rows == kRows)
    return run(plain ? wgmma_kernel<Half, KP, 1, true> : wgmma_kernel<Half, KP, 1, false>, 128 + kCopyThreads<1>);
  run(plain ? wgmma_kernel<Half, KP, 2, true> : wgmma_kernel<Half, KP, 2, false>, 256 + kCopyThreads<2>);
}

// Was the kernel compiled for Hopper's own instructions, not from the PTX for older devices?
bool built_for_hopper() {
  static const bool built = [] {
    cudaFuncAttributes attributes{};
    const auto kernel = wgmma_kernel<__nv_bfloat16, 128, 1, true>;
    if (cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)) == cudaSuccess)
      return attributes.ptxVersion >= 90;
    cudaGetLastError();
    return false;
  }();
  return built;
}

}  // namespace

// The copy engine counts tokens in 32 bits.
bool takes_wgmma(const Stream& stream, const Prefill& p) {
  return facts_of(stream).major == 9 && p.V > 16 && p.T <= INT32_MAX && built_for_hopper() && encoder();
}

// 64 rows per block while there are multiprocessors for them, then 128.
PassPlan wgmma_plan(const Stream& stream, const Prefill& p) {
  PassPlan plan;
  plan.kernel = "wgmma";
  plan.rows = p.V <= kRows || ceil_div(p.V, kRows) * p.Hv * p.N <= facts_of(stream).multiprocessors ? kRows : 2 * kRows;
  plan.blocks = ceil_div(p.V, plan.rows) * p.Hv * p.N;
  plan.stages = kStages;
  plan.shared = for_types(p, [&]<class Half, int KP>() { return plan.rows == kRows ? kSharedBytes<KP, 1> : kSharedBytes<KP, 2>; });
  return plan;
}

void launch_wgmma_pass(const Stream& stream, const Prefill& p) {
  for_types(p, [&]<class Half, int KP>() { launch_typed<Half, KP>(stream, p, wgmma_plan(stream, p)); });
}

}  // namespace weft::cuda
