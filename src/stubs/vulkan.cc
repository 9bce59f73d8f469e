// Stands in for the vulkan backend in builds without Vulkan's headers: there is no such backend, and no device.
#include "weft/vulkan.h"
#include "core/backend.h"
#include "core/fail.h"

namespace weft {

const BackendTable* vulkan_backend() { return nullptr; }

namespace vulkan {
namespace {

[[noreturn]] void refuse() {
  throw Error(fail(Code::unsupported, "vulkan", "device", "cannot be used: vulkan is not in this build"));
}

}  // namespace

class Device::Impl {};
class Recorder::Impl {};

const char* kind_name(Kind kind) { return kind == Kind::cpu ? "CPU" : "GPU"; }
const std::vector<Properties>& list_devices() {
  static const std::vector<Properties> none;
  return none;
}
const std::string& why_no_device() {
  static const std::string why = "no device: vulkan is not in this build";
  return why;
}

Device Device::open(int, const OpenOptions&) { refuse(); }
Device Device::adopt(const Handles&) { refuse(); }
int Device::ordinal() const { refuse(); }
const Properties& Device::properties() const { refuse(); }
Handles Device::handles() const { refuse(); }
void* Device::allocate(size_t) const { refuse(); }
void Device::release(void*) const { refuse(); }
void Device::upload(void*, const void*, size_t) const { refuse(); }
void Device::download(void*, const void*, size_t) const { refuse(); }
Recorder::Recorder(const Device&) { refuse(); }
Recorder::Recorder(const Device&, void*) { refuse(); }
Recorder::~Recorder() = default;
void* Recorder::queue() const { refuse(); }
void* Recorder::finish() { refuse(); }
void Recorder::submit_and_wait() { refuse(); }
void Recorder::clear() { refuse(); }

}  // namespace vulkan
}  // namespace weft
