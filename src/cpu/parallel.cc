// How many processors there are: see parallel.h.
#include "cpu/parallel.h"

#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

namespace weft::cpu {

int usable_processors() {
  static const int found = [] {
#ifdef __linux__
    cpu_set_t mine;
    if (sched_getaffinity(0, sizeof mine, &mine) == 0) return CPU_COUNT(&mine);
#endif
    return static_cast<int>(std::thread::hardware_concurrency());
  }();
  return std::max(found, 1);
}

}  // namespace weft::cpu
