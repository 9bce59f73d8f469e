// The cuda backend: refused with a sentence where there is no device; on a device, the bit-equality laws that cases check on the
// host only.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "cases/cuda_device.h"
#include "cases/delta_laws.h"
#include "cases/table.h"
#include "tests/support/wu_contract.h"

namespace weft::cases {
namespace {

bool has_device() {
  for (const DeviceInfo& device : devices())
    if (device.backend == Backend::cuda && device.usable) return true;
  return false;
}

Stream cuda_stream() {
  Stream stream;
  stream.backend = Backend::cuda;
  return stream;
}

std::unique_ptr<Problem> problem_of(const char* op, const char* options) { return build({op, "test", options, Tier::fast, ""}); }

// Runs an op on the device, with scratch in device memory.
template <class Args>
void run_there(const Args& args) {
  const Stream stream = cuda_stream();
  Placement& placement = placement_of(stream);
  const size_t bytes = scratch_bytes(stream, args);
  uint8_t* lent = placement.allocate(bytes);
  launch(stream, args, {lent, bytes});
  uint8_t seen = 0;
  placement.download(&seen, lent, 1);  // synchronises
  placement.release(lent);
}

bool same_memory(const Image& a, const Image& b) {
  for (size_t i = 0; i < a.memory().blocks().size(); ++i)
    if (std::memcmp(a.bytes(i), b.bytes(i), a.memory().blocks()[i].total) != 0) return false;
  return true;
}

#define WEFT_NEEDS_DEVICE() \
  if (!has_device()) GTEST_SKIP() << "no cuda device here"

TEST(CudaBackend, IsRefusedWithASentenceWhereThereIsNoDevice) {
  if (has_device()) GTEST_SKIP() << "there is a device";
  const auto problem = problem_of("l2_norm", "T=2");
  const Status status = problem->supports(cuda_stream());
  EXPECT_EQ(status.code, Code::unsupported);
  EXPECT_TRUE(status.message.find("no device") != std::string::npos ||
              status.message.find("not in this build") != std::string::npos)
      << status.message;
  EXPECT_THROW(placement_of(cuda_stream()), Error);
}

TEST(CudaBackend, DevicesOutOfRangeAreRefused) {
  WEFT_NEEDS_DEVICE();
  Stream stream = cuda_stream();
  stream.device = 100;
  const Status status = problem_of("l2_norm", "T=2")->supports(stream);
  EXPECT_EQ(status.code, Code::unsupported);
  EXPECT_NE(status.message.find("is on device 100"), std::string::npos) << status.message;
}

// A call that is captured in a CUDA graph and replayed several times has the bits of one direct call.
TEST(CudaGraph, ReplayHasTheBitsOfACall) {
  WEFT_NEEDS_DEVICE();
  constexpr std::pair<const char*, const char*> kCalls[] = {
      {"short_conv", "T=40,C=64,dtype=bf16,state=separate"},
      {"gated_delta_rule_decode", "N=3,T=1,Hk=2,Hv=4,Dk=128,dtype=bf16,out=separate,record=1"},
      {"gated_delta_rule_prefill", "lens=130:0:64,Hk=2,Hv=4,Dk=128,dtype=bf16,out=separate,l2norm=1"},
      {"gated_delta_rule_prefill", "T=4160,Hk=1,Hv=2,Dk=128,dtype=bf16,out=separate,l2norm=1"},      // token ranges
      {"gated_delta_rule_prefill", "N=25,T=300,Hk=2,Hv=4,Dk=128,dtype=bf16,out=separate,l2norm=1"},  // fused kernel
      {"gated_delta_rule_prefill", "N=6,T=460,Hk=4,Hv=8,Dk=128,dtype=bf16,out=separate,l2norm=1"},   // clusters of two blocks
      {"chunk_state", "lens=65:3,Dk=32,dtype=bf16"},
  };
  for (const auto& [op, options] : kCalls) {
    const auto problem = problem_of(op, options);
    const Stream stream = cuda_stream();
    Placement& placement = placement_of(stream);
    Image direct(problem->memory(), placement), captured(problem->memory(), placement);
    const size_t bytes = problem->scratch_bytes(stream);
    uint8_t* lent = placement.allocate(bytes);
    problem->run(stream, direct, {lent, bytes});
    direct.fetch();
    time_on_cuda(stream, 1, 2, 0, [&](const Stream& on, size_t) { problem->run(on, captured, {lent, bytes}); });
    captured.fetch();
    placement.release(lent);
    EXPECT_TRUE(same_memory(direct, captured)) << op;
  }
}

// As on the cpu, only the order of summation may differ.
TEST(CudaChunkWu, KeepsTheRoundingContract) {
  WEFT_NEEDS_DEVICE();
  for (auto [options, chunk] : tests::contract_shapes()) {
    tests::expect_wu_contract(options, chunk, cuda_stream());
    options.K = options.V = 128;
    tests::expect_wu_contract(options, chunk, cuda_stream());
  }
  tests::expect_exact_wu(cuda_stream());
}

// The bits of a sequence depend neither on other sequences of the call nor on a continuation at a multiple of 64 tokens.
TEST(CudaPrefill, SequencesAloneAndContinuedHaveTheSameBits) {
  WEFT_NEEDS_DEVICE();
  for (const char* options :
       {"lens=70:64:129,Hk=2,Hv=4,Dk=128,dtype=bf16,l2norm=1", "lens=70:64:129,Hk=1,Hv=2,Dk=40,dtype=f32",
        "lens=70:64:129,Hk=2,Hv=4,Dk=100,dtype=bf16,kda=1,l2norm=1", "lens=70:64:129,Hv=2,Dk=200,dtype=f16"}) {
    const auto built = problem_of("gated_delta_rule_prefill", options);
    auto& problem = dynamic_cast<OpProblem<GatedDeltaRulePrefillArgs>&>(*built);
    Placement& placement = placement_of(cuda_stream());
    Image together(problem.memory(), placement), apart(problem.memory(), placement);
    Tokens tokens;
    tokens.bounds = {0, 70, 134, 263};
    tokens.total = 263;
    tokens.longest = 129;
    tokens.count = 3;
    run_there(problem.placed(together));
    const GatedDeltaRulePrefillArgs args = problem.placed(apart);
    run_there(alone(args, tokens, 0));
    run_there(alone(args, tokens, 1));
    for (const auto& [begin, rows] : {std::pair<int64_t, int64_t>{134, 64}, {198, 65}}) {  // the third in two calls, in place
      Tokens part = tokens;
      part.bounds = {0, 70, begin, begin + rows};
      run_there(alone(args, part, 2));
    }
    together.fetch();
    apart.fetch();
    EXPECT_TRUE(same_memory(together, apart)) << options;
  }
}

// Calls with few heads and long sequences are cut into token ranges. Calls with many sequences and heads use the fused kernel. Both
// must be as accurate as the state scan over whole sequences, so the results differ by at most the sum of two bars (4.2e-3 each for
// outputs, 3.8e-3 each for states).
TEST(CudaPrefill, TokenRangesAndFusedKernelAgreeWithStateScan) {
  WEFT_NEEDS_DEVICE();
  constexpr std::pair<const char*, const char*> kCalls[] = {
      {"ranges", "lens=4160:70:0:5003,Hk=1,Hv=2,Dk=128,Dv=128,dtype=bf16,l2norm=1,gate=none,out=separate"},
      {"ranges", "T=4500,Hk=2,Hv=4,Dk=64,Dv=72,dtype=f16,l2norm=1,gate=soft,checkpoints=128"},
      {"ranges", "T=8192,Hk=1,Hv=2,Dk=96,Dv=128,dtype=bf16,l2norm=1"},
      {"fused", "lens=225:513:0:480:449:511:257,Hk=10,Hv=20,Dk=128,dtype=bf16,l2norm=1,out=separate"},
      {"fused", "N=25,T=1000,Hk=2,Hv=4,Dk=128,dtype=f16,l2norm=1"},
  };
  const auto path = [](const GatedDeltaRulePrefillArgs& args) {
    const Choice choice = choose(cuda_stream(), args);
    return choice.kernel + ", " + choice.plan;
  };
  for (const auto& [cut_by, options] : kCalls) {
    const auto built = problem_of("gated_delta_rule_prefill", options);
    auto& problem = dynamic_cast<OpProblem<GatedDeltaRulePrefillArgs>&>(*built);
    Placement& placement = placement_of(cuda_stream());
    Image cut(problem.memory(), placement), again(problem.memory(), placement), whole(problem.memory(), placement);
    GatedDeltaRulePrefillArgs args = problem.placed(whole);
    args.schedule = Schedule::invariant;
    if (path(args).find("wgmma") == std::string::npos) GTEST_SKIP() << "not on this device: " << path(args);
    EXPECT_EQ(path(args).find(cut_by), std::string::npos) << options << ": " << path(args);
    run_there(args);
    args = problem.placed(cut);
    EXPECT_NE(path(args).find(cut_by), std::string::npos) << options << ": " << path(args);
    run_there(args);
    run_there(problem.placed(again));
    cut.fetch();
    again.fetch();
    whole.fetch();
    EXPECT_TRUE(same_memory(cut, again)) << options;
    const auto distance = [&](const Tensor& t) { return t.present() ? relative_rms(cut.fetched(t), whole.fetched(t)) : 0.0; };
    EXPECT_LE(distance(problem.args.o), 8.4e-3) << options;
    EXPECT_LE(distance(problem.args.states.out), 7.6e-3) << options;
    EXPECT_LE(distance(problem.args.checkpoints), 7.6e-3) << options;
  }
}

// The cases named `paired` test clusters only if the plan chooses them for such shapes.
TEST(CudaPrefill, ManyHeadsUseClustersOfTwo) {
  WEFT_NEEDS_DEVICE();
  const auto plan_of = [](const char* options) {
    const auto built = problem_of("gated_delta_rule_prefill", options);
    auto& problem = dynamic_cast<OpProblem<GatedDeltaRulePrefillArgs>&>(*built);
    const Image image(problem.memory(), placement_of(cuda_stream()));
    const Choice choice = choose(cuda_stream(), problem.placed(image));
    return choice.kernel + ", " + choice.plan;
  };
  const std::string many = plan_of("lens=0:1:63:64:65:470,Hk=4,Hv=8,Dk=128,dtype=bf16"),
                    few = plan_of("T=470,Hv=8,Dk=128,dtype=bf16");
  if (many.find("wgmma") == std::string::npos) GTEST_SKIP() << "not on this device: " << many;
  EXPECT_NE(many.find("clusters of 2"), std::string::npos) << many;
  EXPECT_EQ(few.find("clusters"), std::string::npos) << few;
}

TEST(CudaReplay, HasTheBitsOfDecodingThePrefix) {
  WEFT_NEEDS_DEVICE();
  for (const char* options : {"N=2,T=4,Hk=2,Hv=4,Dk=128,dtype=bf16,l2norm=1,record=1", "N=2,T=4,Dk=40,Dv=24,kda=1,record=1"}) {
    const auto built = problem_of("gated_delta_rule_decode", options);
    auto& problem = dynamic_cast<OpProblem<GatedDeltaRuleDecodeArgs>&>(*built);
    const Tensor accepted = problem.memory().indices({1, 3});
    Placement& placement = placement_of(cuda_stream());
    Image replayed(problem.memory(), placement), decoded(problem.memory(), placement);
    GatedDeltaRuleDecodeArgs verify = problem.placed(replayed);
    const DeltaStates states = verify.states;
    verify.states.out = {};
    run_there(verify);
    GatedDeltaRuleReplayArgs replay;
    replay.record = verify.record;
    replay.accepted = replayed.at(accepted);
    replay.sequences = verify.sequences;
    replay.states = states;
    run_there(replay);
    GatedDeltaRuleDecodeArgs prefix = problem.placed(decoded);
    prefix.record = {};
    for (int64_t n = 0; n < 2; ++n) {
      Tokens tokens;
      const int64_t kept = n == 0 ? 1 : 3;
      tokens.bounds = {n * 4, n * 4 + kept};
      tokens.total = 8;
      tokens.longest = kept;  // a call with one token per sequence uses another kernel
      tokens.count = 1;
      GatedDeltaRuleDecodeArgs one = prefix;
      one.states.in = one.states.out = rows_of(prefix.states.in, n, 1);
      run_there(alone(one, tokens, 0));
    }
    replayed.fetch();
    decoded.fetch();
    EXPECT_TRUE(same_bits(replayed.fetched(problem.args.states.out), decoded.fetched(problem.args.states.out))) << options;
  }
}

// A view of the same shape whose rows lie `stride` elements apart, from `base` on.
Tensor spread(const Tensor& dense, uint8_t* base, int64_t stride) {
  Tensor far = dense;
  far.data = base;
  far.strides[0] = stride;
  return far;
}
void copy_rows(Placement& placement, const Tensor& from, const Tensor& to) {
  const int64_t row = from.elements() / from.size(0) * dtype_bytes(from.dtype);
  std::vector<uint8_t> bytes(static_cast<size_t>(row));
  for (int64_t i = 0; i < from.size(0); ++i) {
    const auto at = [&](const Tensor& t) { return static_cast<uint8_t*>(t.data) + i * t.strides[0] * dtype_bytes(t.dtype); };
    placement.download(bytes.data(), at(from), bytes.size());
    placement.upload(at(to), bytes.data(), bytes.size());
  }
}

// Tokens and slots whose offsets exceed 2^32 elements give the bits of dense tensors.
TEST(CudaOffsets, BeyondTwoToTheThirtyTwoElements) {
  WEFT_NEEDS_DEVICE();
  constexpr int64_t kTokenStride = int64_t{1} << 25, kSlotStride = int64_t{1} << 30, kTokens = 130, kSlots = 5;
  static_assert((kTokens - 1) * kTokenStride > int64_t{1} << 32 && (kSlots - 1) * kSlotStride >= int64_t{1} << 32);
  Placement& placement = placement_of(cuda_stream());
  const size_t bytes = static_cast<size_t>(kTokens * kTokenStride) * 2;
  uint8_t* far = nullptr;
  try {
    far = placement.allocate(bytes);
  } catch (const Error& error) {
    GTEST_SKIP() << "needs " << bytes << " bytes of device memory: " << error.what();
  }
  {
    const auto built = problem_of("gated_delta_rule_prefill", "T=130,Hk=1,Hv=2,Dk=128,Dv=128,dtype=bf16,l2norm=1,out=separate");
    auto& problem = dynamic_cast<OpProblem<GatedDeltaRulePrefillArgs>&>(*built);
    Image dense(problem.memory(), placement), apart(problem.memory(), placement);
    run_there(problem.placed(dense));
    GatedDeltaRulePrefillArgs args = problem.placed(apart);
    const Tensor o = args.o;
    uint8_t* next = far;
    for (Tensor* t : {&args.q, &args.k, &args.v, &args.o}) {
      const Tensor spread_out = spread(*t, next, kTokenStride);
      copy_rows(placement, *t, spread_out);
      next += t->elements() / t->size(0) * dtype_bytes(t->dtype);
      *t = spread_out;
    }
    run_there(args);
    copy_rows(placement, args.o, o);
    dense.fetch();
    apart.fetch();
    EXPECT_TRUE(same_memory(dense, apart)) << "prefill";
  }
  {
    const auto built = problem_of("gated_delta_rule_decode", "N=5,Hk=1,Hv=2,Dk=128,Dv=128,dtype=bf16,state=bf16");
    auto& problem = dynamic_cast<OpProblem<GatedDeltaRuleDecodeArgs>&>(*built);
    Image dense(problem.memory(), placement), apart(problem.memory(), placement);
    run_there(problem.placed(dense));
    GatedDeltaRuleDecodeArgs args = problem.placed(apart);
    const Tensor states = args.states.in;
    args.states.in = args.states.out = spread(states, far, kSlotStride);
    copy_rows(placement, states, args.states.in);
    run_there(args);
    copy_rows(placement, args.states.out, states);
    dense.fetch();
    apart.fetch();
    EXPECT_TRUE(same_memory(dense, apart)) << "decode";
  }
  placement.release(far);
}

}  // namespace
}  // namespace weft::cases
