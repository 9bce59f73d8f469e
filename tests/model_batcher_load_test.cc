// A batcher under load: the budget of memory, thousands of requests, many threads.
#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <random>
#include <thread>

#include "model/batch/budget.h"
#include "model/parts.h"
#include "tests/support/batch.h"
#include "tests/support/complaint.h"

namespace {

using namespace weft;
using namespace weft::testing_support;

// mallinfo2() counts one arena: all threads share it. Set before any thread starts.
[[maybe_unused]] const int kOneArena = ::mallopt(M_ARENA_MAX, 1);

// ---- memory

TEST(BatcherMemory, TheBudgetHolds) {
  BatcherOptions options = small_batcher("8v4", 4, 512);
  const model::Budget all = model::plan_budget(tiny(), options);
  EXPECT_EQ(all.kept, 4);
  EXPECT_EQ(all.pages, 4 * 8);
  options.memory = all.bytes;
  EXPECT_EQ(model::plan_budget(tiny(), options).pages, all.pages);
  options.memory = 1;
  const std::string said = complaint([&] { Batcher(tiny(), options); });
  EXPECT_EQ(said.rfind("batcher: memory is 1 bytes, wanted at least ", 0), 0u) << said;
  const int64_t least = std::stoll(said.substr(std::string("batcher: memory is 1 bytes, wanted at least ").size()));
  options.memory = least - 1;
  EXPECT_NE(complaint([&] { Batcher(tiny(), options); }), "none");
  options.memory = least;
  Batcher batcher(tiny(), options);
  EXPECT_EQ(batcher.stats().budget, least);
  // One sequence of full length fits at a time; all finish.
  std::vector<Answer> answers;
  for (int i = 0; i < 6; ++i) {
    BatchRequest request = greedy_request(some_ids(300, static_cast<size_t>(i)), 100);
    request.session = std::to_string(i);
    answers.push_back(ask(batcher, request));
  }
  for (const Answer& answer : answers) EXPECT_EQ(answer.result().outcome, BatchOutcome::finished);
  BatchRequest choices = greedy_request(some_ids(300), 100);
  choices.choices = 3;
  EXPECT_EQ(batcher.check(choices).message,
            "batcher: choices need 13 KV pages of 64 tokens, wanted at most 8 (BatcherOptions::memory)");
  const BatcherStats stats = batcher.stats();
  EXPECT_LE(stats.state.total() + stats.session_states + stats.store.bytes + stats.scratch, stats.budget);
  EXPECT_EQ(stats.sessions, 1);
}

// The scratch that the plan counts is what steps take, in steps that read and decode at once.
TEST(BatcherMemory, ScratchIsCounted) {
  const Model model = Model::load(golden_models() / "qwen3_5");
  BatcherOptions options = small_batcher("8v4", 6, 2048);
  const model::Budget budget = model::plan_budget(model, options);
  {
    Batcher batcher(model, options);
    std::vector<Answer> answers;
    for (size_t i = 0; i < 12; ++i) answers.push_back(ask(batcher, greedy_request(some_ids(40 + 150 * i, i), 30)));
    for (const Answer& answer : answers) answer.result();
  }
  int64_t taken = 0;
  for (const auto& runner : model::parts_of(model).idle) taken += runner->memory.bytes();
  EXPECT_GT(taken, 0);
  EXPECT_LE(taken, model.bytes(options.stream, budget.plan, options.capacity).scratch);
  EXPECT_LT(taken, budget.scratch);
}

TEST(BatcherMemory, ThousandsOfRequestsLeaveNothing) {
  BatcherOptions options = small_batcher("8v4", 8, 128);
  options.store = 0;
  Batcher batcher(tiny(), options);
  const auto thousand = [&] {
    std::vector<Answer> answers;
    for (size_t i = 0; i < 1000; ++i) {
      BatchRequest request = greedy_request(some_ids(1 + i % 20, i), static_cast<int64_t>(i % 4));
      request.session = i % 5 == 0 ? std::to_string(i) : "";
      request.client = std::to_string(i);
      while (batcher.stats().waiting >= options.queue) std::this_thread::yield();
      answers.push_back(ask(batcher, std::move(request)));
    }
    for (const Answer& answer : answers) EXPECT_EQ(answer.result().outcome, BatchOutcome::finished);
  };
  thousand();
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  const auto before = ::mallinfo2().uordblks;
  for (int i = 0; i < 3; ++i) thousand();
  EXPECT_LT(::mallinfo2().uordblks, before + (64 << 10)) << "3000 requests later";
#endif
  EXPECT_LE(batcher.stats().sessions, 8);
}

// ---- threads

// With this many sequences, several threads choose the tokens.
TEST(BatcherThreads, TokensAreChosenInParallel) {
  BatcherOptions options = small_batcher("8v4", 40, 64);
  options.stream.threads = 2;
  Batcher batcher(bundled(), options);
  EngineGate gate;
  const Answer gated = gate.close(batcher);
  std::vector<BatchRequest> requests;
  std::vector<Answer> answers;
  for (size_t i = 0; i < 39; ++i) {
    requests.push_back(greedy_request(some_ids(5 + i % 3, i), 5));
    requests.back().options.sampling = {.temperature = 0.7, .seed = i};
    answers.push_back(ask(batcher, requests.back()));
  }
  gate.open();
  for (size_t i = 0; i < answers.size(); ++i)
    expect_alone(bundled(), requests[i], answers[i].result(), "8v4", 64, std::to_string(i));
  EXPECT_LT(batcher.stats().steps, 15) << "they ran together";
}

// Callers submit, cancel, read statistics and drop sessions from several threads; every request that finishes has the right text.
TEST(BatcherThreads, Stress) {
  constexpr int kThreads = 4, kRequests = 40;
  constexpr int64_t kCapacity = 256;
  BatcherOptions options = small_batcher("8v4", 5, kCapacity);
  options.queue = 1000;
  options.longest_step = milliseconds(2);
  const std::vector<BatchRequest> kinds = some_requests(12, kCapacity, 3);
  std::vector<std::vector<Generation>> want;
  for (const BatchRequest& request : kinds) {
    want.emplace_back();
    for (int64_t i = 0; i < request.choices; ++i) want.back().push_back(alone(tiny(), request, "8v4", kCapacity, i));
  }
  Batcher batcher(tiny(), options);
  std::atomic<int> finished = 0, cancelled = 0;
  std::vector<std::thread> threads;
  for (int id = 0; id < kThreads; ++id)
    threads.emplace_back([&, id] {
      std::mt19937_64 random(static_cast<uint64_t>(id));
      std::vector<std::pair<size_t, Answer>> answers;
      for (int i = 0; i < kRequests; ++i) {
        const size_t kind = random() % kinds.size();
        BatchRequest request = kinds[kind];
        request.client = std::to_string(random() % 4);
        if (random() % 5 == 0) request.deadline = steady_clock::now() + milliseconds(random() % 20);
        Answer answer(request.choices);
        const Batcher::Ticket ticket = batcher.submit(std::move(request), answer.callbacks());
        answers.emplace_back(kind, answer);
        if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
        if (random() % 4 == 0) batcher.cancel(ticket - random() % 3);
        if (random() % 4 == 0) {
          BatchRequest turn = greedy_request(some_ids(1 + random() % 90), 5);
          turn.session = std::to_string(random() % 3);
          batcher.submit(std::move(turn), {});
        }
        if (random() % 8 == 0) batcher.drop_session(std::to_string(random() % 3));
        const BatcherStats stats = batcher.stats();
        EXPECT_LE(stats.running, 5);
        EXPECT_LE(stats.cancelled + stats.finished + stats.failed, stats.requests);
      }
      for (const auto& [kind, answer] : answers) {
        const BatchResult& result = answer.result();
        if (result.outcome != BatchOutcome::finished) {
          EXPECT_TRUE(result.outcome == BatchOutcome::cancelled || result.outcome == BatchOutcome::deadline)
              << result.status.message;
          ++cancelled;
          continue;
        }
        ++finished;
        for (size_t c = 0; c < result.choices.size(); ++c) expect_same(result.choices[c], want[kind][c], std::to_string(kind));
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(finished, 0);
  EXPECT_EQ(batcher.drain(steady_clock::now() + seconds(100)), std::vector<std::string>());
  const BatcherStats stats = batcher.stats();
  EXPECT_EQ(stats.requests, stats.finished + stats.cancelled + stats.failed);
  EXPECT_EQ(stats.failed, 0);
  EXPECT_EQ(stats.running + stats.waiting + stats.sessions, 0);
  EXPECT_EQ(stats.kv_used, 0);
}

// A batcher ends while callers still submit.
TEST(BatcherThreads, StopWhileOthersSubmit) {
  for (int round = 0; round < 5; ++round) {
    Batcher batcher(tiny(), small_batcher());
    std::vector<std::thread> threads;
    std::atomic<int> taken = 0, ended = 0;
    for (int id = 0; id < 3; ++id)
      threads.emplace_back([&] {
        for (;;) try {
            batcher.submit(greedy_request(some_ids(30), 10),
                           {.on_token = {}, .on_choice_end = {}, .on_end = [&](const BatchResult&) { ++ended; }});
            ++taken;
          } catch (const Error& error) {
            if (error.status().argument == "batcher") return;
            std::this_thread::yield();
          }
      });
    std::this_thread::sleep_for(milliseconds(10 * round));
    if (round % 2 == 0)
      batcher.stop();
    else
      batcher.drain(steady_clock::now() + milliseconds(5));
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(taken, ended);
  }
}

}  // namespace
