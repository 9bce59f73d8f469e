// The chunk stages on the cpu: threads over chunks and heads, or over sequences and heads for the state scan.
// clang-format off
#include "cpu/common/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/delta/delta_chunk.cc"
#include <hwy/foreach_target.h>
// clang-format on
#include "cpu/delta/delta_chunk-inl.h"

#if HWY_ONCE

#include <algorithm>
#include <string>

#include "common/conventions.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/scratch.h"
#include "cpu/table.h"

namespace weft::cpu {

HWY_EXPORT(chunk_stage_bytes);
HWY_EXPORT(chunk_cumsum_head);
HWY_EXPORT(chunk_kkt_head);
HWY_EXPORT(chunk_tri_inverse_head);
HWY_EXPORT(chunk_wu_head);
HWY_EXPORT(chunk_state_head);
HWY_EXPORT(chunk_output_head);

namespace {

// How a stage is spread over threads. The scratch holds a table with the first chunk slot of every sequence, then the buffers of
// the workers.
struct StagePlan {
  Isa isa = Isa::best;
  int threads = 1;
  size_t table_bytes = 0, worker_bytes = 0;
  size_t scratch_bytes = 0;
};

template <class Args>
StagePlan plan_stage(const Stream& stream, const Args& args) {
  StagePlan plan;
  plan.isa = resolve_isa(stream.isa);
  plan.threads = thread_count(stream);
  plan.table_bytes = align_scratch(static_cast<size_t>(args.sequences.count) * sizeof(int64_t));
  plan.worker_bytes = align_scratch(WEFT_KERNEL(plan.isa, chunk_stage_bytes)());
  plan.scratch_bytes = plan.table_bytes + plan.worker_bytes * static_cast<size_t>(plan.threads);
  return plan;
}

// Fills the table. A sequence whose chunks do not fit into the `slots` slots of h is inert, marked by -1.
int64_t* number_chunks(const Sequences& sequences, int64_t T, int64_t C, int64_t slots, Scratch scratch) {
  int64_t* table = static_cast<int64_t*>(scratch.data);
  int64_t next = 0;
  for (int64_t n = 0; n < sequences.count; ++n) {
    const int64_t first = next;
    next += chunks_of(tokens_of(sequences, n, T), C);
    table[n] = next > slots ? -1 : first;
  }
  return table;
}

void* worker_memory(const StagePlan& plan, Scratch scratch, int worker) {
  return static_cast<char*>(scratch.data) + plan.table_bytes + static_cast<size_t>(worker) * plan.worker_bytes;
}

// Runs a stage for every (sequence, chunk, head). `slots`: of h, for stages that read it.
template <class Kernel>
void run_chunks(const StagePlan& plan, const ChunkView& p, const Sequences& sequences, int64_t T, Scratch scratch, Kernel kernel,
                int64_t slots = INT64_MAX) {
  const int64_t Hv = p.heads.Hv, chunks = (max_tokens(sequences, T) + p.C - 1) / p.C;
  const int64_t* first_slots = number_chunks(sequences, T, p.C, slots, scratch);
  parallel_for(plan.threads, sequences.count * chunks * Hv, [&](int64_t i, int worker) {
    const int64_t n = i / (chunks * Hv), chunk = i / Hv % chunks;
    const TokenRange range = tokens_of(sequences, n, T);
    const int64_t begin = range.begin + chunk * p.C;
    if (!range.legal || first_slots[n] < 0 || begin >= range.end) return;
    const ChunkRange c{begin, std::min(p.C, range.end - begin), first_slots[n] + chunk};
    kernel(p, c, i % Hv, worker_memory(plan, scratch, worker));
  });
}

StateView chunk_states(const Tensor& h) { return state_view(h, StateLayout::vk); }

// Keys, decays and sizes of a stage. The value heads are the second dimension of `values`, and V is its third, if it has one.
template <class Args>
ChunkView chunk_view(const Args& args, const Tensor& values) {
  ChunkView p;
  p.k = rows_view(args.k);
  p.g = rows_view(args.g_cumsum);
  p.per_channel = args.g_cumsum.rank == 3;
  p.heads = {args.k.size(1), values.size(1), args.k.size(2), values.rank == 3 ? values.size(2) : 1, args.head_map};
  p.C = args.chunk;
  return p;
}

void chunk_cumsum(const Stream&, const ChunkCumsumArgs& args, const StagePlan& plan, Scratch scratch) {
  ChunkView p;
  p.g = rows_view(args.g);
  p.g_out = rows_view(args.g_cumsum);
  p.per_channel = args.g.rank == 3;
  p.heads = {1, args.g.size(1), p.per_channel ? args.g.size(2) : 1, 1, HeadMap::grouped};
  p.C = args.chunk;
  run_chunks(plan, p, args.sequences, args.g.size(0), scratch, WEFT_KERNEL(plan.isa, chunk_cumsum_head));
}

void chunk_kkt(const Stream&, const ChunkKktArgs& args, const StagePlan& plan, Scratch scratch) {
  ChunkView p = chunk_view(args, args.beta);
  p.beta = rows_view(args.beta);
  p.a = rows_view(args.a);
  run_chunks(plan, p, args.sequences, args.k.size(0), scratch, WEFT_KERNEL(plan.isa, chunk_kkt_head));
}

void chunk_tri_inverse(const Stream&, const ChunkTriInverseArgs& args, const StagePlan& plan, Scratch scratch) {
  ChunkView p;
  p.a = rows_view(args.a);
  p.a_inv = rows_view(args.a_inv);
  p.heads = {1, args.a.size(1), 1, 1, HeadMap::grouped};
  p.C = args.chunk;
  run_chunks(plan, p, args.sequences, args.a.size(0), scratch, WEFT_KERNEL(plan.isa, chunk_tri_inverse_head));
}

void chunk_wu(const Stream&, const ChunkWuArgs& args, const StagePlan& plan, Scratch scratch) {
  ChunkView p = chunk_view(args, args.v);
  p.v = rows_view(args.v);
  p.beta = rows_view(args.beta);
  p.a_inv = rows_view(args.a_inv);
  p.w = rows_view(args.w);
  p.u = rows_view(args.u);
  run_chunks(plan, p, args.sequences, args.k.size(0), scratch, WEFT_KERNEL(plan.isa, chunk_wu_head));
}

void chunk_state(const Stream&, const ChunkStateArgs& args, const StagePlan& plan, Scratch scratch) {
  ChunkView p = chunk_view(args, args.u);
  p.w = rows_view(args.w);
  p.u = rows_view(args.u);
  p.v_new = rows_view(args.v_new);
  p.h = chunk_states(args.h);
  const StateView in = state_view(args.state_in, StateLayout::vk), out = state_view(args.state_out, StateLayout::vk);
  const auto kernel = WEFT_KERNEL(plan.isa, chunk_state_head);
  const int64_t T = args.k.size(0);
  const int64_t* first_slots = number_chunks(args.sequences, T, p.C, p.h.slots, scratch);
  parallel_for(plan.threads, args.sequences.count * p.heads.Hv, [&](int64_t i, int worker) {
    const int64_t n = i / p.heads.Hv;
    const TokenRange range = tokens_of(args.sequences, n, T);
    if (!range.legal || first_slots[n] < 0) return;
    kernel(p, range, first_slots[n], i % p.heads.Hv, in, in.data ? n : -1, out, out.data ? n : -1,
           worker_memory(plan, scratch, worker));
  });
}

void chunk_output(const Stream&, const ChunkOutputArgs& args, const StagePlan& plan, Scratch scratch) {
  ChunkView p = chunk_view(args, args.v_new);
  p.q = rows_view(args.q);
  p.v_new = rows_view(args.v_new);
  p.h = chunk_states(args.h);
  p.o = rows_view(args.o);
  p.scale = scale_or_default(args.scale, args.k.size(2));
  run_chunks(plan, p, args.sequences, args.k.size(0), scratch, WEFT_KERNEL(plan.isa, chunk_output_head), p.h.slots);
}

Choice describe_stage(const StagePlan& plan, const char* op) {
  return {std::string("cpu.") + op + "." + isa_name(plan.isa),
          std::to_string(plan.threads) + " threads over sequences x chunks x value heads"};
}
#define WEFT_DESCRIBE_STAGE(name, Args) \
  Choice describe_##name(const Stream&, const Args&, const StagePlan& plan) { return describe_stage(plan, #name); }
WEFT_DESCRIBE_STAGE(chunk_cumsum, ChunkCumsumArgs)
WEFT_DESCRIBE_STAGE(chunk_kkt, ChunkKktArgs)
WEFT_DESCRIBE_STAGE(chunk_tri_inverse, ChunkTriInverseArgs)
WEFT_DESCRIBE_STAGE(chunk_wu, ChunkWuArgs)
WEFT_DESCRIBE_STAGE(chunk_state, ChunkStateArgs)
WEFT_DESCRIBE_STAGE(chunk_output, ChunkOutputArgs)
#undef WEFT_DESCRIBE_STAGE

}  // namespace

#define WEFT_STAGE_ENTRY(name, Args, limits) \
  OpEntry<Args> name##_entry() { return entry<plan_stage<Args>, describe_##name, name>(limits); }
WEFT_STAGE_ENTRY(chunk_cumsum, ChunkCumsumArgs, kOnlyF32)
WEFT_STAGE_ENTRY(chunk_kkt, ChunkKktArgs, kAllFloats)
WEFT_STAGE_ENTRY(chunk_tri_inverse, ChunkTriInverseArgs, kOnlyF32)
WEFT_STAGE_ENTRY(chunk_wu, ChunkWuArgs, kAllFloats)
WEFT_STAGE_ENTRY(chunk_state, ChunkStateArgs, kAllFloats)
WEFT_STAGE_ENTRY(chunk_output, ChunkOutputArgs, kAllFloats)
#undef WEFT_STAGE_ENTRY

}  // namespace weft::cpu

#endif  // HWY_ONCE
