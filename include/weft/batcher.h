// Generating texts for many callers at once: continuous batching over one state, with forks, sessions and a shared prefix store.
//
//   weft::Batcher batcher(model, {.sequences = 16, .capacity = 8192, .kv = "8v4"});
//   auto ticket = batcher.submit({.tokens = model.encode("It was a dark night, and")},
//                                {.on_token = [](int64_t choice, const weft::GeneratedToken& next) { ... return true; },
//                                 .on_end = [](const weft::BatchResult& result) { ... }});
//
// One thread of the batcher runs the model. Between two steps requests join and leave: a step computes one token of every sequence
// that decodes, and beside them pieces of prompts, so short that a step takes no longer than `longest_step` or one decode step,
// whichever is longer. Clients take turns: of the waiting requests, that of the client with the fewest running ones joins first.
//
// On the cpu the tokens of a request do not depend on its neighbours, nor on what the prefix store holds: pieces of prompts end at
// multiples of 64 tokens, and only checkpoints at such multiples that a prompt left are restored. On a GPU they differ by rounding.
//
// Choices. A request for several choices reads its prompt once; the other sequences are forks of the first.
//
// Sessions. A request with a session id leaves its sequence with the batcher. The next request of this session whose tokens begin
// with those of the sequence reads only what follows; otherwise the sequence is dropped and everything is read. A session counts
// against the memory, expires, and is the first to be dropped when a sequence is wanted, the least recently used one first.
//
// Link with weft_model. ABI: relink C++ callers between minor versions.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/generate.h"

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft {

struct BatcherOptions {
  int64_t sequences = 8;    // that run at once; a choice of a request is one
  int64_t capacity = 4096;  // tokens of one sequence at most
  std::string kv = "8v4";   // KV policy, as Model::create_state
  int64_t queue = 64;       // requests that may wait
  // Bytes of state, scratch and prefix store together at most; 0: what `sequences` of `capacity` tokens take, and `store` bytes.
  // Weights are not counted. Sequences are admitted so that the budget holds even if each grows to its own limit.
  int64_t memory = 0;
  int64_t store = 64 << 20;                           // budget of the prefix store
  std::chrono::milliseconds longest_step{200};        // see above
  std::chrono::seconds session_expiry{1800};          // of a session that no request uses
  std::filesystem::path sessions;                     // folder for sessions at drain(); empty: sessions end with the batcher
  Stream stream;
};

struct BatchRequest {
  std::vector<int32_t> tokens;  // the prompt, at least one token
  GenerateOptions options;      // `draft`, `sequence` and `store` are the batcher's and must have their defaults
  int64_t choices = 1;          // choice i samples with the seed plus i
  std::string session;          // empty: none; only with one choice
  std::string client;           // for turns between clients
  std::optional<std::chrono::steady_clock::time_point> deadline;  // then the request ends with Code::deadline semantics: see Outcome
};

enum class BatchOutcome { finished, cancelled, deadline, failed, stopped };  // stopped: the batcher was
const char* batch_outcome_name(BatchOutcome outcome);

struct BatchResult {
  BatchOutcome outcome = BatchOutcome::finished;
  Status status;                     // why, for `failed`
  std::vector<Generation> choices;   // what was written so far, whatever the outcome
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;         // of these, from the store or the session
};

// Called on the thread of the batcher, never after on_end. They must not block: a slow one stalls everybody.
struct BatchCallbacks {
  std::function<bool(int64_t choice, const GeneratedToken& next)> on_token;                  // false ends the choice
  std::function<void(int64_t choice, StopReason stop)> on_choice_end;
  std::function<void(const BatchResult& result)> on_end;                                     // exactly once
};

// What is going on, for people and for metrics. Counters only grow.
struct BatcherStats {
  int64_t running = 0, waiting = 0, sessions = 0;           // sequences; requests; sessions kept
  int64_t requests = 0, finished = 0, cancelled = 0, refused = 0, failed = 0;
  int64_t prompt_tokens = 0, cached_tokens = 0, written_tokens = 0;
  int64_t steps = 0;
  double step_seconds = 0, longest_step_seconds = 0;        // of all steps; of the longest that decoded anything
  HybridBytes state;
  int64_t state_pages = 0, budget = 0, weights = 0, scratch = 0;
  PrefixStoreStats store;
};

class Batcher {
 public:
  using Ticket = uint64_t;

  // Allocates the state and starts the thread. Throws Error (operator "batcher") for options out of range and for a budget that
  // holds no sequence; the message says what one takes.
  Batcher(const Model& model, BatcherOptions options);
  ~Batcher();  // stop()
  Batcher(const Batcher&) = delete;
  Batcher& operator=(const Batcher&) = delete;

  const BatcherOptions& options() const;

  // Would submit() take this request, were there room in the queue? Checks everything but the queue.
  Status check(const BatchRequest& request) const;
  // Queues a request. Throws Error: Code::invalid_argument as check() says, or with argument "queue" where `queue` requests wait or
  // the batcher stops.
  Ticket submit(BatchRequest request, BatchCallbacks callbacks);
  // Ends a request; its on_end is called unless it was. An unknown ticket is ignored.
  void cancel(Ticket ticket);
  // Forgets a session.
  void drop_session(const std::string& session);

  BatcherStats stats() const;

  // Takes no more requests, lets those that run and wait finish until the deadline, stops the rest, and saves sessions.
  void drain(std::chrono::steady_clock::time_point deadline);
  // The same at once, without saving.
  void stop();

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace weft
#pragma GCC visibility pop
