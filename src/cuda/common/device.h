// The devices of the cuda backend: their properties, errors as sentences, and the device that a stream names.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "weft/device.h"
#include "weft/status.h"

namespace weft::cuda {

struct DeviceFacts {
  std::string name;
  int major = 0, minor = 0;
  int multiprocessors = 0;
  int shared_bytes = 0;  // largest shared memory of a block
  int l2_bytes = 0;
  size_t memory_bytes = 0;
};

// Every device that the driver reports, queried once. Without a device the list is empty and why_no_device() gives the reason.
const std::vector<DeviceFacts>& all_devices();
const std::string& why_no_device();
inline const DeviceFacts& facts_of(const Stream& stream) { return all_devices()[static_cast<size_t>(stream.device)]; }

// Where there is no device, an H200 for plans alone: `weft ops` says which kernels calls would take. Nothing can be launched on it. Call this
// before anything else here.
void pretend_device();
bool is_pretended();

// "580.65.06, CUDA 13.0"
std::string driver_text();

// Does the stream's device exist, and is it new enough?
Status check_stream(const Stream& stream, const char* op);

// Throws Code::device_error unless `error` is success.
void check(cudaError_t error, const char* op, const char* what);

// Raises a kernel's limit of dynamic shared memory to what a block of the device can have. The attribute belongs to the kernel, for all host
// threads and captured graphs, so that it is set once per kernel and device.
void raise_shared_limit(const void* kernel, int device, const char* op);

// How many clusters of `blocks` blocks of a kernel can be active on a device at once, for the given threads and shared memory per block.
// Queried once per kernel, device and cluster size. 0: the device cannot run clusters of that size.
int cluster_room(const void* kernel, int device, int blocks, int threads, size_t shared);

// Was a kernel's code on a device compiled for Hopper, and not from the PTX for older devices? The answer is the same for all kernels
// of a build and for all devices of compute capability 9.
bool compiled_for_hopper(const void* kernel, int device);

inline cudaStream_t queue_of(const Stream& stream) { return static_cast<cudaStream_t>(stream.queue); }

// Makes a device the calling thread's current one for a scope.
class OnDevice {
 public:
  OnDevice(int device, const char* op);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = -1;
};

}  // namespace weft::cuda
