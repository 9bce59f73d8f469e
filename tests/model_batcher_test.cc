// Continuous batching: every request gets the text of a Generator alone, whatever runs beside it; choices and sessions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <thread>

#include "tests/support/batch.h"
#include "tests/support/complaint.h"

namespace {

using namespace weft;
using namespace weft::testing_support;

// ---- texts

class EveryKv : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Batcher, EveryKv, testing::Values("f32", "f16", "8v4"));

// Requests join and leave at random, neighbours are cancelled, prompts come in small and in large pieces, and hit the store.
TEST_P(EveryKv, TextsAreThoseOfAGeneratorAlone) {
  constexpr int64_t kCapacity = 320;
  for (const auto longest : {milliseconds(1), milliseconds(10000)}) {
    BatcherOptions options = small_batcher(GetParam(), 5, kCapacity);
    options.longest_step = longest;
    Batcher batcher(tiny(), options);
    std::mt19937_64 random(7);
    const std::vector<BatchRequest> requests = some_requests(40, kCapacity, 11);
    std::vector<Answer> answers;
    std::vector<Batcher::Ticket> neighbours;
    for (const BatchRequest& request : requests) {
      answers.push_back(ask(batcher, request));
      if (random() % 2 == 0) {
        Answer cancelled;
        neighbours.push_back(batcher.submit(greedy_request(some_ids(1 + random() % 300, random() % 3), 40), cancelled.callbacks()));
      }
      if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
      if (!neighbours.empty() && random() % 2 == 0) {
        batcher.cancel(neighbours.back());
        neighbours.pop_back();
      }
      while (batcher.stats().waiting > 50) std::this_thread::yield();
    }
    for (size_t i = 0; i < requests.size(); ++i)
      expect_alone(tiny(), requests[i], answers[i].result(), GetParam(), kCapacity, "request " + std::to_string(i));
    batcher.stop();
    const BatcherStats stats = batcher.stats();
    EXPECT_GT(stats.store.hits, 0);
    EXPECT_GT(stats.cached_tokens, 0);
    EXPECT_EQ(stats.cached_tokens % 64, 0) << "checkpoints at multiples of 64 only";
    EXPECT_EQ(stats.running, 0);
    EXPECT_EQ(stats.kv_used, 0) << "all pages are free";
  }
}

// The other families, mixture of experts among them.
TEST(Batcher, TextsOfOtherModels) {
  for (const char* name : {"qwen3_next", "qwen3_5_moe"}) {
    const Model model = Model::load(golden_models() / name);
    BatcherOptions options = small_batcher("8v4", 4, 256);
    options.longest_step = milliseconds(1);
    Batcher batcher(model, options);
    std::vector<BatchRequest> requests = some_requests(12, 256, 5);
    std::vector<Answer> answers;
    for (BatchRequest& request : requests) {
      for (int32_t& token : request.tokens) token %= static_cast<int32_t>(model.vocab_size());
      answers.push_back(ask(batcher, request));
    }
    for (size_t i = 0; i < requests.size(); ++i)
      expect_alone(model, requests[i], answers[i].result(), "8v4", 256, name + std::to_string(i));
  }
}

TEST(Batcher, TextsOfTheBundledModel) {
  BatcherOptions options = small_batcher("8v4", 3, 600);
  Batcher batcher(bundled(), options);
  std::vector<BatchRequest> requests;
  std::string story = "It was a dark night, and the old house";
  for (int i = 0; i < 6; ++i) {
    BatchRequest request = greedy_request(bundled().encode(story), 24);
    request.options.logprobs = 3;
    request.options.stop_strings = {"never this", "\n\n"};
    if (i == 3) request.options.sentence_after = 5;
    if (i == 4) request.choices = 3;
    if (i == 4) request.options.sampling = {.temperature = 0.8, .seed = 3};
    requests.push_back(request);
    story += story.substr(0, 150) + " stood at the end of the lane";
  }
  std::vector<Answer> answers;
  for (const BatchRequest& request : requests) answers.push_back(ask(batcher, request));
  for (size_t i = 0; i < requests.size(); ++i) {
    expect_alone(bundled(), requests[i], answers[i].result(), "8v4", 600, std::to_string(i));
    EXPECT_FALSE(answers[i].result().choices[0].text.empty());
  }
  const auto& choices = answers[4].result().choices;
  EXPECT_NE(choices[0].tokens, choices[1].tokens) << "choices have seeds of their own";
}

TEST(Batcher, APromptIsReadOnceForAllChoices) {
  Batcher batcher(tiny(), small_batcher());
  BatchRequest request = greedy_request(some_ids(200), 8);
  request.choices = 4;
  const BatchResult first = ask(batcher, request).result();
  EXPECT_EQ(first.cached_tokens, 0);
  EXPECT_EQ(batcher.stats().prompt_tokens, 200);
  for (const Generation& choice : first.choices) EXPECT_EQ(choice.tokens, first.choices[0].tokens);
  const BatchResult second = ask(batcher, request).result();
  EXPECT_EQ(second.cached_tokens, 192) << "the last multiple of 64 of the prompt";
  EXPECT_EQ(second.choices[0].logprobs, first.choices[0].logprobs);
  request.tokens.resize(150);
  EXPECT_EQ(ask(batcher, request).result().cached_tokens, 128) << "`every`";
  request.tokens = some_ids(128);
  EXPECT_EQ(ask(batcher, request).result().cached_tokens, 0) << "one token must be left";
  EXPECT_EQ(ask(batcher, request).result().cached_tokens, 64);
}

TEST(Batcher, WithoutAStore) {
  BatcherOptions options = small_batcher();
  options.store = 0;
  Batcher batcher(tiny(), options);
  const BatchRequest request = greedy_request(some_ids(200), 8);
  for (int i = 0; i < 2; ++i) {
    const BatchResult result = ask(batcher, request).result();
    EXPECT_EQ(result.cached_tokens, 0);
    expect_alone(tiny(), request, result, "8v4", 512, "");
  }
}

TEST(Batcher, MaxTokensZeroReadsThePrompt) {
  Batcher batcher(tiny(), small_batcher());
  BatchRequest request = greedy_request(some_ids(100), 0);
  request.choices = 2;
  const Answer answer = ask(batcher, request);
  EXPECT_EQ(answer.result().outcome, BatchOutcome::finished);
  EXPECT_EQ(answer.result().choices[1].stop, StopReason::length);
  EXPECT_TRUE(answer.result().choices[1].tokens.empty());
  EXPECT_GT(answer.result().first_token_seconds, 0);
}

// ---- sessions

// Turns of one conversation beside other requests; a Generator keeps its state between the same turns.
TEST_P(EveryKv, ASessionReadsOnlyWhatIsNew) {
  const std::string kv = GetParam();
  Batcher batcher(tiny(), small_batcher(kv));
  HybridState state = tiny().create_state(kv, 512);
  std::vector<int32_t> tokens = some_ids(100);
  for (const size_t more : {5, 17, 90, 1, 130}) {
    BatchRequest request = greedy_request(tokens, 11);
    request.session = "s";
    const Answer beside = ask(batcher, greedy_request(some_ids(150, more), 20));
    const int64_t held = state.tokens(0);
    const BatchResult result = ask(batcher, request).result();
    expect_same(result.choices[0], alone(tiny(), request, kv, 512, 0, &state), std::to_string(more));
    EXPECT_EQ(result.cached_tokens, held);
    beside.result();
    tokens.insert(tokens.end(), result.choices[0].tokens.begin(), result.choices[0].tokens.end());
    const std::vector<int32_t> question = some_ids(more, 50);
    tokens.insert(tokens.end(), question.begin(), question.end());
  }
  const BatcherStats stats = batcher.stats();
  EXPECT_EQ(stats.sessions, 1);
  EXPECT_EQ(stats.resumed_sessions, 4);
  EXPECT_GT(stats.kv_used, 0);
  // Decoded memory must not reach the store: a request of the same tokens outside of the session reads them as a prompt.
  const BatchRequest same = greedy_request(tokens, 6);
  expect_alone(tiny(), same, ask(batcher, same).result(), kv, 512, "outside");
}

TEST(BatcherSessions, OtherTokensAreReadFromTheStart) {
  Batcher batcher(tiny(), small_batcher());
  BatchRequest request = greedy_request(some_ids(30), 5);
  request.session = "s";
  ask(batcher, request).result();
  EXPECT_EQ(ask(batcher, request).result().cached_tokens, 0) << "the session holds more than the prompt";
  request.tokens = some_ids(60, 1);
  const BatchResult other = ask(batcher, request).result();
  EXPECT_EQ(other.cached_tokens, 0);
  expect_alone(tiny(), request, other, "8v4", 512, "");
  EXPECT_EQ(batcher.stats().sessions, 1);
}

TEST(BatcherSessions, RequestsOfASessionRunInOrder) {
  Batcher batcher(tiny(), small_batcher());
  EngineGate gate;
  const Answer gated = gate.close(batcher);
  std::vector<Answer> answers;
  std::vector<int32_t> tokens = some_ids(20);
  for (int i = 0; i < 3; ++i) {
    BatchRequest request = greedy_request(tokens, 1);
    request.session = "s";
    answers.push_back(ask(batcher, request));
    tokens.push_back(5);
  }
  gate.open();
  EXPECT_EQ(answers[0].result().cached_tokens, 0);
  EXPECT_EQ(answers[1].result().cached_tokens, 20);
  EXPECT_EQ(answers[2].result().cached_tokens, 21);
}

TEST(BatcherSessions, CancelledTurnsKeepWhatTheyRead) {
  Batcher batcher(tiny(), small_batcher());
  BatchRequest request = greedy_request(some_ids(40), 400);
  request.session = "s";
  Answer answer;
  BatchCallbacks callbacks = answer.callbacks();
  std::promise<void> wrote;
  callbacks.on_token = [&, n = 0](int64_t, const GeneratedToken&) mutable {
    if (++n == 3) wrote.set_value();
    return true;
  };
  callbacks.on_choice_end = {};
  const Batcher::Ticket ticket = batcher.submit(request, callbacks);
  wrote.get_future().wait();
  batcher.cancel(ticket);
  const BatchResult& cut = answer.result();
  EXPECT_EQ(cut.outcome, BatchOutcome::cancelled);
  std::vector<int32_t> kept = request.tokens;
  kept.insert(kept.end(), cut.choices[0].tokens.begin(), cut.choices[0].tokens.end() - 1);
  EXPECT_EQ(cut.kept, kept);
  request.tokens.insert(request.tokens.end(), cut.choices[0].tokens.begin(), cut.choices[0].tokens.end());
  request.options.max_tokens = 5;
  const BatchResult more = ask(batcher, request).result();
  EXPECT_EQ(more.cached_tokens, static_cast<int64_t>(request.tokens.size()) - 1);
  GenerateOptions whole = request.options;
  whole.max_tokens = static_cast<int64_t>(cut.choices[0].tokens.size()) + 5;
  BatchRequest from_start = greedy_request(some_ids(40), whole.max_tokens);
  const Generation want = alone(tiny(), from_start, "8v4", 512);
  EXPECT_EQ(more.choices[0].tokens, std::vector<int32_t>(want.tokens.end() - 5, want.tokens.end()));
}

// However a turn ends, the result names the tokens that the next turn continues.
TEST(BatcherSessions, ResultsNameWhatIsKept) {
  Batcher batcher(bundled(), small_batcher());
  BatchRequest request = greedy_request(bundled().encode("It was a dark night, and the old house"), 24);
  const BatchResult whole = ask(batcher, request).result();
  EXPECT_TRUE(whole.kept.empty()) << "no session";
  const auto& tokens = whole.choices[0].tokens;
  request.session = "s";
  // A stop string that begins in the fifth token and ends in the sixth.
  const std::string fifth = bundled().decode({&tokens[4], 1}), sixth = bundled().decode({&tokens[5], 1});
  request.options.stop_strings = {fifth.substr(fifth.size() - 1) + sixth};
  const BatchResult cut = ask(batcher, request).result();
  ASSERT_EQ(cut.choices[0].stop, StopReason::stop_string);
  std::vector<int32_t> want = request.tokens;
  want.insert(want.end(), tokens.begin(), tokens.begin() + 5);
  EXPECT_EQ(cut.kept, want);
  EXPECT_GT(bundled().decode(cut.kept).size(), bundled().decode(request.tokens).size() + cut.choices[0].text.size())
      << "the memory holds more than the text";
  request.options.stop_strings.clear();
  request.tokens = cut.kept;
  request.tokens.push_back(7);
  const BatchResult next = ask(batcher, request).result();
  EXPECT_EQ(next.cached_tokens, static_cast<int64_t>(cut.kept.size()));
  // The deadline passes in a callback.
  request.tokens = next.kept;
  request.tokens.push_back(7);
  request.deadline = steady_clock::now() + seconds(1);
  Answer late;
  BatchCallbacks callbacks = late.callbacks();
  callbacks.on_token = [&](int64_t, const GeneratedToken&) {
    std::this_thread::sleep_until(*request.deadline);
    return true;
  };
  callbacks.on_choice_end = {};
  batcher.submit(request, callbacks);
  ASSERT_EQ(late.result().outcome, BatchOutcome::deadline);
  request.deadline.reset();
  request.tokens = late.result().kept;
  request.tokens.push_back(7);
  EXPECT_EQ(ask(batcher, request).result().cached_tokens, static_cast<int64_t>(late.result().kept.size()));
  batcher.drop_session("s");
}

// A turn of three tokens in a session.
BatchOutcome take_turn(Batcher& batcher, const std::string& session) {
  BatchRequest request = greedy_request(some_ids(130), 3);
  request.session = session;
  return ask(batcher, request).result().outcome;
}

TEST(BatcherSessions, AreDroppedForMemoryAndByName) {
  Batcher batcher(tiny(), small_batcher("8v4", 2, 256));
  for (const char* session : {"a", "b", "c"}) EXPECT_EQ(take_turn(batcher, session), BatchOutcome::finished);
  EXPECT_EQ(batcher.stats().sessions, 2) << "as many as running sequences";
  EXPECT_EQ(batcher.stats().dropped_sessions, 1);
  batcher.drop_session("b");
  batcher.drop_session("unknown");
  EXPECT_EQ(take_turn(batcher, "d"), BatchOutcome::finished);
  EXPECT_EQ(batcher.stats().sessions, 2) << "c and d";
  EXPECT_EQ(batcher.stats().dropped_sessions, 1);
  // A request that wants the pages of all sequences.
  BatchRequest large = greedy_request(some_ids(200), 100);
  large.choices = 2;
  EXPECT_EQ(ask(batcher, large).result().outcome, BatchOutcome::finished);
  EXPECT_LT(batcher.stats().sessions, 2);
}

// Two requests continue the same conversation. Each has the bits that it has alone, and prefills its new tokens only.
TEST(BatcherSessions, AreForked) {
  BatcherOptions options = small_batcher();
  options.store = 0;
  Batcher batcher(tiny(), options);
  BatchRequest first = greedy_request(some_ids(90), 9);
  HybridState state = tiny().create_state("8v4", 512);
  const Generation written = alone(tiny(), first, "8v4", 512, 0, &state);
  first.session = "a";
  ask(batcher, first).result();
  BatchRequest fork = greedy_request(first.tokens, 12);
  fork.tokens.insert(fork.tokens.end(), written.tokens.begin(), written.tokens.end());
  BatchRequest other = fork;
  fork.tokens.push_back(7);
  other.tokens.push_back(8);
  HybridState copy = tiny().create_state("8v4", 512);
  alone(tiny(), first, "8v4", 512, 0, &copy);
  const Generation want = alone(tiny(), fork, "8v4", 512, 0, &state), want_other = alone(tiny(), other, "8v4", 512, 0, &copy);
  fork.parent = "a";
  fork.session = "b";
  const Answer forked = ask(batcher, fork);
  EXPECT_EQ(forked.result().cached_tokens, 98);
  expect_same(forked.result().choices[0], want, "the fork");
  EXPECT_EQ(batcher.stats().sessions, 2);
  other.session = "a";
  EXPECT_EQ(ask(batcher, other).result().cached_tokens, 98) << "the parent has its memory";
  // The session's own state takes precedence. A parent of other tokens does not matter, and keeps its state.
  fork.tokens = forked.result().kept;
  fork.tokens.push_back(9);
  EXPECT_EQ(ask(batcher, fork).result().cached_tokens, static_cast<int64_t>(forked.result().kept.size()));
  BatchRequest elsewhere = greedy_request(some_ids(70, 1), 3);
  elsewhere.parent = "a";
  EXPECT_EQ(ask(batcher, elsewhere).result().cached_tokens, 0);
  other.session.clear();
  other.parent = "a";
  other.tokens.push_back(3);
  other.tokens[0] ^= 1;
  EXPECT_EQ(ask(batcher, other).result().cached_tokens, 0);
  EXPECT_EQ(batcher.stats().sessions, 2);
  fork.parent = fork.session;
  EXPECT_EQ(batcher.check(fork).argument, "parent");
}

// If a fork needs the pages of its parent, the parent is dropped, and the fork prefills its whole prompt.
TEST(BatcherSessions, AForkThatNeedsAllPagesDropsItsParent) {
  BatcherOptions options = small_batcher("8v4", 1, 256);
  options.store = 0;
  Batcher batcher(tiny(), options);
  BatchRequest request = greedy_request(some_ids(130), 3);
  request.session = "a";
  const Answer first = ask(batcher, request);
  request.tokens = first.result().kept;
  request.tokens.push_back(7);
  request.options.max_tokens = 100;
  request.parent = "a";
  request.session = "b";
  const Answer fork = ask(batcher, request);
  EXPECT_EQ(fork.result().outcome, BatchOutcome::finished);
  EXPECT_EQ(fork.result().cached_tokens, 0);
}

TEST(BatcherSessions, DropsSayWhatWasThere) {
  Batcher batcher(tiny(), small_batcher());
  const auto drop = [&](const std::string& session) {
    std::promise<bool> known;
    batcher.drop_session(session, [&](bool was) { known.set_value(was); });
    return known.get_future().get();
  };
  EXPECT_FALSE(drop("a"));
  take_turn(batcher, "a");
  EXPECT_TRUE(drop("a"));
  EXPECT_FALSE(drop("a"));
  BatchRequest request = greedy_request(some_ids(9), 400);
  request.session = "b";
  const Answer running = ask(batcher, request);
  while (batcher.stats().running == 0) std::this_thread::yield();
  EXPECT_TRUE(drop("b")) << "a request runs in it";
  EXPECT_TRUE(running.result().kept.empty());
  batcher.stop();
  EXPECT_FALSE(drop("c")) << "the batcher has ended";
}

TEST(Batcher, LogprobsOfThePrompt) {
  BatcherOptions options = small_batcher("8v4", 4, 512);
  Batcher batcher(tiny(), options);
  std::vector<Answer> answers, neighbours;
  std::vector<BatchRequest> requests;
  for (const size_t tokens : {size_t{1}, size_t{2}, size_t{16}, size_t{64}, size_t{65}, size_t{200}})
    for (const int64_t written : {0, 3}) {
      BatchRequest request = greedy_request(some_ids(tokens, 3), written);
      request.options.logprobs = 2;
      request.prompt_logprobs = true;
      request.choices = written > 0 ? 2 : 1;
      requests.push_back(request);
      neighbours.push_back(ask(batcher, greedy_request(some_ids(150, 3), 5)));  // gives the store a checkpoint of this prompt
      answers.push_back(ask(batcher, request));
    }
  const int64_t vocab = tiny().vocab_size();
  for (size_t i = 0; i < requests.size(); ++i) {
    const BatchRequest& request = requests[i];
    const size_t count = request.tokens.size();
    const BatchResult& result = answers[i].result();
    expect_alone(tiny(), request, result, "8v4", 512, "prompt of " + std::to_string(count));
    EXPECT_EQ(result.cached_tokens, 0);
    ASSERT_EQ(result.prompt_logprobs.size(), count - 1);
    ASSERT_EQ(result.prompt_top.size(), count - 1);
    HybridState state = tiny().create_state("8v4", 512);
    std::vector<float> logits(count * static_cast<size_t>(vocab));
    tiny().append(kBatchStream, state, {{.tokens = request.tokens, .logits = logits.data(), .every_token = true}});
    for (size_t t = 0; t + 1 < count; ++t) {
      const std::span<const float> row(logits.data() + t * static_cast<size_t>(vocab), static_cast<size_t>(vocab));
      double sum = 0;
      for (const float logit : row) sum += std::exp(static_cast<double>(logit));
      // Two f32 numbers that differ by the rounding of a sum.
      EXPECT_NEAR(result.prompt_logprobs[t], static_cast<double>(row[static_cast<size_t>(request.tokens[t + 1])]) - std::log(sum),
                  1e-5);
      ASSERT_EQ(result.prompt_top[t].size(), 2u);
      EXPECT_EQ(result.prompt_top[t][0].token, std::max_element(row.begin(), row.end()) - row.begin());
      EXPECT_GE(result.prompt_top[t][0].logprob, result.prompt_top[t][1].logprob);
    }
  }
  BatchRequest wrong = requests[0];
  wrong.session = "s";
  EXPECT_EQ(batcher.check(wrong).argument, "prompt_logprobs");
  wrong = requests[0];
  wrong.options.logprobs.reset();
  EXPECT_EQ(batcher.check(wrong).argument, "prompt_logprobs");
}

TEST(BatcherSessions, Expire) {
  BatcherOptions options = small_batcher("8v4", 2, 256);
  options.session_expiry = seconds(1);
  Batcher batcher(tiny(), options);
  take_turn(batcher, "a");
  const auto until = steady_clock::now() + seconds(60);
  while (batcher.stats().dropped_sessions == 0 && steady_clock::now() < until) std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(batcher.stats().sessions, 0) << "an idle batcher forgets sessions, too";
  EXPECT_EQ(batcher.stats().kv_used, 0);
}

TEST(BatcherSessions, DropWhileRunning) {
  Batcher batcher(tiny(), small_batcher());
  BatchRequest request = greedy_request(some_ids(40), 10);
  request.session = "s";
  Answer answer;
  BatchCallbacks callbacks = answer.callbacks();
  callbacks.on_token = [&](int64_t, const GeneratedToken&) {
    batcher.drop_session("s");
    return true;
  };
  callbacks.on_choice_end = {};
  batcher.submit(request, callbacks);
  EXPECT_EQ(answer.result().outcome, BatchOutcome::finished);
  EXPECT_TRUE(answer.result().kept.empty());
  EXPECT_EQ(batcher.stats().sessions, 0);
}

// ---- refusals

TEST(Batcher, RefusesWithASentence) {
  const auto options_said = [](const auto& change) {
    BatcherOptions options = small_batcher();
    change(options);
    return complaint([&] { Batcher(tiny(), options); });
  };
  EXPECT_EQ(options_said([](auto&) {}), "none");
  EXPECT_EQ(options_said([](auto& o) { o.sequences = 0; }), "batcher: sequences is 0, wanted 1 to 4096");
  EXPECT_EQ(options_said([](auto& o) { o.queue = 0; }), "batcher: queue is 0, wanted 1 to 1048576");
  EXPECT_EQ(options_said([](auto& o) { o.every = 100; }), "batcher: every is 100, wanted a multiple of 64");
  EXPECT_EQ(options_said([](auto& o) { o.longest_step = milliseconds(0); }), "batcher: longest_step is 0, wanted 1 to 3600000");
  EXPECT_NE(options_said([](auto& o) { o.kv = "9v9"; }), "none");
  EXPECT_NE(options_said([](auto& o) { o.capacity = 0; }), "none");

  Batcher batcher(tiny(), small_batcher());
  const auto said = [&](const auto& change) {
    BatchRequest request = greedy_request(some_ids(9), 3);
    change(request);
    const Status status = batcher.check(request);
    const std::string message = complaint([&] { ask(batcher, request).result(); });
    EXPECT_EQ(message, status.ok() ? "none" : status.message);
    return message;
  };
  EXPECT_EQ(said([](auto&) {}), "none");
  EXPECT_EQ(said([](auto& r) { r.tokens.clear(); }), "batcher: tokens are none, wanted at least one");
  EXPECT_EQ(said([](auto& r) { r.tokens = some_ids(513); }), "batcher: tokens are 513, wanted at most the capacity of 512");
  EXPECT_NE(said([](auto& r) { r.tokens[3] = 101; }), "none");
  EXPECT_NE(said([](auto& r) { r.tokens[3] = -1; }), "none");
  EXPECT_EQ(said([](auto& r) { r.options.max_tokens = -1; }), "batcher: max_tokens is -1, wanted 0 or more");
  EXPECT_EQ(said([](auto& r) { r.options.draft = 2; }),
            "batcher: options have draft, sequence or store, wanted the defaults of these three");
  EXPECT_EQ(said([](auto& r) { r.choices = 5; }), "batcher: choices is 5, wanted 1 to 4");
  EXPECT_EQ(said([](auto& r) { r.session = std::string(257, 'x'); }), "batcher: session has 257 bytes, wanted at most 256");
  EXPECT_EQ(said([](auto& r) { r.session = "x", r.choices = 2; }), "batcher: session is for one choice, wanted `choices` 1");
  EXPECT_EQ(said([](auto& r) { r.options.max_tokens = INT64_MAX; }), "none");
  for (int i = 0; i <= static_cast<int>(BatchOutcome::stopped); ++i)
    EXPECT_STRNE(batch_outcome_name(static_cast<BatchOutcome>(i)), "unknown");
}

}  // namespace
