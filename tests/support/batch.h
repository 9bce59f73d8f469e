// What the tests of batchers share: requests, answers that can be waited for, and the same text from a Generator alone.
#pragma once

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/golden_model.h"
#include "weft/batcher.h"

namespace weft::testing_support {

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

// Choice `choice` of a request, from a Generator. With a state, the sequence in it goes on.
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

}  // namespace weft::testing_support
