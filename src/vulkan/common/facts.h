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
  std::array<uint8_t, VK_UUID_SIZE> uuid{};
  uint32_t queue_family = 0;              // the one to compute on: without graphics where there is one
  bool full_subgroups = false;            // workgroups of full subgroups of subgroup_size lanes can be asked for
  bool storage8 = false;                  // shaders may read and write bytes
  bool portability = false;               // has VK_KHR_portability_subset, which must then be enabled
  std::array<uint32_t, 3> most_groups{};  // of a dispatch, by dimension
};

// An instance with its functions. Without `message`, no layers.
class Instance {
 public:
  using OnMessage = std::function<void(const std::string&)>;
  // Throws Error.
  explicit Instance(bool validate = false, OnMessage on_message = {});
  // Of the caller, who destroys it.
  explicit Instance(VkInstance instance) : api(instance_api(instance)), handle(instance) {}
  ~Instance();
  Instance(const Instance&) = delete;
  Instance& operator=(const Instance&) = delete;

  InstanceApi api;
  VkInstance handle = VK_NULL_HANDLE;

  std::vector<VkPhysicalDevice> physical_devices() const;
  DeviceFacts facts(VkPhysicalDevice device) const;

 private:
  bool owned_ = false;
  VkDebugUtilsMessengerEXT messenger_ = VK_NULL_HANDLE;
  OnMessage on_message_;
};

// Facts of every physical device, queried once per process. Empty without a loader or a driver.
const std::vector<DeviceFacts>& all_devices();

// Does the stream's device exist and have what every shader needs? With a queue: is it a recorder of that device?
Status check_stream(const Stream& stream, const char* op);

}  // namespace weft::vulkan
