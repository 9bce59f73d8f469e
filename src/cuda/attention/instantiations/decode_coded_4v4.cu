// Coded-tile decode kernels for keys of 4 bits and values of 4 bits.
#include "cuda/attention/decode_coded.cuh"

namespace weft::cuda {

std::span<const CodedKernel> coded_kernels_4v4() {
  static constexpr CodedKernel kKernels[] = {
      make_coded_kernel<4, 4, 64, 8>(),   make_coded_kernel<4, 4, 128, 4>(), make_coded_kernel<4, 4, 128, 8>(),
      make_coded_kernel<4, 4, 128, 16>(), make_coded_kernel<4, 4, 256, 4>(), make_coded_kernel<4, 4, 256, 8>(),
      make_coded_kernel<4, 4, 256, 16>(),
  };
  return kKernels;
}

}  // namespace weft::cuda
