// The table of the cpu backend, whose SIMD kernels are built for several instruction sets and dispatched at run time.
#include "cpu/table.h"

#include <algorithm>
#include <fstream>
#include <string>

#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"

namespace weft {
namespace {

// The model name in /proc/cpuinfo, or "cpu" where that file has none.
std::string processor_name() {
  std::ifstream list("/proc/cpuinfo");
  for (std::string line; std::getline(list, line);)
    if (line.starts_with("model name")) return line.substr(std::min(line.size(), line.find(": ") + 2));
  return "cpu";
}

void list_devices(std::vector<DeviceInfo>& devices) {
  const int threads = cpu::thread_count(Stream{});
  std::string detail = std::to_string(threads) + " threads;";
  for (Isa isa : cpu::available_isas()) detail += std::string(" ") + isa_name(isa);
  devices.push_back({Backend::cpu, 0, processor_name(), detail, true, "", threads});
}

}  // namespace

namespace cpu {
namespace {

BackendTable make_table() {
  BackendTable table;
  table.check_stream = cpu::check_isa;
  table.list_devices = list_devices;
  WEFT_FILL_ENTRIES
  return table;
}

}  // namespace
}  // namespace cpu

const BackendTable* cpu_backend() {
  static const BackendTable table = cpu::make_table();
  return &table;
}

}  // namespace weft
