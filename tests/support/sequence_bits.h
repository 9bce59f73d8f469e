// What a sequence of a HybridState remembers, as bytes that tests compare.
#pragma once

#include <vector>

#include "model/access.h"
#include "model/state/hybrid_pools.h"

namespace weft::testing_support {

struct SequenceBits {
  std::vector<std::byte> recurrent, history;
  friend bool operator==(const SequenceBits&, const SequenceBits&) = default;
};

inline SequenceBits bits_of(const HybridState& state, int64_t sequence) {
  const HybridState::Pools& p = model::pools_of(state);
  SequenceBits bits;
  bits.recurrent.resize(static_cast<size_t>(p.recurrent_bytes()));
  bits.history.resize(static_cast<size_t>(p.history_bytes()));
  p.read(p.at(sequence), bits.recurrent.data(), bits.history.data());
  return bits;
}

}  // namespace weft::testing_support
