// The entries of the vulkan backend's table: each op defines its own beside its shader.
#pragma once

#include "core/backend.h"

namespace weft::vulkan {
WEFT_DECLARE_ENTRIES
}  // namespace weft::vulkan
