// Continuous batching: many requests share one model and one state, with forks, sessions and a shared prefix store.
//
//   weft::Batcher batcher(model, {.sequences = 16, .capacity = 8192, .kv = "8v4"});
//   auto ticket = batcher.submit({.tokens = model.encode("It was a dark night, and")},
//                                {.on_token = [](int64_t choice, const weft::GeneratedToken& next) { ... return true; },
//                                 .on_end = [](const weft::BatchResult& result) { ... }});
//
// A batcher has one engine thread, which runs the model. Requests join and leave between two steps. A step computes one token of
// every sequence that decodes, and chunks of prompts (chunked prefill). Chunks are so short that a step takes at most `longest_step`,
// or the time of a decode step and 64 tokens of prompts where that is longer. The length of chunks follows the measured speed of
// steps.
//
// Fairness. Of the waiting requests, the next to run belongs to the client with the fewest running sequences. Among the requests of
// this client, it belongs to the user with the fewest running sequences. A waiting client ages: for every BatcherOptions::sequences
// sequences of other clients that are admitted before it, the client counts as running one sequence fewer. So every client gets its
// turn, whoever else arrives. The users of a client age in the same way. Clients whose prompts are being read share the tokens of a
// step evenly, and so do the users of a client.
//
// Queue. While the queue has room, every client may use it. Of n waiting clients, each has a share of queue / n requests, at least
// one. A full queue still takes requests of a client below its share. Requests beyond the share of their client do not count against
// the limit. So a client that fills the queue does not shut out the others.
//
// Results. On the cpu, a request gets the tokens that a Generator with the same options and an empty state of its own would write.
// Neither the other requests nor the contents of the prefix store change them: chunks end at multiples of 64 tokens, and the store
// holds only checkpoints of prompts at such multiples. On a GPU the logits differ by rounding.
//
// Choices. A request for several choices reads its prompt once. The memory of the other choices is forked from the first.
//
// Sessions. The batcher keeps the memory of the sequence of a request with a session id. If the tokens of the session's next
// request begin with the tokens of that memory, the batcher reads only the rest, as a Generator that keeps its state does. Otherwise
// it drops the memory and reads all tokens. Requests of one session run one after another. Kept memory counts against the budget. When
// running requests need the bytes, the least recently used session is dropped. A session also expires.
//
// Forks. Where a request has no session of its own that it continues, it begins with the memory of the session BatchRequest::parent, if
// its tokens begin with those of that memory, and the parent keeps it. So a conversation continues in two ways from where it ended.
// KV pages are shared, and counted for both. A parent that a request uses at that time, or that is only in a file, is not forked.
//
// Files of sessions. With a folder, drain() saves every session there, and a later batcher of the same model and KV policy resumes
// a session when a request names it. If the file belongs to another model or policy, or is damaged, that request fails with a
// sentence and the file stays; drop_session() removes it. A file is "<SHA-256 of the session id>.state" with mode 0600. A folder that
// other users can write is refused. Reading a file delays the running requests. Sessions that were dropped for memory are not saved.
//
// Faults. When a step fails (memory, device), the requests of the step fail with a sentence, and the batcher continues.
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
  int64_t sequences = 8;    // most sequences of a step, 1 to 4096; every choice of a request is one
  int64_t capacity = 4096;  // most tokens of one sequence
  std::string kv = "8v4";   // KV policy, as in Model::create_state
  int64_t queue = 64;       // most requests that wait, at least 1; a client below its share may exceed it
  // Most bytes of states, scratch, sessions and prefix store together. Weights, and the tokens and texts of requests, are not
  // counted. 0: the bytes of `sequences` sequences of `capacity` tokens, of the states of as many kept sessions, and `store`. Sessions
  // and running sequences share KV pages. A request is admitted if the budget suffices even when every running sequence grows to its
  // own limit.
  int64_t memory = 0;
  int64_t store = 64 << 20;                     // budget of the prefix store, a part of `memory`; 0: no store
  int64_t every = 512;                          // distance of the store's checkpoints of a prompt in tokens, a multiple of 64
  std::chrono::milliseconds longest_step{200};  // longest step, which sets the length of chunks of prompts
  std::chrono::seconds session_expiry{1800};    // a session that no request uses for this time is dropped
  std::filesystem::path sessions;               // folder for files of sessions; empty: sessions end with the batcher
  Stream stream;
};

struct BatchRequest {
  std::vector<int32_t> tokens;  // the prompt, at least one token
  // `draft`, `sequence` and `store` must have their defaults. With max_tokens 0, the prompt is read and nothing is written.
  GenerateOptions options;
  int64_t choices = 1;  // choice i samples with the seed plus i
  std::string session;  // id of up to 256 bytes; empty: no session. Only with one choice
  std::string parent;   // id of the session to fork; empty: none
  std::string client;   // the sender, such as its address, for fairness between clients
  std::string user;     // the user of the client, for fairness between its users; the client may choose the name
  std::optional<std::chrono::steady_clock::time_point> deadline;  // at this time the request ends with the text written so far
  // Report the log probabilities of the prompt's own tokens, too, as many as options.logprobs says. The prompt is then read from its
  // beginning, in pieces of 64 tokens, so `session` and `parent` must be empty.
  bool prompt_logprobs = false;
};

enum class BatchOutcome {
  finished,   // a stop rule ended every choice
  cancelled,  // by cancel()
  deadline,   // the request's own deadline passed
  failed,     // BatchResult::status says why
  stopped     // the batcher stopped
};
const char* batch_outcome_name(BatchOutcome outcome);  // "finished"

struct BatchResult {
  BatchOutcome outcome = BatchOutcome::finished;
  Status status;  // a fault with a sentence for `failed`
  // One per choice of the request, whatever the outcome, with the tokens written so far. `stop` is valid for choices that ended
  // (on_choice_end). `restored_tokens` come from the store or the session; times and drafts are not filled in.
  std::vector<Generation> choices;
  // The tokens that the session's memory holds now; empty where nothing was kept. The session's next request continues only if its
  // tokens begin with `kept`. `kept` is the prompt, followed by choices[0].tokens with or without the last token: a sequence holds a
  // token once the next one is chosen. The text may end earlier than `kept`: a stop string cuts the text inside of tokens that the
  // sequence holds already, and after cancel() or a deadline some text may still be held back.
  std::vector<int32_t> kept;
  // With prompt_logprobs: log probabilities of the prompt's tokens that were read, without the first, which nothing predicts; and
  // the most probable tokens at each position.
  std::vector<float> prompt_logprobs;
  std::vector<std::vector<TokenLogprob>> prompt_top;
  int64_t prompt_tokens = 0;       // tokens of the prompt
  int64_t cached_tokens = 0;       // those of prompt_tokens that came from the store or the session
  double queued_seconds = 0;       // until the first step of the request
  double first_token_seconds = 0;  // from submit() to the logits of the first token; 0: none
};

// Called on the engine thread, one at a time, without any lock: a callback may call every function of the batcher, but must not
// destroy the batcher. A slow callback delays all requests. An exception of on_token or on_choice_end ends the request as failed; an
// exception of on_end is dropped. on_end is the last callback of every ticket, and is called exactly once.
struct BatchCallbacks {
  std::function<bool(int64_t choice, const GeneratedToken& next)> on_token;  // false ends the choice
  std::function<void(int64_t choice, const Generation& written)> on_choice_end;
  std::function<void(BatchResult result)> on_end;  // a callback that takes the result by value gets it without a copy
};

struct BatchSubmission {
  BatchRequest request;
  BatchCallbacks callbacks;
};

// Statistics. The members of the first group are present numbers; those of the second group only grow.
struct BatcherStats {
  int64_t running = 0, waiting = 0, sessions = 0;  // sequences that run, requests that wait, sessions kept in memory
  int64_t reading = 0, decoding = 0;               // running sequences that read their prompts, and that write

  int64_t requests = 0, finished = 0, cancelled = 0, failed = 0;  // cancelled: also by deadline or stop
  int64_t refused = 0;                                            // refused by submit(), because the queue was full
  int64_t prompt_tokens = 0, cached_tokens = 0, written_tokens = 0;
  int64_t resumed_sessions = 0, dropped_sessions = 0;  // continued by a request; dropped for memory or expired
  int64_t steps = 0;
  double step_seconds = 0;          // time of all steps
  double longest_step_seconds = 0;  // time of the longest step in which a sequence decoded

  // Bytes. state.kv is reserved address space; kv_used are the pages that hold tokens of sequences and sessions.
  HybridBytes state;
  int64_t kv_used = 0, session_states = 0, scratch = 0, weights = 0;
  int64_t budget = 0;  // BatcherOptions::memory, or the default where that is 0
  PrefixStoreStats store;
};

class Batcher {
 public:
  using Ticket = uint64_t;

  // Allocates the state and starts the thread. Throws Error (operator "batcher") for options out of range and for a budget that
  // does not hold one sequence; the message says how many bytes one sequence takes. The model must outlive the batcher.
  Batcher(const Model& model, BatcherOptions options);
  ~Batcher();  // calls stop()
  Batcher(const Batcher&) = delete;
  Batcher& operator=(const Batcher&) = delete;

  const BatcherOptions& options() const;

  // Would submit() take this request if the queue had room? Thread-safe, as everything below.
  Status check(const BatchRequest& request) const;
  // Queues a request. Throws Error (Code::invalid_argument) as check() says; with argument "queue" where the queue has no room for
  // this client; with argument "batcher" once it drains or stops. Callbacks may come before submit() returns.
  Ticket submit(BatchRequest request, BatchCallbacks callbacks);
  // Queues all of these requests, or throws and queues none. Argument "requests": they do not fit into an empty queue, so trying
  // again does not help.
  std::vector<Ticket> submit(std::vector<BatchSubmission> requests);
  // Ends a request before the next step. A ticket that ended or is unknown is ignored.
  void cancel(Ticket ticket);
  // Forgets a session, its file included. A request that runs in this session ends as usual and keeps nothing. `dropped` is called as
  // callbacks of requests are, once that has happened: was there memory, a file, or a request that runs in this session? Where the
  // batcher has ended, it is called before drop_session() returns.
  void drop_session(const std::string& session, std::function<void(bool)> dropped = {});
  // The tokens of the session's file, from which a request would resume it; empty: there is none, or it cannot be read. Reads the
  // whole file.
  std::vector<int32_t> saved_tokens(const std::string& session) const;

  BatcherStats stats() const;

  // Refuses further requests, lets running and waiting requests finish until the deadline, stops the rest, saves the sessions, and
  // returns when the engine thread has ended. Called from a callback, drain() and stop() only begin their work and return at once.
  // Returns a sentence for every session that could not be saved.
  std::vector<std::string> drain(std::chrono::steady_clock::time_point deadline);
  // Stops all requests after the running step, without saving sessions. If a drain() is saving sessions, it ends after the session
  // that it is writing, and returns sentences that name the others.
  void stop();
  // Begins the work of stop() and returns at once. Takes a mutex, so signal handlers must not call it.
  void request_stop();

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace weft
#pragma GCC visibility pop
