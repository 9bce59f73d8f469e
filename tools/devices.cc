// `weft devices`: the backends and devices of this machine and build.
#include <fmt/format.h>

#include "tools/command.h"
#include "tools/json_output.h"
#include "tools/terminal.h"

namespace weft::tools {
namespace {

int list_devices(const JsonOutput& output) {
  output.check_writable();
  const std::vector<DeviceInfo> all = devices();
  if (output.json) {
    nlohmann::ordered_json out{{"schema", kSchema}, {"devices", nlohmann::ordered_json::array()}};
    for (const DeviceInfo& d : all)
      out["devices"].push_back({{"backend", backend_name(d.backend)},
                                {"device", d.device},
                                {"name", d.name},
                                {"detail", d.detail},
                                {"usable", d.usable},
                                {"why_not", d.why_not},
                                {"software", d.software}});
    output.write(out, 2);
    return kOk;
  }
  Table table({"backend", "device", "name", "usable", "detail"});
  for (const DeviceInfo& d : all)
    table.add(
        {backend_name(d.backend), std::to_string(d.device), d.name, d.usable ? "yes" : "no", d.usable ? d.detail : d.why_not});
  table.show();
  return kOk;
}

}  // namespace

void add_devices(CLI::App& app, int& exit) {
  CLI::App* command = app.add_subcommand("devices", "List backends and devices, and why one is not usable");
  auto output = std::make_shared<JsonOutput>();
  output->add_options(*command);
  command->footer("Examples:\n  weft devices\n  weft devices --json | jq '.devices[] | select(.usable) | .backend'");
  command->callback([output, &exit] { exit = list_devices(*output); });
}

}  // namespace weft::tools
