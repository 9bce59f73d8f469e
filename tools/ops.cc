// `weft ops`: the support matrix, op by backend.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "core/backend.h"
#include "core/op_limits.h"
#include "tools/command.h"
#include "tools/terminal.h"

namespace weft::tools {
namespace {

using Json = nlohmann::ordered_json;

// Limits of every op on a backend; null where it is not offered. Empty when the build lacks the backend.
std::map<std::string, const Limits*> limits_of(Backend backend) {
  std::map<std::string, const Limits*> all;
  if (const BackendTable* table = find_backend(backend))
    for_each_row(*table, [&](const char* op, const Limits* limits) { all[op] = limits; });
  return all;
}

bool usable_here(Backend backend) {
  const std::vector<DeviceInfo> all = devices();
  return std::any_of(all.begin(), all.end(), [&](const DeviceInfo& d) { return d.backend == backend && d.usable; });
}

// Cases of the fast tier, and how many of them a backend takes: none where it has no device to ask.
struct Coverage {
  int cases = 0, supported = 0;
};
std::map<std::pair<std::string, Backend>, Coverage> coverage() {
  std::map<std::pair<std::string, Backend>, Coverage> all;
  Progress progress(cases::all_cases().size());
  for (const cases::Case& row : cases::all_cases()) {
    progress.step(row.op);
    if (row.tier != cases::Tier::fast) continue;
    const std::unique_ptr<cases::Problem> problem = cases::build(row);
    for (Backend backend : kAllBackends) {
      Stream stream;
      stream.backend = backend;
      Coverage& entry = all[{row.op, backend}];
      ++entry.cases;
      entry.supported += problem->supports(stream).ok();
    }
  }
  return all;
}

void print_json(bool with_cases) {
  const auto covered = with_cases ? coverage() : std::map<std::pair<std::string, Backend>, Coverage>{};
  Json out{{"schema", kSchema}, {"ops", Json::array()}};
  for (const std::string& op : cases::op_names()) {
    Json entries = Json::object();
    for (Backend backend : kAllBackends) {
      const auto limits = limits_of(backend);
      const auto found = limits.find(op);
      Json& entry = entries[backend_name(backend)];
      if (found == limits.end() || !found->second) continue;  // stays null
      entry = {{"dtypes", found->second->dtypes}, {"shapes", found->second->shapes}};
      if (with_cases) {
        const Coverage& count = covered.at({op, backend});
        entry["cases"] = count.cases;
        entry["supported"] = count.supported;
        entry["usable"] = usable_here(backend);
      }
    }
    out["ops"].push_back({{"op", op}, {"shapes", legal_shapes(op)}, {"backends", entries}});
  }
  fmt::print("{}\n", out.dump(2));
}

void print_table(bool markdown, bool with_cases) {
  const auto covered = with_cases ? coverage() : std::map<std::pair<std::string, Backend>, Coverage>{};
  std::vector<std::string> head{"op", "legal shapes"};
  for (Backend backend : kAllBackends) head.emplace_back(backend_name(backend));
  Table table(head);
  std::vector<std::vector<std::string>> rows;
  for (const std::string& op : cases::op_names()) {
    std::vector<std::string> cells{markdown ? "`" + op + "`" : op, legal_shapes(op)};
    for (Backend backend : kAllBackends) {
      const auto limits = limits_of(backend);
      const auto found = limits.find(op);
      if (found == limits.end() || !found->second) {
        cells.emplace_back("-");
        continue;
      }
      std::string cell = fmt::format("{}: {}", found->second->dtypes, found->second->shapes);
      if (with_cases) {
        const Coverage& count = covered.at({op, backend});
        cell += usable_here(backend) ? fmt::format(" ({}/{} cases)", count.supported, count.cases) : " (no device)";
      }
      cells.push_back(cell);
    }
    // A page has room for a row per kind of op, a terminal for a row per op.
    const auto alike = std::find_if(rows.begin(), rows.end(), [&](const std::vector<std::string>& row) {
      return markdown && std::equal(row.begin() + 1, row.end(), cells.begin() + 1);
    });
    if (alike == rows.end())
      rows.push_back(cells);
    else
      alike->front() += ", " + cells.front();
  }
  for (const auto& row : rows) table.add(row);
  fmt::print("{}", markdown ? table.markdown() : table.text());
}

}  // namespace

void add_ops(CLI::App& app, int& exit) {
  struct Flags {
    bool json = false, markdown = false, cases = false;
  };
  CLI::App* command = app.add_subcommand("ops", "Which backend offers which op, with dtypes and shapes");
  auto flags = std::make_shared<Flags>();
  auto* json = command->add_flag("--json", flags->json, "As JSON");
  command->add_flag("--markdown", flags->markdown, "As a Markdown table, as in the README")->excludes(json);
  command->add_flag("--cases", flags->cases, "Count how many cases of each op a backend takes");
  command->footer("Examples:\n  weft ops\n  weft ops --markdown\n  weft ops --cases --json");
  command->callback([flags, &exit] {
    flags->json ? print_json(flags->cases) : print_table(flags->markdown, flags->cases);
    exit = kOk;
  });
}

}  // namespace weft::tools
