// Coded-tile decode kernels for keys of 3 bits and values of 3 bits.
#include "cuda/attention/decode_coded.cuh"

namespace weft::cuda {

std::span<const CodedKernel> coded_kernels_3v3() {
  static constexpr CodedKernel kKernels[] = {
      make_coded_kernel<3, 3, 64, 8>(),
      make_coded_kernel<3, 3, 128, 4>(),
      make_coded_kernel<3, 3, 128, 8>(),
      make_coded_kernel<3, 3, 256, 8>(),
  };
  return kKernels;
}

}  // namespace weft::cuda
