// gated_delta_rule_summarize, _compose and _apply on the cpu: token ranges as affine maps S -> S p + q.
// clang-format off
#include "cpu/common/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/delta/gated_delta_rule_affine.cc"
#include <hwy/foreach_target.h>
// clang-format on
#include "cpu/delta/affine-inl.h"

#if HWY_ONCE

#include <algorithm>
#include <string>

#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/delta/chunk_scan.h"
#include "cpu/table.h"

namespace weft::cpu {

HWY_EXPORT(affine_bytes);
HWY_EXPORT(affine_product);

size_t affine_memory_bytes(Isa isa) { return WEFT_KERNEL(isa, affine_bytes)(); }

void run_affine(Isa isa, const MatrixAt& x, const MatrixAt& p, const MatrixAt& y, const MatrixAt& out, int64_t rows, int64_t K,
                void* memory) {
  WEFT_KERNEL(isa, affine_product)(x, p, y, out, rows, K, memory);
}

namespace {

// ---- summarize: the scan from zeros gives q, the scan from the identity with v = 0 gives p

struct SummaryPlan {
  DeltaTokens tokens;
  ScanSplit offset, linear;  // of the scans for q and for p
  int threads = 1;
  Isa isa = Isa::best;
  size_t bytes = 0;
};

SummaryPlan make_plan(const Stream& stream, const GatedDeltaRuleSummarizeArgs& args) {
  SummaryPlan plan;
  plan.tokens.k = rows_view(args.k);
  plan.tokens.v = rows_view(args.v);
  plan.tokens.gates = gate_view(args.gates);
  plan.tokens.heads = {args.k.size(1), args.v.size(1), args.k.size(2), args.v.size(2), args.head_map};
  plan.tokens.l2_norm = args.l2_norm;
  plan.threads = thread_count(stream);
  plan.isa = resolve_isa(stream.isa);
  plan.offset = split_scans(plan.isa, plan.tokens.heads, plan.tokens.heads.V, args.sequences.count, plan.threads);
  plan.linear = split_scans(plan.isa, plan.tokens.heads, plan.tokens.heads.K, args.sequences.count, plan.threads);
  plan.bytes = std::max(plan.offset.bytes, plan.linear.bytes);
  return plan;
}

size_t summarize_scratch(const Stream& stream, const GatedDeltaRuleSummarizeArgs& args) {
  const SummaryPlan plan = make_plan(stream, args);
  return plan.bytes * static_cast<size_t>(plan.threads);
}

void summarize(const Stream& stream, const GatedDeltaRuleSummarizeArgs& args, Scratch scratch) {
  const SummaryPlan plan = make_plan(stream, args);
  const int64_t T = args.k.size(0);
  for (const bool linear : {false, true})
    run_scans(plan.isa, plan.threads, plan.tokens, linear ? plan.linear : plan.offset, args.sequences.count, scratch, plan.bytes,
              [&](int64_t n, ScanTask& task) {
                const TokenRange range = tokens_of(args.sequences, n, T);
                task.sequence_begin = task.begin = range.begin;
                task.end = range.end;
                task.identity = linear;
                task.out = state_view(linear ? args.p : args.q, StateLayout::vk);
                task.out_slot = n;
                return range.legal;
              });
}

// ---- compose and apply: products of [rows, K] and [K, K] matrices plus a third

template <class Args>
size_t product_scratch(const Stream& stream, const Args&) {
  return affine_memory_bytes(stream.isa) * static_cast<size_t>(thread_count(stream));
}

void compose(const Stream& stream, const GatedDeltaRuleComposeArgs& args, Scratch scratch) {
  const int64_t Hv = args.p1.size(1), K = args.p1.size(2), V = args.q1.size(2);
  const size_t bytes = affine_memory_bytes(stream.isa);
  const auto view = [](const Tensor& t) { return state_view(t, StateLayout::vk); };
  const StateView p1 = view(args.p1), q1 = view(args.q1), p2 = view(args.p2), q2 = view(args.q2), p = view(args.p),
                  q = view(args.q);
  parallel_for(thread_count(stream), args.p1.size(0) * Hv, [&](int64_t i, int worker) {
    const int64_t n = i / Hv, h = i % Hv;
    void* memory = static_cast<char*>(scratch.data) + static_cast<size_t>(worker) * bytes;
    run_affine(stream.isa, {p1, p1.at(n, h)}, {p2, p2.at(n, h)}, {}, {p, p.at(n, h)}, K, K, memory);
    run_affine(stream.isa, {q1, q1.at(n, h)}, {p2, p2.at(n, h)}, {q2, q2.at(n, h)}, {q, q.at(n, h)}, V, K, memory);
  });
}

void apply(const Stream& stream, const GatedDeltaRuleApplyArgs& args, Scratch scratch) {
  const int64_t Hv = args.p.size(1), K = args.p.size(2), V = args.q.size(2);
  const size_t bytes = affine_memory_bytes(stream.isa);
  const StateView p = state_view(args.p, StateLayout::vk), q = state_view(args.q, StateLayout::vk);
  const StateView in = state_view(args.states.in, args.states.layout), out = state_view(args.states.out, args.states.layout);
  parallel_for(thread_count(stream), args.p.size(0) * Hv, [&](int64_t i, int worker) {
    const int64_t n = i / Hv, h = i % Hv;
    const StateSlots slots = state_slots(args.states, n);
    if (slots.inert || slots.out < 0) return;
    MatrixAt start;
    if (slots.in >= 0) start = {in, in.at(slots.in, h)};
    run_affine(stream.isa, start, {p, p.at(n, h)}, {q, q.at(n, h)}, {out, out.at(slots.out, h)}, V, K,
               static_cast<char*>(scratch.data) + static_cast<size_t>(worker) * bytes);
  });
}

Choice affine_choice(const Stream& stream, const char* op, const char* split) {
  return {std::string("cpu.") + op + "." + isa_name(resolve_isa(stream.isa)),
          std::to_string(thread_count(stream)) + " threads over " + split};
}

}  // namespace

OpEntry<GatedDeltaRuleSummarizeArgs> gated_delta_rule_summarize_entry() {
  return {summarize, kAllFloats, nullptr,
          [](const Stream& stream, const GatedDeltaRuleSummarizeArgs&) {
            return affine_choice(stream, "gated_delta_rule_summarize.chunk16",
                                 "ranges x heads x columns, once from zeros and once from the identity");
          },
          summarize_scratch};
}

OpEntry<GatedDeltaRuleComposeArgs> gated_delta_rule_compose_entry() {
  return {compose, kOnlyF32, nullptr,
          [](const Stream& stream, const GatedDeltaRuleComposeArgs&) {
            return affine_choice(stream, "gated_delta_rule_compose", "ranges x heads");
          },
          product_scratch<GatedDeltaRuleComposeArgs>};
}

OpEntry<GatedDeltaRuleApplyArgs> gated_delta_rule_apply_entry() {
  return {apply, kAllFloats, nullptr,
          [](const Stream& stream, const GatedDeltaRuleApplyArgs&) {
            return affine_choice(stream, "gated_delta_rule_apply", "sequences x heads");
          },
          product_scratch<GatedDeltaRuleApplyArgs>};
}

}  // namespace weft::cpu

#endif  // HWY_ONCE
