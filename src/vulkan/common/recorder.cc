// Records dispatches: see recorder.h.
#include "vulkan/common/recorder.h"

#include <algorithm>
#include <cstring>

#include "core/fail.h"

namespace weft::vulkan {
namespace {

constexpr const char* kWho = "vulkan";
constexpr size_t kBlockBytes = size_t{64} << 10;  // of parameters; a call has less than 2 KiB
constexpr size_t kAlignment = 64;                 // of a call's parameters
constexpr VkAccessFlags kReadWrite = VK_ACCESS_SHADER_READ_BIT | VK_ACCESS_SHADER_WRITE_BIT;

}  // namespace

Recorder::Impl::Impl(Device device) : device_(std::move(device)), own_(device_.impl()) {
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

Recorder::Impl::Impl(Device device, VkCommandBuffer commands)
    : device_(std::move(device)), own_(device_.impl()), commands_(commands), ended_(true) {
  if (!commands) throw Error(fail(Code::invalid_argument, kWho, "command_buffer", "is null"));
}

Recorder::Impl::~Impl() {
  for (const Block& block : blocks_) own_.free_block(block);
  if (pool_) own_.api.vkDestroyCommandPool(own_.device, pool_, nullptr);
}

void Recorder::Impl::order(VkPipelineStageFlags from, VkAccessFlags written, VkPipelineStageFlags to, VkAccessFlags read) {
  auto barrier = made<VkMemoryBarrier>(VK_STRUCTURE_TYPE_MEMORY_BARRIER);
  barrier.srcAccessMask = written;
  barrier.dstAccessMask = read;
  own_.api.vkCmdPipelineBarrier(commands_, from, to, 0, 1, &barrier, 0, nullptr, 0, nullptr);
}

void Recorder::Impl::begin() {
  auto info = made<VkCommandBufferBeginInfo>(VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO);
  check(own_.api.vkBeginCommandBuffer(commands_, &info), kWho, "command buffer");
  ended_ = false;
  // After earlier submissions to the queue.
  order(VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | VK_PIPELINE_STAGE_TRANSFER_BIT,
        VK_ACCESS_SHADER_WRITE_BIT | VK_ACCESS_TRANSFER_WRITE_BIT, VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, kReadWrite);
}

VkDeviceAddress Recorder::Impl::keep(const void* params, size_t bytes) {
  const size_t wanted = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (wanted > kBlockBytes) throw Error(fail(Code::unsupported, kWho, "params", "are too large"));
  if (block_ < blocks_.size() && used_ + wanted > kBlockBytes) {
    ++block_;
    used_ = 0;
  }
  if (block_ == blocks_.size()) blocks_.push_back(own_.make_block(kBlockBytes, Memory::host));
  const Block& block = blocks_[block_];
  const size_t aligned = (block.address + kAlignment - 1) / kAlignment * kAlignment - block.address;
  std::memcpy(block.mapped + aligned + used_, params, bytes);
  const VkDeviceAddress address = block.address + aligned + used_;
  used_ += wanted;
  return address;
}

void Recorder::Impl::dispatch(const char* op, const Kernel& kernel, const void* params, size_t bytes, int64_t groups) {
  if (groups <= 0) return;
  if (pool_ && ended_)
    throw Error(fail(Code::invalid_argument, op, "stream", "has a recorder that was finished, wanted clear() before new work"));
  const VkPipeline pipeline = own_.pipeline(kernel, op);
  const auto& most = own_.facts().most_groups;
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t x = std::min<int64_t>(groups, most[0]), y = std::min<int64_t>(ceil_div(groups, x), most[1]);
  const int64_t z = ceil_div(groups, x * y);
  if (z > most[2])
    throw Error(fail(Code::unsupported, op, "stream", "is on a device that cannot run " + std::to_string(groups) + " workgroups"));
  const uint64_t push[2] = {keep(params, bytes), static_cast<uint64_t>(groups)};
  static_assert(sizeof push == Device::Impl::kPushBytes);
  own_.api.vkCmdBindPipeline(commands_, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline);
  own_.api.vkCmdPushConstants(commands_, own_.layout, VK_SHADER_STAGE_COMPUTE_BIT, 0, sizeof push, push);
  own_.api.vkCmdDispatch(commands_, static_cast<uint32_t>(x), static_cast<uint32_t>(y), static_cast<uint32_t>(z));
  order(VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, VK_ACCESS_SHADER_WRITE_BIT, VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, kReadWrite);
}

void* Recorder::Impl::finish() {
  if (!ended_) {
    order(VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, VK_ACCESS_SHADER_WRITE_BIT,
          VK_PIPELINE_STAGE_HOST_BIT | VK_PIPELINE_STAGE_TRANSFER_BIT, VK_ACCESS_HOST_READ_BIT | VK_ACCESS_TRANSFER_READ_BIT);
    check(own_.api.vkEndCommandBuffer(commands_), kWho, "command buffer");
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
  block_ = used_ = 0;
  if (!pool_) return;
  check(own_.api.vkResetCommandPool(own_.device, pool_, 0), kWho, "command pool");
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
