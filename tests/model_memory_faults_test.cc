// Every allocation of a call fails in turn: sequences are unchanged, and stores and pools stay consistent.
#include <gtest/gtest.h>

#include "tests/support/failing_allocation.h"
#include "tests/support/folder.h"
#include "tests/support/golden_model.h"
#include "tests/support/sequence_bits.h"

namespace {

using namespace weft;
using namespace weft::testing_support;

constexpr Stream kOneThread{Backend::cpu, 0, nullptr, 1, Isa::best};

HybridState filled(const std::vector<int32_t>& tokens) {
  HybridState state = one_golden_model().create_state("8v4", 400, 2);
  one_golden_model().append(kOneThread, state, {{.tokens = tokens}});
  return state;
}

// The whole memory of a sequence, and the number of pages in use.
struct Whole {
  int64_t tokens = 0, in_use = 0;
  SequenceBits bits;
  std::vector<std::vector<std::byte>> pages;
  friend bool operator==(const Whole&, const Whole&) = default;
};
Whole whole(const HybridState& state, int64_t sequence) {
  const HybridState::Pools& p = model::pools_of(state);
  Whole out{state.tokens(sequence), p.pages->in_use(), bits_of(state, sequence), {}};
  for (int32_t page : p.at(sequence).pages) {
    out.pages.emplace_back(static_cast<size_t>(p.pages->page_bytes()));
    p.pages->read(page, out.pages.back().data());
  }
  return out;
}

// Makes the first allocation of `attempt` fail, then the second, and so on until `attempt` succeeds; `check` runs after each
// failure.
template <class Attempt, class Check>
int64_t each_failure(Attempt&& attempt, Check&& check, size_t smallest = 0) {
  for (int64_t k = 0;; ++k) {
    bool done = false;
    allocation_faults = {k, 1, smallest};
    try {
      attempt();
      done = true;
    } catch (const std::bad_alloc&) {
    }
    allocation_faults = {};
    if (done) return k;
    SCOPED_TRACE(k);
    check();
  }
}

TEST(MemoryFaults, RestoringAPrefix) {
  const std::vector<int32_t> tokens = some_ids(300, 1);
  HybridState source = filled(tokens), state = filled(some_ids(150, 2));
  PrefixStore store({.bytes = 1 << 30});
  store.insert(source, 0, tokens);
  const Whole before = whole(state, 0);
  int64_t restored = 0;
  EXPECT_GT(each_failure([&] { restored = store.restore(state, 0, tokens, 300); }, [&] { EXPECT_EQ(whole(state, 0), before); }), 3);
  EXPECT_EQ(restored, 300);
  EXPECT_EQ(whole(state, 0), whole(source, 0));
}

TEST(MemoryFaults, InsertingAPrefix) {
  const std::vector<int32_t> first = some_ids(100, 1), second = some_ids(300, 2);
  HybridState one = filled(first), two = filled(second), to = filled(some_ids(20, 3));
  PrefixStore probe({.bytes = 1 << 30});
  probe.insert(two, 0, second);
  for (bool room : {true, false}) {
    PrefixStore store({.bytes = room ? 1 << 30 : probe.stats().bytes});  // without room, the first checkpoint is evicted
    const auto insert = [&](const HybridState& state, const std::vector<int32_t>& tokens) {
      each_failure([&] { store.insert(state, 0, tokens); },
                   [&] {
                     const PrefixStoreStats stats = store.stats();
                     EXPECT_LE(stats.bytes, store.options().bytes);
                     EXPECT_EQ(stats.inserted, stats.evicted + stats.checkpoints);
                     EXPECT_EQ(stats.bytes > 0, stats.checkpoints > 0);
                     EXPECT_EQ(store.restore(to, 0, tokens, 1000), 0);
                   });
    };
    insert(one, first);
    insert(two, second);
    EXPECT_EQ(store.stats().checkpoints, room ? 2 : 1);
    EXPECT_EQ(store.restore(to, 0, second, 1000), 300);
    EXPECT_EQ(whole(to, 0), whole(two, 0));
  }
}

TEST(MemoryFaults, MakingRoomForTokens) {
  HybridState state = filled(some_ids(100, 1));
  const Whole before = whole(state, 0);
  const std::vector<SequenceTokens> parts = {{0, 290}, {1, 130}};
  EXPECT_GT(each_failure([&] { state.append(parts); },
                         [&] {
                           EXPECT_EQ(whole(state, 0), before);
                           EXPECT_EQ(state.tokens(1), 0);
                         }),
            3);
  EXPECT_EQ(state.tokens(0), 390);
  state.reset();
  EXPECT_EQ(state.pages_in_use(), 0);
}

TEST(MemoryFaults, LoadingAFile) {
  const Folder folder;
  const std::vector<int32_t> tokens = some_ids(320, 1);
  HybridState source = filled(tokens), state = filled(some_ids(150, 2));
  one_golden_model().save(folder.path() / "state", source, 0, tokens, "8v4");
  const Whole before = whole(state, 0);
  // Small allocations do not fail: the JSON library allocates in destructors and ends the program where that fails.
  EXPECT_GT(each_failure([&] { one_golden_model().restore(folder.path() / "state", state, 0); },
                         [&] { EXPECT_EQ(whole(state, 0), before); }, 1024),
            5);
  EXPECT_EQ(whole(state, 0), whole(source, 0));
}

TEST(MemoryFaults, ForksAndSnapshots) {
  HybridState state = filled(some_ids(300, 1));
  one_golden_model().append(kOneThread, state, {{.sequence = 1, .tokens = some_ids(150, 2)}});
  const Whole from = whole(state, 0), before = whole(state, 1);
  const auto unchanged = [&] {
    EXPECT_EQ(whole(state, 0), from);
    EXPECT_EQ(whole(state, 1), before);
  };
  std::optional<HybridSnapshot> snapshot;
  EXPECT_GT(each_failure([&] { snapshot.emplace(state.snapshot(0)); }, unchanged), 2);
  EXPECT_GT(each_failure([&] { state.restore(1, *snapshot); }, unchanged), 0);
  EXPECT_EQ(whole(state, 1).bits, from.bits);
  EXPECT_EQ(whole(state, 1).pages, from.pages);
  state.reset(1);
  const Whole empty = whole(state, 1);
  EXPECT_GT(each_failure([&] { state.fork(0, 1); }, [&] { EXPECT_EQ(whole(state, 1).tokens, empty.tokens); }), 0);
  EXPECT_EQ(whole(state, 1).pages, from.pages);
}

}  // namespace
