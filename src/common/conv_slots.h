// Which rows of a convolution state a sequence reads and writes: the one reading of ShortConvArgs that all backends share.
#pragma once

#include <algorithm>

#include "common/state_slots.h"
#include "weft/delta_preprocess.h"

namespace weft {

struct ConvSlots {
  bool inert = false;
  int64_t in = -1, out = -1;  // -1: zeros, or not written
  int64_t offset = 0;         // first row of the history
};

// Rows of a state: L.
WEFT_EXEC_UNCHECKED template <class Args>  // ShortConvArgs, or what a kernel keeps of them
WEFT_HOST_DEVICE inline int64_t conv_state_rows(const Args& args) {
  const auto& pool = args.state_in.present() ? args.state_in : args.state_out;
  return pool.present() ? pool.size(1) : args.weight.size(1) - 1;
}

WEFT_EXEC_UNCHECKED template <class Args>
WEFT_HOST_DEVICE inline ConvSlots conv_slots(const Args& args, int64_t n) {
  // Slots of a convolution mean what slots of the rule do.
  const StateSlots slots =
      state_slots(args.state_in, args.state_out, args.state_in_slots, args.state_out_slots, args.has_initial, n);
  ConvSlots found{slots.inert, slots.in, slots.out, conv_state_rows(args) - (args.weight.size(1) - 1)};
  if (args.state_offsets.present()) found.offset = std::clamp<int64_t>(index_at(args.state_offsets, n), 0, found.offset);
  return found;
}

}  // namespace weft
