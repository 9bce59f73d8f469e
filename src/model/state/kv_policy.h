// KV policies: a string that gives each attention layer of a model its KV format.
//
//   policy  = recipe { "," layers ":" recipe }       "8v4"   "4v4,0:f16"   "8v4,0-1:f16,6-7:8v8"
//   layers  = n | n "-" n                            attention layers, counted from 0 among themselves
// The first recipe holds for every layer that no later part names; a later part wins over an earlier one.
#pragma once

#include <string_view>
#include <vector>

#include "model/checkpoint/config.h"
#include "weft/kv_codec.h"

namespace weft::model {

// Returns one recipe per attention layer of the model. Throws Error (operator "kv policy") that names the wrong part of the policy.
std::vector<KvRecipe> parse_kv_policy(std::string_view text, const ModelConfig& config);

}  // namespace weft::model
