// Every op gives the right results when several host threads call ops at the same time, each with memory of its own.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <thread>
#include <vector>

#include "cases/verify.h"

namespace weft::cases {
namespace {

constexpr int kThreads = 4;
constexpr int kCasesPerOp = 3;

// The first few cases of every op in the table.
std::vector<Case> some_cases() {
  std::map<std::string, int> taken;
  std::vector<Case> some;
  for (const Case& item : all_cases())
    if (item.tier == Tier::fast && taken[item.op]++ < kCasesPerOp) some.push_back(item);
  return some;
}

TEST(Threads, OpsCalledAtTheSameTime) {
  const std::vector<Case> items = some_cases();
  ASSERT_GE(items.size(), op_names().size());
  std::vector<std::vector<std::string>> faults(kThreads);
  std::vector<int> passed(kThreads);
  std::vector<std::thread> threads;
  for (int id = 0; id < kThreads; ++id)
    threads.emplace_back([&, id] {
      // Each thread starts at another case, so that different ops run at the same time.
      for (size_t i = 0; i < items.size(); ++i) {
        const Case& item = items[(i + items.size() * static_cast<size_t>(id) / kThreads) % items.size()];
        Checker checker(build(item));
        for (const Backend backend : {Backend::reference, Backend::cpu}) {
          Stream stream{backend};
          stream.threads = 1 + id % 2;
          const Outcome outcome = checker.check(stream);
          if (outcome.verdict == Verdict::passed) ++passed[static_cast<size_t>(id)];
          if (outcome.verdict == Verdict::failed)
            faults[static_cast<size_t>(id)].push_back(item.op + " " + item.name + " on " + backend_name(backend) + ": " +
                                                      outcome.why);
        }
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (int id = 0; id < kThreads; ++id) {
    for (const std::string& fault : faults[static_cast<size_t>(id)]) ADD_FAILURE() << fault;
    EXPECT_GE(passed[static_cast<size_t>(id)], static_cast<int>(op_names().size()));
  }
}

}  // namespace
}  // namespace weft::cases
