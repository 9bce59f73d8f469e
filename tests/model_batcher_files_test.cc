// Files of a batcher's sessions: saved when it drains, resumed by name, refused when they do not fit.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <optional>
#include <thread>

#include "files/sha256.h"
#include "tests/support/batch.h"
#include "tests/support/complaint.h"
#include "tests/support/folder.h"
#include "weft/state_file.h"

namespace {

using namespace weft;
using namespace weft::testing_support;

struct Conversation {
  BatchRequest first = greedy_request(some_ids(90), 9), second;
  Generation want;  // the expected second turn
  explicit Conversation(const std::string& session) {
    HybridState state = tiny().create_state("8v4", 512);
    const Generation written = alone(tiny(), first, "8v4", 512, 0, &state);
    second = first;
    second.tokens.insert(second.tokens.end(), written.tokens.begin(), written.tokens.end());
    second.tokens.push_back(7);
    want = alone(tiny(), second, "8v4", 512, 0, &state);
    first.session = second.session = session;
  }
};

TEST(BatcherFiles, SessionsOutliveTheBatcher) {
  const Folder folder;
  BatcherOptions options = small_batcher();
  options.sessions = folder.path() / "kept" / "here";
  const Conversation one("one/../../\xFF?"), two("two");
  {
    Batcher batcher(tiny(), options);
    ask(batcher, one.first).result();
    ask(batcher, two.first).result();
    EXPECT_EQ(batcher.drain(steady_clock::now() + seconds(60)), std::vector<std::string>());
    EXPECT_EQ(batcher.drain(steady_clock::now()), std::vector<std::string>()) << "again";
    batcher.stop();
  }
  size_t files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path() / "kept" / "here")) {
    struct stat info {};
    ASSERT_EQ(::stat(entry.path().c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600u) << entry.path();
    ++files;
  }
  EXPECT_EQ(files, 2u);
  for (int round = 0; round < 2; ++round) {  // the file stays until it is replaced
    Batcher batcher(tiny(), options);
    EXPECT_EQ(batcher.stats().sessions, 0) << "resumed when asked for";
    const BatchResult result = ask(batcher, one.second).result();
    EXPECT_EQ(result.cached_tokens, 98);
    expect_same(result.choices[0], one.want, "resumed");
    EXPECT_EQ(batcher.stats().resumed_sessions, 1);
  }
  Batcher batcher(tiny(), options);
  batcher.drop_session(one.first.session);
  EXPECT_EQ(ask(batcher, one.second).result().cached_tokens, 0);
  BatchRequest other = two.second;
  other.tokens[3] ^= 1;
  EXPECT_EQ(ask(batcher, other).result().cached_tokens, 0) << "other tokens";
}

TEST(BatcherFiles, AreRefusedByName) {
  const Folder folder;
  BatcherOptions options = small_batcher();
  options.sessions = folder.path();
  const Conversation talk("s");
  {
    Batcher batcher(tiny(), options);
    ask(batcher, talk.first).result();
    batcher.drain(steady_clock::now() + seconds(60));
  }
  std::filesystem::path state;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
    if (entry.path().extension() == ".state") state = entry.path();
  const auto refused = [&](const Model& model, const char* kv) {
    BatcherOptions own = options;
    own.kv = kv;
    Batcher batcher(model, own);
    const BatchResult result = ask(batcher, talk.second).result();
    EXPECT_EQ(result.outcome, BatchOutcome::failed);
    EXPECT_EQ(result.status.code, Code::invalid_argument);
    EXPECT_EQ(result.status.argument, "session");
    EXPECT_EQ(result.status.message.rfind("batcher: session 's' cannot be resumed: ", 0), 0u) << result.status.message;
    EXPECT_TRUE(std::filesystem::exists(state)) << "the file stays";
    BatchRequest free = talk.second;
    free.session.clear();
    EXPECT_EQ(ask(batcher, free).result().outcome, BatchOutcome::finished) << "the batcher goes on";
    EXPECT_EQ(batcher.stats().kv_used, 0);
    return result.status.message;
  };
  EXPECT_NE(refused(tiny(), "f16").find("layer"), std::string::npos);
  EXPECT_NE(refused(Model::load(golden_models() / "qwen3_next"), "8v4").find("model"), std::string::npos);
  const std::string whole = text_of(state);
  std::string damaged = whole;
  damaged[damaged.size() / 2] ^= 1;
  folder.write(state.filename(), damaged);
  refused(tiny(), "8v4");
  folder.write(state.filename(), whole.substr(0, whole.size() / 2));
  refused(tiny(), "8v4");
  {
    Batcher batcher(tiny(), options);  // an empty file belongs to a save that did not happen
    folder.write(state.filename(), "");
    EXPECT_EQ(ask(batcher, talk.second).result().cached_tokens, 0);
  }
  folder.write(state.filename(), whole);
  std::filesystem::last_write_time(state, std::filesystem::file_time_type::clock::now() - options.session_expiry - seconds(5));
  Batcher batcher(tiny(), options);
  EXPECT_FALSE(std::filesystem::exists(state)) << "expired";
}

TEST(BatcherFiles, WhatCannotBeSavedIsNamed) {
  const Folder folder;
  BatcherOptions options = small_batcher();
  options.sessions = folder.path() / "kept";
  {
    Batcher batcher(tiny(), options);
    const Conversation talk("s");
    ask(batcher, talk.first).result();
    std::filesystem::remove_all(options.sessions);
    const std::vector<std::string> unsaved = batcher.drain(steady_clock::now() + seconds(60));
    ASSERT_EQ(unsaved.size(), 1u);
    EXPECT_EQ(unsaved[0].rfind("batcher: session 's' was not saved: ", 0), 0u) << unsaved[0];
  }
  options.sessions = folder.write("file", "");
  EXPECT_NE(complaint([&] { Batcher(tiny(), options); }).find("cannot be made"), std::string::npos);
}

TEST(BatcherFiles, NamesAreDigests) {
  EXPECT_EQ(files::sha256(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(files::sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(files::sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  const Folder folder;
  BatcherOptions options = small_batcher();
  options.sessions = folder.path();
  {
    Batcher batcher(tiny(), options);
    ask(batcher, Conversation("abc").first).result();
    EXPECT_EQ(batcher.drain(steady_clock::now() + seconds(60)), std::vector<std::string>());
  }
  EXPECT_TRUE(std::filesystem::exists(folder.path() / (files::sha256("abc") + ".state")));
}

TEST(BatcherFiles, ArePrivateWhateverWasThere) {
  const Folder folder;
  BatcherOptions options = small_batcher();
  options.sessions = folder.path();
  const auto save = [&] {
    Batcher batcher(tiny(), options);
    ask(batcher, Conversation("abc").first).result();
    return batcher.drain(steady_clock::now() + seconds(60));
  };
  const std::filesystem::path state = folder.write(files::sha256("abc") + ".state", "");
  std::filesystem::permissions(state, std::filesystem::perms(0644));
  EXPECT_EQ(save(), std::vector<std::string>());
  EXPECT_EQ(std::filesystem::status(state).permissions(), std::filesystem::perms(0600)) << "a file of this name was there";
  std::filesystem::remove(state);
  ASSERT_EQ(::mkfifo(state.c_str(), 0600), 0);
  EXPECT_EQ(save().size(), 1u) << "a pipe of this name";
  for (const int mode : {0770, 0702, 01777}) {
    std::filesystem::permissions(folder.path(), std::filesystem::perms(mode));
    EXPECT_NE(complaint([&] { Batcher(tiny(), options); }).find("can be written by other users, wanted mode 0700"),
              std::string::npos);
  }
  std::filesystem::permissions(folder.path(), std::filesystem::perms(0755));
  EXPECT_EQ(complaint([&] { Batcher(tiny(), options); }), "none");
}

// stop() ends the saving between two sessions.
TEST(BatcherFiles, AStopEndsTheSaving) {
  const Folder folder;
  BatcherOptions options = small_batcher();
  options.sessions = folder.path();
  Batcher batcher(tiny(), options);
  for (const char* session : {"a", "b"}) ask(batcher, Conversation(session).first).result();
  const auto file = [&](const char* session) { return folder.path() / (files::sha256(session) + ".state"); };
  std::optional<StateLock> other(std::in_place, file("a"));  // the batcher waits for it a second
  std::vector<std::string> unsaved;
  std::thread drainer([&] { unsaved = batcher.drain(steady_clock::now() + seconds(60)); });
  while (!std::filesystem::exists(file("a"))) std::this_thread::yield();
  batcher.request_stop();
  other.reset();
  drainer.join();
  ASSERT_FALSE(unsaved.empty());
  EXPECT_EQ(unsaved.back(), "batcher: session 'b' was not saved: the batcher stops");
  EXPECT_FALSE(std::filesystem::exists(file("b")));
}

// A request of other tokens replaces the file of a session when it leaves a state of its own, not before.
TEST(BatcherFiles, AFileOfOtherTokensStaysUntilItIsReplaced) {
  const Folder folder;
  BatcherOptions options = small_batcher();
  options.sessions = folder.path();
  const Conversation talk("s");
  const std::filesystem::path state = folder.path() / (files::sha256("s") + ".state");
  {
    Batcher batcher(tiny(), options);
    ask(batcher, talk.first).result();
    batcher.drain(steady_clock::now() + seconds(60));
  }
  BatchRequest other = greedy_request(some_ids(60, 1), 300);
  other.session = "s";
  {
    Batcher batcher(tiny(), options);
    Answer answer;
    BatchCallbacks callbacks = answer.callbacks();
    callbacks.on_token = [&](int64_t, const GeneratedToken&) {
      batcher.request_stop();
      return true;
    };
    callbacks.on_choice_end = {};
    batcher.submit(other, callbacks);
    ASSERT_EQ(answer.result().outcome, BatchOutcome::stopped);
    EXPECT_TRUE(answer.result().kept.empty());
  }
  Batcher batcher(tiny(), options);
  EXPECT_TRUE(std::filesystem::exists(state));
  other.options.max_tokens = 2;
  EXPECT_FALSE(ask(batcher, other).result().kept.empty());
  EXPECT_FALSE(std::filesystem::exists(state));
}

// A request that waits for pages is the next one for many turns. The batcher must not ask the disk in each of them.
TEST(BatcherFiles, AWaitingRequestLooksForItsFileOnce) {
  const Folder folder;
  BatcherOptions options = small_batcher("8v4", 2, 512);
  options.sessions = folder.path();
  options.memory = 1;
  const std::string said = complaint([&] { Batcher(tiny(), options); }), start = "batcher: memory is 1 bytes, wanted at least ";
  ASSERT_EQ(said.rfind(start, 0), 0u) << said;
  options.memory = std::stoll(said.substr(start.size()));  // the pages of one sequence
  Batcher batcher(tiny(), options);
  BatchRequest request = greedy_request(some_ids(40), 3);
  request.session = "s";
  Answer large, waiting;
  BatchCallbacks callbacks = large.callbacks();
  callbacks.on_token = [&, n = 0](int64_t, const GeneratedToken&) mutable {
    ++n;
    if (n == 1) batcher.submit(request, waiting.callbacks());
    if (n == 3) EXPECT_EQ(batcher.stats().waiting, 1);
    if (n == 3) folder.write(files::sha256("s") + ".state", "appears after the look-up");
    return true;
  };
  callbacks.on_choice_end = {};
  batcher.submit(greedy_request(some_ids(9), 500), callbacks);
  EXPECT_EQ(large.result().outcome, BatchOutcome::finished);
  EXPECT_EQ(waiting.result().outcome, BatchOutcome::finished) << waiting.result().status.message;
}

}  // namespace
