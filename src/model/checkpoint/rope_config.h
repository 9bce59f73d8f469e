// Rotary frequencies from the several ways in which configs describe them.
#pragma once

#include "files/json_text.h"
#include "model/checkpoint/config.h"

namespace weft::model {

// From rope_parameters, or the older rope_theta, partial_rotary_factor and rope_scaling. Types: default (mrope is the same for text),
// linear and yarn; another is refused.
RopeConfig read_rope(const files::JsonFields& fields, int64_t head_dim);

}  // namespace weft::model
