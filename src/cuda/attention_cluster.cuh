// Attention kernels whose blocks are a cluster: a barrier among them, and reading each other's rows. Devices before Hopper have none.
#pragma once

#include <cstdint>

namespace weft::cuda {

// All threads of all blocks meet: whoever waits has arrived before. What a thread did before it arrived is seen by those who have waited.
__device__ inline void arrive_in_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ inline void wait_for_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// N floats that lie, in block `rank` of the cluster, where `address` is in this one's shared memory.
template <int N>
__device__ inline void load_from_cluster(uint32_t address, unsigned rank, float (&x)[N]) {
  static_assert(N == 1 || N == 2 || N % 4 == 0);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
  if constexpr (N == 1)
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x[0]) : "r"(address) : "memory");
  else if constexpr (N == 2)
    asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(address) : "memory");
  else
#pragma unroll
    for (int i = 0; i < N; i += 4)
      asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                   : "=f"(x[i]), "=f"(x[i + 1]), "=f"(x[i + 2]), "=f"(x[i + 3])
                   : "r"(address + 4 * i)
                   : "memory");
#endif
}

}  // namespace weft::cuda
