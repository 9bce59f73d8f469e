// Shares of the queue: see queue_shares.h.
#include "model/batch/queue_shares.h"

#include <algorithm>

namespace weft::model {

bool QueueShares::fits(std::string_view client) const {
  if (waiting_ < queue_) return true;
  const int64_t own = of(client);
  const auto clients = static_cast<int64_t>(clients_.size()) + (own == 0 ? 1 : 0);
  const int64_t share = std::max<int64_t>(1, queue_ / clients);
  if (own >= share) return false;
  int64_t counted = 0;
  for (const auto& [name, requests] : clients_) counted += std::min(requests, share);
  return counted < queue_;
}

bool QueueShares::join(std::span<const std::string_view> clients) {
  size_t joined = 0;
  const auto undo = [&] {
    for (size_t i = 0; i < joined; ++i) leave(clients[i]);
  };
  try {
    for (; joined < clients.size(); ++joined) {
      if (!fits(clients[joined])) {
        undo();
        return false;
      }
      ++clients_.try_emplace(std::string(clients[joined]), 0).first->second;
      ++waiting_;
    }
  } catch (...) {
    undo();
    throw;
  }
  return true;
}

void QueueShares::leave(std::string_view client) noexcept {
  const auto found = clients_.find(client);
  if (found == clients_.end()) return;
  --waiting_;
  if (--found->second == 0) clients_.erase(found);
}

int64_t QueueShares::of(std::string_view client) const {
  const auto found = clients_.find(client);
  return found == clients_.end() ? 0 : found->second;
}

}  // namespace weft::model
