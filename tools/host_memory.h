// How much memory this process can still have.
#pragma once

#include <cstdint>
#include <optional>

namespace weft::tools {

// Bytes that can be allocated and filled before the system must kill something: what the system has available, or less where a control
// group allows less. Nothing where the system does not say.
std::optional<int64_t> available_memory();

}  // namespace weft::tools
