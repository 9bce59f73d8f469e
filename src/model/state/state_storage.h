// Conversion of recurrent states to fewer bits, and its error.
#pragma once

#include <cstddef>
#include <cstdint>

#include "weft/prefix_store.h"

namespace weft::model {

// Bytes of `rows` rows of `size` numbers.
int64_t stored_bytes(StateStorage storage, int64_t rows, int64_t size);

// Sums of squares: of the numbers, and of their conversion errors. Rows that are not finite before or after the conversion do not
// count.
struct Drift {
  double size = 0, error = 0;
};

void store_rows(StateStorage storage, int64_t rows, int64_t size, const float* from, std::byte* to, Drift& drift);
void load_rows(StateStorage storage, int64_t rows, int64_t size, const std::byte* from, float* to);

}  // namespace weft::model
