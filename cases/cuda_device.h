// What cases and tools need of a cuda device besides the library: memory, timing, and its ceilings. Builds without cuda have none.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cases/image.h"

namespace weft::cases {

// Memory of a device, or null in builds without cuda.
Placement* cuda_placement(int device);

// Seconds of single calls: the calls 0 .. calls - 1 are captured into one graph on a queue of its own, and every replay of it gives the
// mean of its calls, launch gaps included; behind each the device rests as long as it took. `repeat` replays, or enough of them when 0.
std::vector<double> time_on_cuda(const Stream& stream, size_t calls, int repeat,
                                 const std::function<void(const Stream& stream, size_t call)>& call);

// What a device can do at best, measured: bf16 matrix products by mma instructions, memory read, memory changed in place (both
// directions counted).
struct CudaCeilings {
  double gflops = 0, read_gbps = 0, rmw_gbps = 0;
};
CudaCeilings cuda_ceilings(int device);

int64_t cuda_cache_bytes(int device);
std::string cuda_driver();

}  // namespace weft::cases
