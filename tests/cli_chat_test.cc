// `weft chat`, run as a process: turns, undo, forks, saved conversations, template files, refusals, and a terminal.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <regex>

#include "files/file_lock.h"
#include "tests/support/chat_model.h"
#include "tests/support/command.h"
#include "tests/support/folder.h"
#include "tests/support/terminal.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

const fs::path kTemplates = WEFT_SOURCE_DIR "/cases/golden/chat/templates";
const char* const kPrograms[] = {"Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "Qwen3.5-4B"};

class ChatCommand : public testing::Test {
 protected:
  // A model folder with this program of templates/; made once.
  fs::path model(const std::string& program = kPrograms[0]) const {
    const fs::path folder = folder_.path() / program;
    if (fs::create_directory(folder)) make_chat_model(folder, text_of(kTemplates / (program + ".jinja")));
    return folder;
  }
  // A chat of these lines. The answers have 12 tokens and do not depend on chance.
  Result chat(const std::string& lines, const std::string& program = kPrograms[0], const std::string& more = "") const {
    const fs::path input = folder_.write("input", lines);
    const std::string length = has(more, "-n ") ? " " : " -n 12 ";
    return weft("chat --threads 1 --temperature 0" + length + more + " -m '" + model(program).string() + "'", "", input.string());
  }
  std::string file(const std::string& name) const { return (folder_.path() / name).string(); }

  Folder folder_;
};

// "read 7 tokens" of /stats.
int64_t tokens_read(const std::string& err) {
  std::smatch found;
  const std::string part = err.substr(std::min(err.rfind("last answer: read "), err.size()));
  return std::regex_search(part, found, std::regex("read ([0-9]+) tokens")) ? std::stoll(found[1]) : -1;
}

TEST_F(ChatCommand, ATurnReadsNewTokensAlone) {
  std::string talk;
  for (int i = 0; i < 20; ++i) talk += "tell me more about this\n";
  const Result once = chat("tell me more about this\n/stats\n"), later = chat(talk + "/stats\n");
  ASSERT_EQ(later.exit, 0) << later.err;
  // The system message of the first turn is longer than the end of an answer.
  EXPECT_GT(tokens_read(once.err), tokens_read(later.err)) << once.err << later.err;
  EXPECT_EQ(tokens_read(later.err), tokens_read(chat("tell me more about this\ntell me more about this\n/stats\n").err));
  // A template that rewrites answers reads the last one again, and no more.
  const Result thinking = chat(talk + "/stats\n", "Qwen3.5-4B"),
               second = chat("tell me more about this\ntell me more about this\n/stats\n", "Qwen3.5-4B");
  EXPECT_LE(tokens_read(thinking.err), tokens_read(second.err) + 12) << thinking.err;
}

TEST_F(ChatCommand, UndoEqualsNeverHavingSaidIt) {
  for (const char* program : kPrograms) {
    const Result said = chat("one ship\nno, a horse\n/undo\ntwo ships\n/save " + file("undone") + "\n", program);
    const Result never = chat("one ship\ntwo ships\n/save " + file("never") + "\n", program);
    ASSERT_EQ(said.exit, 0) << said.err;
    ASSERT_EQ(never.exit, 0) << never.err;
    EXPECT_TRUE(text_of(file("undone")) == text_of(file("never"))) << program;
    EXPECT_NE(said.out, never.out);
    fs::remove(file("undone"));
    fs::remove(file("never"));
  }
}

TEST_F(ChatCommand, ForksAreConversationsOfTheirOwn) {
  for (const char* program : kPrograms) {
    const Result forked = chat("one ship\n/fork other\ntwo ships\n/switch other\na horse\n/save " + file("other") +
                                   "\n/switch main\nthree ships\n/save " + file("main") + "\n",
                               program);
    ASSERT_EQ(forked.exit, 0) << forked.err;
    ASSERT_EQ(chat("one ship\na horse\n/save " + file("a") + "\n", program).exit, 0);
    ASSERT_EQ(chat("one ship\ntwo ships\nthree ships\n/save " + file("b") + "\n", program).exit, 0);
    EXPECT_TRUE(text_of(file("other")) == text_of(file("a"))) << program;
    EXPECT_TRUE(text_of(file("main")) == text_of(file("b"))) << program;
    for (const char* name : {"other", "main", "a", "b"}) fs::remove(file(name));
  }
  const Result twice = chat("one\n/fork x\n/fork x\n");
  EXPECT_EQ(twice.exit, 1);
  EXPECT_TRUE(has(twice.err, "weft: there is a fork 'x' already")) << twice.err;
  EXPECT_TRUE(has(chat("/fork horse\n/switch hors\n").err, "there is no fork 'hors'; did you mean horse?"));
}

TEST_F(ChatCommand, ASavedConversationContinues) {
  for (const char* program : kPrograms) {
    const Result whole = chat("one ship\ntwo ships\n", program, "--quiet");
    const Result first = chat("one ship\n/save " + file("talk") + "\n", program, "--quiet");
    const Result second = chat("two ships\n/save " + file("talk") + "\n", program, "--quiet --load '" + file("talk") + "'");
    EXPECT_EQ(first.exit, 0) << first.err;
    EXPECT_EQ(second.exit, 0) << second.err;
    EXPECT_EQ(first.out + second.out, whole.out) << program;
    EXPECT_EQ(first.err + second.err, "");
    const Result shown = chat("/load " + file("talk") + "\n/undo\n", program);
    EXPECT_TRUE(has(shown.err, "tokens remembered")) << shown.err;
    EXPECT_TRUE(has(shown.err, "two ships")) << shown.err;
    EXPECT_TRUE(has(shown.err, "nothing more can be taken back")) << shown.err;
    fs::remove(file("talk"));
  }
}

TEST_F(ChatCommand, FilesOfOthersAreNotReplaced) {
  ASSERT_EQ(chat("one\n/save " + file("talk") + "\n").exit, 0);
  const std::string before = text_of(file("talk"));
  const Result other = chat("two\n/save " + file("talk") + "\n");
  EXPECT_EQ(other.exit, 1);
  EXPECT_TRUE(has(other.err, "exists and is not this conversation")) << other.err;
  {
    const files::FileLock held(file("talk"));
    const Result waited = chat("/load " + file("talk") + "\n", kPrograms[0], "--wait 0");
    EXPECT_EQ(waited.exit, 1);
    EXPECT_TRUE(has(waited.err, "is held by process " + std::to_string(::getpid()))) << waited.err;
  }
  EXPECT_TRUE(has(chat("/load " + file("none") + "\n").err, "there is no such file"));
  EXPECT_TRUE(text_of(file("talk")) == before);
  // A text of `weft generate` does not end as an answer does.
  ASSERT_EQ(weft("generate --threads 1 --quiet -n 2 -p x --state '" + file("text") + "' -m '" + model().string() + "'").exit, 0);
  const Result text = chat("/load " + file("text") + "\n");
  EXPECT_TRUE(has(text.err, "does not end as a conversation of this template does")) << text.err;
  EXPECT_FALSE(fs::exists(file("text") + ".weft-lock"));
}

TEST_F(ChatCommand, TheSystemMessageCanChange) {
  const Result early = chat("/system Be brief.\none\n/save " + file("a") + "\n");
  const Result option = chat("one\n/save " + file("b") + "\n", kPrograms[0], "--system 'Be brief.'");
  ASSERT_EQ(early.exit, 0) << early.err;
  EXPECT_TRUE(text_of(file("a")) == text_of(file("b")));
  EXPECT_EQ(early.out, option.out);
  const Result later = chat("one\n/system Be brief.\n/system\ntwo\n/stats\n");
  EXPECT_EQ(later.exit, 0) << later.err;
  EXPECT_TRUE(has(later.err, "are read again with the next message")) << later.err;
  EXPECT_TRUE(has(later.err, "the system message: Be brief.")) << later.err;
}

// A message cannot end itself: the text of a control token is text.
TEST_F(ChatCommand, ContentsHoldNoControlTokens) {
  ASSERT_EQ(chat("x<|im_end|>\n/save " + file("a") + "\n").exit, 0);
  ASSERT_EQ(chat("x\n/save " + file("b") + "\n").exit, 0);
  const auto ends = [&](const char* name) {
    const auto ids = nlohmann::json::parse(weft("state --json '" + file(name) + "'").out).at("ids");
    return std::count(ids.begin(), ids.end(), 6141);  // <|im_end|>
  };
  EXPECT_EQ(ends("a"), 3);
  EXPECT_EQ(ends("a"), ends("b"));
}

TEST_F(ChatCommand, TheBundledModelContinuesTheText) {
  const Result r = weft("chat --threads 1 --temperature 0 -n 8", "", folder_.write("in", "The ship\n").string());
  EXPECT_EQ(r.exit, 0) << r.err;
  EXPECT_TRUE(has(r.err, "it does not answer, it continues your text")) << r.err;
  const std::string text = weft("generate --threads 1 --temperature 0 -n 8 --quiet -p 'The ship'").out;
  EXPECT_EQ("The ship" + r.out, text);
  const Result quiet = weft("chat --threads 1 --temperature 0 -n 8 --quiet", "", folder_.write("in", "The ship\n").string());
  EXPECT_EQ(quiet.out, r.out);
  EXPECT_EQ(quiet.err, "");
  const Result system = weft("chat --system x", "", folder_.write("in", "x\n").string());
  EXPECT_EQ(system.exit, 2);
  EXPECT_TRUE(has(system.err, "--system does nothing")) << system.err;
}

TEST_F(ChatCommand, TemplateFilesDescribeOtherFamilies) {
  const std::string text =
      R"({"begin":"","user":{"before":"Q: ","after":"\n"},"assistant":{"before":"A:","after":"\n"},"stop":[","]})";
  const std::string option = "--template '" + folder_.write("t.json", text).string() + "'";
  const Result r = chat("a ship\n/stats\n", kPrograms[0], "-n 60 " + option);
  EXPECT_EQ(r.exit, 0) << r.err;
  EXPECT_TRUE(has(r.err, "template file")) << r.err;
  EXPECT_TRUE(has(r.err, "ended by stop_string")) << r.err << r.out;
  EXPECT_FALSE(has(r.out, ",")) << r.out;
  const std::string pipe = file("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const Result piped = weft("chat --threads 1 --temperature 0 -n 60 --template '" + pipe + "' -m '" + model().string() + "'",
                            "cat '" + file("t.json") + "' >'" + pipe + "' &", folder_.write("input", "a ship\n").string());
  EXPECT_EQ(piped.out, r.out) << piped.err;
  EXPECT_EQ(chat("/system x\n", kPrograms[0], option).err.find("weft: this template has no system message") == std::string::npos,
            false);
  for (const char* bad : {"", "[]", "{}", R"({"user":{},"assistant":{},"x":1})", R"({"user":1,"assistant":{}})",
                          R"({"user":{},"assistant":{},"stop":[""]})", R"({"user":{},"assistant":{},"thinking":{"open":"x"}})"}) {
    folder_.write("bad.json", bad);
    const Result refused = chat("x\n", kPrograms[0], "--template '" + file("bad.json") + "'");
    EXPECT_EQ(refused.exit, 1) << bad;
    EXPECT_TRUE(has(refused.err, "bad.json: ")) << refused.err;
  }
}

TEST_F(ChatCommand, OtherTemplatesAreRefusedByName) {
  fs::create_directory(folder_.path() / "other");
  make_chat_model(folder_.path() / "other", "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}");
  const std::string start = "chat --threads 1 -m '" + file("other") + "' ";
  const Result r = weft(start);
  EXPECT_EQ(r.exit, 1);
  EXPECT_TRUE(has(r.err, "other/chat_template.jinja: chat_template is not of the ChatML family")) << r.err;
  EXPECT_TRUE(has(r.err, "--template FILE")) << r.err;
  EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1);
}

// Up to " the", the text is thinking.
TEST_F(ChatCommand, ThinkingIsHiddenUnlessAskedFor) {
  const std::string text = R"({"user":{"before":"Q: ","after":"\n"},"assistant":{"before":"A:","after":"\n"},
    "thinking":{"open":"<think>","close":" the","opened":true}})";
  const std::string option = "-n 60 --template '" + folder_.write("t.json", text).string() + "' ";
  const Result hidden = chat("a ship\n", kPrograms[0], option), shown = chat("a ship\n", kPrograms[0], option + "--show-thinking");
  ASSERT_EQ(hidden.exit, 0) << hidden.err;
  EXPECT_GT(shown.out.size(), hidden.out.size() + 2);
  EXPECT_TRUE(shown.out.ends_with(hidden.out)) << shown.out << hidden.out;
  EXPECT_EQ(chat("x\n", kPrograms[0], "--show-thinking").exit, 2) << "no thinking in this template";
  EXPECT_EQ(chat("x\n", kPrograms[0], "--no-thinking").exit, 2);
  EXPECT_EQ(chat("x\n", "Qwen3.5-4B", "--no-thinking").exit, 0);
  EXPECT_TRUE(has(chat("x\n", "Qwen3.5-4B").err, "the thinking was cut after 12 tokens"));
}

TEST_F(ChatCommand, MessagesOfSeveralLines) {
  const Result block = chat("\"\"\"one\ntwo\"\"\"\n/save " + file("a") + "\n"),
               slash = chat("one\\\ntwo\n/save " + file("b") + "\n");
  EXPECT_EQ(block.exit, 0) << block.err;
  EXPECT_EQ(block.out, slash.out);
  EXPECT_TRUE(text_of(file("a")) == text_of(file("b")));
  EXPECT_EQ(chat("\"\"\"/undo\"\"\"\n").exit, 0) << "a block is a message";
  const Result open = chat("\"\"\"\none\ntwo"), closed = chat("\"\"\"\none\ntwo\n\"\"\"\n"), slashes = chat("//one\n");
  EXPECT_EQ(open.out, closed.out);
  EXPECT_EQ(slashes.exit, 0) << slashes.err;
}

TEST_F(ChatCommand, AWrongCommandEndsAScript) {
  const Result r = chat("/udno\nx\n");
  EXPECT_EQ(r.exit, 1);
  EXPECT_EQ(r.out, "");
  EXPECT_TRUE(has(r.err, "weft: there is no command /udno; did you mean /undo?")) << r.err;
  for (const char* line : {"/undo", "/undo x", "/save", "/save x", "/load", "/fork", "/switch", "/nothing"}) {
    const Result one = chat(std::string(line) + "\n", kPrograms[0], "--quiet");
    EXPECT_EQ(one.exit, 1) << line;
    EXPECT_EQ(one.err.rfind("weft: ", 0), 0u) << one.err;
  }
  EXPECT_EQ(chat("/quit\n/nothing\n").exit, 0);
  EXPECT_EQ(chat("").exit, 0);
  EXPECT_EQ(chat("\n  \n").exit, 0);
}

TEST_F(ChatCommand, AContextThatIsFullIsASentence) {
  std::string longer;
  for (int i = 0; i < 80; ++i) longer += "word ";
  const Result r = chat(longer + "\n", kPrograms[0], "--context 64");
  EXPECT_EQ(r.exit, 1);
  EXPECT_TRUE(has(r.err, "and its context is 64; /undo shortens it")) << r.err;
  const Result ends = chat("one ship\n", kPrograms[0], "--context 64 -n 100");
  EXPECT_EQ(ends.exit, 0) << ends.err;
  EXPECT_TRUE(has(ends.err, "fills its context")) << ends.err;
}

TEST_F(ChatCommand, ASignalEndsTheWaitForAFile) {
  const files::FileLock held(file("talk"));
  for (const auto& [signal, status] : {std::pair{"INT", 130}, std::pair{"TERM", 143}}) {
    const Result r = weft_interrupted(3, "chat --quiet --load '" + file("talk") + "' -m '" + model().string() + "'", signal);
    EXPECT_EQ(r.exit, status) << r.err;
    EXPECT_EQ(r.out, "");
  }
}

TEST_F(ChatCommand, SignalsEndAScript) {
  const fs::path input = folder_.write("input", "one\n");
  for (const auto& [signal, status] : {std::pair{"INT", 130}, std::pair{"TERM", 143}}) {
    const Result r = weft(std::string("chat --threads 1 -n 1000000 -m '") + model().string() + "'",
                          std::string("timeout --foreground --preserve-status -s ") + signal + " 3", input.string());
    EXPECT_EQ(r.exit, status) << r.err;
    EXPECT_GT(r.out.size(), 10u);
  }
}

}  // namespace
}  // namespace weft
