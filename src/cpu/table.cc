// The cpu backend's table: SIMD kernels, one row per op.
#include <thread>

#include "core/backend.h"

namespace weft {
namespace {

BackendTable make_table() {
  BackendTable table;
  table.list_devices = [](std::vector<DeviceInfo>& devices) {
    devices.push_back({Backend::cpu, 0, "cpu", std::to_string(std::thread::hardware_concurrency()) + " threads", true, ""});
  };
  return table;
}

}  // namespace

const BackendTable* cpu_backend() {
  static const BackendTable table = make_table();
  return &table;
}

}  // namespace weft
