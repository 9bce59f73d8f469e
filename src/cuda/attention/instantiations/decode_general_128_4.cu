// The general decode kernel for values of at most 128 coordinates and blocks of 32 query rows.
#include "cuda/attention/decode_general.cuh"

namespace weft::cuda {

GeneralKernel general_kernel_128_4() { return make_general_kernel<2, 4>(); }

}  // namespace weft::cuda
