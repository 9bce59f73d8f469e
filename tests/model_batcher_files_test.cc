// Files of a batcher's sessions: saved when it drains, resumed by name, refused when they do not fit.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "tests/support/batch.h"
#include "tests/support/complaint.h"
#include "tests/support/folder.h"

namespace {

using namespace weft;
using namespace weft::testing_support;
using std::chrono::seconds;
using std::chrono::steady_clock;

const Model& tiny() { return one_golden_model(); }

struct Conversation {
  BatchRequest first = greedy_request(some_ids(90), 9), second;
  Generation want;  // of the second turn
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
  EXPECT_EQ(files, 4u);
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
    Batcher batcher(tiny(), options);  // an empty file is that of a save that never was
    folder.write(state.filename(), "");
    EXPECT_EQ(ask(batcher, talk.second).result().cached_tokens, 0);
  }
  folder.write(state.filename(), whole);
  std::filesystem::path id = state;
  folder.write(id.replace_extension(".id").filename(), "other");
  {
    Batcher batcher(tiny(), options);
    EXPECT_EQ(ask(batcher, talk.second).result().cached_tokens, 0) << "the file of another session";
  }
  folder.write(id.filename(), "s");
  std::filesystem::last_write_time(state, std::filesystem::file_time_type::clock::now() - options.session_expiry - seconds(5));
  Batcher batcher(tiny(), options);
  EXPECT_FALSE(std::filesystem::exists(state)) << "expired";
  EXPECT_FALSE(std::filesystem::exists(id));
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

}  // namespace
