// `weft state`: checks a state file and describes it.
#include <fmt/format.h>

#include "tools/model_command.h"
#include "tools/terminal.h"
#include "weft/state_file.h"

namespace weft::tools {
namespace {

using Json = nlohmann::ordered_json;

struct StateFlags {
  std::string file;
  bool json = false;
};

int run_state(const StateFlags& flags) {
  const StateFileInfo info = read_state_file(flags.file);
  const auto pending = static_cast<int64_t>(info.label.ids.size()) - info.tokens;
  if (flags.json) {
    Json sections = Json::array();
    for (const StateSection& section : info.sections)
      sections.push_back(
          {{"name", section.name}, {"offset", section.offset}, {"bytes", section.bytes}, {"xxh3", hex(section.checksum)}});
    const Json out{{"schema", kSchema},
                   {"version", info.version},
                   {"bytes", info.bytes},
                   {"model", info.label.model},
                   {"fingerprint", info.label.fingerprint},
                   {"kv", info.label.kv},
                   {"tokens", info.tokens},
                   {"ids", info.label.ids},
                   {"layers", info.layers},
                   {"sections", sections}};
    fmt::print("{}\n", out.dump(-1, ' ', false, Json::error_handler_t::replace));
    return kOk;
  }
  fmt::print("state file, version {}, {}; all checksums match\n", info.version, bytes_text(info.bytes));
  fmt::print("model        {}\nfingerprint  {}\nKV           {}\n", in_quotes(info.label.model), in_quotes(info.label.fingerprint),
             in_quotes(info.label.kv));
  fmt::print("tokens       {}{}\n\n", info.tokens, pending > 0 ? fmt::format(", and {} to be appended", pending) : "");
  Table layers({"layer", "memory"}, {true, false});
  for (size_t i = 0; i < info.layers.size(); ++i) layers.add({std::to_string(i), in_quotes(info.layers[i])});
  Table sections({"section", "offset", "bytes", "xxh3"}, {false, true, true, false});
  for (const StateSection& section : info.sections)
    sections.add({section.name, std::to_string(section.offset), std::to_string(section.bytes), hex(section.checksum)});
  fmt::print("{}\n{}", layers.text(), sections.text());
  return kOk;
}

}  // namespace

void add_state(CLI::App& app, int& exit) {
  CLI::App* command = app.add_subcommand("state", "Check a state file and describe it");
  auto flags = std::make_shared<StateFlags>();
  command->add_option("file", flags->file, "A file that `weft generate --state` wrote")->required();
  command->add_flag("--json", flags->json, "As JSON");
  command->footer(
      "Examples:\n"
      "  weft generate --state story.state --prompt 'The ship'    writes a text and its state file\n"
      "  weft state story.state                                   describes the file");
  command->callback([flags, &exit] { exit = run_state(*flags); });
}

}  // namespace weft::tools
