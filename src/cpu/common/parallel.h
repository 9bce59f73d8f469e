// Threads of the cpu backend: how many a call uses, and a parallel loop over independent work items.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
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

// The threads of a parallel loop: those that work, of a team that may be larger (Stream::whole_team).
struct Threads {
  int working = 1, team = 1;

  Threads() = default;
  Threads(int count)
      : working(count), team(count) {}  // NOLINT(google-explicit-constructor): most loops have as many as they are given
  Threads(const Stream& stream, int count) : working(count), team(stream.whole_team ? thread_count(stream) : count) {}
  operator int() const { return working; }  // NOLINT(google-explicit-constructor): scratch and splits count those that work
};
inline Threads worth_threads(const Stream& stream, double operations) {
  return {stream, worth_threads(thread_count(stream), operations)};
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

// Calls work(i, worker) once for every i in [0, count), with worker < threads.working. Any worker may get any i: results must not
// depend on it.
template <class F>
void parallel_for(Threads threads, int64_t count, F&& work) {
  int64_t first = 0;
  if (threads.working <= 1 || count <= 1) {
    while (first < count) work(first++, 0);
    return;
  }
  ContentionBackoff& backoff = ContentionBackoff::of_this_thread();
  while (first < count && backoff.serial()) work(first++, 0);
  if (first == count) return;
  int64_t busy_ns = 0;
  std::atomic<int64_t> next = first;
  const int workers = static_cast<int>(std::min<int64_t>(threads.working, count - first));
  backoff.begin();
#pragma omp parallel num_threads(std::max(workers, threads.team)) reduction(max : busy_ns)
  {
    const int worker = omp_get_thread_num();
    const int64_t start_ns = ContentionBackoff::thread_cpu_ns();
    if (worker < workers)
      for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < count; i = next.fetch_add(1, std::memory_order_relaxed))
        work(i, worker);
    busy_ns = ContentionBackoff::thread_cpu_ns() - start_ns;
  }
  backoff.end(busy_ns);
}

}  // namespace weft::cpu
