// Launches kernels: grid arithmetic, shared memory beyond the default, and errors as sentences.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/host_device.h"
#include "core/fail.h"
#include "cuda/common/device.h"

namespace weft::cuda {

WEFT_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline constexpr int64_t kMaxGridBlocks = 0x7fffffff;  // of a grid's first dimension
// Dynamic shared memory that needs no attribute. The default limit of a block is 48 KiB, of which static arrays take some.
inline constexpr int64_t kDefaultSharedBytes = 32 << 10;

// Grids larger than the hardware allows are refused, not wrapped.
inline Status check_grid(const char* op, int64_t blocks) {
  if (blocks <= kMaxGridBlocks) return {};
  return fail(Code::unsupported, op, "sequences",
              "wants " + std::to_string(blocks) + " blocks, a grid holds " + std::to_string(kMaxGridBlocks));
}

struct Grid {
  int64_t blocks = 0;
  int threads = 0;
  size_t shared = 0;  // bytes
  int cluster = 1;    // blocks per cluster; above 1 on Hopper only
  bool pdl = false;   // programmatic dependent launch: see pdl.cuh
};

// Enqueues `kernel` over a grid. An empty grid launches nothing.
template <class... Params, class... Args>
void enqueue(const char* op, const Stream& stream, const Grid& grid, void (*kernel)(Params...), Args&&... args) {
  if (grid.blocks == 0) return;
  if (Status status = check_grid(op, grid.blocks); !status) throw Error(std::move(status));
  const OnDevice on(stream.device, op);
  if (grid.shared > static_cast<size_t>(kDefaultSharedBytes))
    raise_shared_limit(reinterpret_cast<const void*>(kernel), stream.device, op);
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = grid.shared;
  config.stream = queue_of(stream);
  config.attrs = attributes;
  // All kernels of a build are compiled for Hopper or none is, so the answer for one kernel holds for all of its type. Only a Hopper
  // device is asked: a machine may have other devices beside it.
  const auto has_pdl = [&] {
    static const bool built = compiled_for_hopper(reinterpret_cast<const void*>(kernel), stream.device);
    return built;
  };
  if (grid.pdl && facts_of(stream).major == 9 && has_pdl()) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  }
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), op, "launch");
}

template <class... Params, class... Args>
void launch(const char* op, const Stream& stream, int64_t blocks, int threads, size_t shared, void (*kernel)(Params...),
            Args&&... args) {
  enqueue(op, stream, {.blocks = blocks, .threads = threads, .shared = shared}, kernel, std::forward<Args>(args)...);
}

}  // namespace weft::cuda
