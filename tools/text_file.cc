// Reading the text of files: see text_file.h.
#include "tools/text_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace weft::tools {
namespace {

[[noreturn]] void refuse_file(const std::string& name, const std::string& what) { throw std::runtime_error(name + what); }

// Reads until the end. A file of /proc says that it has 0 bytes, so its size decides nothing.
std::string read_all(int file, const std::string& name, uint64_t limit) {
  std::string text;
  char buffer[1 << 16];
  for (;;) {
    const ssize_t got = ::read(file, buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse_file(name, fmt::format("cannot be read: {}", std::strerror(errno)));
    if (got == 0) return text;
    text.append(buffer, static_cast<size_t>(got));
    if (text.size() > limit) refuse_file(name, fmt::format("has more than {} bytes, wanted at most that", limit));
  }
}

}  // namespace

std::string read_text_file(const std::string& path, uint64_t limit, bool pipes) {
  struct stat info {};
  // O_NONBLOCK: opening a named pipe that nobody writes to must not wait, unless pipes are wanted.
  const bool is_pipe = pipes && ::stat(path.c_str(), &info) == 0 && S_ISFIFO(info.st_mode);
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | (is_pipe ? 0 : O_NONBLOCK));
  if (file < 0) refuse_file(path, fmt::format(": cannot be opened: {}", std::strerror(errno)));
  struct Closed {
    int file;
    ~Closed() { ::close(file); }
  } const closed{file};
  if (!is_pipe && (::fstat(file, &info) != 0 || !S_ISREG(info.st_mode))) refuse_file(path, ": is not a regular file");
  return read_all(file, path + ": ", limit);
}

std::string read_input(const std::string& file) {
  constexpr uint64_t kMaxInput = 1 << 30;
  return file == "-" ? read_all(STDIN_FILENO, "standard input ", kMaxInput) : read_text_file(file, kMaxInput);
}

}  // namespace weft::tools
