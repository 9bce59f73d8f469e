// The loop over independent pieces of work: every piece once, on whichever thread, also after a thread came late.
#include "cpu/common/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace weft::cpu {
namespace {

// How often each piece was worked on by a worker that exists.
template <class F>
std::vector<int> turns(int threads, int64_t count, F&& during) {
  std::vector<std::atomic<int>> taken(static_cast<size_t>(count));
  parallel_for(threads, count, [&](int64_t i, int worker) {
    during(i, worker);
    if (worker >= 0 && worker < threads) ++taken[static_cast<size_t>(i)];
  });
  return {taken.begin(), taken.end()};
}

TEST(ParallelFor, TakesEveryPieceOnce) {
  for (const int threads : {1, 2, 3, 8})
    for (const int64_t count : {0, 1, 2, 7, 1000})
      EXPECT_EQ(turns(threads, count, [](int64_t, int) {}), std::vector<int>(static_cast<size_t>(count), 1))
          << threads << " " << count;
}

// Two pieces of which each waits for the other to have begun.
TEST(ParallelFor, ThreadsWorkSideBySide) {
  using std::chrono::steady_clock;
  while (Patience::of_this_thread().alone()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::atomic<int> begun = 0, met = 0;
  parallel_for(2, 2, [&](int64_t, int) {
    ++begun;
    const auto begin = steady_clock::now();
    while (begun < 2 && steady_clock::now() - begin < std::chrono::minutes(2)) std::this_thread::yield();
    met += begun == 2;
  });
  EXPECT_EQ(met, 2);
}

TEST(ParallelFor, WorksAloneAfterAThreadCameLateAndThenNoMore) {
  using std::chrono::milliseconds;
  Patience& patience = Patience::of_this_thread();
  while (patience.alone()) std::this_thread::sleep_for(milliseconds(1));  // after the other test
  // Sleeping is what a thread looks like that others keep from running.
  const auto sleep = [](int64_t, int) { std::this_thread::sleep_for(milliseconds(50)); };
  bool alone_throughout = false;
  for (int round = 0; round < 20 && !alone_throughout;
       ++round) {  // again where the machine kept this thread itself from running for longer than it works alone
    EXPECT_EQ(turns(2, 2, sleep), std::vector<int>(2, 1));
    const bool alone = patience.alone();
    std::atomic<int> others = 0;
    EXPECT_EQ(turns(2, 4, [&](int64_t, int worker) { others += worker != 0; }), std::vector<int>(4, 1));
    alone_throughout = alone && patience.alone();
    if (alone_throughout) {
      EXPECT_EQ(others, 0);
    }
  }
  ASSERT_TRUE(alone_throughout);
  // A loop that outlasts this is shared again from there on; every piece still has its one turn.
  EXPECT_EQ(turns(2, 250, [](int64_t, int) { std::this_thread::sleep_for(milliseconds(5)); }), std::vector<int>(250, 1));
}

}  // namespace
}  // namespace weft::cpu
