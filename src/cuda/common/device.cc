// The devices of the cuda backend: see device.h.
#include "cuda/common/device.h"

#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>

#include "core/check.h"

namespace weft::cuda {
namespace {

// The oldest compute capability that the kernels support: they need cp.async and bf16 mma.
constexpr int kOldestMajor = 8;

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, which, device) == cudaSuccess ? value : 0;
}

struct Found {
  std::vector<DeviceFacts> devices;
  std::string why_not;
  bool pretended = false;
};

Found look() {
  Found found;
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    cudaGetLastError();  // clears the error, which is reported here
    int driver = 0;      // stays 0 without a driver, which the runtime reports as a driver that is too old
    const bool none = cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0;
    found.why_not = none ? "no device: there is no NVIDIA driver" : std::string("no device: ") + cudaGetErrorString(error);
    return found;
  }
  if (count == 0) found.why_not = "no device: the driver shows none";
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) cudaGetLastError();
    found.devices.push_back({properties.name, attribute(cudaDevAttrComputeCapabilityMajor, i),
                             attribute(cudaDevAttrComputeCapabilityMinor, i), attribute(cudaDevAttrMultiProcessorCount, i),
                             attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, i), attribute(cudaDevAttrL2CacheSize, i),
                             properties.totalGlobalMem});
  }
  return found;
}

Found& found() {
  static Found once = look();
  return once;
}

}  // namespace

const std::vector<DeviceFacts>& all_devices() { return found().devices; }
const std::string& why_no_device() { return found().why_not; }

void pretend_device() {
  if (!found().devices.empty()) return;
  found().devices.push_back({"pretended H200", 9, 0, 132, 227 << 10, 50 << 20, size_t{141} << 30});
  found().pretended = true;
}

bool is_pretended() { return found().pretended; }

std::string driver_text() {
  std::string text;
  if (std::ifstream in("/sys/module/nvidia/version"); in) std::getline(in, text);
  int version = 0;
  if (cudaDriverGetVersion(&version) == cudaSuccess && version > 0)
    text += (text.empty() ? "CUDA " : ", CUDA ") + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  return text.empty() ? "unknown" : text;
}

Status check_stream(const Stream& stream, const char* op) {
  const auto& devices = all_devices();
  if (devices.empty()) return fail(Code::unsupported, op, "stream", "has " + why_no_device());
  if (stream.device < 0 || stream.device >= static_cast<int>(devices.size()))
    return fail(Code::unsupported, op, "stream",
                "is on device " + std::to_string(stream.device) + ", there are " + std::to_string(devices.size()));
  const DeviceFacts& facts = facts_of(stream);
  if (facts.major < kOldestMajor)
    return fail(Code::unsupported, op, "stream",
                "is on " + facts.name + " of compute capability " + std::to_string(facts.major) + "." +
                    std::to_string(facts.minor) + ", wanted at least " + std::to_string(kOldestMajor) + ".0");
  return {};
}

void check(cudaError_t error, const char* op, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw Error(fail(Code::device_error, op, what, std::string("failed: ") + cudaGetErrorString(error)));
}

void raise_shared_limit(const void* kernel, int device, const char* op) {
  if (found().pretended) return;
  struct Known {
    std::mutex mutex;
    std::set<std::pair<const void*, int>> kernels;
  };
  static auto* const known = new Known;  // never destroyed: kernels are launched until the program ends
  const std::lock_guard lock(known->mutex);
  if (known->kernels.contains({kernel, device})) return;
  const OnDevice on(device, op);
  cudaFuncAttributes own{};
  check(cudaFuncGetAttributes(&own, kernel), op, "launch");
  const int most = all_devices()[static_cast<size_t>(device)].shared_bytes - static_cast<int>(own.sharedSizeBytes);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), op, "launch");
  known->kernels.emplace(kernel, device);
}

bool compiled_for_hopper(const void* kernel, int device) {
  if (found().pretended) return true;
  const OnDevice on(device, "compiled_for_hopper");
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess) return attributes.ptxVersion >= 90;
  cudaGetLastError();
  return false;
}

int cluster_room(const void* kernel, int device, int blocks, int threads, size_t shared) {
  constexpr const char* kOp = "cluster_room";
  constexpr int kPortable = 8;
  if (all_devices()[static_cast<size_t>(device)].major < 9) return 0;
  if (found().pretended) return all_devices()[static_cast<size_t>(device)].multiprocessors / blocks;
  struct Known {
    std::mutex mutex;
    std::map<std::tuple<const void*, int, int>, int> room;
  };
  static auto* const known = new Known;  // as above
  raise_shared_limit(kernel, device, kOp);
  const std::lock_guard lock(known->mutex);
  const auto [found, added] = known->room.emplace(std::tuple(kernel, device, blocks), 0);
  if (!added) return found->second;
  const OnDevice on(device, kOp);
  // Code compiled from PTX for older devices has no cluster barriers, whatever device it runs on.
  if (!compiled_for_hopper(kernel, device)) return 0;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.attrs = &cluster;
  config.numAttrs = 1;
  int count = 0;
  if ((blocks > kPortable && cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess) ||
      cudaOccupancyMaxActiveClusters(&count, kernel, &config) != cudaSuccess) {
    cudaGetLastError();
    count = 0;
  }
  return found->second = count;
}

OnDevice::OnDevice(int device, const char* op) {
  int current = 0;
  check(cudaGetDevice(&current), op, "stream");
  if (current == device) return;
  check(cudaSetDevice(device), op, "stream");
  before_ = current;
}

OnDevice::~OnDevice() {
  if (before_ >= 0) cudaSetDevice(before_);
}

}  // namespace weft::cuda
