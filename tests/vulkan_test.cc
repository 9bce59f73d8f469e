// The vulkan backend on the first usable device, under the validation layers: a named subset of the cases, and laws that cases
// check on the host only. Any message of the layers fails the test. Without a driver it is skipped. vulkan_device_test tests
// devices, memory and recorders.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>

#include "cases/delta_laws.h"
#include "cases/table.h"
#include "cases/verify.h"
#include "tests/support/vulkan.h"
#include "weft/delta_preprocess.h"

namespace weft::cases {
namespace {

std::unique_ptr<Problem> problem_of(const char* op, const char* options) { return build({op, "test", options, Tier::fast, ""}); }

bool same_memory(const Image& a, const Image& b) {
  for (size_t i = 0; i < a.memory().blocks().size(); ++i)
    if (std::memcmp(a.bytes(i), b.bytes(i), a.memory().blocks()[i].total) != 0) return false;
  return true;
}

// A test that runs calls of its own.
class VulkanCalls : public Vulkan {
 protected:
  template <class Args>
  void run(const Args& args) {
    const size_t bytes = scratch_bytes(vulkan_stream(), args);
    uint8_t* lent = placement->allocate(bytes);
    placement->run(vulkan_stream(), [&](const Stream& on) { launch(on, args, {lent, bytes}); });
    placement->release(lent);
  }
};

TEST(VulkanBackend, IsRefusedWithASentenceWhereThereIsNoDevice) {
  if (here().listed) GTEST_SKIP() << "there is a device";
  const Status status = problem_of("l2_norm", "T=2")->supports(vulkan_stream());
  EXPECT_EQ(status.code, Code::unsupported);
  EXPECT_NE(status.message.find("stream"), std::string::npos) << status.message;
  EXPECT_THROW(placement_of(vulkan_stream()), Error);
}

// The cases of each op that this test runs, by name. `weft check --backend vulkan` runs all cases.
constexpr std::pair<const char*, const char*> kCases[] = {
    {"delta_gates", "*"},
    {"short_conv", "*"},
    {"l2_norm", "*"},
    {"gated_rms_norm", "*"},
    {"gated_delta_rule_decode", "dtypes*"},
    {"gated_delta_rule_decode", "record*"},
    {"gated_delta_rule_decode", "varlen*"},
    {"gated_delta_rule_decode", "heads*"},
    {"gated_delta_rule_decode", "odd_sizes*"},
    {"gated_delta_rule_decode", "raw_gates*"},
    {"gated_delta_rule_decode", "alpha*"},
    {"gated_delta_rule_decode", "per_channel*"},
    {"gated_delta_rule_decode", "packed_views*"},
    {"gated_delta_rule_decode", "state*"},
    {"gated_delta_rule_decode", "slots*"},
    {"gated_delta_rule_decode", "fresh*"},
    {"gated_delta_rule_replay", "clamped"},
    {"gated_delta_rule_replay", "varlen"},
    {"gated_delta_rule_replay", "heads*"},
    {"gated_delta_rule_replay", "per_channel*"},
    {"gated_delta_rule_replay", "state*"},
    {"gated_delta_rule_replay", "slots*"},
    {"gated_delta_rule_prefill", "bad_bounds"},
    {"gated_delta_rule_prefill", "dtypes*"},
    {"gated_delta_rule_prefill", "checkpoints/checkpoints=64"},
    {"gated_delta_rule_summarize", "dtypes*"},
    {"gated_delta_rule_compose", "counts*"},
    {"gated_delta_rule_apply", "state*"},
    {"gated_delta_rule_apply", "slots*"},
    {"kv_rotate", "dtypes*"},
    {"kv_rotate", "dense*"},
    {"kv_rotate", "sizes/D=40"},
    {"kv_rotate", "sizes/D=80"},
    {"kv_rotate", "sizes/D=512"},
    {"kv_encode", "bits*"},
    {"kv_encode", "passthrough*"},
    {"kv_encode", "aura/recipe=aura4v2/D=64"},
    {"kv_encode", "tq/recipe=tqhb5/D=512"},
    {"kv_encode", "gain_*"},
    {"kv_encode", "packing*"},
    {"kv_encode", "rotations*"},
    {"kv_encode", "means"},
    {"kv_encode", "dtypes*"},
    {"kv_encode", "ring_laps"},
    {"kv_encode", "paged/page=16"},
    {"kv_encode", "lanes_paged*"},
    {"kv_encode", "gaps*"},
    {"kv_encode", "no_room*"},
    {"kv_encode", "bad_bounds"},
    {"kv_decode", "recipes*"},
    {"kv_decode", "means*"},
    {"kv_decode", "dtypes*"},
    {"kv_decode", "astray"},
    {"kv_decode", "lanes"},
    {"kv_repack", "from_lanes/to_layout=rows/kbits=3/vbits=5"},
    {"kv_repack", "from_bytes/kbits=5"},
    {"kv_repack", "mixed"},
    {"attention_scores", "dtypes*"},
    {"attention_scores", "masks*"},
    {"attention_values", "dtypes*"},
    {"attention_values", "threshold"},
    {"attention_partials", "interleaved"},
    {"attention_partials", "ragged"},
    {"attention_merge", "sinks*"},
    {"attention_merge", "dtypes*"},
    {"compressed_attention", "recipes/recipe=bf16"},
    {"compressed_attention", "dtypes*"},
    {"compressed_attention", "sinks_window_softcap"},
    {"compressed_attention", "ragged_queries"},
    {"compressed_attention", "bad_bounds"},
    {"compressed_attention", "slots*"},
    {"compressed_attention", "ring/context=200/pinned=4"},
    {"compressed_attention", "paged/page=16"},
    {"compressed_attention", "token_major/recipe=f16"},
    {"compressed_attention", "lanes/kbits=4/vbits=4"},
    {"compressed_attention", "lanes/kbits=8/vbits=4"},
    {"compressed_attention", "lanes_masks"},
    {"compressed_attention", "lanes_ring_pinned/recipe=4v4"},
    {"compressed_attention", "lanes_paged"},
};

class VulkanCases : public Vulkan, public testing::WithParamInterface<std::pair<const char*, const char*>> {};

TEST_P(VulkanCases, AgreeWithTheReference) {
  const auto& [op, pattern] = GetParam();
  int checked = 0;
  for (const Case& one : all_cases()) {
    if (one.tier != Tier::fast || one.op != op || !matches(pattern, one.name)) continue;
    Checker checker(build(one));
    const Outcome outcome = checker.check(vulkan_stream());
    EXPECT_EQ(outcome.verdict, Verdict::passed)
        << one.op << " " << one.name << ": " << outcome.why << ", error " << outcome.error << ", bound " << outcome.bound;
    ++checked;
  }
  EXPECT_GT(checked, 0) << "no case of " << op << " is named like " << pattern;
}

INSTANTIATE_TEST_SUITE_P(Subset, VulkanCases, testing::ValuesIn(kCases), [](const auto& chosen) {
  std::string name = std::string(chosen.param.first) + "_" + chosen.param.second;
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name + std::to_string(chosen.index);
});

TEST_F(Vulkan, StreamsWithoutARecorderAreRefused) {
  const auto problem = problem_of("l2_norm", "T=2");
  const Image image(problem->memory(), *placement);
  EXPECT_TRUE(problem->supports(vulkan_stream()));
  try {
    problem->run(vulkan_stream(), image, {});
    FAIL() << "was computed";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "l2_norm: stream has no queue, wanted queue() of a weft::vulkan::Recorder");
  }
  Stream far = vulkan_stream();
  far.device = 100;
  EXPECT_NE(problem->supports(far).message.find("is on device 100"), std::string::npos);
}

TEST_F(Vulkan, OpsThatAreNotOfferedSaySo) {
  const Status status = problem_of("chunk_cumsum", "")->supports(vulkan_stream());
  EXPECT_EQ(status.code, Code::unsupported);
  EXPECT_EQ(status.message, "chunk_cumsum: stream backend vulkan does not offer this op");
}

// With Schedule::invariant the bits of a sequence do not depend on other sequences of the call: the last of three, alone.
TEST_F(VulkanCalls, AttentionOfASequenceAloneHasTheSameBits) {
  for (const char* options : {"N=3,lengths=300:40:900,Hk=1,Hq=4,D=64,schedule=invariant",
                              "N=3,lengths=300:40:900,Hk=1,Hq=4,D=128,layout=tiles,order=lanes,schedule=invariant"}) {
    const auto built = problem_of("compressed_attention", options);
    auto& problem = dynamic_cast<OpProblem<CompressedAttentionArgs>&>(*built);
    const Tensor slot = problem.memory().indices({2});
    Image together(problem.memory(), *placement), apart(problem.memory(), *placement);
    run(problem.placed(together));
    CompressedAttentionArgs one = problem.placed(apart);
    one.queries.q = rows_of(one.queries.q, 2, 1);
    one.queries.sequences = Sequences::uniform(1);
    one.cache.slots = apart.at(slot);
    one.cache.lengths = rows_of(one.cache.lengths, 2, 1);
    one.o = rows_of(one.o, 2, 1);
    one.lse = rows_of(one.lse, 2, 1);
    run(one);
    together.fetch();
    apart.fetch();
    const auto last = [&](const Image& image, const Tensor& t) { return rows_of(image.fetched(t), 2, 1); };
    EXPECT_TRUE(same_bits(last(together, problem.args.o), last(apart, problem.args.o))) << options;
    EXPECT_TRUE(same_bits(last(together, problem.args.lse), last(apart, problem.args.lse))) << options;
  }
}

TEST_F(VulkanCalls, ReplayHasTheBitsOfDecodingThePrefix) {
  for (const char* options :
       {"N=2,T=4,Hk=2,Hv=4,Dk=128,dtype=bf16,l2norm=1,record=1", "N=2,T=4,Dk=40,Dv=24,kda=1,record=1",
        "N=2,T=4,Hk=2,Hv=4,Dk=42,Dv=24,l2norm=1,record=1", "N=2,T=4,Dk=42,Dv=10,dtype=f16,state=bf16,record=1",
        "N=2,T=4,Dk=64,Dv=10,dtype=bf16,state=f16,l2norm=1,record=1"}) {
    const auto built = problem_of("gated_delta_rule_decode", options);
    auto& problem = dynamic_cast<OpProblem<GatedDeltaRuleDecodeArgs>&>(*built);
    const Tensor accepted = problem.memory().indices({1, 3});
    Image replayed(problem.memory(), *placement), decoded(problem.memory(), *placement);
    GatedDeltaRuleDecodeArgs verify = problem.placed(replayed);
    const DeltaStates states = verify.states;
    verify.states.out = {};
    run(verify);
    GatedDeltaRuleReplayArgs replay;
    replay.record = verify.record;
    replay.accepted = replayed.at(accepted);
    replay.sequences = verify.sequences;
    replay.states = states;
    run(replay);
    GatedDeltaRuleDecodeArgs prefix = problem.placed(decoded);
    prefix.record = {};
    for (int64_t n = 0; n < 2; ++n) {
      Tokens tokens;
      const int64_t kept = n == 0 ? 1 : 3;
      tokens.bounds = {n * 4, n * 4 + kept};
      tokens.total = 8;
      tokens.longest = kept;
      tokens.count = 1;
      GatedDeltaRuleDecodeArgs one = prefix;
      one.states.in = one.states.out = rows_of(prefix.states.in, n, 1);
      run(alone(one, tokens, 0));
    }
    replayed.fetch();
    decoded.fetch();
    EXPECT_TRUE(same_bits(replayed.fetched(problem.args.states.out), decoded.fetched(problem.args.states.out))) << options;
    for (const auto& [begin, kept] : {std::pair<int64_t, int64_t>{0, 1}, {4, 3}})  // a verify step has the outputs of decoding
      EXPECT_TRUE(
          same_bits(rows_of(replayed.fetched(problem.args.o), begin, kept), rows_of(decoded.fetched(problem.args.o), begin, kept)))
          << options << ", o of tokens from " << begin;
  }
}

// The bits of a sequence depend neither on other sequences of the call nor on a continuation at a multiple of 64 tokens.
TEST_F(VulkanCalls, PrefillAloneAndContinuedHasTheSameBits) {
  for (const char* options : {"lens=70:64:129,Hk=1,Hv=2,Dk=40,dtype=f32", "lens=70:64:129,Hk=1,Hv=2,Dk=42,Dv=10,dtype=bf16"}) {
    const auto built = problem_of("gated_delta_rule_prefill", options);
    auto& problem = dynamic_cast<OpProblem<GatedDeltaRulePrefillArgs>&>(*built);
    Image together(problem.memory(), *placement), apart(problem.memory(), *placement);
    Tokens tokens;
    tokens.bounds = {0, 70, 134, 263};
    tokens.total = 263;
    tokens.longest = 129;
    tokens.count = 3;
    run(problem.placed(together));
    const GatedDeltaRulePrefillArgs args = problem.placed(apart);
    run(alone(args, tokens, 0));
    run(alone(args, tokens, 1));
    for (const auto& [begin, rows] : {std::pair<int64_t, int64_t>{134, 64}, {198, 65}}) {  // the third in two calls, in place
      Tokens part = tokens;
      part.bounds = {0, 70, begin, begin + rows};
      run(alone(args, part, 2));
    }
    together.fetch();
    apart.fetch();
    EXPECT_TRUE(same_memory(together, apart)) << options;
  }
}

// The bits of a row depend neither on the number of rows nor on whether groups of four elements can be accessed.
TEST_F(VulkanCalls, NormsOfARowHaveTheSameBitsInEveryCall) {
  constexpr int64_t kRows = 20;
  for (const int64_t D : {int64_t{42}, int64_t{128}}) {
    std::vector<float> packed(static_cast<size_t>(kRows * D)), spread(static_cast<size_t>(kRows * (D + 1)));
    for (int64_t r = 0; r < kRows; ++r)
      for (int64_t d = 0; d < D; ++d) {
        const auto at = static_cast<float>(r * 1000 + d);
        const float value = std::sin(at * 1.7f) * std::exp(3 * std::cos(at * 0.3f));
        packed[static_cast<size_t>(r * D + d)] = spread[static_cast<size_t>(r * (D + 1) + d)] = value;
      }
    Opened own(false);
    const Tensor x = own.tensor(spread, kRows), in_place = own.tensor(packed, kRows);
    const std::vector<float> none(packed.size());
    const Tensor together = own.tensor(none, kRows), apart = own.tensor(none, kRows);
    const auto rows = [&](const Tensor& t, int64_t first, int64_t count, int64_t stride) {
      Tensor view = dense(static_cast<float*>(t.data) + first * stride, DType::f32, {count, 1, D}, t.place, t.device);
      view.strides[0] = stride;
      return view;
    };
    vulkan::Recorder recorder(own.device);
    l2_norm(own.stream(recorder), {rows(x, 0, kRows, D + 1), rows(together, 0, kRows, D)});
    for (int64_t r = 0; r < kRows; ++r) l2_norm(own.stream(recorder), {rows(x, r, 1, D + 1), rows(apart, r, 1, D)});
    l2_norm(own.stream(recorder), {in_place, in_place});
    recorder.submit_and_wait();
    EXPECT_EQ(own.read(apart), own.read(together)) << "D = " << D;
    EXPECT_EQ(own.read(in_place), own.read(together)) << "D = " << D;
  }
}

// A decay per channel of K = 0 channels leaves a write strength for each head.
TEST_F(VulkanCalls, GatesWithoutChannelsHaveStrengths) {
  Opened own(false);
  std::vector<float> b{-2, -1, 0, 1, 2, 3}, want(6);
  const auto call = [](const Tensor& any, const Tensor& from, const Tensor& to) {
    const auto none = [&](std::initializer_list<int64_t> sizes) {
      return dense(any.data, DType::f32, sizes, any.place, any.device);
    };
    DeltaGatesArgs args;
    args.a = args.g = none({2, 3, 0});
    args.a_log = any;
    args.dt_bias = none({3, 0});
    args.b = from;
    args.beta = to;
    return args;
  };
  std::vector<float> a_log(3);
  delta_gates(Stream{Backend::reference}, call(dense(a_log.data(), DType::f32, {3}), dense(b.data(), DType::f32, {2, 3}),
                                               dense(want.data(), DType::f32, {2, 3})));
  Tensor any = own.tensor(a_log, 1);
  any = dense(any.data, DType::f32, {3}, any.place, any.device);
  const Tensor beta = own.tensor(std::vector<float>(6), 2);
  vulkan::Recorder recorder(own.device);
  delta_gates(own.stream(recorder), call(any, own.tensor(b, 2), beta));
  recorder.submit_and_wait();
  const std::vector<float> got = own.read(beta);
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-6) << i;
}

// Conversions to 16 bits round to even, subnormal numbers included: a state of short_conv takes the last rows of x as they are.
TEST_F(VulkanCalls, StoresRoundToEven) {
  constexpr int64_t kCount = 1 << 16;
  for (const DType type : {DType::f16, DType::bf16}) {
    std::vector<float> x(kCount), weight(kCount * 2), y(kCount);
    uint32_t seed = 1;
    for (int64_t i = 0; i < kCount; ++i) {
      seed = seed * 1664525u + 1013904223u;
      uint32_t bits = seed & 0x807fffffu;
      bits |= type == DType::f16 ? (100 + (seed >> 9) % 45) << 23 : (1 + (seed >> 9) % 254) << 23;  // subnormal to infinite halves
      if (i % 3 == 0) bits = (bits & ~0x1fffu) | 0x1000u;                                           // halfway, where f16 is normal
      if (i % 3 == 1) bits = (bits & ~0xffffu) | 0x8000u;                                           // halfway in bf16
      std::memcpy(&x[static_cast<size_t>(i)], &bits, sizeof bits);
    }
    std::vector<uint16_t> want(kCount), got(kCount);
    const auto call = [&](const Tensor& from, const Tensor& taps, const Tensor& to, void* state) {
      ShortConvArgs args;
      args.x = from;
      args.weight = taps;
      args.y = to;
      args.sequences = Sequences::uniform(1);
      args.state_out = dense(state, type, {1, 1, kCount}, from.place, from.device);
      return args;
    };
    short_conv(Stream{Backend::reference},
               call(dense(x.data(), DType::f32, {1, kCount}), dense(weight.data(), DType::f32, {kCount, 2}),
                    dense(y.data(), DType::f32, {1, kCount}), want.data()));
    Opened own(false);
    const Tensor state = own.tensor(std::vector<float>(kCount / 2), 1);
    vulkan::Recorder recorder(own.device);
    short_conv(own.stream(recorder), call(own.tensor(x, 1), own.tensor(weight, kCount), own.tensor(y, 1), state.data));
    recorder.submit_and_wait();
    own.device.download(got.data(), state.data, kCount * sizeof(uint16_t));
    EXPECT_EQ(got, want) << dtype_name(type);
  }
}

}  // namespace
}  // namespace weft::cases
