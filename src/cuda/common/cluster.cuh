// Blocks that are a cluster: where they meet. Devices before Hopper have none.
#pragma once

namespace weft::cuda {

// All threads of all blocks meet. `Done`: what they wrote before is seen behind it, and they have read what others may write to from then
// on; else they have nothing to tell each other but that mailboxes are ready.
template <bool Done>
__device__ inline void cluster_sync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __syncwarp();  // what follows wants warps whose lanes are together
  if constexpr (Done)
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  else
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

}  // namespace weft::cuda
