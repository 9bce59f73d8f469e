// Ctrl-C and other requests to end: see interrupt.h.
#include "tools/interrupt.h"

namespace weft::tools {
namespace {

volatile std::sig_atomic_t g_signal = 0;
void on_interrupt(int signal) {
  if (g_signal == 0 || g_signal == SIGINT) g_signal = signal;  // SIGTERM and SIGHUP replace Ctrl-C, but not the reverse
}

}  // namespace

Interrupt::Interrupt(bool repeats) {
  g_signal = 0;
  for (size_t i = 0; i < before_.size(); ++i) {
    sigaction(kSignals[i], nullptr, &before_[i]);
    if (before_[i].sa_handler == SIG_IGN) continue;  // ignored signals stay ignored: background jobs, nohup
    struct sigaction action {};
    action.sa_handler = on_interrupt;
    action.sa_flags = static_cast<int>(repeats ? SA_RESTART : SA_RESETHAND | SA_RESTART);  // an interrupted write continues
    sigaction(kSignals[i], &action, nullptr);
  }
}
Interrupt::~Interrupt() {
  for (size_t i = 0; i < before_.size(); ++i) sigaction(kSignals[i], &before_[i], nullptr);
}
bool Interrupt::asked() { return g_signal != 0; }
bool Interrupt::asked_to_end() { return g_signal != 0 && g_signal != SIGINT; }
void Interrupt::clear() {
  if (g_signal == SIGINT) g_signal = 0;
}
int Interrupt::exit_status() { return 128 + g_signal; }

}  // namespace weft::tools
