// Attention over tiles in lanes order: keys of 4 bits, values of 2.
#include "cuda/attention/decode_coded.cuh"

namespace weft::cuda {

std::span<const LanesKernel> lanes_kernels_4v2() {
  static constexpr LanesKernel kKernels[] = {
      make_lanes_kernel<4, 2, 64, 8>(),
      make_lanes_kernel<4, 2, 128, 4>(),
      make_lanes_kernel<4, 2, 128, 8>(),
      make_lanes_kernel<4, 2, 256, 8>(),
  };
  return kKernels;
}

}  // namespace weft::cuda
