// Runs a shell command on a pseudo-terminal.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>

namespace weft {

// A terminal of so many columns that echoes nothing and changes no byte of the output, and a command on it.
class Terminal {
 public:
  explicit Terminal(const std::string& line, unsigned short columns = 100, const char* term = "xterm") {
    termios settings{};
    settings.c_iflag = ICRNL;
    settings.c_cflag = CS8 | CREAD;
    settings.c_lflag = ICANON | ISIG;
    settings.c_cc[VINTR] = 3;
    settings.c_cc[VEOF] = 4;
    settings.c_cc[VERASE] = 0x7F;
    settings.c_cc[VKILL] = 0x15;
    settings.c_cc[VEOL] = settings.c_cc[VEOL2] = _POSIX_VDISABLE;
    settings.c_cc[VMIN] = 1;
    const winsize size{50, columns, 0, 0};
    child_ = ::forkpty(&terminal_, nullptr, &settings, &size);
    if (child_ != 0) return;
    ::setenv("TERM", term, 1);
    ::unsetenv("COLUMNS");
    ::unsetenv("NO_COLOR");
    ::execl("/bin/sh", "sh", "-c", line.c_str(), nullptr);
    ::_exit(127);
  }
  ~Terminal() {
    if (child_ > 0 && !ended_) {
      ::kill(child_, SIGKILL);
      ::waitpid(child_, nullptr, 0);
    }
    if (terminal_ >= 0) ::close(terminal_);
  }
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  bool made() const { return child_ > 0; }
  // Types a text: "\x04" is Ctrl-D, "\x03" Ctrl-C.
  void type(const std::string& text) const { EXPECT_EQ(::write(terminal_, text.data(), text.size()), ssize_t(text.size())); }
  // Waits until this is on the terminal, or the command ends.
  bool wait_for(const std::string& part) {
    while (seen_.find(part) == std::string::npos)
      if (!read_more()) return false;
    return true;
  }
  // Waits until the command edits a line: it has shown the prompt before, and what is typed in between belongs to the system, which drops it
  // at Ctrl-C.
  bool wait_for_editing() const {
    constexpr int kTries = 12000;  // of 10 ms
    for (int i = 0; i < kTries; ++i) {
      termios settings{};
      if (::tcgetattr(terminal_, &settings) != 0) return false;
      if ((settings.c_lflag & ICANON) == 0) return true;
      ::usleep(10000);
    }
    return false;
  }
  // Waits for the end and returns the exit status; -1 after a signal or two minutes.
  int exit_status() {
    while (read_more()) {
    }
    if (late_) return -1;
    int status = 0;
    ::waitpid(child_, &status, 0);
    ended_ = true;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  // Waits until the text on the terminal ends with this: a prompt.
  bool wait_for_end(const std::string& part) {
    while (!seen_.ends_with(part))
      if (!read_more()) return false;
    return true;
  }
  void signal(int number) const { ::kill(child_, number); }
  const std::string& seen() const { return seen_; }

  // Waits for more text; false at the end of the command and after two minutes.
  bool read_more() {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end_ - std::chrono::steady_clock::now()).count();
    pollfd wanted{terminal_, POLLIN, 0};
    if (left <= 0 || ::poll(&wanted, 1, static_cast<int>(left)) <= 0) {
      late_ = true;
      return false;
    }
    char buffer[4096];
    const ssize_t got = ::read(terminal_, buffer, sizeof buffer);
    if (got <= 0) return false;  // the last process on the terminal has ended
    seen_.append(buffer, static_cast<size_t>(got));
    return true;
  }

 private:
  int terminal_ = -1;
  pid_t child_ = -1;
  bool ended_ = false, late_ = false;
  std::string seen_;
  std::chrono::steady_clock::time_point end_ = std::chrono::steady_clock::now() + std::chrono::minutes(2);
};

}  // namespace weft
