// Golden cases of the delta ops.
#include <algorithm>
#include <type_traits>

#include "cases/builders.h"
#include "cases/golden_builders.h"

namespace weft::cases {
namespace {

Bar f32_bar(const GoldenReader& file) { return {file.tolerance(), file.tolerance()}; }

// Declares an output whose right answer is a tensor of the file.
template <class Args>
void expect(OpProblem<Args>& problem, const GoldenReader& file, const char* name, typename OpProblem<Args>::Member member,
            const char* wanted, Bar bar) {
  const Tensor want = file.floats(wanted);
  member(problem.args) = problem.memory().make(DType::f32, file.shape(wanted));
  problem.output(name, member, bar);
  problem.golden_answer(want, file.tolerance());
}

// q, k, v, gates, sequences and states of a prefill or decode.
template <class Args>
Bar read_rule(OpProblem<Args>& problem, const GoldenReader& file, bool bf16) {
  Args& args = problem.args;
  const DType dtype = bf16 ? DType::bf16 : DType::f32;
  if (bf16 && !file.exact_in_bf16({"q", "k", "v"})) throw std::runtime_error("golden file: q, k, v are not bf16 numbers");
  args.q = file.floats("q", dtype);
  args.k = file.floats("k", dtype);
  args.v = file.floats("v", dtype);
  args.gates.g = file.floats("g");
  args.gates.beta = file.floats("beta");
  args.scale = static_cast<float>(file.number("scale"));
  args.l2_norm = file.flag("l2_norm");
  args.head_map = file.head_map();
  args.sequences = file.sequences();
  args.states.in = file.floats("state_in");
  const Bar bar = delta_bar(Staged::output, dtype, DType::f32, args.sequences.max_tokens, true, args.v.elements(),
                            std::is_same_v<Args, GatedDeltaRulePrefillArgs>);
  expect(
      problem, file, "o", [](Args& a) -> Tensor& { return a.o; }, "o", bar);
  expect(
      problem, file, "states.out", [](Args& a) -> Tensor& { return a.states.out; }, "state_out", bar);
  problem.work = traffic(args);
  return bar;
}

// What every chunk stage reads from a delta_chunk file.
struct Stages {
  Sequences sequences;
  int64_t chunk;
  HeadMap head_map;
  Bar bar;
};
Stages read_stages(const GoldenReader& file) {
  const auto chunk = static_cast<int64_t>(file.number("chunk"));
  return {file.sequences(), chunk, file.head_map(), {arithmetic(chunk), arithmetic(chunk)}};
}

}  // namespace

std::unique_ptr<Problem> golden_delta_gates(const std::string& name, GoldenVariant) {
  auto problem = std::make_unique<OpProblem<DeltaGatesArgs>>();
  const GoldenReader file(name, problem->memory());
  problem->args = {file.floats("a"),        file.floats("b"), file.floats("A_log"), file.floats("dt_bias"), {}, {},
                   file.flag("double_beta")};
  expect(
      *problem, file, "g", [](DeltaGatesArgs& a) -> Tensor& { return a.g; }, "g", small_op(DType::f32, 0));
  expect(
      *problem, file, "beta", [](DeltaGatesArgs& a) -> Tensor& { return a.beta; }, "beta", small_op(DType::f32, 0));
  return problem;
}

std::unique_ptr<Problem> golden_short_conv(const std::string& name, GoldenVariant) {
  auto problem = std::make_unique<OpProblem<ShortConvArgs>>();
  const GoldenReader file(name, problem->memory());
  ShortConvArgs& args = problem->args;
  args.x = file.floats("x");
  args.weight = file.floats("weight");
  args.bias = file.floats("bias");
  args.state_in = file.floats("state_in");
  args.sequences = file.sequences();
  args.activation = file.text("activation", "none") == "silu" ? Activation::silu : Activation::none;
  expect(
      *problem, file, "y", [](ShortConvArgs& a) -> Tensor& { return a.y; }, "y", small_op(DType::f32, 0));
  expect(*problem, file, "state_out", [](ShortConvArgs& a) -> Tensor& { return a.state_out; }, "state_out", {0, 0});
  return problem;
}

std::unique_ptr<Problem> golden_l2_norm(const std::string& name, GoldenVariant) {
  auto problem = std::make_unique<OpProblem<L2NormArgs>>();
  const GoldenReader file(name, problem->memory());
  problem->args = {file.floats("x"), {}, static_cast<float>(file.number("eps"))};
  expect(
      *problem, file, "y", [](L2NormArgs& a) -> Tensor& { return a.y; }, "y", small_op(DType::f32, 0));
  return problem;
}

std::unique_ptr<Problem> golden_gated_rms_norm(const std::string& name, GoldenVariant) {
  auto problem = std::make_unique<OpProblem<GatedRmsNormArgs>>();
  const GoldenReader file(name, problem->memory());
  const Gate gate = file.text("gate", "silu") == "sigmoid" ? Gate::sigmoid : Gate::silu;
  problem->args = {file.floats("x"), file.floats("z"), file.floats("weight"), {}, static_cast<float>(file.number("eps")), gate};
  expect(
      *problem, file, "y", [](GatedRmsNormArgs& a) -> Tensor& { return a.y; }, "y", small_op(DType::f32, 0));
  return problem;
}

std::unique_ptr<Problem> golden_chunk_cumsum(const std::string& name, GoldenVariant) {
  auto problem = std::make_unique<OpProblem<ChunkCumsumArgs>>();
  const GoldenReader file(name, problem->memory());
  const Stages s = read_stages(file);
  problem->args = {file.floats("g"), {}, s.sequences, s.chunk};
  expect(
      *problem, file, "g_cumsum", [](ChunkCumsumArgs& a) -> Tensor& { return a.g_cumsum; }, "g_cumsum", small_op(DType::f32, 0));
  return problem;
}

std::unique_ptr<Problem> golden_chunk_kkt(const std::string& name, GoldenVariant) {
  auto problem = std::make_unique<OpProblem<ChunkKktArgs>>();
  const GoldenReader file(name, problem->memory());
  const Stages s = read_stages(file);
  problem->args = {file.floats("k"), file.floats("beta"), file.floats("g_cumsum"), {}, s.sequences, s.chunk, s.head_map};
  expect(
      *problem, file, "a", [](ChunkKktArgs& a) -> Tensor& { return a.a; }, "a", s.bar);
  return problem;
}

std::unique_ptr<Problem> golden_chunk_tri_inverse(const std::string& name, GoldenVariant) {
  auto problem = std::make_unique<OpProblem<ChunkTriInverseArgs>>();
  const GoldenReader file(name, problem->memory());
  const Stages s = read_stages(file);
  problem->args = {file.floats("a"), {}, s.sequences, s.chunk};
  expect(
      *problem, file, "a_inv", [](ChunkTriInverseArgs& a) -> Tensor& { return a.a_inv; }, "a_inv", s.bar);
  return problem;
}

std::unique_ptr<Problem> golden_chunk_wu(const std::string& name, GoldenVariant) {
  auto problem = std::make_unique<OpProblem<ChunkWuArgs>>();
  const GoldenReader file(name, problem->memory());
  const Stages s = read_stages(file);
  problem->args = {file.floats("k"), file.floats("v"), file.floats("beta"), file.floats("g_cumsum"), file.floats("a_inv"), {}, {},
                   s.sequences,      s.chunk,          s.head_map};
  expect(
      *problem, file, "w", [](ChunkWuArgs& a) -> Tensor& { return a.w; }, "w", s.bar);
  expect(
      *problem, file, "u", [](ChunkWuArgs& a) -> Tensor& { return a.u; }, "u", s.bar);
  return problem;
}

std::unique_ptr<Problem> golden_chunk_state(const std::string& name, GoldenVariant) {
  auto problem = std::make_unique<OpProblem<ChunkStateArgs>>();
  const GoldenReader file(name, problem->memory());
  const Stages s = read_stages(file);
  problem->args = {
      file.floats("k"), file.floats("w"), file.floats("u"), file.floats("g_cumsum"), file.floats("state_in"), {}, {}, {},
      s.sequences,      s.chunk,          s.head_map};
  expect(
      *problem, file, "v_new", [](ChunkStateArgs& a) -> Tensor& { return a.v_new; }, "v_new", s.bar);
  expect(
      *problem, file, "state_out", [](ChunkStateArgs& a) -> Tensor& { return a.state_out; }, "state_out", s.bar);
  // h may need more rows than the file has: max_chunks() is an upper bound.
  ChunkStateArgs& args = problem->args;
  const int64_t rows = max_chunks(args.k.size(0), args.sequences, args.chunk);
  const Tensor all = file.floats("h");
  const Tensor want = problem->memory().make(DType::f32, {std::max(rows, all.size(0)), all.size(1), all.size(2), all.size(3)});
  for (int64_t i = 0; i < all.elements(); ++i) set(want, i, get(all, i));
  args.h = problem->memory().make(DType::f32, {want.size(0), want.size(1), want.size(2), want.size(3)});
  problem->output(
      "h", [](ChunkStateArgs& a) -> Tensor& { return a.h; }, s.bar);
  problem->golden_answer(want, file.tolerance());
  return problem;
}

std::unique_ptr<Problem> golden_chunk_output(const std::string& name, GoldenVariant) {
  auto problem = std::make_unique<OpProblem<ChunkOutputArgs>>();
  const GoldenReader file(name, problem->memory());
  const Stages s = read_stages(file);
  Tensor h = file.floats("h");
  const int64_t rows = max_chunks(file.shape("k")[0], s.sequences, s.chunk);
  if (rows > h.size(0)) {
    const Tensor more = problem->memory().make(DType::f32, {rows, h.size(1), h.size(2), h.size(3)});
    for (int64_t i = 0; i < h.elements(); ++i) set(more, i, get(h, i));
    h = more;
  }
  problem->args = {file.floats("q"),
                   file.floats("k"),
                   file.floats("v_new"),
                   h,
                   file.floats("g_cumsum"),
                   {},
                   static_cast<float>(file.number("scale")),
                   s.sequences,
                   s.chunk,
                   s.head_map};
  expect(
      *problem, file, "o", [](ChunkOutputArgs& a) -> Tensor& { return a.o; }, "o", s.bar);
  return problem;
}

std::unique_ptr<Problem> golden_gated_delta_rule_prefill(const std::string& name, GoldenVariant variant) {
  auto problem = std::make_unique<OpProblem<GatedDeltaRulePrefillArgs>>();
  read_rule(*problem, GoldenReader(name, problem->memory()), variant.bf16);
  return problem;
}

std::unique_ptr<Problem> golden_gated_delta_rule_decode(const std::string& name, GoldenVariant variant) {
  using Args = GatedDeltaRuleDecodeArgs;
  auto problem = std::make_unique<OpProblem<Args>>();
  const GoldenReader file(name, problem->memory());
  const Bar bar = read_rule(*problem, file, variant.bf16);
  expect(
      *problem, file, "record.k", [](Args& a) -> Tensor& { return a.record.k; }, "record_k", bar);
  expect(
      *problem, file, "record.delta", [](Args& a) -> Tensor& { return a.record.delta; }, "record_delta", bar);
  expect(
      *problem, file, "record.g", [](Args& a) -> Tensor& { return a.record.g; }, "record_g", bar);
  return problem;
}

std::unique_ptr<Problem> golden_gated_delta_rule_summarize(const std::string& name, GoldenVariant) {
  using Args = GatedDeltaRuleSummarizeArgs;
  auto problem = std::make_unique<OpProblem<Args>>();
  const GoldenReader file(name, problem->memory());
  problem->args.k = file.floats("k");
  problem->args.v = file.floats("v");
  problem->args.gates.g = file.floats("g");
  problem->args.gates.beta = file.floats("beta");
  problem->args.head_map = file.head_map();
  problem->args.sequences = file.sequences();
  const double bar = arithmetic(problem->args.sequences.max_tokens);
  expect(*problem, file, "p", [](Args& a) -> Tensor& { return a.p; }, "P", {bar, bar});
  expect(*problem, file, "q", [](Args& a) -> Tensor& { return a.q; }, "Q", {bar, bar});
  return problem;
}

std::unique_ptr<Problem> golden_gated_delta_rule_compose(const std::string& name, GoldenVariant) {
  using Args = GatedDeltaRuleComposeArgs;
  auto problem = std::make_unique<OpProblem<Args>>();
  const GoldenReader file(name, problem->memory());
  problem->args = {file.floats("P_earlier"), file.floats("Q_earlier"), file.floats("P_later"), file.floats("Q_later"), {}, {}};
  expect(
      *problem, file, "p", [](Args& a) -> Tensor& { return a.p; }, "P", f32_bar(file));
  expect(
      *problem, file, "q", [](Args& a) -> Tensor& { return a.q; }, "Q", f32_bar(file));
  return problem;
}

std::unique_ptr<Problem> golden_gated_delta_rule_apply(const std::string& name, GoldenVariant) {
  using Args = GatedDeltaRuleApplyArgs;
  auto problem = std::make_unique<OpProblem<Args>>();
  const GoldenReader file(name, problem->memory());
  problem->args.p = file.floats("P");
  problem->args.q = file.floats("Q");
  problem->args.states.in = file.floats("state_in");
  expect(
      *problem, file, "states.out", [](Args& a) -> Tensor& { return a.states.out; }, "state_out", f32_bar(file));
  return problem;
}

}  // namespace weft::cases
