// The life of requests in a batcher: orders from callers, ends of requests, sessions, statistics. See engine.h.
#include "model/batch/engine.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/fail.h"
#include "model/parts.h"
#include "model/state/hybrid_pools.h"
#include "weft/printable.h"

namespace weft::model {

namespace {

// A fault whose text is so short that std::string allocates no memory.
Status short_fault(Code code) noexcept {
  Status status;
  status.code = code;
  status.message = "out of memory";
  return status;
}

}  // namespace

Status fault_of(const char* argument, const char* what, std::string_view name) noexcept {
  try {
    const std::string text = (name.empty() ? std::string() : "'" + printable_text(name) + "' ") + what + ": ";
    try {
      throw;
    } catch (const Error& error) {
      return fail(error.status().code, kBatcherOp, argument, text + error.what());
    } catch (const std::bad_alloc&) {
      return fail(Code::device_error, kBatcherOp, argument, text + "memory ran out");
    } catch (const std::exception& error) {
      return fail(Code::device_error, kBatcherOp, argument, text + error.what());
    } catch (...) {
      return fail(Code::device_error, kBatcherOp, argument, text + "an exception of an unknown type");
    }
  } catch (...) {
    return short_fault(Code::device_error);
  }
}

namespace {

// Memory may have run out when a fault is set, so copying its sentence may fail, too.
void set_fault(Job& job, const Status& fault) noexcept {
  if (job.fault) return;
  try {
    job.fault = fault;
  } catch (...) {
    job.fault.emplace(short_fault(fault.code));
  }
}

}  // namespace

Engine::Engine(const Model& model, const BatcherOptions& options, Budget budget, Mailbox& mailbox, const SessionFiles& files,
               PrefixStore* store)
    : model_(model),
      options_(options),
      budget_(std::move(budget)),
      mailbox_(mailbox),
      store_(store),
      state_(HybridState::create(budget_.plan)),
      files_(files),
      pace_(std::chrono::duration<double>(options.longest_step).count(), step_tokens(options.stream, parts_of(model).config)),
      logits_(Block::allocate(static_cast<size_t>(options.sequences * model.vocab_size()) * sizeof(float))) {
  // Reserves all pages at once: a pool that grows exists twice while it is copied, which would exceed the budget and delay a step.
  // On the host, the system gives memory to pages only when they are first written.
  pools_of(state_).pages->reserve(budget_.pages);
  const auto sequences = static_cast<size_t>(options.sequences);
  for (int64_t n = options.sequences - 1; n >= 0; --n) free_.push_back(n);
  inputs_.reserve(sequences);
  pieces_.reserve(sequences);
  chosen_.reserve(sequences);
  decoding_.reserve(sequences);
  stats_.state = state_.bytes();
  stats_.scratch = budget_.scratch;
  stats_.weights = model.weight_bytes(options.stream);
  stats_.budget = budget_.bytes;
  publish();
}

void Engine::run() {
  for (bool open = true; open;) {
    try {
      open = turn();
    } catch (...) {
      const Status fault = fault_of("request", "failed between two steps");
      const bool idle = running_.empty();
      for (auto& job : running_) {
        job->broken = true;
        set_fault(*job, fault);
      }
      end_all(running_, BatchOutcome::failed);
      if (idle && !waiting_.empty()) {  // otherwise every further turn could fail in the same way
        set_fault(*waiting_.front(), fault);
        end(waiting_, waiting_.begin(), BatchOutcome::failed);
      }
    }
  }
  publish();
  finish();
}

void Engine::finish() {
  for (;;) {
    std::vector<DroppedSession> dropped;
    {
      const std::lock_guard lock(mailbox_.mutex);
      dropped.swap(mailbox_.orders.dropped);
      if (dropped.empty()) {
        mailbox_.ended = true;
        mailbox_.closed.notify_all();
        return;
      }
    }
    for (const DroppedSession& order : dropped) drop(order);
  }
}

bool Engine::turn() {
  receive();
  end_late();
  stats_.dropped_sessions += sessions_.expire(Clock::now() - options_.session_expiry);
  if (!close()) return false;
  admit();
  if (!running_.empty()) publish();  // callbacks may read the statistics
  step();
  for (auto job = running_.begin(); job != running_.end();) {
    const auto place = job++;
    if ((*place)->over()) end(running_, place, BatchOutcome::finished);
  }
  publish();
  return true;
}

// ---- orders

void Engine::receive() {
  Orders orders;
  {
    std::unique_lock lock(mailbox_.mutex);
    Orders& given = mailbox_.orders;
    if (running_.empty() && waiting_.empty() && mode_ == Mode::open) {
      const auto some = [&] {
        return !given.arrivals.empty() || !given.cancelled.empty() || !given.dropped.empty() || given.mode != Mode::open;
      };
      if (const auto oldest = sessions_.oldest())
        mailbox_.changed.wait_until(lock, *oldest + options_.session_expiry, some);
      else
        mailbox_.changed.wait(lock, some);
    }
    orders.arrivals.swap(given.arrivals);
    orders.cancelled.swap(given.cancelled);
    orders.dropped.swap(given.dropped);
    mode_ = given.mode;
    drained_by_ = given.drained_by;
  }
  obey(std::move(orders));
}

void Engine::obey(Orders orders) {
  waiting_.splice(waiting_.end(), orders.arrivals);
  for (const Batcher::Ticket ticket : orders.cancelled)
    for (Jobs* jobs : {&running_, &waiting_}) {
      const auto place = std::ranges::find_if(*jobs, [&](const auto& job) { return job->ticket == ticket; });
      if (place != jobs->end()) end(*jobs, place, BatchOutcome::cancelled);
    }
  for (const DroppedSession& order : orders.dropped) drop(order);
}

void Engine::drop(const DroppedSession& order) {
  bool known = sessions_.drop(order.session);
  for (auto& job : running_)
    if (job->request.session == order.session) known |= std::exchange(job->keeps, false);
  for (auto& job : waiting_)
    if (job->request.session == order.session) job->has_file.reset();
  known |= remove_file(order.session);
  try {
    if (order.dropped) order.dropped(known);
  } catch (...) {  // no caller is left that could receive the fault
  }
}

bool Engine::remove_file(const std::string& session) const noexcept {
  try {
    return files_.remove(session);
  } catch (...) {  // no memory for the name of the file, so the file stays
    return false;
  }
}

void Engine::end_late() {
  const Clock::time_point now = Clock::now();
  for (Jobs* jobs : {&running_, &waiting_})
    for (auto job = jobs->begin(); job != jobs->end();) {
      const auto place = job++;
      if ((*place)->request.deadline && now >= *(*place)->request.deadline) end(*jobs, place, BatchOutcome::deadline);
    }
}

bool Engine::close() {
  if (mode_ == Mode::open) return true;
  if (mode_ == Mode::stopping || Clock::now() >= drained_by_) {
    end_all(running_, BatchOutcome::stopped);
    end_all(waiting_, BatchOutcome::stopped);
  }
  if (!running_.empty() || !waiting_.empty()) return true;
  if (mode_ == Mode::draining) save_sessions();
  sessions_.clear();
  return false;
}

// Called while an exception is handled.
void Engine::name_unsaved(const KeptSession& session) noexcept {
  try {
    const Status fault = fault_of("session", "was not saved", session.id);
    const std::lock_guard lock(mailbox_.mutex);
    mailbox_.unsaved.push_back(fault.message);
  } catch (...) {  // no memory for the sentence
  }
}

bool Engine::stops() const {
  const std::lock_guard lock(mailbox_.mutex);
  return mailbox_.orders.mode == Mode::stopping;
}

// stop() ends the loop between two saves, because the files of many sessions take long to write.
void Engine::save_sessions() {
  if (!files_.used()) return;
  for (const KeptSession& session : sessions_.all()) {
    try {
      if (stops()) throw std::runtime_error("the batcher stops");
      state_.restore(0, session.memory);
      files_.save(model_, state_, 0, session, options_.kv);
    } catch (...) {
      name_unsaved(session);
    }
    state_.reset(0);
  }
}

// ---- ends

void Engine::release(Job& job, Choice& choice) {
  if (choice.sequence < 0) return;
  state_.reset(choice.sequence);
  free_.push_back(choice.sequence);
  choice.sequence = -1;
  reserved_pages_ -= job.pages.each;
}

void Engine::keep_session(Job& job) {
  const int64_t sequence = job.choices.empty() ? -1 : job.choices[0].sequence;
  if (!job.keeps || job.broken || mode_ == Mode::stopping || sequence < 0 || state_.tokens(sequence) == 0) return;
  try {
    std::vector<int32_t> tokens(job.request.tokens.begin(), job.request.tokens.begin() + job.read);
    tokens.insert(tokens.end(), job.decoded.begin(), job.decoded.end());
    std::vector<int32_t> kept = tokens;
    while (sessions_.size() >= budget_.kept && sessions_.drop_oldest()) ++stats_.dropped_sessions;
    const int64_t pages = pages_of(state_.tokens(sequence));
    sessions_.keep({job.request.session, std::move(tokens), state_.snapshot(sequence), Clock::now(), pages});
    job.kept = std::move(kept);
    if (job.stale_file) remove_file(job.request.session);
  } catch (...) {  // no memory: the session's next request prefills its whole prompt
    ++stats_.dropped_sessions;
  }
}

void Engine::end(Jobs& jobs, Jobs::iterator place, BatchOutcome outcome) {
  Jobs own;
  own.splice(own.end(), jobs, place);
  Job& job = *own.front();
  keep_session(job);
  for (Choice& choice : job.choices) release(job, choice);
  if (job.admitted) reserved_pages_ -= job.pages.shared;
  BatchResult result;
  result.outcome = job.fault ? BatchOutcome::failed : outcome;
  if (job.fault) result.status = std::move(*job.fault);
  result.kept = std::move(job.kept);
  result.prompt_logprobs = std::move(job.prompt_logprobs);
  result.prompt_top = std::move(job.prompt_top);
  result.prompt_tokens = job.prompt();
  result.cached_tokens = job.cached;
  const auto seconds = [&](Clock::time_point time) {
    return time == Clock::time_point() ? 0 : std::chrono::duration<double>(time - job.submitted).count();
  };
  result.queued_seconds = seconds(job.admitted ? job.started : Clock::now());
  result.first_token_seconds = seconds(job.first_token);
  try {
    result.choices.resize(static_cast<size_t>(job.request.choices));
    for (size_t i = 0; i < job.choices.size(); ++i) {
      if (job.choices[i].writer) result.choices[i] = std::move(job.choices[i].writer->result());
      result.choices[i].prompt_tokens = result.prompt_tokens;
      result.choices[i].restored_tokens = result.cached_tokens;
    }
  } catch (...) {
    result.outcome = BatchOutcome::failed;
    result.status = fault_of("request", "lost its texts");
  }
  ++(result.outcome == BatchOutcome::finished ? stats_.finished
     : result.outcome == BatchOutcome::failed ? stats_.failed
                                              : stats_.cancelled);
  if (!job.admitted) {
    const std::lock_guard lock(mailbox_.mutex);
    mailbox_.waiting.leave(job.request.client);
  }
  publish();
  try {
    if (job.callbacks.on_end) job.callbacks.on_end(std::move(result));
  } catch (...) {  // no callback is left that could report the fault
  }
}

void Engine::end_all(Jobs& jobs, BatchOutcome outcome) {
  while (!jobs.empty()) end(jobs, jobs.begin(), outcome);
}

void Engine::publish() {
  stats_.running = options_.sequences - static_cast<int64_t>(free_.size());
  stats_.reading = 0;
  for (const auto& job : running_) stats_.reading += job->reads();
  stats_.decoding = 0;
  for (const auto& job : running_)
    if (!job->reads()) stats_.decoding += std::ranges::count_if(job->choices, [](const Choice& choice) { return !choice.ended; });
  stats_.sessions = sessions_.size();
  stats_.session_states = sessions_.size() * budget_.kept_bytes;
  stats_.kv_used = state_.pages_in_use() * budget_.page_bytes;
  const std::lock_guard lock(mailbox_.mutex);
  stats_.requests = mailbox_.stats.requests;
  stats_.refused = mailbox_.stats.refused;
  mailbox_.stats = stats_;
}

}  // namespace weft::model
