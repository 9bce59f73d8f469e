// The general decode kernel for values of at most 256 coordinates and blocks of 8 query rows.
#include "cuda/attention/decode_general.cuh"

namespace weft::cuda {

GeneralKernel general_kernel_256_1() { return make_general_kernel<4, 1>(); }

}  // namespace weft::cuda
