// The command `weft`: one subcommand per file beside this one.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <exception>
#include <sstream>
#include <system_error>

#include "cases/options.h"
#include "tools/command.h"
#include "tools/terminal.h"
#include "weft/version.h"

namespace {

int run_command(int argc, char** argv) {
  using namespace weft::tools;
  CLI::App app{"Token mixers of hybrid language models: gated delta network and attention over a compressed KV cache.", "weft"};
  app.set_version_flag("--version", std::string("weft ") + weft::version());
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  app.footer(
      "Examples:\n"
      "  weft devices                                backends and devices of this machine and build\n"
      "  weft ops                                    which backend offers which op\n"
      "  weft check                                  the quick cases on every backend; --tier full: all\n"
      "  weft bench --op compressed_attention        time an op\n"
      "  weft tokenize --model DIR 'Some text'       the tokens of a text\n"
      "  weft generate                               a language model writes a text\n"
      "  weft state FILE                             describe a state file of `weft generate --state`\n"
      "  weft perplexity --compare f16 8v4 4v4       what compressing the KV cache costs\n"
      "  weft <command> --help                       options and examples of a command\n"
      "\n"
      "Exit status: 0 success; 1 a failed check, a difference or an error; 2 an invalid command line; 130 ended by Ctrl-C,\n"
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
  add_perplexity(app, exit);
  add_plan(app, exit);
  add_speed(app, exit);
  add_state(app, exit);
  add_tokenize(app, exit);
  const std::string word = argc > 1 ? argv[1] : "";
  const auto named = [&](CLI::App* command) { return command->get_name() == word; };
  if (!word.empty() && word[0] != '-' && app.get_subcommands(named).empty()) {
    tell("weft: there is no command '{}'; weft --help lists them\n", word);
    return kUsage;
  }
  // CLI11 would complain about a missing command instead.
  if (word.size() > 1 && word[0] == '-' && !app.get_option_no_throw(word)) {
    tell("weft: there is no option '{}' before a command; weft --help lists them\n", word);
    return kUsage;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::ostringstream out, err;  // help or version, or the error
    const int code = app.exit(error, out, err);
    fmt::print("{}", out.str());
    tell("{}", err.str());
    return code == 0 ? kOk : kUsage;
  } catch (const UsageError& error) {
    tell("weft: {}\n", error.what());
    return kUsage;
  } catch (const weft::cases::OptionError& error) {
    tell("weft: {}\n", error.what());
    return kUsage;
  }
  return exit;
}

// Must not throw where stderr cannot be written.
void say(const std::string& what) { std::fprintf(stderr, "weft: %s\n", what.c_str()); }

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
  std::signal(SIGPIPE, SIG_IGN);  // and so is writing to a pipe without a reader
  int exit = weft::tools::kFailed;
  try {
    exit = run_command(argc, argv);
  } catch (const std::bad_alloc&) {
    say("out of memory");
  } catch (const std::system_error& error) {
    // fmt throws where stdout fails; that is reported once, below. Any other error, or one after a known fault, is reported here.
    if (std::ferror(stdout) && !weft::tools::output_fault_known())
      weft::tools::remember_output_fault(error.code().value());
    else
      say(error.what());
  } catch (const std::exception& error) {
    say(error.what());
  }
  // A full disk or a closed pipe must not look like success.
  const std::string fault = weft::tools::output_fault();
  if (fault.empty()) return exit;
  say("cannot write to standard output: " + fault);
  return weft::tools::kFailed;
}
