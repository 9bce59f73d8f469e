// Quantises numbers to the types of stored weights.
#pragma once

#include <cstdint>

#include "model/checkpoint/weight_type.h"

namespace weft::model {

// Writes `count` finite numbers, a multiple of the block, as weights of a type. Floats are rounded to nearest even. Q8_0, Q4_0, Q4_1,
// Q5_0 and Q5_1 have the bits that the Python package gguf writes. Q4_K, Q5_K and Q6_K, which that package cannot write, minimise the
// squared error of every group of 16 or 32 numbers by a search over scales.
void narrow(WeightType type, const float* from, int64_t count, void* to);

}  // namespace weft::model
