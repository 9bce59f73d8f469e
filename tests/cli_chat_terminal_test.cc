// `weft chat` on a pseudo-terminal: typing, history, pasting, Ctrl-C, Ctrl-D, and no control characters from texts.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include "files/file_lock.h"
#include "tests/support/chat_model.h"
#include "tests/support/command.h"
#include "tests/support/folder.h"
#include "tests/support/terminal.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

#define TERMINAL(name, ...)   \
  Terminal name(__VA_ARGS__); \
  if (!name.made()) GTEST_SKIP() << "no pseudo-terminal can be made"

class ChatTerminal : public testing::Test {
 protected:
  ChatTerminal() {
    fs::create_directory(model_);
    make_chat_model(model_, text_of(WEFT_SOURCE_DIR "/cases/golden/chat/templates/Qwen-Qwen2.5-7B-Instruct.jinja"));
  }
  // Runs in the folder, with a home that has no .editrc.
  std::string line(const std::string& more) const {
    return "cd '" + folder_.path().string() + "' && HOME=. exec '" WEFT_COMMAND "' chat --threads 1 --temperature 0 -m model " +
           more;
  }
  // The answer of a script to these lines.
  std::string answers(const std::string& lines) const {
    const fs::path input = folder_.write("input", lines);
    return weft("chat --threads 1 --temperature 0 -n 8 --quiet -m '" + model_.string() + "'", "", input.string()).out;
  }
  // What was on the terminal, with lines as in a file: libedit lets the terminal end them with two characters.
  static std::string lines_of(std::string text) {
    std::erase(text, '\r');
    return text;
  }

  Folder folder_;
  fs::path model_ = folder_.path() / "model";
};

TEST_F(ChatTerminal, AnswersWhatIsTyped) {
  TERMINAL(terminal, line("-n 8"));
  ASSERT_TRUE(terminal.wait_for("Ctrl-D ends the chat")) << terminal.seen();
  terminal.type("one ship\n");
  ASSERT_TRUE(terminal.wait_for("was cut after 8 tokens")) << terminal.seen();
  EXPECT_TRUE(has(lines_of(terminal.seen()), answers("one ship\n"))) << terminal.seen();
  terminal.type("/fork b\n");
  ASSERT_TRUE(terminal.wait_for("kept as b")) << terminal.seen();
  terminal.type("/switch b\n");
  ASSERT_TRUE(terminal.wait_for("b> ")) << terminal.seen();
  terminal.type("/undo\n");
  ASSERT_TRUE(terminal.wait_for("0 messages left")) << terminal.seen();
  terminal.type("/undo\n");  // an error does not end a chat on a terminal
  ASSERT_TRUE(terminal.wait_for("weft: there is nothing to take back")) << terminal.seen();
  terminal.type("/stats\n");
  ASSERT_TRUE(terminal.wait_for("conversations: b, main")) << terminal.seen();
  terminal.type("\x04");
  EXPECT_EQ(terminal.exit_status(), 0) << terminal.seen();
}

TEST_F(ChatTerminal, CtrlCEndsTheAnswerAndNotTheProgram) {
  TERMINAL(terminal, line("-n 1000000"));
  ASSERT_TRUE(terminal.wait_for("Ctrl-D ends the chat")) << terminal.seen();
  terminal.type("one ship\n");
  ASSERT_TRUE(terminal.wait_for("\n")) << terminal.seen();
  const size_t before = terminal.seen().size();
  while (terminal.seen().size() < before + 300 && terminal.read_more()) {
  }
  terminal.type("\x03");
  ASSERT_TRUE(terminal.wait_for("interrupted")) << terminal.seen();
  terminal.type("/stats\n");
  ASSERT_TRUE(terminal.wait_for("ended by interruption")) << terminal.seen();
  ASSERT_TRUE(has(terminal.seen(), "main: 1 message, ")) << terminal.seen();
  ASSERT_TRUE(terminal.wait_for_end("> ")) << terminal.seen();
  ASSERT_TRUE(terminal.wait_for_editing());
  terminal.type("half a line");
  ASSERT_TRUE(terminal.wait_for_end("half a line")) << terminal.seen();
  terminal.type("\x03");  // forgets the line
  ASSERT_TRUE(terminal.wait_for_end("> ")) << terminal.seen();
  EXPECT_FALSE(has(terminal.seen(), "Ctrl-C again"));
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(terminal.wait_for_editing());
    terminal.type("\x03");
    ASSERT_TRUE(terminal.wait_for_end("so does Ctrl-D.\r\n\x1b[?2004h> ")) << terminal.seen();
    if (i > 0) break;
    terminal.type("/undo\n");  // a line between them: the next Ctrl-C only warns again
    ASSERT_TRUE(terminal.wait_for("0 messages left")) << terminal.seen();
    ASSERT_TRUE(terminal.wait_for_end("> ")) << terminal.seen();
  }
  ASSERT_TRUE(terminal.wait_for_editing());
  terminal.type("\x03");
  EXPECT_EQ(terminal.exit_status(), 130) << terminal.seen();
}

TEST_F(ChatTerminal, HistoryAndPastedLines) {
  if (!::dlopen("libedit.so.2", RTLD_NOW)) GTEST_SKIP() << "libedit is missing";
  TERMINAL(terminal, "stty sane && " + line("-n 8 --quiet"));  // libedit takes the keys of the terminal
  ASSERT_TRUE(terminal.wait_for_end("> ")) << terminal.seen();
  terminal.type("/save first\n");
  ASSERT_TRUE(terminal.wait_for("there is nothing to save")) << terminal.seen();
  ASSERT_TRUE(terminal.wait_for_end("> ")) << terminal.seen();
  terminal.type("\x1b[A\x01\x1b[C\x1b[3~x\n");  // up, to the beginning of the line, right, delete, x: "/xave first"
  ASSERT_TRUE(terminal.wait_for("there is no command /xave")) << terminal.seen();
  ASSERT_TRUE(terminal.wait_for_end("> ")) << terminal.seen();
  terminal.type("\x1b[200~one\rtwo\x1b[2J\x07\x1b[201~");
  ASSERT_TRUE(terminal.wait_for_end("two")) << terminal.seen();
  terminal.type("\n/save pasted\n\x04");
  EXPECT_EQ(terminal.exit_status(), 0) << terminal.seen();
  answers("\"\"\"one\ntwo\"\"\"\n/save " + (folder_.path() / "typed").string() + "\n");
  EXPECT_TRUE(text_of(folder_.path() / "pasted") == text_of(folder_.path() / "typed"));
}

TEST_F(ChatTerminal, BlocksAndLongerLines) {
  TERMINAL(terminal, line("-n 8 --quiet"));
  ASSERT_TRUE(terminal.wait_for_end("> ")) << terminal.seen();
  terminal.type("\"\"\"\none\n");
  ASSERT_TRUE(terminal.wait_for("... ")) << terminal.seen();
  terminal.type("two\n\"\"\"\n");
  terminal.type("three\\\nfour\n/save typed\n\x04");
  EXPECT_EQ(terminal.exit_status(), 0) << terminal.seen();
  answers("\"\"\"one\ntwo\"\"\"\nthree\\\nfour\n/save " + (folder_.path() / "piped").string() + "\n");
  EXPECT_TRUE(text_of(folder_.path() / "typed") == text_of(folder_.path() / "piped"));
}

TEST_F(ChatTerminal, TextsCannotSendCommands) {
  std::ofstream(folder_.path() / "a.chat") << "x";
  TERMINAL(terminal, line("-n 2 --quiet --load \"$(printf 'x\\033]0;y\\007\\302\\233')\""), 100, "dumb");
  EXPECT_EQ(terminal.exit_status(), 1);
  EXPECT_FALSE(has(terminal.seen(), "\x1b") || has(terminal.seen(), "\x07") || has(terminal.seen(), "\xC2\x9B")) << terminal.seen();
  EXPECT_TRUE(has(terminal.seen(), "x\\x1b]0;y\\x07\\u009b")) << terminal.seen();
}

// What a message holds comes back when it is loaded.
TEST_F(ChatTerminal, LoadedTextsCannotSendCommands) {
  answers("a\x1b[31mb\xC2\x9B\n/save " + (folder_.path() / "talk").string() + "\n");
  TERMINAL(terminal, line("-n 2"), 100, "dumb");
  ASSERT_TRUE(terminal.wait_for_end("> ")) << terminal.seen();
  terminal.type("/load talk\n\x04");
  EXPECT_EQ(terminal.exit_status(), 0);
  EXPECT_FALSE(has(terminal.seen(), "\x1b") || has(terminal.seen(), "\xC2\x9B")) << terminal.seen();
  EXPECT_TRUE(has(terminal.seen(), "a\\x1b[31mb\\u009b")) << terminal.seen();
}

// Without a capable terminal, lines are edited by the system.
TEST_F(ChatTerminal, ADumbTerminalWorks) {
  TERMINAL(terminal, line("-n 8"), 100, "dumb");
  ASSERT_TRUE(terminal.wait_for_end("> ")) << terminal.seen();
  terminal.type("one ship\n\x04");
  EXPECT_EQ(terminal.exit_status(), 0) << terminal.seen();
  EXPECT_FALSE(has(terminal.seen(), "\x1b")) << terminal.seen();
  EXPECT_TRUE(has(lines_of(terminal.seen()), answers("one ship\n"))) << terminal.seen();
}

TEST_F(ChatTerminal, CtrlCEndsTheWaitForAFile) {
  const fs::path file = folder_.path() / "talk";
  const files::FileLock held(file);
  TERMINAL(terminal, line("-n 8"));
  ASSERT_TRUE(terminal.wait_for_end("> ")) << terminal.seen();
  terminal.type("/load " + file.string() + "\n");
  ASSERT_TRUE(terminal.wait_for("weft: waiting for process " + std::to_string(::getpid()))) << terminal.seen();
  terminal.type("\x03");
  ASSERT_TRUE(terminal.wait_for("was interrupted; nothing was changed")) << terminal.seen();
  terminal.type("/stats\n");
  ASSERT_TRUE(terminal.wait_for("conversations: main")) << terminal.seen();
  terminal.type("\x04");
  EXPECT_EQ(terminal.exit_status(), 0) << terminal.seen();
}

TEST_F(ChatTerminal, SigtermEndsItAtThePrompt) {
  TERMINAL(terminal, line("-n 8"));
  ASSERT_TRUE(terminal.wait_for_end("> ")) << terminal.seen();
  terminal.signal(SIGTERM);
  EXPECT_EQ(terminal.exit_status(), 143) << terminal.seen();
}

}  // namespace
}  // namespace weft
