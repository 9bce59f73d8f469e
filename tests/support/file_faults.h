// Faults of files: system calls that fail in turn, power failures, other users, and processes that run beside a test.
#pragma once

#include <fcntl.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "files/file_calls.h"

namespace weft {

// ---- processes

// Runs `work` in a child process; its result is the exit status.
template <class F>
pid_t process(F&& work) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  int status = 99;
  try {
    status = work();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  std::_Exit(status);
}

// The wait status of a process that ended.
inline int ended(pid_t child) {
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

constexpr uid_t kNobody = 65534;
inline bool can_be_another_user() { return ::geteuid() == 0; }
#define WEFT_NEEDS_TWO_USERS() \
  if (!can_be_another_user()) GTEST_SKIP() << "only root can become another user"

// This process becomes the user nobody.
inline void become_nobody() {
  if (::setgroups(0, nullptr) != 0 || ::setgid(kNobody) != 0 || ::setuid(kNobody) != 0)
    throw std::runtime_error("cannot become the user nobody");
}

// The exit status of `work`, run as a user who is not root: nobody, or this user.
template <class F>
int without_rights(F&& work) {
  const int status = ended(process([&] {
    if (can_be_another_user()) become_nobody();
    return work();
  }));
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// The exit status of `work`, run as the user nobody.
template <class F>
int as_nobody(F&& work) {
  const int status = ended(process([&] {
    become_nobody();
    return work();
  }));
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// The names in a folder, sorted.
inline std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

// ---- calls

// Replaces the system calls of file replacement while it exists.
class ReplacedCalls : public files::FileCalls {
 public:
  ReplacedCalls() { files::replace_file_calls(this); }
  ~ReplacedCalls() override { files::replace_file_calls(nullptr); }
  ReplacedCalls(const ReplacedCalls&) = delete;
  ReplacedCalls& operator=(const ReplacedCalls&) = delete;
};

// How many files this process has open.
inline size_t open_files() { return names_in("/proc/self/fd").size(); }

// From the call number `which` on, `count` calls fail; every other one succeeds.
class FailingCalls : public ReplacedCalls {
 public:
  static constexpr int64_t kAll = std::numeric_limits<int64_t>::max();
  FailingCalls(int64_t which, int error, int64_t count = 1) : skip_(which), count_(count), error_(error) {}
  // The names of the calls that failed, each followed by a space; empty: fewer calls were made.
  const std::string& failed() const { return failed_; }

  int open(int folder, const char* name, int flags, mode_t mode) override {
    return fails("open") ? -1 : FileCalls::open(folder, name, flags, mode);
  }
  int stat(int folder, const char* name, struct stat* info) override {
    return fails("stat") ? -1 : FileCalls::stat(folder, name, info);
  }
  int stat(int file, struct stat* info) override { return fails("fstat") ? -1 : FileCalls::stat(file, info); }
  ssize_t read_link(int link, char* target, size_t bytes) override {
    return fails("readlink") ? -1 : FileCalls::read_link(link, target, bytes);
  }
  ssize_t read(int file, void* data, size_t bytes, off_t offset) override {
    return fails("read") ? -1 : FileCalls::read(file, data, bytes, offset);
  }
  ssize_t write(int file, const void* data, size_t bytes, off_t offset) override {
    return fails("write") ? -1 : FileCalls::write(file, data, bytes, offset);
  }
  int truncate(int file, off_t bytes) override { return fails("truncate") ? -1 : FileCalls::truncate(file, bytes); }
  int change_group(int file, gid_t group) override { return fails("fchown") ? -1 : FileCalls::change_group(file, group); }
  int change_mode(int file, mode_t mode) override { return fails("fchmod") ? -1 : FileCalls::change_mode(file, mode); }
  int start_sync(int file) override { return fails("start_sync") ? -1 : FileCalls::start_sync(file); }
  int sync(int file) override { return fails("fsync") ? -1 : FileCalls::sync(file); }
  int rename(int folder, const char* from, const char* to, bool replace) override {
    return fails("rename") ? -1 : FileCalls::rename(folder, from, to, replace);
  }
  int unlink(int folder, const char* name) override { return fails("unlink") ? -1 : FileCalls::unlink(folder, name); }
  int lock(int file) override { return fails("lock") ? -1 : FileCalls::lock(file); }
  int entropy(void* data, size_t bytes) override { return fails("entropy") ? -1 : FileCalls::entropy(data, bytes); }

 private:
  bool fails(const char* call) {
    const std::lock_guard guard(mutex_);
    if (skip_ > 0) return --skip_, false;
    if (count_ == 0) return false;
    --count_;
    failed_ += call + std::string(" ");
    errno = error_;
    return true;
  }

  std::mutex mutex_;
  int64_t skip_, count_;
  int error_;
  std::string failed_;
};

// ---- power failures

// What a process did to a folder.
struct DiskOp {
  enum Kind { create, write, sync, rename, unlink, sync_folder } kind;
  int file = 0;          // a number for each file, by which it is known under any name
  std::string name, to;  // create, rename, unlink
  size_t offset = 0;     // write
  std::string bytes;
};

// Records what is done to one folder. File number 0 is the file that is there at first.
class RecordingCalls : public ReplacedCalls {
 public:
  explicit RecordingCalls(const std::string& first) { named_[first] = 0; }
  const std::vector<DiskOp>& ops() const { return ops_; }

  int open(int folder, const char* name, int flags, mode_t mode) override {
    const int file = FileCalls::open(folder, name, flags, mode);
    const std::lock_guard guard(mutex_);
    if (file < 0 || (flags & O_PATH)) return file;
    if (flags & O_DIRECTORY) {
      opened_[file] = kFolder;
    } else if (flags & O_CREAT) {
      opened_[file] = named_[name] = next_;
      ops_.push_back({DiskOp::create, next_++, name, {}, 0, {}});
    } else {
      opened_[file] = named_.at(name);
    }
    return file;
  }
  ssize_t write(int file, const void* data, size_t bytes, off_t offset) override {
    const ssize_t done = FileCalls::write(file, data, bytes, offset);
    const std::lock_guard guard(mutex_);
    if (done > 0)
      ops_.push_back({DiskOp::write,
                      opened_.at(file),
                      {},
                      {},
                      static_cast<size_t>(offset),
                      std::string(static_cast<const char*>(data), static_cast<size_t>(done))});
    return done;
  }
  int sync(int file) override {
    const std::lock_guard guard(mutex_);
    const int number = opened_.at(file);
    ops_.push_back({number == kFolder ? DiskOp::sync_folder : DiskOp::sync, number, {}, {}, 0, {}});
    return FileCalls::sync(file);
  }
  int rename(int folder, const char* from, const char* to, bool replace) override {
    const std::lock_guard guard(mutex_);
    const int file = named_.at(from);
    named_.erase(from);
    named_[to] = file;
    ops_.push_back({DiskOp::rename, file, from, to, 0, {}});
    return FileCalls::rename(folder, from, to, replace);
  }
  int unlink(int folder, const char* name) override {
    const std::lock_guard guard(mutex_);
    if (named_.count(name)) ops_.push_back({DiskOp::unlink, named_[name], name, {}, 0, {}});
    named_.erase(name);
    return FileCalls::unlink(folder, name);
  }

 private:
  static constexpr int kFolder = -1;
  std::mutex mutex_;
  std::map<std::string, int> named_;
  std::map<int, int> opened_;
  int next_ = 1;
  std::vector<DiskOp> ops_;
};

// The folder after a power failure: what was synced is there; of the rest, any part in any order.
using Disk = std::map<std::string, std::string>;  // name, bytes

enum class Unsynced { lost, kept, random };

inline Disk after_power_failure(const Disk& first, const std::vector<DiskOp>& ops, size_t count, Unsynced unsynced,
                                std::mt19937_64& random) {
  std::map<std::string, int> names;
  std::map<int, std::string> files;
  if (!first.empty()) {
    names[first.begin()->first] = 0;
    files[0] = first.begin()->second;
  }
  const auto apply = [&](const DiskOp& op, bool torn) {
    switch (op.kind) {
      case DiskOp::create: names[op.name] = op.file; break;
      case DiskOp::write: {
        std::string& bytes = files[op.file];
        const size_t length = torn ? op.bytes.size() / 2 : op.bytes.size();
        if (bytes.size() < op.offset + length) bytes.resize(op.offset + length);
        bytes.replace(op.offset, length, op.bytes, 0, length);
        break;
      }
      case DiskOp::rename:
        names.erase(op.name);
        names[op.to] = op.file;
        break;
      case DiskOp::unlink: names.erase(op.name); break;
      default: break;
    }
  };
  std::vector<const DiskOp*> pending;
  for (size_t i = 0; i < count; ++i) {
    const DiskOp& op = ops[i];
    const bool synced =
        std::any_of(ops.begin() + static_cast<ptrdiff_t>(i), ops.begin() + static_cast<ptrdiff_t>(count), [&](const DiskOp& later) {
          return op.kind == DiskOp::write ? later.kind == DiskOp::sync && later.file == op.file : later.kind == DiskOp::sync_folder;
        });
    if (synced)
      apply(op, false);
    else
      pending.push_back(&op);
  }
  if (unsynced == Unsynced::random) std::shuffle(pending.begin(), pending.end(), random);
  for (const DiskOp* op : pending)
    if (unsynced == Unsynced::kept || (unsynced == Unsynced::random && random() % 2))
      apply(*op, unsynced == Unsynced::random && random() % 4 == 0);
  Disk disk;
  for (const auto& [name, file] : names) disk[name] = files[file];
  return disk;
}

// Fails the power after every prefix of `ops` and calls check(disk, complete), where `complete` says that all ops had been done.
template <class F>
void at_every_power_failure(const Disk& first, const std::vector<DiskOp>& ops, F&& check) {
  constexpr int kRandom = 40;  // disks per prefix
  std::mt19937_64 random(7);
  for (size_t count = 0; count <= ops.size(); ++count)
    for (int i = -2; i < kRandom; ++i)
      check(after_power_failure(first, ops, count,
                                i == -2   ? Unsynced::lost
                                : i == -1 ? Unsynced::kept
                                          : Unsynced::random,
                                random),
            count == ops.size());
}

}  // namespace weft
