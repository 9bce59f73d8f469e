// Preparing chunks by Hopper's warpgroup products, before the pass: see prefill_prepare_wgmma.cuh.
#include "cuda/launch_early.cuh"
#include "cuda/prefill_prepare_wgmma.cuh"

namespace weft::cuda {
namespace {

constexpr int kWarpgroups = 3;  // on a multiprocessor, a block each

// Who waits for a kernel sees what it stored.
struct Unpublished {
  __device__ void started(int64_t, int64_t) {}
  __device__ void settle() {}
};

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

template <class Half, int KP, int Heads>
__global__ void __launch_bounds__(kPrepareThreads, kWarpgroups)
    prepare_wgmma_kernel(const __grid_constant__ Prefill p, const __grid_constant__ KeyMaps maps) {
#if WEFT_HAS_WGMMA
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& s = *reinterpret_cast<PrepareShared<KP>*>(raw);
  if (shared_address(raw) % 1024 != 0) __trap();  // products want their tiles so; nothing else lies in shared memory
  release_kernels_behind();
  InTurns source{p};
  Unpublished nobody;
  prepare_items<Half, Heads>(s, p, maps, 0, threadIdx.x, source, nobody);
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
