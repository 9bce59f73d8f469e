// Implementation of parallel.h: the number of usable processors, and the backoff on oversubscribed machines.
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

ContentionBackoff& ContentionBackoff::of_this_thread() {
  static thread_local ContentionBackoff backoff;
  return backoff;
}

bool ContentionBackoff::serial() const { return serial_until_ns_ != 0 && now_ns(CLOCK_MONOTONIC) < serial_until_ns_; }

int64_t ContentionBackoff::thread_cpu_ns() { return now_ns(CLOCK_THREAD_CPUTIME_ID); }

void ContentionBackoff::begin() { begun_ns_ = now_ns(CLOCK_MONOTONIC); }

void ContentionBackoff::end(int64_t busy_ns) {
  // A region may lose the time to wake a thread (less than kWakeNs) and a quarter of its work; more means contention.
  constexpr int64_t kWakeNs = 200'000, kLossDivisor = 4;
  const int64_t ended_ns = now_ns(CLOCK_MONOTONIC), lost_ns = ended_ns - begun_ns_ - busy_ns;
  if (lost_ns <= kWakeNs + busy_ns / kLossDivisor) return;
  // Serial for 20 times the loss: contention then costs at most a twentieth of the time. The loss counts for at most 50 ms, since a
  // longer one (a suspended process) says nothing about contention.
  constexpr int64_t kSerialFactor = 20, kMaxLossNs = 50'000'000;
  serial_until_ns_ = ended_ns + kSerialFactor * std::min(lost_ns, kMaxLossNs);
}

}  // namespace weft::cpu
