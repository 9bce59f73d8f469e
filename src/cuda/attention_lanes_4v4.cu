// Attention over tiles in lanes order: keys of 4 bits, values of 4.
#include "cuda/attention_lanes.cuh"

namespace weft::cuda {

std::span<const LanesKernel> lanes_kernels_4v4() {
  static constexpr LanesKernel kKernels[] = {
      make_lanes_kernel<4, 4, 64, 1>(),  make_lanes_kernel<4, 4, 128, 1>(), make_lanes_kernel<4, 4, 256, 1>(),
      make_lanes_kernel<4, 4, 128, 2>(), make_lanes_kernel<4, 4, 256, 2>(),
  };
  return kKernels;
}

}  // namespace weft::cuda
