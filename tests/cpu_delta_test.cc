// The gated delta network on the cpu backend: forced instruction sets, token ranges, bits that depend on neither threads nor cuts nor
// other sequences, and the rounding contract of chunk_wu. (That every op is right on every instruction set is what cases_test checks.)
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cases/verify.h"
#include "cpu/isa.h"
#include "tests/support/delta.h"
#include "weft/weft.h"

namespace weft {
namespace {

using cases::get;
using cases::Memory;
using cases::Rng;
using tests::DeltaOptions;
using tests::DeltaProblem;
using tests::rows_of;

struct Prefill {
  Prefill(int64_t T, int64_t Hk, int64_t Hv, int64_t K, int64_t V) {
    Rng rng(7);
    args.q = memory.make(DType::f32, {T, Hk, K});
    args.k = memory.make(DType::f32, {T, Hk, K});
    args.v = memory.make(DType::f32, {T, Hv, V});
    args.gates.g = memory.make(DType::f32, {T, Hv});
    args.gates.beta = memory.make(DType::f32, {T, Hv});
    args.states.in = memory.make(DType::f32, {1, Hv, V, K});
    for (const Tensor& t : {args.q, args.k, args.v, args.states.in}) cases::fill_normal(t, rng);
    cases::fill_uniform(args.gates.g, rng, -0.02, 0);
    cases::fill_uniform(args.gates.beta, rng, 0, 1);
    args.l2_norm = true;
    fresh_outputs();
  }
  void fresh_outputs() {
    args.o = memory.make(DType::f32, {args.v.size(0), args.v.size(1), args.v.size(2)});
    args.states.out = memory.make(DType::f32, {1, args.v.size(1), args.v.size(2), args.k.size(2)});
  }
  void run(const Stream& stream) {
    const size_t bytes = scratch_bytes(stream, args);
    gated_delta_rule_prefill(stream, args, {memory.bytes(bytes), bytes});
  }

  Memory memory;
  GatedDeltaRulePrefillArgs args;
};

Stream cpu_with(int threads, Isa isa = Isa::best) {
  Stream stream;
  stream.threads = threads;
  stream.isa = isa;
  return stream;
}

TEST(Isa, ForcedSetsReallyRun) {
  Prefill problem(20, 1, 2, 32, 32);
  for (Isa isa : cpu::available_isas()) {
    EXPECT_EQ(cpu::isa_of_kernels(isa), isa) << isa_name(isa);
    const std::string kernel = choose(cpu_with(1, isa), problem.args).kernel;
    EXPECT_TRUE(kernel.ends_with(std::string(".") + isa_name(isa))) << kernel;
  }
  EXPECT_EQ(cpu::isa_of_kernels(Isa::best), cpu::available_isas().front());
}

TEST(Isa, MissingSetsAreRefused) {
  Prefill problem(4, 1, 1, 16, 16);
  for (Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512_vnni, Isa::neon}) {
    const auto& have = cpu::available_isas();
    if (std::find(have.begin(), have.end(), isa) != have.end()) continue;
    const Status status = supports(cpu_with(1, isa), problem.args);
    EXPECT_EQ(status.code, Code::unsupported);
    EXPECT_NE(status.message.find(std::string("asks for isa ") + isa_name(isa) + ", here are "), std::string::npos)
        << status.message;
  }
}

TEST(Prefill, BitsDoNotDependOnThreads) {
  // One head of 128 columns is cut into ever smaller pieces as threads grow.
  for (Isa isa : cpu::available_isas()) {
    Prefill problem(150, 1, 1, 48, 128);
    problem.run(cpu_with(1, isa));
    const Tensor o = problem.args.o, state = problem.args.states.out;
    for (int threads : {2, 3, 5, 8}) {
      problem.fresh_outputs();
      problem.run(cpu_with(threads, isa));
      EXPECT_TRUE(cases::same_bits(problem.args.o, o)) << isa_name(isa) << " " << threads;
      EXPECT_TRUE(cases::same_bits(problem.args.states.out, state)) << isa_name(isa) << " " << threads;
    }
    EXPECT_TRUE(problem.memory.guards_intact());
  }
}

// A long sequence of one small head runs as token ranges joined by affine maps.
TEST(Prefill, TokenRanges) {
  constexpr int64_t kTokens = 4096 + 100;
  Prefill problem(kTokens, 1, 1, 24, 16);
  EXPECT_NE(choose(cpu_with(2), problem.args).kernel.find(".ranged."), std::string::npos);
  problem.run(cpu_with(1));
  const Tensor o = problem.args.o, state = problem.args.states.out;
  for (int threads : {2, 5}) {
    problem.fresh_outputs();
    problem.run(cpu_with(threads));
    EXPECT_TRUE(cases::same_bits(problem.args.o, o)) << threads;
    EXPECT_TRUE(cases::same_bits(problem.args.states.out, state)) << threads;
  }
  problem.fresh_outputs();
  gated_delta_rule_prefill(Stream{Backend::reference}, problem.args);
  const double bound = 2e-6 * std::sqrt(static_cast<double>(kTokens));
  EXPECT_LE(cases::relative_rms(o, problem.args.o), bound);
  EXPECT_LE(cases::relative_rms(state, problem.args.states.out), bound);
  EXPECT_TRUE(problem.memory.guards_intact());
}

TEST(Prefill, RangedCheckpointsAndShortSequencesBeside) {
  // Sequence 0 is ranged, sequence 1 is not; both must match the reference, checkpoints included.
  constexpr int64_t kLong = 4096, kShort = 70;
  Prefill problem(kLong + kShort, 1, 1, 16, 8);
  problem.args.sequences = Sequences::packed(problem.memory.indices({0, kLong, kLong + kShort}), 2, kLong);
  problem.args.states.in = {};
  problem.args.checkpoint_every = 1024 + 64;
  const auto outputs = [&] {
    problem.args.o = problem.memory.make(DType::f32, {kLong + kShort, 1, 8});
    problem.args.states.out = problem.memory.make(DType::f32, {2, 1, 8, 16});
    problem.args.checkpoints = problem.memory.make(DType::f32, {2, 3, 1, 8, 16});
    cases::fill(problem.args.checkpoints, 0);
  };
  outputs();
  problem.run(cpu_with(3));
  const GatedDeltaRulePrefillArgs got = problem.args;
  outputs();
  gated_delta_rule_prefill(Stream{Backend::reference}, problem.args);
  const double bound = 2e-6 * std::sqrt(static_cast<double>(kLong));
  EXPECT_LE(cases::relative_rms(got.o, problem.args.o), bound);
  EXPECT_LE(cases::relative_rms(got.states.out, problem.args.states.out), bound);
  EXPECT_LE(cases::relative_rms(got.checkpoints, problem.args.checkpoints), bound);
}

TEST(Prefill, InvariantScheduleContinuesBitForBit) {
  constexpr int64_t kTokens = 4096 + 33, kSplit = 2112;  // a multiple of 64, but of no range
  Prefill whole(kTokens, 1, 1, 16, 16);
  whole.args.schedule = Schedule::invariant;
  EXPECT_EQ(choose(cpu_with(2), whole.args).kernel.find(".ranged."), std::string::npos);
  whole.run(cpu_with(2));
  Prefill parts(kTokens, 1, 1, 16, 16);
  parts.args.schedule = Schedule::invariant;
  const GatedDeltaRulePrefillArgs all = parts.args;
  const auto tokens = [](Tensor t, int64_t first, int64_t count) {
    t.data = static_cast<float*>(t.data) + first * t.strides[0];
    t.sizes[0] = count;
    return t;
  };
  for (const auto& [first, count] : {std::pair{int64_t{0}, kSplit}, std::pair{kSplit, kTokens - kSplit}}) {
    for (Tensor GatedDeltaRulePrefillArgs::*t : {&GatedDeltaRulePrefillArgs::q, &GatedDeltaRulePrefillArgs::k,
                                                 &GatedDeltaRulePrefillArgs::v, &GatedDeltaRulePrefillArgs::o})
      parts.args.*t = tokens(all.*t, first, count);
    parts.args.gates.g = tokens(all.gates.g, first, count);
    parts.args.gates.beta = tokens(all.gates.beta, first, count);
    parts.args.states.in = first == 0 ? all.states.in : all.states.out;
    parts.run(cpu_with(1));
  }
  EXPECT_TRUE(cases::same_bits(whole.args.o, all.o));
  EXPECT_TRUE(cases::same_bits(whole.args.states.out, all.states.out));
}

// The case holds its backend to the bits of decoding just the accepted tokens, from a record of the backend's own.
TEST(Replay, EveryPrefixOf16TokensToTheBit) {
  const std::string prefixes = "T=16,N=17,accepted=0:1:2:3:4:5:6:7:8:9:10:11:12:13:14:15:16,";
  for (const char* rest :
       {"Dk=32,Dv=16", "Hk=2,Hv=6,map=tiled,Dk=13,Dv=7,l2norm=1", "kda=1,gate=wide,Dk=40,Dv=24,dtype=bf16,l2norm=1",
        "layout=kv,Dk=64,Dv=100,beta=two,keys=alternating,out=separate"}) {
    cases::Checker checker(cases::build({"gated_delta_rule_replay", "prefixes", prefixes + rest, cases::Tier::fast, ""}));
    for (Isa isa : cpu::available_isas()) {
      const cases::Outcome outcome = checker.check(cpu_with(2, isa));
      EXPECT_EQ(outcome.verdict, cases::Verdict::passed) << rest << " " << isa_name(isa) << ": " << outcome.why;
    }
  }
}

// ---- NaN beside a sequence

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

bool all_finite(const Tensor& t) {
  for (double x : cases::values(t))
    if (!std::isfinite(x)) return false;
  return true;
}

// An op over packed sequences, with rows of tokens past the last of them.
struct PackedOp {
  std::vector<Tensor> tokens, states;                           // inputs by token and by sequence
  std::vector<int64_t> begins;                                  // [N + 1]
  std::function<std::pair<Tensor, Tensor>(const Stream&)> run;  // into fresh outputs by token and by sequence
};

// What the rows past the end hold does not matter, and NaN in all that sequence `bad` has changes no bit of the others.
void expect_apart(const std::string& name, const std::function<PackedOp()>& make) {
  const auto sequences = make().begins.size() - 1;
  for (Isa isa : cpu::available_isas())
    for (int threads : {1, 3})
      for (size_t bad = 0; bad < sequences; ++bad) {
        SCOPED_TRACE(name + " " + isa_name(isa) + " threads " + std::to_string(threads) + " sequence " + std::to_string(bad));
        const PackedOp op = make();
        const Stream stream = cpu_with(threads, isa);
        const int64_t T = op.begins.back(), all = op.tokens[0].size(0);
        ASSERT_GT(all, T);
        for (const Tensor& t : op.tokens) cases::fill(rows_of(t, T, all), kNan);
        const auto [beyond, beyond_states] = op.run(stream);
        EXPECT_TRUE(tests::all_nan(rows_of(beyond, T, all))) << "rows past the last sequence are not written";
        for (const Tensor& t : op.tokens) cases::fill(rows_of(t, T, all), 0.25);
        const auto [clean, clean_states] = op.run(stream);
        EXPECT_TRUE(all_finite(rows_of(clean, 0, T)) && all_finite(clean_states));
        EXPECT_TRUE(cases::same_bits(rows_of(beyond, 0, T), rows_of(clean, 0, T)));
        EXPECT_TRUE(cases::same_bits(beyond_states, clean_states));

        for (const Tensor& t : op.tokens) cases::fill(rows_of(t, op.begins[bad], op.begins[bad + 1]), kNan);
        for (const Tensor& t : op.states) cases::fill(rows_of(t, static_cast<int64_t>(bad), static_cast<int64_t>(bad) + 1), kNan);
        const auto [beside, beside_states] = op.run(stream);
        for (size_t n = 0; n < sequences; ++n) {
          const auto slot = static_cast<int64_t>(n);
          const Tensor rows = rows_of(beside, op.begins[n], op.begins[n + 1]), state = rows_of(beside_states, slot, slot + 1);
          if (n == bad) {  // it was really read
            EXPECT_TRUE(tests::all_nan(rows) && tests::all_nan(state));
            continue;
          }
          EXPECT_TRUE(cases::same_bits(rows, rows_of(clean, op.begins[n], op.begins[n + 1]))) << "o of sequence " << n;
          EXPECT_TRUE(cases::same_bits(state, rows_of(clean_states, slot, slot + 1))) << "state of sequence " << n;
        }
      }
}

// Prefill or decode on a problem that lives as long as the op.
template <class Args>
PackedOp rule_op(const DeltaOptions& options, Args (DeltaProblem::*args_of)() const) {
  const auto p = std::make_shared<DeltaProblem>(options);
  const auto run = [p, args_of](const Stream& stream) {
    const DeltaOptions& d = p->options;
    Args args = (*p.*args_of)();
    args.o = p->memory.make(DType::f32, {p->o.size(0), d.Hv, d.V});
    args.states.out = tests::make_pool(p->memory, DType::f32, p->sequences.count, d.Hv, d.V, d.K, d.layout);
    cases::run_op(stream, args);
    EXPECT_TRUE(p->memory.guards_intact());
    return std::pair{args.o, args.states.out};
  };
  return {{p->q, p->k, p->v, p->g, p->beta}, {p->in}, p->begins, run};
}

TEST(Nan, OfOtherSequencesAndPastTheEndStaysThere) {
  for (bool per_channel : {false, true})
    for (DType dtype : {DType::f32, DType::bf16}) {
      DeltaOptions options{.Hk = 2, .Hv = 4, .K = 40, .V = 24, .dtype = dtype, .per_channel = per_channel, .spare_rows = 5};
      const std::string name = std::string(dtype_name(dtype)) + (per_channel ? " per channel" : "");
      options.lengths = {20, 70, 33, 64};
      expect_apart("prefill " + name, [&] { return rule_op(options, &DeltaProblem::prefill); });
      options.lengths = {3, 1, 16, 2};
      expect_apart("decode " + name, [&] { return rule_op(options, &DeltaProblem::decode); });
    }
}

TEST(Nan, OfOtherSequencesStaysOutOfConvolutions) {
  for (DType dtype : {DType::f32, DType::bf16})
    expect_apart(std::string("short_conv ") + dtype_name(dtype), [&] {
      const auto memory = std::make_shared<Memory>();
      constexpr int64_t kC = 70, kRows = 25;
      const std::vector<int64_t> begins = {0, 2, 3, 12, 20};
      Rng rng(3);
      ShortConvArgs args;
      args.x = memory->make(dtype, {kRows, kC});
      args.weight = memory->make(dtype, {kC, 4});
      args.bias = memory->make(dtype, {kC});
      args.state_in = memory->make(dtype, {4, 3, kC});
      for (const Tensor& t : {args.x, args.weight, args.bias, args.state_in}) cases::fill_normal(t, rng);
      args.sequences = Sequences::packed(memory->indices(begins), 4, 9);
      const auto run = [memory, args, dtype](const Stream& stream) {
        ShortConvArgs fresh = args;
        fresh.y = memory->make(dtype, {kRows, kC});
        fresh.state_out = memory->make(dtype, {4, 3, kC});
        cases::run_op(stream, fresh);
        EXPECT_TRUE(memory->guards_intact());
        return std::pair{fresh.y, fresh.state_out};
      };
      return PackedOp{{args.x}, {args.state_in}, begins, run};
    });
}

// ---- the rounding contract of chunk_wu: beta v and beta e^G k rounded to bf16, products summed in f32, sums rounded to bf16

// To the nearest bf16, ties to even.
float bf16_of(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

// So near to the middle of two bf16 that a few roundings of f32 decide between them.
bool near_a_tie(float x) {
  const auto below = static_cast<int>(std::bit_cast<uint32_t>(x) & 0xffffu);
  return std::abs(below - 0x8000) < 64;
}

// The distance of bf16 at the size of x.
double bf16_unit(double x) { return std::ldexp(1.0, std::max(std::ilogb(x), -126) - 7); }

// Inputs of chunk_wu in bf16, and what the contract makes of them. The inverse is by the reference.
class WuContract {
 public:
  WuContract(const DeltaOptions& options, int64_t chunk) : p_(options), C_(chunk) {
    const int64_t T = p_.tokens;
    args.k = p_.k;
    args.v = p_.v;
    args.beta = p_.beta;
    args.g_cumsum =
        options.per_channel ? p_.memory.make(DType::f32, {T, options.Hv, options.K}) : p_.memory.make(DType::f32, {T, options.Hv});
    args.a_inv = p_.memory.make(DType::f32, {T, options.Hv, C_});
    args.w = p_.memory.make(DType::bf16, {T, options.Hv, options.K});
    args.u = p_.memory.make(DType::bf16, {T, options.Hv, options.V});
    args.sequences = p_.sequences;
    args.chunk = C_;
    chunk_cumsum(cases::kReference, {p_.g, args.g_cumsum, p_.sequences, C_});
    // Where e^G stands near a tie, another e^G of the same quality may stage another number.
    for (int64_t t = 0; t < T; ++t)
      for (int64_t c = 0; c < options.K; ++c)
        for (int64_t h = 0; h < options.Hv; ++h)
          if (near_a_tie(decayed_key(t, h, c))) {
            const int64_t at = t * p_.k.strides[0] + tests::key_head_of(options, h) * p_.k.strides[1] + c;
            cases::set(p_.k, at, get(p_.k, at) * (1 + 0x1p-7));
            h = -1;  // all heads again
          }
    chunk_kkt(cases::kReference, {p_.k, p_.beta, args.g_cumsum, args.a_inv, p_.sequences, C_});
    chunk_tri_inverse(cases::kReference, {args.a_inv, args.a_inv, p_.sequences, C_});
  }

  // Every element of w and u: visit(got, sum of the staged products in f32, sum of the unrounded ones, reach), where sums of f32 in
  // any order are at most `reach` apart.
  template <class Visit>
  void each(Visit&& visit) const {
    const DeltaOptions& o = p_.options;
    for (size_t n = 0; n + 1 < p_.begins.size(); ++n)
      for (int64_t t = p_.begins[n]; t < p_.begins[n + 1]; ++t)
        for (int64_t h = 0; h < o.Hv; ++h) {
          for (int64_t c = 0; c < o.K; ++c)
            row(
                n, t, h, get(args.w, (t * o.Hv + h) * o.K + c), [&](int64_t s) { return decayed_key(s, h, c); }, visit);
          for (int64_t c = 0; c < o.V; ++c)
            row(
                n, t, h, get(args.u, (t * o.Hv + h) * o.V + c), [&](int64_t s) { return scaled_value(s, h, c); }, visit);
        }
  }

  ChunkWuArgs args;

 private:
  float decayed_key(int64_t t, int64_t h, int64_t c) const {
    const DeltaOptions& o = p_.options;
    const double G = get(args.g_cumsum, t * args.g_cumsum.strides[0] + h * args.g_cumsum.strides[1] + (o.per_channel ? c : 0));
    const double k = get(p_.k, t * p_.k.strides[0] + tests::key_head_of(o, h) * p_.k.strides[1] + c);
    return static_cast<float>(get(p_.beta, t * o.Hv + h) * std::exp(G) * k);
  }
  float scaled_value(int64_t t, int64_t h, int64_t c) const {
    const DeltaOptions& o = p_.options;
    return static_cast<float>(get(p_.beta, t * o.Hv + h)) * static_cast<float>(get(p_.v, (t * o.Hv + h) * o.V + c));
  }
  template <class Operand, class Visit>
  void row(size_t n, int64_t t, int64_t h, double got, Operand&& operand, Visit&& visit) const {
    const int64_t i = (t - p_.begins[n]) % C_;
    float staged = 0;
    double plain = 0, size = 0;
    for (int64_t j = 0; j <= i; ++j) {
      const auto x = static_cast<float>(get(args.a_inv, (t * p_.options.Hv + h) * C_ + j));
      const float y = operand(t - i + j), term = x * bf16_of(y);
      staged += term;
      plain += static_cast<double>(x) * y;
      size += std::fabs(term);
    }
    visit(got, staged, plain, static_cast<double>(i + 1) * 0x1p-23 * size);
  }

  DeltaProblem p_;
  int64_t C_;
};

TEST(ChunkWu, KeepsTheRoundingContract) {
  for (bool per_channel : {false, true})
    for (tests::Keys keys : {tests::Keys::gaussian, tests::Keys::positive})
      for (int64_t chunk : {16, 64}) {
        WuContract wu({.lengths = {130, 7},
                       .Hk = 1,
                       .Hv = 2,
                       .K = 24,
                       .V = 20,
                       .dtype = DType::bf16,
                       .per_channel = per_channel,
                       .g_low = -0.2,
                       .beta_high = 2,
                       .keys = keys},
                      chunk);
        for (Isa isa : cpu::available_isas()) {
          SCOPED_TRACE(std::string(isa_name(isa)) + " chunk " + std::to_string(chunk) + (per_channel ? " per channel" : ""));
          cases::run_op(cpu_with(2, isa), wu.args);
          int elements = 0, equal = 0, told_apart = 0, wrong = 0;
          wu.each([&](double got, float staged, double plain, double reach) {
            const auto want = static_cast<double>(bf16_of(staged));
            ++elements;
            equal += got == want;
            told_apart += bf16_of(static_cast<float>(plain)) != want;
            // The sums round to the same bf16 or to two beside each other.
            if (std::fabs(got - want) > bf16_unit(std::max(std::fabs(got), std::fabs(want))) + reach && ++wrong < 4)
              ADD_FAILURE() << got << ", wanted " << want;
          });
          EXPECT_EQ(wrong, 0);
          EXPECT_GE(equal, elements * 98 / 100);       // few sums lie near a tie
          EXPECT_GE(told_apart, elements * 20 / 100);  // staging is seen: unrounded operands would give other numbers
        }
      }
}

// Without decay e^G is 1. With the identity or the difference operator as the inverse, every sum has at most two terms and is rounded
// alike in any order: not a bit may differ.
TEST(ChunkWu, IsExactWhereSumsAre) {
  for (double ones : {0.0, 1.0}) {
    WuContract wu({.lengths = {70, 5}, .Hv = 2, .K = 24, .V = 20, .dtype = DType::bf16, .g_low = 0, .beta_high = 2}, 64);
    cases::fill(wu.args.a_inv, ones);  // (I + A)^-1 of zeros, or of ones below the diagonal
    chunk_tri_inverse(cases::kReference, {wu.args.a_inv, wu.args.a_inv, wu.args.sequences, 64});
    for (Isa isa : cpu::available_isas()) {
      cases::run_op(cpu_with(1, isa), wu.args);
      int wrong = 0;
      wu.each([&](double got, float staged, double, double) {
        if (got != static_cast<double>(bf16_of(staged)) && ++wrong < 4) ADD_FAILURE() << got << ", wanted " << bf16_of(staged);
      });
      EXPECT_EQ(wrong, 0) << isa_name(isa);
    }
  }
}

}  // namespace
}  // namespace weft
