// Stands in for the cuda backend in builds without CUDA: there is no such backend.
#include "core/backend.h"

namespace weft {
const BackendTable* cuda_backend() { return nullptr; }
}  // namespace weft
