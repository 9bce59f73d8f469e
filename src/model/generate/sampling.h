// Checking the values of a Sampling.
#pragma once

#include <string>

#include "weft/sampler.h"
#include "weft/status.h"

namespace weft::model {

// A fault of `op` for the first value outside of its range; `prefix` stands before the member's name ("sampling.").
Status check_sampling(const Sampling& sampling, const char* op, const std::string& prefix);

}  // namespace weft::model
