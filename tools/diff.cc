// `weft diff`: compares the medians of two files of `weft bench --json`.
#include <fmt/format.h>

#include <cmath>
#include <map>

#include "tools/command.h"
#include "tools/terminal.h"
#include "tools/text_file.h"
#include "tools/validators.h"

namespace weft::tools {
namespace {

// Fields of a file that should be equal for its times to be comparable.
constexpr const char* kConditions[] = {"device", "driver", "isa", "threads"};

using nlohmann::json;

struct Measured {
  std::string label, kernel;  // the name to print, and the kernel that ran
  double median = 0, mad = 0;
};

struct BenchFile {
  std::map<std::string, std::string> head;  // device, threads and so on, as JSON
  std::map<std::string, Measured> cases;    // by everything that must be equal to compare two of them
};

// The object that a file or a pipe holds: weft diff <(git show HEAD:old.json) new.json.
json read_json(const std::string& path) {
  constexpr uint64_t kMaxBytes = 1 << 28;  // weft bench writes some 100 kB
  constexpr int kMaxDepth = 32;            // printing a value is recursive
  const std::string text = read_text_file(path, kMaxBytes, /*pipes=*/true);
  const auto bounded = [&](int depth, json::parse_event_t event, json&) {
    const bool enters = event == json::parse_event_t::object_start || event == json::parse_event_t::array_start;
    if (enters && depth >= kMaxDepth) throw std::runtime_error(fmt::format("{}: nests deeper than {} levels", path, kMaxDepth));
    return true;
  };
  try {
    json value = json::parse(text, bounded);
    if (value.is_object()) return value;
  } catch (const json::parse_error& error) {
    throw std::runtime_error(fmt::format("{}: is not JSON at byte {}", path, error.byte));
  } catch (const json::exception&) {  // a number beyond the range of double
    throw std::runtime_error(path + ": holds a number that is out of range");
  }
  throw std::runtime_error(path + ": is not a JSON object");
}

// Throws for a file that `weft bench` did not write.
BenchFile read_bench(const std::string& path) {
  const json file = read_json(path);
  if (!file.contains("rows") || !file["rows"].is_array()) throw std::runtime_error(path + " is not a file of weft bench --json");
  if (!file.contains("schema") || file["schema"] != kSchema)
    throw std::runtime_error(fmt::format("{} has another schema than {}", path, kSchema));
  BenchFile found;
  for (const char* key : kConditions) found.head[key] = file.contains(key) ? file[key].dump() : "null";
  for (const json& row : file["rows"]) {
    for (const char* key : {"op", "case", "backend", "kernel"})
      if (!row.is_object() || !row.contains(key) || !row[key].is_string())
        throw std::runtime_error(fmt::format("{} has a row without {}", path, key));
    for (const char* key : {"median_us", "mad_us"})
      if (!row.contains(key) || !row[key].is_number() || !(row[key].get<double>() >= 0))
        throw std::runtime_error(fmt::format("{} has a row without {}", path, key));
    const auto text = [&](const char* key) { return row[key].get<std::string>(); };
    const std::string name = fmt::format("{} {} on {}", text("op"), text("case"), text("backend"));
    const std::string shape = row.contains("shape") ? row["shape"].dump() : "";
    const bool hot = row.contains("cold") && row["cold"] == false;
    found.cases[name + "|" + shape + (hot ? "|hot" : "")] = {printable(name), text("kernel"), row["median_us"].get<double>(),
                                                             row["mad_us"].get<double>()};
  }
  return found;
}

// Warns on stderr of conditions that differ between the two files.
void warn_of_conditions(const BenchFile& before, const BenchFile& after) {
  for (const char* key : kConditions) {
    const std::string &a = before.head.at(key), &b = after.head.at(key);
    if (a != b)
      tell("weft diff: {} was {} and is {}: the times were taken under different conditions\n", key, printable(a), printable(b));
  }
}

struct DiffFlags {
  std::string before, after;
  double threshold = 1.1;
};

int diff(const DiffFlags& flags) {
  const BenchFile old_file = read_bench(flags.before), new_file = read_bench(flags.after);
  warn_of_conditions(old_file, new_file);
  const auto &before = old_file.cases, &after = new_file.cases;
  Table table({"case", "old us", "new us", "ratio", ""}, {false, true, true, true, false});
  int slower = 0, faster = 0, alike = 0, single = 0;
  for (const auto& [key, was] : before) {
    const auto found = after.find(key);
    if (found == after.end()) {
      ++single;
      table.add({was.label, short_number(was.median), "-", "", "only in the old file"});
      continue;
    }
    const Measured& now = found->second;
    const double ratio = was.median > 0 ? now.median / was.median : INFINITY;
    // Beyond the threshold, and beyond what the spread of both runs explains.
    const bool clear = std::abs(now.median - was.median) > 3 * (was.mad + now.mad);
    const bool is_slower = clear && ratio > flags.threshold, is_faster = clear && ratio < 1 / flags.threshold;
    slower += is_slower, faster += is_faster, alike += !is_slower && !is_faster;
    table.add({was.label, short_number(was.median), short_number(now.median), fmt::format("{:.2f}", ratio),
               std::string(is_slower   ? "slower"
                           : is_faster ? "faster"
                                       : "") +
                   (now.kernel == was.kernel ? "" : "  (now " + printable(now.kernel) + ")")});
  }
  for (const auto& [key, now] : after)
    if (!before.contains(key)) {
      ++single;
      table.add({now.label, "-", short_number(now.median), "", "only in the new file"});
    }
  fmt::print("{}", table.text());
  fmt::print("{}\n", coloured(slower > 0 ? Colour::red : Colour::green,
                              fmt::format("slower {}, faster {}, alike {}, in one file only {}", slower, faster, alike, single)));
  return slower > 0 ? kFailed : kOk;
}

}  // namespace

void add_diff(CLI::App& app, int& exit) {
  CLI::App* command = app.add_subcommand("diff", "Compare two files of weft bench --json");
  auto flags = std::make_shared<DiffFlags>();
  command->add_option("old", flags->before, "The older file")->required();
  command->add_option("new", flags->after, "The newer file")->required();
  command->add_option("--threshold", flags->threshold, "Ratio of medians that counts as a difference")
      ->check(number_in(1, 1000))
      ->capture_default_str();
  command->footer(
      "Two results are compared when their op, case, backend, shape and cold or hot are equal. A changed kernel is named, and\n"
      "different devices, drivers, threads or instruction sets give a warning. A result counts as slower or faster when the\n"
      "ratio of the medians passes the threshold and the difference is more than three times the sum of both spreads. Exit\n"
      "status 1 when a result is slower.\n\n"
      "Examples:\n"
      "  weft bench --json old.json && git switch work && make build && weft bench --json new.json && weft diff old.json new.json\n"
      "  weft diff old.json new.json --threshold 1.05");
  command->callback([flags, &exit] { exit = diff(*flags); });
}

}  // namespace weft::tools
