// The records of decoded tokens, and rollback: the tokens that stay are replayed from an earlier state.
//
// With rollback a sequence has two slots for its recurrent state: one holds the latest state, the other an earlier state. Replaying
// the records on the earlier state gives the latest one. If there are no records yet, a step reads the latest state and writes the
// other slot, so keeping the earlier state costs nothing. The ring of records has two halves of 16 tokens. When a step would
// overflow the ring, the older half is replayed onto the earlier state first. A step writes its records to staging rows, in the
// order of the batch; commit_records() moves them to the rings.
#include <algorithm>
#include <string>

#include "core/check.h"
#include "core/run.h"
#include "model/state/hybrid_pools.h"

namespace weft {

using namespace model;

namespace {

// Rows [row, row + rows) of the records of a layer. A row holds k, delta and g.
DeltaRecord record_view(const HybridState::Pools& p, int64_t layer, int64_t row, int64_t rows) {
  const DeltaMemory& memory = p.delta_at(layer);
  auto* numbers = reinterpret_cast<float*>(p.record_at(row)) + p.layers[static_cast<size_t>(layer)].record_column;
  const auto columns = [&](int64_t heads, int64_t size) {
    Tensor t = p.source->view(numbers, DType::f32, {rows, heads, size});
    t.strides[0] = p.record_row;
    numbers += heads * size;
    return t;
  };
  DeltaRecord record;
  record.k = columns(memory.key_heads, memory.key_dim);
  record.delta = columns(memory.value_heads, memory.value_dim);
  record.g = columns(1, memory.value_heads);
  record.g.rank = 2;
  record.g.sizes[1] = memory.value_heads;
  record.g.strides[1] = 1;
  return record;
}

}  // namespace

std::byte* HybridState::Pools::record_at(int64_t row) const { return records.data() + row * record_row * kF32; }

bool HybridState::Pools::begin_records(int64_t n, int64_t row, int64_t tokens) {
  Sequence& sequence = at(n);
  bool replays = false;
  if (sequence.recorded == 0) {
    sequence.origin = sequence.length;
    sequence.slot = other_slot(sequence.slot);
  } else if (sequence.recorded + tokens > kRecordTokens) {
    const int64_t base = sequence.length - sequence.recorded, slot = other_slot(sequence.slot);
    add_replay(n, base - sequence.origin, kHalfTokens, slot, slot, base > 0);
    sequence.recorded -= kHalfTokens;
    replays = true;
  }
  staged.push_back({n, row, sequence.length - sequence.origin, tokens});
  sequence.recorded += tokens;
  sequence.rollable = std::min(plan.rollback, sequence.rollable + tokens);
  return replays;
}

void HybridState::Pools::commit_records(const Stream* stream) {
  std::vector<RowMove> moves;
  for (const Staged& step : staged)
    for (int64_t t = 0; t < step.tokens;) {  // at most two moves: the ring wraps around
      const int64_t position = (step.first + t) % kRecordTokens, count = std::min(step.tokens - t, kRecordTokens - position);
      moves.push_back({static_cast<int32_t>(plan.sequences * kRecordTokens + step.row + t),
                       static_cast<int32_t>(step.sequence * kRecordTokens + position), static_cast<int32_t>(count)});
      t += count;
    }
  staged.clear();
  const auto row = static_cast<size_t>(record_row * kF32);
  if (stream && plan.place == Place::cuda) return move_on_stream(*stream, records.data(), row, moves);
  for (const RowMove& move : moves) copy_bytes(record_at(move.to), record_at(move.from), static_cast<size_t>(move.count) * row);
}

void HybridState::Pools::clear_replay() {
  if (!records_tokens()) return;
  const auto halves = static_cast<size_t>(2 * plan.sequences);
  replay.in_slots.assign(halves, -1);
  replay.out_slots.assign(halves, -1);
  replay.accepted.assign(halves, 0);
  replay.has_initial.assign(halves, 1);
}

void HybridState::Pools::add_replay(int64_t sequence, int64_t first, int64_t accepted, int64_t in_slot, int64_t out_slot,
                                    bool has_initial) {
  const auto half = static_cast<size_t>(2 * sequence + first / kHalfTokens % 2);
  replay.in_slots[half] = static_cast<int32_t>(in_slot);
  replay.out_slots[half] = static_cast<int32_t>(out_slot);
  replay.accepted[half] = static_cast<int32_t>(accepted);
  replay.has_initial[half] = has_initial;
}

void HybridState::Pools::place_replay(const Stream* stream) {
  if (plan.place == Place::host) return;
  const auto bytes = static_cast<size_t>(2 * plan.sequences) * sizeof(int32_t);
  const std::vector<int32_t>* const values[] = {&replay.accepted, &replay.in_slots, &replay.out_slots, &replay.has_initial};
  for (size_t i = 0; i < std::size(values); ++i) {
    if (replay.placed[i].bytes() < bytes) replay.placed[i] = source->block(static_cast<int64_t>(bytes));
    if (!source->pretended) copy_bytes(stream, replay.placed[i].data(), values[i]->data(), bytes);
  }
}

GatedDeltaRuleReplayArgs HybridState::Pools::replay_args(int64_t layer) {
  const DeltaMemory& memory = delta_at(layer);
  const auto placed = [&](std::vector<int32_t>& values, const Block& block) {
    Tensor t = indices(values);
    return plan.place == Place::host ? t : source->view(block.data(), DType::i32, {t.sizes[0]});
  };
  GatedDeltaRuleReplayArgs args;
  args.record = record_view(*this, layer, 0, plan.sequences * kRecordTokens);
  args.accepted = placed(replay.accepted, replay.placed[0]);
  args.head_map = memory.head_map;
  args.sequences = Sequences::uniform(2 * plan.sequences);
  args.states.in = args.states.out = source->view(layers[static_cast<size_t>(layer)].recurrent.data(), DType::f32,
                                                  {slots(), memory.value_heads, memory.value_dim, memory.key_dim});
  args.states.in_slots = placed(replay.in_slots, replay.placed[1]);
  args.states.out_slots = placed(replay.out_slots, replay.placed[2]);
  args.states.has_initial = placed(replay.has_initial, replay.placed[3]);
  return args;
}

DeltaRecord HybridState::record(int64_t layer, const HybridBatch& batch) const {
  pools_->delta_at(layer);  // throws for another kind of layer
  if (!pools_->records_tokens()) return {};
  return record_view(*pools_, layer, sequences() * kRecordTokens, batch.decoded_tokens);
}

GatedDeltaRuleReplayArgs HybridState::replay(int64_t layer) const { return pools_->replay_args(layer); }

int64_t HybridState::rollable(int64_t sequence) const { return pools_->at(sequence).rollable; }

void HybridState::Pools::check_stream(const Stream& stream) const {
  const bool on_device = plan.place == Place::cuda;
  if (on_device == (stream.backend == Backend::cuda) && (!on_device || stream.device == plan.device)) return;
  throw Error(fail(Code::invalid_argument, kStateOp, "stream",
                   std::string("is of backend ") + backend_name(stream.backend) + ", device " + std::to_string(stream.device) +
                       ", wanted one for a state on " + (on_device ? "cuda device " + std::to_string(plan.device) : "the host")));
}

void HybridState::rollback(const Stream& stream, std::span<const SequenceTokens> parts) {
  Pools& p = *pools_;
  p.check_stream(stream);
  std::vector<bool> seen(static_cast<size_t>(p.plan.sequences));
  for (const SequenceTokens& part : parts) {
    const int64_t most = p.at(part.sequence).rollable;
    const std::string name = std::to_string(part.sequence);
    if (seen[static_cast<size_t>(part.sequence)])
      throw Error(fail(Code::invalid_argument, kStateOp, "sequence", "is " + name + " twice, wanted once"));
    seen[static_cast<size_t>(part.sequence)] = true;
    if (part.tokens < 0 || part.tokens > most)
      throw Error(fail(Code::invalid_argument, kStateOp, "tokens",
                       "to roll back are " + std::to_string(part.tokens) + " for sequence " + name + ", wanted 0 to " +
                           std::to_string(most) + " (the plan has rollback " + std::to_string(p.plan.rollback) +
                           "; tokens appended more than " + std::to_string(kMaxDecodeTokens) +
                           " at once, in a prompt or by a restore cannot be rolled back)"));
  }
  p.commit_records(&stream);
  // The records that stay are in up to two halves of the ring. The older half is replayed first.
  for (int64_t done : {int64_t{0}, kHalfTokens}) {
    p.clear_replay();
    bool any = false;
    for (const SequenceTokens& part : parts) {
      const Pools::Sequence& sequence = p.at(part.sequence);
      const int64_t stay = sequence.recorded - part.tokens, base = sequence.length - sequence.recorded;
      if (part.tokens == 0 || stay <= done) continue;
      const int64_t earlier = p.other_slot(sequence.slot);
      p.add_replay(part.sequence, base - sequence.origin + done, std::min(stay - done, kHalfTokens),
                   done == 0 ? earlier : sequence.slot, sequence.slot, done > 0 || base > 0);
      any = true;
    }
    if (any) p.place_replay(&stream);
    for (size_t i = 0; any && i < p.layers.size(); ++i) {
      if (!std::holds_alternative<DeltaMemory>(p.plan.layers[i])) continue;
      const GatedDeltaRuleReplayArgs args = p.replay_args(static_cast<int64_t>(i));
      run_lending(stream, args, [&](size_t bytes) -> Scratch {
        if (p.replay.scratch.bytes() < bytes) p.replay.scratch = p.source->block(static_cast<int64_t>(bytes));
        return {p.replay.scratch.data(), bytes};
      });
    }
  }
  for (const SequenceTokens& part : parts) {
    Pools::Sequence& sequence = p.at(part.sequence);
    if (part.tokens == 0) continue;
    sequence.recorded -= part.tokens;
    sequence.rollable -= part.tokens;
    sequence.rolled_back += part.tokens;
    sequence.length -= part.tokens;
    if (sequence.recorded == 0) sequence.slot = p.other_slot(sequence.slot);  // the other slot holds the state before the records
    while (static_cast<int64_t>(sequence.pages.size()) > pages_of(sequence.length)) {
      p.pages->release(sequence.pages.back());
      sequence.pages.pop_back();
    }
  }
}

}  // namespace weft
