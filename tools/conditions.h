// The conditions of a measurement: device, driver, instruction set, threads, and the commit that was built.
#pragma once

#include <nlohmann/json.hpp>

#include "weft/device.h"

namespace weft::tools {

// Most threads of a call on the stream.
int threads_of(const Stream& stream);

// The fields device, driver, isa, threads, commit and dirty of docs/json.md.
nlohmann::ordered_json conditions(const Stream& stream);

}  // namespace weft::tools
