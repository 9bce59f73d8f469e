// Ctrl-C and other requests to end, as a flag that long work reads between its steps.
#pragma once

#include <array>
#include <csignal>

namespace weft::tools {

// While one exists, the first SIGINT (Ctrl-C), SIGTERM or SIGHUP sets the flag; a second one of the same kind ends the process as
// usual. With `repeats`, every one sets the flag.
class Interrupt {
 public:
  explicit Interrupt(bool repeats = false);
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;
  static bool asked();
  static bool asked_to_end();  // by SIGTERM or SIGHUP
  static void clear();
  static int exit_status();  // exit status of an interrupted command, by the convention of shells: 130 after Ctrl-C

 private:
  static constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP};
  std::array<struct sigaction, kSignals.size()> before_{};
};

}  // namespace weft::tools
