// Under which conditions times were taken: device, driver, instruction set, threads, and the source that was built.
#pragma once

#include <nlohmann/json.hpp>

#include "weft/device.h"

namespace weft::tools {

// Threads that a call on the stream works with at most.
int threads_of(const Stream& stream);

// The fields device, driver, isa, threads, commit and dirty of docs/json.md.
nlohmann::ordered_json conditions(const Stream& stream);

}  // namespace weft::tools
