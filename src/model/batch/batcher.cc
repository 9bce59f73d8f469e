// The public face of continuous batching: see weft/batcher.h.
#include "weft/batcher.h"

#include <iterator>
#include <string>
#include <thread>

#include "core/check.h"
#include "model/batch/engine.h"
#include "model/generate/writer.h"
#include "model/state/state_header.h"

namespace weft {

using namespace model;

struct Batcher::Parts {
  const Model& model;
  const BatcherOptions options;
  const Budget budget;
  const SessionFiles files;
  std::optional<PrefixStore> store;
  Mailbox mailbox;
  Ticket last_ticket = 0;  // under the mutex of the mailbox
  Engine engine;
  std::thread thread;
  std::thread::id engine_id;  // written before submit() can be called, so callbacks may read it

  Parts(const Model& model_of_it, BatcherOptions given)
      : model(model_of_it),
        options(std::move(given)),
        budget(plan_budget(model, options)),
        files(options.sessions, options.session_expiry),
        mailbox(options.queue),
        engine(model, options, budget, mailbox, files, make_store()) {
    try {
      thread = std::thread([this] { engine.run(); });
    } catch (const std::system_error& error) {
      throw Error(fail(Code::device_error, kBatcherOp, "thread", std::string("cannot be started: ") + error.what()));
    }
    engine_id = thread.get_id();
  }

  PrefixStore* make_store() {
    if (options.store == 0) return nullptr;
    return &store.emplace(PrefixStoreOptions{.bytes = options.store, .every = options.every});
  }

  // Waits until the engine has ended. A callback, which runs on the engine's own thread, does not wait.
  void wait(std::unique_lock<std::mutex>& lock) {
    mailbox.changed.notify_all();
    if (std::this_thread::get_id() != engine_id) mailbox.closed.wait(lock, [&] { return mailbox.ended; });
  }
};

const char* batch_outcome_name(BatchOutcome outcome) {
  constexpr const char* kNames[] = {"finished", "cancelled", "deadline", "failed", "stopped"};
  const auto i = static_cast<size_t>(outcome);
  return i < std::size(kNames) ? kNames[i] : "unknown";
}

Batcher::Batcher(const Model& model, BatcherOptions options) try : parts_(std::make_unique<Parts>(model, std::move(options))) {
} catch (const std::bad_alloc&) {
  throw Error(fail(Code::device_error, kBatcherOp, "memory", "cannot be allocated: the machine has less than the budget"));
}

Batcher::~Batcher() {
  stop();
  parts_->thread.join();
}

const BatcherOptions& Batcher::options() const { return parts_->options; }

Status Batcher::check(const BatchRequest& request) const {
  constexpr int64_t kLongestSession = 256;
  const Model& model = parts_->model;
  const BatcherOptions& own = parts_->options;
  const auto tokens = static_cast<int64_t>(request.tokens.size());
  Check check(kBatcherOp);
  check.require(tokens > 0, "tokens", "are none, wanted at least one");
  check.require(tokens <= own.capacity, "tokens", [&] {
    return "are " + std::to_string(tokens) + ", wanted at most the capacity of " + std::to_string(own.capacity);
  });
  if (const auto invalid = first_invalid_token(request.tokens, model.vocab_size()))
    check.require(false, "tokens", "hold token " + *invalid);
  check.also(check_options(model, request.options, kBatcherOp));
  check.require(request.options.draft == 0 && request.options.sequence == 0 && !request.options.store, "options",
                "have draft, sequence or store, wanted the defaults of these three");
  check.between("choices", request.choices, 1, own.sequences);
  check.require(static_cast<int64_t>(request.session.size()) <= kLongestSession, "session", [&] {
    return "has " + std::to_string(request.session.size()) + " bytes, wanted at most " + std::to_string(kLongestSession);
  });
  check.require(request.session.empty() || request.choices == 1, "session", "is for one choice, wanted `choices` 1");
  check.require(static_cast<int64_t>(request.parent.size()) <= kLongestSession, "parent", [&] {
    return "has " + std::to_string(request.parent.size()) + " bytes, wanted at most " + std::to_string(kLongestSession);
  });
  check.require(request.parent.empty() || request.parent != request.session, "parent", "is the session itself, wanted another one");
  if (request.prompt_logprobs) {
    check.require(request.options.logprobs.has_value(), "prompt_logprobs", "are wanted without options.logprobs");
    check.require(request.session.empty() && request.parent.empty(), "prompt_logprobs",
                  "are of prompts that are read from their beginning, wanted no session and no parent");
  }
  if (check.ok()) {
    const int64_t pages = pages_of_request(parts_->budget, tokens, request.options.max_tokens).total(request.choices);
    check.require(pages <= parts_->budget.pages, "choices", [&] {
      return "need " + std::to_string(pages) + " KV pages of " + std::to_string(kPageTokens) + " tokens, wanted at most " +
             std::to_string(parts_->budget.pages) + " (BatcherOptions::memory)";
    });
  }
  return std::move(check).status();
}

namespace {

// Throws the reason why requests of these clients cannot be queued.
[[noreturn]] void refuse(const QueueShares& waiting, int64_t queue, const std::vector<std::string_view>& clients) {
  if (!QueueShares(queue).join(clients))
    throw Error(fail(Code::invalid_argument, kBatcherOp, "requests",
                     "are " + std::to_string(clients.size()) + " at once, wanted at most the queue of " + std::to_string(queue)));
  const int64_t own = waiting.of(clients.front());
  const std::string whose = own < waiting.waiting() ? ", " + std::to_string(own) + " of them of this client" : "";
  throw Error(fail(Code::invalid_argument, kBatcherOp, "queue",
                   "holds " + std::to_string(waiting.waiting()) + " requests" + whose + ", wanted fewer before the next one"));
}

}  // namespace

Batcher::Ticket Batcher::submit(BatchRequest request, BatchCallbacks callbacks) {
  std::vector<BatchSubmission> one;
  one.push_back({std::move(request), std::move(callbacks)});
  return submit(std::move(one)).front();
}

std::vector<Batcher::Ticket> Batcher::submit(std::vector<BatchSubmission> requests) {
  for (const BatchSubmission& given : requests)
    if (Status status = check(given.request); !status) throw Error(std::move(status));
  Jobs jobs;
  std::vector<std::string_view> clients;
  const Clock::time_point now = Clock::now();
  for (BatchSubmission& given : requests) {
    jobs.push_back(std::make_unique<Job>());
    Job& job = *jobs.back();
    job.request = std::move(given.request);
    job.callbacks = std::move(given.callbacks);
    job.submitted = now;
    clients.push_back(job.request.client);
  }
  std::vector<Ticket> tickets(jobs.size());
  Mailbox& mailbox = parts_->mailbox;
  const std::lock_guard lock(mailbox.mutex);
  if (mailbox.orders.mode != Mode::open)
    throw Error(fail(Code::invalid_argument, kBatcherOp, "batcher", "stops, and takes no more requests"));
  if (!mailbox.waiting.join(clients)) {
    mailbox.stats.refused += static_cast<int64_t>(jobs.size());
    refuse(mailbox.waiting, parts_->options.queue, clients);
  }
  auto ticket = tickets.begin();
  for (const auto& job : jobs) *ticket++ = job->ticket = ++parts_->last_ticket;
  mailbox.stats.requests += static_cast<int64_t>(jobs.size());
  mailbox.orders.arrivals.splice(mailbox.orders.arrivals.end(), jobs);
  mailbox.changed.notify_one();
  return tickets;
}

void Batcher::cancel(Ticket ticket) {
  const std::lock_guard lock(parts_->mailbox.mutex);
  parts_->mailbox.orders.cancelled.push_back(ticket);
  parts_->mailbox.changed.notify_one();
}

void Batcher::drop_session(const std::string& session, std::function<void(bool)> dropped) {
  {
    const std::lock_guard lock(parts_->mailbox.mutex);
    if (!parts_->mailbox.ended) {
      parts_->mailbox.orders.dropped.push_back({session, std::move(dropped)});
      parts_->mailbox.changed.notify_one();
      return;
    }
  }
  const bool known = parts_->files.remove(session);
  if (dropped) dropped(known);
}

std::vector<int32_t> Batcher::saved_tokens(const std::string& session) const { return parts_->files.tokens(session); }

BatcherStats Batcher::stats() const {
  BatcherStats stats;
  {
    const std::lock_guard lock(parts_->mailbox.mutex);
    stats = parts_->mailbox.stats;
    stats.waiting = parts_->mailbox.waiting.waiting();
  }
  if (parts_->store) stats.store = parts_->store->stats();
  return stats;
}

std::vector<std::string> Batcher::drain(std::chrono::steady_clock::time_point deadline) {
  Mailbox& mailbox = parts_->mailbox;
  std::unique_lock lock(mailbox.mutex);
  if (mailbox.orders.mode == Mode::open) {
    mailbox.orders.mode = Mode::draining;
    mailbox.orders.drained_by = deadline;
  } else if (mailbox.orders.mode == Mode::draining) {
    mailbox.orders.drained_by = std::min(mailbox.orders.drained_by, deadline);
  }
  parts_->wait(lock);
  return mailbox.ended ? mailbox.unsaved : std::vector<std::string>();
}

void Batcher::request_stop() {
  const std::lock_guard lock(parts_->mailbox.mutex);
  parts_->mailbox.orders.mode = Mode::stopping;
  parts_->mailbox.changed.notify_all();
}

void Batcher::stop() {
  std::unique_lock lock(parts_->mailbox.mutex);
  parts_->mailbox.orders.mode = Mode::stopping;
  parts_->wait(lock);
}

}  // namespace weft
