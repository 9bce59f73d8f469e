// Classes of call sizes for which an op has one answer to "how fast": `weft ops --speed` prints the speed of the kernels that they take.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "weft/weft.h"

namespace weft::cases {

struct SpeedClass {
  std::string op;
  std::string sizes;                 // in words
  std::vector<std::string> options;  // of cases of the class, without dtype
  bool typed = true;                 // do the cases take a dtype? Else they are f32
};

// In the order of the ops.
const std::vector<SpeedClass>& speed_classes();

// The slowest kernel that calls of the class take on each of the streams. Nothing where the backend does not compute one of them.
std::vector<std::optional<Speed>> speeds_of(const SpeedClass& one, DType dtype, const std::vector<Stream>& streams);

}  // namespace weft::cases
