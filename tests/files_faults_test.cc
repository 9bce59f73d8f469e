// Locks and atomic replacement of files while system calls or the power fail: the old file or the new one is whole, no other file is
// touched, and no descriptor stays open.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>

#include "tests/support/replace.h"

namespace weft::files {
namespace {

// What a save finds: nothing, a file, a link to a file, or what a killed process left beside a file.
enum class Found { nothing, file, link, left_over };

class Faults : public Replace, public testing::WithParamInterface<Found> {
 protected:
  // Prepares the folder, with files that Weft must not touch. Returns the path to save to.
  fs::path prepare() {
    for (const auto& entry : fs::directory_iterator(folder_.path())) fs::remove(entry.path());
    for (const std::string& name : kForeign) folder_.write(name, "theirs");
    if (GetParam() == Found::nothing) return file_;
    folder_.write("x", "old");
    if (GetParam() == Found::link) {
      fs::create_symlink("x", at("link"));
      return at("link");
    }
    if (GetParam() == Found::left_over) {
      folder_.write(kLeftOver, "half of ");
      folder_.write("x.weft-lock", "weft-lock 0000000001 " + kLeftOver + "\n");
      for (const std::string& name : {kLeftOver, std::string("x.weft-lock")})
        fs::permissions(at(name), fs::perms::owner_read | fs::perms::owner_write);
    }
    return file_;
  }
  void expect_foreign_files(const std::string& where) const {
    for (const std::string& name : kForeign) EXPECT_EQ(text_of(at(name)), "theirs") << where;
    EXPECT_EQ(fs::is_symlink(at("link")), GetParam() == Found::link) << where;
    EXPECT_FALSE(fs::is_symlink(file_)) << where;
  }
  // The names in the folder without those that must stay.
  Names own_names() const {
    Names out = names();
    std::erase_if(out, [](const std::string& name) { return name == "link" || std::ranges::count(kForeign, name); });
    return out;
  }
  // Saves with `count` failing calls from every call on. Returns the names of the calls that failed.
  std::string fail_every_call(int error, int64_t count);

  static inline const std::string kLeftOver = ".weft-tmp-0123456789abcdef";
  static inline const Names kForeign = {".weft-tmp-ffffffffffffffff", "x.weft-tmp"};
};

std::string Faults::fail_every_call(int error, int64_t count) {
  std::string all;
  for (int64_t which = 0; !HasFailure(); ++which) {
    const fs::path path = prepare();
    const size_t opened = open_files();
    std::string failed, said;
    {
      FailingCalls calls(which, error, count);
      said = complaint([&] { replace(path, "new"); });
      failed = calls.failed();
    }
    if (failed.empty()) break;
    all += failed;
    const std::string where = failed + std::to_string(which) + ": " + said, got = text_of(file_);
    const bool exists = GetParam() != Found::nothing;
    const bool replaced = said == "none" || said.find("is replaced, but") != std::string::npos;
    EXPECT_EQ(got, replaced ? "new" : exists ? "old" : "") << where;
    EXPECT_EQ(fs::exists(file_), replaced || exists) << where;
    EXPECT_EQ(open_files(), opened) << where;
    expect_foreign_files(where);
    if (count == 1 && GetParam() != Found::left_over && failed != "unlink " && failed != "stat " && failed != "fstat ") {
      EXPECT_EQ(own_names(), fs::exists(file_) ? Names{"x"} : Names{}) << where;
    }
    replace(path, "next");  // removes what a failed removal left
    EXPECT_EQ(own_names(), Names{"x"}) << where;
    EXPECT_EQ(text_of(file_), "next") << where;
    expect_foreign_files(where);
  }
  return all;
}

TEST_P(Faults, EveryCallMayFail) {
  for (const int error : {EIO, EACCES}) {
    const std::string all = fail_every_call(error, 1);
    for (const char* call : {"open", "stat", "fstat", "read", "write", "fchmod", "fsync", "rename", "unlink", "lock", "entropy"})
      EXPECT_NE(all.find(call), std::string::npos) << call;
    EXPECT_EQ(all.find("readlink") != std::string::npos, GetParam() == Found::link);
  }
}

TEST_P(Faults, TwoCallsInTurnMayFail) { EXPECT_NE(fail_every_call(EIO, 2).find("write truncate"), std::string::npos); }

TEST_P(Faults, TheDiskMayBeGoneFromAnyCallOn) { EXPECT_NE(fail_every_call(EIO, FailingCalls::kAll), ""); }

INSTANTIATE_TEST_SUITE_P(Replace, Faults, testing::Values(Found::nothing, Found::file, Found::link, Found::left_over));

TEST_F(Replace, EveryCallMayFailWhileAnotherHoldsTheLock) {
  folder_.write("x", "old");
  const FileLock held(file_);
  const std::string note = text_of(at("x.weft-lock"));
  const size_t opened = open_files();
  Names said;
  for (int64_t which = 0;; ++which) {
    FailingCalls calls(which, EIO);
    const std::string refused = refusal(file_);
    if (calls.failed().empty()) break;
    said.push_back(calls.failed() + refused);
    EXPECT_NE(refused, "none") << calls.failed();
    EXPECT_EQ(text_of(at("x.weft-lock")), note) << said.back();
    EXPECT_EQ(open_files(), opened) << said.back();
  }
  EXPECT_EQ(std::ranges::count(said, "read .weft-lock: cannot be read: Input/output error"), 1);
  EXPECT_EQ(std::ranges::count(said, "read : is held by another process; nothing was changed"), 1);
  EXPECT_EQ(names(), (Names{"x", "x.weft-lock"}));
  EXPECT_EQ(text_of(file_), "old");
}

TEST_F(Replace, WritingBackEarlyMayFail) {
  class Calls : public ReplacedCalls {
   public:
    int start_sync(int) override {
      errno = EIO;
      return ++calls, -1;
    }
    int calls = 0;
  };
  const std::string large(9 << 20, 'x');
  Calls calls;
  replace(file_, large);  // commit() syncs
  EXPECT_TRUE(text_of(file_) == large);
  EXPECT_GT(calls.calls, 0);
}

TEST_F(Replace, ShortAndInterruptedWritesContinue) {
  class ShortCalls : public ReplacedCalls {
   public:
    ssize_t write(int file, const void* data, size_t bytes, off_t offset) override {
      errno = EINTR;
      return ++calls % 3 == 0 ? -1 : FileCalls::write(file, data, std::min<size_t>(bytes, 7), offset);
    }
    int calls = 0;
  };
  ShortCalls calls;
  std::string text;
  for (int i = 0; i < 1000; ++i) text += static_cast<char>('a' + i % 26);
  replace(file_, text);
  EXPECT_EQ(text_of(file_), text);
  EXPECT_EQ(names(), Names{"x"});
}

TEST_F(Replace, SurvivesPowerFailures) {
  const Disk first = {{"x", "the old content"}};
  const std::string next = "the content that is new";
  folder_.write("x", first.at("x"));
  std::vector<DiskOp> ops;
  {
    RecordingCalls calls("x");
    FileLock lock(file_);
    ReplacedFile file(lock);
    for (size_t i = 0; i < next.size(); i += 4)
      file.write(i, std::as_bytes(std::span(next)).subspan(i, std::min<size_t>(4, next.size() - i)));
    file.commit();
    ops = calls.ops();
  }
  const auto lost = [&](const std::vector<DiskOp>& done) {
    int count = 0;
    at_every_power_failure(first, done, [&](const Disk& disk, bool complete) {
      const auto found = disk.find("x");
      const bool fine = found != disk.end() && (found->second == next || (found->second == first.at("x") && !complete));
      count += !fine;
    });
    return count;
  };
  EXPECT_GT(ops.size(), 10u);
  EXPECT_EQ(lost(ops), 0);
  // The replay can tell: without either sync, something is lost.
  for (DiskOp::Kind kind : {DiskOp::sync, DiskOp::sync_folder}) {
    std::vector<DiskOp> fewer = ops;
    std::erase_if(fewer, [&](const DiskOp& op) { return op.kind == kind; });
    EXPECT_LT(fewer.size(), ops.size());
    EXPECT_GT(lost(fewer), 0);
  }
  // What a power failure leaves in the folder does not hinder the next save.
  int disks = 0;
  at_every_power_failure(first, ops, [&](const Disk& disk, bool) {
    if (++disks % 8 != 0) return;
    const Folder after;
    for (const auto& [name, bytes] : disk) {
      after.write(name, bytes);
      fs::permissions(after.path() / name, fs::perms::owner_read | fs::perms::owner_write);
    }
    replace(after.path() / "x", "next");
    EXPECT_EQ(text_of(after.path() / "x"), "next");
    EXPECT_FALSE(fs::exists(after.path() / "x.weft-lock"));
  });
}

}  // namespace
}  // namespace weft::files
