// --json and -o: see json_output.h.
#include "tools/json_output.h"

#include <fmt/format.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "tools/command.h"
#include "tools/terminal.h"
#include "tools/validators.h"

namespace weft::tools {
namespace {

[[noreturn]] void refuse_output(const std::string& file) {
  throw std::runtime_error(fmt::format("cannot write {}: {}", file, std::strerror(errno)));
}

// Do both names lead to one file? The file need not exist yet.
bool is_same_file(const std::string& a, const std::string& b) {
  std::error_code ignored;
  if (std::filesystem::equivalent(a, b, ignored)) return true;
  return std::filesystem::weakly_canonical(std::filesystem::absolute(a), ignored) ==
         std::filesystem::weakly_canonical(std::filesystem::absolute(b), ignored);
}

}  // namespace

void JsonOutput::add_options(CLI::App& command, const std::string& what) {
  auto* flag = command.add_flag("--json", json, what);
  command.add_option("-o,--output", file, "With --json: write it to this file instead of stdout")
      ->needs(flag)
      ->option_text("FILE")
      ->check(file_name());
}

void JsonOutput::check_writable(const std::vector<std::string>& inputs) const {
  if (file.empty()) return;
  for (const std::string& input : inputs)
    if (!input.empty() && input != "-" && is_same_file(file, input))
      throw UsageError(fmt::format("-o {} would overwrite {}, which the command uses; name another file", file, input));
  struct stat status {};
  if (stat(file.c_str(), &status) == 0 && S_ISFIFO(status.st_mode)) return;  // opening a named pipe would wait for its reader
  // A file that this call creates is removed again. O_EXCL spares a file that another process creates meanwhile.
  const int created = open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (created >= 0) {
    close(created);
    unlink(file.c_str());
    return;
  }
  if (errno != EEXIST) refuse_output(file);
  if (stat(file.c_str(), &status) != 0) return;  // a link to a file that does not exist yet
  const int there = open(file.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (there < 0) refuse_output(file);
  close(there);
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
