// How requests of a batcher end, and in which order they run: cancellation, deadlines, exceptions, drain, stop, queue, clients.
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>

#include "model/batch/pace.h"
#include "tests/support/batch.h"
#include "tests/support/complaint.h"

namespace {

using namespace weft;
using namespace weft::testing_support;

// ---- ends

TEST(BatcherEnds, Cancel) {
  Batcher batcher(tiny(), small_batcher("8v4", 1));
  EngineGate gate;
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
  EngineGate gate;
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
  EngineGate gate;
  const Answer gated = gate.close(batcher);
  BatchRequest request = greedy_request(some_ids(9), 3);
  request.deadline = steady_clock::now();
  const Answer waiting = ask(batcher, request);
  request.deadline = steady_clock::now() + seconds(100);
  const Answer in_time = ask(batcher, request);
  gate.open();
  EXPECT_EQ(waiting.result().outcome, BatchOutcome::deadline);
  EXPECT_EQ(in_time.result().outcome, BatchOutcome::finished);
  // A running request: its callback waits until the deadline has passed.
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
    EngineGate gate;
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
    EngineGate gate;
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

TEST(BatcherEnds, RequestStopDoesNotWait) {
  Batcher batcher(tiny(), small_batcher("8v4", 1));
  EngineGate gate;
  const Answer gated = gate.close(batcher, 300);
  const Answer waiting = ask(batcher, greedy_request(some_ids(9), 3));
  batcher.request_stop();  // the engine thread waits at the gate
  batcher.request_stop();
  EXPECT_FALSE(gated.over());
  EXPECT_EQ(complaint([&] { ask(batcher, greedy_request(some_ids(9), 3)); }), "batcher: batcher stops, and takes no more requests");
  gate.open();
  EXPECT_EQ(gated.result().outcome, BatchOutcome::stopped);
  EXPECT_EQ(waiting.result().outcome, BatchOutcome::stopped);
}

TEST(BatcherEnds, AResultIsMoved) {
  Batcher batcher(tiny(), small_batcher());
  const int32_t* written = nullptr;
  std::promise<const int32_t*> given;
  batcher.submit(greedy_request(some_ids(9), 3),
                 {.on_token = {},
                  .on_choice_end = [&](int64_t, const Generation& choice) { written = choice.tokens.data(); },
                  .on_end = [&](BatchResult result) { given.set_value(result.choices[0].tokens.data()); }});
  EXPECT_EQ(given.get_future().get(), written) << "not copied";
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
  EngineGate gate;
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

TEST(BatcherTurns, AFullQueueTakesOtherClients) {
  BatcherOptions options = small_batcher("8v4", 1);
  options.queue = 4;
  Batcher batcher(tiny(), options);
  EngineGate gate;
  const Answer gated = gate.close(batcher);
  std::vector<Answer> answers;
  const auto submit = [&](const char* client) {
    BatchRequest request = greedy_request(some_ids(9), 3);
    request.client = client;
    return complaint([&] { answers.push_back(ask(batcher, request)); });
  };
  for (int i = 0; i < 4; ++i) EXPECT_EQ(submit("a"), "none") << "alone it fills the queue";
  EXPECT_EQ(submit("a"), "batcher: queue holds 4 requests, wanted fewer before the next one");
  EXPECT_EQ(submit("b"), "none");
  EXPECT_EQ(submit("b"), "none") << "half of the queue";
  EXPECT_EQ(submit("b"), "batcher: queue holds 6 requests, 2 of them of this client, wanted fewer before the next one");
  EXPECT_EQ(submit("c"), "none");
  EXPECT_EQ(submit("d"), "none");
  EXPECT_EQ(submit("e"), "batcher: queue holds 8 requests, 0 of them of this client, wanted fewer before the next one")
      << "four clients with a share each";
  EXPECT_EQ(submit("a"), "batcher: queue holds 8 requests, 4 of them of this client, wanted fewer before the next one");
  gate.open();
  for (const Answer& answer : answers) EXPECT_EQ(answer.result().outcome, BatchOutcome::finished);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(submit("a"), "none");
  batcher.stop();
  EXPECT_EQ(batcher.stats().waiting, 0);
}

TEST(BatcherTurns, SeveralRequestsAreQueuedAtOnceOrNotAtAll) {
  BatcherOptions options = small_batcher("8v4", 1);
  options.queue = 3;
  Batcher batcher(tiny(), options);
  EngineGate gate;
  const Answer gated = gate.close(batcher);
  const auto submit = [&](size_t count, std::vector<Answer>& answers, int64_t invalid = -1) {
    std::vector<BatchSubmission> requests;
    for (size_t i = 0; i < count; ++i) {
      answers.emplace_back();
      requests.push_back({greedy_request(some_ids(9), static_cast<int64_t>(i) == invalid ? -1 : 3), answers.back().callbacks()});
    }
    return batcher.submit(std::move(requests));
  };
  std::vector<Answer> none, first, more, large, invalid;
  EXPECT_TRUE(submit(0, none).empty());
  EXPECT_EQ(complaint([&] { submit(4, large); }), "batcher: requests are 4 at once, wanted at most the queue of 3");
  EXPECT_EQ(complaint([&] { submit(3, invalid, 2); }), "batcher: max_tokens is -1, wanted 0 or more");
  EXPECT_EQ(batcher.stats().waiting, 0);
  const std::vector<Batcher::Ticket> tickets = submit(2, first);
  ASSERT_EQ(tickets.size(), 2u);
  EXPECT_EQ(complaint([&] { submit(2, more); }), "batcher: queue holds 2 requests, wanted fewer before the next one");
  EXPECT_EQ(batcher.stats().waiting, 2);
  EXPECT_EQ(batcher.stats().refused, 6);
  batcher.cancel(tickets[1]);
  gate.open();
  EXPECT_EQ(first[0].result().outcome, BatchOutcome::finished);
  EXPECT_EQ(first[1].result().outcome, BatchOutcome::cancelled);
  batcher.stop();
  for (const std::vector<Answer>* refused : {&more, &large, &invalid})
    for (const Answer& answer : *refused) EXPECT_FALSE(answer.over());
  EXPECT_EQ(batcher.stats().requests, 3);
}

// Records in which order requests end.
class Order {
 public:
  explicit Order(Batcher& batcher) : batcher_(batcher) {}
  void submit(int id, BatchRequest request) {
    Answer answer;
    BatchCallbacks callbacks = answer.callbacks();
    callbacks.on_end = [this, id, inner = callbacks.on_end](const BatchResult& result) {
      ended_.push_back(id);
      inner(result);
    };
    batcher_.submit(std::move(request), std::move(callbacks));
    answers_.push_back(answer);
  }
  void submit(int id, const std::string& client, const std::string& user = "", size_t prompt = 9) {
    BatchRequest request = greedy_request(some_ids(prompt, static_cast<size_t>(id)), 3);
    request.client = client;
    request.user = user;
    submit(id, std::move(request));
  }
  const std::vector<int>& wait() {
    for (const Answer& answer : answers_) answer.result();
    batcher_.stop();
    return ended_;
  }

 private:
  Batcher& batcher_;
  std::vector<int> ended_;  // on the engine thread
  std::vector<Answer> answers_;
};

TEST(BatcherTurns, UsersOfAClientTakeTurns) {
  Batcher batcher(tiny(), small_batcher("8v4", 2));
  EngineGate gate;
  const Answer gated = gate.close(batcher, 300);  // occupies a sequence, so one sequence is left
  Order order(batcher);
  order.submit(1, "a", "x");
  order.submit(2, "a", "x");
  order.submit(3, "a", "y");
  order.submit(4, "a", "z");
  order.submit(5, "b");
  gate.open();
  EXPECT_EQ(order.wait(), (std::vector<int>{1, 5, 3, 4, 2})) << "many users give a client no more turns";
}

// While new clients keep coming, a client that runs a long request gets its second request admitted, too.
TEST(BatcherTurns, AWaitingClientAges) {
  Batcher batcher(tiny(), small_batcher("8v4", 2));
  EngineGate gate;
  const Answer gated = gate.close(batcher, 400);
  std::atomic<bool> stop = false;
  int others = 0;
  std::function<void(const BatchResult&)> again = [&](const BatchResult& result) {
    if (stop || result.outcome != BatchOutcome::finished) return;
    BatchRequest request = greedy_request(some_ids(9), 3);
    request.client = std::to_string(++others);
    batcher.submit(request, {.on_token = {}, .on_choice_end = {}, .on_end = again});
  };
  for (const char* client : {"p", "q", "r"}) {
    BatchRequest request = greedy_request(some_ids(9), 3);
    request.client = client;
    batcher.submit(request, {.on_token = {}, .on_choice_end = {}, .on_end = again});
  }
  Answer second;
  BatchCallbacks callbacks = second.callbacks();
  int before = 0;
  callbacks.on_end = [&, inner = callbacks.on_end](const BatchResult& result) {
    before = others;
    stop = true;
    inner(result);
  };
  BatchRequest request = greedy_request(some_ids(9), 3);
  request.client = "gate";
  batcher.submit(request, callbacks);
  gate.open();
  EXPECT_EQ(second.result().outcome, BatchOutcome::finished);
  EXPECT_FALSE(gated.over()) << "the client had a running sequence all the time";
  EXPECT_LE(before, 6);
  batcher.stop();
}

// Of two clients whose prompts are read, each gets half of the steps, however many users it names.
TEST(BatcherTurns, UsersShareTheStepsOfTheirClient) {
  Batcher batcher(tiny(), patient_batcher(5, 2048));
  EngineGate gate;
  const Answer gated = gate.close(batcher, 100);
  Order order(batcher);
  for (int i = 1; i <= 3; ++i) order.submit(i, "a", std::to_string(i), 1000);
  order.submit(4, "b", "", 1000);
  gate.open();
  EXPECT_EQ(order.wait().front(), 4);
}

TEST(BatcherTurns, AShortPromptIsNotBehindALongOneOfAnotherUser) {
  Batcher batcher(tiny(), patient_batcher(3, 2048));
  EngineGate gate;
  const Answer gated = gate.close(batcher, 100);
  Order order(batcher);
  order.submit(1, "a", "x", 1500);
  order.submit(2, "a", "y", 100);
  gate.open();
  EXPECT_EQ(order.wait(), (std::vector<int>{2, 1}));
}

TEST(BatcherTurns, ClientsTakeTurns) {
  Batcher batcher(tiny(), small_batcher("8v4", 2));
  EngineGate gate;
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
  submit("gate", 0);  // a request of a client that runs already
  submit("a", 1);
  submit("b", 2);
  submit("a", 3);
  gate.open();
  for (const Answer& answer : answers) answer.result();
  batcher.stop();
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3, 0}));
}

// A request that needs all sequences gets them, although small requests keep coming.
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

// While a long prompt is read in chunks, the stream of another client continues between the chunks.
TEST(BatcherTurns, PromptsAreReadBesideDecoding) {
  Batcher batcher(tiny(), patient_batcher(3, 4096));
  EngineGate gate;
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
  pace.measure(0, 10, 0.05);
  pace.measure(8, 0, 0.04);
  EXPECT_EQ(pace.prompt_tokens(0), 64) << "small steps and decode steps say nothing";
  pace.measure(0, 64, 0.0064);
  EXPECT_EQ(pace.prompt_tokens(0), 128) << "twice the latest";
  pace.measure(0, 128, 0.0128);
  pace.measure(0, 250, 0.0250);
  EXPECT_EQ(pace.prompt_tokens(0), 512);
  EXPECT_EQ(pace.prompt_tokens(1), 448) << "with the token that decodes at most 512";
  pace.measure(16, 448, 0.0928);
  EXPECT_EQ(pace.prompt_tokens(16), 384) << "400 tokens of 0.2 milliseconds in 80, slower at once";
  EXPECT_EQ(pace.prompt_tokens(300), 64);
  EXPECT_EQ(pace.prompt_tokens(100000), 64) << "decoding alone takes the time";
  pace.measure(16, 384, 0.04);
  EXPECT_EQ(pace.prompt_tokens(16), 384) << "faster by and by";
  for (int i = 0; i < 10; ++i) pace.measure(16, 384, 0.04);
  EXPECT_EQ(pace.prompt_tokens(16), 448);
}

}  // namespace
