// The gates of the delta rule as formulas, shared by delta_gates and the ops that take raw gates.
#pragma once

#include <cmath>

namespace weft::reference {

inline double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }
inline double log_decay(double a, double a_log, double dt_bias) { return -std::exp(a_log) * softplus(a + dt_bias); }
inline double write_strength(double b, bool doubled) { return (doubled ? 2.0 : 1.0) / (1 + std::exp(-b)); }

}  // namespace weft::reference
