// The vulkan backend on the first usable device, under the validation layers: a named subset of the cases, recorders, adopted handles,
// copies, and laws that cases check on the host only. Any message of the layers fails. Skipped where there is no driver.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "cases/delta_laws.h"
#include "cases/table.h"
#include "cases/verify.h"
#include "cases/vulkan_device.h"
#include "vulkan/common/device.h"
#include "weft/vulkan.h"

namespace weft::cases {
namespace {

// The first usable device, opened with validation; -1 where there is none. Messages of the layers are collected.
struct Here {
  int device = -1;
  std::string why_not;
  std::mutex mutex;
  std::vector<std::string> messages;

  Here() {
    for (const DeviceInfo& info : devices())
      if (info.backend == Backend::vulkan) {
        if (info.usable && device < 0) device = info.device;
        if (!info.usable) why_not = info.why_not;
      }
    if (device < 0) return;
    validate_vulkan([this](const std::string& message) { add(message); }, false);
    try {
      vulkan_placement(device);
    } catch (const Error& error) {
      device = -1;
      why_not = error.what();
    }
  }
  void add(const std::string& message) {
    const std::lock_guard lock(mutex);
    messages.push_back(message);
  }
  std::vector<std::string> take() {
    const std::lock_guard lock(mutex);
    return std::exchange(messages, {});
  }
};

Here& here() {
  static auto* const found = new Here;  // the device outlives statics, and its messages come here
  return *found;
}

Stream vulkan_stream() {
  Stream stream;
  stream.backend = Backend::vulkan;
  stream.device = std::max(here().device, 0);
  return stream;
}

std::unique_ptr<Problem> problem_of(const char* op, const char* options) { return build({op, "test", options, Tier::fast, ""}); }

bool same_memory(const Image& a, const Image& b) {
  for (size_t i = 0; i < a.memory().blocks().size(); ++i)
    if (std::memcmp(a.bytes(i), b.bytes(i), a.memory().blocks()[i].total) != 0) return false;
  return true;
}

// Skips without a device; fails a test that the layers had something to say about.
class Vulkan : public testing::Test {
 protected:
  void SetUp() override {
    if (here().device < 0) GTEST_SKIP() << "no Vulkan device to test: " << here().why_not;
    placement = &placement_of(vulkan_stream());
  }
  void TearDown() override {
    for (const std::string& message : here().take()) ADD_FAILURE() << message;
  }
  template <class Args>
  void run(const Args& args) {
    const size_t bytes = scratch_bytes(vulkan_stream(), args);
    uint8_t* lent = placement->allocate(bytes);
    placement->run(vulkan_stream(), [&](const Stream& on) { launch(on, args, {lent, bytes}); });
    placement->release(lent);
  }
  Placement* placement = nullptr;
};

TEST(VulkanBackend, IsRefusedWithASentenceWhereThereIsNoDevice) {
  if (here().device >= 0) GTEST_SKIP() << "there is a device";
  const Status status = problem_of("l2_norm", "T=2")->supports(vulkan_stream());
  EXPECT_EQ(status.code, Code::unsupported);
  EXPECT_NE(status.message.find("stream"), std::string::npos) << status.message;
  EXPECT_THROW(placement_of(vulkan_stream()), Error);
}

// What is checked here of each op: cases by name. `weft check --backend vulkan` runs all.
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

// The layers are on: a call that breaks a rule of Vulkan gives a message.
TEST_F(Vulkan, ValidationReportsAMistake) {
  const vulkan::Device device =
      vulkan::Device::open(here().device, {true, [](const std::string& message) { here().add(message); }, false});
  auto empty = vulkan::made<VkBufferCreateInfo>(VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO);
  empty.usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT;
  VkBuffer buffer = VK_NULL_HANDLE;
  const vulkan::DeviceApi& api = device.impl().api;
  if (api.vkCreateBuffer(device.impl().device, &empty, nullptr, &buffer) == VK_SUCCESS)
    api.vkDestroyBuffer(device.impl().device, buffer, nullptr);
  const std::vector<std::string> messages = here().take();
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_NE(messages[0].find("VUID-VkBufferCreateInfo-size"), std::string::npos) << messages[0];
}

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
  const Status status = problem_of("compressed_attention", "")->supports(vulkan_stream());
  EXPECT_EQ(status.code, Code::unsupported);
  EXPECT_EQ(status.message, "compressed_attention: stream backend vulkan does not offer this op");
}

// A device of its own, whose copies go through staging buffers.
class Opened {
 public:
  explicit Opened(bool staged)
      : device(vulkan::Device::open(here().device, {true, [](const std::string& message) { here().add(message); }, staged})) {}
  ~Opened() {
    for (void* address : addresses_) device.release(address);
  }
  Tensor tensor(const std::vector<float>& values, int64_t rows) {
    addresses_.push_back(device.allocate(values.size() * sizeof(float)));
    device.upload(addresses_.back(), values.data(), values.size() * sizeof(float));
    return dense(addresses_.back(), DType::f32, {rows, static_cast<int64_t>(values.size()) / rows}, Place::vulkan,
                 device.ordinal());
  }
  std::vector<float> read(const Tensor& t) const {
    std::vector<float> values(static_cast<size_t>(t.elements()));
    device.download(values.data(), t.data, values.size() * sizeof(float));
    return values;
  }
  Stream stream(const vulkan::Recorder& recorder) const {
    Stream on = vulkan_stream();
    on.queue = recorder.queue();
    return on;
  }
  vulkan::Device device;

 private:
  std::vector<void*> addresses_;
};

std::vector<float> ramp(size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i % 97) - 48;
  return values;
}

TEST_F(Vulkan, StagedCopiesKeepEveryByte) {
  Opened own(true);
  const std::vector<float> values = ramp(size_t{5} << 20);  // more than a staging buffer
  EXPECT_EQ(own.read(own.tensor(values, 1)), values);
  EXPECT_THROW(own.device.upload(own.tensor({1}, 1).data, values.data(), 4096), Error);
  EXPECT_THROW(own.device.release(const_cast<float*>(values.data())), Error);
}

// Replays of one recording compute again: in place, two runs normalise twice, and eps makes that visible.
TEST_F(Vulkan, RecordingsCanBeReplayed) {
  Opened own(true);
  const Tensor once = own.tensor(ramp(640), 5), thrice = own.tensor(ramp(640), 5);
  const float eps = 100;
  vulkan::Recorder first(own.device), second(own.device);
  for (int i = 0; i < 3; ++i) l2_norm(own.stream(first), {once, once, eps});
  first.submit_and_wait();
  l2_norm(own.stream(second), {thrice, thrice, eps});
  EXPECT_THROW((second.finish(), l2_norm(own.stream(second), {thrice, thrice, eps})), Error);
  for (int i = 0; i < 3; ++i) second.submit_and_wait();
  EXPECT_NE(own.read(once), ramp(640));
  EXPECT_EQ(own.read(once), own.read(thrice));
  second.clear();
  l2_norm(own.stream(second), {thrice, thrice, eps});
  second.submit_and_wait();
  EXPECT_NE(own.read(once), own.read(thrice));
}

// More parameters than one block of the recorder holds; every call is seen by the next.
TEST_F(Vulkan, LongRecordingsKeepTheirParameters) {
  Opened own(false);
  const Tensor x = own.tensor(ramp(256), 2), y = own.tensor(std::vector<float>(256), 2);
  vulkan::Recorder recorder(own.device);
  for (int i = 0; i < 400; ++i) l2_norm(own.stream(recorder), i % 2 == 0 ? L2NormArgs{x, y, 9} : L2NormArgs{y, x, 9});
  recorder.submit_and_wait();
  Opened other(false);
  const Tensor a = other.tensor(ramp(256), 2), b = other.tensor(std::vector<float>(256), 2);
  for (int i = 0; i < 400; i += 8) {
    vulkan::Recorder one(other.device);
    for (int j = 0; j < 8; ++j) l2_norm(other.stream(one), j % 2 == 0 ? L2NormArgs{a, b, 9} : L2NormArgs{b, a, 9});
    one.submit_and_wait();
  }
  EXPECT_EQ(own.read(x), other.read(a));
}

// Handles of a device that the caller made, and a command buffer of the caller.
TEST_F(Vulkan, AdoptedDevicesAndCommandBuffersCompute) {
  Opened own(false);
  const Tensor x = own.tensor(ramp(640), 5), y = own.tensor(ramp(640), 5), z = own.tensor(ramp(640), 5);
  vulkan::Recorder direct(own.device);
  l2_norm(own.stream(direct), {x, x});
  direct.submit_and_wait();
  {
    const vulkan::Device adopted = vulkan::Device::adopt(own.device.handles());
    EXPECT_EQ(adopted.ordinal(), own.device.ordinal());
    vulkan::Recorder recorder(adopted);
    l2_norm(own.stream(recorder), {y, y});
    recorder.submit_and_wait();
  }
  EXPECT_EQ(own.read(x), own.read(y));

  vulkan::Device::Impl& impl = own.device.impl();
  auto pool_info = vulkan::made<VkCommandPoolCreateInfo>(VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO);
  pool_info.queueFamilyIndex = impl.handles.queue_family;
  VkCommandPool pool = VK_NULL_HANDLE;
  ASSERT_EQ(impl.api.vkCreateCommandPool(impl.device, &pool_info, nullptr, &pool), VK_SUCCESS);
  auto info = vulkan::made<VkCommandBufferAllocateInfo>(VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO);
  info.commandPool = pool;
  info.commandBufferCount = 1;
  VkCommandBuffer commands = VK_NULL_HANDLE;
  ASSERT_EQ(impl.api.vkAllocateCommandBuffers(impl.device, &info, &commands), VK_SUCCESS);
  const auto begin = vulkan::made<VkCommandBufferBeginInfo>(VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO);
  ASSERT_EQ(impl.api.vkBeginCommandBuffer(commands, &begin), VK_SUCCESS);
  {
    vulkan::Recorder recorder(own.device, commands);
    l2_norm(own.stream(recorder), {z, z});
    EXPECT_THROW(recorder.submit_and_wait(), Error);
    ASSERT_EQ(impl.api.vkEndCommandBuffer(commands), VK_SUCCESS);
    impl.submit_and_wait(commands);
  }
  impl.api.vkDestroyCommandPool(impl.device, pool, nullptr);
  EXPECT_EQ(own.read(x), own.read(z));
  EXPECT_THROW(vulkan::Device::adopt({}), Error);
}

TEST_F(Vulkan, ThreadsRecordOnOneDevice) {
  Opened own(false);
  std::vector<Tensor> tensors;
  for (int i = 0; i < 4; ++i) tensors.push_back(own.tensor(ramp(640), 5));
  std::vector<std::thread> threads;
  for (const Tensor& t : tensors)
    threads.emplace_back([&own, t] {
      for (int i = 0; i < 10; ++i) {
        vulkan::Recorder recorder(own.device);
        l2_norm(own.stream(recorder), {t, t, 100});
        recorder.submit_and_wait();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const Tensor& t : tensors) EXPECT_EQ(own.read(t), own.read(tensors.front()));
}

TEST_F(Vulkan, ReplayHasTheBitsOfDecodingThePrefix) {
  for (const char* options : {"N=2,T=4,Hk=2,Hv=4,Dk=128,dtype=bf16,l2norm=1,record=1", "N=2,T=4,Dk=40,Dv=24,kda=1,record=1"}) {
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
  }
}

// The bits of a sequence depend neither on other sequences of the call nor on a continuation at a multiple of 64 tokens.
TEST_F(Vulkan, PrefillAloneAndContinuedHasTheSameBits) {
  const auto built = problem_of("gated_delta_rule_prefill", "lens=70:64:129,Hk=1,Hv=2,Dk=40,dtype=f32");
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
  EXPECT_TRUE(same_memory(together, apart));
}

}  // namespace
}  // namespace weft::cases
