// parallel_for: every work item runs once, on any thread, also after a thread was late.
#include "cpu/common/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace weft::cpu {
namespace {

// How often each work item ran on a worker of a valid index.
template <class F>
std::vector<int> run_counts(Threads threads, int64_t count, F&& during) {
  std::vector<std::atomic<int>> runs(static_cast<size_t>(count));
  parallel_for(threads, count, [&](int64_t i, int worker) {
    during(i, worker);
    if (worker >= 0 && worker < threads) ++runs[static_cast<size_t>(i)];
  });
  return {runs.begin(), runs.end()};
}

TEST(ParallelFor, RunsEveryItemOnce) {
  for (const int threads : {1, 2, 3, 8})
    for (const int64_t count : {0, 1, 2, 7, 1000})
      EXPECT_EQ(run_counts(threads, count, [](int64_t, int) {}), std::vector<int>(static_cast<size_t>(count), 1))
          << threads << " " << count;
}

// Of a team of eight, two work: every item runs once, and no worker has a larger index.
TEST(ParallelFor, OnlyTheWorkersOfAWholeTeamWork) {
  Stream stream;
  stream.threads = 8;
  EXPECT_EQ(Threads(stream, 2).team, 2);
  stream.whole_team = true;
  const Threads threads(stream, 2);
  EXPECT_EQ(threads.team, 8);
  EXPECT_EQ(threads.working, 2);
  for (const int64_t count : {0, 1, 2, 7, 1000})
    EXPECT_EQ(run_counts(threads, count, [](int64_t, int) {}), std::vector<int>(static_cast<size_t>(count), 1)) << count;
}

// The caller's own loops have four threads. A loop with work for two must not end the others.
TEST(ParallelFor, AWholeTeamKeepsTheThreadsOfTheCaller) {
  const auto threads_of_caller = [] {
    std::set<std::thread::id> ids;
    std::mutex lock;
#pragma omp parallel num_threads(4)
    {
      const std::lock_guard<std::mutex> hold(lock);
      ids.insert(std::this_thread::get_id());
    }
    return ids;
  };
  Stream stream;
  stream.threads = 4;
  stream.whole_team = true;
  const std::set<std::thread::id> first = threads_of_caller();
  std::set<std::thread::id> all = first;
  for (int round = 0; round < 20; ++round) {
    run_counts(Threads(stream, 2), 6, [](int64_t, int) {});
    all.merge(threads_of_caller());
  }
  EXPECT_EQ(all, first);
}

// Two work items, each of which waits until the other has begun.
TEST(ParallelFor, ThreadsWorkSideBySide) {
  using std::chrono::steady_clock;
  while (ContentionBackoff::of_this_thread().serial()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::atomic<int> begun = 0, met = 0;
  parallel_for(2, 2, [&](int64_t, int) {
    ++begun;
    const auto begin = steady_clock::now();
    while (begun < 2 && steady_clock::now() - begin < std::chrono::minutes(2)) std::this_thread::yield();
    met += begun == 2;
  });
  EXPECT_EQ(met, 2);
}

TEST(ParallelFor, IsSerialForAWhileAfterALateThread) {
  using std::chrono::milliseconds;
  ContentionBackoff& backoff = ContentionBackoff::of_this_thread();
  while (backoff.serial()) std::this_thread::sleep_for(milliseconds(1));  // the backoff of the other test may still last
  // A sleeping thread looks like one that the scheduler keeps from running.
  const auto sleep = [](int64_t, int) { std::this_thread::sleep_for(milliseconds(50)); };
  bool serial_throughout = false;
  for (int round = 0; round < 20 && !serial_throughout;
       ++round) {  // again if the scheduler suspended this thread for longer than the backoff lasts
    EXPECT_EQ(run_counts(2, 2, sleep), std::vector<int>(2, 1));
    const bool serial = backoff.serial();
    std::atomic<int> others = 0;
    EXPECT_EQ(run_counts(2, 4, [&](int64_t, int worker) { others += worker != 0; }), std::vector<int>(4, 1));
    serial_throughout = serial && backoff.serial();
    if (serial_throughout) {
      EXPECT_EQ(others, 0);
    }
  }
  ASSERT_TRUE(serial_throughout);
  // A loop that outlasts the backoff is parallel from there on, and still runs every work item once.
  EXPECT_EQ(run_counts(2, 250, [](int64_t, int) { std::this_thread::sleep_for(milliseconds(5)); }), std::vector<int>(250, 1));
}

}  // namespace
}  // namespace weft::cpu
