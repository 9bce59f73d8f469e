// Stands in for the vulkan backend in builds without Vulkan's headers: there is no such backend.
#include "core/backend.h"

namespace weft {
const BackendTable* vulkan_backend() { return nullptr; }
}  // namespace weft
