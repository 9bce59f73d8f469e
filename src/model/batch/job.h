// A request inside of a batcher: what was asked, and how far it is.
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

// One text of a request. It has a sequence of the state from admission to its end.
struct Choice {
  int64_t sequence = -1;  // -1: none
  TokenCallback on_token;
  std::optional<Writer> writer;
  int32_t last = 0;    // the token that was chosen last, which the sequence does not hold yet
  bool ended = false;  // its callbacks were called
  std::exception_ptr thrown;
};

struct Job {
  Batcher::Ticket ticket = 0;
  BatchRequest request;
  BatchCallbacks callbacks;
  Clock::time_point submitted, started, first_token;
  // Sequences that were admitted while it waits, since its client's latest turn for other clients, and since its user's latest turn
  // for other users of its client.
  int64_t passed_by_clients = 0, passed_by_users = 0;

  std::vector<Choice> choices;  // of fixed size once admitted: writers refer to their callbacks
  bool admitted = false;        // pages are reserved for it
  RequestPages pages;
  std::vector<int32_t> decoded;        // of a request with a session: the tokens after the prompt that its sequence holds
  std::vector<int32_t> kept;           // BatchResult::kept
  std::vector<float> prompt_logprobs;  // BatchResult::prompt_logprobs
  std::vector<std::vector<TokenLogprob>> prompt_top;  // BatchResult::prompt_top
  int64_t read = 0;                                   // tokens of the prompt that the sequence holds
  int64_t cached = 0;                                 // of these, from the store or a session
  bool prompt_part = false;                           // ModelInput::prompt_part of its pieces
  bool from_prompts = false;                          // the sequence was never decoded: its memory may go to the store
  bool keeps = false;                                 // leaves its sequence to its session
  std::optional<bool> has_file;                       // of its session; unknown until the request is the next one
  bool stale_file = false;                            // the session has a file of other tokens, which goes once these are kept
  std::optional<Status> fault;                        // the request fails
  bool broken = false;                                // by a fault of a step: its sequences are undefined

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
