// Options that choose backends, ops and cases: see command.h.
#include "tools/command.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "cases/random_cases.h"
#include "cases/verify.h"
#include "tools/terminal.h"
#include "tools/validators.h"
#include "weft/limits.h"

namespace weft::tools {
namespace {

constexpr Isa kAllIsas[] = {Isa::best, Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512_vnni, Isa::neon};

Isa isa_by_name(const std::string& name) {
  for (Isa isa : kAllIsas)
    if (name == isa_name(isa)) return isa;
  throw UsageError("there is no isa " + name);
}

// An empty list of names chooses everything.
bool offered(const std::vector<std::string>& names, const std::string& name) {
  return names.empty() || std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

std::vector<std::string> backend_names() {
  std::vector<std::string> names;
  for (Backend backend : kAllBackends) names.emplace_back(backend_name(backend));
  return names;
}

void add_isa_option(CLI::App& command, std::string& isa) {
  std::vector<std::string> names;
  for (Isa one : kAllIsas) names.emplace_back(isa_name(one));
  command.add_option("--isa", isa, "Instruction set of the cpu backend")->check(one_of(names));
}

void add_threads_option(CLI::App& command, int& threads, const std::string& what) {
  command.add_option("--threads", threads, what + "; 0: the library chooses")->transform(whole_number_in(0, kMaxThreads));
}

void Selection::add_options(CLI::App& command, const std::vector<std::string>& names) {
  command
      .add_option("--op", ops,
                  "Only these ops, separated by commas; `weft ops` lists them" +
                      std::string(names.size() > cases::op_names().size() ? ", and delta_mixer" : ""))
      ->delimiter(',')
      ->check(one_of(names));
  command.add_option("--backend", backends, "Only these backends, separated by commas")
      ->delimiter(',')
      ->check(one_of(backend_names()));
  command.add_option("--case", pattern, "Only cases whose name contains this text, or matches it as a glob (* and ?)");
  add_threads_option(command, threads, "Worker threads of the cpu backend");
  add_isa_option(command, isa);
}

std::vector<DeviceInfo> Selection::devices() const {
  std::vector<DeviceInfo> found;
  for (Backend backend : kAllBackends)
    if (offered(backends, backend_name(backend)))
      for (DeviceInfo& device : weft::devices(backend)) found.push_back(std::move(device));
  return found;
}

std::vector<Stream> Selection::streams(bool with_reference) const {
  std::vector<Stream> chosen;
  for (const DeviceInfo& device : devices()) {
    if (!device.usable) continue;
    if (backends.empty() && (device.software || (device.backend == Backend::reference && !with_reference))) continue;
    Stream stream;
    stream.backend = device.backend;
    stream.device = device.device;
    if (device.backend == Backend::cpu) {
      stream.threads = threads;
      stream.isa = isa_by_name(isa);
      const std::vector<Isa> usable = cases::usable_isas();
      if (stream.isa != Isa::best && std::find(usable.begin(), usable.end(), stream.isa) == usable.end())
        throw UsageError("isa " + isa + " is not usable here; `weft devices` lists what is");
    }
    chosen.push_back(stream);
  }
  for (const DeviceInfo& device : left_out())
    if (!backends.empty() &&
        std::none_of(chosen.begin(), chosen.end(), [&](const Stream& s) { return s.backend == device.backend; }))
      throw UsageError(fmt::format("backend {} is not usable here: {}", backend_name(device.backend), device.why_not));
  if (chosen.empty()) throw UsageError("no backend is usable for this");
  return chosen;
}

void Selection::refuse_idle_options() const {
  if (offered(backends, backend_name(Backend::cpu))) return;
  if (threads > 0) throw UsageError("--threads does nothing without backend cpu");
  if (isa != isa_name(Isa::best)) throw UsageError("--isa does nothing without backend cpu");
}

std::vector<DeviceInfo> Selection::left_out() const {
  std::vector<DeviceInfo> found;
  for (DeviceInfo& device : devices()) {
    if (device.usable && device.software && backends.empty())
      device.why_not = fmt::format("{} computes on the processor; --backend {} uses it", device.name, backend_name(device.backend));
    if (!device.why_not.empty()) found.push_back(std::move(device));
  }
  return found;
}

void Selection::say_left_out(const char* what) const {
  for (const DeviceInfo& device : left_out())
    tell("{}: {}{}, {}\n", what, backend_name(device.backend), device.device > 0 ? fmt::format(" device {}", device.device) : "",
         device.why_not);
}

std::vector<cases::Case> Selection::select(const std::vector<cases::Tier>& tiers) const {
  std::vector<cases::Case> chosen;
  for (const cases::Case& one : cases::all_cases())
    if (std::find(tiers.begin(), tiers.end(), one.tier) != tiers.end() && offered(ops, one.op) && cases::matches(pattern, one.name))
      chosen.push_back(one);
  return require_cases(std::move(chosen));
}

std::vector<cases::Case> Selection::select_random(uint64_t seed, int64_t count) const {
  std::vector<cases::Case> chosen;
  for (const std::string& op : cases::op_names())
    for (int64_t index = 0; offered(ops, op) && index < count; ++index)
      if (cases::Case one = cases::random_case(op, seed, index); cases::matches(pattern, one.name))
        chosen.push_back(std::move(one));
  return require_cases(std::move(chosen));
}

std::vector<cases::Case> Selection::require_cases(std::vector<cases::Case> chosen) const {
  if (chosen.empty())
    throw UsageError(fmt::format("no case{}{} matches", ops.empty() ? "" : fmt::format(" of {}", fmt::join(ops, ", ")),
                                 pattern.empty() ? "" : " named like '" + pattern + "'"));
  return chosen;
}

nlohmann::ordered_json shape_json(const cases::Problem& problem) {
  auto shape = nlohmann::ordered_json::object();
  for (const auto& [key, value] : problem.shape) {
    if (value.empty()) continue;
    char* end = nullptr;
    const double number = std::strtod(value.c_str(), &end);
    if (*end != '\0')
      shape[key] = value;
    else if (number == std::floor(number))
      shape[key] = static_cast<int64_t>(number);
    else
      shape[key] = number;
  }
  return shape;
}

nlohmann::ordered_json number_or_null(double value) {
  if (std::isfinite(value)) return value;
  return nullptr;
}

}  // namespace weft::tools
