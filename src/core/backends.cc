// The list of backends, and the devices they find.
#include "core/backend.h"

namespace weft {

const BackendTable* find_backend(Backend backend) {
  switch (backend) {
    case Backend::reference: return reference_backend();
    case Backend::cpu: return cpu_backend();
    case Backend::cuda: return cuda_backend();
  }
  return nullptr;
}

std::vector<DeviceInfo> devices() {
  std::vector<DeviceInfo> found;
  for (Backend backend : {Backend::reference, Backend::cpu, Backend::cuda}) {
    const BackendTable* table = find_backend(backend);
    if (table && table->list_devices) table->list_devices(found);
    if (!table) found.push_back({backend, 0, backend_name(backend), "", false, "not in this build"});
  }
  return found;
}

}  // namespace weft
