// `weft explain`: which kernel a call would use, its plan, and why others were refused.
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

// The case meant: the first whose name matches, bench shapes before others when none is named.
cases::Case find_case(const ExplainFlags& flags) {
  const std::string& op = flags.selection.ops.front();
  if (flags.selection.pattern.empty() && !flags.shape.empty()) return cases::shape_case(op);
  std::vector<cases::Case> rows =
      flags.selection.select({cases::Tier::fast, cases::Tier::full, cases::Tier::bench, cases::Tier::summary});
  if (flags.selection.pattern.empty())
    std::stable_sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.tier > b.tier; });
  return rows.front();
}

int explain(const ExplainFlags& flags) {
  const cases::Case row = find_case(flags);
  const std::unique_ptr<cases::Problem> problem = cases::build(row, flags.shape);
  std::string options;
  for (const auto& [key, value] : problem->shape)
    if (!value.empty()) options += (options.empty() ? "" : ",") + key + "=" + value;
  // Printed at the end: a usage error on the way leaves nothing half said.
  std::string text = fmt::format("{} {}\n  options  {}\n", row.op, row.name, options);
  for (const DeviceInfo& device : devices()) {
    const std::string name = backend_name(device.backend);
    const auto& asked = flags.selection.backends;
    if (!asked.empty() && std::find(asked.begin(), asked.end(), name) == asked.end()) continue;
    text += coloured(Colour::dim, name) + "\n";
    if (!device.usable) {
      text += fmt::format("  refused  {}\n", device.why_not);
      continue;
    }
    Selection one = flags.selection;
    one.backends = {name};
    const Stream stream = one.streams(true).front();
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
                      "Options of the call, e.g. T=2048,Hk=16,Hv=32,Dk=128 (with --case: in place of its own)");
  command->footer(
      "Examples:\n"
      "  weft explain --op gated_delta_rule_prefill --shape T=2048,Hk=16,Hv=32,Dk=128,dtype=bf16\n"
      "  weft explain --op compressed_attention --case decode --backend cpu --threads 1\n"
      "  weft explain --op short_conv                         also prints every option of the op with its value");
  command->callback([flags, &exit] { exit = explain(*flags); });
}

}  // namespace weft::tools
