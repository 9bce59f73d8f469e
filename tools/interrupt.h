// Ctrl-C as a question that work asks between its steps.
#pragma once

#include <csignal>

namespace weft::tools {

// While one lives, Ctrl-C sets a flag once; a second Ctrl-C ends the process as usual.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;
  static bool asked();

 private:
  struct sigaction before_ {};
};

// The exit status of a command that was interrupted, as shells write it.
inline constexpr int kInterrupted = 130;

}  // namespace weft::tools
