// A CUDA runtime without a device: see pretended_cuda.h.
#include "tests/support/pretended_cuda.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <sstream>

namespace weft::tests {
namespace {

constexpr int64_t kDefaultShared = 48 << 10, kMostThreads = 1024, kRegisters = 64 << 10, kMostCluster = 16;

int current = 0;                                                      // the device that cudaSetDevice() chose
std::map<std::pair<const void*, int>, int64_t> raised;                // dynamic shared memory that cudaFuncSetAttribute() allowed
std::map<const void*, std::string>& names_of_kernels() {              // from the address that the host launches
  static auto* const names = new std::map<const void*, std::string>;  // kernels register before and leave after main()
  return *names;
}

const PretendedDevice& device() { return pretended_devices()[static_cast<size_t>(current)]; }

void fault(const std::string& what) {
  std::vector<std::string>& faults = pretended_cuda().faults;
  if (faults.size() < 6) faults.push_back(device().name() + ": " + what);
}

// Facts of a kernel, or those of a kernel that is not in the build.
const KernelFacts& facts_of_kernel(const void* kernel) {
  static const KernelFacts none;
  const auto name = names_of_kernels().find(kernel);
  const auto& kernels = pretended_cuda().kernels;
  const auto found = name == names_of_kernels().end() ? kernels.end() : kernels.find(name->second);
  if (found != kernels.end()) return found->second;
  fault("a kernel that the build does not have: " + (name == names_of_kernels().end() ? "unregistered" : name->second));
  return none;
}

bool hopper_code(const KernelFacts& kernel) {
  return device().major == 9 && !pretended_cuda().portable && kernel.hopper_shared >= 0;
}

int64_t static_shared(const KernelFacts& kernel) {
  return std::max(hopper_code(kernel) ? kernel.hopper_shared : kernel.ptx_shared, 0);
}

void check_launch(const cudaLaunchConfig_t& config, const void* kernel) {
  const KernelFacts& facts = facts_of_kernel(kernel);
  const bool hopper = hopper_code(facts);
  const std::string& name = names_of_kernels()[kernel];
  if (!hopper && facts.ptx_shared < 0) fault(name + " has no code for this device");
  const auto dynamic = static_cast<int64_t>(config.dynamicSmemBytes), own = static_shared(facts), all = dynamic + own;
  const int64_t threads = int64_t{config.blockDim.x} * config.blockDim.y * config.blockDim.z;
  const auto text = [](int64_t number) { return std::to_string(number); };
  if (all > device().shared_bytes)
    fault(name + " wants " + text(dynamic) + " + " + text(own) + " bytes of shared memory, a block may have " +
          text(device().shared_bytes));
  const auto allowed = raised.find({kernel, current});
  if (dynamic > (allowed != raised.end() ? allowed->second : kDefaultShared - own))
    fault(name + " wants " + text(dynamic) + " bytes of dynamic shared memory, which nobody allowed");
  if (threads < 1 || threads > kMostThreads || (facts.most_threads > 0 && threads > facts.most_threads))
    fault(name + " has " + text(threads) + " threads, compiled for " + text(facts.most_threads));
  if (hopper && (facts.registers + 7) / 8 * 8 * threads > kRegisters)
    fault(name + " wants " + text(facts.registers) + " registers for each of " + text(threads) + " threads");
  if (config.gridDim.x < 1 || config.gridDim.y != 1 || config.gridDim.z != 1) fault(name + " has a grid that is not one row");
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (!hopper) fault(name + " is launched with attribute " + text(attribute.id) + ", which needs code for Hopper");
    if (attribute.id == cudaLaunchAttributeClusterDimension &&
        (attribute.val.clusterDim.x > kMostCluster || config.gridDim.x % attribute.val.clusterDim.x != 0))
      fault(name + " has " + text(config.gridDim.x) + " blocks in clusters of " + text(attribute.val.clusterDim.x));
  }
  PretendedCuda& cuda = pretended_cuda();
  cuda.largest.resize(pretended_devices().size());
  PretendedCuda::Largest& largest = cuda.largest[static_cast<size_t>(current)];
  ++largest.launches;
  if (all > largest.bytes) largest.bytes = all, largest.kernel = name;
  cuda.launched.insert(name);
}

CUresult encode_nothing(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                        const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                        CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}

std::vector<std::string> output_of(const std::string& command) {
  std::vector<std::string> lines;
  FILE* const pipe = popen(command.c_str(), "r");
  if (!pipe) return lines;
  std::string line;
  for (int c = std::getc(pipe); c != EOF; c = std::getc(pipe)) {
    if (c != '\n') {
      line += static_cast<char>(c);
      continue;
    }
    lines.push_back(std::move(line));
    line.clear();
  }
  return pclose(pipe) == 0 ? lines : std::vector<std::string>{};
}

// Text of `line` from behind `mark` to the first of `ends`; "" without the mark.
std::string behind(const std::string& line, const std::string& mark, const char* ends) {
  const size_t at = line.find(mark);
  if (at == std::string::npos) return "";
  const size_t from = at + mark.size();
  return line.substr(from, line.find_first_of(ends, from) - from);
}

// Bytes of a PTX declaration, ".shared .align 16 .b8 name[512];", rounded up to its alignment.
int shared_bytes_of(const std::string& line) {
  const int alignment = std::max(std::atoi(behind(line, ".align ", " ").c_str()), 1);
  const std::string count = behind(line, "[", "]");
  return ((count.empty() ? 1 : std::atoi(count.c_str())) + alignment - 1) / alignment * alignment;
}

// A declaration inside an entry is its own. One of the module counts for every entry that names it.
void read_ptx(const std::vector<std::string>& lines) {
  std::map<std::string, KernelFacts>& kernels = pretended_cuda().kernels;
  std::map<std::string, int> of_module;  // variables, by name
  std::set<std::string> named;           // by the current entry
  KernelFacts* entry = nullptr;
  for (const std::string& line : lines) {
    if (line.find(".target sm_") != std::string::npos) of_module.clear();
    if (const std::string name = behind(line, ".entry ", "("); !name.empty()) {
      entry = &kernels[name];
      *entry = {};
      entry->ptx_shared = 0;
      named.clear();
    }
    if (entry && line.find(".maxntid") != std::string::npos) {
      int x = 1, y = 1, z = 1;
      std::sscanf(line.c_str() + line.find(".maxntid") + 8, "%d, %d, %d", &x, &y, &z);
      entry->most_threads = x * y * z;
    }
    const size_t variable = line.find(".b8 ");
    if (line.find(".shared .align") != std::string::npos && line.find(".extern") == std::string::npos &&
        variable != std::string::npos) {
      if (entry)
        entry->ptx_shared += shared_bytes_of(line);
      else
        of_module[behind(line, ".b8 ", "[;")] = shared_bytes_of(line);
    } else if (entry) {
      for (const auto& [name, bytes] : of_module)
        if (line.find(name) != std::string::npos && named.insert(name).second) entry->ptx_shared += bytes;
    }
    if (line == "}") entry = nullptr;
  }
}

// cuobjdump counts 1 KB of every block that the system reserves on Hopper. The limit of a block does not contain it.
void read_machine_code(const std::vector<std::string>& lines) {
  constexpr int kReserved = 1024;
  std::string name;
  for (const std::string& line : lines) {
    if (line.find("Function ") != std::string::npos) name = behind(line, "Function ", ":");
    const std::string shared = behind(line, "SHARED:", " "), registers = behind(line, "REG:", " ");
    if (name.empty() || shared.empty()) continue;
    KernelFacts& kernel = pretended_cuda().kernels[name];
    kernel.hopper_shared = std::max(std::atoi(shared.c_str()) - kReserved, 0);
    kernel.registers = std::atoi(registers.c_str());
    name.clear();
  }
}

}  // namespace

const std::vector<PretendedDevice>& pretended_devices() {
  static const std::vector<PretendedDevice> devices = [] {
    constexpr int kKb = 1024;
    std::vector<PretendedDevice> all = {{8, 0, 163 * kKb, 108}, {8, 6, 99 * kKb, 84},    {8, 9, 99 * kKb, 128},
                                        {9, 0, 227 * kKb, 132}, {10, 0, 227 * kKb, 148}, {12, 0, 99 * kKb, 170}};
    for (size_t i = 0, count = all.size(); i < count; ++i)
      for (int few : {1, 8}) {
        all.push_back(all[i]);
        all.back().multiprocessors = few;
      }
    return all;
  }();
  return devices;
}

PretendedCuda& pretended_cuda() {
  static PretendedCuda cuda;
  return cuda;
}

std::string read_kernels(const std::string& cuobjdump) {
  if (cuobjdump.empty()) return "the CUDA toolkit has no cuobjdump";
  std::array<char, 4096> path{};
  if (readlink("/proc/self/exe", path.data(), path.size() - 1) <= 0) return "/proc/self/exe cannot be read";
  const std::string program = "'" + std::string(path.data()) + "'";
  read_ptx(output_of("'" + cuobjdump + "' -ptx " + program));
  read_machine_code(output_of("'" + cuobjdump + "' -arch sm_90a -res-usage " + program + " 2>/dev/null"));
  return pretended_cuda().kernels.empty() ? cuobjdump + " shows no kernels" : "";
}

// NOLINTBEGIN: names and types are those of the runtime and of the linker's --wrap.
extern "C" {

void __real___cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*);
void __wrap___cudaRegisterFunction(void** handle, const char* host, char* device_function, const char* name, int limit,
                                   uint3* thread, uint3* block, dim3* block_size, dim3* grid_size, int* warp_size) {
  names_of_kernels()[host] = name;
  __real___cudaRegisterFunction(handle, host, device_function, name, limit, thread, block, block_size, grid_size, warp_size);
}

cudaError_t __wrap_cudaGetDeviceCount(int* count) {
  *count = static_cast<int>(pretended_devices().size());
  return cudaSuccess;
}

cudaError_t __wrap_cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int index) {
  const PretendedDevice& asked = pretended_devices()[static_cast<size_t>(index)];
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = asked.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = asked.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = asked.multiprocessors; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = asked.shared_bytes; break;
    case cudaDevAttrL2CacheSize: *value = 40 << 20; break;
    default: fault("device attribute " + std::to_string(attribute) + " is not pretended"); return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

cudaError_t __wrap_cudaGetDeviceProperties(cudaDeviceProp* properties, int index) {
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "%s", pretended_devices()[static_cast<size_t>(index)].name().c_str());
  properties->totalGlobalMem = size_t{16} << 30;
  return cudaSuccess;
}

cudaError_t __wrap_cudaGetDevice(int* index) {
  *index = current;
  return cudaSuccess;
}

cudaError_t __wrap_cudaSetDevice(int index) {
  current = index;
  return cudaSuccess;
}

cudaError_t __wrap_cudaGetLastError() { return cudaSuccess; }

cudaError_t __wrap_cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  *attributes = {};
  const KernelFacts& facts = facts_of_kernel(kernel);
  attributes->sharedSizeBytes = static_cast<size_t>(static_shared(facts));
  attributes->ptxVersion = hopper_code(facts) ? 90 : 80;
  attributes->binaryVersion = device().major * 10 + device().minor;
  return cudaSuccess;
}

cudaError_t __wrap_cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value + static_shared(facts_of_kernel(kernel)) > device().shared_bytes) {
    fault(names_of_kernels()[kernel] + " is allowed more shared memory than a block may have");
    return cudaErrorInvalidValue;
  }
  raised[{kernel, current}] = value;
  return cudaSuccess;
}

cudaError_t __wrap_cudaOccupancyMaxActiveClusters(int* count, const void* kernel, const cudaLaunchConfig_t* config) {
  const int64_t blocks = config->attrs[0].val.clusterDim.x;
  const bool fits =
      static_cast<int64_t>(config->dynamicSmemBytes) + static_shared(facts_of_kernel(kernel)) <= device().shared_bytes;
  *count = fits && blocks <= kMostCluster ? static_cast<int>(device().multiprocessors / blocks) : 0;
  return cudaSuccess;
}

cudaError_t __wrap_cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(encode_nothing);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  check_launch(*config, kernel);
  return cudaSuccess;
}

}  // extern "C"
// NOLINTEND

}  // namespace weft::tests
