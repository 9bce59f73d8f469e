// Rotary frequencies, from config.json in any form that files use, and from the metadata of a GGUF file.
#pragma once

#include "files/json_text.h"
#include "model/checkpoint/config.h"

namespace weft::model {

// Reads rope_parameters, or the older fields rope_theta, partial_rotary_factor and rope_scaling. Supported types: default (mrope is
// the same for text), linear and yarn. Throws Error for other types.
RopeConfig read_rope(const files::JsonFields& fields, int64_t head_dim);

// Frequencies of the default type.
RopeConfig plain_rope(double theta, int64_t channels);

// Stretches frequencies to a context `factor` times the original one.
struct Yarn {
  double factor = 1, original = 0;  // original: tokens
  double fast = 32, slow = 1;
  double attention = 1;  // RopeConfig::factor
  bool truncate = true;
};
void apply_yarn(const Yarn& yarn, double theta, RopeConfig& rope);
double yarn_attention(double factor);  // the default of Yarn::attention

}  // namespace weft::model
