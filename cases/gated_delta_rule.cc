// Cases of gated_delta_rule_prefill, _decode and _replay.
#include <algorithm>
#include <type_traits>

#include "cases/builders.h"
#include "cases/delta_laws.h"
#include "common/state_slots.h"

namespace weft::cases {
namespace {

template <class Args>
void set_inputs(Args& args, const DeltaInputs& in) {
  args.q = in.q;
  args.k = in.k;
  args.v = in.v;
  args.gates = in.gates;
  args.l2_norm = in.l2_norm;
  args.head_map = in.head_map;
  args.sequences = in.tokens.sequences;
}

// The fields that prefill and decode share.
template <class Args>
DeltaInputs make_rule(OpProblem<Args>& problem, Options& options, Rng& rng, int64_t default_tokens) {
  Memory& memory = problem.memory();
  Args& args = problem.args;
  const DeltaInputs in = make_delta_inputs(options, memory, rng, default_tokens, 1);
  set_inputs(args, in);
  if (const double scale = options.real("scale", 0); scale != 0) args.scale = static_cast<float>(scale);
  args.o = memory.make(options.dtype("odtype", in.dtype), {in.tokens.total, in.Hv, in.V});
  args.states = make_states(options, memory, rng, in.tokens, in.Hv, in.V, in.K);
  poison_others(options, in, args.states);
  const auto bar = [&](Staged what, const Tensor& t) {
    constexpr bool kChunked = std::is_same_v<Args, GatedDeltaRulePrefillArgs>;
    return delta_bar(what, in.dtype, t.dtype, in.tokens.longest, in.correlated, t.elements(), kChunked);
  };
  problem.output(
      "o", [](Args& a) -> Tensor& { return a.o; }, bar(Staged::output, args.o));
  if (args.states.out.present())
    problem.output(
        "states.out", [](Args& a) -> Tensor& { return a.states.out; }, bar(Staged::state, args.states.out));
  problem.work = traffic(args);
  problem.work.flops = delta_flops(in);
  return in;
}

// A sequence must get the same bits in a batch and alone. `fresh` lies in one image of the case; this function makes a second
// image.
template <class Args>
Finding batch_independence(const Stream& stream, const OpProblem<Args>& problem, const Args& fresh, const Tokens& tokens) {
  const Image other(problem.memory(), placement_of(stream));
  const Args apart = problem.placed(other);
  run_op(stream, fresh);
  for (int64_t n = 0; n < tokens.count; ++n) run_op(stream, alone(apart, tokens, n));
  const bool same = same_bits(fresh.o, apart.o) && (!fresh.states.out.present() || same_bits(fresh.states.out, apart.states.out));
  return {"sequences alone get the same bits", same ? 0.0 : 1.0, 0};
}

// --- prefill ------------------------------------------------------------------------------------------------------------------

// A prefill of the first `split` tokens of the only sequence, then the rest from the resulting state, by prefill or by decode.
struct SplitCall {
  GatedDeltaRulePrefillArgs first, rest;
  GatedDeltaRuleDecodeArgs tail;
  bool decode_tail = false;
};

SplitCall split_call(const GatedDeltaRulePrefillArgs& args, const Tokens& tokens, int64_t split, bool decode_tail) {
  const int64_t T = tokens.total;
  const auto part = [&](int64_t begin, int64_t rows) {
    Tokens range = tokens;
    range.bounds = {begin, begin + rows};
    GatedDeltaRulePrefillArgs p = alone(args, range, 0);
    p.states = args.states;
    return p;
  };
  SplitCall call;
  call.decode_tail = decode_tail;
  call.first = part(0, split);
  call.rest = part(split, T - split);
  call.rest.states.in = args.states.out;
  if (args.states.out_slots.present()) call.rest.states.in_slots = args.states.out_slots;
  call.rest.states.has_initial = {};
  const GatedDeltaRulePrefillArgs& r = call.rest;
  call.tail = {r.q, r.k, r.v, r.gates, r.o, r.scale, r.l2_norm, r.head_map, r.sequences, r.states, {}};
  return call;
}

void split_prefill(OpProblem<GatedDeltaRulePrefillArgs>& problem, const Tokens& tokens, int64_t split, bool decode_tail) {
  problem.run_as = [=](const Stream& stream, const GatedDeltaRulePrefillArgs& args, Scratch scratch) {
    const SplitCall call = split_call(args, tokens, split, decode_tail);
    launch(stream, call.first, scratch);
    call.decode_tail ? launch(stream, call.tail, scratch) : launch(stream, call.rest, scratch);
  };
  problem.run_as_scratch = [=](const Stream& stream, const GatedDeltaRulePrefillArgs& args) {
    const SplitCall call = split_call(args, tokens, split, decode_tail);
    return std::max(scratch_bytes(stream, call.first),
                    call.decode_tail ? scratch_bytes(stream, call.tail) : scratch_bytes(stream, call.rest));
  };
}

}  // namespace

// More options: odtype, scale, checkpoints=64 (every so many tokens), schedule=fastest|invariant, split=S (two calls), tail=decode.
std::unique_ptr<Problem> build_gated_delta_rule_prefill(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<GatedDeltaRulePrefillArgs>>();
  GatedDeltaRulePrefillArgs& args = problem->args;
  const DeltaInputs in = make_rule(*problem, options, rng, 70);
  const Tokens& tokens = in.tokens;
  args.schedule =
      options.choice("schedule", "fastest", {"fastest", "invariant"}) == "invariant" ? Schedule::invariant : Schedule::fastest;
  args.checkpoint_every = options.integer("checkpoints", 0);
  if (args.checkpoint_every > 0) {
    const bool vk = args.states.layout == StateLayout::vk;
    args.checkpoints = problem->memory().make(
        DType::f32,
        {tokens.count, std::max<int64_t>(tokens.longest / args.checkpoint_every, 1), in.Hv, vk ? in.V : in.K, vk ? in.K : in.V});
    problem->output(
        "checkpoints", [](GatedDeltaRulePrefillArgs& a) -> Tensor& { return a.checkpoints; },
        delta_bar(Staged::state, in.dtype, DType::f32, tokens.longest, in.correlated, args.checkpoints.elements(), true));
    problem->work.written_bytes += bytes_of(args.checkpoints);
  }
  const int64_t split = options.integer("split", 0, 0, std::max<int64_t>(tokens.total, 0));
  const bool decode_tail = options.choice("tail", "prefill", {"prefill", "decode"}) == "decode";
  if (split > 0) {
    if (tokens.count != 1 || tokens.sequences.cu_seqlens.present() || !args.states.out.present() || args.checkpoint_every > 0)
      throw OptionError("gated_delta_rule_prefill: split needs one uniform sequence, states.out and no checkpoints");
    split_prefill(*problem, tokens, split, decode_tail);
  }
  const double o_bound = arithmetic(tokens.longest) + rounding(args.o.dtype, args.o.elements());
  const double state_bound = arithmetic(tokens.longest) + rounding(args.states.out.dtype, args.states.out.elements());
  problem->second = [p = problem.get(), in, o_bound, state_bound](const GatedDeltaRulePrefillArgs& result) {
    return by_chunk_stages(in, p->args.states, p->args.scale, result.o, result.states, o_bound, state_bound);
  };
  problem->more_laws = [p = problem.get(), tokens, split, decode_tail](const Stream& stream,
                                                                       const GatedDeltaRulePrefillArgs& fresh) {
    Findings laws;
    // The reference keeps the state in double within a call. Only its invariant schedule rounds the state every 64 tokens.
    const bool invariant = stream.backend != Backend::reference || fresh.schedule == Schedule::invariant;
    if (invariant && split > 0 && split % 64 == 0 && !decode_tail && fresh.states.out.dtype == DType::f32) {
      const Image other(p->memory(), placement_of(stream));
      const auto whole = p->placed(other);
      run_op(stream, whole);
      Memory lent;
      const size_t bytes = p->run_as_scratch(stream, fresh);
      p->run_as(stream, fresh, {lent.bytes(bytes), bytes});
      const bool same = same_bits(fresh.o, whole.o) && same_bits(fresh.states.out, whole.states.out);
      laws.push_back({"continuation at a multiple of 64 has the same bits", same ? 0.0 : 1.0, 0});
    } else if (tokens.count > 1 && tokens.count < 16 && !fresh.checkpoints.present()) {
      laws.push_back(batch_independence(stream, *p, fresh, tokens));
    }
    return laws;
  };
  return problem;
}

// More options: odtype, scale, record=1.
std::unique_ptr<Problem> build_gated_delta_rule_decode(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<GatedDeltaRuleDecodeArgs>>();
  GatedDeltaRuleDecodeArgs& args = problem->args;
  const DeltaInputs in = make_rule(*problem, options, rng, 1);
  const Tokens& tokens = in.tokens;
  if (options.flag("record")) {
    Memory& memory = problem->memory();
    args.record.k = memory.make(DType::f32, {tokens.total, in.Hk, in.K});
    args.record.delta = memory.make(DType::f32, {tokens.total, in.Hv, in.V});
    args.record.g =
        in.g.rank == 3 ? memory.make(DType::f32, {tokens.total, in.Hv, in.K}) : memory.make(DType::f32, {tokens.total, in.Hv});
    const Bar bar{arithmetic(tokens.longest), arithmetic(tokens.longest)};
    problem->output(
        "record.k", [](GatedDeltaRuleDecodeArgs& a) -> Tensor& { return a.record.k; }, bar);
    problem->output(
        "record.delta", [](GatedDeltaRuleDecodeArgs& a) -> Tensor& { return a.record.delta; }, bar);
    problem->output(
        "record.g", [](GatedDeltaRuleDecodeArgs& a) -> Tensor& { return a.record.g; }, bar);
  }
  const double o_bound = arithmetic(tokens.longest) + rounding(args.o.dtype, args.o.elements());
  const double state_bound = arithmetic(tokens.longest) + rounding(args.states.out.dtype, args.states.out.elements());
  problem->second = [p = problem.get(), in, o_bound, state_bound](const GatedDeltaRuleDecodeArgs& result) {
    return by_chunk_stages(in, p->args.states, p->args.scale, result.o, result.states, o_bound, state_bound);
  };
  problem->more_laws = [p = problem.get(), tokens](const Stream& stream, const GatedDeltaRuleDecodeArgs& fresh) {
    if (tokens.count < 2 || tokens.count > 15) return Findings{};
    return Findings{batch_independence(stream, *p, fresh, tokens)};
  };
  return problem;
}

namespace {

// A decode that records, as the source of a replay.
GatedDeltaRuleDecodeArgs recording(Memory& memory, const DeltaInputs& in, const DeltaStates& states, DeltaRecord record) {
  GatedDeltaRuleDecodeArgs args;
  set_inputs(args, in);
  args.states = states;
  args.states.out = args.states.out_slots = {};
  args.o = memory.make(DType::f32, {in.tokens.total, in.Hv, in.V});
  args.record = record;
  return args;
}

// Decodes only the accepted tokens of every sequence, into `pool`.
void decode_prefixes(const Stream& stream, const GatedDeltaRuleDecodeArgs& source, const Tokens& tokens, const Tensor& accepted,
                     const DeltaStates& states, const Tensor& pool) {
  for (int64_t n = 0; n < tokens.count; ++n) {
    Tokens prefix = tokens;
    const int64_t rows = std::min<int64_t>(std::max<int64_t>(static_cast<int64_t>(get(accepted, n)), 0), tokens.length(n));
    prefix.bounds[static_cast<size_t>(n) + 1] = prefix.bounds[static_cast<size_t>(n)] + rows;
    GatedDeltaRuleDecodeArgs whole = source;
    whole.record = {};
    whole.states = states;
    whole.states.out = pool;
    run_op(stream, alone(whole, prefix, n));
  }
}

}  // namespace

// The record of a decode made by the reference. More options: accepted=0:3:1 (per sequence, repeated), default every token.
std::unique_ptr<Problem> build_gated_delta_rule_replay(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<GatedDeltaRuleReplayArgs>>();
  Memory& memory = problem->memory();
  GatedDeltaRuleReplayArgs& args = problem->args;
  const DeltaInputs in = make_delta_inputs(options, memory, rng, 4, 2);
  const Tokens& tokens = in.tokens;
  args.states = make_states(options, memory, rng, tokens, in.Hv, in.V, in.K);
  args.head_map = in.head_map;
  args.sequences = tokens.sequences;
  const std::vector<int64_t> accepted = options.list("accepted");
  std::vector<int64_t> counts;
  for (int64_t n = 0; n < tokens.count; ++n)
    counts.push_back(accepted.empty() ? tokens.length(n) : accepted[static_cast<size_t>(n) % accepted.size()]);
  args.accepted = memory.indices(counts);
  args.record = {
      memory.make(DType::f32, {tokens.total, in.Hk, in.K}), memory.make(DType::f32, {tokens.total, in.Hv, in.V}),
      in.g.rank == 3 ? memory.make(DType::f32, {tokens.total, in.Hv, in.K}) : memory.make(DType::f32, {tokens.total, in.Hv})};
  const GatedDeltaRuleDecodeArgs source = recording(memory, in, args.states, args.record);
  run_op(kReference, source);
  const Tensor& out = args.states.out;
  const Bar bar{arithmetic(tokens.longest) + rounding(out.dtype, out.elements()),
                arithmetic(tokens.longest) + rounding(out.dtype, out.elements())};
  problem->output(
      "states.out", [](GatedDeltaRuleReplayArgs& a) -> Tensor& { return a.states.out; }, bar);
  problem->work = traffic(args);
  problem->work.flops = 4.0 * static_cast<double>(tokens.total * in.Hv * in.K * in.V);
  problem->second = [p = problem.get(), in, source, bar](const GatedDeltaRuleReplayArgs& result) {
    Memory own;
    const GatedDeltaRuleReplayArgs& given = p->args;
    const Tensor pool = own.make(
        DType::f32, {given.states.out.size(0), given.states.out.size(1), given.states.out.size(2), given.states.out.size(3)});
    decode_prefixes(kReference, source, in.tokens, given.accepted, given.states, pool);
    double worst = 0;
    for (int64_t n = 0; n < in.tokens.count; ++n)
      if (const int64_t slot = state_slots(given.states, n).out; slot >= 0)
        worst = std::max(worst,
                         relative_rms(slot_view(result.states.out, slot, StateLayout::vk), slot_view(pool, slot, StateLayout::vk)));
    return Findings{{"states.out, by decoding the prefix", worst, bar.f32}};
  };
  // Bit-equality on the backend itself, from a record that the backend makes.
  problem->more_laws = [p = problem.get(), in, source](const Stream& stream, const GatedDeltaRuleReplayArgs& fresh) {
    const DeltaStates& states = p->args.states;
    if (states.in.dtype != DType::f32 || states.out.dtype != DType::f32) return Findings{};
    if (!supports(stream, source)) return Findings{};
    run_op(stream, [&] {  // overwrites the record in the image
      GatedDeltaRuleDecodeArgs own = source;
      own.record = fresh.record;
      return own;
    }());
    Memory memory_of_law;
    const Tensor pool =
        memory_of_law.make(DType::f32, {states.out.size(0), states.out.size(1), states.out.size(2), states.out.size(3)});
    decode_prefixes(stream, source, in.tokens, p->args.accepted, states, pool);
    run_op(stream, fresh);
    bool same = true;
    for (int64_t n = 0; n < in.tokens.count; ++n)
      if (const int64_t slot = state_slots(states, n).out; slot >= 0)
        same &= same_bits(slot_view(fresh.states.out, slot, StateLayout::vk), slot_view(pool, slot, StateLayout::vk));
    return Findings{{"replay has the bits of decoding the prefix", same ? 0.0 : 1.0, 0}};
  };
  return problem;
}

}  // namespace weft::cases
