// The gated delta network on the cpu backend: forced instruction sets, token ranges, and bits that depend on neither threads nor cuts.
// (That every op is right on every instruction set is what cases_test checks.)
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "cases/memory.h"
#include "cpu/isa.h"
#include "weft/weft.h"

namespace weft {
namespace {

using cases::Memory;
using cases::Rng;

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

}  // namespace
}  // namespace weft
