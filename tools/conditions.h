// The conditions of a measurement: device, driver, instruction set, threads, and the commit that was built.
#pragma once

#include <nlohmann/json.hpp>

#include "weft/device.h"

namespace weft::tools {

// Most threads of a call on the stream.
int threads_of(const Stream& stream);

// How busy the machine was when the measurement began.
struct MachineLoad {
  double average = 0;  // processes that ran or waited for a core, over the last minute
  int cores = 1;
  bool known = false;
  // Does other work take a noticeable share of the cores?
  bool busy() const { return known && average >= 0.25 * cores; }
};
MachineLoad machine_load();

// The fields device, driver, isa, threads, commit and dirty of docs/json.md.
nlohmann::ordered_json conditions(const Stream& stream);

}  // namespace weft::tools
