// Block sizes that the dense kernel and its caller share.
#pragma once

#include "model/network/cpu/dense.h"

namespace weft::model {

// Numbers of K in a block, and rows of weights in a block: 32 KB of bf16, which are used for all rows of x before the next block.
inline constexpr int64_t kBlockK = 1024, kBlockRows = 16;

// Rows [m_first, m_last) of x against rows [first, last) of the weights.
struct DenseBlock {
  int64_t first = 0, last = 0, m_first = 0, m_last = 0;
};

}  // namespace weft::model
