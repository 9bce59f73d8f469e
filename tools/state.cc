// `weft state`: checks a state file and describes it.
#include <fmt/format.h>

#include "tools/json_output.h"
#include "tools/model_command.h"
#include "tools/terminal.h"
#include "weft/state_file.h"

namespace weft::tools {
namespace {

using Json = nlohmann::ordered_json;

struct StateFlags {
  std::string file;
  JsonOutput output;
};

int run_state(const StateFlags& flags) {
  flags.output.check_writable({flags.file});
  const StateFileInfo info = read_state_file(flags.file);
  const auto pending = static_cast<int64_t>(info.label.ids.size()) - info.tokens;
  if (flags.output.json) {
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
    flags.output.write(out);
    return kOk;
  }
  show("state file, version {}, {}; all checksums match\n", info.version, bytes_text(info.bytes));
  show("model        {}\nfingerprint  {}\nKV           {}\n", in_quotes(info.label.model), in_quotes(info.label.fingerprint),
       in_quotes(info.label.kv));
  show("tokens       {}{}\n\n", info.tokens, pending > 0 ? fmt::format(", and {} to be appended", pending) : "");
  Table layers({"layer", "memory"}, {true, false});
  for (size_t i = 0; i < info.layers.size(); ++i) layers.add({std::to_string(i), in_quotes(info.layers[i])});
  Table sections({"section", "offset", "bytes", "xxh3"}, {false, true, true, false});
  for (const StateSection& section : info.sections)
    sections.add({printable(section.name), std::to_string(section.offset), std::to_string(section.bytes), hex(section.checksum)});
  layers.show();
  show("\n");
  sections.show();
  return kOk;
}

}  // namespace

void add_state(CLI::App& app, int& exit) {
  CLI::App* command = app.add_subcommand("state", "Check a state file and describe it");
  auto flags = std::make_shared<StateFlags>();
  command->add_option("file", flags->file, "A file that `weft generate --state` wrote")->required();
  flags->output.add_options(*command);
  command->footer(
      "Examples:\n"
      "  weft generate --state story.state --prompt 'The ship'    writes a text and its state file\n"
      "  weft state story.state                                   describes the file");
  command->callback([flags, &exit] { exit = run_state(*flags); });
}

}  // namespace weft::tools
