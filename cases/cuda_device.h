// CUDA device memory, timing and measured ceilings for cases and tools. cases/stubs/ stands in where a build has no cuda.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cases/image.h"

namespace weft::cases {

// Memory of a device, or null in builds without cuda.
Placement* cuda_placement(int device);

// Seconds per call, one figure for each graph replay. sustained is empty unless it was asked for.
struct CudaTimes {
  std::vector<double> rested, sustained;
};

// Calls 0 .. calls - 1 are captured into one CUDA graph on a CUDA stream of its own. A replay gives the mean time of its calls, launch
// gaps included. After a rested replay the device idles as long as the replay took. `repeat` is the number of rested replays; 0 lets the
// function choose. With sustain > 0, replays follow each other for so many seconds, and those after that are the sustained ones.
CudaTimes time_on_cuda(const Stream& stream, size_t calls, int repeat, double sustain,
                       const std::function<void(const Stream& stream, size_t call)>& call);

// Measured ceilings of a device: bf16 matrix products by mma instructions, memory reads, and memory updated in place (bytes read
// and bytes written both count).
struct CudaCeilings {
  double gflops = 0, read_gbps = 0, rmw_gbps = 0;
};
CudaCeilings cuda_ceilings(int device);

// Where there is no device: plans are made for an H200, on which nothing can be launched. Call it before any other function of the library.
void pretend_cuda_device();

int64_t cuda_cache_bytes(int device);
std::string cuda_driver();

}  // namespace weft::cases
