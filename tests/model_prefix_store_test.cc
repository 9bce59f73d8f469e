// The prefix store: longest known beginning, same bits after a hit, budget, eviction, storage in fewer bits, threads.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <limits>
#include <thread>

#include "tests/support/complaint.h"
#include "tests/support/golden_model.h"
#include "tests/support/sequence_bits.h"

namespace {

using namespace weft;
using namespace weft::testing_support;

constexpr Stream kOneThread{Backend::cpu, 0, nullptr, 1, Isa::best};
constexpr int64_t kPlenty = int64_t{1} << 30;

const Model& model() {
  static const Model loaded = Model::load(golden_models() / "qwen3_5");
  return loaded;
}

std::vector<int32_t> ids(size_t count, size_t salt = 1) {
  std::vector<int32_t> out;
  for (size_t i = 0; i < count; ++i)
    out.push_back(static_cast<int32_t>((i * 7919 + i * i * salt) % static_cast<size_t>(model().vocab_size())));
  return out;
}
std::vector<int32_t> joined(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}
std::vector<float> prefill(HybridState& state, const std::vector<int32_t>& tokens, PrefixStore& store, int64_t* restored = nullptr,
                           int64_t sequence = 0) {
  std::vector<float> logits(static_cast<size_t>(model().vocab_size()));
  const int64_t got = model().prefill(kOneThread, state, sequence, tokens, logits.data(), store);
  if (restored) *restored = got;
  return logits;
}
std::vector<float> cold(const std::vector<int32_t>& tokens, const char* kv = "8v4") {
  HybridState state = model().create_state(kv, 2000);
  std::vector<float> logits(static_cast<size_t>(model().vocab_size()));
  model().append(kOneThread, state, {{.tokens = tokens, .logits = logits.data()}});
  return logits;
}

TEST(PrefixStore, HitsGiveTheBitsOfColdPrompts) {
  for (const char* kv : {"8v4", "f16", "3v3"}) {
    PrefixStore store({.bytes = kPlenty, .every = 64});
    HybridState state = model().create_state(kv, 2000, 2);
    const std::vector<int32_t> first = ids(300), second = joined(ids(256), ids(90, 5)), third = joined(ids(130), ids(40, 7));
    int64_t restored = 0;
    EXPECT_EQ(prefill(state, first, store, &restored), cold(first, kv));
    EXPECT_EQ(restored, 0);
    EXPECT_EQ(prefill(state, second, store, &restored, 1), cold(second, kv)) << kv;
    EXPECT_EQ(restored, 256);
    EXPECT_EQ(prefill(state, third, store, &restored), cold(third, kv)) << kv;
    EXPECT_EQ(restored, 128);
    EXPECT_EQ(state.tokens(0), 170);
    // 16 tokens or fewer behind a multiple would use the decode path by themselves; as a part of a prompt they must not.
    const std::vector<int32_t> fourth = joined(ids(192), ids(3, 9)), fifth = joined(ids(192, 4), {5});
    EXPECT_EQ(prefill(state, fourth, store, &restored), cold(fourth, kv)) << kv;
    EXPECT_EQ(restored, 192);
    prefill(state, fifth, store);
    EXPECT_EQ(prefill(state, joined(ids(192, 4), ids(70, 6)), store, &restored), cold(joined(ids(192, 4), ids(70, 6)), kv)) << kv;
    EXPECT_EQ(restored, 192) << "a checkpoint before the last token";
    // The same prompt again restores all but the last token, which gives the logits.
    prefill(state, first, store, &restored);
    EXPECT_EQ(restored, 256);
    const PrefixStoreStats stats = store.stats();
    EXPECT_EQ(stats.hits, 5);
    EXPECT_EQ(stats.misses, 2);
    EXPECT_EQ(stats.tokens, 256 + 128 + 192 + 192 + 256);
    EXPECT_EQ(stats.drift, 0);
  }
}

// A conversation: every turn begins with all earlier turns and answers.
TEST(PrefixStore, ATurnContinuesAtTheEndOfTheLastOne) {
  PrefixStore store({.bytes = kPlenty});
  HybridState state = model().create_state("8v4", 2000);
  std::vector<int32_t> talk = ids(333);
  prefill(state, talk, store);
  for (int turn = 0; turn < 3; ++turn) {
    for (int i = 0; i < 5; ++i) {  // the answer, decoded
      const std::vector<int32_t> token = ids(1, static_cast<size_t>(i + 2));
      model().append(kOneThread, state, {{.tokens = token}});
      talk = joined(talk, token);
    }
    store.insert(state, 0, talk);
    const SequenceBits end = bits_of(state, 0);
    state.reset(0);
    const auto length = static_cast<int64_t>(talk.size());
    EXPECT_EQ(store.restore(state, 0, joined(talk, ids(3, 9)), length + 2), length);
    EXPECT_EQ(bits_of(state, 0), end);
    talk = joined(talk, ids(20, static_cast<size_t>(turn + 11)));
    int64_t restored = 0;
    prefill(state, talk, store, &restored);
    EXPECT_EQ(restored, length);
  }
}

// Pages that a sequence alone owned are reused: repeated restores need no more pages than the plan allows.
TEST(PrefixStore, AHitTakesNoMoreThanThePlan) {
  const HybridPlan plan = model().plan("8v4", 1024, 2);
  HybridState state = HybridState::create(plan);
  PrefixStore store({.bytes = kPlenty, .every = 64});
  const std::vector<int32_t> tokens = ids(1024);
  prefill(state, tokens, store, nullptr, 1);
  for (int turn = 0; turn < 3; ++turn) {
    int64_t restored = 0;
    prefill(state, tokens, store, &restored);
    EXPECT_EQ(restored, 960);
    EXPECT_EQ(state.bytes().kv, hybrid_bytes(plan, 1024).kv);
  }
  // Pages with other owners stay unchanged.
  const SequenceBits before = bits_of(state, 0);
  state.fork(0, 1);
  EXPECT_EQ(store.restore(state, 1, ids(512), 512), 512);
  EXPECT_EQ(state.bytes().kv, hybrid_bytes(plan, 1024).kv);
  EXPECT_EQ(bits_of(state, 0), before);
  EXPECT_EQ(prefill(state, tokens, store, nullptr, 1), cold(tokens));
}

TEST(PrefixStore, SharesPagesAndKeepsItsBudget) {
  PrefixStore large({.bytes = kPlenty, .every = 64});
  HybridState state = model().create_state("8v4", 2000);
  prefill(state, ids(640), large);
  const PrefixStoreStats one = large.stats();
  EXPECT_EQ(one.checkpoints, 10);
  const int64_t pages = 10 * model::pools_of(state).pages->page_bytes(),
                memory = 10 * (model::pools_of(state).recurrent_bytes() + model::pools_of(state).history_bytes());
  EXPECT_GE(one.bytes, pages + memory);
  EXPECT_LE(one.bytes, pages + memory + 10 * 2000) << "pages are counted once";

  PrefixStore small({.bytes = one.bytes / 2, .every = 64});
  for (size_t salt = 1; salt < 6; ++salt) {
    prefill(state, ids(400, salt), small);
    EXPECT_LE(small.stats().bytes, one.bytes / 2);
    EXPECT_EQ(small.restore(state, 0, ids(400, salt), 400), 400) << "the newest is there";
  }
  EXPECT_GT(small.stats().evicted, 0);
  EXPECT_EQ(small.stats().inserted, small.stats().evicted + small.stats().checkpoints);

  PrefixStore tiny({.bytes = 1000});
  int64_t restored = 1;
  EXPECT_EQ(prefill(state, ids(100), tiny, &restored), cold(ids(100)));
  prefill(state, ids(100), tiny, &restored);
  EXPECT_EQ(restored, 0);
  EXPECT_EQ(tiny.stats().bytes, 0);
  EXPECT_EQ(tiny.stats().refused, 2);
}

TEST(PrefixStore, TheLeastRecentlyUsedGoesFirst) {
  HybridState state = model().create_state("8v4", 2000);
  PrefixStore probe({.bytes = kPlenty, .every = 0});
  prefill(state, ids(100), probe);
  PrefixStore store({.bytes = 3 * probe.stats().bytes, .every = 0});
  for (size_t salt : {1, 2, 3}) prefill(state, ids(100, salt), store);
  EXPECT_EQ(store.stats().evicted, 0);
  EXPECT_EQ(store.restore(state, 0, ids(100, 1), 100), 100);  // makes 2 the least recently used
  prefill(state, ids(100, 4), store);
  EXPECT_EQ(store.stats().evicted, 1);
  EXPECT_EQ(store.restore(state, 0, ids(100, 2), 100), 0);
  for (size_t salt : {1, 3, 4}) EXPECT_EQ(store.restore(state, 0, ids(100, salt), 100), 100) << salt;
}

// Fewer bits: smaller checkpoints, states near the true ones, and the drift in the statistics.
TEST(PrefixStore, FewerBitsDriftAndSaySo) {
  const std::vector<int32_t> tokens = ids(320), rest = joined(tokens, ids(40, 3));
  const std::vector<float> want = cold(rest);
  int64_t bytes = 0;
  // At most half a unit in the last place of f16 (11 bits) and bf16 (8 bits); int8 relative to the largest of a row of 32 numbers.
  for (auto [storage, most] : {std::pair{StateStorage::f32, 0.0},
                               {StateStorage::f16, 0x1p-11},
                               {StateStorage::bf16, 0x1p-8},
                               {StateStorage::int8, 0.02}}) {
    PrefixStore store({.bytes = kPlenty, .every = 64, .recurrent = storage});
    HybridState state = model().create_state("8v4", 2000);
    prefill(state, tokens, store);
    const PrefixStoreStats stats = store.stats();
    EXPECT_LE(stats.drift, most) << state_storage_name(storage);
    EXPECT_LE(stats.drift, stats.largest_drift);
    EXPECT_EQ(stats.drift > 0, storage != StateStorage::f32);
    if (storage == StateStorage::f32) bytes = stats.bytes;
    EXPECT_EQ(stats.bytes < bytes, storage != StateStorage::f32);
    int64_t restored = 0;
    const Distance d = distance(prefill(state, rest, store, &restored), want);
    EXPECT_EQ(restored, 320);
    EXPECT_LE(d.rms, 20 * most) << state_storage_name(storage);
  }
}

TEST(PrefixStore, StatesThatAreNotFiniteDoNotHideTheDriftOfOthers) {
  for (float wrong : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()})
    for (StateStorage storage : {StateStorage::f16, StateStorage::bf16, StateStorage::int8}) {
      PrefixStore store({.bytes = kPlenty, .every = 0, .recurrent = storage});
      HybridState state = model().create_state("8v4", 2000);
      prefill(state, ids(100), store);
      const double before = store.stats().drift;
      EXPECT_GT(before, 0);
      prefill(state, ids(100, 2), store);
      auto* numbers = reinterpret_cast<float*>(model::pools_of(state).recurrent_at(0, 0));
      numbers[3] = wrong;
      store.insert(state, 0, ids(100, 3));
      const PrefixStoreStats stats = store.stats();
      EXPECT_EQ(stats.inserted, 3);
      EXPECT_GT(stats.drift, before / 2) << state_storage_name(storage);
      EXPECT_LT(stats.drift, before * 2) << state_storage_name(storage);
      EXPECT_LT(stats.largest_drift, before * 3);
    }
}

TEST(PrefixStore, RefusesWithASentence) {
  EXPECT_EQ(complaint([] { PrefixStore({.bytes = -1}); }), "prefix_store: bytes is -1, wanted at least 0");
  EXPECT_EQ(complaint([] { PrefixStore({.bytes = 1, .every = 100}); }), "prefix_store: every is 100, wanted a multiple of 64");
  EXPECT_EQ(complaint([] { PrefixStore({.bytes = 1, .recurrent = static_cast<StateStorage>(7)}); }),
            "prefix_store: recurrent is 7, wanted f32, f16, bf16 or int8");
  PrefixStore store({.bytes = kPlenty});
  HybridState state = model().create_state("8v4", 2000), other = model().create_state("4v4", 2000);
  prefill(state, ids(30), store);
  EXPECT_EQ(complaint([&] { prefill(other, ids(30), store); }),
            "prefix_store: state has other layers, formats or layouts than those that filled the store");
  EXPECT_EQ(complaint([&] { store.insert(state, 0, ids(29)); }), "prefix_store: tokens are 29, the sequence holds 30");
  EXPECT_NE(complaint([&] { prefill(state, {}, store); }), "none");
}

TEST(PrefixStore, ARefusedPromptChangesNothing) {
  PrefixStore store({.bytes = kPlenty, .every = 64});
  HybridState state = model().create_state("8v4", 600);
  model().append(kOneThread, state, {{.tokens = ids(10)}});
  const SequenceBits before = bits_of(state, 0);
  std::vector<int32_t> wrong = ids(100);
  wrong.back() = -1;
  EXPECT_EQ(complaint([&] { prefill(state, wrong, store); }).rfind("model prefill: inputs hold token -1", 0), 0u);
  EXPECT_EQ(complaint([&] { prefill(state, ids(700), store); }),
            "model prefill: inputs have 700 tokens for sequence 0, which has room for 600 of its capacity of 600");
  EXPECT_EQ(complaint([&] { prefill(state, ids(70), store, nullptr, 1); }),
            "model prefill: inputs name sequence 1, the state holds 1");
  Stream stream = kOneThread;
  stream.threads = -1;
  std::vector<float> logits(static_cast<size_t>(model().vocab_size()));
  EXPECT_EQ(complaint([&] { model().prefill(stream, state, 0, ids(70), logits.data(), store); }),
            "model prefill: stream has threads -1, wanted 0 or more");
  EXPECT_EQ(bits_of(state, 0), before);
  EXPECT_EQ(store.stats().checkpoints, 0);
}

// Two checkpoints of the same shapes that differ in one number.
TEST(PrefixStore, AnotherModelOfTheSameLayersIsRefused) {
  namespace fs = std::filesystem;
  const fs::path directory = fs::path(testing::TempDir()) / ("weft_other_model_" + std::to_string(getpid()));
  fs::create_directories(directory);
  for (const auto& entry : fs::directory_iterator(golden_models() / "qwen3_5"))
    fs::copy_file(entry.path(), directory / entry.path().filename(), fs::copy_options::overwrite_existing);
  {
    std::fstream file(directory / "model-00002-of-00002.safetensors", std::ios::in | std::ios::out | std::ios::binary);
    ASSERT_TRUE(file.is_open());
    file.seekg(-2, std::ios::end);
    const int last = file.get();
    file.seekp(-2, std::ios::end);
    file.put(static_cast<char>(last ^ 1));
  }
  const Model other = Model::load(directory);
  ASSERT_NE(other.fingerprint(), model().fingerprint());
  PrefixStore store({.bytes = kPlenty, .every = 64});
  HybridState state = model().create_state("8v4", 2000), theirs = other.create_state("8v4", 2000);
  const std::vector<int32_t> tokens = ids(200);
  prefill(state, tokens, store);
  std::vector<float> logits(static_cast<size_t>(other.vocab_size()));
  const std::string said = "prefix_store: state is of model " + other.fingerprint() + ", the store is filled with those of model " +
                           model().fingerprint();
  EXPECT_EQ(complaint([&] { other.prefill(kOneThread, theirs, 0, tokens, logits.data(), store); }), said);
  EXPECT_EQ(theirs.tokens(0), 0);
  other.append(kOneThread, theirs, {{.tokens = tokens}});
  EXPECT_EQ(complaint([&] { store.insert(theirs, 0, tokens); }), said);
  EXPECT_EQ(store.stats().inserted, 4) << "after 64, 128, 192 and 200 tokens";
  EXPECT_EQ(complaint([&] { other.append(kOneThread, state, {{.tokens = tokens}}); }),
            "model append: state was made for another model, wanted one of this model's create_state() or plan()");
  // No other function accepts the memory of another model either.
  PrefixStore empty({.bytes = kPlenty, .every = 64});
  EXPECT_EQ(complaint([&] { other.prefill(kOneThread, state, 0, tokens, logits.data(), empty); }).rfind("model prefill: state", 0),
            0u);
  EXPECT_EQ(complaint([&] { other.save(directory / "state", state, 0, tokens, "8v4"); }).rfind("model save: state", 0), 0u);
  EXPECT_FALSE(fs::exists(directory / "state"));
  other.save(directory / "state", theirs, 0, tokens, "8v4");
  EXPECT_EQ(complaint([&] { other.restore(directory / "state", state, 0); }).rfind("model restore: state", 0), 0u);
  EXPECT_EQ(state.tokens(0), 200);
  fs::remove_all(directory);
}

// A small budget, so that checkpoints are evicted while other threads read them; run under ThreadSanitizer.
TEST(PrefixStore, ManyThreadsAtItsBudget) {
  HybridState state = model().create_state("8v4", 400);
  PrefixStore probe({.bytes = kPlenty, .every = 64});
  prefill(state, ids(200), probe);
  PrefixStore store({.bytes = 2 * probe.stats().bytes, .every = 64});
  std::vector<std::vector<float>> want;
  for (size_t salt = 0; salt < 4; ++salt) want.push_back(cold(ids(200, salt)));
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (size_t id = 0; id < 4; ++id)
    threads.emplace_back([&, id] {
      HybridState own = model().create_state("8v4", 400);
      for (size_t i = 0; i < 12; ++i) {
        const size_t salt = (i * (id + 1) + id) % 4;
        if (prefill(own, ids(200, salt), store) != want[salt]) ++wrong;
        if (store.stats().bytes > store.options().bytes) ++wrong;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(store.stats().hits, 0);
  EXPECT_GT(store.stats().evicted, 0);
}

}  // namespace
