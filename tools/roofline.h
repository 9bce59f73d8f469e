// The measured peak of this machine: multiply-adds and memory bandwidth.
#pragma once

#include <cstdint>
#include <string>

namespace weft::tools {

struct Roofline {
  int threads = 0;
  double gflops = 0;  // f32 multiply-adds, both counted
  double one_thread_gflops = 0;
  double read_gbps = 0;  // reading memory that is far larger than the caches
  double rmw_gbps = 0;   // updating such memory in place, reads and writes counted

  // The least time of a call in seconds, if its data lies in memory.
  double seconds(double read_bytes, double written_bytes, double flops) const;
};

// Measured once for each number of threads; a measurement takes about a second.
const Roofline& roofline(int threads);

// Bytes of the last-level cache; 32 MiB where the system does not report it.
int64_t last_level_cache();
// The name of the processor, and the name and release of the system.
std::string processor_name();
std::string system_name();

}  // namespace weft::tools
