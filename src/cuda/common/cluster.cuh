// The barrier of a thread block cluster. Devices before Hopper have no clusters, and it does nothing there.
#pragma once

namespace weft::cuda {

// Synchronises all threads of all blocks of the cluster. `Done` arrives with release semantics: writes before the barrier are visible
// after it, and reads before it are complete. Otherwise the arrival is relaxed and orders no memory: it only signals that every block has
// armed its receive mbarriers, whose initialisation has a fence of its own.
template <bool Done>
__device__ inline void cluster_sync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __syncwarp();  // .aligned requires converged warps
  if constexpr (Done)
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  else
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

}  // namespace weft::cuda
