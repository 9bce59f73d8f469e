// Finding backends, ops and cases by what the command line says: see command.h.
#include "tools/command.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "cases/verify.h"

namespace weft::tools {
namespace {

Isa isa_by_name(const std::string& name) {
  for (Isa isa : {Isa::best, Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512_vnni, Isa::neon})
    if (name == isa_name(isa)) return isa;
  throw UsageError("there is no isa " + name);
}

bool offered(const std::vector<std::string>& names, const std::string& name) {
  return names.empty() || std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

std::vector<std::string> backend_names() {
  std::vector<std::string> names;
  for (Backend backend : kAllBackends) names.emplace_back(backend_name(backend));
  return names;
}

void Selection::add_options(CLI::App& command, const std::vector<std::string>& names) {
  command.add_option("--op", ops, "Only these ops (several with commas); `weft ops` lists them")
      ->delimiter(',')
      ->check(CLI::IsMember(names));
  command.add_option("--backend", backends, "Only these backends (several with commas)")
      ->delimiter(',')
      ->check(CLI::IsMember(backend_names()));
  command.add_option("--case", pattern, "Only cases whose name contains this text, or matches it as a glob (* and ?)");
  command.add_option("--threads", threads, "Worker threads of the cpu backend; 0 is the library's choice")
      ->check(CLI::Range(0, 4096));
  command.add_option("--isa", isa, "Instruction set of the cpu backend")
      ->check(CLI::IsMember(std::vector<std::string>{"best", "scalar", "avx2", "avx512", "avx512_vnni", "neon"}));
}

std::vector<Stream> Selection::streams(bool with_reference) const {
  std::vector<Stream> chosen;
  for (const DeviceInfo& device : devices()) {
    const std::string name = backend_name(device.backend);
    if (backends.empty() ? !device.usable || (device.backend == Backend::reference && !with_reference) : !offered(backends, name))
      continue;
    if (!device.usable) throw UsageError(fmt::format("backend {} is not usable here: {}", name, device.why_not));
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
  if (chosen.empty()) throw UsageError("no backend is usable for this");
  return chosen;
}

std::vector<cases::Case> Selection::select(const std::vector<cases::Tier>& tiers) const {
  std::vector<cases::Case> chosen;
  for (const cases::Case& row : cases::all_cases())
    if (std::find(tiers.begin(), tiers.end(), row.tier) != tiers.end() && offered(ops, row.op) && cases::matches(pattern, row.name))
      chosen.push_back(row);
  if (chosen.empty())
    throw UsageError(fmt::format("no case{}{} matches", ops.empty() ? "" : fmt::format(" of {}", fmt::join(ops, ", ")),
                                 pattern.empty() ? "" : " named like '" + pattern + "'"));
  return chosen;
}

nlohmann::ordered_json number_or_null(double value) {
  if (std::isfinite(value)) return value;
  return nullptr;
}

}  // namespace weft::tools
