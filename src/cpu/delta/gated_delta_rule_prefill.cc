// gated_delta_rule_prefill on the cpu: chunk scans, with threads over heads, state columns and, for few small heads, token ranges.
#include <algorithm>
#include <string>

#include "common/conventions.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/scratch.h"
#include "cpu/delta/chunk_scan.h"
#include "cpu/table.h"

namespace weft::cpu {
namespace {

// A sequence of at least kRangedTokens tokens, whose states have at most kRangedColumns columns in all heads together, is split
// into token ranges of kRangeTokens. Each range is first summarised as an affine map. The maps give every range its initial state,
// and then all ranges run in parallel. That takes 2.3 times the operations, so it is limited to states that would keep only a few
// cores busy. The rule depends on the sequence, not on the threads, so that the bits do not depend on the threads. With fewer than
// three threads it is slower (with one, 2.1 to 2.3 times the time); such callers should use Schedule::invariant. That schedule
// never splits, because continuation at a multiple of 64 tokens would not be bit-equal.
constexpr int64_t kRangeTokens = 1024, kRangedTokens = 4 * kRangeTokens, kRangedColumns = 64;

struct PrefillPlan {
  DeltaTokens tokens;
  int64_t sequences = 0, T = 0;
  Threads threads;
  Isa isa = Isa::best;
  ScanSplit split;         // of scans that write outputs
  ScanSplit linear;        // of scans from the identity; only if ranges > 0
  int64_t ranges = 0;      // most ranges of a sequence; 0: no sequence is split into ranges
  size_t map_numbers = 0;  // f32 numbers of p, q and initial state of one range, all heads
  size_t map_bytes = 0;    // scratch of the maps of all ranges, followed by the buffers of the workers
  size_t worker_bytes = 0;
  size_t scratch_bytes = 0;
};

// The map slot of range r >= 1 of a sequence: the index of the block of kRangeTokens tokens in which the range begins. Such
// ranges of packed sequences begin at least kRangeTokens apart, so no two begin in the same block. Range 0 needs no slot.
int64_t map_slot(const TokenRange& range, int64_t r) { return range.begin / kRangeTokens + r; }
int64_t map_slots(const PrefillPlan& plan) { return plan.ranges > 0 ? plan.T / kRangeTokens + 1 : 0; }

PrefillPlan plan_prefill(const Stream& stream, const GatedDeltaRulePrefillArgs& args) {
  PrefillPlan plan;
  plan.tokens.q = rows_view(args.q);
  plan.tokens.k = rows_view(args.k);
  plan.tokens.v = rows_view(args.v);
  plan.tokens.o = rows_view(args.o);
  plan.tokens.gates = gate_view(args.gates);
  plan.tokens.heads = {args.k.size(1), args.v.size(1), args.k.size(2), args.v.size(2), args.head_map};
  plan.tokens.scale = scale_or_default(args.scale, args.k.size(2));
  plan.tokens.l2_norm = args.l2_norm;
  plan.sequences = args.sequences.count;
  plan.T = args.q.size(0);
  plan.isa = resolve_isa(stream.isa);
  const DeltaHeads& heads = plan.tokens.heads;
  plan.threads = worth_threads(stream, 6.0 * static_cast<double>(plan.T * heads.Hv * heads.K * heads.V));
  const int64_t longest = max_tokens(args.sequences, plan.T);
  if (args.schedule == Schedule::fastest && heads.Hv * heads.V <= kRangedColumns && longest >= kRangedTokens) {
    plan.ranges = (longest + kRangeTokens - 1) / kRangeTokens;
    plan.linear = split_scans(plan.isa, heads, heads.K, plan.sequences * plan.ranges, plan.threads);
    plan.map_numbers = static_cast<size_t>(heads.Hv * heads.K * (heads.K + 2 * heads.V));
  }
  plan.split = split_scans(plan.isa, heads, heads.V, plan.sequences * std::max<int64_t>(1, plan.ranges), plan.threads);
  plan.worker_bytes = std::max(plan.split.bytes, plan.linear.bytes);
  if (plan.ranges > 0) plan.worker_bytes = std::max(plan.worker_bytes, affine_memory_bytes(plan.isa));
  plan.map_bytes = align_scratch(static_cast<size_t>(map_slots(plan)) * plan.map_numbers * sizeof(float));
  plan.scratch_bytes = plan.map_bytes + plan.worker_bytes * static_cast<size_t>(plan.threads);
  return plan;
}

Choice describe_prefill(const Stream&, const GatedDeltaRulePrefillArgs&, const PrefillPlan& plan) {
  const std::string ranges =
      plan.ranges > 0 ? " x up to " + std::to_string(plan.ranges) + " ranges of " + std::to_string(kRangeTokens) + " tokens" : "";
  return {std::string("cpu.gated_delta_rule_prefill.chunk16") + (plan.ranges > 0 ? ".ranged." : ".") + isa_name(plan.isa),
          std::to_string(plan.threads) + " threads over " + std::to_string(plan.sequences) + " sequences" + ranges + " x " +
              std::to_string(plan.tokens.heads.Hk) + " key heads x " + std::to_string(plan.split.head_splits) + " head splits x " +
              std::to_string(plan.split.column_splits) + " column splits, chunks of 16 tokens"};
}

bool is_ranged(const PrefillPlan& plan, const TokenRange& range) { return plan.ranges > 0 && range.length() >= kRangedTokens; }

// Runs a scan for every (sequence, range). A sequence that is not split into ranges counts as its range 0.
template <class SetUp>
void run_ranges(const PrefillPlan& plan, const DeltaTokens& tokens, const ScanSplit& split, const GatedDeltaRulePrefillArgs& args,
                Scratch workers, SetUp&& set_up) {
  const int64_t ranges = std::max<int64_t>(1, plan.ranges);
  run_scans(plan.isa, plan.threads, tokens, split, plan.sequences * ranges, workers, plan.worker_bytes,
            [&](int64_t i, ScanTask& task) {
              const int64_t n = i / ranges, r = i % ranges;
              const TokenRange range = tokens_of(args.sequences, n, plan.T);
              const bool ranged = is_ranged(plan, range);
              task.sequence_begin = range.begin;
              task.begin = range.begin + r * kRangeTokens;
              task.end = ranged ? std::min(range.end, task.begin + kRangeTokens) : range.end;
              if (!range.legal || (r > 0 && (!ranged || task.begin >= range.end))) return false;
              return set_up(n, r, range, task);
            });
}

// The p, q and initial states of the ranges: one pool each, a slot per range.
struct RangeMaps {
  StateView p, q, initial;
};

RangeMaps range_maps(const PrefillPlan& plan, float* memory) {
  const int64_t K = plan.tokens.heads.K, V = plan.tokens.heads.V, Hv = plan.tokens.heads.Hv;
  const int64_t slot = static_cast<int64_t>(plan.map_numbers), slots = map_slots(plan);
  const auto pool = [&](int64_t offset, int64_t head) {
    return StateView{memory ? memory + offset : nullptr, DType::f32, StateLayout::vk, slot, head, slots};
  };
  return {pool(0, K * K), pool(Hv * K * K, V * K), pool(Hv * K * (K + V), V * K)};
}

void prefill(const Stream&, const GatedDeltaRulePrefillArgs& args, const PrefillPlan& plan, Scratch scratch) {
  const DeltaHeads& heads = plan.tokens.heads;
  const Scratch workers{static_cast<char*>(scratch.data) + plan.map_bytes, scratch.bytes - plan.map_bytes};
  const RangeMaps maps = range_maps(plan, plan.ranges > 0 ? static_cast<float*>(scratch.data) : nullptr);

  // Calls work(n, value head, tokens, memory) for every sequence that is split into ranges.
  const auto for_each_ranged = [&](auto&& work) {
    parallel_for(plan.threads, plan.sequences * heads.Hv, [&](int64_t i, int worker) {
      const int64_t n = i / heads.Hv;
      const TokenRange range = tokens_of(args.sequences, n, plan.T);
      if (range.legal && is_ranged(plan, range) && !state_slots(args.states, n).inert)
        work(n, i % heads.Hv, range, static_cast<char*>(workers.data) + static_cast<size_t>(worker) * plan.worker_bytes);
    });
  };

  if (plan.ranges > 0) {
    DeltaTokens no_outputs = plan.tokens;
    no_outputs.q = {};
    // Range 0 starts from the state of the sequence. The last range needs no map.
    const auto needs_map = [&](int64_t n, int64_t r, const TokenRange& range, const ScanTask& task) {
      return is_ranged(plan, range) && task.end < range.end && !state_slots(args.states, n).inert && r < plan.ranges;
    };
    run_ranges(plan, no_outputs, plan.split, args, workers, [&](int64_t n, int64_t r, const TokenRange& range, ScanTask& task) {
      if (!needs_map(n, r, range, task)) return false;
      if (r == 0) {
        task.in = state_view(args.states.in, args.states.layout);
        task.in_slot = state_slots(args.states, n).in;
      }
      task.out = r == 0 ? maps.initial : maps.q;
      task.out_slot = map_slot(range, r == 0 ? 1 : r);
      return true;
    });
    run_ranges(plan, no_outputs, plan.linear, args, workers, [&](int64_t n, int64_t r, const TokenRange& range, ScanTask& task) {
      if (r == 0 || !needs_map(n, r, range, task)) return false;
      task.identity = true;
      task.out = maps.p;
      task.out_slot = map_slot(range, r);
      return true;
    });
    for_each_ranged([&](int64_t, int64_t h, const TokenRange& range, void* memory) {
      for (int64_t r = 1; (r + 1) * kRangeTokens < range.length(); ++r) {
        const int64_t slot = map_slot(range, r), next = map_slot(range, r + 1);
        run_affine(plan.isa, {maps.initial, maps.initial.at(slot, h)}, {maps.p, maps.p.at(slot, h)}, {maps.q, maps.q.at(slot, h)},
                   {maps.initial, maps.initial.at(next, h)}, heads.V, heads.K, memory);
      }
    });
  }

  const StateView out = state_view(args.states.out, args.states.layout);
  run_ranges(plan, plan.tokens, plan.split, args, workers, [&](int64_t n, int64_t r, const TokenRange& range, ScanTask& task) {
    const StateSlots slots = state_slots(args.states, n);
    if (slots.inert) {
      for (int64_t j = task.first_head; j < task.last_head; ++j)
        zero_rows(args.o, {task.begin, task.end}, heads.value_head(task.hk, j), task.column, task.columns);
      return false;
    }
    task.in = r > 0 ? maps.initial : state_view(args.states.in, args.states.layout);
    task.in_slot = r > 0 ? map_slot(range, r) : slots.in;
    // The last range writes its state to the slot of its map, not to states.out: states.out may be the memory of states.in, which
    // the first range, on another thread, may not have read yet.
    const bool last = task.end == range.end;
    task.out = r > 0 ? maps.q : out;
    task.out_slot = !last ? -1 : r > 0 ? map_slot(range, r) : slots.out;
    if (args.checkpoints.present()) {
      const Tensor& c = args.checkpoints;
      task.checkpoint_every = args.checkpoint_every;
      task.checkpoints = {static_cast<char*>(c.data) + n * c.strides[0] * dtype_bytes(c.dtype),
                          c.dtype,
                          args.states.layout,
                          c.strides[1],
                          c.strides[2],
                          c.sizes[1]};
    }
    return true;
  });

  if (plan.ranges > 0 && out.data)
    for_each_ranged([&](int64_t n, int64_t h, const TokenRange& range, void* memory) {
      const int64_t last = map_slot(range, (range.length() - 1) / kRangeTokens), slot = state_slots(args.states, n).out;
      if (slot >= 0) run_affine(plan.isa, {}, {}, {maps.q, maps.q.at(last, h)}, {out, out.at(slot, h)}, heads.V, heads.K, memory);
    });
}

}  // namespace

OpEntry<GatedDeltaRulePrefillArgs> gated_delta_rule_prefill_entry() {
  return entry<plan_prefill, describe_prefill, prefill>(kAllFloats);
}

}  // namespace weft::cpu
