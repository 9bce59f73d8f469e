// What a recurrent step (decode or replay, token by token) on the cpu reads and writes.
#pragma once

#include "cpu/delta/delta_params.h"

namespace weft::cpu {

struct RecurrentStep {
  RowsView q, k, v, o;  // replay: v holds the recorded corrections, q and o are unused
  GateView gates;       // replay: the recorded log decays
  DeltaHeads heads;
  float scale = 1;
  bool l2_norm = false;
  bool replay = false;
  RowsView record_k, record_delta, record_g;  // data null: not wanted
  StateView in, out;
  StateLayout layout = StateLayout::vk;
};

}  // namespace weft::cpu
