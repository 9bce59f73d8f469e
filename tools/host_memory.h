// How much memory this process can still allocate.
#pragma once

#include <cstdint>
#include <optional>

namespace weft::tools {

// Bytes that can be allocated and filled before the system runs out of memory: what the system reports as available, or less where
// a control group or limit_memory() allows less. Absent where the system does not report it and there is no limit.
std::optional<int64_t> available_memory();

// Makes available_memory() report at most what this process may still allocate until it holds `bytes`. Mapped files do not count.
void limit_memory(int64_t bytes);
std::optional<int64_t> memory_limit();

}  // namespace weft::tools
