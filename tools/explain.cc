// `weft explain`: which kernel a call would use, its plan, and why other backends refuse it.
#include <fmt/format.h>

#include <algorithm>

#include "cases/verify.h"
#include "tools/command.h"
#include "tools/terminal.h"

namespace weft::tools {
namespace {

struct ExplainFlags {
  Selection selection;
  std::string shape;
};

// The first case whose name matches; without a name, benchmark cases come before others.
cases::Case find_case(const ExplainFlags& flags) {
  const std::string& op = flags.selection.ops.front();
  if (flags.selection.pattern.empty() && !flags.shape.empty()) return cases::shape_case(op);
  std::vector<cases::Case> found =
      flags.selection.select({cases::Tier::fast, cases::Tier::full, cases::Tier::bench, cases::Tier::summary});
  if (flags.selection.pattern.empty())
    std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.tier > b.tier; });
  return found.front();
}

int explain(const ExplainFlags& flags) {
  const cases::Case one = find_case(flags);
  const std::unique_ptr<cases::Problem> problem = cases::build(one, flags.shape);
  std::string options;
  for (const auto& [key, value] : problem->shape)
    if (!value.empty()) options += (options.empty() ? "" : ",") + key + "=" + value;
  // Printed at the end, so that a usage error leaves no partial output.
  std::string text = fmt::format("{} {}\n  options  {}\n", one.op, one.name, options);
  for (const DeviceInfo& device : devices()) {
    const std::string name = backend_name(device.backend);
    const auto& asked = flags.selection.backends;
    if (!asked.empty() && std::find(asked.begin(), asked.end(), name) == asked.end()) continue;
    text += coloured(Colour::dim, name) + "\n";
    if (!device.usable) {
      text += fmt::format("  refused  {}\n", device.why_not);
      continue;
    }
    Selection selection = flags.selection;
    selection.backends = {name};
    const Stream stream = selection.streams(true).front();
    if (const Status status = problem->supports(stream); !status) {
      text += fmt::format("  refused  {}\n", status.message);
      continue;
    }
    const Choice choice = problem->choose(stream);
    text += fmt::format("  kernel   {}\n  plan     {}\n  scratch  {} bytes\n", choice.kernel, choice.plan,
                        problem->scratch_bytes(stream));
  }
  fmt::print("{}", text);
  return kOk;
}

}  // namespace

void add_explain(CLI::App& app, int& exit) {
  CLI::App* command = app.add_subcommand("explain", "Which kernel a call would use, its plan, and why other backends refuse it");
  auto flags = std::make_shared<ExplainFlags>();
  flags->selection.add_options(*command);
  command->get_option("--op")->required()->expected(1)->description("The op of the call; `weft ops` lists them");
  command->add_option("--shape", flags->shape,
                      "Options of the call, e.g. T=2048,Hk=16,Hv=32,Dk=128; with --case they replace those of the case");
  command->footer(
      "Examples:\n"
      "  weft explain --op gated_delta_rule_prefill --shape T=2048,Hk=16,Hv=32,Dk=128,dtype=bf16\n"
      "  weft explain --op compressed_attention --case decode --backend cpu --threads 1\n"
      "  weft explain --op short_conv                         also prints every option of the op with its value");
  command->callback([flags, &exit] { exit = explain(*flags); });
}

}  // namespace weft::tools
