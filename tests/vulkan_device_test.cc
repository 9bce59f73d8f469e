// Devices, memory and recorders of the vulkan backend, under the validation layers: copies, replays, adopted handles, command buffers of
// a caller, threads. Results are compared with the reference, so that a call that computes nothing fails.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "tests/support/vulkan.h"
#include "vulkan/common/recorder.h"
#include "weft/delta_preprocess.h"

namespace weft::cases {
namespace {

std::vector<float> ramp(size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i % 97) - 48;
  return values;
}

// The reference's result for rows that are normalised `times` times.
std::vector<float> normalised(std::vector<float> x, int64_t rows, float eps, int times = 1) {
  const Tensor t = dense(x.data(), DType::f32, {rows, static_cast<int64_t>(x.size()) / rows});
  for (int i = 0; i < times; ++i) l2_norm(Stream{Backend::reference}, {t, t, eps});
  return x;
}

void expect_close(const std::vector<float>& got, const std::vector<float>& want) {
  ASSERT_EQ(got.size(), want.size());
  double worst = 0, largest = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(std::isfinite(got[i])) << "element " << i;
    worst = std::max(worst, std::fabs(double{got[i]} - want[i]));
    largest = std::max(largest, std::fabs(double{want[i]}));
  }
  EXPECT_GT(largest, 0);
  EXPECT_LE(worst, 2e-6 * largest);
}

VkSubmitInfo submission_of(const VkCommandBuffer& commands) {
  auto submit = vulkan::made<VkSubmitInfo>(VK_STRUCTURE_TYPE_SUBMIT_INFO);
  submit.commandBufferCount = 1;
  submit.pCommandBuffers = &commands;
  return submit;
}

// A command buffer of the caller, being recorded.
class CallersCommands {
 public:
  explicit CallersCommands(const vulkan::Device& device) : impl_(device.impl()) {
    auto pool = vulkan::made<VkCommandPoolCreateInfo>(VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO);
    pool.queueFamilyIndex = impl_.handles.queue_family;
    vulkan::check(impl_.api.vkCreateCommandPool(impl_.device, &pool, nullptr, &pool_), "test", "pool");
    auto info = vulkan::made<VkCommandBufferAllocateInfo>(VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO);
    info.commandPool = pool_;
    info.commandBufferCount = 1;
    vulkan::check(impl_.api.vkAllocateCommandBuffers(impl_.device, &info, &commands), "test", "buffer");
    begin();
  }
  ~CallersCommands() { impl_.api.vkDestroyCommandPool(impl_.device, pool_, nullptr); }
  void begin() {
    vulkan::check(impl_.api.vkResetCommandPool(impl_.device, pool_, 0), "test", "pool");
    const auto begin = vulkan::made<VkCommandBufferBeginInfo>(VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO);
    vulkan::check(impl_.api.vkBeginCommandBuffer(commands, &begin), "test", "buffer");
  }
  void end_and_run() {
    vulkan::check(impl_.api.vkEndCommandBuffer(commands), "test", "buffer");
    impl_.submit_and_wait(commands);
  }
  VkCommandBuffer commands = VK_NULL_HANDLE;

 private:
  vulkan::Device::Impl& impl_;
  VkCommandPool pool_ = VK_NULL_HANDLE;
};

// The layers are on: a call that breaks a rule of Vulkan gives a message.
TEST_F(Vulkan, ValidationReportsAMistake) {
  const Opened own(false);
  const vulkan::Device& device = own.device;
  auto empty = vulkan::made<VkBufferCreateInfo>(VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO);
  empty.usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT;
  VkBuffer buffer = VK_NULL_HANDLE;
  const vulkan::DeviceApi& api = device.impl().api;
  if (api.vkCreateBuffer(device.impl().device, &empty, nullptr, &buffer) == VK_SUCCESS)
    api.vkDestroyBuffer(device.impl().device, buffer, nullptr);
  const std::vector<std::string> messages = here().take();
  EXPECT_TRUE(
      std::any_of(messages.begin(), messages.end(),
                  [](const std::string& message) { return message.find("VUID-VkBufferCreateInfo-size") != std::string::npos; }))
      << messages.size() << " messages";
}

TEST(VulkanGrid, FoldsIntoTheFewestWorkgroups) {
  const std::array<uint32_t, 3> most{65535, 65535, 65535}, tiny{4, 3, 2};
  using Grid = std::array<uint32_t, 3>;
  EXPECT_EQ(vulkan::folded(1, most), (Grid{1, 1, 1}));
  EXPECT_EQ(vulkan::folded(65535, most), (Grid{65535, 1, 1}));
  EXPECT_EQ(vulkan::folded(65536, most), (Grid{32768, 2, 1}));
  EXPECT_EQ(vulkan::folded(24, tiny), (Grid{4, 3, 2}));
  EXPECT_EQ(vulkan::folded(25, tiny), (Grid{}));
  for (int64_t groups = 1; groups <= 24; ++groups) {
    const Grid grid = vulkan::folded(groups, tiny);
    const int64_t there = int64_t{grid[0]} * grid[1] * grid[2];
    EXPECT_TRUE(there >= groups && there < groups + grid[1] * grid[2]) << groups << " became " << there;
    EXPECT_TRUE(grid[0] <= 4 && grid[1] <= 3 && grid[2] <= 2) << groups;
  }
}

TEST_F(Vulkan, StagedCopiesKeepEveryByte) {
  Opened own(true);
  const std::vector<float> values = ramp(size_t{5} << 20);  // more than a staging buffer
  EXPECT_EQ(own.read(own.tensor(values, 1)), values);
  EXPECT_THROW(own.device.upload(own.tensor({1}, 1).data, values.data(), 4096), Error);
  EXPECT_THROW(own.device.release(const_cast<float*>(values.data())), Error);
  for (const size_t bytes : {SIZE_MAX, SIZE_MAX - 10, SIZE_MAX - 511}) EXPECT_THROW(own.device.allocate(bytes), Error) << bytes;
}

// A copy comes after work that the caller submitted and did not wait for, whether the memory is mapped or not.
TEST_F(Vulkan, CopiesWaitForSubmittedWork) {
  for (const bool staged : {false, true}) {
    Opened own(staged);
    const int64_t rows = 1 << 14;
    const Tensor t = own.tensor(std::vector<float>(static_cast<size_t>(rows) * 128, 1), rows);
    vulkan::Recorder recorder(own.device);
    l2_norm(own.stream(recorder), {t, t});
    const auto commands = static_cast<VkCommandBuffer>(recorder.finish());
    const VkSubmitInfo submit = submission_of(commands);
    const vulkan::Device::Impl& impl = own.device.impl();
    ASSERT_EQ(impl.api.vkQueueSubmit(static_cast<VkQueue>(impl.handles.queue), 1, &submit, VK_NULL_HANDLE), VK_SUCCESS);
    float last = 0;
    own.device.download(&last, static_cast<float*>(t.data) + t.elements() - 1, sizeof last);
    EXPECT_NEAR(last, 1 / std::sqrt(128.0), 1e-6) << (staged ? "staged" : "mapped");
  }
}

// Every replay of a recording computes: in place, two replays normalise twice, and eps makes the second one visible.
TEST_F(Vulkan, RecordingsCanBeReplayed) {
  Opened own(true);
  const Tensor once = own.tensor(ramp(640), 5), thrice = own.tensor(ramp(640), 5);
  const float eps = 100;
  vulkan::Recorder first(own.device), second(own.device);
  for (int i = 0; i < 3; ++i) l2_norm(own.stream(first), {once, once, eps});
  first.submit_and_wait();
  l2_norm(own.stream(second), {thrice, thrice, eps});
  second.finish();
  EXPECT_THROW(l2_norm(own.stream(second), {thrice, thrice, eps}), Error);
  const Tensor none = dense(thrice.data, DType::f32, {0, 128}, Place::vulkan, own.device.ordinal());
  EXPECT_THROW(l2_norm(own.stream(second), {none, none, eps}), Error) << "a call without rows";
  for (int i = 0; i < 3; ++i) second.submit_and_wait();
  expect_close(own.read(once), normalised(ramp(640), 5, eps, 3));
  EXPECT_EQ(own.read(once), own.read(thrice));
  second.clear();
  l2_norm(own.stream(second), {thrice, thrice, eps});
  second.submit_and_wait();
  expect_close(own.read(thrice), normalised(ramp(640), 5, eps, 4));
}

TEST_F(Vulkan, RecordingsMayBeSubmittedWhileTheyArePending) {
  Opened own(false);
  const Tensor t = own.tensor(ramp(640), 5);
  vulkan::Recorder recorder(own.device);
  l2_norm(own.stream(recorder), {t, t, 100});
  const auto commands = static_cast<VkCommandBuffer>(recorder.finish());
  const VkSubmitInfo submit = submission_of(commands);
  const vulkan::Device::Impl& impl = own.device.impl();
  for (int i = 0; i < 3; ++i)
    ASSERT_EQ(impl.api.vkQueueSubmit(static_cast<VkQueue>(impl.handles.queue), 1, &submit, VK_NULL_HANDLE), VK_SUCCESS);
  expect_close(own.read(t), normalised(ramp(640), 5, 100, 3));
}

// A recording with more parameters than one block of the recorder holds. Each call has an eps and an output of its own.
TEST_F(Vulkan, LongRecordingsKeepTheirParameters) {
  Opened own(false);
  constexpr int64_t kCalls = 400, kSize = 32;
  const Tensor x = own.tensor(ramp(kSize), 1), y = own.tensor(std::vector<float>(kCalls * kSize), kCalls);
  vulkan::Recorder recorder(own.device);
  for (int64_t i = 0; i < kCalls; ++i) {
    Tensor row = y;
    row.data = static_cast<float*>(y.data) + i * kSize;
    row.sizes[0] = 1;
    l2_norm(own.stream(recorder), {x, row, static_cast<float>(100 * i)});
  }
  recorder.submit_and_wait();
  const std::vector<float> got = own.read(y);
  for (int64_t i = 0; i < kCalls; ++i) {
    SCOPED_TRACE(i);
    expect_close({got.begin() + i * kSize, got.begin() + (i + 1) * kSize}, normalised(ramp(kSize), 1, static_cast<float>(100 * i)));
  }
}

TEST_F(Vulkan, AdoptedDevicesCompute) {
  Opened own(false);
  const Tensor t = own.tensor(ramp(640), 5);
  vulkan::Handles handles = own.device.handles();
  handles.f16 = handles.int8 = false;
  const vulkan::Device adopted = vulkan::Device::adopt(handles);
  EXPECT_EQ(adopted.ordinal(), own.device.ordinal());
  EXPECT_FALSE(adopted.properties().f16 || adopted.properties().int8) << "features that the caller did not say are enabled";
  vulkan::Recorder recorder(adopted);
  EXPECT_FALSE(vulkan::facts_of(own.stream(recorder)).storage8);
  l2_norm(own.stream(recorder), {t, t});
  recorder.submit_and_wait();
  expect_close(own.read(t), normalised(ramp(640), 5, L2NormArgs{}.eps));

  handles = own.device.handles();
  handles.get_instance_proc_addr = reinterpret_cast<void*>(vulkan::global_api().vkGetInstanceProcAddr);
  EXPECT_EQ(vulkan::Device::adopt(handles).properties().int8, own.device.properties().int8);
}

TEST_F(Vulkan, HandlesThatCannotBeUsedAreRefused) {
  const Opened own(false);
  EXPECT_THROW(vulkan::Device::adopt({}), Error);
  vulkan::Handles handles = own.device.handles();
  handles.queue_family = 1000;
  try {
    vulkan::Device::adopt(handles);
    FAIL() << "was adopted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "vulkan: handles name queue family 1000, which does not compute");
  }
  handles = own.device.handles();
  handles.get_instance_proc_addr = reinterpret_cast<void*>(+[](VkInstance, const char*) -> PFN_vkVoidFunction { return nullptr; });
  try {
    vulkan::Device::adopt(handles);
    FAIL() << "was adopted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "vulkan: handles name an instance without vkDestroyInstance");
  }
}

// Commands of the caller around an op: a copy into its input and one out of its output.
TEST_F(Vulkan, CommandBuffersOfTheCallerCompute) {
  Opened own(false);
  const Tensor t = own.tensor(ramp(640), 5);
  CallersCommands callers(own.device);
  vulkan::Recorder recorder(own.device, callers.commands);
  l2_norm(own.stream(recorder), {t, t, 100});
  EXPECT_THROW(recorder.submit_and_wait(), Error);
  EXPECT_EQ(recorder.finish(), callers.commands);
  EXPECT_THROW(l2_norm(own.stream(recorder), {t, t, 100}), Error) << "after finish()";
  callers.end_and_run();
  expect_close(own.read(t), normalised(ramp(640), 5, 100));
  callers.begin();
  recorder.clear();
  l2_norm(own.stream(recorder), {t, t, 100});
  recorder.finish();
  callers.end_and_run();
  expect_close(own.read(t), normalised(ramp(640), 5, 100, 2));
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
  for (const Tensor& t : tensors) expect_close(own.read(t), normalised(ramp(640), 5, 100, 10));
}

}  // namespace
}  // namespace weft::cases
