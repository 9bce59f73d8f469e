// Division by a number that the host knows: where blocks meet it first of all, nothing is on its way while they divide.
#pragma once

#include <cstdint>

namespace weft::cuda {

// A product, and one more where it falls short. Of numbers below 2^31.
struct Divisor {
  unsigned by = 1, inverse = 0xffffffffu;
  Divisor() = default;
  explicit Divisor(int64_t number) : by(static_cast<unsigned>(number > 0 ? number : 1)), inverse(0xffffffffu / by) {}
  __device__ unsigned quotient(unsigned n) const {
    const unsigned q = __umulhi(n, inverse);
    return n - q * by >= by ? q + 1 : q;
  }
  // Leaves the quotient, gives the rest.
  __device__ unsigned take(unsigned& n) const {
    const unsigned q = quotient(n), rest = n - q * by;
    n = q;
    return rest;
  }
};

}  // namespace weft::cuda
