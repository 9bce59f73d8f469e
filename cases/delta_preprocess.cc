// Cases of delta_gates, short_conv, l2_norm and gated_rms_norm.
#include "cases/builders.h"
#include "cases/delta_inputs.h"

namespace weft::cases {
namespace {

// short_conv against itself called with one token at a time: the state carried between calls must give the same y.
Findings conv_by_tokens(const OpProblem<ShortConvArgs>& problem, const Tokens& tokens, const ShortConvArgs& result) {
  const ShortConvArgs& given = problem.args;
  Memory memory;
  const int64_t C = given.x.size(1);
  const Tensor y = memory.make(DType::f32, {tokens.total, C});
  fill(y, 0);
  const int64_t L = given.state_in.size(1), W = given.weight.size(1);
  for (int64_t n = 0; n < tokens.count; ++n) {
    const int64_t slot = given.state_in_slots.present() ? static_cast<int64_t>(get(given.state_in_slots, n)) : n;
    if (slot < 0 || slot >= given.state_in.size(0)) continue;
    const Tensor state = memory.make(DType::f32, {1, L, C});
    copy(rows_of(given.state_in, slot, 1), state);
    if (given.has_initial.present() && get(given.has_initial, n) == 0) fill(state, 0);
    if (given.state_offsets.present()) {  // a rollback: rows behind the history that the offset names do not count
      const int64_t shift =
          L - (W - 1) - std::min(std::max<int64_t>(static_cast<int64_t>(get(given.state_offsets, n)), 0), L - (W - 1));
      const Tensor before = memory.make(DType::f32, {1, L, C});
      copy(state, before);
      for (int64_t l = 0; l < L; ++l)
        for (int64_t c = 0; c < C; ++c) set(state, l * C + c, l < shift ? 0 : get(before, (l - shift) * C + c));
    }
    for (int64_t t = 0; t < tokens.length(n); ++t) {
      ShortConvArgs one = given;
      one.x = rows_of(given.x, tokens.begin(n) + t, 1);
      one.y = rows_of(y, tokens.begin(n) + t, 1);
      one.sequences = Sequences::uniform(1);
      one.state_in = one.state_out = state;
      one.state_in_slots = one.state_out_slots = one.state_offsets = one.has_initial = {};
      run_op(kReference, one);
    }
  }
  double worst = 0;
  for (int64_t n = 0; n < tokens.count; ++n)
    if (const int64_t rows = tokens.length(n); rows > 0)
      worst = std::max(worst, relative_rms(rows_of(result.y, tokens.begin(n), rows), rows_of(y, tokens.begin(n), rows)));
  return {{"y, token by token", worst, arithmetic() + rounding(given.y.dtype, 0)}};
}

}  // namespace

std::unique_ptr<Problem> build_delta_gates(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<DeltaGatesArgs>>();
  Memory& memory = problem->memory();
  DeltaGatesArgs& args = problem->args;
  const int64_t T = options.integer("T", 17), Hv = options.integer("Hv", 4, 1), K = options.integer("Dk", 16, 1);
  const DType dtype = options.dtype("dtype", DType::f32);
  const bool per_channel = options.flag("kda"), with_beta = options.flag("beta", true);
  args.double_beta = options.flag("double_beta");
  const double reach = options.real("reach", 4);  // spread of the logits: 40 exceeds softplus' threshold and saturates sigmoid
  const bool padded = options.flag("padded");
  const auto make = [&](DType type) {
    if (per_channel) return padded ? memory.make_padded(type, {T, Hv, K}, 3) : memory.make(type, {T, Hv, K});
    return padded ? memory.make_padded(type, {T, Hv}, 3) : memory.make(type, {T, Hv});
  };
  args.a = make(dtype);
  args.g = make(DType::f32);
  args.a_log = memory.make(DType::f32, {Hv});
  args.dt_bias = per_channel ? memory.make(DType::f32, {Hv, K}) : memory.make(DType::f32, {Hv});
  fill_uniform(args.a, rng, -reach, reach);
  fill_uniform(args.a_log, rng, -2, 2.8);
  fill_uniform(args.dt_bias, rng, -6, 2);
  if (with_beta) {
    args.b = memory.make(dtype, {T, Hv});
    args.beta = memory.make(DType::f32, {T, Hv});
    fill_uniform(args.b, rng, -reach, reach);
    problem->output(
        "beta", [](DeltaGatesArgs& a) -> Tensor& { return a.beta; }, small_op(DType::f32, args.beta.elements()));
  }
  problem->output(
      "g", [](DeltaGatesArgs& a) -> Tensor& { return a.g; }, small_op(DType::f32, args.g.elements()));
  problem->work = traffic(args);
  problem->work.flops = 8.0 * static_cast<double>(args.a.elements());
  return problem;
}

std::unique_ptr<Problem> build_short_conv(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<ShortConvArgs>>();
  Memory& memory = problem->memory();
  ShortConvArgs& args = problem->args;
  const Tokens tokens = make_tokens(options, memory, 9, 1);
  const int64_t C = options.integer("C", 24, 1), W = options.integer("W", 4, 2, 8), N = tokens.count;
  const int64_t L = options.integer("L", W - 1, W - 1);
  const DType dtype = options.dtype("dtype", DType::f32);
  const std::string state = options.choice("state", "inplace", {"inplace", "separate", "none", "out"});
  const DType state_dtype = options.dtype("state_type", dtype);
  const bool bias = options.flag("bias"), inplace = options.flag("inplace"), padded = options.flag("padded");
  const std::string slots = options.choice("slots", "plain", {"plain", "permuted", "inert"});
  const std::vector<int64_t> offsets = options.list("offsets");
  args.activation = options.choice("activation", "silu", {"silu", "none"}) == "silu" ? Activation::silu : Activation::none;
  args.sequences = tokens.sequences;
  args.x = padded ? memory.make_padded(dtype, {tokens.total, C}, 5) : memory.make(dtype, {tokens.total, C});
  args.y = inplace ? args.x : memory.make(options.dtype("odtype", dtype), {tokens.total, C});
  args.weight = memory.make(dtype, {C, W});
  fill_normal(args.x, rng);
  fill_normal(args.weight, rng, 0.5);
  if (bias) {
    args.bias = memory.make(dtype, {C});
    fill_normal(args.bias, rng, 0.3);
  }
  const int64_t pool = slots == "plain" ? N : N + 2;
  if (state == "inplace" || state == "separate") {
    args.state_in = memory.make(state_dtype, {pool, L, C});
    fill_normal(args.state_in, rng);
  }
  if (state == "inplace") args.state_out = args.state_in;
  if (state == "separate" || state == "out") args.state_out = memory.make(state_dtype, {pool, L, C});
  if (slots != "plain") {
    std::vector<int64_t> order;
    for (int64_t n = 0; n < N; ++n) order.push_back(slots == "inert" && n % 2 ? (n % 4 == 1 ? -1 : pool + 3) : (n + 1) % pool);
    args.state_in_slots = memory.indices(order);
  }
  if (!offsets.empty()) {
    std::vector<int64_t> rows;
    for (int64_t n = 0; n < N; ++n) rows.push_back(offsets[static_cast<size_t>(n) % offsets.size()]);
    args.state_offsets = memory.indices(rows);
  }
  if (options.flag("fresh")) {
    std::vector<int64_t> flags;
    for (int64_t n = 0; n < N; ++n) flags.push_back(n % 2);
    args.has_initial = memory.indices(flags);
  }
  problem->output(
      "y", [](ShortConvArgs& a) -> Tensor& { return a.y; }, small_op(args.y.dtype, args.y.elements()));
  // State rows are copies of inputs: exact, except where a narrower dtype rounds them.
  if (args.state_out.present())
    problem->output(
        "state_out", [](ShortConvArgs& a) -> Tensor& { return a.state_out; },
        state_dtype == dtype || state_dtype == DType::f32 ? Bar{0, 0} : small_op(state_dtype, args.state_out.elements()));
  problem->work = traffic(args);
  problem->work.flops = 2.0 * static_cast<double>(W) * static_cast<double>(args.x.elements());
  if (args.state_in.present())
    problem->second = [p = problem.get(), tokens](const ShortConvArgs& result) { return conv_by_tokens(*p, tokens, result); };
  return problem;
}

std::unique_ptr<Problem> build_l2_norm(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<L2NormArgs>>();
  Memory& memory = problem->memory();
  L2NormArgs& args = problem->args;
  const int64_t T = options.integer("T", 7), H = options.integer("H", 3, 1), D = options.integer("D", 64, 1);
  const DType dtype = options.dtype("dtype", DType::f32);
  const bool padded = options.flag("padded"), inplace = options.flag("inplace");
  args.eps = static_cast<float>(options.real("eps", 1e-6));
  const double scale = options.real("scale", 1);  // of the rows; 1e-4 makes eps matter, 0 gives zero rows
  args.x = padded ? memory.make_padded(dtype, {T, H, D}, 4) : memory.make(dtype, {T, H, D});
  args.y = inplace ? args.x : memory.make(dtype, {T, H, D});
  fill_normal(args.x, rng, scale);
  problem->output(
      "y", [](L2NormArgs& a) -> Tensor& { return a.y; }, small_op(dtype, args.y.elements()));
  problem->work = traffic(args);
  problem->work.flops = 3.0 * static_cast<double>(args.x.elements());
  return problem;
}

std::unique_ptr<Problem> build_gated_rms_norm(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<GatedRmsNormArgs>>();
  Memory& memory = problem->memory();
  GatedRmsNormArgs& args = problem->args;
  const int64_t T = options.integer("T", 7), H = options.integer("Hv", 3, 1), D = options.integer("Dv", 64, 1);
  const DType dtype = options.dtype("dtype", DType::f32);
  const std::string inplace = options.choice("inplace", "none", {"none", "x", "z"});
  args.gate = options.choice("gate", "silu", {"silu", "sigmoid"}) == "silu" ? Gate::silu : Gate::sigmoid;
  const bool padded = options.flag("padded");
  const auto make = [&] { return padded ? memory.make_padded(dtype, {T, H, D}, 4) : memory.make(dtype, {T, H, D}); };
  args.x = make();
  args.z = make();
  args.weight = memory.make(dtype, {D});
  args.y = inplace == "x" ? args.x : inplace == "z" ? args.z : make();
  fill_normal(args.x, rng);
  fill_normal(args.z, rng);
  fill_normal(args.weight, rng, 0.2, 1);
  problem->output(
      "y", [](GatedRmsNormArgs& a) -> Tensor& { return a.y; }, small_op(dtype, args.y.elements()));
  problem->work = traffic(args);
  problem->work.flops = 8.0 * static_cast<double>(args.x.elements());
  return problem;
}

}  // namespace weft::cases
