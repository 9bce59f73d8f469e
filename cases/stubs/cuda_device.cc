// Stand-in for builds without cuda: there is no device. Streams on cuda are refused before anything is timed.
#include "cases/cuda_device.h"

namespace weft::cases {

Placement* cuda_placement(int) { return nullptr; }
CudaTimes time_on_cuda(const Stream&, size_t, int, double, const std::function<void(const Stream&, size_t)>&) { return {}; }
void pretend_cuda_device() {}
CudaCeilings cuda_ceilings(int) { return {}; }
int64_t cuda_cache_bytes(int) { return 0; }
std::string cuda_driver() { return ""; }

}  // namespace weft::cases
