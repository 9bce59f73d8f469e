// The devices of the cuda backend: what they are, errors as sentences, and the device that a stream names.
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
  int shared_bytes = 0;  // the most that one block may take
  int l2_bytes = 0;
  size_t memory_bytes = 0;
};

// Every device that the driver shows, looked up once; empty, with a reason, when there is none.
const std::vector<DeviceFacts>& all_devices();
const std::string& why_no_device();
inline const DeviceFacts& facts_of(const Stream& stream) { return all_devices()[static_cast<size_t>(stream.device)]; }

// "580.65.06, CUDA 13.0"
std::string driver_text();

// Is the stream's device there, and new enough?
Status check_stream(const Stream& stream, const char* op);

// Throws Code::device_error unless `error` is success.
void check(cudaError_t error, const char* op, const char* what);

// Lets a kernel take all the shared memory that a block of the device can have; once for each, as it is the kernel's for all threads and
// for every graph that it is in.
void raise_shared_limit(const void* kernel, int device, const char* op);

// Clusters of `blocks` blocks of a kernel that a device has room for at once, each with so many threads and so much shared memory; looked
// up once for each kernel and size. 0: the device has none of that size.
int cluster_room(const void* kernel, int device, int blocks, int threads, size_t shared);

// Is a kernel's code on the current device made for Hopper's own instructions, not from the PTX for older ones?
bool compiled_for_hopper(const void* kernel);

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
