// Ctrl-C, and what else asks a process to end, as a question that work asks between its steps.
#pragma once

#include <array>
#include <csignal>

namespace weft::tools {

// While one lives, Ctrl-C (SIGINT), SIGTERM and SIGHUP set a flag once; the second of a kind ends the process as usual.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;
  static bool asked();
  static int exit_status();  // of a command that was asked to end, as shells write it: 130 after Ctrl-C

 private:
  static constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP};
  std::array<struct sigaction, kSignals.size()> before_{};
};

}  // namespace weft::tools
