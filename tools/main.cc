// The command `weft`: one subcommand per file beside this one.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "cases/options.h"
#include "tools/command.h"
#include "tools/suggest.h"
#include "tools/terminal.h"
#include "tools/usage.h"
#include "weft/version.h"

namespace {

int run_command(int argc, char** argv) {
  using namespace weft::tools;
  CLI::App app{"Token mixers of hybrid language models: gated delta network and attention over a compressed KV cache.", "weft"};
  app.set_version_flag("--version", std::string("weft ") + weft::version());
  app.require_subcommand(1);
  const size_t width = terminal_width();
  constexpr size_t kNarrow = 72;  // on narrower terminals, descriptions begin further left, below their options
  const size_t description = width < kNarrow ? 10 : 34;
  app.get_formatter()->column_width(description);
  app.footer(
      "Examples:\n"
      "  weft devices                                backends and devices of this machine and build\n"
      "  weft ops                                    which backend offers which op\n"
      "  weft check                                  the quick cases on every backend; --tier full: all\n"
      "  weft bench --op compressed_attention        time an op\n"
      "  weft tokenize --model DIR 'Some text'       the tokens of a text\n"
      "  weft generate                               a language model writes a text\n"
      "  weft serve                                  OpenAI's HTTP API, and a page to chat, at http://127.0.0.1:8080\n"
      "  weft chat --model DIR                       talk to a chat model\n"
      "  weft quantize DIR FILE.gguf                 write a model with weights of fewer bits\n"
      "  weft state FILE                             describe a state file of `weft generate --state`\n"
      "  weft perplexity --compare f16 8v4 4v4       what compressing the KV cache costs\n"
      "  weft <command> --help                       options and examples of a command\n"
      "\n"
      "Exit status: 0 success; 1 a failed check, a difference or an error; 2 an invalid command line; 130 ended by Ctrl-C, "
      "143 by SIGTERM, 129 by SIGHUP.\n"
      "Results go to stdout, everything else to stderr. NO_COLOR is respected.");
  int exit = kOk;
  add_devices(app, exit);
  add_ops(app, exit);
  add_check(app, exit);
  add_bench(app, exit);
  add_diff(app, exit);
  add_explain(app, exit);
  add_generate(app, exit);
  add_chat(app, exit);
  add_perplexity(app, exit);
  add_plan(app, exit);
  add_serve(app, exit);
  add_speed(app, exit);
  add_quantize(app, exit);
  add_state(app, exit);
  add_tokenize(app, exit);
  refuse_values_of_flags(app);
  std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.empty()) {
    write_text(Channel::err, wrapped(short_help(app), width, description));
    return kUsage;
  }
  if (arguments[0] == "help") {  // weft help generate
    arguments.erase(arguments.begin());
    arguments.emplace_back("--help");
  }
  const std::string word = arguments[0];
  const auto named = [&](CLI::App* command) { return command->get_name() == word; };
  if (!word.starts_with('-') && app.get_subcommands(named).empty())
    throw UsageError(fmt::format("there is no command '{}'{}", word,
                                 did_you_mean(word, command_names(app), "; weft --help lists all commands")));
  // CLI11 would complain about a missing command instead.
  if (word.size() > 1 && word[0] == '-' && !app.get_option_no_throw(word))
    throw UsageError(fmt::format("there is no option '{}' before a command{}", word,
                                 did_you_mean(word, {"--help", "--version"}, "; weft --help lists commands and options")));
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));  // CLI11 wants the last one first
  } catch (const CLI::Success& asked) {                                         // help or version
    std::ostringstream out, err;
    app.exit(asked, out, err);
    write_text(Channel::out, wrapped(out.str(), width, description));
    return kOk;
  } catch (const CLI::ParseError& error) {
    throw UsageError(sentence_of(error, app, arguments));
  }
  return exit;
}

// Prints an error as one line. Must not throw where stderr cannot be written.
void say(std::string_view what) {
  using namespace weft::tools;
  tell("weft: {}\n", is_terminal(Channel::err) ? one_line(what) : std::string(what));
}

// Opens /dev/null for every standard stream that the caller closed. Otherwise the next file that is opened would take its number,
// and results would be written into that file. For stdout it is opened read-only, so that writing fails as on a closed stream.
void fill_standard_streams() {
  for (int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(stream, F_GETFD) < 0 && ::open("/dev/null", stream == STDERR_FILENO ? O_WRONLY : O_RDONLY) < 0) return;
}

}  // namespace

int main(int argc, char** argv) {
  fill_standard_streams();
  std::signal(SIGXFSZ, SIG_IGN);  // writing beyond a file size limit is an error to report
  std::signal(SIGPIPE, SIG_IGN);  // so that a state is saved although the reader of the text left
  int exit = weft::tools::kFailed;
  try {
    exit = run_command(argc, argv);
  } catch (const weft::tools::UsageError& error) {
    say(error.what());
    exit = weft::tools::kUsage;
  } catch (const weft::cases::OptionError& error) {
    say(error.what());
    exit = weft::tools::kUsage;
  } catch (const std::bad_alloc&) {
    std::fputs("weft: out of memory\n", stderr);
  } catch (const std::exception& error) {
    say(error.what());
  }
  // A full disk must not look like success. A reader that has seen enough (`| head`) is no error.
  const int fault = weft::tools::output_fault();
  if (fault == 0 || fault == EPIPE) return exit;
  say(std::string("cannot write to standard output: ") + std::strerror(fault));
  return weft::tools::kFailed;
}
