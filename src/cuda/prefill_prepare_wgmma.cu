// Preparing chunks by Hopper's warpgroup products, before the pass: see prefill_prepare_wgmma.cuh.
#include "cuda/launch_early.cuh"
#include "cuda/prefill_prepare_wgmma.cuh"

namespace weft::cuda {
namespace {

// Who waits for a kernel sees what it stored.
struct Unpublished {
  __device__ void started(int64_t, int64_t) {}
  __device__ void settle() {}
};

template <class Half, int KP>
__global__ void __launch_bounds__(kPrepareThreads, 3)
    prepare_wgmma_kernel(const __grid_constant__ Prefill p, const __grid_constant__ KeyMaps maps) {
#if WEFT_HAS_WGMMA
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& s = *reinterpret_cast<PrepareShared<KP>*>(raw);
  if (shared_address(raw) % 1024 != 0) __trap();  // products want their tiles so; nothing else lies in shared memory
  release_kernels_behind();
  const uint32_t key_heads = static_cast<uint32_t>(p.Hk);
  const int64_t hk = blockIdx.x % key_heads, row = blockIdx.x / key_heads;
  const Chunk chunk = chunk_at(p.map, row);
  if (chunk.n < 0) return;
  begin_preparing(s, threadIdx.x);
  Unpublished nobody;
  prepare_chunk<Half, KP>(s, p, maps, 0, 0, chunk, row, hk, nobody);
  if (threadIdx.x == 0) wait_stores_read();
#endif
}

}  // namespace

void launch_wgmma_prepare(const Stream& stream, const Prefill& p) {
  if (p.T == 0) return;
  for_types(p, [&]<class Half, int KP>() {
    launch("gated_delta_rule_prefill", stream, p.map.rows * p.Hk, kPrepareThreads, sizeof(PrepareShared<KP>),
           prepare_wgmma_kernel<Half, KP>, p, KeyMaps{token_map(p.args.q), token_map(p.args.k)});
  });
}

}  // namespace weft::cuda
