// Aligned, uninitialised blocks of memory on the host or on a device, and pretended blocks for dry runs.
//
// A dry run computes how much memory a run will need. It executes the code of a step with a pretended state, workspace and weights,
// which have distinct addresses but no memory: the addresses must not be dereferenced. Whatever would touch memory is skipped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "model/state/device_memory.h"
#include "weft/device.h"
#include "weft/tensor.h"

namespace weft::model {

// Copies bytes from or to a block. All such copies go through here. If the process uses devices, it synchronises them first.
inline void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  if (devices_in_use())
    copy_on_devices(to, from, bytes);
  else
    std::memcpy(to, from, bytes);
}

// The same. With a stream of a device, the copy is asynchronous, in the order of the stream's queue.
inline void copy_bytes(const Stream* stream, void* to, const void* from, size_t bytes) {
  if (stream && stream->backend == Backend::cuda && bytes > 0)
    copy_on_stream(*stream, to, from, bytes);
  else
    copy_bytes(to, from, bytes);
}

// Owns bytes aligned to kScratchAlignment.
class Block {
 public:
  Block() = default;
  static Block allocate(size_t bytes, Place place = Place::host, int device = 0) {
    Block block;
    void* data = place == Place::cuda ? allocate_on_device(device, bytes > 0 ? bytes : 1)
                                      : ::operator new(bytes > 0 ? bytes : 1, kAlignment);
    block.owned_ = {static_cast<std::byte*>(data), Free{place, device}};
    block.data_ = block.owned_.get();
    block.bytes_ = bytes;
    return block;
  }
  // A block for dry runs. `cursor` is the next free address of one owner and starts at kPretended.
  static constexpr uintptr_t kPretended = uintptr_t{1} << 40;
  static Block pretend(size_t bytes, uintptr_t& cursor) {
    Block block;
    block.data_ = reinterpret_cast<std::byte*>(cursor);
    block.bytes_ = bytes;
    cursor += (bytes / kScratchAlignment + 1) * kScratchAlignment;
    return block;
  }

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr auto kAlignment = std::align_val_t{kScratchAlignment};
  struct Free {
    Place place;
    int device;
    void operator()(std::byte* p) const {
      if (place == Place::cuda)
        release_on_device(device, p);
      else
        ::operator delete(p, kAlignment);
    }
  };
  std::unique_ptr<std::byte, Free> owned_;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace weft::model
