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
  size_t worker_bytes = 0;
  size_t scratch_bytes = 0;
};

SummaryPlan plan_summarize(const Stream& stream, const GatedDeltaRuleSummarizeArgs& args) {
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
  plan.worker_bytes = std::max(plan.offset.bytes, plan.linear.bytes);
  plan.scratch_bytes = plan.worker_bytes * static_cast<size_t>(plan.threads);
  return plan;
}

void summarize(const Stream&, const GatedDeltaRuleSummarizeArgs& args, const SummaryPlan& plan, Scratch scratch) {
  const int64_t T = args.k.size(0);
  for (const bool linear : {false, true})
    run_scans(plan.isa, plan.threads, plan.tokens, linear ? plan.linear : plan.offset, args.sequences.count, scratch,
              plan.worker_bytes, [&](int64_t n, ScanTask& task) {
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

struct ProductPlan {
  Isa isa = Isa::best;
  int threads = 1;
  size_t worker_bytes = 0;
  size_t scratch_bytes = 0;
};

template <class Args>
ProductPlan plan_products(const Stream& stream, const Args&) {
  ProductPlan plan;
  plan.isa = resolve_isa(stream.isa);
  plan.threads = thread_count(stream);
  plan.worker_bytes = affine_memory_bytes(plan.isa);
  plan.scratch_bytes = plan.worker_bytes * static_cast<size_t>(plan.threads);
  return plan;
}

// Calls work(n, value head, memory) for `count` ranges or sequences.
template <class Work>
void for_each_product(const ProductPlan& plan, int64_t count, int64_t Hv, Scratch scratch, Work&& work) {
  parallel_for(plan.threads, count * Hv, [&](int64_t i, int worker) {
    work(i / Hv, i % Hv, static_cast<char*>(scratch.data) + static_cast<size_t>(worker) * plan.worker_bytes);
  });
}

void compose(const Stream&, const GatedDeltaRuleComposeArgs& args, const ProductPlan& plan, Scratch scratch) {
  const int64_t Hv = args.p1.size(1), K = args.p1.size(2), V = args.q1.size(2);
  const auto view = [](const Tensor& t) { return state_view(t, StateLayout::vk); };
  const StateView p1 = view(args.p1), q1 = view(args.q1), p2 = view(args.p2), q2 = view(args.q2), p = view(args.p),
                  q = view(args.q);
  for_each_product(plan, args.p1.size(0), Hv, scratch, [&](int64_t n, int64_t h, void* memory) {
    run_affine(plan.isa, {p1, p1.at(n, h)}, {p2, p2.at(n, h)}, {}, {p, p.at(n, h)}, K, K, memory);
    run_affine(plan.isa, {q1, q1.at(n, h)}, {p2, p2.at(n, h)}, {q2, q2.at(n, h)}, {q, q.at(n, h)}, V, K, memory);
  });
}

void apply(const Stream&, const GatedDeltaRuleApplyArgs& args, const ProductPlan& plan, Scratch scratch) {
  const int64_t Hv = args.p.size(1), K = args.p.size(2), V = args.q.size(2);
  const StateView p = state_view(args.p, StateLayout::vk), q = state_view(args.q, StateLayout::vk);
  const StateView in = state_view(args.states.in, args.states.layout), out = state_view(args.states.out, args.states.layout);
  for_each_product(plan, args.p.size(0), Hv, scratch, [&](int64_t n, int64_t h, void* memory) {
    const StateSlots slots = state_slots(args.states, n);
    if (slots.inert || slots.out < 0) return;
    MatrixAt start;
    if (slots.in >= 0) start = {in, in.at(slots.in, h)};
    run_affine(plan.isa, start, {p, p.at(n, h)}, {q, q.at(n, h)}, {out, out.at(slots.out, h)}, V, K, memory);
  });
}

template <class Plan>
Choice choice(const Plan& plan, const char* op, const char* split) {
  return {std::string("cpu.") + op + "." + isa_name(plan.isa), std::to_string(plan.threads) + " threads over " + split};
}
Choice describe_summarize(const Stream&, const GatedDeltaRuleSummarizeArgs&, const SummaryPlan& plan) {
  return choice(plan, "gated_delta_rule_summarize.chunk16", "ranges x heads x columns, once from zeros and once from the identity");
}
Choice describe_compose(const Stream&, const GatedDeltaRuleComposeArgs&, const ProductPlan& plan) {
  return choice(plan, "gated_delta_rule_compose", "ranges x heads");
}
Choice describe_apply(const Stream&, const GatedDeltaRuleApplyArgs&, const ProductPlan& plan) {
  return choice(plan, "gated_delta_rule_apply", "sequences x heads");
}

}  // namespace

OpEntry<GatedDeltaRuleSummarizeArgs> gated_delta_rule_summarize_entry() {
  return entry<plan_summarize, describe_summarize, summarize>(kAllFloats);
}
OpEntry<GatedDeltaRuleComposeArgs> gated_delta_rule_compose_entry() {
  return entry<plan_products<GatedDeltaRuleComposeArgs>, describe_compose, compose>(kOnlyF32);
}
OpEntry<GatedDeltaRuleApplyArgs> gated_delta_rule_apply_entry() {
  return entry<plan_products<GatedDeltaRuleApplyArgs>, describe_apply, apply>(kAllFloats);
}

}  // namespace weft::cpu

#endif  // HWY_ONCE
