// Every op called from several host threads at the same time, each with memory of its own, is as right as alone.
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

// A few cases of every op, from the front of the table.
std::vector<Case> some_cases() {
  std::map<std::string, int> taken;
  std::vector<Case> some;
  for (const Case& row : all_cases())
    if (row.tier == Tier::fast && taken[row.op]++ < kCasesPerOp) some.push_back(row);
  return some;
}

TEST(Threads, OpsCalledAtTheSameTime) {
  const std::vector<Case> rows = some_cases();
  ASSERT_GE(rows.size(), op_names().size());
  std::vector<std::vector<std::string>> faults(kThreads);
  std::vector<int> passed(kThreads);
  std::vector<std::thread> threads;
  for (int id = 0; id < kThreads; ++id)
    threads.emplace_back([&, id] {
      // Each thread walks the rows from another place, so that different ops meet.
      for (size_t i = 0; i < rows.size(); ++i) {
        const Case& row = rows[(i + rows.size() * static_cast<size_t>(id) / kThreads) % rows.size()];
        Checker checker(build(row));
        for (const Backend backend : {Backend::reference, Backend::cpu}) {
          Stream stream{backend};
          stream.threads = 1 + id % 2;
          const Outcome outcome = checker.check(stream);
          if (outcome.verdict == Verdict::passed) ++passed[static_cast<size_t>(id)];
          if (outcome.verdict == Verdict::failed)
            faults[static_cast<size_t>(id)].push_back(row.op + " " + row.name + " on " + backend_name(backend) + ": " +
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
