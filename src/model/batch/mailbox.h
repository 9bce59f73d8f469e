// What callers of a batcher and its engine thread share, under one mutex. No model step and no callback runs under it.
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

// What callers have asked for since the engine looked last.
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
  std::condition_variable changed;  // an order, for the engine
  std::condition_variable closed;   // `ended`, for drain() and stop()
  Orders orders;
  QueueShares waiting;  // requests that were submitted and not admitted
  BatcherStats stats;   // as of the latest step; `waiting`, `requests` and `refused` are those of submit()
  std::vector<std::string> unsaved;
  bool ended = false;  // the engine has called its last callback
};

}  // namespace weft::model
