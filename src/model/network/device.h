// The GPU side of the runner behind plain functions: memory, weights, and the Compute of the cuda backend. Builds without CUDA have them
// too, and they refuse with a sentence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "weft/device.h"

namespace weft::model {

class Compute;
struct ModelConfig;
struct Weights;

// Memory of a device, aligned to kScratchAlignment. Throws Error that says what is free when it does not fit.
void* allocate_on_device(int device, size_t bytes);
void release_on_device(int device, void* data) noexcept;
// Bytes between any two places, after everything that any queue of the devices was asked to do.
void copy_on_devices(void* to, const void* from, size_t bytes);
// The same in the order of a stream's queue, without waiting: the bytes may still be on their way. Memory of the host may be reused at once.
void copy_on_stream(const Stream& stream, void* to, const void* from, size_t bytes);
// Rows of a table that move to other places in it, in the order of a stream's queue: row from + i to row to + i, i < count. No row is
// both.
struct RowMove {
  int32_t from = 0, to = 0, count = 0;
};
void move_on_stream(const Stream& stream, void* table, size_t row_bytes, std::span<const RowMove> moves);

// While one lives, its thread captures a graph: nothing of the runner waits for a device meanwhile, and the thread itself may not allocate.
class CapturesAlone {
 public:
  CapturesAlone();
  ~CapturesAlone();
  CapturesAlone(const CapturesAlone&) = delete;
  CapturesAlone& operator=(const CapturesAlone&) = delete;
};

// Has this process ever allocated on a device?
bool devices_in_use();

struct DeviceMemory {
  int64_t free = 0, total = 0;
};
DeviceMemory device_memory(int device);
// Bytes that this process has in use through allocate_on_device(), and the most that it ever had.
int64_t device_bytes();
int64_t peak_device_bytes();

// The weights of a model on a device: matrices in f16, times a power of two (see cuda/weights.h), vectors in f32. `exact`: see ModelOptions.
class DeviceWeights;
std::shared_ptr<const DeviceWeights> upload_weights(const Stream& stream, const ModelConfig& config, const Weights& weights,
                                                    bool exact);
int64_t device_weight_bytes(const ModelConfig& config, const Weights& weights, bool exact);

// One step at a time. Without weights it knows sizes and dtypes alone, for pretended steps.
std::unique_ptr<Compute> cuda_compute(const Stream& stream, std::shared_ptr<const DeviceWeights> weights, bool exact);

}  // namespace weft::model
