// Division by a number known on the host. Blocks divide their index before they can issue any load, so that division is latency.
#pragma once

#include <cstdint>

namespace weft::cuda {

// Divides numbers below 2^31 by one multiplication and a correction.
struct Divisor {
  unsigned by = 1, inverse = 0xffffffffu;
  Divisor() = default;
  explicit Divisor(int64_t number) : by(static_cast<unsigned>(number > 0 ? number : 1)), inverse(0xffffffffu / by) {}
  __device__ unsigned quotient(unsigned n) const {
    const unsigned q = __umulhi(n, inverse);
    return n - q * by >= by ? q + 1 : q;
  }
  // Replaces n by the quotient and returns the remainder.
  __device__ unsigned take(unsigned& n) const {
    const unsigned q = quotient(n), rest = n - q * by;
    n = q;
    return rest;
  }
};

}  // namespace weft::cuda
