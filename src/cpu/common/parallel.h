// Threads of the cpu backend: a count, and a loop over independent pieces of work.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "weft/device.h"
#include "weft/limits.h"

namespace weft::cpu {

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

// What parallel regions cost the thread that calls them. Where more threads want to run than there are processors, one that has been put
// aside holds up the others for milliseconds: after such a region the caller works alone for some time before it asks again.
class Patience {
 public:
  static Patience& of_this_thread();
  bool alone() const;
  // Around a region, of which the busiest thread really ran so long.
  void begin();
  void end(int64_t worked_ns);
  static int64_t ran_ns();  // what the calling thread has ever run

 private:
  int64_t begun_ns_ = 0, alone_until_ns_ = 0;
};

// Calls work(i, worker) once for every i in [0, count), worker < threads. Which worker takes which piece may vary: results must not
// depend on it.
template <class F>
void parallel_for(int threads, int64_t count, F&& work) {
  int64_t first = 0;
  if (threads <= 1 || count <= 1) {
    while (first < count) work(first++, 0);
    return;
  }
  Patience& patience = Patience::of_this_thread();
  while (first < count && patience.alone()) work(first++, 0);
  if (first == count) return;
  int64_t worked_ns = 0;
  patience.begin();
#pragma omp parallel num_threads(static_cast <int>(std::min <int64_t>(threads, count - first))) reduction(max : worked_ns)
  {
    const int worker = omp_get_thread_num();
    const int64_t ran_ns = Patience::ran_ns();
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = first; i < count; ++i) work(i, worker);
    worked_ns = Patience::ran_ns() - ran_ns;
  }
  patience.end(worked_ns);
}

}  // namespace weft::cpu
