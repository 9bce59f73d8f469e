// The subcommands of `weft`, and the options that choose backends, ops and cases.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "cases/table.h"
#include "weft/device.h"

namespace weft::tools {

// Exit codes: success; a failed check, a difference or an error; an invalid command line.
inline constexpr int kOk = 0, kFailed = 1, kUsage = 2;

// The schema version of all JSON that the command writes; see docs/json.md.
inline constexpr int kSchema = 1;

inline constexpr Backend kAllBackends[] = {Backend::reference, Backend::cpu, Backend::cuda, Backend::vulkan};

class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Adds a subcommand to the application. A chosen subcommand puts its exit code into `exit`.
void add_devices(CLI::App& app, int& exit);
void add_ops(CLI::App& app, int& exit);
void add_chat(CLI::App& app, int& exit);
void add_check(CLI::App& app, int& exit);
void add_bench(CLI::App& app, int& exit);
void add_diff(CLI::App& app, int& exit);
void add_explain(CLI::App& app, int& exit);
void add_generate(CLI::App& app, int& exit);
void add_perplexity(CLI::App& app, int& exit);
void add_plan(CLI::App& app, int& exit);
void add_serve(CLI::App& app, int& exit);
void add_speed(CLI::App& app, int& exit);
void add_quantize(CLI::App& app, int& exit);
void add_state(CLI::App& app, int& exit);
void add_tokenize(CLI::App& app, int& exit);

// Adds `state` to the subcommand `bench`.
void add_bench_state(CLI::App& bench, int& exit);

// What --op, --backend, --case, --threads and --isa choose.
struct Selection {
  std::vector<std::string> ops, backends;
  std::string pattern;  // selects cases by name
  int threads = 0;
  std::string isa = "best";

  // `names`: the values of --op.
  void add_options(CLI::App& command, const std::vector<std::string>& names = cases::op_names());
  // Streams on the chosen backends, or on every usable one (on the reference only `with_reference`), with threads and isa set.
  // Throws UsageError for a chosen backend that is not usable here.
  std::vector<Stream> streams(bool with_reference) const;
  // Throws UsageError for --threads or --isa where --backend leaves the cpu out.
  void refuse_idle_options() const;
  // All devices of the chosen backends. Loads only the drivers of these backends.
  std::vector<DeviceInfo> devices() const;
  // Those that are not usable here, or compute on the processor although --backend does not name them. say_left_out() prints a line
  // on stderr for each: "not checked: cuda, no device".
  std::vector<DeviceInfo> left_out() const;
  void say_left_out(const char* what) const;
  // The cases of the chosen ops and names in these tiers. Throws UsageError where there are none.
  std::vector<cases::Case> select(const std::vector<cases::Tier>& tiers) const;
  // Random legal calls 0 .. count - 1 of each chosen op whose names match. Throws UsageError where there are none.
  std::vector<cases::Case> select_random(uint64_t seed, int64_t count) const;

 private:
  std::vector<cases::Case> require_cases(std::vector<cases::Case> chosen) const;
};

std::vector<std::string> backend_names();
void add_isa_option(CLI::App& command, std::string& isa);
void add_threads_option(CLI::App& command, int& threads, const std::string& what);
// The options of a case, defaults included, as the field `shape` of docs/json.md.
nlohmann::ordered_json shape_json(const cases::Problem& problem);
nlohmann::ordered_json number_or_null(double value);  // null for infinity and NaN

}  // namespace weft::tools
