// Which slots of a state pool a sequence reads and writes: the one reading of DeltaStates that all backends share.
#pragma once

#include "common/sequences.h"
#include "weft/gated_delta_rule.h"

namespace weft {

struct StateSlots {
  bool inert = false;  // the sequence's outputs are 0 and no state is touched
  int64_t in = -1;     // -1: the sequence starts from zeros
  int64_t out = -1;    // -1: the final state is not written
};

WEFT_EXEC_UNCHECKED template <class Pool, class Indices>  // Tensors, or a kernel's views of them
WEFT_HOST_DEVICE inline StateSlots state_slots(const Pool& in, const Pool& out, const Indices& in_slots, const Indices& out_slots,
                                               const Indices& has_initial, int64_t n) {
  // Without a pool to read, an index can only be inert by its sign.
  const int64_t slots = in.present() ? in.size(0) : INT64_MAX;
  StateSlots found;
  found.in = slot_of(in_slots, n, slots);
  found.inert = found.in < 0;
  if (found.inert) return found;
  const bool fresh = !in.present() || (has_initial.present() && index_at(has_initial, n) == 0);
  if (fresh) found.in = -1;
  if (out.present()) found.out = slot_of(out_slots.present() ? out_slots : in_slots, n, out.size(0));
  return found;
}

WEFT_EXEC_UNCHECKED template <class States>
WEFT_HOST_DEVICE inline StateSlots state_slots(const States& states, int64_t n) {
  return state_slots(states.in, states.out, states.in_slots, states.out_slots, states.has_initial, n);
}

}  // namespace weft
