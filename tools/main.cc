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
      "  weft devices                                what this machine and build can compute on\n"
      "  weft ops                                    which backend offers which op\n"
      "  weft check                                  the quick cases on every backend; --tier full: all\n"
      "  weft bench --op compressed_attention        time it\n"
      "  weft tokenize --model DIR 'Some text'       a text as a model sees it\n"
      "  weft generate                               a language model writes\n"
      "  weft state FILE                             what a file of a model's memory holds\n"
      "  weft perplexity --compare f16 8v4 4v4       what compressing its cache costs\n"
      "  weft <command> --help                       options and examples of a command\n"
      "\n"
      "Exit status: 0 all well; 1 a check failed, a difference was found or something broke; 2 the command line makes no sense;\n"
      "130 Ctrl-C ended it early, 143 SIGTERM, 129 SIGHUP.\n"
      "Results go to stdout, everything else to stderr. NO_COLOR is obeyed.");
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
  // CLI11 alone would ask for a command.
  if (word.size() > 1 && word[0] == '-' && !app.get_option_no_throw(word)) {
    tell("weft: there is no option '{}' before a command; weft --help lists them\n", word);
    return kUsage;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::ostringstream out, err;  // help, version or the fault
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

// The last words, which must not throw where nobody hears them.
void say(const std::string& what) { std::fprintf(stderr, "weft: %s\n", what.c_str()); }

// A standard stream that the caller closed would become the first file that is opened, and results go into that. Writing to what is opened
// here for stdout fails, as on a closed one.
void fill_standard_streams() {
  for (int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(stream, F_GETFD) < 0 && ::open("/dev/null", stream == STDERR_FILENO ? O_WRONLY : O_RDONLY) < 0) return;
}

}  // namespace

int main(int argc, char** argv) {
  fill_standard_streams();
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error to report,
  std::signal(SIGPIPE, SIG_IGN);  // and so is a pipe that nobody reads any more
  int exit = weft::tools::kFailed;
  try {
    exit = run_command(argc, argv);
  } catch (const std::bad_alloc&) {
    say("out of memory");
  } catch (const std::system_error& error) {
    // What fmt throws where stdout fails is told below, once; a fault that was known before is not what this is about.
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
