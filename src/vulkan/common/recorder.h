// A command buffer that ops record into: dispatches with their parameters, each followed by a barrier.
#pragma once

#include <cstdint>

#include "vulkan/common/device.h"

namespace weft::vulkan {

// A dispatch that is ready to be recorded: every step that can fail is done. A step without a pipeline records nothing.
struct Step {
  VkPipeline pipeline = VK_NULL_HANDLE;
  uint64_t push[2] = {};
  std::array<uint32_t, 3> groups{};
};

// The smallest grid of three dimensions with at least `groups` workgroups, where `most` bounds each dimension. All zero: none is
// large enough.
std::array<uint32_t, 3> folded(int64_t groups, const std::array<uint32_t, 3>& most);

class Recorder::Impl {
 public:
  explicit Impl(Device device);
  Impl(Device device, VkCommandBuffer commands);
  ~Impl();

  // The recorder of a stream that has one.
  static Impl& of(const Stream& stream) { return *static_cast<Impl*>(stream.queue); }

  int device_ordinal() const { return device_.ordinal(); }
  const DeviceFacts& facts() const { return own_.facts(); }

  // Prepares a dispatch of `groups` workgroups of a shader. The push constants are the address of a copy of the parameters, and
  // `groups`. A workgroup finds its number by workgroup_number() of common/views.glsl, because the grid may have more workgroups
  // than `groups`.
  Step prepare(const char* op, const Kernel& kernel, const void* params, size_t bytes, int64_t groups);
  void record(const Step& step);

  void* finish();
  void submit_and_wait();
  void clear();

 private:
  struct Nothing {};
  Impl(Device device, Nothing) : device_(std::move(device)), own_(device_.impl()) {}
  void begin();
  VkDeviceAddress keep(const void* params, size_t bytes);
  void order(VkPipelineStageFlags from, VkAccessFlags written, VkPipelineStageFlags to, VkAccessFlags used);

  Device device_;
  Device::Impl& own_;
  VkCommandPool pool_ = VK_NULL_HANDLE;  // null: the caller's command buffer
  VkCommandBuffer commands_ = VK_NULL_HANDLE;
  bool ended_ = false;  // finish() was called
  // Blocks of parameters. Blocks before index `block_` are full; block `block_` has `used_` bytes in use.
  std::vector<Block> blocks_;
  size_t block_ = 0, used_ = 0;
};

// The recorder to record a call into. Throws where the stream has none.
Recorder::Impl& recorder_of(const Stream& stream, const char* op);

// Prepares a shader with a parameter struct, which the shader reads in scalar layout: members in order, each aligned to its scalars.
// An op of several dispatches prepares them all before it records the first, so that a failure leaves nothing recorded.
template <class Params>
Step prepare(const char* op, const Stream& stream, const Kernel& kernel, const Params& params, int64_t groups) {
  static_assert(std::is_trivially_copyable_v<Params> && sizeof(Params) % 8 == 0);
  return recorder_of(stream, op).prepare(op, kernel, &params, sizeof params, groups);
}
inline void record(const Stream& stream, const Step& step) { Recorder::Impl::of(stream).record(step); }

// An op of one dispatch.
template <class Params>
void dispatch(const char* op, const Stream& stream, const Kernel& kernel, const Params& params, int64_t groups) {
  record(stream, prepare(op, stream, kernel, params, groups));
}

}  // namespace weft::vulkan
