// Continuous batching: every request gets the text of a Generator alone, whatever runs beside it; queue, choices, sessions, ends.
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/stat.h>

#include <atomic>
#include <random>
#include <stdexcept>
#include <thread>

#include "model/batch/engine.h"
#include "tests/support/batch.h"
#include "tests/support/complaint.h"
#include "tests/support/folder.h"
#include "weft/perplexity.h"

namespace {

using namespace weft;
using namespace weft::testing_support;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

const Model& tiny() { return one_golden_model(); }
const Model& bundled() {
  static const Model model = Model::load(shipped_model());
  return model;
}

// Holds the engine thread in a callback until it is opened, so that tests decide what waits beside what.
class Gate {
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

// ---- texts

// Requests of all lengths, with shared beginnings, several choices, and samplers.
std::vector<BatchRequest> some_requests(size_t count, int64_t capacity, uint64_t seed) {
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

void expect_alone(const Model& model, const BatchRequest& request, const BatchResult& result, const std::string& kv,
                  int64_t capacity, const std::string& what) {
  ASSERT_EQ(result.outcome, BatchOutcome::finished) << what << result.status.message;
  ASSERT_EQ(static_cast<int64_t>(result.choices.size()), request.choices);
  for (int64_t i = 0; i < request.choices; ++i)
    expect_same(result.choices[static_cast<size_t>(i)], alone(model, request, kv, capacity, i),
                what + ", choice " + std::to_string(i) + " of a prompt of " + std::to_string(request.tokens.size()));
  EXPECT_EQ(result.prompt_tokens, static_cast<int64_t>(request.tokens.size()));
}

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
  Gate gate;
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

TEST(BatcherSessions, AreDroppedForMemoryByAgeAndByName) {
  BatcherOptions options = small_batcher("8v4", 2, 256);
  options.session_expiry = seconds(1);
  Batcher batcher(tiny(), options);
  const auto turn = [&](const std::string& session, int64_t length = 130) {
    BatchRequest request = greedy_request(some_ids(static_cast<size_t>(length)), 3);
    request.session = session;
    return ask(batcher, request).result().outcome;
  };
  for (const char* session : {"a", "b", "c"}) EXPECT_EQ(turn(session), BatchOutcome::finished);
  EXPECT_EQ(batcher.stats().sessions, 2) << "as many as running sequences";
  EXPECT_EQ(batcher.stats().dropped_sessions, 1);
  // The pages of all sequences are wanted by requests.
  BatchRequest large = greedy_request(some_ids(200), 100);
  large.choices = 2;
  EXPECT_EQ(ask(batcher, large).result().outcome, BatchOutcome::finished);
  EXPECT_LT(batcher.stats().sessions, 2);
  turn("d");
  batcher.drop_session("d");
  batcher.drop_session("unknown");
  turn("e");
  const auto until = steady_clock::now() + seconds(30);
  while (batcher.stats().sessions > 0 && steady_clock::now() < until) std::this_thread::sleep_for(milliseconds(20));
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
  EXPECT_EQ(batcher.stats().sessions, 0);
}

// ---- files of sessions

struct Conversation {
  BatchRequest first = greedy_request(some_ids(90), 9), second;
  Generation want;  // of the second turn
  explicit Conversation(const std::string& session) {
    HybridState state = tiny().create_state("8v4", 512);
    const Generation written = alone(tiny(), first, "8v4", 512, 0, &state);
    second = first;
    second.tokens.insert(second.tokens.end(), written.tokens.begin(), written.tokens.end());
    second.tokens.push_back(7);
    want = alone(tiny(), second, "8v4", 512, 0, &state);
    first.session = second.session = session;
  }
};

TEST(BatcherFiles, SessionsOutliveTheBatcher) {
  const Folder folder;
  BatcherOptions options = small_batcher();
  options.sessions = folder.path() / "kept" / "here";
  const Conversation one("one/../../\xFF?"), two("two");
  {
    Batcher batcher(tiny(), options);
    ask(batcher, one.first).result();
    ask(batcher, two.first).result();
    EXPECT_EQ(batcher.drain(steady_clock::now() + seconds(60)), std::vector<std::string>());
    EXPECT_EQ(batcher.drain(steady_clock::now()), std::vector<std::string>()) << "again";
    batcher.stop();
  }
  size_t files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path() / "kept" / "here")) {
    struct stat info {};
    ASSERT_EQ(::stat(entry.path().c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600u) << entry.path();
    ++files;
  }
  EXPECT_EQ(files, 4u);
  for (int round = 0; round < 2; ++round) {  // the file stays until it is replaced
    Batcher batcher(tiny(), options);
    EXPECT_EQ(batcher.stats().sessions, 0) << "resumed when asked for";
    const BatchResult result = ask(batcher, one.second).result();
    EXPECT_EQ(result.cached_tokens, 98);
    expect_same(result.choices[0], one.want, "resumed");
    EXPECT_EQ(batcher.stats().resumed_sessions, 1);
  }
  Batcher batcher(tiny(), options);
  batcher.drop_session(one.first.session);
  EXPECT_EQ(ask(batcher, one.second).result().cached_tokens, 0);
  BatchRequest other = two.second;
  other.tokens[3] ^= 1;
  EXPECT_EQ(ask(batcher, other).result().cached_tokens, 0) << "other tokens";
}

TEST(BatcherFiles, AreRefusedByName) {
  const Folder folder;
  BatcherOptions options = small_batcher();
  options.sessions = folder.path();
  const Conversation talk("s");
  {
    Batcher batcher(tiny(), options);
    ask(batcher, talk.first).result();
    batcher.drain(steady_clock::now() + seconds(60));
  }
  std::filesystem::path state;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
    if (entry.path().extension() == ".state") state = entry.path();
  const auto refused = [&](const Model& model, const char* kv) {
    BatcherOptions own = options;
    own.kv = kv;
    Batcher batcher(model, own);
    const BatchResult result = ask(batcher, talk.second).result();
    EXPECT_EQ(result.outcome, BatchOutcome::failed);
    EXPECT_EQ(result.status.code, Code::invalid_argument);
    EXPECT_EQ(result.status.argument, "session");
    EXPECT_EQ(result.status.message.rfind("batcher: session 's' cannot be resumed: ", 0), 0u) << result.status.message;
    EXPECT_TRUE(std::filesystem::exists(state)) << "the file stays";
    BatchRequest free = talk.second;
    free.session.clear();
    EXPECT_EQ(ask(batcher, free).result().outcome, BatchOutcome::finished) << "the batcher goes on";
    EXPECT_EQ(batcher.stats().kv_used, 0);
    return result.status.message;
  };
  EXPECT_NE(refused(tiny(), "f16").find("layer"), std::string::npos);
  EXPECT_NE(refused(Model::load(golden_models() / "qwen3_next"), "8v4").find("model"), std::string::npos);
  const std::string whole = text_of(state);
  std::string damaged = whole;
  damaged[damaged.size() / 2] ^= 1;
  folder.write(state.filename(), damaged);
  refused(tiny(), "8v4");
  folder.write(state.filename(), whole.substr(0, whole.size() / 2));
  refused(tiny(), "8v4");
  {
    Batcher batcher(tiny(), options);  // an empty file is that of a save that never was
    folder.write(state.filename(), "");
    EXPECT_EQ(ask(batcher, talk.second).result().cached_tokens, 0);
  }
  folder.write(state.filename(), whole);
  std::filesystem::path id = state;
  folder.write(id.replace_extension(".id").filename(), "other");
  {
    Batcher batcher(tiny(), options);
    EXPECT_EQ(ask(batcher, talk.second).result().cached_tokens, 0) << "the file of another session";
  }
  folder.write(id.filename(), "s");
  std::filesystem::last_write_time(state, std::filesystem::file_time_type::clock::now() - options.session_expiry - seconds(5));
  Batcher batcher(tiny(), options);
  EXPECT_FALSE(std::filesystem::exists(state)) << "expired";
  EXPECT_FALSE(std::filesystem::exists(id));
}

TEST(BatcherFiles, WhatCannotBeSavedIsNamed) {
  const Folder folder;
  BatcherOptions options = small_batcher();
  options.sessions = folder.path() / "kept";
  {
    Batcher batcher(tiny(), options);
    const Conversation talk("s");
    ask(batcher, talk.first).result();
    std::filesystem::remove_all(options.sessions);
    const std::vector<std::string> unsaved = batcher.drain(steady_clock::now() + seconds(60));
    ASSERT_EQ(unsaved.size(), 1u);
    EXPECT_EQ(unsaved[0].rfind("batcher: session 's' was not saved: ", 0), 0u) << unsaved[0];
  }
  options.sessions = folder.write("file", "");
  EXPECT_NE(complaint([&] { Batcher(tiny(), options); }).find("cannot be made"), std::string::npos);
}

// ---- ends

TEST(BatcherEnds, Cancel) {
  Batcher batcher(tiny(), small_batcher("8v4", 1));
  Gate gate;
  const Answer gated = gate.close(batcher, 300);
  Answer waiting, unharmed;
  const Batcher::Ticket ticket = batcher.submit(greedy_request(some_ids(9), 3), waiting.callbacks());
  const BatchRequest after = greedy_request(some_ids(9), 3);
  batcher.submit(after, unharmed.callbacks());
  EXPECT_EQ(batcher.stats().waiting, 2);
  batcher.cancel(ticket);
  batcher.cancel(ticket);
  batcher.cancel(ticket - 1);
  batcher.cancel(12345);
  gate.open();
  EXPECT_EQ(waiting.result().outcome, BatchOutcome::cancelled);
  EXPECT_TRUE(waiting.result().choices[0].tokens.empty());
  EXPECT_EQ(gated.result().outcome, BatchOutcome::cancelled);
  EXPECT_EQ(gated.result().choices[0].tokens.size(), 1u);
  expect_alone(tiny(), after, unharmed.result(), "8v4", 512, "");
  batcher.cancel(ticket);
  EXPECT_EQ(batcher.stats().cancelled, 2);
  EXPECT_EQ(batcher.stats().waiting, 0);
}

TEST(BatcherEnds, CallbacksCallTheBatcher) {
  Batcher batcher(tiny(), small_batcher());
  Answer answer, inner;
  BatchCallbacks callbacks = answer.callbacks();
  std::atomic<Batcher::Ticket> own = 0;
  std::promise<void> submitted;
  std::shared_future<void> known = submitted.get_future().share();
  callbacks.on_token = [&, first = true](int64_t, const GeneratedToken&) mutable {
    known.wait();
    if (std::exchange(first, false)) {
      batcher.submit(greedy_request(some_ids(4), 2), inner.callbacks());
      EXPECT_EQ(batcher.stats().running, 1);
      batcher.cancel(own);
    }
    return true;
  };
  callbacks.on_choice_end = {};
  own = batcher.submit(greedy_request(some_ids(5), 500), callbacks);
  submitted.set_value();
  EXPECT_EQ(answer.result().outcome, BatchOutcome::cancelled);
  EXPECT_LT(answer.result().choices[0].tokens.size(), 3u);
  EXPECT_EQ(inner.result().outcome, BatchOutcome::finished);
}

TEST(BatcherEnds, ACallbackStopsItsChoice) {
  Batcher batcher(tiny(), small_batcher());
  Answer answer(2);
  BatchCallbacks callbacks = answer.callbacks();
  callbacks.on_token = [n = 0](int64_t choice, const GeneratedToken&) mutable { return choice == 0 || ++n < 4; };
  callbacks.on_choice_end = [](int64_t choice, const Generation& written) {
    EXPECT_EQ(written.stop, choice == 0 ? StopReason::length : StopReason::callback);
  };
  BatchRequest request = greedy_request(some_ids(5), 9);
  request.choices = 2;
  batcher.submit(request, callbacks);
  EXPECT_EQ(answer.result().outcome, BatchOutcome::finished);
  EXPECT_EQ(answer.result().choices[0].tokens.size(), 9u);
  EXPECT_EQ(answer.result().choices[1].tokens.size(), 4u);
}

TEST(BatcherEnds, AnExceptionOfACallbackEndsItsRequestAlone) {
  Batcher batcher(tiny(), small_batcher());
  Gate gate;
  const Answer gated = gate.close(batcher, 20);
  const BatchRequest good = greedy_request(some_ids(90), 20);
  const Answer neighbour = ask(batcher, good);
  Answer first, second, third;
  BatchCallbacks callbacks = first.callbacks();
  callbacks.on_token = [](int64_t, const GeneratedToken&) -> bool { throw std::runtime_error("enough"); };
  callbacks.on_choice_end = {};
  batcher.submit(greedy_request(some_ids(9), 5), callbacks);
  callbacks = second.callbacks();
  callbacks.on_choice_end = [](int64_t, const Generation&) { throw 5; };
  batcher.submit(greedy_request(some_ids(9), 5), callbacks);
  callbacks = third.callbacks();
  callbacks.on_end = [inner = callbacks.on_end](const BatchResult& result) {
    inner(result);
    throw std::runtime_error("too late");
  };
  batcher.submit(greedy_request(some_ids(9), 5), callbacks);
  gate.open();
  EXPECT_EQ(first.result().outcome, BatchOutcome::failed);
  EXPECT_EQ(first.result().status.message, "batcher: request ended by an exception of its callback: enough");
  EXPECT_EQ(first.result().choices[0].tokens.size(), 1u);
  EXPECT_EQ(second.result().status.message,
            "batcher: request ended by an exception of its callback: an exception of an unknown type");
  EXPECT_EQ(third.result().outcome, BatchOutcome::finished);
  EXPECT_EQ(gated.result().outcome, BatchOutcome::finished);
  expect_alone(tiny(), good, neighbour.result(), "8v4", 512, "");
  batcher.stop();
  EXPECT_EQ(batcher.stats().failed, 2);
  EXPECT_EQ(batcher.stats().kv_used, 0);
}

TEST(BatcherEnds, Deadline) {
  Batcher batcher(tiny(), small_batcher("8v4", 1));
  Gate gate;
  const Answer gated = gate.close(batcher);
  BatchRequest request = greedy_request(some_ids(9), 3);
  request.deadline = steady_clock::now();
  const Answer waiting = ask(batcher, request);
  request.deadline = steady_clock::now() + seconds(100);
  const Answer in_time = ask(batcher, request);
  gate.open();
  EXPECT_EQ(waiting.result().outcome, BatchOutcome::deadline);
  EXPECT_EQ(in_time.result().outcome, BatchOutcome::finished);
  // A running one: its callback waits until the deadline has passed.
  request.deadline = steady_clock::now() + milliseconds(30);
  request.options.max_tokens = 500;
  Answer running;
  BatchCallbacks callbacks = running.callbacks();
  callbacks.on_token = [](int64_t, const GeneratedToken&) {
    std::this_thread::sleep_for(milliseconds(10));
    return true;
  };
  callbacks.on_choice_end = {};
  batcher.submit(request, callbacks);
  EXPECT_EQ(running.result().outcome, BatchOutcome::deadline);
}

TEST(BatcherEnds, DrainFinishesAndStopDoesNot) {
  for (const bool drains : {true, false}) {
    Batcher batcher(tiny(), small_batcher("8v4", 1));
    Gate gate;
    const Answer gated = gate.close(batcher, 10);
    const Answer waiting = ask(batcher, greedy_request(some_ids(9), 3));
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i)
      threads.emplace_back([&] { drains ? batcher.drain(steady_clock::now() + seconds(100)), void() : batcher.stop(); });
    while (complaint([&] { ask(batcher, greedy_request(some_ids(9), 3)); }) == "none") std::this_thread::yield();
    EXPECT_EQ(complaint([&] { ask(batcher, greedy_request(some_ids(9), 3)); }),
              "batcher: batcher stops, and takes no more requests");
    gate.open();
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(gated.over());
    EXPECT_EQ(gated.result().outcome, drains ? BatchOutcome::finished : BatchOutcome::stopped);
    EXPECT_EQ(waiting.result().outcome, drains ? BatchOutcome::finished : BatchOutcome::stopped);
    batcher.cancel(1);
    batcher.stop();
  }
}

TEST(BatcherEnds, DrainHasADeadlineAndStopCutsItShort) {
  for (const bool stops : {false, true}) {
    Batcher batcher(tiny(), small_batcher("8v4", 1, 100000));
    Gate gate;
    const Answer gated = gate.close(batcher, 99000);
    gate.open();
    std::thread stopper([&] {
      if (!stops) return;
      std::this_thread::sleep_for(milliseconds(20));
      batcher.stop();
    });
    batcher.drain(steady_clock::now() + (stops ? seconds(1000) : seconds(0)));
    stopper.join();
    EXPECT_EQ(gated.result().outcome, BatchOutcome::stopped);
  }
}

TEST(BatcherEnds, FromACallbackDrainReturnsAtOnce) {
  Batcher batcher(tiny(), small_batcher());
  Answer answer;
  BatchCallbacks callbacks = answer.callbacks();
  callbacks.on_token = [&](int64_t, const GeneratedToken&) {
    batcher.drain(steady_clock::now() + seconds(100));
    return true;
  };
  callbacks.on_choice_end = {};
  batcher.submit(greedy_request(some_ids(9), 3), callbacks);
  EXPECT_EQ(answer.result().outcome, BatchOutcome::finished);
}

TEST(BatcherEnds, TheDestructorStops) {
  std::vector<Answer> answers;
  {
    Batcher batcher(tiny(), small_batcher());
    for (int i = 0; i < 20; ++i) answers.push_back(ask(batcher, greedy_request(some_ids(200), 200)));
  }
  for (const Answer& answer : answers) {
    ASSERT_TRUE(answer.over());
    EXPECT_EQ(answer.result().choices.size(), 1u);
  }
  Batcher unused(tiny(), small_batcher());
}

// ---- turns

TEST(BatcherTurns, TheQueueHasALimit) {
  BatcherOptions options = small_batcher("8v4", 1);
  options.queue = 3;
  Batcher batcher(tiny(), options);
  Gate gate;
  const Answer gated = gate.close(batcher);
  std::vector<Answer> answers;
  for (int i = 0; i < 3; ++i) answers.push_back(ask(batcher, greedy_request(some_ids(9), 3)));
  Answer refused;
  try {
    batcher.submit(greedy_request(some_ids(9), 3), refused.callbacks());
    ADD_FAILURE() << "a full queue took a request";
  } catch (const Error& error) {
    EXPECT_EQ(error.status().argument, "queue");
    EXPECT_STREQ(error.what(), "batcher: queue holds 3 requests, wanted fewer before the next one");
  }
  EXPECT_TRUE(batcher.check(greedy_request(some_ids(9), 3)).ok()) << "check() does not count the queue";
  gate.open();
  for (const Answer& answer : answers) EXPECT_EQ(answer.result().outcome, BatchOutcome::finished);
  EXPECT_FALSE(refused.over());
  EXPECT_EQ(batcher.stats().refused, 1);
}

TEST(BatcherTurns, ClientsTakeTurns) {
  Batcher batcher(tiny(), small_batcher("8v4", 2));
  Gate gate;
  const Answer gated = gate.close(batcher, 300);  // runs beside all others, so one sequence is left
  std::vector<int> order;
  std::vector<Answer> answers;
  const auto submit = [&](const std::string& client, int id, int64_t choices = 1) {
    BatchRequest request = greedy_request(some_ids(9), 3);
    request.client = client;
    request.choices = choices;
    Answer answer(choices);
    BatchCallbacks callbacks = answer.callbacks();
    callbacks.on_end = [&order, id, inner = callbacks.on_end](const BatchResult& result) {
      order.push_back(id);
      inner(result);
    };
    batcher.submit(request, callbacks);
    answers.push_back(answer);
  };
  submit("gate", 0);  // whose client runs already
  submit("a", 1);
  submit("b", 2);
  submit("a", 3);
  gate.open();
  for (const Answer& answer : answers) answer.result();
  batcher.stop();
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3, 0}));
}

// A request that wants all sequences gets them, although small ones keep coming.
TEST(BatcherTurns, LargeRequestsAreNotOvertakenForever) {
  Batcher batcher(tiny(), small_batcher("8v4", 3));
  std::atomic<bool> stop = false;
  std::vector<Answer> small;
  BatchRequest large = greedy_request(some_ids(9), 3);
  large.choices = 3;
  std::function<void(const BatchResult&)> again = [&](const BatchResult& result) {
    if (stop || result.outcome != BatchOutcome::finished) return;
    BatchRequest request = greedy_request(some_ids(9), 5);
    request.client = "s";
    batcher.submit(request, {.on_token = {}, .on_choice_end = {}, .on_end = again});
  };
  for (int i = 0; i < 6; ++i) {
    BatchRequest request = greedy_request(some_ids(9), 5 + i);
    request.client = "s";
    batcher.submit(request, {.on_token = {}, .on_choice_end = {}, .on_end = again});
  }
  EXPECT_EQ(ask(batcher, large).result().outcome, BatchOutcome::finished);
  stop = true;
  batcher.stop();
}

// While a long prompt is read, the stream of another client goes on between its pieces.
TEST(BatcherTurns, PromptsAreReadBesideDecoding) {
  BatcherOptions options = small_batcher("8v4", 3, 4096);
  options.longest_step = milliseconds(1);
  options.store = 0;
  Batcher batcher(tiny(), options);
  Gate gate;
  const Answer gated = gate.close(batcher, 200);
  const BatchRequest lengthy = greedy_request(some_ids(3000), 4), brief = greedy_request(some_ids(100, 1), 4);
  std::vector<int> order;
  Answer slow, quick;
  BatchCallbacks slow_callbacks = slow.callbacks(), quick_callbacks = quick.callbacks();
  slow_callbacks.on_end = [&, inner = slow_callbacks.on_end](const BatchResult& r) { order.push_back(1), inner(r); };
  quick_callbacks.on_end = [&, inner = quick_callbacks.on_end](const BatchResult& r) { order.push_back(2), inner(r); };
  BatchRequest other = brief;
  other.client = "b";
  batcher.submit(lengthy, slow_callbacks);
  batcher.submit(other, quick_callbacks);
  gate.open();
  expect_alone(tiny(), lengthy, slow.result(), "8v4", 4096, "long");
  expect_alone(tiny(), brief, quick.result(), "8v4", 4096, "short");
  expect_alone(tiny(), greedy_request(some_ids(5), 201), gated.result(), "8v4", 4096, "stream");
  batcher.stop();
  EXPECT_EQ(order, (std::vector<int>{2, 1})) << "a short prompt of another client is not behind a long one";
}

TEST(Pace, PiecesFillTheTime) {
  model::Pace pace(0.1, 512);
  EXPECT_EQ(pace.prompt_tokens(0), 64) << "nothing is known";
  pace.measure(0, 64, 0.0064);
  EXPECT_EQ(pace.prompt_tokens(0), 128) << "twice the latest";
  pace.measure(0, 128, 0.0128);
  pace.measure(0, 256, 0.0256);
  EXPECT_EQ(pace.prompt_tokens(0), 512);
  EXPECT_EQ(pace.prompt_tokens(1), 448) << "with the token that decodes at most 512";
  pace.measure(8, 0, 0.04);
  EXPECT_EQ(pace.prompt_tokens(8), 384) << "0.08 less 0.04 seconds at 0.0001 a token";
  EXPECT_EQ(pace.prompt_tokens(16), 64) << "decoding alone takes the time";
  pace.measure(8, 384, 0.04 + 0.0768);
  EXPECT_EQ(pace.prompt_tokens(8), 192) << "slower at once";
  for (int i = 0; i < 40; ++i) pace.measure(8, 192, 0.04 + 0.0192);
  EXPECT_EQ(pace.prompt_tokens(8), 384) << "faster by and by";
  EXPECT_EQ(pace.prompt_tokens(100000), 64);
}

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

// Callers submit, cancel, look and drop sessions from several threads; whatever finishes has the right text.
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
