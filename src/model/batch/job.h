// A request inside of a batcher: what the caller asked for, and its progress.
#pragma once

#include <chrono>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "model/batch/budget.h"
#include "model/generate/writer.h"
#include "weft/batcher.h"

namespace weft::model {

using Clock = std::chrono::steady_clock;

// One text of a request. The choice has a sequence of the state from admission to its end.
struct Choice {
  int64_t sequence = -1;  // -1: none
  TokenCallback on_token;
  std::optional<Writer> writer;
  int32_t last = 0;    // the token chosen last; the sequence does not hold it yet
  bool ended = false;  // its callbacks were called
  std::exception_ptr thrown;
};

struct Job {
  Batcher::Ticket ticket = 0;
  BatchRequest request;
  BatchCallbacks callbacks;
  Clock::time_point submitted, started, first_token;
  // Sequences that were admitted while the request waits. By clients: those of other clients since the latest turn of its client.
  // By users: those of other users of its client since the latest turn of its user.
  int64_t passed_by_clients = 0, passed_by_users = 0;

  std::vector<Choice> choices;  // must not grow once admitted: writers refer to the callbacks in it
  bool admitted = false;        // pages are reserved for it
  RequestPages pages;
  std::vector<int32_t> decoded;                       // with a session: the tokens after the prompt that the sequence holds
  std::vector<int32_t> kept;                          // BatchResult::kept
  std::vector<float> prompt_logprobs;                 // BatchResult::prompt_logprobs
  std::vector<std::vector<TokenLogprob>> prompt_top;  // BatchResult::prompt_top
  int64_t read = 0;                                   // tokens of the prompt that the sequence holds
  int64_t cached = 0;                                 // those of `read` that came from the store or a session
  bool prompt_part = false;                           // ModelInput::prompt_part of the pieces of the prompt
  bool from_prompts = false;                          // the sequence was never decoded: its memory may go to the store
  bool keeps = false;                                 // the session takes the sequence when the request ends
  std::optional<bool> has_file;                       // has the session a file? Unknown until the request is the next one
  bool stale_file = false;                            // the session has a file of other tokens, to be removed once these are kept
  std::optional<Status> fault;                        // why the request fails
  bool broken = false;                                // a step failed: the sequences are undefined

  int64_t prompt() const { return static_cast<int64_t>(request.tokens.size()); }
  bool reads() const { return read < prompt(); }
  bool over() const {
    if (fault) return true;
    for (const Choice& choice : choices)
      if (!choice.ended) return false;
    return !choices.empty();
  }
};

using Jobs = std::list<std::unique_ptr<Job>>;

}  // namespace weft::model
