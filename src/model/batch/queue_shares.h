// Counts the waiting requests of each client, and decides whether another one may wait: a client that fills the queue must not shut
// out the others.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>

namespace weft::model {

// While the queue has room, every client may use it. Of n clients that wait, each has a share: queue / n requests, at least one. A full
// queue still takes requests of a client below its share, and requests beyond the share of their client do not count against it. So
// at most queue * (2 + ln queue) requests wait.
class QueueShares {
 public:
  explicit QueueShares(int64_t queue) : queue_(queue) {}

  // Counts one more waiting request per entry of `clients`, or none at all: false if one of them does not fit.
  bool join(std::span<const std::string_view> clients);
  void leave(std::string_view client) noexcept;  // one request

  int64_t waiting() const { return waiting_; }  // requests
  int64_t of(std::string_view client) const;

 private:
  bool fits(std::string_view client) const;

  int64_t queue_, waiting_ = 0;
  std::map<std::string, int64_t, std::less<>> clients_;  // requests of clients that wait
};

}  // namespace weft::model
