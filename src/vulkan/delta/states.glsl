// Which slots of a state pool a sequence reads and writes: state_slots() of src/common/state_slots.h. Needs views.glsl.
struct States {
  View in_, out_;
  Indices in_slots, out_slots, has_initial;
  int64_t layout_kv;  // 1: matrices are [K, V]
};

struct StateSlots {
  bool inert;   // the sequence's outputs are 0 and no state is touched
  int64_t in_;  // -1: the sequence starts from zeros
  int64_t out_;  // -1: the final state is not written
};

#define STATE_SLOTS(s, n) \
  state_slots(s.in_.rank, s.in_.sizes[0], s.out_.rank, s.out_.sizes[0], s.in_slots, s.out_slots, s.has_initial, n)
StateSlots state_slots(uint in_rank, int64_t in_size, uint out_rank, int64_t out_size, Indices in_slots, Indices out_slots,
                       Indices has_initial, int64_t n) {
  // Without a pool to read there is no upper bound: only a negative index is inert.
  const int64_t slot = slot_of(in_slots, n, in_rank > 0 ? in_size : 0x7fffffffffffffffl);
  if (slot < 0) return StateSlots(true, -1, -1);
  const bool fresh = in_rank == 0 || (has_initial.there != 0 && index_at(has_initial, n) == 0);
  int64_t out_slot = -1;
  if (out_rank > 0) {
    if (out_slots.there != 0)
      out_slot = slot_of(out_slots, n, out_size);
    else
      out_slot = slot_of(in_slots, n, out_size);
  }
  return StateSlots(false, fresh ? int64_t(-1) : slot, out_slot);
}
