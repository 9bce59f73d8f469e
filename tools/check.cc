// `weft check`: every case against the reference, and the reference against golden vectors and second formulations of the math.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "cases/verify.h"
#include "tools/command.h"
#include "tools/interrupt.h"
#include "tools/json_output.h"
#include "tools/terminal.h"
#include "tools/validators.h"

namespace weft::tools {
namespace {

using Json = nlohmann::ordered_json;
using cases::Verdict;

constexpr int64_t kMostRandom = 1'000'000;

struct CheckFlags {
  Selection selection;
  std::string tier = "fast";
  int64_t random = 0;
  uint64_t seed = 1;
  bool verbose = false;
  JsonOutput output;
};

struct Line {
  const cases::Case* which;
  Backend backend;
  cases::Outcome outcome;
};

struct Report {
  std::vector<Line> lines;
  size_t cases = 0;  // cases begun: all, unless Ctrl-C ended the run
  std::map<Verdict, int> counts{{Verdict::passed, 0}, {Verdict::failed, 0}, {Verdict::skipped, 0}};
  bool complete = true;
  std::vector<DeviceInfo> not_checked;
};

Report run_cases(const std::vector<cases::Case>& chosen, const std::vector<Stream>& streams) {
  Report report;
  Progress progress(chosen.size());
  for (const cases::Case& one : chosen) {
    report.complete = !Interrupt::asked();
    if (!report.complete) break;
    ++report.cases;
    progress.step(one.op + " " + one.name);
    cases::Checker checker(cases::build(one));
    for (const Stream& stream : streams) {
      report.lines.push_back({&one, stream.backend, checker.check(stream)});
      ++report.counts[report.lines.back().outcome.verdict];
    }
  }
  return report;
}

Json report_json(const Report& report) {
  Json out{{"schema", kSchema},
           {"passed", report.counts.at(Verdict::passed)},
           {"failed", report.counts.at(Verdict::failed)},
           {"skipped", report.counts.at(Verdict::skipped)},
           {"complete", report.complete},
           {"not_checked", Json::array()},
           {"rows", Json::array()}};
  for (const DeviceInfo& device : report.not_checked)
    out["not_checked"].push_back({{"backend", backend_name(device.backend)}, {"device", device.device}, {"why", device.why_not}});
  for (const Line& line : report.lines) {
    const bool skipped = line.outcome.verdict == Verdict::skipped;
    out["rows"].push_back({{"op", line.which->op},
                           {"case", line.which->name},
                           {"backend", backend_name(line.backend)},
                           {"error", skipped ? Json(nullptr) : number_or_null(line.outcome.error)},
                           {"bound", skipped ? Json(nullptr) : number_or_null(line.outcome.bound)},
                           {"status", cases::verdict_name(line.outcome.verdict)},
                           {"why", line.outcome.why},
                           {"bits", skipped ? Json(nullptr) : Json(hex(line.outcome.bits))}});
  }
  return out;
}

void print_text(const Report& report, bool verbose) {
  // Failures (or everything), then counts by op and backend, then why cases were skipped.
  std::map<std::pair<std::string, Backend>, std::map<Verdict, int>> by_op;
  std::map<std::string, int> reasons;
  for (const Line& line : report.lines) {
    const cases::Outcome& o = line.outcome;
    ++by_op[{line.which->op, line.backend}][o.verdict];
    if (o.verdict == Verdict::skipped) ++reasons[fmt::format("{}: {}", backend_name(line.backend), o.why)];
    if (!verbose && o.verdict != Verdict::failed) continue;
    const Colour colour = o.verdict == Verdict::failed   ? Colour::red
                          : o.verdict == Verdict::passed ? Colour::green
                                                         : Colour::yellow;
    const std::string numbers =
        o.verdict == Verdict::skipped ? "" : fmt::format(" error {} bound {}", short_number(o.error), short_number(o.bound));
    show("{} {} {} on {}{}: {}\n", coloured(colour, cases::verdict_name(o.verdict)), line.which->op, line.which->name,
         backend_name(line.backend), numbers, o.why);
  }
  Table table({"op", "backend", "passed", "failed", "skipped"}, {false, false, true, true, true});
  for (const std::string& op : cases::op_names())
    for (const auto& entry : by_op) {
      const auto& key = entry.first;
      const auto& verdicts = entry.second;
      if (key.first != op) continue;
      const auto count = [&](Verdict v) { return std::to_string(verdicts.contains(v) ? verdicts.at(v) : 0); };
      table.add({op, backend_name(key.second), count(Verdict::passed), count(Verdict::failed), count(Verdict::skipped)});
    }
  table.show();
  if (!reasons.empty()) show("skipped because:\n");
  for (const auto& [reason, count] : reasons) show("{:6}  {}\n", count, reason);
  const auto count = [&](Verdict verdict) { return report.counts.at(verdict); };
  show("{}\n", coloured(count(Verdict::failed) > 0 ? Colour::red : Colour::green,
                        fmt::format("passed {}, failed {}, skipped {}", count(Verdict::passed), count(Verdict::failed),
                                    count(Verdict::skipped))));
}

int check(const CheckFlags& flags) {
  const Interrupt interrupt;
  flags.output.check_writable();
  if (flags.output.json && flags.verbose) throw UsageError("--verbose does nothing with --json, which has every case");
  flags.selection.refuse_idle_options();
  const std::vector<Stream> streams = flags.selection.streams(flags.random == 0);
  const auto is_reference = [](const Stream& stream) { return stream.backend == Backend::reference; };
  if (flags.random > 0 && std::any_of(streams.begin(), streams.end(), is_reference))
    throw UsageError("--random compares other backends with the reference; leave the reference out of --backend");
  std::vector<cases::Tier> tiers{cases::Tier::fast};
  if (flags.tier == "full") tiers.push_back(cases::Tier::full);
  const std::vector<cases::Case> chosen =
      flags.random > 0 ? flags.selection.select_random(flags.seed, flags.random) : flags.selection.select(tiers);
  Report report = run_cases(chosen, streams);
  report.not_checked = flags.selection.left_out();
  flags.selection.say_left_out("not checked");
  if (flags.output.json)
    flags.output.write(report_json(report), 1);
  else
    print_text(report, flags.verbose);
  if (!report.complete) {
    tell("weft: interrupted after {} of {} cases\n", report.cases, chosen.size());
    return Interrupt::exit_status();
  }
  return report.counts.at(Verdict::failed) > 0 ? kFailed : kOk;
}

}  // namespace

void add_check(CLI::App& app, int& exit) {
  CLI::App* command =
      app.add_subcommand("check", "Check cases: backends against the reference, the reference against golden vectors");
  auto flags = std::make_shared<CheckFlags>();
  flags->selection.add_options(*command);
  command->add_option("--tier", flags->tier, "fast, or full: the larger cases too")
      ->capture_default_str()
      ->check(one_of({"fast", "full"}));
  CLI::Option* random =
      command
          ->add_option("--random", flags->random,
                       "Check this many random legal calls of each op instead of its cases, with the tolerances of its cases")
          ->transform(whole_number_in(1, kMostRandom));
  command->add_option("--seed", flags->seed, "Seed of --random: the same seed gives the same calls")
      ->transform(whole_number())
      ->needs(random)
      ->capture_default_str();
  command->get_option("--tier")->excludes(random);
  flags->output.add_options(*command);
  command->add_flag("--verbose", flags->verbose, "Print every case, not only failures");
  command->footer(
      "Without --backend every usable backend is checked, and the others are named. Exit status 1 when a case fails.\n"
      "Ctrl-C ends the run after the current case.\n\n"
      "Examples:\n"
      "  weft check\n"
      "  weft check --backend reference                       golden vectors and second formulations\n"
      "  weft check --op gated_delta_rule_prefill --case varlen --verbose\n"
      "  weft check --backend cpu --isa avx2 --threads 1 --tier full\n"
      "  weft check --backend cpu --random 100 --seed 7       differential test against the reference\n"
      "  weft check --json | jq '.rows[] | select(.status == \"failed\")'");
  command->callback([flags, &exit] { exit = check(*flags); });
}

}  // namespace weft::tools
