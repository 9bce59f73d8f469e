// Hadamard matrices of order 12, 20 and 28 as sign bits: bit j of row i set means H[i][j] = -1.
#pragma once

#include <cstdint>

namespace weft {

// Orders 12 and 20 are Paley's first construction (q = 11, 19), 28 his second (q = 13). 12 and 20 are not symmetric.
inline constexpr uint32_t kHadamard12[] = {0x0000000u, 0x0000475u, 0x00008e9u, 0x00001d3u, 0x00003a5u, 0x0000749u,
                                           0x0000e91u, 0x0000d23u, 0x0000a47u, 0x000048fu, 0x000091du, 0x000023bu};
inline constexpr uint32_t kHadamard20[] = {0x0000000u, 0x00615e5u, 0x00c2bc9u, 0x0085793u, 0x000af27u, 0x0015e4du, 0x002bc99u,
                                           0x0057931u, 0x00af261u, 0x005e4c3u, 0x00bc985u, 0x007930bu, 0x00f2615u, 0x00e4c2bu,
                                           0x00c9857u, 0x00930afu, 0x002615fu, 0x004c2bdu, 0x0098579u, 0x0030af3u};
inline constexpr uint32_t kHadamard28[] = {0x0000002u, 0xaaaaaabu, 0x30ff0c8u, 0x9a55a6eu, 0xc3fc320u, 0x69569bau, 0x0ff0c8cu,
                                           0xa55a6e6u, 0x3fc3230u, 0x9569b9au, 0xff0c8c0u, 0x55a6e6au, 0xfc3230cu, 0x569b9a6u,
                                           0xf0c8c3cu, 0x5a6e696u, 0xc3230fcu, 0x69b9a56u, 0x0c8c3fcu, 0xa6e6956u, 0x3230ff0u,
                                           0x9b9a55au, 0xc8c3fc0u, 0x6e6956au, 0x230ff0cu, 0xb9a55a6u, 0x8c3fc30u, 0xe69569au};

// An order that the library has: the Kronecker product of H_base (base 1, 12, 20 or 28) and Sylvester's H_2^k, index
// i_base * 2^k + i_2.
struct HadamardOrder {
  int64_t base = 0;                // 0: no such order
  int64_t sylvester = 0;           // 2^k
  const uint32_t* rows = nullptr;  // sign bits of H_base; null for base 1
};

constexpr HadamardOrder hadamard_order(int64_t n) {
  const HadamardOrder bases[] = {{1, 0, nullptr}, {12, 0, kHadamard12}, {20, 0, kHadamard20}, {28, 0, kHadamard28}};
  for (const HadamardOrder& b : bases) {
    const int64_t rest = n > 0 && n % b.base == 0 ? n / b.base : 0;
    if (rest > 0 && (rest & (rest - 1)) == 0) return {b.base, rest, b.rows};
  }
  return {};
}

}  // namespace weft
