// Cases of gated_delta_rule_summarize, _compose and _apply.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "cases/builders.h"
#include "cases/delta_laws.h"
#include "common/state_slots.h"
#include "core/limits.h"

namespace weft::cases {
namespace {

// Random maps [N, Hv, rows, K]. Square ones lie near the identity, so that their products neither vanish nor grow.
Tensor random_maps(Memory& memory, Rng& rng, int64_t N, int64_t Hv, int64_t rows, int64_t K, bool square) {
  const Tensor t = memory.make(DType::f32, {N, Hv, rows, K});
  fill_normal(t, rng, 0.5 / std::sqrt(static_cast<double>(K)));
  if (square)
    for (int64_t i = 0; i < N * Hv; ++i)
      for (int64_t d = 0; d < K; ++d) set(t, (i * K + d) * K + d, get(t, (i * K + d) * K + d) + 0.7);
  return t;
}

// Final states of a prefill over the same tokens with values `v`, from S = `initial` [N, Hv, V, K]: S p + q.
Tensor final_states(Memory& memory, const DeltaInputs& in, const Tensor& v, const Tensor& initial) {
  GatedDeltaRulePrefillArgs args;
  args.q = in.q;
  args.k = in.k;
  args.v = v;
  args.gates = in.gates;
  args.l2_norm = in.l2_norm;
  args.head_map = in.head_map;
  args.sequences = in.tokens.sequences;
  args.o = memory.make(DType::f32, {in.tokens.total, in.Hv, v.size(2)});
  args.states.in = initial;
  args.states.out = memory.make(DType::f32, {in.tokens.count, in.Hv, v.size(2), in.K});
  run_op(kReference, args);
  return args.states.out;
}

// The identity for every sequence and head: [N, Hv, K, K].
Tensor identity_maps(Memory& memory, const DeltaInputs& in) {
  const Tensor identity = memory.make(DType::f32, {in.tokens.count, in.Hv, in.K, in.K});
  fill(identity, 0);
  for (int64_t i = 0; i < identity.size(0) * in.Hv; ++i)
    for (int64_t d = 0; d < in.K; ++d) set(identity, (i * in.K + d) * in.K + d, 1);
  return identity;
}

}  // namespace

std::unique_ptr<Problem> build_gated_delta_rule_summarize(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<GatedDeltaRuleSummarizeArgs>>();
  Memory& memory = problem->memory();
  const DeltaInputs in = make_delta_inputs(options, memory, rng, 70, 1);
  const int64_t N = in.tokens.count, T = in.tokens.total;
  problem->args = {in.k,
                   in.v,
                   in.gates,
                   in.l2_norm,
                   in.head_map,
                   in.tokens.sequences,
                   memory.make(DType::f32, {N, in.Hv, in.K, in.K}),
                   memory.make(DType::f32, {N, in.Hv, in.V, in.K})};
  const Bar bar = delta_bar(Staged::state, in.dtype, DType::f32, in.tokens.longest, in.correlated, N * in.Hv * in.K * in.K, true);
  problem->output(
      "p", [](GatedDeltaRuleSummarizeArgs& a) -> Tensor& { return a.p; }, bar);
  // p is a product of factors diag(alpha) (I - beta k k^T). Rounding a factor errs relative to diag(alpha), also where I - beta k k^T
  // nearly removes a direction, and f32 has no normal numbers below FLT_MIN. So errors of p are relative to the product of diag(alpha).
  problem->relative_to([in] {
    Memory own;
    DeltaInputs decay = in;
    decay.k = own.make(in.dtype, {in.k.size(0), in.k.size(1), in.K});
    fill(decay.k, 0);
    const Tensor no_values = own.make(in.dtype, {in.tokens.total, in.Hv, in.K});
    fill(no_values, 0);
    const Tensor p = final_states(own, decay, no_values, identity_maps(own, in));
    double sum = 0;
    for_each_offset(p, [&](int64_t offset) { sum += get(p, offset) * get(p, offset); });
    return std::max(std::sqrt(sum / static_cast<double>(p.elements())), double{FLT_MIN});
  });
  problem->output(
      "q", [](GatedDeltaRuleSummarizeArgs& a) -> Tensor& { return a.q; }, bar);
  problem->work = traffic(problem->args);
  problem->work.flops = 4.0 * static_cast<double>(T * in.Hv) * static_cast<double>(in.K * (in.K + in.V));
  problem->second = [in, bar](const GatedDeltaRuleSummarizeArgs& result) {
    Memory own;
    const Tensor zeros = own.make(DType::f32, {in.tokens.count, in.Hv, in.V, in.K});
    fill(zeros, 0);
    // p is the final state of a prefill from the identity (V = K) with v = 0.
    const Tensor no_values = own.make(in.dtype, {in.tokens.total, in.Hv, in.K});
    fill(no_values, 0);
    const Tensor q = final_states(own, in, in.v, zeros), p = final_states(own, in, no_values, identity_maps(own, in));
    return Findings{{"p, by prefilling the identity", relative_rms(result.p, p), bar.f32},
                    {"q, by prefilling zeros", relative_rms(result.q, q), bar.f32}};
  };
  return problem;
}

std::unique_ptr<Problem> build_gated_delta_rule_compose(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<GatedDeltaRuleComposeArgs>>();
  Memory& memory = problem->memory();
  const int64_t N = options.integer("N", 2, 0, kMaxSequences), Hv = options.integer("Hv", 2, 1),
                K = options.integer("Dk", 32, 1, 256);
  const int64_t V = options.integer("Dv", K, 1, 256);
  GatedDeltaRuleComposeArgs& args = problem->args;
  args.p1 = random_maps(memory, rng, N, Hv, K, K, true);
  args.q1 = random_maps(memory, rng, N, Hv, V, K, false);
  args.p2 = random_maps(memory, rng, N, Hv, K, K, true);
  args.q2 = random_maps(memory, rng, N, Hv, V, K, false);
  args.p = memory.make(DType::f32, {N, Hv, K, K});
  args.q = memory.make(DType::f32, {N, Hv, V, K});
  problem->output(
      "p", [](GatedDeltaRuleComposeArgs& a) -> Tensor& { return a.p; }, small_op(DType::f32, 0));
  problem->output(
      "q", [](GatedDeltaRuleComposeArgs& a) -> Tensor& { return a.q; }, small_op(DType::f32, 0));
  problem->work = traffic(args);
  problem->work.flops = 2.0 * static_cast<double>(N * Hv * K) * static_cast<double>(K * (K + V));
  problem->second = [p = problem.get()](const GatedDeltaRuleComposeArgs& result) {
    // q is the later map applied to q1 as a state. p is the later map, without its q, applied to p1 as a state.
    Memory own;
    const GatedDeltaRuleComposeArgs& given = p->args;
    const auto like = [&](const Tensor& t) { return own.make(DType::f32, {t.size(0), t.size(1), t.size(2), t.size(3)}); };
    const Tensor nothing = like(given.p2);
    fill(nothing, 0);
    GatedDeltaRuleApplyArgs to_q{given.p2, given.q2, {}}, to_p{given.p2, nothing, {}};
    to_q.states.in = given.q1;
    to_q.states.out = like(given.q1);
    to_p.states.in = given.p1;
    to_p.states.out = like(given.p1);
    run_op(kReference, to_q);
    run_op(kReference, to_p);
    return Findings{{"p, by applying", relative_rms(result.p, to_p.states.out), arithmetic()},
                    {"q, by applying", relative_rms(result.q, to_q.states.out), arithmetic()}};
  };
  return problem;
}

std::unique_ptr<Problem> build_gated_delta_rule_apply(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<GatedDeltaRuleApplyArgs>>();
  Memory& memory = problem->memory();
  Tokens sequences;
  sequences.count = options.integer("N", 2, 0, kMaxSequences);
  const int64_t N = sequences.count, Hv = options.integer("Hv", 2, 1), K = options.integer("Dk", 32, 1, 256);
  const int64_t V = options.integer("Dv", K, 1, 256);
  GatedDeltaRuleApplyArgs& args = problem->args;
  args.p = random_maps(memory, rng, N, Hv, K, K, true);
  args.q = random_maps(memory, rng, N, Hv, V, K, false);
  args.states = make_states(options, memory, rng, sequences, Hv, V, K);
  const Bar bar = small_op(args.states.out.dtype, args.states.out.elements());
  problem->output(
      "states.out", [](GatedDeltaRuleApplyArgs& a) -> Tensor& { return a.states.out; }, bar);
  problem->work = traffic(args);
  problem->work.flops = 2.0 * static_cast<double>(N * Hv * K) * static_cast<double>(K * V);
  problem->second = [p = problem.get(), bar, N, Hv, V, K](const GatedDeltaRuleApplyArgs& result) {
    Memory own;  // a state is the q of a map whose p is zero
    GatedDeltaRuleComposeArgs compose;
    compose.p1 = compose.p = own.make(DType::f32, {N, Hv, K, K});
    compose.p = own.make(DType::f32, {N, Hv, K, K});
    fill(compose.p1, 0);
    compose.q1 = initial_states(own, p->args.states, N, Hv, V, K);
    compose.p2 = p->args.p;
    compose.q2 = p->args.q;
    compose.q = own.make(DType::f32, {N, Hv, V, K});
    run_op(kReference, compose);
    return Findings{compare_states("states.out, by composing", result.states, compose.q, bar.f32, [](int64_t) { return true; })};
  };
  return problem;
}

}  // namespace weft::cases
