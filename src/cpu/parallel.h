// Threads of the cpu backend: a count, and a loop over independent pieces of work.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "weft/device.h"

namespace weft::cpu {

// More threads than any machine has would only cost scratch; results do not depend on their number.
inline constexpr int kMaxThreads = 1024;

// Processors that this process may run on. (OpenMP's own answer follows environment variables, which change nothing here.)
int usable_processors();

// Worker threads of a call: what the caller asks for, else one per processor.
inline int thread_count(const Stream& stream) {
  return std::clamp(stream.threads > 0 ? stream.threads : usable_processors(), 1, kMaxThreads);
}

// Of `threads`, those worth waking for so many arithmetic operations: handing work to a sleeping thread takes as long as a million.
inline int worth_threads(int threads, double operations) {
  return static_cast<int>(std::clamp(operations / 1e6, 1.0, static_cast<double>(threads)));
}

// Calls work(i, worker) once for every i in [0, count), worker < threads. Which worker takes which piece may vary: results must not
// depend on it.
template <class F>
void parallel_for(int threads, int64_t count, F&& work) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) work(i, 0);
    return;
  }
#pragma omp parallel for num_threads(static_cast <int>(std::min <int64_t>(threads, count))) schedule(dynamic, 1)
  for (int64_t i = 0; i < count; ++i) work(i, omp_get_thread_num());
}

}  // namespace weft::cpu
