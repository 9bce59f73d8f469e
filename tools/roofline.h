// What this machine can do at best: multiply-adds and memory bandwidth, measured.
#pragma once

#include <cstdint>
#include <string>

namespace weft::tools {

struct Roofline {
  int threads = 0;
  double gflops = 0;  // f32 multiply-adds, both counted
  double one_thread_gflops = 0;
  double read_gbps = 0;  // reading memory far larger than the caches
  double rmw_gbps = 0;   // changing it in place, reads and writes counted

  // Seconds below which a call cannot be, if its data lies in memory.
  double seconds(double read_bytes, double written_bytes, double flops) const;
};

// Measured once per number of threads; takes about a second.
const Roofline& roofline(int threads);

// Bytes of the last-level cache; 32 MiB where the system does not say.
int64_t last_level_cache();
// The processor's name as the system gives it, and the system's own name and release.
std::string processor_name();
std::string system_name();

}  // namespace weft::tools
