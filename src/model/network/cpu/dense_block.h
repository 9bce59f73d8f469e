// How the dense kernel cuts its work: sizes that the kernel and its caller share.
#pragma once

#include "model/network/cpu/dense.h"

namespace weft::model {

// Numbers of K that are summed at once, and rows of weights that are used for all rows of x before the next: 32 KB of bf16.
inline constexpr int64_t kBlockK = 1024, kBlockRows = 16;

// Rows [m_first, m_last) of x against rows [first, last) of the weights.
struct DenseBlock {
  int64_t first = 0, last = 0, m_first = 0, m_last = 0;
};

}  // namespace weft::model
