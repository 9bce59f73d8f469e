// `weft generate --state`, run as processes: locks, waiting, and files that are not Weft's.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "files/file_lock.h"
#include "tests/support/command.h"
#include "tests/support/complaint.h"
#include "tests/support/file_faults.h"
#include "tests/support/folder.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Names = std::vector<std::string>;

class StateCommand : public testing::Test {
 protected:
  // The command with --state, and a short text.
  Result generate(const std::string& arguments) const {
    return weft("generate --threads 1 --quiet --prompt 'The ship' --max-tokens 2 --temperature 0 --state '" + file_.string() +
                "' " + arguments);
  }
  int64_t ids() const {
    return static_cast<int64_t>(json::parse(weft("state --json '" + file_.string() + "'").out).at("ids").size());
  }
  Names names() const { return names_in(folder_.path()); }

  Folder folder_;
  fs::path file_ = folder_.path() / "v.state";
};

TEST_F(StateCommand, AFailingCommandTouchesNothing) {
  folder_.write("v.state.weft-tmp", "thesis\n");
  fs::create_hard_link(folder_.path() / "v.state.weft-tmp", folder_.path() / "thesis.txt");
  EXPECT_EQ(generate("--model /nonexistent").exit, 1);
  EXPECT_EQ(generate("--file /nonexistent").exit, 2);
  EXPECT_EQ(names(), (Names{"thesis.txt", "v.state.weft-tmp"}));
  EXPECT_EQ(generate("").exit, 0);
  EXPECT_EQ(names(), (Names{"thesis.txt", "v.state", "v.state.weft-tmp"}));
  EXPECT_EQ(text_of(folder_.path() / "thesis.txt"), "thesis\n");
  // A file in the place of the lock file is named, and stays.
  fs::create_hard_link(folder_.path() / "thesis.txt", folder_.path() / "v.state.weft-lock");
  const std::string before = text_of(file_);
  const Result r = generate("");
  EXPECT_EQ(r.exit, 1);
  EXPECT_EQ(r.out, "");
  EXPECT_EQ(r.err, "weft: " + file_.string() + ".weft-lock: is not a lock file that Weft made; move it away\n");
  EXPECT_EQ(text_of(folder_.path() / "thesis.txt"), "thesis\n");
  EXPECT_TRUE(text_of(file_) == before);
}

TEST_F(StateCommand, TheStateIsOursWhateverOthersPrepared) {
  WEFT_NEEDS_TWO_USERS();
  ASSERT_EQ(::chmod(folder_.path().c_str(), 01777), 0);
  EXPECT_EQ(as_nobody([&] {
              folder_.write("v.state.weft-tmp", "");
              fs::permissions(folder_.path() / "v.state.weft-tmp", fs::perms::all);
              return 0;
            }),
            0);
  EXPECT_EQ(generate("").exit, 0);
  struct stat info {};
  ASSERT_EQ(::stat(file_.c_str(), &info), 0);
  EXPECT_EQ(info.st_uid, ::geteuid());
  EXPECT_EQ(text_of(folder_.path() / "v.state.weft-tmp"), "");
  // A state of another user is neither taken from that user nor given to them.
  ASSERT_EQ(::chown(file_.c_str(), kNobody, kNobody), 0);
  const Result r = generate("");
  EXPECT_EQ(r.exit, 1);
  EXPECT_EQ(r.err, "weft: " + file_.string() + ": belongs to user 65534, wanted a file of user 0; copy it, and use the copy\n");
  ASSERT_EQ(::stat(file_.c_str(), &info), 0);
  EXPECT_EQ(info.st_uid, kNobody);
}

TEST_F(StateCommand, WaitsAndSaysForWhom) {
  ASSERT_EQ(generate("").exit, 0);
  const std::string before = text_of(file_);
  const std::string self = "process " + std::to_string(::getpid());
  {
    const files::FileLock held(file_);
    const auto begin = std::chrono::steady_clock::now();
    const Result none = generate("--wait 0");
    EXPECT_EQ(none.exit, 1);
    EXPECT_EQ(none.out, "");
    EXPECT_EQ(none.err, "weft: " + file_.string() + ": is held by " + self + "; nothing was changed\n");
    const Result some = generate("--wait 1.5");
    EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(1500));
    EXPECT_EQ(some.exit, 1);
    EXPECT_EQ(some.err, "weft: waiting for " + self + ", which holds " + file_.string() + "\nweft: " + file_.string() +
                            ": is still held by " + self + " after 1.5 s; nothing was changed\n");
    EXPECT_TRUE(text_of(file_) == before);
  }
  EXPECT_EQ(generate("--wait 0").exit, 0);
  EXPECT_FALSE(text_of(file_) == before);
  EXPECT_EQ(names(), Names{"v.state"});
}

TEST_F(StateCommand, WaitIsChecked) {
  for (const char* bad : {"--wait -1", "--wait nan", "--wait x", "--wait 1e10"}) EXPECT_EQ(generate(bad).exit, 2) << bad;
  EXPECT_EQ(weft("generate --wait 3 --max-tokens 1").exit, 2) << "without --state";
  EXPECT_TRUE(names().empty());
}

TEST_F(StateCommand, EightAtOnceLoseNoTurn) {
  ASSERT_EQ(generate("").exit, 0);
  const int64_t one = ids();
  std::vector<std::thread> threads;
  std::vector<int> exits(8, -1);
  for (int& exit : exits)
    threads.emplace_back([&] {
      const std::string line = "'" WEFT_COMMAND
                               "' generate --threads 1 --quiet --prompt 'The ship' --max-tokens 2 --temperature 0 "
                               "--state '" +
                               file_.string() + "' --wait 300 >/dev/null 2>&1 </dev/null";
      exit = std::system(line.c_str());
    });
  for (std::thread& thread : threads) thread.join();
  for (int exit : exits) EXPECT_EQ(exit, 0);
  EXPECT_EQ(ids(), 9 * one);
  EXPECT_EQ(names(), Names{"v.state"});
}

// The prompt is read before the state is locked: the process that writes the prompt may use the same state.
TEST_F(StateCommand, APipeBetweenTwoTurnsDoesNotBlock) {
  const std::string weft =
      "'" WEFT_COMMAND "' generate --threads 1 --quiet --max-tokens 2 --state '" + file_.string() + "' --wait 20 ";
  EXPECT_EQ(std::system((weft + "--prompt 'The ship' </dev/null | " + weft + "--file - >/dev/null").c_str()), 0);
  EXPECT_GT(ids(), 4);
}

}  // namespace
}  // namespace weft
