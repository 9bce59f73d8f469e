// Rules that the delta ops share and no letter of a shape expresses: head sizes, chunk lengths, dense matrices, slots.
#pragma once

#include <string>

#include "core/check.h"
#include "core/describe_delta.h"
#include "weft/gated_delta_rule.h"

namespace weft {

// The size K or V of `argument` must be a head size of the delta rule.
inline Check& check_head_size(Check& check, const char* argument, LetterName letter) {
  const int64_t size = check.dim(letter);
  return check.require(size >= 1 && size <= kMaxDeltaHeadSize, argument, [&] {
    return std::string("has ") + letter.text + "=" + std::to_string(size) + ", wanted 1 to " + std::to_string(kMaxDeltaHeadSize);
  });
}

// Binds C.
inline Check& check_chunk(Check& check, int64_t chunk) {
  check.require(chunk == 16 || chunk == 32 || chunk == 64, "chunk",
                [&] { return "is " + std::to_string(chunk) + ", wanted 16, 32 or 64"; });
  return check.bind("C", chunk);
}

// K of `key` and V of `value`.
inline Check& check_head_sizes(Check& check, const char* key, const char* value) {
  return check_head_size(check_head_size(check, key, "K"), value, "V");
}

// The Hv heads of `value` share the Hk heads of `key`. Ask after all shapes.
inline Check& check_heads(Check& check, const char* key, const char* value) {
  return check.key_heads(key, check.dim("Hk"), value, check.dim("Hv"));
}

// The taps W of a short convolution.
Check& check_taps(Check& check);

// Exactly one form of the decay and one of the write strength.
void check_gates(Check& check, const DeltaGateInputs& gates);

// The matrices of the last two dimensions must be dense; the others may have any stride. Call where ranks are known to be right.
inline Check& check_matrices(Check& check, const char* argument, const Tensor& t) {
  if (!check.ok() || !t.present()) return check;
  return check.require(t.size(-2) <= 1 || t.stride(-2) == t.size(-1), argument, [&] {
    return "has matrices of row stride " + std::to_string(t.stride(-2)) + ", wanted dense ones of " + std::to_string(t.size(-1));
  });
}

// A pool without slot indices needs a slot for every sequence; with indices, those out of range are inert at run time.
inline Check& check_slots(Check& check, const char* argument, const Tensor& pool, const Tensor& indices) {
  return check.require(!pool.present() || indices.present() || pool.sizes[0] >= check.dim("N"), argument, [&] {
    return "has " + std::to_string(pool.sizes[0]) +
           " slots and no slot indices, wanted at least N=" + std::to_string(check.dim("N"));
  });
}

// What check_heads() and check_head_size() allow, in words.
inline std::string legal_heads() { return "Hv a multiple of Hk, K and V up to " + std::to_string(kMaxDeltaHeadSize); }

}  // namespace weft
