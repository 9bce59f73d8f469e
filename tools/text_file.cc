// Reading the text of files: see text_file.h.
#include "tools/text_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "tools/terminal.h"

namespace weft::tools {
namespace {

[[noreturn]] void refuse_file(const std::string& name, const std::string& what) { throw std::runtime_error(name + what); }

// Is the file a terminal in line mode? There, Ctrl-D delivers the line so far, and an empty line ends the file.
bool passes_lines(int file) {
  termios settings{};
  return ::tcgetattr(file, &settings) == 0 && (settings.c_lflag & ICANON) != 0;
}

// Waits until the file can be read; after a second it prints `hint`, once.
void wait_for_text(int file, std::string& hint) {
  constexpr int kPatience = 1000;  // milliseconds
  for (;;) {
    pollfd wanted{file, POLLIN, 0};
    const int found = ::poll(&wanted, 1, hint.empty() ? -1 : kPatience);
    if (found > 0 || (found < 0 && errno != EINTR)) return;  // text, the end, or a fault: read() will tell
    if (found < 0) continue;
    tell("{}\n", hint);
    hint.clear();
  }
}

// Reads until the end. The size of the file is not used, because files of /proc report 0 bytes.
std::string read_all(int file, const std::string& name, uint64_t limit, std::string hint) {
  const bool lines = passes_lines(file);
  std::string text;
  char buffer[1 << 16];
  for (;;) {
    wait_for_text(file, hint);
    const ssize_t got = ::read(file, buffer, sizeof buffer);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got < 0) refuse_file(name, fmt::format("cannot be read: {}", std::strerror(errno)));
    if (got == 0) return text;
    hint.clear();
    text.append(buffer, static_cast<size_t>(got));
    if (text.size() > limit) refuse_file(name, fmt::format("has more than {} bytes, wanted at most that", limit));
    if (lines && text.back() != '\n') {  // Ctrl-D in the middle of a line ends the text too
      tell("\n");
      return text;
    }
  }
}

}  // namespace

std::string read_text_file(const std::string& path, uint64_t limit) {
  // O_NONBLOCK: opening a named pipe must not wait for its writer in silence; wait_for_text() does.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (file < 0) refuse_file(path, fmt::format(": cannot be opened: {}", std::strerror(errno)));
  struct Closed {
    int file;
    ~Closed() { ::close(file); }
  } const closed{file};
  struct stat info {};
  if (::fstat(file, &info) != 0 || !(S_ISREG(info.st_mode) || S_ISFIFO(info.st_mode) || isatty(file)))
    refuse_file(path, ": is not a regular file");
  return read_all(file, path + ": ", limit, fmt::format("weft: waiting for text from {}", path));
}

std::string read_input(const std::string& file, const std::string& what) {
  constexpr uint64_t kMaxInput = 1 << 30;
  if (file != "-") return read_text_file(file, kMaxInput);
  if (isatty(STDIN_FILENO)) {
    tell("Type {}; Ctrl-D ends it.\n", what);
    return read_all(STDIN_FILENO, "standard input ", kMaxInput, "");
  }
  return read_all(STDIN_FILENO, "standard input ", kMaxInput,
                  fmt::format("weft: reading {} from standard input until its end (Ctrl-D)", what));
}

}  // namespace weft::tools
