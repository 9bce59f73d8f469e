// --json and -o: see json_output.h.
#include "tools/json_output.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "tools/terminal.h"
#include "tools/validators.h"

namespace weft::tools {
namespace {

[[noreturn]] void refuse_output(const std::string& file) {
  throw std::runtime_error(fmt::format("cannot write {}: {}", file, std::strerror(errno)));
}

}  // namespace

void JsonOutput::add_options(CLI::App& command, const std::string& what) {
  auto* flag = command.add_flag("--json", json, what);
  command.add_option("-o,--output", file, "With --json: write it to this file instead of stdout")
      ->needs(flag)
      ->option_text("FILE")
      ->check(file_name());
}

void JsonOutput::check_writable() const {
  if (file.empty()) return;
  std::error_code ignored;
  const bool existed = std::filesystem::exists(file, ignored);
  if (std::filesystem::is_fifo(file, ignored)) return;  // opening it would wait for its reader
  if (!std::ofstream(file, std::ios::app)) refuse_output(file);
  if (!existed) std::filesystem::remove(std::filesystem::canonical(file));  // of a link: its target
}

void JsonOutput::write(const nlohmann::ordered_json& document, int indent) const {
  const std::string text = document.dump(indent, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  if (file.empty()) {
    write_text(Channel::out, text);
    return;
  }
  errno = 0;
  std::ofstream out(file, std::ios::binary);
  out << text;
  out.close();
  if (!out) refuse_output(file);
}

}  // namespace weft::tools
