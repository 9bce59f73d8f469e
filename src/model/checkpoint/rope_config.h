// Reads rotary frequencies from config.json, in any of the forms that files use.
#pragma once

#include "files/json_text.h"
#include "model/checkpoint/config.h"

namespace weft::model {

// Reads rope_parameters, or the older fields rope_theta, partial_rotary_factor and rope_scaling. Supported types: default (mrope is
// the same for text), linear and yarn. Throws Error for other types.
RopeConfig read_rope(const files::JsonFields& fields, int64_t head_dim);

}  // namespace weft::model
