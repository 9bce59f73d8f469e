// A CUDA runtime without a device, for tests of plans. The test is linked with --wrap for each runtime function that Weft's ops call, so
// that the library plans and launches as on a machine with many devices, and every launch is checked against the limits of its device
// instead of being run.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace weft::tests {

// Devices of six compute capabilities, each with its own number of multiprocessors and with few, since plans look at that number.
// shared_bytes is the most shared memory that a block may ask for (cudaDevAttrMaxSharedMemoryPerBlockOptin), per the table "Technical
// Specifications per Compute Capability" of the CUDA programming guide.
struct PretendedDevice {
  int major, minor, shared_bytes, multiprocessors;
  std::string name() const {
    return "sm_" + std::to_string(major) + std::to_string(minor) + " with " + std::to_string(multiprocessors) + " multiprocessors";
  }
};
const std::vector<PretendedDevice>& pretended_devices();

// What the build says of a kernel: `ptx` for devices that compile the PTX, `hopper` for the machine code of sm_90a.
struct KernelFacts {
  int ptx_shared = -1, hopper_shared = -1;  // bytes of static shared memory; -1: the build has no such code
  int registers = 0;                        // per thread, of the machine code of sm_90a
  int most_threads = 0;                     // of a block: __launch_bounds__
};

struct PretendedCuda {
  bool portable = false;                       // treat the build as one without machine code for Hopper
  std::map<std::string, KernelFacts> kernels;  // by the mangled name of device code
  std::vector<std::string> faults;             // sentences about launches that a device would refuse
  // What was launched, for reports: per device the largest launch, and every kernel that ran anywhere.
  struct Largest {
    int64_t launches = 0, bytes = 0;
    std::string kernel{};
  };
  std::vector<Largest> largest;
  std::set<std::string> launched;
};
PretendedCuda& pretended_cuda();

// Reads the static shared memory, registers and thread limits of this program's kernels with `cuobjdump`. "" or why that failed.
std::string read_kernels(const std::string& cuobjdump);

}  // namespace weft::tests
