// Kept sessions of a batcher: the memory of conversations between two requests, in memory and as files.
#pragma once

#include <chrono>
#include <filesystem>
#include <list>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "model/batch/budget.h"

namespace weft::model {

struct KeptSession {
  std::string id;
  std::vector<int32_t> tokens;  // the tokens that the memory holds
  HybridSnapshot memory;
  std::chrono::steady_clock::time_point used;
  int64_t pages = 0;
};

// Does the prompt begin with these tokens, and have at least one more?
bool continues(const std::vector<int32_t>& prompt, const std::vector<int32_t>& tokens);

// Sessions in memory, in the order of their last use. Belongs to the thread of the state.
class Sessions {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // Replaces the session of the same id.
  void keep(KeptSession session);
  const KeptSession* find(const std::string& id) const;
  std::optional<KeptSession> take(const std::string& id);
  void touch(const std::string& id, Time now);  // records a use
  bool drop(const std::string& id) { return take(id).has_value(); }
  // Drops the least recently used session that is neither `id` nor `other`. False: there is no such session.
  bool drop_oldest(const std::string& id = {}, const std::string& other = {});
  int64_t expire(Time before);         // drops sessions whose last use was before this time; returns how many
  std::optional<Time> oldest() const;  // last use of the least recently used session
  int64_t size() const { return static_cast<int64_t>(order_.size()); }
  int64_t pages() const { return pages_; }
  int64_t bytes() const;  // of recurrent states and windows
  const std::list<KeptSession>& all() const { return order_; }
  void clear();

 private:
  using Order = std::list<KeptSession>;  // least recently used first
  KeptSession remove(Order::iterator place);

  Order order_;
  std::unordered_map<std::string, Order::iterator> by_id_;
  int64_t pages_ = 0;
};

// The files of sessions in a folder: "<SHA-256 of the id>.state", written by Model::save, with mode 0600. An id comes from a
// client, so the file name must neither lead out of the folder nor be the name of another id's file.
class SessionFiles {
 public:
  // An empty path: sessions have no files. Throws Error for a folder that cannot be made or that other users can write. Removes
  // files older than `expiry`.
  SessionFiles(std::filesystem::path folder, std::chrono::seconds expiry);

  bool used() const { return !folder_.empty(); }
  // Is there a file of this session that has not expired?
  bool has(const std::string& id) const;
  // Throw Error as Model::save and Model::restore do. load() returns the tokens that the sequence then holds.
  void save(const Model& model, const HybridState& state, int64_t sequence, const KeptSession& session,
            const std::string& kv) const;
  std::vector<int32_t> load(const Model& model, HybridState& state, int64_t sequence, const std::string& id) const;
  std::vector<int32_t> tokens(const std::string& id) const;  // those that load() would return, or more; empty if load() would fail
  bool remove(const std::string& id) const;                  // was there a file?

 private:
  std::filesystem::path file_of(const std::string& id) const;
  bool expired(const std::filesystem::path& state) const;

  std::filesystem::path folder_;
  std::chrono::seconds expiry_;
};

}  // namespace weft::model
