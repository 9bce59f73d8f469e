// Sending rows between the blocks of a cluster: st.async to distributed shared memory, counted by an mbarrier.
#pragma once

#include <cstdint>

#include "cuda/common/cluster.cuh"
#include "cuda/common/mma.cuh"

namespace weft::cuda {

// Counts the bytes that other blocks send to this block.
struct ReceiveBarrier {
  uint64_t state;

  // By one thread, before a cluster barrier that all senders wait at. Fewer bytes may be sent if no thread waits.
  __device__ void expect(unsigned bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(this)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)), "r"(bytes) : "memory");
#endif
  }
  // Waits until all expected bytes have arrived.
  __device__ void wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    for (unsigned done = 0; !done;)
      asm volatile(
          "{\n"
          ".reg .pred done;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], 0;\n"
          "selp.u32 %0, 1, 0, done;\n"
          "}"
          : "=r"(done)
          : "r"(shared_address(this))
          : "memory");
#endif
  }
};

// Sends N floats to address `to` in the shared memory of block `rank` of the cluster, counted by its `barrier`. Does not wait.
template <int N>
__device__ inline void send_in_cluster(const void* to, const ReceiveBarrier& barrier, unsigned rank, const float (&x)[N]) {
  static_assert(N == 2 || N % 4 == 0);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t there, counted;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(to)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counted) : "r"(shared_address(&barrier)), "r"(rank));
  if constexpr (N == 2)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(there), "f"(x[0]),
                 "f"(x[1]), "r"(counted)
                 : "memory");
  else
#pragma unroll
    for (int i = 0; i < N; i += 4)
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(there + 4 * i),
                   "f"(x[i]), "f"(x[i + 1]), "f"(x[i + 2]), "f"(x[i + 3]), "r"(counted)
                   : "memory");
#endif
}

}  // namespace weft::cuda
