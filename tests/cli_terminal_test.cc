// The command on a pseudo-terminal: no control characters from texts, Ctrl-D, hints, progress, and help that fits.
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "tests/support/command.h"
#include "tests/support/folder.h"
#include "tests/support/terminal.h"

namespace weft {
namespace {

const std::string kWeft = "'" WEFT_COMMAND "' ";
const std::string kGenerate = kWeft + "generate --threads 1 --quiet ";
const std::string kShipped = WEFT_SOURCE_DIR "/models/weft-11m";

// Control characters other than line feeds and tabs, in UTF-8 or as single bytes.
bool has_control(const std::string& text) {
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    if ((c < 0x20 && c != '\n' && c != '\t') || c == 0x7f) return true;
    if (c == 0xC2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xA0) return true;
  }
  return false;
}

#define TERMINAL(name, ...)   \
  Terminal name(__VA_ARGS__); \
  if (!name.made()) GTEST_SKIP() << "no pseudo-terminal can be made"

TEST(TerminalText, APromptCannotSendCommands) {
  const std::string prompt = "-p \"$(printf 'a\\033]0;x\\007b\\302\\233c\\342\\200\\256d\\rover\\377')\" -n 3";
  TERMINAL(terminal, kGenerate + prompt);
  EXPECT_EQ(terminal.exit_status(), 0) << terminal.seen();
  EXPECT_FALSE(has_control(terminal.seen())) << terminal.seen();
  EXPECT_EQ(terminal.seen().rfind("a\\x1b]0;x\\x07b\\u009bc\\u202ed\\rover\\xff", 0), 0u) << terminal.seen();
  // Elsewhere the bytes stay as they are.
  const Result r = weft("generate --threads 1 --quiet " + prompt);
  EXPECT_EQ(r.out.rfind("a\x1b]0;x\x07"
                        "b\xC2\x9b"
                        "c\xE2\x80\xAE"
                        "d\rover\xFF",
                        0),
            0u)
      << r.out;
}

TEST(TerminalText, LinesOfOtherSystemsAndLettersStay) {
  TERMINAL(terminal, kGenerate + "-n 0 -p \"$(printf 'r\\303\\251sum\\303\\251\\r\\n\\ttwo \\360\\237\\230\\200')\"");
  EXPECT_EQ(terminal.exit_status(), 0);
  EXPECT_EQ(terminal.seen(), "r\xC3\xA9sum\xC3\xA9\n\ttwo \xF0\x9F\x98\x80\n");
}

TEST(TerminalText, TokensCannotSendCommands) {
  const Result ids = weft("tokenize --ids \"$(printf 'a\\033[31mb')\"");
  ASSERT_EQ(ids.exit, 0) << ids.err;
  const std::string line = "tokenize --decode " + ids.out.substr(0, ids.out.find('\n'));
  EXPECT_EQ(weft(line).out, "a\x1b[31mb\n");
  TERMINAL(terminal, kWeft + line);
  EXPECT_EQ(terminal.exit_status(), 0);
  EXPECT_EQ(terminal.seen().rfind("a\\x1b[31mb\n", 0), 0u) << terminal.seen();
  EXPECT_FALSE(has_control(terminal.seen()));
}

TEST(TerminalText, NamesInFilesCannotSendCommands) {
  const Folder folder;
  for (const char* name : {"config.json", "tokenizer.json"}) folder.write(name, text_of(kShipped + "/" + name));
  folder.write("model.safetensors.index.json",
               "{\"weight_map\": {\"model.norm.weight\": \"\\u001b]0;x\\u0007\\u009b2J\\nweft: fine\"}}");
  for (const char* command : {"generate", "plan", "speed"}) {
    TERMINAL(terminal, kWeft + command + " -m '" + folder.path().string() + "'");
    EXPECT_EQ(terminal.exit_status(), 1) << command;
    EXPECT_FALSE(has_control(terminal.seen())) << command << ": " << terminal.seen();
    EXPECT_EQ(std::count(terminal.seen().begin(), terminal.seen().end(), '\n'), 1) << "one line: " << terminal.seen();
  }
}

TEST(TerminalText, NamesOfFilesCannotSendCommands) {
  for (const char* line :
       {"state \"$(printf 'x\\033[2J')\"", "generate -m \"$(printf 'x\\033[2J')\"", "\"$(printf 'gen\\033[2J')\"",
        "generate \"$(printf 'x\\033[2J')\"", "generate --file \"$(printf 'x\\033[2J')\"", "plan --kv \"$(printf '8v4\\033[2J')\"",
        "check --op \"$(printf 'x\\033[2J')\""}) {
    TERMINAL(terminal, kWeft + line);
    EXPECT_GT(terminal.exit_status(), 0) << line;
    EXPECT_EQ(terminal.seen().rfind("weft: ", 0), 0u) << terminal.seen();
    EXPECT_FALSE(has_control(terminal.seen())) << line << ": " << terminal.seen();
  }
}

// Text reaches a terminal through tools/terminal.cc alone. (main.cc says that memory is exhausted without allocating any.)
TEST(TerminalText, TheCommandPrintsInOnePlace) {
  for (const auto& entry : std::filesystem::directory_iterator(WEFT_SOURCE_DIR "/tools")) {
    if (entry.path().filename() == "terminal.cc") continue;
    std::istringstream in(text_of(entry.path()));
    for (std::string line; std::getline(in, line);)
      for (const char* writer : {"fmt::print", "printf(", "fwrite(", "puts(", "std::cout", "std::cerr"})
        EXPECT_TRUE(!has(line, writer) || has(line, "out of memory")) << entry.path() << ": " << line;
  }
}

TEST(TerminalInput, OneCtrlDEndsThePrompt) {
  const std::string wanted = weft("generate --threads 1 --quiet -n 3 -p 'The ship'").out;
  for (const char* typed : {"The ship\x04", "The ship\n\x04"}) {
    TERMINAL(terminal, kGenerate + "-n 3 --file -");
    ASSERT_TRUE(terminal.wait_for("Type the prompt; Ctrl-D ends it.\n")) << terminal.seen();
    terminal.type(typed);
    EXPECT_EQ(terminal.exit_status(), 0);
    EXPECT_TRUE(has(terminal.seen(), wanted)) << terminal.seen();
  }
}

TEST(TerminalInput, TokenizeSaysThatItReads) {
  TERMINAL(terminal, kWeft + "tokenize --ids");
  ASSERT_TRUE(terminal.wait_for("Type the text; Ctrl-D ends it.\n")) << terminal.seen();
  terminal.type("The old house\x04");
  EXPECT_EQ(terminal.exit_status(), 0);
  EXPECT_TRUE(has(terminal.seen(), weft("tokenize --ids 'The old house'").out)) << terminal.seen();
}

// A terminal without a prompt gets the default one: nothing waits for somebody who did not ask to type.
TEST(TerminalInput, WithoutAPromptTheModelBegins) {
  TERMINAL(terminal, kGenerate + "-n 2");
  EXPECT_EQ(terminal.exit_status(), 0);
  EXPECT_EQ(terminal.seen().rfind("It was a dark night, and the", 0), 0u) << terminal.seen();
}

// The whole text takes many seconds to read; the test stops as soon as the line was seen.
TEST(TerminalProgress, ALongPromptShowsHowFarItIs) {
  const std::string line = "exec " + kWeft + "generate --threads 1 -n 2 --file '" + kShipped + "/valid-excerpt.txt'";
  TERMINAL(terminal, line);
  ASSERT_TRUE(terminal.wait_for(" s left")) << terminal.seen();
  EXPECT_TRUE(has(terminal.seen(), "\r\x1b[Kreading the prompt: ")) << terminal.seen();
  EXPECT_TRUE(has(terminal.seen(), " tokens/s, ")) << terminal.seen();
  terminal.type("\x03");
  EXPECT_EQ(terminal.exit_status(), 130) << terminal.seen();
  const size_t drawn = terminal.seen().rfind("reading the prompt"), erased = terminal.seen().rfind("\r\x1b[K");
  EXPECT_LT(drawn, erased) << "the line is erased: " << terminal.seen().substr(drawn);
}

TEST(TerminalProgress, NothingWhereNobodyWatchesOrCanErase) {
  for (const char* how : {"-n 2 -p x", "-n 2 -p x --quiet"}) {
    TERMINAL(terminal, kWeft + "generate --threads 1 " + how);
    EXPECT_EQ(terminal.exit_status(), 0);
    EXPECT_FALSE(has(terminal.seen(), "reading the prompt")) << "a short prompt: " << terminal.seen();
  }
  const std::string text = kShipped + "/valid-excerpt.txt";
  TERMINAL(dumb, "timeout -s INT 3 " + kWeft + "generate --threads 1 -n 1 --file '" + text + "'", 100, "dumb");
  dumb.exit_status();
  EXPECT_FALSE(has(dumb.seen(), "\x1b")) << dumb.seen();
  EXPECT_FALSE(has(weft_interrupted(3, "generate --threads 1 -n 1 --file '" + text + "'").err, "reading the prompt"));
}

size_t longest_line(const std::string& text) {
  size_t longest = 0;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) longest = std::max(longest, line.size());
  return longest;
}

// The first line among the options that begins neither an option nor at the column of descriptions, nor continues a long name.
std::string stray_option_line(const std::string& help, size_t description) {
  std::istringstream in(help);
  bool options = false;
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(' '))
      options = line == "Options:";
    else if (options && !line.starts_with("  -") && line.find_first_not_of(' ') != description && line.find_first_not_of(' ') != 6)
      return line;
  }
  return "";
}

TEST(Help, FitsTheTerminal) {
  for (const char* command : {"", "chat", "devices", "ops", "check", "bench", "bench state", "diff", "explain", "generate",
                              "perplexity", "plan", "speed", "state", "tokenize"}) {
    for (const size_t columns : {50, 60, 66, 80, 132}) {
      const Result r = weft(std::string(command) + " --help", "COLUMNS=" + std::to_string(columns));
      EXPECT_LE(longest_line(r.out), columns) << command << "\n" << r.out;
      EXPECT_EQ(stray_option_line(r.out, columns < 72 ? 10 : 34), "") << command << " " << columns;
    }
    EXPECT_LE(longest_line(weft(std::string(command) + " --help", "env -u COLUMNS").out), 80u) << command << " without a terminal";
  }
  TERMINAL(narrow, kWeft + "generate --help", 60);
  EXPECT_EQ(narrow.exit_status(), 0);
  EXPECT_LE(longest_line(narrow.seen()), 60u) << narrow.seen();
  EXPECT_GT(longest_line(narrow.seen()), 50u) << narrow.seen();
}

TEST(Help, LosesNoWord) {
  const auto words = [](const std::string& text) {
    std::istringstream in(text);
    std::string all, word;
    while (in >> word)
      if (word != "\\") all += word;
    return all;
  };
  for (const char* command : {"", "bench", "chat", "generate", "diff"}) {
    const std::string wide = weft(std::string(command) + " --help", "COLUMNS=1000").out;
    for (const char* columns : {"COLUMNS=50", "COLUMNS=80"})
      EXPECT_EQ(words(weft(std::string(command) + " --help", columns).out), words(wide)) << command << " " << columns;
  }
}

}  // namespace
}  // namespace weft
