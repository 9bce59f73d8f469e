// Threads of the cpu backend: how many a call uses, and a parallel loop over independent work items.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "weft/device.h"
#include "weft/limits.h"

namespace weft::cpu {

// Processors that this process may run on. OpenMP's default is not used, since environment variables change it.
int usable_processors();

// Worker threads of a call: as many as the caller asks for, else one per processor.
inline int thread_count(const Stream& stream) {
  return std::clamp(stream.threads > 0 ? stream.threads : usable_processors(), 1, kMaxThreads);
}

// How many of `threads` are worth waking for this many arithmetic operations. Waking a thread costs as much as a million
// operations.
inline int worth_threads(int threads, double operations) {
  return static_cast<int>(std::clamp(operations / 1e6, 1.0, static_cast<double>(threads)));
}

// Backs off from parallel regions on an oversubscribed machine. Where there are more runnable threads than processors, one
// descheduled thread delays its region by milliseconds. After such a region the calling thread works serially for a while before it
// tries again.
class ContentionBackoff {
 public:
  static ContentionBackoff& of_this_thread();
  bool serial() const;  // is the calling thread to work serially?
  // Call begin() before a region and end() after it. busy_ns is the cpu time of the region's busiest thread.
  void begin();
  void end(int64_t busy_ns);
  static int64_t thread_cpu_ns();  // cpu time of the calling thread since its start

 private:
  int64_t begun_ns_ = 0, serial_until_ns_ = 0;
};

// Calls work(i, worker) once for every i in [0, count), with worker < threads. Any worker may get any i: results must not depend on
// it.
template <class F>
void parallel_for(int threads, int64_t count, F&& work) {
  int64_t first = 0;
  if (threads <= 1 || count <= 1) {
    while (first < count) work(first++, 0);
    return;
  }
  ContentionBackoff& backoff = ContentionBackoff::of_this_thread();
  while (first < count && backoff.serial()) work(first++, 0);
  if (first == count) return;
  int64_t busy_ns = 0;
  backoff.begin();
#pragma omp parallel num_threads(static_cast <int>(std::min <int64_t>(threads, count - first))) reduction(max : busy_ns)
  {
    const int worker = omp_get_thread_num();
    const int64_t start_ns = ContentionBackoff::thread_cpu_ns();
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = first; i < count; ++i) work(i, worker);
    busy_ns = ContentionBackoff::thread_cpu_ns() - start_ns;
  }
  backoff.end(busy_ns);
}

}  // namespace weft::cpu
