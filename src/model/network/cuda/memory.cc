// Device memory of the runner: see model/network/device.h.
#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>

#include "core/check.h"
#include "cuda/runner.h"
#include "model/network/device.h"

namespace weft::model {
namespace {

constexpr const char* kOp = "model";

// All allocations, to know the bytes in use and their peak.
struct Ledger {
  std::mutex mutex;
  std::map<void*, size_t> blocks;
  int64_t bytes = 0, peak = 0;
};
// Never destroyed: models with static lifetime release memory after other static objects are gone.
Ledger& ledger() {
  static auto* const one = new Ledger;
  return *one;
}
std::atomic<bool> in_use{false};

// A capture holds this mutex exclusively. Whatever synchronises a device holds it shared, because that would end a capture. Never
// destroyed, as above.
std::shared_mutex& captures() {
  static auto* const one = new std::shared_mutex;
  return *one;
}
thread_local bool captures_here = false;  // does this thread capture?

void check_no_capture(const char* what) {
  if (captures_here)
    throw Error(fail(Code::device_error, kOp, what, "is requested while a graph is captured, wanted before or after the capture"));
}

std::string megabytes(size_t bytes) { return std::to_string(bytes / 1000000) + " MB"; }

}  // namespace

CapturesAlone::CapturesAlone() {
  captures().lock();
  captures_here = true;
}
CapturesAlone::~CapturesAlone() {
  captures_here = false;
  captures().unlock();
}

void* allocate_on_device(int device, size_t bytes) {
  check_no_capture("memory");
  Stream stream;
  stream.backend = Backend::cuda;
  stream.device = device;
  if (Status status = cuda::check_stream(stream, kOp); !status) throw Error(std::move(status));
  const cuda::OnDevice on(device, kOp);
  void* data = nullptr;
  if (const cudaError_t error = cudaMalloc(&data, bytes); error != cudaSuccess) {
    cudaGetLastError();
    if (error != cudaErrorMemoryAllocation) cuda::check(error, kOp, "memory");
    const DeviceMemory memory = device_memory(device);
    throw Error(fail(Code::device_error, kOp, "memory",
                     "of device " + std::to_string(device) + " has " + megabytes(static_cast<size_t>(memory.free)) + " free of " +
                         megabytes(static_cast<size_t>(memory.total)) + ", wanted " + megabytes(bytes) + " more"));
  }
  in_use = true;
  Ledger& l = ledger();
  const std::lock_guard lock(l.mutex);
  l.blocks[data] = bytes;
  l.bytes += static_cast<int64_t>(bytes);
  l.peak = std::max(l.peak, l.bytes);
  return data;
}

void release_on_device(int device, void* data) noexcept {
  if (!data) return;
  {
    Ledger& l = ledger();
    const std::lock_guard lock(l.mutex);
    const auto block = l.blocks.find(data);
    if (block != l.blocks.end()) {
      l.bytes -= static_cast<int64_t>(block->second);
      l.blocks.erase(block);
    }
  }
  try {
    const cuda::OnDevice on(device, kOp);
    cudaFree(data);
  } catch (const Error&) {  // the driver has shut down and freed the memory
  }
}

void copy_on_devices(void* to, const void* from, size_t bytes) {
  check_no_capture("copy");
  const std::shared_lock lock(captures());
  for (const void* end : {static_cast<const void*>(to), from}) {
    cudaPointerAttributes attributes{};
    cuda::check(cudaPointerGetAttributes(&attributes, end), kOp, "copy");
    if (attributes.type != cudaMemoryTypeDevice) continue;
    const cuda::OnDevice on(attributes.device, kOp);
    cuda::check(cudaDeviceSynchronize(), kOp, "copy");
  }
  cuda::check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), kOp, "copy");
  cuda::check(cudaStreamSynchronize(nullptr), kOp, "copy");  // copies within a device are asynchronous
}

void copy_on_stream(const Stream& stream, void* to, const void* from, size_t bytes) {
  const cuda::OnDevice on(stream.device, kOp);
  cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, cuda::queue_of(stream)), kOp, "copy");
}

bool devices_in_use() { return in_use; }

DeviceMemory device_memory(int device) {
  const cuda::OnDevice on(device, kOp);
  size_t free = 0, total = 0;
  cuda::check(cudaMemGetInfo(&free, &total), kOp, "memory");
  return {static_cast<int64_t>(free), static_cast<int64_t>(total)};
}

int64_t device_bytes() {
  Ledger& l = ledger();
  const std::lock_guard lock(l.mutex);
  return l.bytes;
}

int64_t peak_device_bytes() {
  Ledger& l = ledger();
  const std::lock_guard lock(l.mutex);
  return l.peak;
}

}  // namespace weft::model
