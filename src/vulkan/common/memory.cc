// Memory of an open device: blocks, and copies to and from them. See device.h.
#include <algorithm>
#include <cstring>

#include "core/fail.h"
#include "vulkan/common/device.h"

namespace weft::vulkan {
namespace {

constexpr const char* kWho = "vulkan";
constexpr size_t kStagingBytes = size_t{16} << 20;
constexpr size_t kAlignment = 256;

}  // namespace

Block Device::Impl::make_block(size_t bytes, Memory where) {
  if (bytes > SIZE_MAX - 2 * kAlignment)
    throw Error(fail(Code::invalid_argument, kWho, "bytes", "is " + std::to_string(bytes) + ", more than any device has"));
  Block block;
  block.bytes = std::max<size_t>((bytes + kAlignment - 1) / kAlignment * kAlignment, kAlignment);
  auto info = made<VkBufferCreateInfo>(VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO);
  info.size = block.bytes + kAlignment;  // room to align the address, whatever the device aligns to
  info.usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT | VK_BUFFER_USAGE_TRANSFER_SRC_BIT |
               VK_BUFFER_USAGE_TRANSFER_DST_BIT;
  check(api.vkCreateBuffer(device, &info, nullptr, &block.buffer), kWho, "buffer");
  try {
    VkMemoryRequirements needs;
    api.vkGetBufferMemoryRequirements(device, block.buffer, &needs);
    constexpr VkMemoryPropertyFlags kVisible = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
    constexpr VkMemoryPropertyFlags kDevice = VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT;
    constexpr VkMemoryPropertyFlags kCached = VK_MEMORY_PROPERTY_HOST_CACHED_BIT;
    // Excluded: such memory is slow for shaders, and legal only with a feature that is not enabled.
    constexpr VkMemoryPropertyFlags kAmd = VK_MEMORY_PROPERTY_DEVICE_COHERENT_BIT_AMD | VK_MEMORY_PROPERTY_DEVICE_UNCACHED_BIT_AMD;
    // In order of preference. Device memory that the host can map is often small, so only parameters prefer it. Tensors are always
    // in device memory.
    const std::vector<VkMemoryPropertyFlags> wanted = where == Memory::device    ? std::vector{kDevice}
                                                      : where == Memory::staging ? std::vector{kVisible | kCached, kVisible}
                                                                                 : std::vector{kDevice | kVisible, kVisible};
    VkResult result = VK_ERROR_OUT_OF_DEVICE_MEMORY;
    VkMemoryPropertyFlags got = 0;
    for (VkMemoryPropertyFlags flags : wanted)
      for (uint32_t i = 0; i < memory_.memoryTypeCount && result != VK_SUCCESS; ++i) {
        got = memory_.memoryTypes[i].propertyFlags;
        if (!(needs.memoryTypeBits >> i & 1) || (got & flags) != flags || (got & kAmd)) continue;
        auto address = made<VkMemoryAllocateFlagsInfo>(VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_FLAGS_INFO);
        address.flags = VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT;
        auto allocation = made<VkMemoryAllocateInfo>(VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO, &address);
        allocation.allocationSize = needs.size;
        allocation.memoryTypeIndex = i;
        result = api.vkAllocateMemory(device, &allocation, nullptr, &block.memory);
        if (result == VK_SUCCESS) break;
      }
    check(result, kWho, "memory");
    check(api.vkBindBufferMemory(device, block.buffer, block.memory, 0), kWho, "memory");
    if ((got & kVisible) == kVisible && (where != Memory::device || !staged_copies_)) {
      void* mapped = nullptr;
      check(api.vkMapMemory(device, block.memory, 0, VK_WHOLE_SIZE, 0, &mapped), kWho, "mapping");
      block.mapped = static_cast<uint8_t*>(mapped);
    }
  } catch (...) {
    free_block(block);
    throw;
  }
  auto of = made<VkBufferDeviceAddressInfo>(VK_STRUCTURE_TYPE_BUFFER_DEVICE_ADDRESS_INFO);
  of.buffer = block.buffer;
  block.address = api.vkGetBufferDeviceAddress(device, &of);
  return block;
}

void Device::Impl::free_block(const Block& block) {
  api.vkDestroyBuffer(device, block.buffer, nullptr);
  api.vkFreeMemory(device, block.memory, nullptr);
}

void* Device::Impl::allocate(size_t bytes) {
  const Block block = make_block(bytes, Memory::device);
  const VkDeviceAddress aligned = (block.address + kAlignment - 1) / kAlignment * kAlignment;
  const std::lock_guard lock(blocks_mutex_);
  try {
    blocks_.emplace(aligned, block);
  } catch (...) {
    free_block(block);
    throw;
  }
  return reinterpret_cast<void*>(aligned);
}

void Device::Impl::release(void* address) {
  if (!address) return;
  const std::lock_guard lock(blocks_mutex_);
  const auto found = blocks_.find(reinterpret_cast<VkDeviceAddress>(address));
  if (found == blocks_.end()) throw Error(fail(Code::invalid_argument, kWho, "address", "was not made by allocate()"));
  free_block(found->second);
  blocks_.erase(found);
}

std::pair<Block, size_t> Device::Impl::find(const void* address, size_t bytes, const char* what) {
  const auto at = reinterpret_cast<VkDeviceAddress>(address);
  const std::lock_guard lock(blocks_mutex_);
  const auto after = blocks_.upper_bound(at);
  if (after != blocks_.begin()) {
    const auto& [base, block] = *std::prev(after);
    if (at - base <= block.bytes && bytes <= block.bytes - (at - base)) return {block, at - block.address};
  }
  throw Error(
      fail(Code::invalid_argument, kWho, what, "is " + std::to_string(bytes) + " bytes that lie in no memory of allocate()"));
}

void Device::Impl::upload(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  const auto [block, offset] = find(to, bytes, "upload");
  if (block.mapped) {
    settle();
    std::memcpy(block.mapped + offset, from, bytes);
    return;
  }
  copy_staged(block, offset, const_cast<uint8_t*>(static_cast<const uint8_t*>(from)), bytes, true);
}

void Device::Impl::download(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  const auto [block, offset] = find(from, bytes, "download");
  if (block.mapped) {
    settle();
    std::memcpy(to, block.mapped + offset, bytes);
    return;
  }
  copy_staged(block, offset, static_cast<uint8_t*>(to), bytes, false);
}

template <class Record>
void Device::Impl::submit_copy(const Record& record) {
  check(api.vkResetCommandPool(device, copy_pool_, 0), kWho, "copy");
  auto begin = made<VkCommandBufferBeginInfo>(VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO);
  begin.flags = VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT;
  check(api.vkBeginCommandBuffer(copy_commands_, &begin), kWho, "copy");
  auto barrier = made<VkMemoryBarrier>(VK_STRUCTURE_TYPE_MEMORY_BARRIER);
  barrier.srcAccessMask = VK_ACCESS_MEMORY_WRITE_BIT;
  barrier.dstAccessMask = VK_ACCESS_MEMORY_READ_BIT | VK_ACCESS_MEMORY_WRITE_BIT;
  const auto order = [&] {
    constexpr VkPipelineStageFlags kAll = VK_PIPELINE_STAGE_ALL_COMMANDS_BIT;
    api.vkCmdPipelineBarrier(copy_commands_, kAll, kAll | VK_PIPELINE_STAGE_HOST_BIT, 0, 1, &barrier, 0, nullptr, 0, nullptr);
  };
  order();
  record();
  order();
  check(api.vkEndCommandBuffer(copy_commands_), kWho, "copy");
  submit_and_wait(copy_commands_);
}

void Device::Impl::settle() {
  const std::lock_guard lock(copy_mutex_);
  submit_copy([] {});
}

void Device::Impl::copy_staged(const Block& block, size_t offset, uint8_t* host, size_t bytes, bool to_device) {
  const std::lock_guard lock(copy_mutex_);
  if (!staging_) staging_ = make_block(kStagingBytes, Memory::staging);
  for (size_t done = 0; done < bytes; done += kStagingBytes) {
    const size_t piece = std::min(kStagingBytes, bytes - done);
    if (to_device) std::memcpy(staging_->mapped, host + done, piece);
    submit_copy([&] {
      const VkBufferCopy region{to_device ? 0 : offset + done, to_device ? offset + done : 0, piece};
      api.vkCmdCopyBuffer(copy_commands_, to_device ? staging_->buffer : block.buffer, to_device ? block.buffer : staging_->buffer,
                          1, &region);
    });
    if (!to_device) std::memcpy(host + done, staging_->mapped, piece);
  }
}

}  // namespace weft::vulkan
