// State pools lowered for shaders: the struct of states.glsl.
#pragma once

#include "vulkan/common/views.h"
#include "weft/gated_delta_rule.h"

namespace weft::vulkan {

struct StatesView {
  View in, out;
  Indices in_slots, out_slots, has_initial;
  int64_t layout_kv = 0;
};
inline StatesView view_of(const DeltaStates& states) {
  return {view_of(states.in),
          view_of(states.out),
          indices_of(states.in_slots),
          indices_of(states.out_slots),
          indices_of(states.has_initial),
          states.layout == StateLayout::kv};
}

}  // namespace weft::vulkan
