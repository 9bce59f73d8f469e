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

// What parallel regions cost the thread that calls them. Where more threads want to run than there are processors, one that has been put
// aside holds up the others for milliseconds: after such a region the caller works alone for some time before it asks again.
class Patience {
 public:
  static Patience& of_this_thread();
  bool alone() const;
  // Around a region; in between, the caller says when it has no work left, and how many pieces it took.
  void begin();
  void work_done(int64_t pieces);
  void end();

 private:
  int64_t begun_ns_ = 0, worked_ns_ = 0, pieces_ = 0;  // worked: what this thread really ran
  int64_t alone_until_ns_ = 0;
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
  patience.begin();
#pragma omp parallel num_threads(static_cast <int>(std::min <int64_t>(threads, count - first)))
  {
    const int worker = omp_get_thread_num();
    int64_t pieces = 0;
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = first; i < count; ++i) {
      work(i, worker);
      ++pieces;
    }
    if (worker == 0) patience.work_done(pieces);
  }
  patience.end();
}

}  // namespace weft::cpu
