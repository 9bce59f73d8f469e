// The command `weft`: one subcommand per file beside this one.
#include <fmt/format.h>

#include <csignal>
#include <cstdio>
#include <exception>

#include "cases/options.h"
#include "tools/command.h"
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
      "  weft check                                  every case on every backend\n"
      "  weft bench --op compressed_attention        time it\n"
      "  weft tokenize --model DIR 'Some text'       a text as a model sees it\n"
      "  weft generate                               a language model writes\n"
      "  weft state FILE                             what a file of a model's memory holds\n"
      "  weft perplexity --compare f16 8v4 4v4       what compressing its cache costs\n"
      "  weft <command> --help                       options and examples of a command\n"
      "\n"
      "Exit status: 0 all well; 1 a check failed, a difference was found or something broke; 2 the command line makes no sense;\n"
      "130 Ctrl-C ended it early.\n"
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
    fmt::print(stderr, "weft: there is no command '{}'; weft --help lists them\n", word);
    return kUsage;
  }
  // CLI11 alone would ask for a command.
  if (word.size() > 1 && word[0] == '-' && !app.get_option_no_throw(word)) {
    fmt::print(stderr, "weft: there is no option '{}' before a command; weft --help lists them\n", word);
    return kUsage;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);  // prints help, version or the fault
    return code == 0 ? kOk : kUsage;
  } catch (const UsageError& error) {
    fmt::print(stderr, "weft: {}\n", error.what());
    return kUsage;
  } catch (const weft::cases::OptionError& error) {
    fmt::print(stderr, "weft: {}\n", error.what());
    return kUsage;
  }
  return exit;
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error to report
  int exit = weft::tools::kFailed;
  try {
    exit = run_command(argc, argv);
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "weft: out of memory\n");
  } catch (const std::exception& error) {
    fmt::print(stderr, "weft: {}\n", error.what());
  }
  // A full disk or a closed pipe must not look like success.
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) return weft::tools::kFailed;
  return exit;
}
