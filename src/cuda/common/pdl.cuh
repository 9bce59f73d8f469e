// Programmatic dependent launch (PDL): a kernel may start while the kernel before it in the stream still runs, and waits for it itself.
//
// Before pdl_wait(), a kernel must not read or write memory that earlier kernels of the stream touch, unless an earlier kernel called
// pdl_launch_dependents() only after that memory was complete. It may prefetch such memory into the L2, where later writes arrive as well.
// Devices before Hopper run the kernels one after another.
#pragma once

#include "cuda/common/launch.cuh"

namespace weft::cuda {

// griddepcontrol.wait: blocks until earlier kernels are complete and their writes visible. Every thread that touches global memory must
// call it, and at least one thread of every block.
__device__ inline void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// griddepcontrol.launch_dependents: once every block has called it or exited, the next kernel may start where resources are free.
__device__ inline void pdl_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Loads every cache line of the kernel's parameters before pdl_wait(). A kernel would otherwise wait for them one by one.
template <class Args>
__device__ inline void prefetch_arguments(const Args& args) {
  const auto* words = reinterpret_cast<const uint32_t*>(&args);
  uint32_t all = 0;
#pragma unroll
  for (size_t i = 0; i < sizeof(Args) / sizeof(uint32_t); i += 16) all ^= words[i];
  if (all == 0x5eed5eedu) asm volatile("nanosleep.u32 1;");  // a side effect, so that the loads are kept
}

// Prefetches bytes into the L2 without waiting. Address and size are multiples of 16.
__device__ inline void prefetch_l2(const void* from, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
#endif
}

// Prefetches the cache lines of the first byte and of every 128th byte after it into the L2; any address.
__device__ inline void prefetch_l2_lines(const void* from, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  for (uint32_t i = 0; i < bytes; i += 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(from) + i));
#endif
}

// launch() with PDL, for a kernel that calls pdl_wait().
template <class... Params, class... Args>
void launch_pdl(const char* op, const Stream& stream, int64_t blocks, int threads, size_t shared, void (*kernel)(Params...),
                Args&&... args) {
  enqueue(op, stream, {.blocks = blocks, .threads = threads, .shared = shared, .pdl = true}, kernel, std::forward<Args>(args)...);
}

}  // namespace weft::cuda
