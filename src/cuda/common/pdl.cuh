// Kernels of one queue that overlap at their ends: the next may start while the one before still runs, and waits for it by itself.
//
// A kernel launched early reads and writes nothing that the kernels before it touch before it has waited, unless one of them let it start
// only when that was there; it may ask for bytes to be brought into the L2, where whatever others write to them arrives. Devices before
// Hopper take turns.
#pragma once

#include "cuda/common/launch.cuh"

namespace weft::cuda {

// Until what was enqueued before is complete and seen. By every thread that touches device memory, and by one of every block.
__device__ inline void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start where there is room.
__device__ inline void pdl_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Before the wait: the lines that a kernel's arguments lie in, which it would otherwise wait for one by one when it comes to them.
template <class Args>
__device__ inline void prefetch_arguments(const Args& args) {
  const auto* words = reinterpret_cast<const uint32_t*>(&args);
  uint32_t all = 0;
#pragma unroll
  for (size_t i = 0; i < sizeof(Args) / sizeof(uint32_t); i += 16) all ^= words[i];
  if (all == 0x5eed5eedu) asm volatile("nanosleep.u32 1;");  // whatever keeps the loads
}

// Brings bytes into the L2, where nobody waits for them: a multiple of 16, from a multiple of 16 on.
__device__ inline void prefetch_l2(const void* from, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
#endif
}

// The same for the lines of the cache in which the first and every 128th byte behind it lie, from anywhere on.
__device__ inline void prefetch_l2_lines(const void* from, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  for (uint32_t i = 0; i < bytes; i += 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(from) + i));
#endif
}

// As launch(), for a kernel that waits.
template <class... Params, class... Args>
void launch_pdl(const char* op, const Stream& stream, int64_t blocks, int threads, size_t shared, void (*kernel)(Params...),
                Args&&... args) {
  enqueue(op, stream, {.blocks = blocks, .threads = threads, .shared = shared, .pdl = true}, kernel, std::forward<Args>(args)...);
}

}  // namespace weft::cuda
