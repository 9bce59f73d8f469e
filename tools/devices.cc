// `weft devices`: the backends and devices of this machine and build.
#include <fmt/format.h>

#include "tools/command.h"
#include "tools/terminal.h"

namespace weft::tools {
namespace {

int list(bool json) {
  const std::vector<DeviceInfo> all = devices();
  if (json) {
    nlohmann::ordered_json out{{"schema", kSchema}, {"devices", nlohmann::ordered_json::array()}};
    for (const DeviceInfo& d : all)
      out["devices"].push_back({{"backend", backend_name(d.backend)},
                                {"device", d.device},
                                {"name", d.name},
                                {"detail", d.detail},
                                {"usable", d.usable},
                                {"why_not", d.why_not}});
    fmt::print("{}\n", out.dump(2));
    return kOk;
  }
  Table table({"backend", "device", "name", "usable", "detail"});
  for (const DeviceInfo& d : all)
    table.add(
        {backend_name(d.backend), std::to_string(d.device), d.name, d.usable ? "yes" : "no", d.usable ? d.detail : d.why_not});
  fmt::print("{}", table.text());
  return kOk;
}

}  // namespace

void add_devices(CLI::App& app, int& exit) {
  CLI::App* command = app.add_subcommand("devices", "List backends and devices, and why one is not usable");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "As JSON");
  command->footer("Examples:\n  weft devices\n  weft devices --json | jq '.devices[] | select(.usable) | .backend'");
  command->callback([json, &exit] { exit = list(*json); });
}

}  // namespace weft::tools
