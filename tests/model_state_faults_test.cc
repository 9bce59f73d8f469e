// State files under faults: damage of every byte, truncation, kills during a save, full disks. No saved state is lost, no damaged
// one is loaded, and every refusal is a sentence.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <random>

#include "tests/support/complaint.h"
#include "tests/support/file_faults.h"
#include "tests/support/folder.h"
#include "tests/support/sequence_bits.h"
#include "weft/state_file.h"

namespace {

using namespace weft;
using namespace weft::testing_support;

const std::string kFingerprint = "0123456789abcdef0123456789abcdef";

HybridPlan plan(int64_t capacity, int64_t value_dim = 4) {
  HybridPlan p;
  p.capacity = capacity;
  p.layers.emplace_back(DeltaMemory{2, value_dim, 8, 12, 3});
  p.layers.emplace_back(AttentionMemory::for_cpu(1, kv_recipe("2v2", 32, 32)));
  return p;
}

// A state whose memory holds random bytes of a seed.
HybridState noise(const HybridPlan& p, int64_t tokens, uint64_t seed) {
  HybridState state = HybridState::create(p);
  state.append(std::array{SequenceTokens{0, tokens}});
  std::mt19937_64 random(seed);
  const auto fill = [&](std::byte* data, int64_t bytes) {
    for (int64_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(random());
  };
  HybridState::Pools& pools = model::pools_of(state);
  std::vector<std::byte> recurrent(static_cast<size_t>(pools.recurrent_bytes())),
      history(static_cast<size_t>(pools.history_bytes()));
  std::vector<std::byte> page(static_cast<size_t>(pools.pages->page_bytes()));
  fill(recurrent.data(), pools.recurrent_bytes());
  fill(history.data(), pools.history_bytes());
  pools.write(pools.at(0), recurrent.data(), history.data());
  for (int32_t number : pools.at(0).pages) {
    fill(page.data(), pools.pages->page_bytes());
    pools.pages->write(number, page.data());
  }
  return state;
}

// Without truncating the file first: some file systems then wait for the disk.
void overwrite(const std::string& path, const std::string& bytes) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT, 0600);
  EXPECT_GE(file, 0);
  EXPECT_EQ(::pwrite(file, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  EXPECT_EQ(::ftruncate(file, static_cast<off_t>(bytes.size())), 0);
  ::close(file);
}

// A small state file, and a state with another sequence.
class Damage : public testing::Test {
 protected:
  Damage() {
    const HybridState state = noise(plan(100), 70, 1);
    save_state(file_, state, 0, {kFingerprint, "a model", "2v2", std::vector<int32_t>(75, 3)});
    good_ = text_of(file_);
    want_ = bits_of(state, 0);
    info_ = read_state_file(file_);
  }
  // Loads these bytes; they must be refused with a sentence that names the file, and the state must not change.
  std::string refused(const std::string& bytes) {
    const std::string path = (folder_.path() / "bad").string();
    overwrite(path, bytes);
    const std::string said = complaint([&] { load_state(path, other_, 0, kFingerprint); });
    EXPECT_EQ(said.rfind(path + ": ", 0), 0u) << said;
    EXPECT_EQ(other_.tokens(0), 9);
    EXPECT_EQ(bits_of(other_, 0), own_);
    return said.size() > path.size() + 2 ? said.substr(path.size() + 2) : said;
  }

  Folder folder_;
  std::filesystem::path file_ = folder_.path() / "good";
  std::string good_;
  SequenceBits want_;
  StateFileInfo info_;
  HybridState other_ = noise(plan(100), 9, 2);
  SequenceBits own_ = bits_of(other_, 0);
};

TEST_F(Damage, NoneLoads) {
  EXPECT_EQ(load_state(file_, other_, 0, kFingerprint).ids.size(), 75u);
  EXPECT_EQ(other_.tokens(0), 70);
  EXPECT_EQ(bits_of(other_, 0), want_);
}

TEST_F(Damage, EveryByte) {
  for (size_t i = 0; i < good_.size(); ++i)
    for (char flip : {'\x01', '\x80', '\xff'}) {
      std::string bad = good_;
      bad[i] = static_cast<char>(bad[i] ^ flip);
      refused(bad);
      ASSERT_FALSE(HasFailure()) << "byte " << i;
    }
}

TEST_F(Damage, NamesTheSection) {
  for (const StateSection& section : info_.sections) {
    if (section.bytes == 0) continue;
    std::string bad = good_;
    bad[static_cast<size_t>(section.offset + section.bytes / 2)] ^= 4;
    EXPECT_EQ(refused(bad), section.name + " is damaged: its checksum does not match its bytes");
  }
  std::string bad = good_;
  bad[8] = 9;
  EXPECT_EQ(refused(bad), "version is 9, wanted 1");
  bad = good_;
  bad[100] ^= 1;
  EXPECT_EQ(refused(bad), "header is damaged: its checksum does not match its bytes");
  EXPECT_EQ(refused("something else entirely, which is longer than 32 bytes"),
            "is not a state file: it does not begin with 'weftstat'");
}

TEST_F(Damage, ManyRandomOnes) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 4000; ++i) {
    std::string bad = good_;
    for (size_t count = 1 + random() % 8; count > 0; --count) {
      switch (random() % 4) {
        case 0: bad[random() % bad.size()] = static_cast<char>(random()); break;
        case 1: bad.erase(random() % bad.size(), 1 + random() % 100); break;
        case 2: bad.insert(random() % bad.size(), 1 + random() % 100, static_cast<char>(random())); break;
        default: {
          const size_t from = random() % bad.size(), to = random() % bad.size(), bytes = random() % 64;
          for (size_t j = 0; j < bytes && from + j < bad.size() && to + j < bad.size(); ++j) bad[to + j] = bad[from + j];
        }
      }
      if (bad.empty()) bad = "x";
    }
    if (bad == good_) continue;
    refused(bad);
    ASSERT_FALSE(HasFailure()) << i;
  }
}

TEST_F(Damage, CutsAtEveryEdgeAndByte) {
  for (const StateSection& section : info_.sections) {
    const auto edge = static_cast<size_t>(section.offset);
    for (size_t cut : {edge - 1, edge, edge + 1})
      EXPECT_NE(refused(good_.substr(0, std::min(cut, good_.size() - 1))).find("is truncated"), std::string::npos) << section.name;
  }
  for (size_t cut = 0; cut < good_.size(); ++cut) refused(good_.substr(0, cut));
  EXPECT_EQ(refused(good_ + std::string(3, '\0')), "has 3 bytes after its end");
  EXPECT_EQ(refused(good_ + good_), "has " + std::to_string(good_.size()) + " bytes after its end");
}

// Two states that are saved in turn under one name; the file must always be one of them, complete.
class Kill : public testing::Test {
 protected:
  static constexpr int64_t kTokens = 8000;
  Kill() : plan_(plan(kTokens, 200)), states_{noise(plan_, kTokens, 10), noise(plan_, kTokens - 100, 11)} {
    for (size_t i = 0; i < 2; ++i) bits_[i] = bits_of(states_[i], 0);
  }
  void save(size_t which) const {
    save_state(file_, states_[which], 0,
               {kFingerprint, "a model", "2v2", std::vector<int32_t>(kTokens, static_cast<int32_t>(which))});
  }
  void expect_whole() {
    HybridState loaded = HybridState::create(plan_);
    const StateLabel label = load_state(file_, loaded, 0, kFingerprint);
    ASSERT_EQ(label.ids.size(), static_cast<size_t>(kTokens));
    const auto which = static_cast<size_t>(label.ids.front());
    ASSERT_LT(which, 2u);
    seen_[which] = true;
    EXPECT_EQ(loaded.tokens(0), states_[which].tokens(0));
    EXPECT_EQ(bits_of(loaded, 0), bits_[which]);
  }
  // Is only the saved file in the folder?
  bool clean() const { return names_in(folder_.path()) == std::vector<std::string>{"kept"}; }

  Folder folder_;
  std::filesystem::path file_ = folder_.path() / "kept";
  HybridPlan plan_;
  HybridState states_[2];
  SequenceBits bits_[2];
  bool seen_[2] = {};
};

TEST_F(Kill, InTheMiddleOfASave) {
  // The time of two saves, so that kills hit any moment of a save.
  const auto begin = std::chrono::steady_clock::now();
  for (size_t i = 0; i < 4; ++i) save(i % 2);
  const auto two = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begin).count() / 2;
  std::mt19937_64 random(5);
  int interrupted = 0;
  const auto enough = [&] { return interrupted > 20 && seen_[0] && seen_[1]; };
  for (int i = 0; i < 200 || (i < 10000 && !enough()); ++i) {  // on a busy machine fewer kills hit a save
    const pid_t child = process([&]() -> int {
      for (size_t j = 0;; ++j) save((j + static_cast<size_t>(i)) % 2);
    });
    ASSERT_GT(child, 0);
    ::usleep(static_cast<useconds_t>(1000 + random() % static_cast<uint64_t>(2 * two)));
    ::kill(child, SIGKILL);
    const int status = ended(child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the child ended by itself: " << status;
    for (const std::string& name : names_in(folder_.path())) interrupted += name.rfind(".weft-tmp-", 0) == 0;
    EXPECT_LE(names_in(folder_.path()).size(), 3u) << "each save removes what the last kill left";
    expect_whole();
    ASSERT_FALSE(HasFailure()) << i;
  }
  EXPECT_TRUE(enough()) << "no kill came in the middle of a save, or none between two";
  // The next save removes the temporary file and the lock of the last kill.
  save(1);
  EXPECT_TRUE(clean());
  expect_whole();
}

TEST_F(Kill, SeveralWritersOfOneFile) {
  pid_t children[3];
  for (size_t i = 0; i < 3; ++i)
    children[i] = process([&] {
      for (size_t j = 0; j < 15; ++j) save((i + j) % 2);
      return 0;
    });
  for (pid_t child : children) EXPECT_EQ(ended(child), 0);
  EXPECT_TRUE(clean());
  expect_whole();
}

TEST_F(Kill, FilesThatMayNotGrow) {
  save(1);  // the smaller
  const std::string before = text_of(file_);
  for (uint64_t limit : {uint64_t{0}, uint64_t{100}, uint64_t{5000}, before.size() / 2, before.size() - 1}) {
    const pid_t child = process([&] {
      std::signal(SIGXFSZ, SIG_IGN);
      const rlimit most{limit, limit};
      if (::setrlimit(RLIMIT_FSIZE, &most) != 0) return 2;
      return complaint([&] { save(0); }).find("cannot be written: File too large") != std::string::npos ? 0 : 3;
    });
    EXPECT_EQ(ended(child), 0) << limit;
    EXPECT_TRUE(text_of(file_) == before) << limit;
    EXPECT_TRUE(clean()) << limit;
  }
}

// A disk of 128 kB and 3 files, where the system lets the process mount one.
TEST_F(Kill, FullAndReadOnlyDisks) {
  const pid_t child = process([&] {
    if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("none", folder_.path().c_str(), "tmpfs", 0, "size=128k,nr_inodes=4") != 0)
      return 77;
    const HybridState little = noise(plan(100), 70, 1);
    save_state(file_, little, 0, {kFingerprint, "a model", "2v2", std::vector<int32_t>(70)});
    const std::string before = text_of(file_);
    if (complaint([&] { save(1); }).find("cannot be written: No space left on device") == std::string::npos) return 3;
    if (text_of(file_) != before) return 4;
    if (!clean()) return 5;
    // No room for the temporary file, and then none for the lock file.
    const auto save_little = [&] { save_state(file_, little, 0, {kFingerprint, "a model", "2v2", std::vector<int32_t>(70)}); };
    for (const char* name : {"a", "b"}) {
      folder_.write(name, "");
      if (complaint(save_little).find("cannot be written: No space left on device") == std::string::npos) return 6;
      if (text_of(file_) != before || std::filesystem::exists(folder_.path() / "kept.weft-lock")) return 7;
    }
    if (::mount("none", folder_.path().c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, nullptr) != 0) return 8;
    if (complaint(save_little).find("cannot be written: Read-only file system") == std::string::npos) return 9;
    if (complaint([&] { check_state_path(file_); }).find("cannot be written: Read-only file system") == std::string::npos)
      return 10;
    return text_of(file_) == before ? 0 : 11;
  });
  const int status = ended(child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "no right to mount here";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
