// Conditions of a measurement: see conditions.h.
#include "tools/conditions.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "cases/cuda_device.h"
#include "cases/verify.h"
#include "cases/vulkan_device.h"
#include "tools/build_info.h"
#include "tools/roofline.h"

namespace weft::tools {

int threads_of(const Stream& stream) {
  if (stream.backend != Backend::cpu) return 1;
  if (stream.threads > 0) return stream.threads;
  for (const DeviceInfo& info : devices(Backend::cpu)) return info.threads;
  return 1;
}

MachineLoad machine_load() {
  MachineLoad load;
  load.cores = std::max(static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN)), 1);  // the load average counts all of them
  load.known = ::getloadavg(&load.average, 1) == 1;
  return load;
}

namespace {

std::string driver_of(const Stream& stream) {
  if (stream.backend == Backend::cuda) return cases::cuda_driver();
  if (stream.backend == Backend::vulkan) return cases::vulkan_driver(stream.device);
  return system_name();
}

}  // namespace

nlohmann::ordered_json conditions(const Stream& stream) {
  const bool on_device = stream.backend == Backend::cuda || stream.backend == Backend::vulkan;
  std::string device = processor_name();
  for (const DeviceInfo& info : devices(stream.backend))
    if (on_device && info.device == stream.device) device = info.name;
  const std::vector<Isa> isas = cases::usable_isas();
  const Isa isa = stream.isa == Isa::best && !isas.empty() ? isas.front() : stream.isa;
  return {{"device", device},       {"driver", driver_of(stream)}, {"isa", isa_name(isa)}, {"threads", threads_of(stream)},
          {"commit", kBuildCommit}, {"dirty", kBuildDirty}};
}

}  // namespace weft::tools
