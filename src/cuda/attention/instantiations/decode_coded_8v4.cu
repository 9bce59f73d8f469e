// Coded-tile decode kernels for keys of 8 bits and values of 4 bits.
#include "cuda/attention/decode_coded.cuh"

namespace weft::cuda {

std::span<const CodedKernel> coded_kernels_8v4() {
  static constexpr CodedKernel kKernels[] = {
      make_coded_kernel<8, 4, 64, 8>(),   make_coded_kernel<8, 4, 128, 8>(),  make_coded_kernel<8, 4, 256, 8>(),
      make_coded_kernel<8, 4, 128, 16>(), make_coded_kernel<8, 4, 256, 16>(),
  };
  return kKernels;
}

}  // namespace weft::cuda
