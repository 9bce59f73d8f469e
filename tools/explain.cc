// `weft explain`: which kernel a call would use, its plan, and why other backends refuse it.
#include <fmt/format.h>

#include <algorithm>

#include "cases/verify.h"
#include "tools/command.h"
#include "tools/json_output.h"
#include "tools/terminal.h"

namespace weft::tools {
namespace {

struct ExplainFlags {
  Selection selection;
  std::string shape;
  JsonOutput output;
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

// The answer of one backend: `refused` holds its reason to refuse the call, or the other fields hold its plan.
struct Explained {
  std::string backend;
  int device = 0;
  std::string refused;
  Choice choice;
  int64_t scratch = 0;
};

Explained explain_on(const ExplainFlags& flags, const cases::Problem& problem, const DeviceInfo& device) {
  Explained found{backend_name(device.backend), device.device, device.why_not, {}, 0};
  if (!device.usable) return found;
  Selection selection = flags.selection;
  selection.backends = {found.backend};
  const Stream stream = selection.streams(true).front();
  if (const Status status = problem.supports(stream); !status) {
    found.refused = status.message;
    return found;
  }
  found.refused.clear();
  found.choice = problem.choose(stream);
  found.scratch = static_cast<int64_t>(problem.scratch_bytes(stream));
  return found;
}

nlohmann::ordered_json explain_json(const cases::Case& one, const cases::Problem& problem, const std::vector<Explained>& all) {
  nlohmann::ordered_json out{{"schema", kSchema}, {"op", one.op}, {"case", one.name}, {"shape", shape_json(problem)}};
  auto& list = out["backends"] = nlohmann::ordered_json::array();
  for (const Explained& found : all) {
    const bool refused = !found.refused.empty();
    const auto unless_refused = [&](auto value) { return refused ? nlohmann::ordered_json() : nlohmann::ordered_json(value); };
    list.push_back({{"backend", found.backend},
                    {"device", found.device},
                    {"refused", refused ? nlohmann::ordered_json(found.refused) : nlohmann::ordered_json()},
                    {"kernel", unless_refused(found.choice.kernel)},
                    {"speed", unless_refused(speed_name(found.choice.speed))},
                    {"plan", unless_refused(found.choice.plan)},
                    {"scratch_bytes", unless_refused(found.scratch)}});
  }
  return out;
}

int explain(const ExplainFlags& flags) {
  flags.output.check_writable();
  flags.selection.refuse_idle_options();
  const cases::Case one = find_case(flags);
  const std::unique_ptr<cases::Problem> problem = cases::build(one, flags.shape);
  std::vector<Explained> all;  // before anything is printed, so that a usage error leaves no partial output
  for (const DeviceInfo& device : flags.selection.devices()) all.push_back(explain_on(flags, *problem, device));
  if (flags.output.json) {
    flags.output.write(explain_json(one, *problem, all), 1);
    return kOk;
  }
  std::string options;
  for (const auto& [key, value] : problem->shape)
    if (!value.empty()) options += (options.empty() ? "" : ",") + key + "=" + value;
  show("{} {}\n  options  {}\n", one.op, one.name, options);
  for (const Explained& found : all) {
    show("{}\n", coloured(Colour::dim, found.backend));
    if (found.refused.empty())
      show("  kernel   {}\n  speed    {}\n  plan     {}\n  scratch  {} bytes\n", found.choice.kernel,
           speed_name(found.choice.speed), found.choice.plan, found.scratch);
    else
      show("  refused  {}\n", found.refused);
  }
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
  flags->output.add_options(*command);
  command->footer(
      "Examples:\n"
      "  weft explain --op gated_delta_rule_prefill --shape T=2048,Hk=16,Hv=32,Dk=128,dtype=bf16\n"
      "  weft explain --op compressed_attention --case decode --backend cpu --threads 1\n"
      "  weft explain --op short_conv --json | jq '.backends[] | .kernel'\n"
      "  weft explain --op short_conv                         also prints every option of the op with its value");
  command->callback([flags, &exit] { exit = explain(*flags); });
}

}  // namespace weft::tools
