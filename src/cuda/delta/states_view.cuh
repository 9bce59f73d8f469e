// State pools lowered for kernels.
#pragma once

#include "common/state_slots.h"
#include "cuda/common/views.cuh"

namespace weft::cuda {

// state_slots() of common/state_slots.h reads it.
struct StatesView {
  StridedView in, out;
  IndexView in_slots, out_slots, has_initial;
  StateLayout layout = StateLayout::vk;
};
inline StatesView view_of(const DeltaStates& states) {
  return {view_of(states.in),
          view_of(states.out),
          indices_of(states.in_slots),
          indices_of(states.out_slots),
          indices_of(states.has_initial),
          states.layout};
}

}  // namespace weft::cuda
