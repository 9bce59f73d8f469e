// The GPU side of the runner: weights on a device, and the Compute of the cuda backend. In a build without CUDA they throw Error
// (src/stubs/model_cuda.cc).
#pragma once

#include <cstdint>
#include <memory>

#include "model/state/device_memory.h"
#include "weft/device.h"

namespace weft::model {

class Compute;
struct ModelConfig;
struct Weights;

// The weights of a model on a device: matrices in f16 times a power of two (see cuda/weights.h), vectors in f32. `exact`: see
// ModelOptions.
class DeviceWeights;
std::shared_ptr<const DeviceWeights> upload_weights(const Stream& stream, const ModelConfig& config, const Weights& weights,
                                                    bool exact);
int64_t device_weight_bytes(const ModelConfig& config, const Weights& weights, bool exact);

// Runs one step at a time. Without weights it supports dry runs only, which need sizes and dtypes.
std::unique_ptr<Compute> cuda_compute(const Stream& stream, std::shared_ptr<const DeviceWeights> weights, bool exact);

}  // namespace weft::model
