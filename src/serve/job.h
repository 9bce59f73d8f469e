// One request of the API that runs: its prompts in the batcher, and its growing answer.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "serve/engine.h"
#include "serve/exchange.h"
#include "serve/reply_json.h"

namespace weft::serve {

// The data of a job beside its requests to the batcher.
struct JobPlan {
  ReplyShape shape;
  bool stream = false, include_usage = false, logprobs = false;
  int64_t choices = 1;                                 // choices of every prompt
  std::vector<std::string> echoes;                     // text before the answer, by prompt; empty: no echo
  std::vector<std::vector<int32_t>> echo_tokens = {};  // tokens of the echoes, where log probabilities are wanted
  std::optional<ThinkingFilter> filter;                // for chats; every choice has a copy
  std::string session, session_text;                   // with a session: its name, and the text of the prompt
  SessionTexts::Changes session_changes = {};          // the changes of session_text
};

// Choice c of prompt p has the index p * choices + c.
class Job : public std::enable_shared_from_this<Job> {
 public:
  Job(Engine& engine, JobPlan plan, std::shared_ptr<Exchange> exchange);

  // Queues one request per prompt, all or none. Throws ApiError where none is queued.
  void submit(std::vector<BatchRequest> requests);

 private:
  // Called on the thread of the batcher.
  void on_token(int64_t index, const GeneratedToken& next);
  void on_choice_end(int64_t index, const Generation& written);
  void on_end(size_t prompt, BatchResult result);

  void begin();  // begins a stream; any thread may call it
  bool write_text(int64_t index, const ThinkingFilter::Pieces& pieces, const GeneratedToken* token);
  void cancel();
  void finish_stream();
  void reply_whole();
  std::optional<ApiError> fault() const;
  Usage usage() const;
  const char* finish_of(int64_t index) const;
  void keep_session();

  Engine& engine_;
  const JobPlan plan_;
  const std::shared_ptr<Exchange> exchange_;
  std::vector<int32_t> session_tokens_;  // with a session: the tokens of the prompt
  std::once_flag begun_;

  // By index. Only the thread of the batcher uses these until the last choice has ended.
  std::vector<ThinkingFilter> filters_;
  std::vector<std::optional<StopReason>> stops_;

  std::mutex lock_;  // protects the members below
  std::vector<Batcher::Ticket> tickets_;
  std::vector<BatchResult> results_;  // by prompt
  size_t expected_ = 0, ended_ = 0;
  bool cancelled_ = false;
};

}  // namespace weft::serve
