// Vulkan's functions, found at run time: the loader is opened by dlopen, so that one binary serves machines with and without Vulkan.
#pragma once

#define VK_NO_PROTOTYPES
#include <vulkan/vulkan_core.h>

#include <string>

namespace weft::vulkan {

// The functions that need no instance, those of an instance, and those of a device.
#define WEFT_VK_GLOBAL(X)                   \
  X(vkCreateInstance)                       \
  X(vkEnumerateInstanceExtensionProperties) \
  X(vkEnumerateInstanceLayerProperties)
#define WEFT_VK_INSTANCE(X)                   \
  X(vkDestroyInstance)                        \
  X(vkEnumeratePhysicalDevices)               \
  X(vkGetPhysicalDeviceProperties2)           \
  X(vkGetPhysicalDeviceFeatures2)             \
  X(vkGetPhysicalDeviceMemoryProperties)      \
  X(vkGetPhysicalDeviceQueueFamilyProperties) \
  X(vkEnumerateDeviceExtensionProperties)     \
  X(vkCreateDevice)                           \
  X(vkGetDeviceProcAddr)
#define WEFT_VK_DEVICE(X)          \
  X(vkDestroyDevice)               \
  X(vkGetDeviceQueue)              \
  X(vkDeviceWaitIdle)              \
  X(vkQueueSubmit)                 \
  X(vkCreateFence)                 \
  X(vkDestroyFence)                \
  X(vkResetFences)                 \
  X(vkWaitForFences)               \
  X(vkCreateBuffer)                \
  X(vkDestroyBuffer)               \
  X(vkGetBufferMemoryRequirements) \
  X(vkGetBufferDeviceAddress)      \
  X(vkAllocateMemory)              \
  X(vkFreeMemory)                  \
  X(vkBindBufferMemory)            \
  X(vkMapMemory)                   \
  X(vkCreateCommandPool)           \
  X(vkDestroyCommandPool)          \
  X(vkResetCommandPool)            \
  X(vkAllocateCommandBuffers)      \
  X(vkBeginCommandBuffer)          \
  X(vkEndCommandBuffer)            \
  X(vkCreateShaderModule)          \
  X(vkDestroyShaderModule)         \
  X(vkCreatePipelineLayout)        \
  X(vkDestroyPipelineLayout)       \
  X(vkCreateComputePipelines)      \
  X(vkDestroyPipeline)             \
  X(vkCmdBindPipeline)             \
  X(vkCmdPushConstants)            \
  X(vkCmdDispatch)                 \
  X(vkCmdPipelineBarrier)          \
  X(vkCmdCopyBuffer)

#define WEFT_VK_POINTER(name) PFN_##name name = nullptr;
struct GlobalApi {
  PFN_vkGetInstanceProcAddr vkGetInstanceProcAddr = nullptr;  // null: there is no loader
  std::string why_not;
  WEFT_VK_GLOBAL(WEFT_VK_POINTER)
};
struct InstanceApi {
  WEFT_VK_INSTANCE(WEFT_VK_POINTER)
  // Null where the instance lacks VK_EXT_debug_utils.
  PFN_vkCreateDebugUtilsMessengerEXT vkCreateDebugUtilsMessengerEXT = nullptr;
  PFN_vkDestroyDebugUtilsMessengerEXT vkDestroyDebugUtilsMessengerEXT = nullptr;
};
struct DeviceApi {
  WEFT_VK_DEVICE(WEFT_VK_POINTER)
};
#undef WEFT_VK_POINTER

// The loader, opened once per process.
const GlobalApi& global_api();
InstanceApi instance_api(VkInstance instance, PFN_vkGetInstanceProcAddr find);
DeviceApi device_api(const InstanceApi& api, VkDevice device);

// The name of the first function that was not found; null where all are there.
const char* missing(const GlobalApi& api);
const char* missing(const InstanceApi& api);
const char* missing(const DeviceApi& api);

// A struct of Vulkan whose other members are zero.
template <class T>
T made(VkStructureType type, void* next = nullptr) {
  T value{};
  value.sType = type;
  value.pNext = next;
  return value;
}

// Throws Code::device_error unless `result` is success: "<op>: <what> failed: out of device memory".
void check(VkResult result, const char* op, const char* what);

}  // namespace weft::vulkan
