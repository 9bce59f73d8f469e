// Stands in for the GPU side of the runner in builds without CUDA or cuBLASLt: everything that needs a device throws Error.
#include "core/check.h"
#include "model/network/compute.h"
#include "model/network/device.h"

namespace weft::model {
namespace {

[[noreturn]] void refuse() {
  throw Error(fail(Code::unsupported, "model", "stream",
                   "is on cuda, but this build of Weft runs models on the cpu only, wanted a build with CUDA and cuBLASLt"));
}

}  // namespace

class DeviceWeights {};

CapturesAlone::CapturesAlone() { refuse(); }
CapturesAlone::~CapturesAlone() {}  // not = default: the CUDA build has a body

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
// NOLINTNEXTLINE(performance-unnecessary-value-param): the CUDA build keeps the pointer
std::unique_ptr<Compute> cuda_compute(const Stream&, std::shared_ptr<const DeviceWeights>, bool) { refuse(); }

}  // namespace weft::model
