// Stands in for the GPU side of the runner in builds without CUDA or cuBLASLt.
#include "core/check.h"
#include "model/network/compute.h"
#include "model/network/device.h"

namespace weft::model {
namespace {

[[noreturn]] void refuse() {
  throw Error(fail(Code::unsupported, "model", "stream", "is on cuda, but this build runs models on the cpu alone"));
}

}  // namespace

class DeviceWeights {};

CapturesAlone::CapturesAlone() { refuse(); }
CapturesAlone::~CapturesAlone() {}  // elsewhere it does something

void* allocate_on_device(int, size_t) { refuse(); }
void release_on_device(int, void*) noexcept {}
void copy_on_devices(void*, const void*, size_t) { refuse(); }
void copy_on_stream(const Stream&, void*, const void*, size_t) { refuse(); }
void move_on_stream(const Stream&, void*, size_t, std::span<const RowMove>) { refuse(); }
bool devices_in_use() { return false; }
DeviceMemory device_memory(int) { refuse(); }
int64_t device_bytes() { return 0; }
int64_t peak_device_bytes() { return 0; }
std::shared_ptr<const DeviceWeights> upload_weights(const Stream&, const ModelConfig&, const Weights&, bool) { refuse(); }
int64_t device_weight_bytes(const ModelConfig&, const Weights&, bool) { refuse(); }
// NOLINTNEXTLINE(performance-unnecessary-value-param): elsewhere it is kept
std::unique_ptr<Compute> cuda_compute(const Stream&, std::shared_ptr<const DeviceWeights>, bool) { refuse(); }

}  // namespace weft::model
