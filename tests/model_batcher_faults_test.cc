// Every allocation of a batcher's engine fails in turn: the requests concerned fail with a sentence, and the batcher continues.
#include <gtest/gtest.h>

#include <utility>

#include "tests/support/batch.h"
#include "tests/support/failing_allocation.h"

namespace {

using namespace weft;
using namespace weft::testing_support;

// As ask(), but no allocation fails in on_end, which copies the result for the test.
Answer ask_safely(Batcher& batcher, BatchRequest request) {
  Answer answer(request.choices);
  BatchCallbacks callbacks = answer.callbacks();
  callbacks.on_end = [inner = callbacks.on_end](const BatchResult& result) {
    const int64_t left = std::exchange(allocation_faults.left, -1);
    inner(result);
    allocation_faults.left = left;
  };
  batcher.submit(std::move(request), std::move(callbacks));
  return answer;
}

// Requests of several kinds run beside one another when the k-th allocation, and perhaps more after it, fails.
TEST(BatcherFaults, EveryAllocationFails) {
  const Model& model = one_golden_model();
  BatcherOptions options = small_batcher("8v4", 5, 256);
  options.every = 64;
  std::vector<BatchRequest> kinds = {greedy_request(some_ids(150), 6), greedy_request(some_ids(90, 1), 5),
                                     greedy_request(some_ids(10, 2), 7), greedy_request(some_ids(70), 3)};
  kinds[1].choices = 2;
  kinds[2].session = "s";
  kinds[3].session = "t";
  std::vector<std::vector<Generation>> want;
  for (const BatchRequest& request : kinds) {
    want.emplace_back();
    for (int64_t i = 0; i < request.choices; ++i) want.back().push_back(alone(model, request, "8v4", 256, i));
  }
  Batcher batcher(model, options);
  int64_t failed = 0, all = 0;
  for (const int64_t in_a_row : {1, 3, 40})
    for (int64_t k = 0;; k += in_a_row == 1 ? 1 : 7) {
      int64_t left = 0;  // failures that did not happen
      Answer trigger;
      BatchCallbacks callbacks;
      callbacks.on_token = [&, first = true](int64_t, const GeneratedToken&) mutable {
        if (std::exchange(first, false)) {
          allocation_faults = {k, in_a_row};
        }
        return true;
      };
      callbacks.on_end = [&, inner = trigger.callbacks().on_end](const BatchResult& result) {
        left = std::exchange(allocation_faults, {}).in_a_row;
        inner(result);
      };
      std::vector<Answer> answers;
      answers.push_back(ask_safely(batcher, kinds[0]));
      batcher.submit(greedy_request(some_ids(5), 12), callbacks);
      for (size_t i = 1; i < kinds.size(); ++i) answers.push_back(ask_safely(batcher, kinds[i]));
      const BatchResult& triggered = trigger.result();
      EXPECT_TRUE(triggered.outcome == BatchOutcome::finished || !triggered.status.message.empty());
      for (size_t i = 0; i < kinds.size(); ++i) {
        const BatchResult& result = answers[i].result();
        ++all;
        if (result.outcome == BatchOutcome::failed) {
          ++failed;
          EXPECT_FALSE(result.status.ok());
          EXPECT_TRUE(result.status.message.find("memory") != std::string::npos || in_a_row > 1) << result.status.message;
          continue;
        }
        ASSERT_EQ(result.outcome, BatchOutcome::finished);
        for (size_t c = 0; c < want[i].size(); ++c)
          expect_same(result.choices[c], want[i][c], "k " + std::to_string(k) + ", kind " + std::to_string(i));
      }
      // Another request, once allocations succeed again.
      const BatchResult after = ask_safely(batcher, kinds[0]).result();
      ASSERT_EQ(after.outcome, BatchOutcome::finished) << after.status.message;
      expect_same(after.choices[0], want[0][0], "after");
      for (const char* session : {"s", "t"}) batcher.drop_session(session);
      if (left == in_a_row) break;  // fewer allocations than k
      ASSERT_LT(k, 100000);
    }
  EXPECT_GT(failed, 0);
  EXPECT_LT(failed, all) << "not every fault concerns every request";
  batcher.stop();
  EXPECT_EQ(batcher.stats().kv_used, 0);
}

}  // namespace
