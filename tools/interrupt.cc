// Ctrl-C: see interrupt.h.
#include "tools/interrupt.h"

namespace weft::tools {
namespace {

volatile std::sig_atomic_t g_interrupted = 0;
void on_interrupt(int) { g_interrupted = 1; }

}  // namespace

Interrupt::Interrupt() {
  g_interrupted = 0;
  sigaction(SIGINT, nullptr, &before_);
  if (before_.sa_handler == SIG_IGN) return;  // a job in the background: Ctrl-C is meant for others
  struct sigaction action {};
  action.sa_handler = on_interrupt;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
}
Interrupt::~Interrupt() { sigaction(SIGINT, &before_, nullptr); }
bool Interrupt::asked() { return g_interrupted != 0; }

}  // namespace weft::tools
