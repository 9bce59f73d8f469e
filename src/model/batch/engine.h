// The engine of a batcher: admits requests, runs steps, ends requests. Everything here belongs to the engine thread.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/batch/budget.h"
#include "model/batch/job.h"
#include "model/batch/mailbox.h"
#include "model/batch/pace.h"
#include "model/batch/sessions.h"
#include "model/state/memory.h"

namespace weft::model {

class Engine {
 public:
  // Allocates the state. `options` and `files` must outlive the engine.
  Engine(const Model& model, const BatcherOptions& options, Budget budget, Mailbox& mailbox, const SessionFiles& files,
         PrefixStore* store);

  void run();  // returns when the batcher is drained or stopped

 private:
  // ---- engine.cc: orders and the life of requests
  bool turn();     // false: the engine has ended
  void receive();  // takes the orders of callers; waits for orders if there is nothing to do
  void obey(Orders orders);
  void drop(const DroppedSession& order);
  void finish();       // carries out orders that came after the last turn
  void end_late();     // ends requests whose deadline has passed
  bool close();        // while draining or stopping: true when nothing is left to do
  bool stops() const;  // was stop() or request_stop() called?
  void save_sessions();
  void name_unsaved(const KeptSession& session) noexcept;
  // Ends a request: keeps its session, frees its sequences, calls back.
  void end(Jobs& jobs, Jobs::iterator place, BatchOutcome outcome);
  void keep_session(Job& job);
  bool remove_file(const std::string& session) const noexcept;  // was there a file?
  void release(Job& job, Choice& choice);
  void end_all(Jobs& jobs, BatchOutcome outcome);
  void publish();

  // ---- admission.cc
  void admit();
  Jobs::iterator next_waiting();
  void age_waiting(const BatchRequest& admitted);
  bool has_file(Job& job) const;
  bool make_room(Job& job);
  void start(Job& job);
  void find_beginning(Job& job);                                    // restores from the session, its file, the parent or the store
  const KeptSession* parent_of(const BatchRequest& request) const;  // null: no session that the request continues
  void resume(Job& job);

  // ---- step.cc
  void step();
  void grant_pieces(int64_t tokens);
  int64_t piece_end(const Job& job) const;  // the prompt token at which the next piece must end
  bool compute();
  void finish_piece(Job& job, int64_t tokens);
  bool read_logprobs(Job& job, int64_t tokens);  // of a piece of the prompt; false: the request fails
  void choose();
  void write(Job& job, Choice& choice, int32_t token);
  void end_choice(Job& job, Choice& choice);
  void check_callbacks(Job& job, Choice& choice);
  float* logits_of(const Choice& choice) const;  // the choice's row of logits_

  const Model& model_;
  const BatcherOptions& options_;
  const Budget budget_;
  Mailbox& mailbox_;
  PrefixStore* store_;  // null: none
  HybridState state_;
  Sessions sessions_;
  const SessionFiles& files_;
  Pace pace_;
  Block logits_;         // [sequences, vocab_size] f32
  Block prompt_logits_;  // [kCutTokens, vocab_size] f32; allocated when a request wants log probabilities of its prompt

  Jobs waiting_, running_;
  std::vector<int64_t> free_;   // sequences that no request has
  int64_t reserved_pages_ = 0;  // pages of running requests
  Mode mode_ = Mode::open;
  Clock::time_point drained_by_;
  BatcherStats stats_;
  uint64_t turns_ = 0;  // steps with prompts so far: rotates which client comes first

  // The parts of one step.
  struct Piece {
    Job* job;
    int64_t tokens;
  };
  struct Chosen {
    Job* job;
    Choice* choice;
    const float* logits;
    int32_t token;
  };
  std::vector<ModelInput> inputs_;
  std::vector<Piece> pieces_;
  std::vector<Chosen> chosen_;
  std::vector<std::pair<Job*, Choice*>> decoding_;
};

// A fault from the exception that is being handled: "batcher: <argument> <what>: <why>", and with a name
// "batcher: <argument> '<name>' <what>: <why>". If memory runs out again, the sentence is short.
Status fault_of(const char* argument, const char* what, std::string_view name = {}) noexcept;

}  // namespace weft::model
