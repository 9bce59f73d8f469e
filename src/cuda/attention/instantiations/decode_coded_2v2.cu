// Coded-tile decode kernels for keys of 2 bits and values of 2 bits.
#include "cuda/attention/decode_coded.cuh"

namespace weft::cuda {

std::span<const CodedKernel> coded_kernels_2v2() {
  static constexpr CodedKernel kKernels[] = {
      make_coded_kernel<2, 2, 64, 8>(),
      make_coded_kernel<2, 2, 128, 4>(),
      make_coded_kernel<2, 2, 128, 8>(),
      make_coded_kernel<2, 2, 256, 8>(),
  };
  return kKernels;
}

}  // namespace weft::cuda
