/// Vulkan devices, their memory, and recorders: what a caller of the vulkan backend needs. No header of Vulkan is included.
/// @file
///
///     vulkan::Device device = vulkan::Device::open(0);
///     void* x = device.allocate(bytes);                       // a device address, for Tensor::data with Place::vulkan
///     device.upload(x, host, bytes);
///     vulkan::Recorder recorder(device);
///     Stream stream{Backend::vulkan, device.ordinal(), recorder.queue()};
///     l2_norm(stream, args);                                  // records, computes nothing yet
///     recorder.submit_and_wait();                             // or submit recorder.finish() yourself; again and again if you like
///
/// Ops record into a command buffer and never submit. The first call of a kernel builds its pipeline, and recording may allocate
/// memory for parameters. A recorded command buffer may be submitted any number of times, also while it is pending: the tensors, the
/// recorder and the device must still exist. A barrier after each dispatch orders the ops of one recorder; barriers at both ends
/// order them with other commands of the queue and with the host.
///
/// The tensors of a call must be memory of the VkDevice of its recorder. Two devices that open() made of one ordinal are two
/// VkDevices, and an address of one means nothing to the other. No call can check that.
///
/// Thread safety: a Device may be used by several threads; a Recorder by one thread at a time. Copies and submit_and_wait() lock the
/// queue of the device; a caller who submits on its own must not do so at the same time.
///
/// Vulkan has no robust access through device addresses: sizes and strides must be right, as on the other backends. Indices in
/// tensors are checked by the shaders.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "weft/device.h"

#pragma GCC visibility push(default)  // what libweft.so exports
namespace weft::vulkan {

/// What a physical device is.
enum class Kind {
  other,        ///< something else
  integrated,   ///< a GPU that shares memory with the processor
  discrete,     ///< a GPU with memory of its own
  virtual_gpu,  ///< a GPU of a virtual machine
  cpu,          ///< a driver that computes on the processor, such as lavapipe
};
/// The name of a kind: "discrete GPU".
const char* kind_name(Kind kind);

/// A physical device as its driver describes it.
struct Properties {
  std::string name;                 ///< "NVIDIA H200"
  Kind kind = Kind::other;          ///< what it is
  std::string driver;               ///< "NVIDIA 580.159"
  int api_major = 0;                ///< of the Vulkan version
  int api_minor = 0;                ///< of the Vulkan version
  int subgroup_size = 0;            ///< lanes that exchange values without memory
  int64_t shared_bytes = 0;         ///< most shared memory of a workgroup
  int64_t memory_bytes = 0;         ///< of the largest heap of the device
  bool f16 = false;                 ///< arithmetic of 16-bit floats
  bool int8 = false;                ///< arithmetic and storage of bytes
  bool integer_dot = false;         ///< dot products of packed bytes
  bool cooperative_matrix = false;  ///< matrix products by subgroups
  std::string why_not;              ///< why no call can run on the device; empty where calls can
};

/// Every physical device that the loader finds, in its order: the ordinals of Stream::device and Tensor::device. Empty where there is
/// no loader or no driver; why_no_device() then says why. The list is made once per process.
const std::vector<Properties>& list_devices();
/// Why list_devices() is empty.
const std::string& why_no_device();

/// Vulkan handles, as the pointers that they are, and which optional features of the device are enabled.
struct Handles {
  void* instance = nullptr;         ///< VkInstance, of Vulkan 1.2 or later
  void* physical_device = nullptr;  ///< VkPhysicalDevice
  void* device = nullptr;           ///< VkDevice
  void* queue = nullptr;            ///< VkQueue of that family
  uint32_t queue_family = 0;        ///< a family that computes
  bool f16 = false;                 ///< shaderFloat16 is enabled
  bool int8 = false;                ///< storageBuffer8BitAccess and shaderInt8 are enabled
  /// PFN_vkGetInstanceProcAddr of the loader that made the handles; null: of the loader that this library opens
  void* get_instance_proc_addr = nullptr;
};

/// Choices of Device::open().
struct OpenOptions {
  /// Loads the validation layers. Every message of them is given to on_message. Throws where the layers are not installed.
  bool validate = false;
  /// Called on the thread whose call into Vulkan caused the message.
  std::function<void(const std::string& message)> on_message;
  /// Copies through staging buffers even where the host can map the memory of the device.
  bool staged_copies = false;
};

/// An open device: a shared handle. Memory, recorders and copies of the handle keep the device open.
class Device {
 public:
  /// Opens a physical device by its index in list_devices(). Throws Error.
  static Device open(int ordinal, const OpenOptions& options = {});
  /// Uses a device that the caller made and keeps. The caller must have enabled bufferDeviceAddress, scalarBlockLayout, shaderInt64,
  /// storageBuffer16BitAccess, and computeFullSubgroups of VK_EXT_subgroup_size_control. Optional features are used only where
  /// `handles` says that they are enabled. Throws Error.
  static Device adopt(const Handles& handles);

  int ordinal() const;                   ///< the index in list_devices()
  const Properties& properties() const;  ///< of the physical device; f16 and int8: whether they are enabled
  Handles handles() const;               ///< of the open device

  /// Memory of the device, aligned to 256 bytes, as a device address. Throws Error where there is none left. 0 bytes are an address, too.
  void* allocate(size_t bytes) const;
  /// Gives memory back. No pending work may use it. Null does nothing.
  void release(void* address) const;
  /// Copies between host and device, within one allocation. The copy comes after all that was submitted to the queue before, by the
  /// caller too. Returns when the copy is done.
  void upload(void* to, const void* from, size_t bytes) const;
  void download(void* to, const void* from, size_t bytes) const;  ///< the other way

  class [[gnu::visibility("hidden")]] Impl;  // opaque: src/vulkan/common/device.h
  Impl& impl() const { return *impl_; }      ///< for the library itself

 private:
  explicit Device(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<Impl> impl_;
};

/// A command buffer that ops record into, and the memory of their parameters.
class Recorder {
 public:
  /// A command buffer of its own, ready to record.
  explicit Recorder(const Device& device);
  /// Records into a VkCommandBuffer of the caller that is being recorded, and whose pipeline and push constants it overwrites. The
  /// caller ends and submits it, and keeps the Recorder while it may run.
  Recorder(const Device& device, void* command_buffer);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  /// For Stream::queue.
  void* queue() const;
  /// Records the last barrier, ends the command buffer if it is the recorder's own, and returns the VkCommandBuffer. A caller who
  /// records into its own command buffer calls finish() before other commands that use the results.
  void* finish();
  /// finish(), a submission to the queue of the device, and a wait for its end. May be called again to run the same work again.
  void submit_and_wait();
  /// Forgets what was recorded, which must not be pending, and begins again. Keeps its memory. A caller who records into its own command
  /// buffer begins that buffer again first: what was recorded must never be submitted again.
  void clear();

  class [[gnu::visibility("hidden")]] Impl;  // opaque: src/vulkan/common/recorder.h

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace weft::vulkan
#pragma GCC visibility pop
