// Locks and atomic replacement of files: other processes, other users, and files that Weft did not make.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <functional>
#include <utility>

#include "tests/support/replace.h"

namespace weft::files {
namespace {

struct stat status_of(const fs::path& path) {
  struct stat info {};
  EXPECT_EQ(::lstat(path.c_str(), &info), 0) << path;
  return info;
}
mode_t mode_of(const fs::path& path) { return status_of(path).st_mode & 07777; }

TEST_F(Replace, WritesAndReplaces) {
  replace(file_, "one");
  EXPECT_EQ(text_of(file_), "one");
  replace(file_, "two and more");
  EXPECT_EQ(text_of(file_), "two and more");
  {
    FileLock lock(file_);
    EXPECT_TRUE(lock.exists());
    replace(lock, "three");
    replace(lock, "four");  // a lock may save several times
    EXPECT_EQ(names(), (Names{"x", "x.weft-lock"}));
  }
  EXPECT_EQ(text_of(file_), "four");
  EXPECT_EQ(names(), Names{"x"});
}

TEST_F(Replace, WithoutCommitNothingChanges) {
  {
    FileLock lock(file_);
    EXPECT_FALSE(lock.exists());
    ReplacedFile file(lock);
    put(file, "one");
  }
  EXPECT_TRUE(names().empty());
}

// ---- permissions

TEST_F(Replace, OnlyItsUserCanOpenTheFileWhileItIsWritten) {
  class ModeCalls : public ReplacedCalls {
   public:
    ssize_t write(int file, const void* data, size_t bytes, off_t offset) override {
      struct stat info {};
      EXPECT_EQ(::fstat(file, &info), 0);
      EXPECT_EQ(info.st_mode & 07777, 0600u);
      ++writes;
      return FileCalls::write(file, data, bytes, offset);
    }
    int writes = 0;
  };
  const mode_t before = ::umask(022);
  ModeCalls calls;
  replace(file_, "new");
  EXPECT_EQ(mode_of(file_), 0644u) << "umask decides";
  for (mode_t mode : {0600, 0640, 0664, 0400}) {
    ASSERT_EQ(::chmod(file_.c_str(), mode), 0);
    replace(file_, "again");
    EXPECT_EQ(mode_of(file_), mode) << "the old file decides";
  }
  ASSERT_EQ(::chmod(file_.c_str(), 04755), 0);
  replace(file_, "again");
  EXPECT_EQ(mode_of(file_), 0755u) << "new bytes do not run as their owner";
  EXPECT_GT(calls.writes, 6);
  ::umask(077);
  replace(at("private"), "new");
  EXPECT_EQ(mode_of(at("private")), 0600u);
  ::umask(before);
}

TEST_F(Replace, KeepsTheGroupOrDropsItsPermissions) {
  WEFT_NEEDS_TWO_USERS();
  replace(file_, "one");
  ASSERT_EQ(::chmod(file_.c_str(), 0640), 0);
  ASSERT_EQ(::chown(file_.c_str(), static_cast<uid_t>(-1), 12345), 0);
  replace(file_, "two");
  EXPECT_EQ(status_of(file_).st_gid, 12345u);
  EXPECT_EQ(mode_of(file_), 0640u);
  // Nobody is not a member of that group.
  ASSERT_EQ(::chown(file_.c_str(), kNobody, 12345), 0);
  EXPECT_EQ(as_nobody([&] { return replace(file_, "three"), 0; }), 0);
  EXPECT_EQ(text_of(file_), "three");
  EXPECT_EQ(status_of(file_).st_gid, kNobody);
  EXPECT_EQ(mode_of(file_), 0600u);
}

// Another user opens every file in the folder while a private file is saved, and must never succeed.
TEST_F(Replace, AnotherUserNeverReadsAPrivateFile) {
  WEFT_NEEDS_TWO_USERS();
  replace(file_, "secret");
  ASSERT_EQ(::chmod(file_.c_str(), 0600), 0);
  int pipe[2];
  ASSERT_EQ(::pipe2(pipe, O_NONBLOCK), 0);
  const pid_t spy = process([&] {
    become_nobody();
    for (char stop = 0; ::read(pipe[0], &stop, 1) != 1;)
      for (const auto& entry : fs::directory_iterator(folder_.path())) {
        const int opened = ::open(entry.path().c_str(), O_RDONLY | O_NOFOLLOW);
        struct stat info {};
        // What umask leaves of a new file is known by creating an empty one. It stays empty.
        if (opened >= 0 && (::usleep(200), ::fstat(opened, &info) != 0 || info.st_size > 0)) return 3;
        if (opened >= 0) ::close(opened);
      }
    return 0;
  });
  for (int i = 0; i < 100; ++i) replace(file_, std::string(20000, 's'));
  EXPECT_EQ(::write(pipe[1], "x", 1), 1);
  EXPECT_EQ(ended(spy), 0) << "read by another user";
  ::close(pipe[0]);
  ::close(pipe[1]);
}

// ---- other users

TEST_F(Replace, FilesOfAnotherUserAreRefused) {
  WEFT_NEEDS_TWO_USERS();
  const auto theirs = [&](const std::string& name, const std::string& text, mode_t mode) {
    folder_.write(name, text);
    EXPECT_EQ(::chmod(at(name).c_str(), mode), 0);
    EXPECT_EQ(::chown(at(name).c_str(), kNobody, kNobody), 0);
  };
  // The old name of the temporary file means nothing.
  theirs("x.weft-tmp", "", 0666);
  replace(file_, "mine");
  EXPECT_EQ(status_of(file_).st_uid, ::geteuid());
  EXPECT_EQ(text_of(at("x.weft-tmp")), "");
  // Their file at the path itself.
  theirs("y", "theirs", 0666);
  EXPECT_EQ(refusal(at("y")), ": belongs to user 65534, wanted a file of user 0; copy it, and use the copy");
  EXPECT_EQ(text_of(at("y")), "theirs");
  EXPECT_EQ(status_of(at("y")).st_uid, kNobody);
  // Their lock, also one that looks like a lock of Weft.
  for (const char* note : {"", "weft-lock 0000000001 .weft-tmp-0123456789abcdef\n"}) {
    theirs("x.weft-lock", note, 0600);
    EXPECT_EQ(refusal(file_),
              ".weft-lock: belongs to user 65534, wanted a lock file of user 0; use a folder that only this user can write");
    EXPECT_EQ(text_of(at("x.weft-lock")), note);
    EXPECT_EQ(text_of(file_), "mine");
    EXPECT_TRUE(fs::remove(at("x.weft-lock")));
  }
  // The same seen from the other side: nobody meets files of root.
  EXPECT_EQ(as_nobody([&] {
              if (refusal(file_) != ": belongs to user 0, wanted a file of user 65534; copy it, and use the copy") return 1;
              folder_.write("n", "");
              return 0;
            }),
            0);
  {
    const FileLock held(file_);
    EXPECT_EQ(as_nobody([&] {
                return refusal(file_) ==
                               ".weft-lock: belongs to user 0, wanted a lock file of user 65534; use a folder that only this user "
                               "can write"
                           ? 0
                           : 1;
              }),
              0);
  }
  EXPECT_EQ(names(), (Names{"n", "x", "x.weft-tmp", "y"}));
  EXPECT_EQ(text_of(file_), "mine");
}

TEST_F(Replace, LinksOfAnotherUserAreRefused) {
  WEFT_NEEDS_TWO_USERS();
  const Folder own;
  const fs::path thesis = own.write("thesis", "years of work");
  fs::create_symlink(thesis, at("link"));
  ASSERT_EQ(::lchown(at("link").c_str(), kNobody, kNobody), 0);
  EXPECT_EQ(refusal(at("link")), ": is a link of user 65534, wanted a link of user 0 or of root; give the path of its target");
  fs::create_symlink("nowhere", at("dangling"));
  ASSERT_EQ(::lchown(at("dangling").c_str(), kNobody, kNobody), 0);
  EXPECT_NE(refusal(at("dangling")), "none");
  EXPECT_EQ(text_of(thesis), "years of work");
  EXPECT_EQ(names_in(own.path()), Names{"thesis"});
  EXPECT_FALSE(fs::exists(at("nowhere")));
  // Own links and those of root are followed.
  EXPECT_EQ(as_nobody([&] {
              fs::create_symlink("target", at("own"));
              replace(at("own"), "new");
              return 0;
            }),
            0);
  EXPECT_EQ(text_of(at("target")), "new");
  fs::create_symlink("target", at("roots"));
  EXPECT_EQ(as_nobody([&] { return replace(at("roots"), "newer"), 0; }), 0);
  EXPECT_EQ(text_of(at("target")), "newer");
  EXPECT_TRUE(fs::is_symlink(at("roots")));
}

TEST_F(Replace, FoldersThatCannotBeWritten) {
  folder_.write("x", "old");
  for (const fs::path& path : {folder_.path(), file_})
    ASSERT_TRUE(!can_be_another_user() || ::chown(path.c_str(), kNobody, kNobody) == 0);
  ASSERT_EQ(::chmod(folder_.path().c_str(), 0555), 0);
  EXPECT_EQ(without_rights([&] { return refusal(file_) == ": cannot be written: Permission denied" ? 0 : 1; }), 0);
  EXPECT_EQ(text_of(file_), "old");
  EXPECT_EQ(names(), Names{"x"});
  // A folder that can be written and searched, but not read.
  ASSERT_EQ(::chmod(folder_.path().c_str(), 0300), 0);
  EXPECT_EQ(without_rights([&] { return replace(file_, "new"), 0; }), 0);
  EXPECT_EQ(text_of(file_), "new");
  ASSERT_EQ(::chmod(folder_.path().c_str(), 0700), 0);
  EXPECT_EQ(names(), Names{"x"});
}

// ---- files that Weft did not make

TEST_F(Replace, FilesThatWeftDidNotMakeStay) {
  const std::string said = ".weft-lock: is not a lock file that Weft made; move it away";
  const fs::path lock = at("x.weft-lock");
  folder_.write("x", "old");
  folder_.write("x.weft-tmp", "thesis");
  folder_.write(".weft-tmp-0123456789abcdef", "thesis");
  fs::create_hard_link(at("x.weft-tmp"), at("second-name"));
  const auto expect_refused = [&](const std::string& text) {
    EXPECT_EQ(refusal(file_), said) << text;
    EXPECT_EQ(text_of(lock), text);
    EXPECT_EQ(text_of(file_), "old");
    fs::remove(lock);
  };
  for (const char* text : {"thesis", "weft-", "weft-lock 0000000001 .weft-tmp-0123456789abcdef\nand more"}) {
    folder_.write("x.weft-lock", text);
    fs::permissions(lock, fs::perms::owner_read | fs::perms::owner_write);
    expect_refused(text);
  }
  folder_.write("x.weft-lock", "");  // not with the mode of a lock
  fs::permissions(lock, fs::perms::owner_read | fs::perms::owner_write | fs::perms::group_read);
  expect_refused("");
  folder_.write("empty", "");
  fs::permissions(at("empty"), fs::perms::owner_read | fs::perms::owner_write);
  fs::create_hard_link(at("empty"), lock);
  expect_refused("");
  fs::create_directory(lock);
  EXPECT_NE(refusal(file_), "none");
  fs::remove(lock);
  fs::create_symlink("empty", lock);
  EXPECT_EQ(refusal(file_), ".weft-lock: cannot be opened: Too many levels of symbolic links");
  fs::remove(lock);
  ASSERT_EQ(::mkfifo(lock.c_str(), 0600), 0);
  EXPECT_EQ(refusal(file_), said);
  fs::remove(lock);
  replace(file_, "new");
  EXPECT_EQ(text_of(at("x.weft-tmp")), "thesis");
  EXPECT_EQ(text_of(at("empty")), "");
  EXPECT_EQ(names(), (Names{".weft-tmp-0123456789abcdef", "empty", "second-name", "x", "x.weft-tmp"}));
}

// A file system without modes, such as FAT: every regular file shows the same one.
class NoModes : public ReplacedCalls {
 public:
  int open(int folder, const char* name, int flags, mode_t mode) override {
    creates += (flags & O_CREAT) != 0;
    return FileCalls::open(folder, name, flags, mode);
  }
  int stat(int folder, const char* name, struct stat* info) override { return shown(FileCalls::stat(folder, name, info), info); }
  int stat(int file, struct stat* info) override { return shown(FileCalls::stat(file, info), info); }
  int change_mode(int, mode_t) override { return errno = EPERM, -1; }
  ssize_t write(int file, const void* data, size_t bytes, off_t offset) override {
    if (on_write) std::exchange(on_write, nullptr)();
    return FileCalls::write(file, data, bytes, offset);
  }
  std::function<void()> on_write;
  mode_t shown_mode = 0755;
  int creates = 0;

 private:
  int shown(int result, struct stat* info) const {
    if (result == 0 && S_ISREG(info->st_mode)) info->st_mode = S_IFREG | shown_mode;
    return result;
  }
};

TEST_F(Replace, FileSystemsWithoutModes) {
  const std::string said = ".weft-lock: is not a lock file that Weft made; move it away";
  NoModes calls;
  for (const mode_t mode : {0755, 0777, 0644}) {
    calls.shown_mode = mode;
    replace(file_, "one");
    // A second writer comes between the creation of the lock file and its note.
    std::string refused;
    calls.on_write = [&] { refused = refusal(file_); };
    replace(file_, "two");
    EXPECT_EQ(refused, ": is held by another process; nothing was changed");
    EXPECT_EQ(text_of(file_), "two");
    // A process was killed there.
    folder_.write("x.weft-lock", "");
    replace(file_, "three");
    EXPECT_EQ(text_of(file_), "three");
    EXPECT_EQ(names(), Names{"x"});
    for (const char* text : {"thesis", "weft-"}) {
      folder_.write("x.weft-lock", text);
      EXPECT_EQ(refusal(file_), said);
      EXPECT_EQ(text_of(at("x.weft-lock")), text);
      fs::remove(at("x.weft-lock"));
    }
  }
}

// Only a mode that decides costs another file.
TEST_F(Replace, AUsualLockFileNeedsNoProbe) {
  const auto creates = [&](mode_t shown) {
    folder_.write("x.weft-lock", "");
    NoModes calls;
    calls.shown_mode = shown;
    replace(file_, "new");
    return calls.creates;
  };
  EXPECT_EQ(creates(0600), 3) << "lock file, permissions of a new file, temporary file";
  EXPECT_EQ(creates(0755), 4);
}

TEST_F(Replace, WhatIsNoRegularFileIsRefused) {
  EXPECT_EQ(refusal(folder_.path()), ": is not a regular file");
  EXPECT_EQ(refusal(folder_.path() / ""), ": is not a regular file");
  EXPECT_EQ(refusal(folder_.path() / ".."), ": is not a regular file");
  EXPECT_EQ(refusal("/dev/null"), ": is not a regular file");
  EXPECT_EQ(refusal(at("no") / "such"), ": cannot be written: No such file or directory");
  EXPECT_EQ(refusal(file_, -1), ": wait is -1 s, wanted 0 or more");
  EXPECT_TRUE(names().empty());
  EXPECT_FALSE(fs::exists("/dev/null.weft-lock"));
}

// The name of the temporary file is seen in the folder, and somebody may take it.
TEST_F(Replace, TemporaryNamesThatAreTakenAreLeftAlone) {
  FileLock lock(file_);
  const std::string taken = lock.temporary();
  folder_.write(taken, "theirs");
  replace(lock, "new");
  EXPECT_EQ(text_of(file_), "new");
  EXPECT_EQ(text_of(at(taken)), "theirs");
  // And one that was moved into the place of the temporary file is not installed, nor removed.
  ReplacedFile file(lock);
  put(file, "newer");
  fs::rename(at(lock.temporary()), at("moved"));
  folder_.write(lock.temporary(), "theirs");
  EXPECT_NE(complaint([&] { file.commit(); }).find("another process moved the temporary file"), std::string::npos);
  EXPECT_EQ(text_of(file_), "new");
  EXPECT_EQ(text_of(at(lock.temporary())), "theirs");
}

// ---- changes without a lock

TEST_F(Replace, ChangesSinceItWasReadAreNotOverwritten) {
  const auto refused = [&](const auto& change) {
    folder_.write("x", "old");
    FileLock lock(file_);
    lock.open();
    ReplacedFile file(lock);
    put(file, "new");
    change();
    const std::string said = complaint([&] { file.commit(); });
    return said.substr(std::min(said.size(), file_.native().size() + 2));
  };
  EXPECT_EQ(refused([] {}), "");
  EXPECT_EQ(text_of(file_), "new");
  EXPECT_EQ(refused([&] { folder_.write("x", "longer"); }), "was changed by another process since it was read; nothing was saved");
  EXPECT_EQ(text_of(file_), "longer");
  EXPECT_EQ(refused([&] {
              folder_.write("y", "old");
              fs::rename(at("y"), file_);
            }),
            "was changed by another process since it was read; nothing was saved");
  EXPECT_EQ(text_of(file_), "old");
  EXPECT_EQ(refused([&] { fs::remove(file_); }), "was removed by another process since it was read; nothing was saved");
  EXPECT_TRUE(names().empty());
  EXPECT_EQ(refused([&] { fs::permissions(file_, fs::perms::owner_read); }), "") << "permissions are not the content";
  EXPECT_EQ(mode_of(file_), 0400u);
  fs::remove(file_);
  FileLock lock(file_);
  ReplacedFile file(lock);
  folder_.write("x", "theirs");
  EXPECT_NE(complaint([&] { file.commit(); }).find("was created by another process since it was read"), std::string::npos);
  EXPECT_EQ(text_of(file_), "theirs");
}

// The last moments of a save, in which the other process is faster.
TEST_F(Replace, ChangesAreSeenUntilTheRename) {
  class LateCalls : public ReplacedCalls {
   public:
    int sync(int file) override {
      if (on_sync) on_sync();
      return FileCalls::sync(file);
    }
    int rename(int folder, const char* from, const char* to, bool replace) override {
      if (on_rename) on_rename();
      return FileCalls::rename(folder, from, to, replace);
    }
    std::function<void()> on_sync, on_rename;
  };
  LateCalls calls;
  const auto theirs = [&] { folder_.write("x", "theirs"); };
  folder_.write("x", "old");
  calls.on_sync = theirs;
  EXPECT_NE(complaint([&] { replace(file_, "new"); }).find("was changed by another process"), std::string::npos);
  EXPECT_EQ(text_of(file_), "theirs");
  fs::remove(file_);
  calls.on_sync = nullptr;
  calls.on_rename = theirs;
  EXPECT_NE(complaint([&] { replace(file_, "new"); }).find("cannot be replaced: File exists"), std::string::npos);
  EXPECT_EQ(text_of(file_), "theirs");
  EXPECT_EQ(names(), Names{"x"});
}

// ---- locks between processes

TEST_F(Replace, AHeldLockIsRefusedAfterTheWait) {
  folder_.write("x", "old");
  const FileLock held(file_);
  const std::string self = "process " + std::to_string(::getpid());
  EXPECT_EQ(refusal(file_), ": is held by " + self + "; nothing was changed");
  EXPECT_EQ(refusal(file_, 0.2), ": is still held by " + self + " after 0.2 s; nothing was changed");
  EXPECT_EQ(text_of(file_), "old") << "readers need no lock";
  EXPECT_EQ(names(), (Names{"x", "x.weft-lock"}));
  EXPECT_EQ(refusal(at("y")), "none") << "another file";
}

TEST_F(Replace, ACallerMayEndTheWait) {
  const FileLock held(file_);
  int asked = 0;
  const std::string said =
      complaint([&] { FileLock second(file_, {.wait = 600, .on_wait = {}, .proceed = [&] { return ++asked < 3; }}); });
  EXPECT_EQ(said,
            file_.string() + ": the wait for process " + std::to_string(::getpid()) + " was interrupted; nothing was changed");
  EXPECT_EQ(asked, 3);
}

TEST_F(Replace, TheWaitEndsWhenTheLockIsReleased) {
  int pipe[2], answer[2];
  ASSERT_EQ(::pipe(pipe), 0);
  ASSERT_EQ(::pipe(answer), 0);
  const pid_t holder = process([&] {
    FileLock lock(file_);
    char told = 0;
    if (::write(pipe[1], "x", 1) != 1 || ::read(answer[0], &told, 1) != 1) return 1;
    replace(lock, "from the holder");
    return 0;
  });
  char held = 0;
  ASSERT_EQ(::read(pipe[0], &held, 1), 1);
  std::vector<int64_t> told;
  const auto begin = std::chrono::steady_clock::now();
  const FileLock lock(file_, {.wait = 60, .on_wait = [&](int64_t process) {
                                EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1));
                                told.push_back(process);
                                EXPECT_EQ(::write(answer[1], "x", 1), 1);
                              }});
  EXPECT_EQ(told, std::vector<int64_t>{holder});
  EXPECT_TRUE(lock.exists());
  EXPECT_EQ(text_of(file_), "from the holder");
  EXPECT_EQ(ended(holder), 0);
  for (int end : {pipe[0], pipe[1], answer[0], answer[1]}) ::close(end);
}

TEST_F(Replace, AKilledHolderLeavesNothingForLong) {
  folder_.write("x", "old");
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const pid_t holder = process([&] {
    FileLock lock(file_);
    ReplacedFile file(lock);
    put(file, "half of ");
    if (::write(pipe[1], "x", 1) != 1) return 1;
    for (;;) ::pause();
  });
  char held = 0;
  ASSERT_EQ(::read(pipe[0], &held, 1), 1);
  EXPECT_EQ(names().size(), 3u) << "file, lock and temporary file";
  EXPECT_EQ(refusal(file_), ": is held by process " + std::to_string(holder) + "; nothing was changed");
  ::kill(holder, SIGKILL);
  ended(holder);
  EXPECT_EQ(names().size(), 3u);
  EXPECT_EQ(text_of(file_), "old");
  { const FileLock lock(file_, {.wait = 0, .on_wait = {}}); }
  EXPECT_EQ(names(), Names{"x"});
  ::close(pipe[0]);
  ::close(pipe[1]);
}

// Eight processes count in one file. Without a lock from reading to writing, most of the counts are lost.
TEST_F(Replace, NoUpdateIsLost) {
  constexpr int kProcesses = 8, kTurns = 10;
  std::vector<pid_t> children;
  for (int i = 0; i < kProcesses; ++i)
    children.push_back(process([&] {
      for (int j = 0; j < kTurns; ++j) {
        FileLock lock(file_, {.wait = 120, .on_wait = {}});
        std::string text;
        if (lock.exists()) {
          const Descriptor file = lock.open();
          text.resize(1000);
          text.resize(static_cast<size_t>(std::max<ssize_t>(0, ::pread(*file, text.data(), text.size(), 0))));
        }
        replace(lock, text + "x");
      }
      return 0;
    }));
  for (pid_t child : children) EXPECT_EQ(ended(child), 0);
  EXPECT_EQ(text_of(file_), std::string(kProcesses * kTurns, 'x'));
  EXPECT_EQ(names(), Names{"x"});
}

}  // namespace
}  // namespace weft::files
