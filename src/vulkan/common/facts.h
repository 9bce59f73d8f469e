// What physical devices can do, and instances of Vulkan.
#pragma once

#include <array>
#include <functional>
#include <vector>

#include "vulkan/common/api.h"
#include "weft/status.h"
#include "weft/vulkan.h"

namespace weft::vulkan {

// Lanes that share a row in every shader: the smallest subgroup that a device may have. See common/lanes.glsl.
inline constexpr int kLanes = 8;

// A physical device: what callers see of it, and what the library decides by.
struct DeviceFacts {
  Properties properties;
  std::array<uint8_t, VK_UUID_SIZE> device_uuid{}, driver_uuid{};
  uint32_t queue_family = 0;              // the one to compute on: without graphics where there is one
  bool storage8 = false;                  // shaders may read and write bytes
  bool portability = false;               // has VK_KHR_portability_subset, which must then be enabled
  std::array<uint32_t, 3> most_groups{};  // of a dispatch, by dimension

  bool is(const DeviceFacts& other) const { return device_uuid == other.device_uuid && driver_uuid == other.driver_uuid; }
};

// An instance with its functions.
class Instance {
 public:
  using OnMessage = std::function<void(const std::string&)>;
  // Throws Error.
  explicit Instance(bool validate = false, OnMessage on_message = {});
  // Of the caller, who destroys it. Throws Error.
  Instance(VkInstance instance, PFN_vkGetInstanceProcAddr find);
  ~Instance();
  Instance(const Instance&) = delete;
  Instance& operator=(const Instance&) = delete;

  InstanceApi api;
  VkInstance handle = VK_NULL_HANDLE;

  std::vector<VkPhysicalDevice> physical_devices() const;
  DeviceFacts facts(VkPhysicalDevice device) const;
  bool computes(VkPhysicalDevice device, uint32_t queue_family) const;

 private:
  struct Nothing {};
  explicit Instance(Nothing) {}  // the other constructors begin with it, so that their exceptions run the destructor
  void listen();

  bool owned_ = false;
  VkDebugUtilsMessengerEXT messenger_ = VK_NULL_HANDLE;
  OnMessage on_message_;
};

// Facts of every physical device, queried once per process. Empty without a loader or a driver.
const std::vector<DeviceFacts>& all_devices();

// Does the stream's device exist and have what every shader needs? With a queue: is it a recorder of that device?
Status check_stream(const Stream& stream, const char* op);

// Facts of the device of the stream's recorder, which may lack features that an adopted device did not enable; without a recorder, of
// the stream's device. check_stream() has passed.
const DeviceFacts& facts_of(const Stream& stream);

}  // namespace weft::vulkan
