// `weft diff`: compares the medians of two files of `weft bench --json`.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "tools/command.h"
#include "tools/json_output.h"
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
  std::map<std::string, Measured> cases;    // the key holds all fields in which comparable cases are equal
};

// The object that a file or a pipe holds: weft diff <(git show HEAD:old.json) new.json.
json read_json(const std::string& path) {
  constexpr uint64_t kMaxBytes = 1 << 28;  // weft bench writes some 100 kB
  constexpr int kMaxDepth = 32;            // printing a value is recursive
  const std::string text = read_text_file(path, kMaxBytes);
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

// A condition that differs between the two files.
struct Changed {
  std::string key, before, after;  // values as JSON
};

std::vector<Changed> changed_conditions(const BenchFile& before, const BenchFile& after) {
  std::vector<Changed> found;
  for (const char* key : kConditions)
    if (before.head.at(key) != after.head.at(key)) found.push_back({key, before.head.at(key), after.head.at(key)});
  return found;
}

struct DiffFlags {
  std::string before, after;
  double threshold = 1.1;
  JsonOutput output;
};

enum class Trend { slower, faster, alike, only_old, only_new };
const char* trend_name(Trend trend) {
  constexpr const char* kNames[] = {"slower", "faster", "alike", "only_old", "only_new"};
  return kNames[static_cast<size_t>(trend)];
}

// A case of one file or of both.
struct Compared {
  const Measured *before = nullptr, *after = nullptr;
  double ratio = 0;  // new median by old median, where both files have the case
  Trend trend = Trend::alike;
};

Compared compare(const Measured& was, const Measured& now, double threshold) {
  Compared found{&was, &now, was.median > 0 ? now.median / was.median : INFINITY};
  // A verdict needs a difference beyond the threshold, and beyond what the spread of both runs explains.
  const bool clear = std::abs(now.median - was.median) > 3 * (was.mad + now.mad);
  if (clear && found.ratio > threshold) found.trend = Trend::slower;
  if (clear && found.ratio < 1 / threshold) found.trend = Trend::faster;
  return found;
}

std::vector<Compared> compare_files(const BenchFile& before, const BenchFile& after, double threshold) {
  std::vector<Compared> all;
  for (const auto& [key, was] : before.cases) {
    const auto found = after.cases.find(key);
    all.push_back(found == after.cases.end() ? Compared{&was, nullptr, 0, Trend::only_old}
                                             : compare(was, found->second, threshold));
  }
  for (const auto& [key, now] : after.cases)
    if (!before.cases.contains(key)) all.push_back({nullptr, &now, 0, Trend::only_new});
  return all;
}

nlohmann::ordered_json diff_json(const std::vector<Compared>& all, const std::vector<Changed>& changed, double threshold) {
  using Json = nlohmann::ordered_json;
  Json out{{"schema", kSchema}, {"threshold", threshold}, {"slower", 0}, {"faster", 0}, {"alike", 0}, {"single", 0}};
  out["conditions"] = Json::array();
  for (const Changed& one : changed)
    out["conditions"].push_back({{"field", one.key}, {"old", Json::parse(one.before)}, {"new", Json::parse(one.after)}});
  out["rows"] = Json::array();
  for (const Compared& one : all) {
    const bool both = one.before && one.after;
    const char* const verdict = trend_name(one.trend);
    Json& count = out[both ? verdict : "single"];
    count = count.get<int>() + 1;
    out["rows"].push_back({{"case", (one.before ? one.before : one.after)->label},
                           {"old_us", one.before ? Json(one.before->median) : Json()},
                           {"new_us", one.after ? Json(one.after->median) : Json()},
                           {"ratio", both && std::isfinite(one.ratio) ? Json(one.ratio) : Json()},
                           {"verdict", verdict},
                           {"old_kernel", one.before ? Json(one.before->kernel) : Json()},
                           {"new_kernel", one.after ? Json(one.after->kernel) : Json()}});
  }
  return out;
}

void print_diff(const std::vector<Compared>& all) {
  Table table({"case", "old us", "new us", "ratio", ""}, {false, true, true, true, false});
  std::map<Trend, int> counts;
  for (const Compared& one : all) {
    ++counts[one.trend];
    const auto median = [](const Measured* measured) { return measured ? short_number(measured->median) : "-"; };
    const bool both = one.before && one.after;
    std::string note = one.trend == Trend::alike ? ""
                       : both                    ? trend_name(one.trend)
                       : one.before              ? "only in the old file"
                                                 : "only in the new file";
    if (both && one.after->kernel != one.before->kernel) note += "  (now " + printable(one.after->kernel) + ")";
    table.add({(one.before ? one.before : one.after)->label, median(one.before), median(one.after),
               both ? fmt::format("{:.2f}", one.ratio) : "", note});
  }
  table.show();
  show("{}\n",
       coloured(counts[Trend::slower] > 0 ? Colour::red : Colour::green,
                fmt::format("slower {}, faster {}, alike {}, in one file only {}", counts[Trend::slower], counts[Trend::faster],
                            counts[Trend::alike], counts[Trend::only_old] + counts[Trend::only_new])));
}

int diff(const DiffFlags& flags) {
  flags.output.check_writable({flags.before, flags.after});
  const BenchFile before = read_bench(flags.before), after = read_bench(flags.after);
  const std::vector<Changed> changed = changed_conditions(before, after);
  for (const Changed& one : changed)
    tell("weft: {} was {} and is {}: the times were taken under different conditions\n", one.key, printable(one.before),
         printable(one.after));
  const std::vector<Compared> all = compare_files(before, after, flags.threshold);
  if (flags.output.json)
    flags.output.write(diff_json(all, changed, flags.threshold), 1);
  else
    print_diff(all);
  const auto slower = [](const Compared& one) { return one.trend == Trend::slower; };
  return std::any_of(all.begin(), all.end(), slower) ? kFailed : kOk;
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
  flags->output.add_options(*command);
  command->footer(
      "Two results are compared when their op, case, backend, shape and cold or hot are equal. A changed kernel is named, and "
      "different devices, drivers, threads or instruction sets give a warning. A result counts as slower or faster when the "
      "ratio of the medians passes the threshold and the difference is more than three times the sum of both spreads. Exit "
      "status 1 when a result is slower.\n\n"
      "Examples:\n"
      "  weft bench --json -o old.json && git switch work && make build && weft bench --json -o new.json && weft diff old.json "
      "new.json\n"
      "  weft diff old.json new.json --threshold 1.05\n"
      "  weft diff old.json new.json --json | jq .slower");
  command->callback([flags, &exit] { exit = diff(*flags); });
}

}  // namespace weft::tools
