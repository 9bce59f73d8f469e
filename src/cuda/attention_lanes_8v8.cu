// Attention over tiles in lanes order: keys of 8 bits, values of 8.
#include "cuda/attention_lanes.cuh"

namespace weft::cuda {

std::span<const LanesKernel> lanes_kernels_8v8() {
  static constexpr LanesKernel kKernels[] = {
      make_lanes_kernel<8, 8, 64, 1>(),
      make_lanes_kernel<8, 8, 128, 1>(),
      make_lanes_kernel<8, 8, 256, 1>(),
  };
  return kKernels;
}

}  // namespace weft::cuda
