// Locks of state files: from load to save nobody else writes, and no fault of a system call or of the power loses a state.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/support/complaint.h"
#include "tests/support/file_faults.h"
#include "tests/support/folder.h"
#include "tests/support/sequence_bits.h"
#include "weft/state_file.h"

namespace {

using namespace weft;
using namespace weft::testing_support;

const std::string kFingerprint = "0123456789abcdef0123456789abcdef";
using Names = std::vector<std::string>;

HybridPlan plan() {
  HybridPlan p;
  p.capacity = 400;
  p.layers.emplace_back(DeltaMemory{2, 4, 8, 12, 3});
  p.layers.emplace_back(AttentionMemory::for_cpu(1, kv_recipe("2v2", 32, 32)));
  return p;
}

StateLabel label(std::vector<int32_t> ids) { return {kFingerprint, "a model", "2v2", std::move(ids)}; }

// The ids of a file that loads whole.
std::vector<int32_t> ids_of(const std::filesystem::path& file) {
  HybridState state = HybridState::create(plan());
  return load_state(file, state, 0, kFingerprint).ids;
}

class Lock : public testing::Test {
 protected:
  // A state of `count` tokens, all of them `token`.
  static HybridState state_of(size_t count) {
    HybridState state = HybridState::create(plan());
    state.append(std::array{SequenceTokens{0, static_cast<int64_t>(count)}});
    HybridState::Pools& pools = model::pools_of(state);
    const std::vector<std::byte> zeros(
        static_cast<size_t>(std::max({pools.recurrent_bytes(), pools.history_bytes(), pools.pages->page_bytes()})));
    pools.write(pools.at(0), zeros.data(), zeros.data());
    for (int32_t number : pools.at(0).pages) pools.pages->write(number, zeros.data());
    return state;
  }
  void save(size_t count, int32_t token) const { save_state(file_, state_of(count), 0, label(std::vector<int32_t>(count, token))); }
  Names names() const { return names_in(folder_.path()); }

  Folder folder_;
  std::filesystem::path file_ = folder_.path() / "kept";
};

// Every process loads, adds its number, and saves. Every turn must be in the file.
TEST_F(Lock, TwoWritersLoseNoTurn) {
  constexpr int kProcesses = 8, kTurns = 5;
  std::vector<pid_t> children;
  for (int32_t i = 0; i < kProcesses; ++i)
    children.push_back(process([&] {
      for (int j = 0; j < kTurns; ++j) {
        StateLock lock(file_, {.wait = 120, .on_wait = {}});
        HybridState state = HybridState::create(plan());
        std::vector<int32_t> ids;
        if (lock.exists()) ids = load_state(lock, state, 0, kFingerprint).ids;
        ids.push_back(i);
        state.append(std::array{SequenceTokens{0, 1}});
        save_state(lock, state, 0, label(ids));
      }
      return 0;
    }));
  for (pid_t child : children) EXPECT_EQ(ended(child), 0);
  const std::vector<int32_t> ids = ids_of(file_);
  EXPECT_EQ(ids.size(), static_cast<size_t>(kProcesses * kTurns));
  for (int32_t i = 0; i < kProcesses; ++i) EXPECT_EQ(std::count(ids.begin(), ids.end(), i), kTurns) << i;
  EXPECT_EQ(names(), Names{"kept"});
}

TEST_F(Lock, OtherWritersWaitAndReadersDoNot) {
  save(3, 1);
  StateLock lock(file_);
  EXPECT_TRUE(lock.exists());
  EXPECT_EQ(ids_of(file_).size(), 3u);
  EXPECT_EQ(read_state_file(file_).tokens, 3);
  EXPECT_EQ(complaint([&] { StateLock second(file_, {.wait = 0, .on_wait = {}}); }),
            file_.string() + ": is held by process " + std::to_string(::getpid()) + "; nothing was changed");
  EXPECT_EQ(complaint([&] { check_state_path(file_); }), "none") << "a look needs no lock";
  StateLock moved = std::move(lock);
  save_state(moved, state_of(4), 0, label({1, 1, 1, 1}));
  save_state(moved, state_of(5), 0, label({1, 1, 1, 1, 1}));
  EXPECT_EQ(ids_of(file_).size(), 5u);
}

TEST_F(Lock, AFileThatChangedSinceItWasReadIsRefused) {
  save(3, 1);
  StateLock lock(file_);
  HybridState state = HybridState::create(plan());
  load_state(lock, state, 0, kFingerprint);
  // A program that knows no locks.
  const std::string other = text_of(file_);
  folder_.write("other", other);
  std::filesystem::rename(folder_.path() / "other", file_);
  EXPECT_EQ(complaint([&] {
              save_state(lock, state, 0, label({1, 1, 1, 2}));
            }),
            file_.string() + ": was changed by another process since it was read; nothing was saved");
  EXPECT_TRUE(text_of(file_) == other);
  load_state(lock, state, 0, kFingerprint);  // now it is known
  save_state(lock, state, 0, label({1, 1, 1, 2}));
  EXPECT_EQ(ids_of(file_).size(), 4u);
}

TEST_F(Lock, ARefusedLabelTouchesNothing) {
  save(3, 1);
  const std::string before = text_of(file_);
  StateLock lock(file_);
  EXPECT_NE(complaint([&] { save_state(lock, state_of(3), 0, label({1, 1})); }), "none");
  EXPECT_EQ(names(), (Names{"kept", "kept.weft-lock"}));
  EXPECT_TRUE(text_of(file_) == before);
}

TEST_F(Lock, EveryCallOfASaveMayFail) {
  std::string all;
  folder_.write(".weft-tmp-ffffffffffffffff", "theirs");
  for (int64_t which = 0;; ++which) {
    save(70, 1);
    const size_t opened = open_files();
    std::string failed, said;
    {
      FailingCalls calls(which, EIO);
      said = complaint([&] { save(150, 2); });
      failed = calls.failed();
    }
    if (failed.empty()) break;
    all += failed;
    const std::string where = failed + std::to_string(which) + ": " + said;
    const bool replaced = said == "none" || said.find("is replaced, but") != std::string::npos;
    EXPECT_EQ(ids_of(file_), replaced ? std::vector<int32_t>(150, 2) : std::vector<int32_t>(70, 1)) << where;
    EXPECT_EQ(open_files(), opened) << where;
    for (const std::string& name : names())
      EXPECT_TRUE(name == "kept" || name == ".weft-tmp-ffffffffffffffff" || failed == "unlink " || failed == "stat " ||
                  failed == "fstat ")
          << where << name;
    save(70, 3);
    EXPECT_EQ(names(), (Names{".weft-tmp-ffffffffffffffff", "kept"})) << where;
    ASSERT_FALSE(HasFailure());
  }
  for (const char* call : {"open", "stat", "fstat", "read", "write", "fchmod", "fsync", "rename", "unlink", "lock", "entropy"})
    EXPECT_NE(all.find(call), std::string::npos) << call;
  EXPECT_EQ(text_of(folder_.path() / ".weft-tmp-ffffffffffffffff"), "theirs");
}

TEST_F(Lock, EveryCallOfALoadMayFail) {
  save(70, 1);
  const std::string before = text_of(file_);
  std::string all;
  for (int64_t which = 0;; ++which) {
    HybridState state = state_of(9);
    const SequenceBits own = bits_of(state, 0);
    const size_t opened = open_files();
    std::string failed, said;
    {
      FailingCalls calls(which, EIO);
      said = complaint([&] {
        StateLock lock(file_, {.wait = 0, .on_wait = {}});
        load_state(lock, state, 0, kFingerprint);
      });
      failed = calls.failed();
    }
    if (failed.empty()) break;
    all += failed;
    const std::string where = failed + std::to_string(which) + ": " + said;
    EXPECT_EQ(state.tokens(0), said == "none" ? 70 : 9) << where;
    EXPECT_TRUE(said == "none" || bits_of(state, 0) == own) << where;
    EXPECT_EQ(open_files(), opened) << where;
    EXPECT_TRUE(text_of(file_) == before) << where;
    check_state_path(file_);
    ASSERT_FALSE(HasFailure());
  }
  EXPECT_GT(std::count(all.begin(), all.end(), ' '), 20) << all;
  save(70, 1);
  EXPECT_EQ(names(), Names{"kept"});
}

TEST_F(Lock, ASaveSurvivesPowerFailures) {
  save(70, 1);
  const Disk first = {{"kept", text_of(file_)}};
  std::vector<DiskOp> ops;
  {
    RecordingCalls calls("kept");
    save(150, 2);
    ops = calls.ops();
  }
  const std::string next = text_of(file_);
  ASSERT_TRUE(next != first.at("kept"));
  int disks = 0;
  at_every_power_failure(first, ops, [&](const Disk& disk, bool complete) {
    const auto found = disk.find("kept");
    ASSERT_NE(found, disk.end());
    EXPECT_TRUE(found->second == next || (found->second == first.at("kept") && !complete)) << "disk " << disks;
    ++disks;
  });
  EXPECT_GT(disks, 500);
}

}  // namespace
