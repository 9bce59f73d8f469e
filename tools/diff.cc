// `weft diff`: two files of `weft bench --json`, median by median.
#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>

#include "files/json_text.h"
#include "files/mapped_file.h"
#include "files/refuse.h"
#include "tools/command.h"
#include "tools/terminal.h"
#include "tools/validators.h"

namespace weft::tools {
namespace {

// Fields of a file that should be equal for its times to be comparable.
constexpr const char* kConditions[] = {"device", "driver", "isa", "threads"};

struct Measured {
  std::string label, kernel;  // what a row is called on a terminal, and what ran
  double median = 0, mad = 0;
};

struct BenchFile {
  std::map<std::string, std::string> head;  // device, threads and so on, as JSON
  std::map<std::string, Measured> rows;     // by everything that must be equal to compare them
};

// A file, or a pipe: weft diff <(git show HEAD:old.json) new.json.
std::string read_report(const std::string& path) {
  constexpr uint64_t kMaxBytes = 1 << 28;  // weft bench writes some 100 kB
  std::error_code ignored;
  if (!std::filesystem::is_fifo(path, ignored)) return files::read_text(path, kMaxBytes);
  std::ifstream in(path, std::ios::binary);
  std::string text;
  char buffer[1 << 16];
  while (in.read(buffer, sizeof buffer), in.gcount() > 0) {
    text.append(buffer, static_cast<size_t>(in.gcount()));
    if (text.size() > kMaxBytes) throw std::runtime_error(fmt::format("{} has more than {} bytes", path, kMaxBytes));
  }
  return text;
}

// Throws for a file that `weft bench` did not write.
BenchFile read_bench(const std::string& path) {
  const files::Json file = files::parse_json_object(read_report(path), path);
  if (!file.contains("rows") || !file["rows"].is_array()) throw std::runtime_error(path + " is not a file of weft bench --json");
  if (!file.contains("schema") || file["schema"] != kSchema)
    throw std::runtime_error(fmt::format("{} has another schema than {}", path, kSchema));
  BenchFile found;
  for (const char* key : kConditions) found.head[key] = file.contains(key) ? file[key].dump() : "null";
  for (const files::Json& row : file["rows"]) {
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
    found.rows[name + "|" + shape + (hot ? "|hot" : "")] = {files::printable(name), text("kernel"), row["median_us"].get<double>(),
                                                            row["mad_us"].get<double>()};
  }
  return found;
}

// Says on stderr what makes the two files unlike.
void warn_of_conditions(const BenchFile& before, const BenchFile& after) {
  for (const char* key : kConditions) {
    const std::string &a = before.head.at(key), &b = after.head.at(key);
    if (a != b)
      tell("weft diff: {} was {} and is {}: the times were taken under other conditions\n", key, files::printable(a),
           files::printable(b));
  }
}

struct DiffFlags {
  std::string before, after;
  double threshold = 1.1;
};

int diff(const DiffFlags& flags) {
  const BenchFile old_file = read_bench(flags.before), new_file = read_bench(flags.after);
  warn_of_conditions(old_file, new_file);
  const auto &before = old_file.rows, &after = new_file.rows;
  Table table({"case", "old us", "new us", "ratio", ""}, {false, true, true, true, false});
  int slower = 0, faster = 0, alike = 0, single = 0;
  for (const auto& [key, old_row] : before) {
    const auto found = after.find(key);
    if (found == after.end()) {
      ++single;
      table.add({old_row.label, short_number(old_row.median), "-", "", "only in the old file"});
      continue;
    }
    const Measured& new_row = found->second;
    const double ratio = old_row.median > 0 ? new_row.median / old_row.median : INFINITY;
    // Beyond the threshold, and beyond what the spread of both runs explains.
    const bool clear = std::abs(new_row.median - old_row.median) > 3 * (old_row.mad + new_row.mad);
    const bool is_slower = clear && ratio > flags.threshold, is_faster = clear && ratio < 1 / flags.threshold;
    slower += is_slower, faster += is_faster, alike += !is_slower && !is_faster;
    table.add({old_row.label, short_number(old_row.median), short_number(new_row.median), fmt::format("{:.2f}", ratio),
               std::string(is_slower   ? "slower"
                           : is_faster ? "faster"
                                       : "") +
                   (new_row.kernel == old_row.kernel ? "" : "  (now " + files::printable(new_row.kernel) + ")")});
  }
  for (const auto& [key, new_row] : after)
    if (!before.contains(key)) {
      ++single;
      table.add({new_row.label, "-", short_number(new_row.median), "", "only in the new file"});
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
  command->add_option("old", flags->before, "The file before")->required();
  command->add_option("new", flags->after, "The file after")->required();
  command->add_option("--threshold", flags->threshold, "Ratio of medians that counts as a difference")
      ->check(number_in(1, 1000))
      ->capture_default_str();
  command->footer(
      "Rows are compared when op, case, backend, shape and cold or hot are equal; a changed kernel is named, and differing\n"
      "devices, drivers, threads or instruction sets are warned of. A row counts as slower or faster when the ratio of "
      "the\n"
      "medians passes the threshold and the difference is more than three times both spreads. Exit status 1 when a row is "
      "slower.\n\n"
      "Examples:\n"
      "  weft bench --json old.json && git switch work && make build && weft bench --json new.json && weft diff old.json new.json\n"
      "  weft diff old.json new.json --threshold 1.05");
  command->callback([flags, &exit] { exit = diff(*flags); });
}

}  // namespace weft::tools
