// How much memory this process can still allocate.
#pragma once

#include <cstdint>
#include <optional>

namespace weft::tools {

// Bytes that can be allocated and filled before the system runs out of memory: what the system reports as available, or less where
// a control group allows less. Absent where the system does not report it.
std::optional<int64_t> available_memory();

}  // namespace weft::tools
