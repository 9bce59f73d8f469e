// Coded-tile decode kernels for keys of 8 bits and values of 8 bits.
#include "cuda/attention/decode_coded.cuh"

namespace weft::cuda {

std::span<const CodedKernel> coded_kernels_8v8() {
  static constexpr CodedKernel kKernels[] = {
      make_coded_kernel<8, 8, 64, 8>(),
      make_coded_kernel<8, 8, 128, 8>(),
      make_coded_kernel<8, 8, 256, 8>(),
  };
  return kKernels;
}

}  // namespace weft::cuda
