// The data that callers of a batcher share with its engine thread, under one mutex. No step and no callback runs under the mutex.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "model/batch/job.h"
#include "model/batch/queue_shares.h"

namespace weft::model {

enum class Mode { open, draining, stopping };

struct DroppedSession {
  std::string session;
  std::function<void(bool)> dropped;
};

// Orders of callers that the engine has not taken yet.
struct Orders {
  Jobs arrivals;
  std::vector<Batcher::Ticket> cancelled;
  std::vector<DroppedSession> dropped;
  Mode mode = Mode::open;
  Clock::time_point drained_by;  // in Mode::draining
};

struct Mailbox {
  explicit Mailbox(int64_t queue) : waiting(queue) {}

  mutable std::mutex mutex;
  std::condition_variable changed;  // the engine waits for an order
  std::condition_variable closed;   // drain() and stop() wait for `ended`
  Orders orders;
  QueueShares waiting;  // requests that were submitted and not admitted
  BatcherStats stats;   // as of the latest step, except `waiting`, `requests` and `refused`, which submit() counts
  std::vector<std::string> unsaved;
  bool ended = false;  // the engine has called its last callback
};

}  // namespace weft::model
