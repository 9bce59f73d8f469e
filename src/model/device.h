// The GPU side of the runner behind plain functions: memory, weights, and the Compute of the cuda backend. Builds without CUDA have them
// too, and they refuse with a sentence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

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
// Has this process ever allocated on a device?
bool devices_in_use();

struct DeviceMemory {
  int64_t free = 0, total = 0;
};
DeviceMemory device_memory(int device);
// The most bytes that this process had in use at a time through allocate_on_device().
int64_t peak_device_bytes();

// The weights of a model on a device: matrices in f16, times a power of two (see cuda/weights.h), vectors in f32. `exact`: see ModelOptions.
class DeviceWeights;
std::shared_ptr<const DeviceWeights> upload_weights(const Stream& stream, const ModelConfig& config, const Weights& weights,
                                                    bool exact);
int64_t device_weight_bytes(const ModelConfig& config, const Weights& weights, bool exact);

// One step at a time. Without weights it knows sizes and dtypes alone, for pretended steps.
std::unique_ptr<Compute> cuda_compute(const Stream& stream, std::shared_ptr<const DeviceWeights> weights, bool exact);

}  // namespace weft::model
