// The general decode kernel for values of at most 512 coordinates and blocks of 8 query rows.
#include "cuda/attention/decode_general.cuh"

namespace weft::cuda {

GeneralKernel general_kernel_512_1() { return make_general_kernel<8, 1>(); }

}  // namespace weft::cuda
