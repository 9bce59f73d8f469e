// Launching kernels: grid arithmetic, shared memory beyond the default, and errors as sentences.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "core/check.h"
#include "cuda/device.h"
#include "shared/anywhere.h"

namespace weft::cuda {

WEFT_ANYWHERE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline constexpr int64_t kMostBlocks = 0x7fffffff;  // of a grid's first dimension
// Shared memory that a block gets without asking: 48 KiB, of which a kernel's static arrays take some.
inline constexpr int64_t kFreeShared = 32 << 10;

// Work items beyond what one grid can hold are refused, not wrapped.
inline Status check_grid(const char* op, int64_t blocks) {
  if (blocks <= kMostBlocks) return {};
  return fail(Code::unsupported, op, "sequences",
              "wants " + std::to_string(blocks) + " blocks, a grid holds " + std::to_string(kMostBlocks));
}

// Enqueues `kernel` over `blocks` blocks of `threads`. An empty grid is no launch. `early`: see launch_early.cuh.
template <class... Params, class... Args>
void enqueue(const char* op, const Stream& stream, bool early, int64_t blocks, int threads, size_t shared,
             void (*kernel)(Params...), Args&&... args) {
  if (blocks == 0) return;
  if (Status status = check_grid(op, blocks); !status) throw Error(std::move(status));
  const OnDevice on(stream.device, op);
  if (shared > static_cast<size_t>(kFreeShared)) allow_most_shared(reinterpret_cast<const void*>(kernel), stream.device, op);
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = queue_of(stream);
  config.attrs = &overlap;
  config.numAttrs = early && facts_of(stream).major >= 9 ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), op, "launch");
}

template <class... Params, class... Args>
void launch(const char* op, const Stream& stream, int64_t blocks, int threads, size_t shared, void (*kernel)(Params...),
            Args&&... args) {
  enqueue(op, stream, false, blocks, threads, shared, kernel, std::forward<Args>(args)...);
}

}  // namespace weft::cuda
