// A command buffer that ops record into: dispatches with their parameters, each followed by a barrier.
#pragma once

#include "vulkan/common/device.h"

namespace weft::vulkan {

class Recorder::Impl {
 public:
  explicit Impl(Device device);
  Impl(Device device, VkCommandBuffer commands);
  ~Impl();

  // The recorder of a stream that has one.
  static Impl& of(const Stream& stream) { return *static_cast<Impl*>(stream.queue); }

  int device_ordinal() const { return device_.ordinal(); }

  // Runs `groups` workgroups of a shader. Its push constants are the address of a copy of the parameters, and `groups`: the shader
  // finds its number by workgroup_number() of common/views.glsl, which folds three dimensions into one.
  void dispatch(const char* op, const Kernel& kernel, const void* params, size_t bytes, int64_t groups);

  void* finish();
  void submit_and_wait();
  void clear();

 private:
  void begin();
  VkDeviceAddress keep(const void* params, size_t bytes);
  void order(VkPipelineStageFlags from, VkAccessFlags written, VkPipelineStageFlags to, VkAccessFlags read);

  Device device_;
  Device::Impl& own_;
  VkCommandPool pool_ = VK_NULL_HANDLE;  // null: the caller's command buffer
  VkCommandBuffer commands_ = VK_NULL_HANDLE;
  bool ended_ = false;
  // Blocks of parameters: those before `block_` are full, and `used_` bytes of that one are.
  std::vector<Block> blocks_;
  size_t block_ = 0, used_ = 0;
};

// The recorder to record a call into. Throws where the stream has none.
Recorder::Impl& recorder_of(const Stream& stream, const char* op);

// Records a shader with a parameter struct, which the shader reads in scalar layout: members in order, each aligned to its scalars.
template <class Params>
void dispatch(const char* op, const Stream& stream, const Kernel& kernel, const Params& params, int64_t groups) {
  static_assert(std::is_trivially_copyable_v<Params> && sizeof(Params) % 8 == 0);
  recorder_of(stream, op).dispatch(op, kernel, &params, sizeof params, groups);
}

}  // namespace weft::vulkan
