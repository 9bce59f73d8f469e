// Queries physical devices: see facts.h.
#include "vulkan/common/facts.h"

#include <algorithm>
#include <cstring>

#include "core/fail.h"
#include "vulkan/common/recorder.h"

namespace weft::vulkan {
namespace {

constexpr const char* kWho = "vulkan";
constexpr const char* kValidation = "VK_LAYER_KHRONOS_validation";

// VkPhysicalDeviceCooperativeMatrixFeaturesKHR, which older headers lack.
struct CooperativeMatrixFeatures {
  static constexpr auto kType = static_cast<VkStructureType>(1000506000);
  VkStructureType sType;
  void* pNext;
  VkBool32 cooperativeMatrix, cooperativeMatrixRobustBufferAccess;
};

struct Found {
  std::vector<DeviceFacts> devices;
  std::vector<Properties> properties;
  std::string why_not;
};

Found look() {
  Found found;
  found.why_not = global_api().why_not;
  if (!global_api().vkGetInstanceProcAddr) return found;
  try {
    const Instance instance;
    for (VkPhysicalDevice device : instance.physical_devices()) found.devices.push_back(instance.facts(device));
  } catch (const Error& error) {
    found.devices.clear();
    found.why_not = std::string("no device: ") + error.what();
    return found;
  }
  for (const DeviceFacts& facts : found.devices) found.properties.push_back(facts.properties);
  if (found.devices.empty()) found.why_not = "no device: no Vulkan driver shows one";
  return found;
}

const Found& found() {
  static const Found once = look();
  return once;
}

VKAPI_ATTR VkBool32 VKAPI_CALL forward_message(VkDebugUtilsMessageSeverityFlagBitsEXT, VkDebugUtilsMessageTypeFlagsEXT,
                                               const VkDebugUtilsMessengerCallbackDataEXT* data, void* user) {
  const auto& on_message = *static_cast<Instance::OnMessage*>(user);
  if (on_message && data->pMessage) on_message(data->pMessage);
  return VK_FALSE;
}

template <class Properties>
bool has_name(const std::vector<Properties>& all, const char* name) {
  return std::any_of(all.begin(), all.end(), [&](const Properties& one) {
    if constexpr (requires { one.extensionName; })
      return std::strcmp(one.extensionName, name) == 0;
    else
      return std::strcmp(one.layerName, name) == 0;
  });
}

// Calls `query(&count, items)` twice, as Vulkan's functions for lists need it: for the count, then for the items.
template <class T, class Query>
std::vector<T> list_of(const Query& query) {
  uint32_t count = 0;
  query(&count, nullptr);
  std::vector<T> items(count);
  if (count > 0) query(&count, items.data());
  items.resize(count);
  return items;
}

Kind kind_of(VkPhysicalDeviceType type) {
  switch (type) {
    case VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU: return Kind::integrated;
    case VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU: return Kind::discrete;
    case VK_PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU: return Kind::virtual_gpu;
    case VK_PHYSICAL_DEVICE_TYPE_CPU: return Kind::cpu;
    default: return Kind::other;
  }
}

std::vector<VkQueueFamilyProperties> queue_families(const InstanceApi& api, VkPhysicalDevice device) {
  return list_of<VkQueueFamilyProperties>(
      [&](uint32_t* count, VkQueueFamilyProperties* all) { api.vkGetPhysicalDeviceQueueFamilyProperties(device, count, all); });
}

// A queue family that computes, preferably one without graphics; -1 where no family computes.
int compute_family(const InstanceApi& api, VkPhysicalDevice device) {
  const auto families = queue_families(api, device);
  int chosen = -1;
  for (size_t i = 0; i < families.size(); ++i) {
    const VkQueueFlags flags = families[i].queueFlags;
    if (!(flags & VK_QUEUE_COMPUTE_BIT)) continue;
    if (chosen < 0) chosen = static_cast<int>(i);
    if (!(flags & VK_QUEUE_GRAPHICS_BIT)) return static_cast<int>(i);
  }
  return chosen;
}

}  // namespace

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::integrated: return "integrated GPU";
    case Kind::discrete: return "discrete GPU";
    case Kind::virtual_gpu: return "virtual GPU";
    case Kind::cpu: return "CPU";
    case Kind::other: return "other";
  }
  return "?";
}

const std::vector<DeviceFacts>& all_devices() { return found().devices; }
const std::vector<Properties>& list_devices() { return found().properties; }
const std::string& why_no_device() { return found().why_not; }

Instance::Instance(VkInstance instance, PFN_vkGetInstanceProcAddr find) : Instance(Nothing{}) {
  api = instance_api(instance, find);
  handle = instance;
  if (const char* name = missing(api))
    throw Error(fail(Code::invalid_argument, kWho, "handles", std::string("name an instance without ") + name));
}

Instance::Instance(bool validate, OnMessage on_message) : Instance(Nothing{}) {
  owned_ = true;
  on_message_ = std::move(on_message);
  const GlobalApi& global = global_api();
  if (!global.vkGetInstanceProcAddr) throw Error(fail(Code::unsupported, kWho, "instance", "has " + global.why_not));
  const auto extensions = list_of<VkExtensionProperties>(
      [&](uint32_t* count, VkExtensionProperties* all) { global.vkEnumerateInstanceExtensionProperties(nullptr, count, all); });
  auto application = made<VkApplicationInfo>(VK_STRUCTURE_TYPE_APPLICATION_INFO);
  application.pEngineName = "weft";
  application.apiVersion = VK_API_VERSION_1_2;
  auto info = made<VkInstanceCreateInfo>(VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO);
  info.pApplicationInfo = &application;
  std::vector<const char*> names;
  if (has_name(extensions, "VK_KHR_portability_enumeration")) {
    names.push_back("VK_KHR_portability_enumeration");
    info.flags |= VK_INSTANCE_CREATE_ENUMERATE_PORTABILITY_BIT_KHR;
  }
  if (validate) {
    const auto layers = list_of<VkLayerProperties>(
        [&](uint32_t* count, VkLayerProperties* all) { global.vkEnumerateInstanceLayerProperties(count, all); });
    if (!has_name(layers, kValidation))
      throw Error(
          fail(Code::unsupported, kWho, "validate", std::string("is set, but the layer ") + kValidation + " is not installed"));
    names.push_back(VK_EXT_DEBUG_UTILS_EXTENSION_NAME);
    info.enabledLayerCount = 1;
    info.ppEnabledLayerNames = &kValidation;
  }
  info.enabledExtensionCount = static_cast<uint32_t>(names.size());
  info.ppEnabledExtensionNames = names.data();
  check(global.vkCreateInstance(&info, nullptr, &handle), kWho, "instance");
  api = instance_api(handle, global.vkGetInstanceProcAddr);
  if (const char* name = missing(api)) throw Error(fail(Code::device_error, kWho, "instance", std::string("lacks ") + name));
  if (validate) listen();
}

void Instance::listen() {
  if (!api.vkCreateDebugUtilsMessengerEXT || !api.vkDestroyDebugUtilsMessengerEXT)
    throw Error(fail(Code::unsupported, kWho, "validate", "is set, but the instance lacks VK_EXT_debug_utils"));
  auto messages = made<VkDebugUtilsMessengerCreateInfoEXT>(VK_STRUCTURE_TYPE_DEBUG_UTILS_MESSENGER_CREATE_INFO_EXT);
  messages.messageSeverity = VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT | VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT;
  messages.messageType = VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT | VK_DEBUG_UTILS_MESSAGE_TYPE_PERFORMANCE_BIT_EXT;
  messages.pfnUserCallback = forward_message;
  messages.pUserData = &on_message_;
  check(api.vkCreateDebugUtilsMessengerEXT(handle, &messages, nullptr, &messenger_), kWho, "messenger");
}

Instance::~Instance() {
  if (!owned_) return;
  if (messenger_) api.vkDestroyDebugUtilsMessengerEXT(handle, messenger_, nullptr);
  if (handle && api.vkDestroyInstance) api.vkDestroyInstance(handle, nullptr);
}

std::vector<VkPhysicalDevice> Instance::physical_devices() const {
  return list_of<VkPhysicalDevice>(
      [&](uint32_t* count, VkPhysicalDevice* all) { return api.vkEnumeratePhysicalDevices(handle, count, all); });
}

bool Instance::computes(VkPhysicalDevice device, uint32_t queue_family) const {
  const auto families = queue_families(api, device);
  return queue_family < families.size() && (families[queue_family].queueFlags & VK_QUEUE_COMPUTE_BIT);
}

DeviceFacts Instance::facts(VkPhysicalDevice device) const {
  DeviceFacts facts;
  Properties& out = facts.properties;
  const auto extensions = list_of<VkExtensionProperties>(
      [&](uint32_t* count, VkExtensionProperties* all) { api.vkEnumerateDeviceExtensionProperties(device, nullptr, count, all); });

  auto id = made<VkPhysicalDeviceIDProperties>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_ID_PROPERTIES);
  auto subgroup = made<VkPhysicalDeviceSubgroupProperties>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_PROPERTIES, &id);
  auto driver = made<VkPhysicalDeviceDriverProperties>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_DRIVER_PROPERTIES, &subgroup);
  auto properties = made<VkPhysicalDeviceProperties2>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2, &driver);
  api.vkGetPhysicalDeviceProperties2(device, &properties);
  const VkPhysicalDeviceLimits& limits = properties.properties.limits;
  out.name = properties.properties.deviceName;
  out.kind = kind_of(properties.properties.deviceType);
  out.driver = std::string(driver.driverName) + (driver.driverInfo[0] ? " " : "") + driver.driverInfo;
  out.api_major = VK_API_VERSION_MAJOR(properties.properties.apiVersion);
  out.api_minor = VK_API_VERSION_MINOR(properties.properties.apiVersion);
  out.subgroup_size = static_cast<int>(subgroup.subgroupSize);
  out.shared_bytes = limits.maxComputeSharedMemorySize;
  std::copy_n(limits.maxComputeWorkGroupCount, 3, facts.most_groups.begin());
  std::copy_n(id.deviceUUID, VK_UUID_SIZE, facts.device_uuid.begin());
  std::copy_n(id.driverUUID, VK_UUID_SIZE, facts.driver_uuid.begin());

  VkPhysicalDeviceMemoryProperties memory;
  api.vkGetPhysicalDeviceMemoryProperties(device, &memory);
  for (uint32_t i = 0; i < memory.memoryHeapCount; ++i)
    if (memory.memoryHeaps[i].flags & VK_MEMORY_HEAP_DEVICE_LOCAL_BIT)
      out.memory_bytes = std::max(out.memory_bytes, static_cast<int64_t>(memory.memoryHeaps[i].size));

  const auto refuse = [&](const std::string& why) {
    if (out.why_not.empty()) out.why_not = why;
  };
  const bool old = properties.properties.apiVersion < VK_API_VERSION_1_2;
  if (old) refuse("has Vulkan " + std::to_string(out.api_major) + "." + std::to_string(out.api_minor) + ", wanted at least 1.2");
  // Structs of extensions that the device lacks stay out of the chain; their members stay zero.
  void* chain = nullptr;
  const auto with = [&](auto& features, const char* extension) {
    if (!has_name(extensions, extension)) return;
    features.pNext = chain;
    chain = &features;
  };
  auto control =
      made<VkPhysicalDeviceSubgroupSizeControlFeaturesEXT>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_FEATURES_EXT);
  with(control, VK_EXT_SUBGROUP_SIZE_CONTROL_EXTENSION_NAME);
  auto integer_dot = made<VkPhysicalDeviceShaderIntegerDotProductFeaturesKHR>(
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_INTEGER_DOT_PRODUCT_FEATURES_KHR);
  with(integer_dot, VK_KHR_SHADER_INTEGER_DOT_PRODUCT_EXTENSION_NAME);
  auto matrices = made<CooperativeMatrixFeatures>(CooperativeMatrixFeatures::kType);
  with(matrices, "VK_KHR_cooperative_matrix");
  auto f11 = made<VkPhysicalDeviceVulkan11Features>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES, chain);
  auto f12 = made<VkPhysicalDeviceVulkan12Features>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES, &f11);
  auto features = made<VkPhysicalDeviceFeatures2>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2, &f12);
  if (!old) api.vkGetPhysicalDeviceFeatures2(device, &features);
  const int family = compute_family(api, device);
  facts.queue_family = static_cast<uint32_t>(std::max(family, 0));
  if (family < 0) refuse("has no queue that computes");
  const auto want = [&](bool there, const char* name) {
    if (!there) refuse(std::string("lacks ") + name);
  };
  want(f12.bufferDeviceAddress, "bufferDeviceAddress");
  want(f12.scalarBlockLayout, "scalarBlockLayout");
  want(features.features.shaderInt64, "shaderInt64");
  want(f11.storageBuffer16BitAccess, "storageBuffer16BitAccess");
  want((subgroup.supportedOperations & VK_SUBGROUP_FEATURE_SHUFFLE_BIT) && (subgroup.supportedStages & VK_SHADER_STAGE_COMPUTE_BIT),
       "shuffles in compute shaders");
  // Shaders number their threads by subgroup, so subgroups must be full. Full subgroups have subgroup_size lanes, because no
  // pipeline allows a varying size.
  want(control.computeFullSubgroups, "computeFullSubgroups");
  if (out.subgroup_size < kLanes)
    refuse("has subgroups of " + std::to_string(out.subgroup_size) + " lanes, wanted at least " + std::to_string(kLanes));
  out.f16 = f12.shaderFloat16;
  out.int8 = f12.shaderInt8 && f12.storageBuffer8BitAccess;
  facts.storage8 = f12.storageBuffer8BitAccess;
  out.integer_dot = integer_dot.shaderIntegerDotProduct;
  out.cooperative_matrix = matrices.cooperativeMatrix;
  facts.portability = has_name(extensions, "VK_KHR_portability_subset");
  return facts;
}

Status check_stream(const Stream& stream, const char* op) {
  const auto& devices = all_devices();
  if (devices.empty()) return fail(Code::unsupported, op, "stream", "has " + why_no_device());
  if (stream.device < 0 || stream.device >= static_cast<int>(devices.size()))
    return fail(Code::unsupported, op, "stream",
                "is on device " + std::to_string(stream.device) + ", there are " + std::to_string(devices.size()));
  const Properties& properties = devices[static_cast<size_t>(stream.device)].properties;
  if (!properties.why_not.empty())
    return fail(Code::unsupported, op, "stream", "is on " + properties.name + ", which " + properties.why_not);
  if (stream.queue && Recorder::Impl::of(stream).device_ordinal() != stream.device)
    return fail(Code::invalid_argument, op, "stream",
                "is on device " + std::to_string(stream.device) + ", its recorder on device " +
                    std::to_string(Recorder::Impl::of(stream).device_ordinal()));
  return {};
}

const DeviceFacts& facts_of(const Stream& stream) {
  return stream.queue ? Recorder::Impl::of(stream).facts() : all_devices()[static_cast<size_t>(stream.device)];
}

}  // namespace weft::vulkan
