// What physical devices can do, and instances of Vulkan.
#pragma once

#include <array>
#include <functional>
#include <vector>

#include "vulkan/common/api.h"
#include "weft/status.h"
#include "weft/vulkan.h"

namespace weft::vulkan {

// Lanes of a team, which shares a row in every shader: the smallest subgroup size that check_stream() accepts. See
// common/lanes.glsl.
inline constexpr int kLanes = 8;

// A physical device: what callers see of it, and what the library decides by.
struct DeviceFacts {
  Properties properties;
  std::array<uint8_t, VK_UUID_SIZE> device_uuid{}, driver_uuid{};
  uint32_t queue_family = 0;              // the family to compute on, preferably one without graphics
  bool storage8 = false;                  // shaders may read and write bytes
  bool portability = false;               // has VK_KHR_portability_subset, which must then be enabled
  std::array<uint32_t, 3> most_groups{};  // most workgroups of a dispatch, by dimension

  bool is(const DeviceFacts& other) const { return device_uuid == other.device_uuid && driver_uuid == other.driver_uuid; }
};

// An instance with its functions.
class Instance {
 public:
  using OnMessage = std::function<void(const std::string&)>;
  // Makes an instance. Throws Error.
  explicit Instance(bool validate = false, OnMessage on_message = {});
  // Adopts an instance of the caller, who destroys it. Throws Error.
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

// With a recorder: facts of its device, without the features that an adopted device did not enable. Without a recorder: facts of
// the stream's device. The caller has called check_stream().
const DeviceFacts& facts_of(const Stream& stream);

}  // namespace weft::vulkan
