// Opens and adopts devices, makes pipelines, submits: see device.h. Memory is in memory.cc.
#include "vulkan/common/device.h"

#include <algorithm>
#include <cstring>

#include "core/fail.h"
#include "vulkan/common/shaders.h"

namespace weft::vulkan {
namespace {

constexpr const char* kWho = "vulkan";

[[noreturn]] void refuse(const char* argument, const std::string& what) {
  throw Error(fail(Code::invalid_argument, kWho, argument, what));
}

}  // namespace

// The other constructors begin with this one, so that their exceptions run the destructor.
Device::Impl::Impl(int which, std::unique_ptr<Instance> instance, VkPhysicalDevice physical)
    : ordinal(which), instance_(std::move(instance)), facts_(instance_->facts(physical)) {}

Device::Impl::Impl(int which, std::unique_ptr<Instance> instance, VkPhysicalDevice physical, const OpenOptions& options)
    : Impl(which, std::move(instance), physical) {
  staged_copies_ = options.staged_copies;
  open(physical);
  begin();
}

Device::Impl::Impl(int which, std::unique_ptr<Instance> instance, const Handles& given)
    : Impl(which, std::move(instance), static_cast<VkPhysicalDevice>(given.physical_device)) {
  owned_ = false;
  handles = given;
  device = static_cast<VkDevice>(given.device);
  queue_ = static_cast<VkQueue>(given.queue);
  facts_.properties.f16 = facts_.properties.f16 && given.f16;
  facts_.properties.int8 = facts_.properties.int8 && given.int8;
  facts_.storage8 = facts_.properties.int8;
  api = device_api(instance_->api, device);
  begin();
}

void Device::Impl::open(VkPhysicalDevice chosen) {
  const DeviceFacts& own = facts();
  const float priority = 1;
  auto queue = made<VkDeviceQueueCreateInfo>(VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO);
  queue.queueFamilyIndex = own.queue_family;
  queue.queueCount = 1;
  queue.pQueuePriorities = &priority;
  auto control =
      made<VkPhysicalDeviceSubgroupSizeControlFeaturesEXT>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_FEATURES_EXT);
  control.computeFullSubgroups = VK_TRUE;
  auto f11 = made<VkPhysicalDeviceVulkan11Features>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES, &control);
  f11.storageBuffer16BitAccess = VK_TRUE;
  auto f12 = made<VkPhysicalDeviceVulkan12Features>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES, &f11);
  f12.bufferDeviceAddress = f12.scalarBlockLayout = VK_TRUE;
  f12.shaderFloat16 = own.properties.f16;
  f12.shaderInt8 = own.properties.int8;
  f12.storageBuffer8BitAccess = own.storage8;
  auto features = made<VkPhysicalDeviceFeatures2>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2, &f12);
  features.features.shaderInt64 = VK_TRUE;
  std::vector<const char*> extensions{VK_EXT_SUBGROUP_SIZE_CONTROL_EXTENSION_NAME};
  if (own.portability) extensions.push_back("VK_KHR_portability_subset");
  auto info = made<VkDeviceCreateInfo>(VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO, &features);
  info.queueCreateInfoCount = 1;
  info.pQueueCreateInfos = &queue;
  info.enabledExtensionCount = static_cast<uint32_t>(extensions.size());
  info.ppEnabledExtensionNames = extensions.data();
  check(instance_->api.vkCreateDevice(chosen, &info, nullptr, &device), kWho, "device");
  api = device_api(instance_->api, device);
  api.vkGetDeviceQueue(device, own.queue_family, 0, &queue_);
  handles = {instance_->handle, chosen, device, queue_, own.queue_family, own.properties.f16, own.properties.int8};
}

void Device::Impl::begin() {
  if (const char* name = missing(api)) refuse("device", std::string("lacks ") + name);
  instance_->api.vkGetPhysicalDeviceMemoryProperties(static_cast<VkPhysicalDevice>(handles.physical_device), &memory_);
  const VkPushConstantRange range{VK_SHADER_STAGE_COMPUTE_BIT, 0, kPushBytes};
  auto info = made<VkPipelineLayoutCreateInfo>(VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO);
  info.pushConstantRangeCount = 1;
  info.pPushConstantRanges = &range;
  check(api.vkCreatePipelineLayout(device, &info, nullptr, &layout), kWho, "pipeline layout");
  const auto fence = made<VkFenceCreateInfo>(VK_STRUCTURE_TYPE_FENCE_CREATE_INFO);
  check(api.vkCreateFence(device, &fence, nullptr, &fence_), kWho, "fence");
  auto pool = made<VkCommandPoolCreateInfo>(VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO);
  pool.flags = VK_COMMAND_POOL_CREATE_TRANSIENT_BIT;
  pool.queueFamilyIndex = handles.queue_family;
  check(api.vkCreateCommandPool(device, &pool, nullptr, &copy_pool_), kWho, "command pool");
  auto commands = made<VkCommandBufferAllocateInfo>(VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO);
  commands.commandPool = copy_pool_;
  commands.level = VK_COMMAND_BUFFER_LEVEL_PRIMARY;
  commands.commandBufferCount = 1;
  check(api.vkAllocateCommandBuffers(device, &commands, &copy_commands_), kWho, "command buffer");
}

Device::Impl::~Impl() {
  if (!device || missing(api)) return;
  if (owned_) api.vkDeviceWaitIdle(device);
  for (const auto& [key, pipeline] : pipelines_) api.vkDestroyPipeline(device, pipeline, nullptr);
  for (const auto& [address, block] : blocks_) free_block(block);
  if (staging_) free_block(*staging_);
  api.vkDestroyCommandPool(device, copy_pool_, nullptr);
  api.vkDestroyFence(device, fence_, nullptr);
  api.vkDestroyPipelineLayout(device, layout, nullptr);
  if (owned_) api.vkDestroyDevice(device, nullptr);
}

VkPipeline Device::Impl::pipeline(const Kernel& kernel, const char* op) {
  const std::lock_guard lock(pipelines_mutex_);
  const auto [found, added] = pipelines_.try_emplace({kernel.shader, kernel.constants}, VK_NULL_HANDLE);
  if (!added) return found->second;
  try {
    found->second = make_pipeline(kernel, op);
  } catch (...) {
    pipelines_.erase(found);
    throw;
  }
  return found->second;
}

VkPipeline Device::Impl::make_pipeline(const Kernel& kernel, const char* op) {
  const auto shaders = all_shaders();
  const auto shader = std::find_if(shaders.begin(), shaders.end(),
                                   [&](const ShaderCode& one) { return std::strcmp(one.name, kernel.shader) == 0; });
  if (shader == shaders.end())
    throw Error(fail(Code::unsupported, op, "shader", std::string(kernel.shader) + " is not in this build"));
  auto code = made<VkShaderModuleCreateInfo>(VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO);
  code.codeSize = shader->words().size_bytes();
  code.pCode = shader->words().data();
  VkShaderModule module = VK_NULL_HANDLE;
  check(api.vkCreateShaderModule(device, &code, nullptr, &module), op, "shader");

  std::vector<VkSpecializationMapEntry> entries;
  for (uint32_t i = 0; i < kernel.constants.size(); ++i) entries.push_back({i, i * 4, 4});
  const VkSpecializationInfo constants{static_cast<uint32_t>(entries.size()), entries.data(), entries.size() * 4,
                                       kernel.constants.data()};
  auto info = made<VkComputePipelineCreateInfo>(VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO);
  info.stage.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO;
  info.stage.stage = VK_SHADER_STAGE_COMPUTE_BIT;
  info.stage.module = module;
  info.stage.pName = "main";
  info.stage.pSpecializationInfo = &constants;
  info.stage.flags = VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT_EXT;
  info.layout = layout;
  VkPipeline made = VK_NULL_HANDLE;
  const VkResult result = api.vkCreateComputePipelines(device, VK_NULL_HANDLE, 1, &info, nullptr, &made);
  api.vkDestroyShaderModule(device, module, nullptr);
  check(result, op, "pipeline");
  return made;
}

void Device::Impl::submit_and_wait(VkCommandBuffer commands) {
  const std::lock_guard lock(queue_mutex_);
  auto submit = made<VkSubmitInfo>(VK_STRUCTURE_TYPE_SUBMIT_INFO);
  submit.commandBufferCount = 1;
  submit.pCommandBuffers = &commands;
  check(api.vkResetFences(device, 1, &fence_), kWho, "fence");
  check(api.vkQueueSubmit(queue_, 1, &submit, fence_), kWho, "submission");
  check(api.vkWaitForFences(device, 1, &fence_, VK_TRUE, UINT64_MAX), kWho, "wait");
}

Device Device::open(int ordinal, const OpenOptions& options) {
  Stream stream;
  stream.backend = Backend::vulkan;
  stream.device = ordinal;
  if (Status status = check_stream(stream, kWho); !status) throw Error(std::move(status));
  auto instance = std::make_unique<Instance>(options.validate, options.on_message);
  for (const VkPhysicalDevice physical : instance->physical_devices())  // an instance with layers may order them differently
    if (instance->facts(physical).is(all_devices()[static_cast<size_t>(ordinal)]))
      return Device(std::make_shared<Impl>(ordinal, std::move(instance), physical, options));
  refuse("device", std::to_string(ordinal) + " is gone");
}

Device Device::adopt(const Handles& handles) {
  if (!handles.instance || !handles.physical_device || !handles.device || !handles.queue)
    refuse("handles", "has a null handle, wanted instance, physical device, device and queue");
  const auto& all = all_devices();
  if (all.empty()) throw Error(fail(Code::unsupported, kWho, "handles", "cannot be used: " + why_no_device()));
  const auto find = handles.get_instance_proc_addr ? reinterpret_cast<PFN_vkGetInstanceProcAddr>(handles.get_instance_proc_addr)
                                                   : global_api().vkGetInstanceProcAddr;
  auto instance = std::make_unique<Instance>(static_cast<VkInstance>(handles.instance), find);
  const DeviceFacts facts = instance->facts(static_cast<VkPhysicalDevice>(handles.physical_device));
  if (!facts.properties.why_not.empty()) refuse("handles", "name " + facts.properties.name + ", which " + facts.properties.why_not);
  const auto same = std::find_if(all.begin(), all.end(), [&](const DeviceFacts& one) { return one.is(facts); });
  if (same == all.end()) refuse("handles", "name " + facts.properties.name + ", which list_devices() does not have");
  if (!instance->computes(static_cast<VkPhysicalDevice>(handles.physical_device), handles.queue_family))
    refuse("handles", "name queue family " + std::to_string(handles.queue_family) + ", which does not compute");
  return Device(std::make_shared<Impl>(static_cast<int>(same - all.begin()), std::move(instance), handles));
}

int Device::ordinal() const { return impl_->ordinal; }
const Properties& Device::properties() const { return impl_->facts().properties; }
Handles Device::handles() const { return impl_->handles; }
void* Device::allocate(size_t bytes) const { return impl_->allocate(bytes); }
void Device::release(void* address) const { impl_->release(address); }
void Device::upload(void* to, const void* from, size_t bytes) const { impl_->upload(to, from, bytes); }
void Device::download(void* to, const void* from, size_t bytes) const { impl_->download(to, from, bytes); }

}  // namespace weft::vulkan
