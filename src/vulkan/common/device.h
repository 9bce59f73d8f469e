// An open device: its memory, its pipelines and its queue.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "vulkan/common/facts.h"

namespace weft::vulkan {

// A shader with the values of its specialization constants 0, 1, ....
struct Kernel {
  const char* shader;  // a name of all_shaders()
  std::vector<uint32_t> constants{};
};

// A buffer with memory of its own. `mapped` is null where the host cannot see the memory.
struct Block {
  VkBuffer buffer = VK_NULL_HANDLE;
  VkDeviceMemory memory = VK_NULL_HANDLE;
  VkDeviceAddress address = 0;
  size_t bytes = 0;
  uint8_t* mapped = nullptr;
};

// device: tensors, fastest for shaders. host: parameters, which the host writes and shaders read. staging: copies, which the host
// also reads. Blocks of host and staging memory are mapped.
enum class Memory { device, host, staging };

class Device::Impl {
 public:
  Impl(int ordinal, std::unique_ptr<Instance> instance, VkPhysicalDevice physical, const OpenOptions& options);
  Impl(int ordinal, std::unique_ptr<Instance> instance, const Handles& handles);
  ~Impl();

  const DeviceFacts& facts() const { return facts_; }

  Block make_block(size_t bytes, Memory where);
  void free_block(const Block& block);

  void* allocate(size_t bytes);
  void release(void* address);
  void upload(void* to, const void* from, size_t bytes);
  void download(void* to, const void* from, size_t bytes);

  // Pipelines are made on first use and kept. All of them share a layout: push constants of kPushBytes.
  VkPipeline pipeline(const Kernel& kernel, const char* op);

  // Submits a command buffer and waits for it.
  void submit_and_wait(VkCommandBuffer commands);

  static constexpr uint32_t kPushBytes = 16;

  const int ordinal;
  DeviceApi api;
  Handles handles{};
  VkDevice device = VK_NULL_HANDLE;
  VkPipelineLayout layout = VK_NULL_HANDLE;

 private:
  Impl(int ordinal, std::unique_ptr<Instance> instance, VkPhysicalDevice physical);
  void open(VkPhysicalDevice physical);
  void begin();  // the last step of both constructors
  VkPipeline make_pipeline(const Kernel& kernel, const char* op);
  // The block that holds the address, and the offset in the block. Throws where no block holds it, or where the bytes do not fit.
  std::pair<Block, size_t> find(const void* address, size_t bytes, const char* what);
  // Waits for all work that was submitted to the queue, and makes the writes of that work visible to the host.
  void settle();
  // Submits copy_commands_ with the commands that `record` records between barriers, and waits.
  template <class Record>
  void submit_copy(const Record& record);
  // Copies between a block and a staging buffer, piece by piece.
  void copy_staged(const Block& block, size_t offset, uint8_t* host, size_t bytes, bool to_device);

  std::unique_ptr<Instance> instance_;
  DeviceFacts facts_;
  bool owned_ = true, staged_copies_ = false;
  VkPhysicalDeviceMemoryProperties memory_{};
  std::mutex blocks_mutex_, pipelines_mutex_, queue_mutex_, copy_mutex_;
  std::map<VkDeviceAddress, Block> blocks_;
  std::map<std::pair<std::string, std::vector<uint32_t>>, VkPipeline> pipelines_;
  VkQueue queue_ = VK_NULL_HANDLE;
  VkFence fence_ = VK_NULL_HANDLE;  // submit_and_wait() waits for it
  VkCommandPool copy_pool_ = VK_NULL_HANDLE;
  VkCommandBuffer copy_commands_ = VK_NULL_HANDLE;
  std::optional<Block> staging_;
};

}  // namespace weft::vulkan
