// The gated delta network on the cpu backend: forced instruction sets, token ranges, bits that depend neither on threads nor on
// splits nor on other sequences, and the rounding contract of chunk_wu. cases_test checks every op on every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cases/verify.h"
#include "cpu/common/isa.h"
#include "tests/support/delta.h"
#include "tests/support/wu_contract.h"
#include "weft/weft.h"

namespace weft {
namespace {

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
  // More threads split the 128 columns of the one head into smaller work items.
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

// A long sequence of one small head is split into token ranges, composed by affine maps.
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
  // Sequence 0 is split into token ranges, sequence 1 is not. Both must match the reference, including checkpoints.
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
  constexpr int64_t kTokens = 4096 + 33, kSplit = 2112;  // a multiple of 64 tokens, but not of a token range
  Prefill whole(kTokens, 1, 1, 16, 16);
  whole.args.schedule = Schedule::invariant;
  EXPECT_EQ(choose(cpu_with(2), whole.args).kernel.find(".ranged."), std::string::npos);
  whole.run(cpu_with(2));
  Prefill continued(kTokens, 1, 1, 16, 16);
  continued.args.schedule = Schedule::invariant;
  const GatedDeltaRulePrefillArgs all = continued.args;
  const auto tokens = [](Tensor t, int64_t first, int64_t count) {
    t.data = static_cast<float*>(t.data) + first * t.strides[0];
    t.sizes[0] = count;
    return t;
  };
  for (const auto& [first, count] : {std::pair{int64_t{0}, kSplit}, std::pair{kSplit, kTokens - kSplit}}) {
    for (Tensor GatedDeltaRulePrefillArgs::*t : {&GatedDeltaRulePrefillArgs::q, &GatedDeltaRulePrefillArgs::k,
                                                 &GatedDeltaRulePrefillArgs::v, &GatedDeltaRulePrefillArgs::o})
      continued.args.*t = tokens(all.*t, first, count);
    continued.args.gates.g = tokens(all.gates.g, first, count);
    continued.args.gates.beta = tokens(all.gates.beta, first, count);
    continued.args.states.in = first == 0 ? all.states.in : all.states.out;
    continued.run(cpu_with(1));
  }
  EXPECT_TRUE(cases::same_bits(whole.args.o, all.o));
  EXPECT_TRUE(cases::same_bits(whole.args.states.out, all.states.out));
}

// The case compares replay with decoding only the accepted tokens, bit for bit, both on the same backend.
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

// ---- NaN in other sequences

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

bool all_finite(const Tensor& t) {
  for (double x : cases::values(t))
    if (!std::isfinite(x)) return false;
  return true;
}

// An op over packed sequences, with spare token rows past the last sequence.
struct PackedOp {
  std::vector<Tensor> tokens, states;                           // inputs per token and per sequence
  std::vector<int64_t> begins;                                  // [N + 1]
  std::function<std::pair<Tensor, Tensor>(const Stream&)> run;  // returns new outputs per token and per sequence
};

// Neither NaN in the spare rows nor NaN in all inputs of sequence `bad` changes a bit of the other sequences.
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
          if (n == bad) {  // its inputs were read
            EXPECT_TRUE(tests::all_nan(rows) && tests::all_nan(state));
            continue;
          }
          EXPECT_TRUE(cases::same_bits(rows, rows_of(clean, op.begins[n], op.begins[n + 1]))) << "o of sequence " << n;
          EXPECT_TRUE(cases::same_bits(state, rows_of(clean_states, slot, slot + 1))) << "state of sequence " << n;
        }
      }
}

// Prefill or decode. The op owns its problem.
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

// ---- gates whose exponential overflows

TEST(GatedRmsNorm, ExtremeGates) {
  constexpr float kInf = std::numeric_limits<float>::infinity(), kNanGate = std::numeric_limits<float>::quiet_NaN();
  constexpr float kGates[] = {-3e38f, -1e30f, -100, -87, -0.0f, 100, 3e38f, kInf, kNanGate, -kNanGate};
  constexpr int64_t kSize = 64;
  for (float z : kGates)
    for (Isa isa : cpu::available_isas()) {
      Memory memory;
      GatedRmsNormArgs args;
      args.x = memory.make(DType::f32, {1, 1, kSize});
      args.z = memory.make(DType::f32, {1, 1, kSize});
      args.weight = memory.make(DType::f32, {kSize});
      args.y = memory.make(DType::f32, {1, 1, kSize});
      cases::fill(args.x, 1);
      cases::fill(args.z, z);
      cases::fill(args.weight, 1);
      args.eps = 0;
      gated_rms_norm(cpu_with(1, isa), args);
      for (double y : cases::values(args.y)) {
        if (std::isnan(z))
          EXPECT_TRUE(std::isnan(y)) << isa_name(isa);
        else if (z > 50)
          EXPECT_EQ(y, static_cast<double>(z)) << isa_name(isa);
        else
          EXPECT_NEAR(y, 0, 1e-35) << z << " " << isa_name(isa);
      }
    }
}

// ---- the rounding contract of chunk_wu

TEST(ChunkWu, KeepsTheRoundingContract) {
  for (const auto& [options, chunk] : tests::contract_shapes())
    for (Isa isa : cpu::available_isas()) {
      SCOPED_TRACE(isa_name(isa));
      tests::expect_wu_contract(options, chunk, cpu_with(2, isa));
    }
}

TEST(ChunkWu, IsExactWhereSumsAre) {
  for (Isa isa : cpu::available_isas()) {
    SCOPED_TRACE(isa_name(isa));
    tests::expect_exact_wu(cpu_with(1, isa));
  }
}

// A view of the tensor's numbers whose last two dimensions lie transposed in memory.
Tensor transposed_copy(Memory& memory, const Tensor& t) {
  std::vector<int64_t> sizes(t.sizes.begin(), t.sizes.begin() + t.rank);
  std::swap(sizes[sizes.size() - 1], sizes[sizes.size() - 2]);
  Tensor view = memory.make(t.dtype, sizes);
  const auto last = static_cast<size_t>(t.rank - 1);
  std::swap(view.sizes[last], view.sizes[last - 1]);
  std::swap(view.strides[last], view.strides[last - 1]);
  cases::copy(t, view);
  return view;
}

TEST(ShortConv, TransposedInputsHaveTheBitsOfContiguousOnes) {
  std::vector<Stream> streams{Stream{Backend::reference}};
  for (Isa isa : cpu::available_isas())
    for (int threads : {1, 3}) streams.push_back(cpu_with(threads, isa));
  for (const auto& [T, C, W, N, dtype] :
       std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, DType>>{{1, 70, 4, 1, DType::f32},
                                                                          {6, 70, 4, 6, DType::f32},
                                                                          {37, 1100, 4, 1, DType::f32},
                                                                          {36, 24, 4, 2, DType::f32},
                                                                          {21, 33, 3, 1, DType::bf16},
                                                                          {5, 600, 8, 1, DType::f16},
                                                                          {2, 40, 2, 1, DType::f32},
                                                                          {9, 1, 4, 1, DType::f32}}) {
    for (const Stream& stream : streams) {
      Memory memory;
      Rng rng(static_cast<uint64_t>(T * C));
      ShortConvArgs args;
      args.x = memory.make(dtype, {T, C});
      args.weight = memory.make(dtype, {C, W});
      args.bias = memory.make(dtype, {C});
      args.state_in = memory.make(dtype, {N, W + 1, C});
      for (const Tensor& t : {args.x, args.weight, args.bias, args.state_in}) cases::fill_normal(t, rng);
      args.sequences = Sequences::uniform(N);
      ShortConvArgs turned = args;
      turned.x = transposed_copy(memory, args.x);
      turned.state_in = transposed_copy(memory, args.state_in);
      for (ShortConvArgs* a : {&args, &turned}) {
        a->y = memory.make(dtype, {T, C});
        a->state_out = memory.make(dtype, {N, W + 1, C});
        short_conv(stream, *a);
      }
      EXPECT_TRUE(cases::same_bits(args.y, turned.y)) << T << " tokens, " << C << " channels on " << isa_name(stream.isa);
      EXPECT_TRUE(cases::same_bits(args.state_out, turned.state_out)) << T << " tokens, " << C << " channels";
      EXPECT_TRUE(memory.guards_intact());
    }
  }
}

TEST(ShortConv, OutputsStayContiguous) {
  Memory memory;
  ShortConvArgs args;
  args.x = transposed_copy(memory, memory.make(DType::f32, {5, 8}));
  args.weight = memory.make(DType::f32, {8, 4});
  args.y = args.x;
  EXPECT_EQ(validate(args).message, "short_conv: y has stride 5 in its last dimension, wanted 1");
  args.y = memory.make(DType::f32, {5, 8});
  EXPECT_TRUE(validate(args).ok());
  args.state_in = args.state_out = transposed_copy(memory, memory.make(DType::f32, {1, 3, 8}));
  EXPECT_EQ(validate(args).message, "short_conv: state_out has stride 3 in its last dimension, wanted 1");
}

}  // namespace
}  // namespace weft
