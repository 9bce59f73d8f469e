// Finds Vulkan's functions: see api.h.
#include "vulkan/common/api.h"

#include <dlfcn.h>

#include "core/fail.h"

namespace weft::vulkan {
namespace {

GlobalApi open_loader() {
  GlobalApi api;
  void* library = nullptr;
  for (const char* name : {"libvulkan.so.1", "libvulkan.so", "libvulkan.1.dylib", "libMoltenVK.dylib"})
    if (!library) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library) api.vkGetInstanceProcAddr = reinterpret_cast<PFN_vkGetInstanceProcAddr>(dlsym(library, "vkGetInstanceProcAddr"));
  if (!api.vkGetInstanceProcAddr) {
    api.why_not = "no device: there is no Vulkan loader (libvulkan.so.1)";
    return api;
  }
#define WEFT_VK_FIND(name) api.name = reinterpret_cast<PFN_##name>(api.vkGetInstanceProcAddr(nullptr, #name));
  WEFT_VK_GLOBAL(WEFT_VK_FIND)
#undef WEFT_VK_FIND
  if (const char* name = missing(api)) {
    api.vkGetInstanceProcAddr = nullptr;
    api.why_not = std::string("no device: the Vulkan loader lacks ") + name;
  }
  return api;
}

const char* result_text(VkResult result) {
  switch (result) {
    case VK_ERROR_OUT_OF_HOST_MEMORY: return "out of host memory";
    case VK_ERROR_OUT_OF_DEVICE_MEMORY: return "out of device memory";
    case VK_ERROR_INITIALIZATION_FAILED: return "initialisation failed";
    case VK_ERROR_DEVICE_LOST: return "the device is lost";
    case VK_ERROR_LAYER_NOT_PRESENT: return "a layer is not installed";
    case VK_ERROR_EXTENSION_NOT_PRESENT: return "an extension is missing";
    case VK_ERROR_FEATURE_NOT_PRESENT: return "a feature is missing";
    case VK_ERROR_INCOMPATIBLE_DRIVER: return "no driver for this version of Vulkan";
    case VK_ERROR_TOO_MANY_OBJECTS: return "too many objects";
    default: return nullptr;
  }
}

}  // namespace

const GlobalApi& global_api() {
  static const GlobalApi api = open_loader();
  return api;
}

InstanceApi instance_api(VkInstance instance, PFN_vkGetInstanceProcAddr find) {
  InstanceApi api;
#define WEFT_VK_FIND(name) api.name = reinterpret_cast<PFN_##name>(find(instance, #name));
  WEFT_VK_INSTANCE(WEFT_VK_FIND)
  WEFT_VK_FIND(vkCreateDebugUtilsMessengerEXT)
  WEFT_VK_FIND(vkDestroyDebugUtilsMessengerEXT)
#undef WEFT_VK_FIND
  return api;
}

DeviceApi device_api(const InstanceApi& instance, VkDevice device) {
  DeviceApi api;
#define WEFT_VK_FIND(name) api.name = reinterpret_cast<PFN_##name>(instance.vkGetDeviceProcAddr(device, #name));
  WEFT_VK_DEVICE(WEFT_VK_FIND)
#undef WEFT_VK_FIND
  return api;
}

#define WEFT_VK_MISSING(name) \
  if (!api.name) return #name;
const char* missing(const GlobalApi& api) {
  WEFT_VK_GLOBAL(WEFT_VK_MISSING)
  return nullptr;
}
const char* missing(const InstanceApi& api) {
  WEFT_VK_INSTANCE(WEFT_VK_MISSING)
  return nullptr;
}
const char* missing(const DeviceApi& api) {
  WEFT_VK_DEVICE(WEFT_VK_MISSING)
  return nullptr;
}
#undef WEFT_VK_MISSING

void check(VkResult result, const char* op, const char* what) {
  if (result == VK_SUCCESS) return;
  const char* text = result_text(result);
  throw Error(fail(Code::device_error, op, what,
                   std::string("failed: ") + (text ? text : ("VkResult " + std::to_string(static_cast<int>(result))).c_str())));
}

}  // namespace weft::vulkan
