// --json and -o: the same two options of every command that has a report.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace weft::tools {

struct JsonOutput {
  bool json = false;  // the result is JSON instead of text
  std::string file;   // where it goes; empty: stdout

  void add_options(CLI::App& command, const std::string& what = "The result as JSON");
  // Call it before the work. Throws if the file cannot be written or is one of `inputs` (empty names and "-" are no files). Leaves
  // an existing file unchanged.
  void check_writable(const std::vector<std::string>& inputs = {}) const;
  // Writes the document and a line feed. Text that is not UTF-8 is replaced by U+FFFD.
  void write(const nlohmann::ordered_json& document, int indent = -1) const;
};

}  // namespace weft::tools
