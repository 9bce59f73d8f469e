// The entries of the vulkan backend's table. The file that launches an op defines the op's entry.
#pragma once

#include "core/backend.h"

namespace weft::vulkan {
WEFT_DECLARE_ENTRIES
}  // namespace weft::vulkan
