// Helpers for tests of batchers: requests, answers to wait for, and the same text from a Generator alone.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/golden_model.h"
#include "weft/batcher.h"

namespace weft::testing_support {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

inline const Model& tiny() { return one_golden_model(); }
inline const Model& bundled() {
  static const Model model = Model::load(shipped_model());
  return model;
}

// One thread: results do not depend on the number, and tests share their machine.
inline constexpr Stream kBatchStream{Backend::cpu, 0, nullptr, 1, Isa::best};

inline BatcherOptions small_batcher(const std::string& kv = "8v4", int64_t sequences = 4, int64_t capacity = 512) {
  BatcherOptions options;
  options.sequences = sequences;
  options.capacity = capacity;
  options.kv = kv;
  options.every = 128;
  options.store = 4 << 20;
  options.stream = kBatchStream;
  return options;
}

// Options of a batcher whose steps read 64 tokens of prompts, without a prefix store.
inline BatcherOptions patient_batcher(int64_t sequences, int64_t capacity) {
  BatcherOptions options = small_batcher("8v4", sequences, capacity);
  options.longest_step = milliseconds(1);
  options.store = 0;
  return options;
}

// Greedy, with log probabilities, so that texts that are equal by chance are told apart.
inline BatchRequest greedy_request(std::vector<int32_t> tokens, int64_t max_tokens) {
  BatchRequest request;
  request.tokens = std::move(tokens);
  request.options.max_tokens = max_tokens;
  request.options.sampling.temperature = 0;
  request.options.ignore_end_tokens = true;
  request.options.logprobs = 1;
  return request;
}

// What the callbacks of a request received. They run on the engine thread; result() waits for on_end.
class Answer {
 public:
  explicit Answer(int64_t choices = 1) : seen_(std::make_shared<Seen>()), future_(seen_->promise.get_future().share()) {
    seen_->tokens.resize(static_cast<size_t>(choices));
    seen_->ended.resize(static_cast<size_t>(choices));
  }
  BatchCallbacks callbacks() const {
    return {.on_token =
                [seen = seen_](int64_t choice, const GeneratedToken& next) {
                  EXPECT_FALSE(seen->over);
                  EXPECT_EQ(seen->ended[static_cast<size_t>(choice)], 0);
                  if (next.token) seen->tokens[static_cast<size_t>(choice)].push_back(*next.token);
                  return true;
                },
            .on_choice_end =
                [seen = seen_](int64_t choice, const Generation& written) {
                  EXPECT_FALSE(seen->over);
                  EXPECT_EQ(++seen->ended[static_cast<size_t>(choice)], 1);
                  EXPECT_EQ(written.tokens, seen->tokens[static_cast<size_t>(choice)]);
                },
            .on_end =
                [seen = seen_](const BatchResult& result) {
                  EXPECT_FALSE(seen->over);
                  seen->over = true;
                  seen->promise.set_value(result);
                }};
  }
  const BatchResult& result() const { return future_.get(); }
  bool over() const { return future_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }

 private:
  struct Seen {
    std::vector<std::vector<int32_t>> tokens;
    std::vector<int> ended;
    bool over = false;
    std::promise<BatchResult> promise;
  };
  std::shared_ptr<Seen> seen_;
  std::shared_future<BatchResult> future_;
};

inline Answer ask(Batcher& batcher, BatchRequest request) {
  Answer answer(request.choices);
  batcher.submit(std::move(request), answer.callbacks());
  return answer;
}

// Choice `choice` of a request, from a Generator. With a state, the sequence in the state continues.
inline Generation alone(const Model& model, const BatchRequest& request, const std::string& kv, int64_t capacity,
                        int64_t choice = 0, HybridState* state = nullptr) {
  HybridState own = model.create_state(kv, capacity);
  GenerateOptions options = request.options;
  options.sampling.seed += static_cast<uint64_t>(choice);
  std::vector<int32_t> tokens = request.tokens;
  return Generator(model, options, kBatchStream).run(state ? *state : own, tokens);
}

inline void expect_same(const Generation& got, const Generation& want, const std::string& what) {
  EXPECT_EQ(got.tokens, want.tokens) << what;
  EXPECT_EQ(got.text, want.text) << what;
  EXPECT_EQ(got.logprobs, want.logprobs) << what;
  EXPECT_EQ(got.stop, want.stop) << what;
  EXPECT_EQ(got.stop_index, want.stop_index) << what;
}

// Holds the engine thread in a callback until it is opened, so that tests decide what waits beside what.
class EngineGate {
 public:
  void open() { opened_.set_value(); }
  // A request that holds the engine at its first token, and then writes `tokens` more.
  Answer close(Batcher& batcher, int64_t tokens = 0) {
    Answer answer;
    BatchCallbacks callbacks = answer.callbacks();
    callbacks.on_token = [this, first = true, inner = callbacks.on_token](int64_t choice, const GeneratedToken& next) mutable {
      if (std::exchange(first, false)) {
        reached_.set_value();
        future_.wait();
      }
      return inner(choice, next);
    };
    BatchRequest request = greedy_request(some_ids(5), tokens + 1);
    request.client = "gate";
    batcher.submit(std::move(request), std::move(callbacks));
    reached_.get_future().wait();
    return answer;
  }

 private:
  std::promise<void> reached_, opened_;
  std::shared_future<void> future_ = opened_.get_future().share();
};

// Requests of all lengths, with shared beginnings, several choices, and samplers.
inline std::vector<BatchRequest> some_requests(size_t count, int64_t capacity, uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  std::vector<BatchRequest> requests;
  for (size_t i = 0; i < count; ++i) {
    const int64_t lengths[] = {1 + below(16), 17 + below(50), 64 * (1 + below(4)), 1 + below(capacity - 60), capacity - below(4)};
    std::vector<int32_t> tokens = some_ids(static_cast<size_t>(lengths[below(5)]), static_cast<size_t>(below(3)));
    if (below(2) == 0 && tokens.size() > 70) tokens[static_cast<size_t>(65 + below(5))] = 1;
    BatchRequest request = greedy_request(std::move(tokens), below(24));
    if (below(4) == 0) request.choices = 1 + below(3);
    if (below(4) == 0) {
      request.options.sampling.temperature = 0.9;
      request.options.sampling.seed = random();
      request.options.sampling.repetition_penalty = 1.2;
      request.options.ignore_end_tokens = false;
    }
    request.client = std::to_string(below(3));
    requests.push_back(std::move(request));
  }
  return requests;
}

inline void expect_alone(const Model& model, const BatchRequest& request, const BatchResult& result, const std::string& kv,
                         int64_t capacity, const std::string& what) {
  ASSERT_EQ(result.outcome, BatchOutcome::finished) << what << result.status.message;
  ASSERT_EQ(static_cast<int64_t>(result.choices.size()), request.choices);
  for (int64_t i = 0; i < request.choices; ++i)
    expect_same(result.choices[static_cast<size_t>(i)], alone(model, request, kv, capacity, i),
                what + ", choice " + std::to_string(i) + " of a prompt of " + std::to_string(request.tokens.size()));
  EXPECT_EQ(result.prompt_tokens, static_cast<int64_t>(request.tokens.size()));
}

}  // namespace weft::testing_support
