// Device memory of the runner. In a build without CUDA, the functions that need a device throw Error (src/stubs/model_cuda.cc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "weft/device.h"

namespace weft::model {

// Device memory, aligned to kScratchAlignment. Throws Error with the free bytes if it does not fit.
void* allocate_on_device(int device, size_t bytes);
void release_on_device(int device, void* data) noexcept;
// Copies bytes between any two addresses after synchronising the devices of both.
void copy_on_devices(void* to, const void* from, size_t bytes);
// Copies bytes in the order of the stream's queue, asynchronously. Host memory may be reused when the call returns.
void copy_on_stream(const Stream& stream, void* to, const void* from, size_t bytes);
// Copies rows within a table: row from + i to row to + i for i < count. No row is a source and a target.
struct RowMove {
  int32_t from = 0, to = 0, count = 0;
};
// Does all moves in the order of the stream's queue.
void move_on_stream(const Stream& stream, void* table, size_t row_bytes, std::span<const RowMove> moves);

// Held while its thread captures a graph. Meanwhile no other thread of the runner synchronises a device, which would end the
// capture, and the thread itself may not allocate device memory.
class CapturesAlone {
 public:
  CapturesAlone();
  ~CapturesAlone();
  CapturesAlone(const CapturesAlone&) = delete;
  CapturesAlone& operator=(const CapturesAlone&) = delete;
};

// Has this process ever allocated device memory?
bool devices_in_use();

struct DeviceMemory {
  int64_t free = 0, total = 0;
};
DeviceMemory device_memory(int device);
// Bytes that this process holds through allocate_on_device(): now, and at most so far.
int64_t device_bytes();
int64_t peak_device_bytes();

}  // namespace weft::model
