// Records dispatches: see recorder.h.
#include "vulkan/common/recorder.h"

#include <cstring>

#include "core/fail.h"
#include "vulkan/common/views.h"

namespace weft::vulkan {
namespace {

constexpr const char* kWho = "vulkan";
constexpr size_t kBlockBytes = size_t{64} << 10;  // of a block of parameters; one dispatch has a few KiB of them at most
constexpr size_t kAlignment = 64;                 // of the parameters of a dispatch
constexpr VkAccessFlags kReadWrite = VK_ACCESS_SHADER_READ_BIT | VK_ACCESS_SHADER_WRITE_BIT;
constexpr VkPipelineStageFlags kCompute = VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, kAll = VK_PIPELINE_STAGE_ALL_COMMANDS_BIT;

}  // namespace

std::array<uint32_t, 3> folded(int64_t groups, const std::array<uint32_t, 3>& most) {
  const int64_t X = most[0], Y = most[1], z = ceil_div(ceil_div(groups, X), Y);
  if (z > most[2]) return {};
  const int64_t y = ceil_div(ceil_div(groups, X), z), x = ceil_div(ceil_div(groups, y), z);
  return {static_cast<uint32_t>(x), static_cast<uint32_t>(y), static_cast<uint32_t>(z)};
}

Recorder::Impl::Impl(Device device) : Impl(std::move(device), Nothing{}) {
  auto pool = made<VkCommandPoolCreateInfo>(VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO);
  pool.queueFamilyIndex = own_.handles.queue_family;
  check(own_.api.vkCreateCommandPool(own_.device, &pool, nullptr, &pool_), kWho, "command pool");
  auto info = made<VkCommandBufferAllocateInfo>(VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO);
  info.commandPool = pool_;
  info.level = VK_COMMAND_BUFFER_LEVEL_PRIMARY;
  info.commandBufferCount = 1;
  check(own_.api.vkAllocateCommandBuffers(own_.device, &info, &commands_), kWho, "command buffer");
  begin();
}

Recorder::Impl::Impl(Device device, VkCommandBuffer commands) : Impl(std::move(device), Nothing{}) {
  if (!commands) throw Error(fail(Code::invalid_argument, kWho, "command_buffer", "is null"));
  commands_ = commands;
  begin();
}

Recorder::Impl::~Impl() {
  for (const Block& block : blocks_) own_.free_block(block);
  if (pool_) own_.api.vkDestroyCommandPool(own_.device, pool_, nullptr);
}

void Recorder::Impl::order(VkPipelineStageFlags from, VkAccessFlags written, VkPipelineStageFlags to, VkAccessFlags used) {
  auto barrier = made<VkMemoryBarrier>(VK_STRUCTURE_TYPE_MEMORY_BARRIER);
  barrier.srcAccessMask = written;
  barrier.dstAccessMask = used;
  own_.api.vkCmdPipelineBarrier(commands_, from, to, 0, 1, &barrier, 0, nullptr, 0, nullptr);
}

void Recorder::Impl::begin() {
  if (pool_) {
    auto info = made<VkCommandBufferBeginInfo>(VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO);
    info.flags = VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT;  // a buffer may be submitted again while it is pending
    check(own_.api.vkBeginCommandBuffer(commands_, &info), kWho, "command buffer");
  }
  ended_ = false;
  order(kAll, VK_ACCESS_MEMORY_WRITE_BIT, kCompute, kReadWrite);  // dispatches follow everything submitted or recorded before
}

VkDeviceAddress Recorder::Impl::keep(const void* params, size_t bytes) {
  const size_t wanted = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (wanted > kBlockBytes) throw Error(fail(Code::unsupported, kWho, "params", "are too large"));
  if (block_ < blocks_.size() && used_ + wanted > kBlockBytes) {
    ++block_;
    used_ = 0;
  }
  if (block_ == blocks_.size()) {
    blocks_.reserve(block_ + 1);
    blocks_.push_back(own_.make_block(kBlockBytes, Memory::host));
  }
  const Block& block = blocks_[block_];
  const size_t aligned = (block.address + kAlignment - 1) / kAlignment * kAlignment - block.address;
  std::memcpy(block.mapped + aligned + used_, params, bytes);
  const VkDeviceAddress address = block.address + aligned + used_;
  used_ += wanted;
  return address;
}

Step Recorder::Impl::prepare(const char* op, const Kernel& kernel, const void* params, size_t bytes, int64_t groups) {
  if (ended_)
    throw Error(fail(Code::invalid_argument, op, "stream", "has a recorder that was finished, wanted clear() before new work"));
  if (groups <= 0) return {};
  Step step;
  step.groups = folded(groups, own_.facts().most_groups);
  if (step.groups[0] == 0)
    throw Error(fail(Code::unsupported, op, "stream", "is on a device that cannot run " + std::to_string(groups) + " workgroups"));
  step.pipeline = own_.pipeline(kernel, op);
  step.push[0] = keep(params, bytes);
  step.push[1] = static_cast<uint64_t>(groups);
  return step;
}

void Recorder::Impl::record(const Step& step) {
  if (!step.pipeline) return;
  static_assert(sizeof step.push == Device::Impl::kPushBytes);
  own_.api.vkCmdBindPipeline(commands_, VK_PIPELINE_BIND_POINT_COMPUTE, step.pipeline);
  own_.api.vkCmdPushConstants(commands_, own_.layout, VK_SHADER_STAGE_COMPUTE_BIT, 0, sizeof step.push, step.push);
  own_.api.vkCmdDispatch(commands_, step.groups[0], step.groups[1], step.groups[2]);
  order(kCompute, VK_ACCESS_SHADER_WRITE_BIT, kCompute, kReadWrite);
}

void* Recorder::Impl::finish() {
  if (!ended_) {
    order(kCompute, VK_ACCESS_SHADER_WRITE_BIT, kAll | VK_PIPELINE_STAGE_HOST_BIT,
          VK_ACCESS_MEMORY_READ_BIT | VK_ACCESS_MEMORY_WRITE_BIT);
    if (pool_) check(own_.api.vkEndCommandBuffer(commands_), kWho, "command buffer");
    ended_ = true;
  }
  return commands_;
}

void Recorder::Impl::submit_and_wait() {
  if (!pool_)
    throw Error(fail(Code::invalid_argument, kWho, "recorder", "records for its caller, who ends and submits the command buffer"));
  finish();
  own_.submit_and_wait(commands_);
}

void Recorder::Impl::clear() {
  if (pool_) check(own_.api.vkResetCommandPool(own_.device, pool_, 0), kWho, "command pool");
  block_ = used_ = 0;
  begin();
}

Recorder::Impl& recorder_of(const Stream& stream, const char* op) {
  if (!stream.queue)
    throw Error(fail(Code::invalid_argument, op, "stream", "has no queue, wanted queue() of a weft::vulkan::Recorder"));
  return Recorder::Impl::of(stream);
}

Recorder::Recorder(const Device& device) : impl_(std::make_unique<Impl>(device)) {}
Recorder::Recorder(const Device& device, void* command_buffer)
    : impl_(std::make_unique<Impl>(device, static_cast<VkCommandBuffer>(command_buffer))) {}
Recorder::~Recorder() = default;
void* Recorder::queue() const { return impl_.get(); }
void* Recorder::finish() { return impl_->finish(); }
void Recorder::submit_and_wait() { impl_->submit_and_wait(); }
void Recorder::clear() { impl_->clear(); }

}  // namespace weft::vulkan
