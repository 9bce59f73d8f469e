// Kept sessions and their files: see sessions.h.
#include "model/batch/sessions.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/fail.h"
#include "files/sha256.h"
#include "weft/printable.h"
#include "weft/state_file.h"

namespace weft::model {
namespace {

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw Error(fail(Code::invalid_argument, kBatcherOp, "sessions", printable_text(path) + " " + what));
}

// Makes an empty file that only this user can read and write. An existing file of this user keeps its content.
void make_private(const std::filesystem::path& path) {
  const auto fail_with = [&](const char* why) { refuse(path.string(), std::string("cannot be written: ") + why); };
  // O_NONBLOCK: where the path is a pipe, open() fails at once instead of waiting for a reader.
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
  if (file < 0) fail_with(std::strerror(errno));
  struct stat info {};
  const char* why = nullptr;
  if (::fstat(file, &info) != 0 || !S_ISREG(info.st_mode))
    why = "it is not a file";
  else if (::fchmod(file, 0600) != 0)  // replacing a file keeps its permissions
    why = std::strerror(errno);
  ::close(file);
  if (why) fail_with(why);
}

constexpr size_t kNameDigits = 64;

}  // namespace

bool continues(const std::vector<int32_t>& prompt, const std::vector<int32_t>& tokens) {
  return prompt.size() > tokens.size() && std::equal(tokens.begin(), tokens.end(), prompt.begin());
}

// ---- in memory

void Sessions::keep(KeptSession session) {
  drop(session.id);
  const int64_t pages = session.pages;
  Order one;
  one.push_back(std::move(session));
  by_id_.emplace(one.front().id, one.begin());
  order_.splice(order_.end(), one);
  pages_ += pages;
}

const KeptSession* Sessions::find(const std::string& id) const {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : &*found->second;
}

KeptSession Sessions::remove(Order::iterator place) {
  KeptSession session = std::move(*place);
  by_id_.erase(session.id);
  order_.erase(place);
  pages_ -= session.pages;
  return session;
}

void Sessions::touch(const std::string& id, Time now) {
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) return;
  found->second->used = now;
  order_.splice(order_.end(), order_, found->second);
}

std::optional<KeptSession> Sessions::take(const std::string& id) {
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) return std::nullopt;
  return remove(found->second);
}

bool Sessions::drop_oldest(const std::string& id, const std::string& other) {
  const auto oldest = std::ranges::find_if(order_, [&](const KeptSession& kept) { return kept.id != id && kept.id != other; });
  if (oldest == order_.end()) return false;
  remove(oldest);
  return true;
}

int64_t Sessions::expire(Time before) {
  int64_t dropped = 0;
  for (; !order_.empty() && order_.front().used < before; ++dropped) remove(order_.begin());
  return dropped;
}

std::optional<Sessions::Time> Sessions::oldest() const {
  if (order_.empty()) return std::nullopt;
  return order_.front().used;
}

int64_t Sessions::bytes() const {
  int64_t bytes = 0;
  for (const KeptSession& session : order_) bytes += session.memory.bytes();
  return bytes;
}

void Sessions::clear() {
  by_id_.clear();
  order_.clear();
  pages_ = 0;
}

// ---- files

SessionFiles::SessionFiles(std::filesystem::path folder, std::chrono::seconds expiry)
    : folder_(std::move(folder)), expiry_(expiry) {
  if (!used()) return;
  if (!folder_.has_filename()) folder_ = folder_.parent_path();  // "kept/"
  std::error_code error;
  if (std::filesystem::create_directories(folder_, error))
    std::filesystem::permissions(folder_, std::filesystem::perms::owner_all, error);
  if (error || !std::filesystem::is_directory(folder_, error))
    refuse(folder_.string(), "cannot be made: " + (error ? error.message() : "it is not a folder"));
  struct stat info {};
  if (::stat(folder_.c_str(), &info) != 0) refuse(folder_.string(), std::string("cannot be read: ") + std::strerror(errno));
  if (info.st_uid != ::geteuid() && info.st_uid != 0) refuse(folder_.string(), "belongs to another user");
  if (info.st_mode & (S_IWGRP | S_IWOTH)) refuse(folder_.string(), "can be written by other users, wanted mode 0700");
  for (auto entry = std::filesystem::directory_iterator(folder_, error); !error && entry != std::filesystem::directory_iterator();
       entry.increment(error)) {
    const std::filesystem::path& path = entry->path();
    const std::string stem = path.stem().string();
    if (stem.size() != kNameDigits || stem.find_first_not_of("0123456789abcdef") != std::string::npos ||
        path.extension() != ".state" || !expired(path))
      continue;
    std::error_code ignored;
    std::filesystem::remove(path, ignored);
  }
}

std::filesystem::path SessionFiles::file_of(const std::string& id) const { return folder_ / (files::sha256(id) + ".state"); }

bool SessionFiles::expired(const std::filesystem::path& state) const {
  std::error_code error;
  const auto written = std::filesystem::last_write_time(state, error);
  return !error && written < std::filesystem::file_time_type::clock::now() - expiry_;
}

bool SessionFiles::has(const std::string& id) const {
  if (!used()) return false;
  const std::filesystem::path state = file_of(id);
  std::error_code error;
  const auto bytes = std::filesystem::file_size(state, error);
  return !error && bytes > 0 && !expired(state);  // save() makes an empty file first
}

void SessionFiles::save(const Model& model, const HybridState& state, int64_t sequence, const KeptSession& session,
                        const std::string& kv) const {
  const std::filesystem::path path = file_of(session.id);
  make_private(path);
  try {
    StateLock lock(path, {.wait = 1, .on_wait = {}});
    model.save(lock, state, sequence, session.tokens, kv);
  } catch (...) {
    std::error_code error;
    if (std::filesystem::file_size(path, error) == 0 && !error) std::filesystem::remove(path, error);
    throw;
  }
}

std::vector<int32_t> SessionFiles::load(const Model& model, HybridState& state, int64_t sequence, const std::string& id) const {
  std::vector<int32_t> tokens = model.restore(file_of(id), state, sequence);
  tokens.resize(static_cast<size_t>(state.tokens(sequence)));
  return tokens;
}

std::vector<int32_t> SessionFiles::tokens(const std::string& id) const {
  if (!has(id)) return {};
  try {
    StateFileInfo info = read_state_file(file_of(id));
    info.label.ids.resize(std::min(info.label.ids.size(), static_cast<size_t>(info.tokens)));
    return std::move(info.label.ids);
  } catch (const Error&) {
    return {};
  }
}

bool SessionFiles::remove(const std::string& id) const {
  std::error_code ignored;
  return used() && std::filesystem::remove(file_of(id), ignored);
}

}  // namespace weft::model
