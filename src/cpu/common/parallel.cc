// How many processors there are, and how much they are worth: see parallel.h.
#include "cpu/common/parallel.h"

#include <ctime>
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

namespace {

int64_t now_ns(clockid_t clock) {
  timespec t{};
  clock_gettime(clock, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

}  // namespace

Patience& Patience::of_this_thread() {
  static thread_local Patience patience;
  return patience;
}

bool Patience::alone() const { return alone_until_ns_ != 0 && now_ns(CLOCK_MONOTONIC) < alone_until_ns_; }

int64_t Patience::ran_ns() { return now_ns(CLOCK_THREAD_CPUTIME_ID); }

void Patience::begin() { begun_ns_ = now_ns(CLOCK_MONOTONIC); }

void Patience::end(int64_t worked_ns) {
  // Waking a thread takes less than the first, and a lengthy region may lose a part of its time.
  constexpr int64_t kWakeNs = 200'000, kPart = 4;
  const int64_t ended_ns = now_ns(CLOCK_MONOTONIC), lost_ns = ended_ns - begun_ns_ - worked_ns;
  if (lost_ns <= kWakeNs + worked_ns / kPart) return;
  // At most a twentieth of the time is lost so; and after a long sleep of everybody nobody is to blame.
  constexpr int64_t kAlone = 20, kMostNs = 50'000'000;
  alone_until_ns_ = ended_ns + kAlone * std::min(lost_ns, kMostNs);
}

}  // namespace weft::cpu
