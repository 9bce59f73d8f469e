// Cases of the chunk stages: chunk_cumsum, chunk_kkt, chunk_tri_inverse, chunk_wu, chunk_state, chunk_output.
#include "cases/builders.h"
#include "cases/chunk_stages.h"
#include "cases/delta_inputs.h"

namespace weft::cases {
namespace {

// The inputs of a stage, with the results of the stages before it.
struct Setting {
  DeltaInputs in;
  ChunkInputs chunk;
  ChunkResults before;
  DType out = DType::f32;  // of staged tensors
};

Setting make_setting(Options& options, Memory& memory, Rng& rng, std::optional<Stage> before) {
  Setting s;
  s.in = make_delta_inputs(options, memory, rng, 70, 1);
  s.out = options.dtype("out_type", s.in.dtype);
  s.chunk = {s.in.q,
             s.in.k,
             s.in.v,
             s.in.g,
             s.in.beta,
             {},
             s.in.tokens.sequences,
             s.in.head_map,
             std::nullopt,
             options.integer("chunk", 64, 16, 64)};
  if (options.flag("initial")) {
    s.chunk.state_in = memory.make(DType::f32, {s.in.tokens.count, s.in.Hv, s.in.V, s.in.K});
    fill_normal(s.chunk.state_in, rng, 0.5);
  }
  if (before) s.before = run_stages(memory, s.chunk, s.in.dtype, *before);
  return s;
}

// Relative RMS of (I + a) x - I over all chunks and heads; a and x are [T, Hv, C].
double inverse_residual(const Tensor& a, const Tensor& x, const Tokens& tokens, int64_t C) {
  double error = 0, norm = 0;
  const int64_t Hv = a.size(1);
  for (int64_t n = 0; n < tokens.count; ++n)
    for (int64_t start = 0; start < tokens.length(n); start += C)
      for (int64_t h = 0; h < Hv; ++h) {
        const int64_t rows = std::min(C, tokens.length(n) - start), first = tokens.begin(n) + start;
        const auto at = [&](const Tensor& t, int64_t i, int64_t j) {
          return get(t, (first + i) * t.stride(0) + h * t.stride(1) + j);
        };
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t j = 0; j < rows; ++j) {
            double sum = at(x, i, j);
            for (int64_t m = 0; m < i; ++m) sum += at(a, i, m) * at(x, m, j);
            error += (sum - (i == j)) * (sum - (i == j));
            norm += i == j;
          }
      }
  return norm > 0 ? std::sqrt(error / norm) : 0;
}

// The whole rule over the same tokens: a second formulation of the last two stages.
struct Whole {
  Tensor o, state;
};
Whole whole_rule(Memory& memory, const Setting& s) {
  GatedDeltaRulePrefillArgs args;
  args.q = s.in.q;
  args.k = s.in.k;
  args.v = s.in.v;
  args.gates.g = s.in.g;
  args.gates.beta = s.in.beta;
  args.head_map = s.in.head_map;
  args.sequences = s.in.tokens.sequences;
  args.o = memory.make(DType::f32, {s.in.tokens.total, s.in.Hv, s.in.V});
  fill(args.o, 0);
  args.states.in = s.chunk.state_in;
  args.states.out = memory.make(DType::f32, {s.in.tokens.count, s.in.Hv, s.in.V, s.in.K});
  run_op(kReference, args);
  return {args.o, args.states.out};
}

double tokens_heads(const Setting& s) { return static_cast<double>(s.in.tokens.total * s.in.Hv); }
Bar f32_bar(int64_t chunk) { return {arithmetic(chunk), arithmetic(chunk)}; }

}  // namespace

std::unique_ptr<Problem> build_chunk_cumsum(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<ChunkCumsumArgs>>();
  const Setting s = make_setting(options, problem->memory(), rng, std::nullopt);
  const Tensor out = options.flag("inplace")
                         ? s.in.g
                         : problem->memory().make(DType::f32, {s.in.g.sizes.begin(), s.in.g.sizes.begin() + s.in.g.rank});
  problem->args = {s.in.g, out, s.in.tokens.sequences, s.chunk.chunk};
  problem->output(
      "g_cumsum", [](ChunkCumsumArgs& a) -> Tensor& { return a.g_cumsum; }, f32_bar(1));
  problem->work = traffic(problem->args);
  problem->work.flops = static_cast<double>(s.in.g.elements());
  return problem;
}

std::unique_ptr<Problem> build_chunk_kkt(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<ChunkKktArgs>>();
  const Setting s = make_setting(options, problem->memory(), rng, Stage::cumsum);
  const int64_t C = s.chunk.chunk;
  problem->args = {s.in.k,
                   s.in.beta,
                   s.before.g_cumsum,
                   problem->memory().make(DType::f32, {s.in.tokens.total, s.in.Hv, C}),
                   s.in.tokens.sequences,
                   C,
                   s.in.head_map};
  problem->output(
      "a", [](ChunkKktArgs& a) -> Tensor& { return a.a; }, f32_bar(1));
  problem->work = traffic(problem->args);
  problem->work.flops = tokens_heads(s) * static_cast<double>(C * s.in.K);  // the lower half of 2 C K
  return problem;
}

std::unique_ptr<Problem> build_chunk_tri_inverse(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<ChunkTriInverseArgs>>();
  const Setting s = make_setting(options, problem->memory(), rng, Stage::kkt);
  const int64_t C = s.chunk.chunk;
  const Tensor out = options.flag("inplace") ? s.before.a : problem->memory().make(DType::f32, {s.in.tokens.total, s.in.Hv, C});
  problem->args = {s.before.a, out, s.in.tokens.sequences, C};
  problem->output(
      "a_inv", [](ChunkTriInverseArgs& a) -> Tensor& { return a.a_inv; }, f32_bar(C));
  problem->work = traffic(problem->args);
  problem->work.flops = tokens_heads(s) * static_cast<double>(C * C) / 3;
  problem->second = [p = problem.get(), tokens = s.in.tokens, C](const ChunkTriInverseArgs& result) {
    return Findings{{"(I + a) a_inv", inverse_residual(p->args.a, result.a_inv, tokens, C), arithmetic(C)}};
  };
  return problem;
}

std::unique_ptr<Problem> build_chunk_wu(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<ChunkWuArgs>>();
  Memory& memory = problem->memory();
  const Setting s = make_setting(options, memory, rng, Stage::inverse);
  const int64_t T = s.in.tokens.total, C = s.chunk.chunk;
  problem->args = {s.in.k,
                   s.in.v,
                   s.in.beta,
                   s.before.g_cumsum,
                   s.before.a_inv,
                   memory.make(s.out, {T, s.in.Hv, s.in.K}),
                   memory.make(s.out, {T, s.in.Hv, s.in.V}),
                   s.in.tokens.sequences,
                   C,
                   s.in.head_map};
  const auto bar = [&](const Tensor& t) { return staged_wu_bar(s.in.dtype, s.out, C, s.in.correlated, t.elements()); };
  problem->output(
      "w", [](ChunkWuArgs& a) -> Tensor& { return a.w; }, bar(problem->args.w));
  problem->output(
      "u", [](ChunkWuArgs& a) -> Tensor& { return a.u; }, bar(problem->args.u));
  problem->work = traffic(problem->args);
  problem->work.flops = tokens_heads(s) * static_cast<double>(C * (s.in.K + s.in.V));
  return problem;
}

std::unique_ptr<Problem> build_chunk_state(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<ChunkStateArgs>>();
  Memory& memory = problem->memory();
  const Setting s = make_setting(options, memory, rng, Stage::wu);
  const int64_t T = s.in.tokens.total, N = s.in.tokens.count, Hv = s.in.Hv, V = s.in.V, K = s.in.K, C = s.chunk.chunk;
  ChunkStateArgs& args = problem->args;
  args = {s.in.k,
          s.before.w,
          s.before.u,
          s.before.g_cumsum,
          s.chunk.state_in,
          memory.make(s.out, {max_chunks(T, s.in.tokens.sequences, C), Hv, V, K}),
          memory.make(s.out, {T, Hv, V}),
          {},
          s.in.tokens.sequences,
          C,
          s.in.head_map};
  if (options.flag("final", true))
    args.state_out = options.flag("inplace") ? args.state_in : memory.make(DType::f32, {N, Hv, V, K});
  const auto bar = [&](const Tensor& t) {
    return delta_bar(Staged::state, s.in.dtype, t.dtype, s.in.tokens.longest, s.in.correlated, t.elements());
  };
  problem->output(
      "h", [](ChunkStateArgs& a) -> Tensor& { return a.h; }, bar(args.h));
  problem->output(
      "v_new", [](ChunkStateArgs& a) -> Tensor& { return a.v_new; }, bar(args.v_new));
  if (args.state_out.present())
    problem->output(
        "state_out", [](ChunkStateArgs& a) -> Tensor& { return a.state_out; }, bar(args.state_out));
  problem->work = traffic(args);
  problem->work.flops = tokens_heads(s) * 4.0 * static_cast<double>(K * V);
  if (s.in.dtype == DType::f32 && args.state_out.present())  // 16-bit w and u are rounded inputs that the whole rule does not have
    problem->second = [s, bound = bar(args.state_out).f32](const ChunkStateArgs& result) {
      Memory own;
      return Findings{{"state_out, by the whole rule", relative_rms(result.state_out, whole_rule(own, s).state), bound}};
    };
  return problem;
}

std::unique_ptr<Problem> build_chunk_output(Options& options, Rng& rng) {
  auto problem = std::make_unique<OpProblem<ChunkOutputArgs>>();
  Memory& memory = problem->memory();
  const Setting s = make_setting(options, memory, rng, Stage::state);
  const int64_t T = s.in.tokens.total;
  ChunkOutputArgs& args = problem->args;
  args = {s.in.q,
          s.in.k,
          s.before.v_new,
          s.before.h,
          s.before.g_cumsum,
          memory.make(s.out, {T, s.in.Hv, s.in.V}),
          std::nullopt,
          s.in.tokens.sequences,
          s.chunk.chunk,
          s.in.head_map};
  const Bar bar = delta_bar(Staged::output, s.in.dtype, s.out, s.in.tokens.longest, s.in.correlated, args.o.elements());
  problem->output(
      "o", [](ChunkOutputArgs& a) -> Tensor& { return a.o; }, bar);
  problem->work = traffic(args);
  problem->work.flops = tokens_heads(s) * static_cast<double>(2 * s.in.K * s.in.V + s.chunk.chunk * (s.in.K + s.in.V));
  if (s.in.dtype == DType::f32)
    problem->second = [s, bar, p = problem.get()](const ChunkOutputArgs& result) {
      Memory own;
      const Tensor whole = whole_rule(own, s).o;
      double error = 0;
      for (int64_t n = 0; n < s.in.tokens.count; ++n)
        if (const int64_t rows = s.in.tokens.length(n); rows > 0)
          error = std::max(error,
                           relative_rms(rows_of(result.o, s.in.tokens.begin(n), rows), rows_of(whole, s.in.tokens.begin(n), rows)));
      return Findings{{"o, by the whole rule", error, bar.f32}};
    };
  return problem;
}

}  // namespace weft::cases
