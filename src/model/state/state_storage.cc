// Conversion of recurrent states to fewer bits: see state_storage.h.
#include "model/state/state_storage.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/half.h"

namespace weft {

const char* state_storage_name(StateStorage storage) {
  switch (storage) {
    case StateStorage::f32: return "f32";
    case StateStorage::f16: return "f16";
    case StateStorage::bf16: return "bf16";
    case StateStorage::int8: return "int8";
  }
  return "?";
}

namespace model {
namespace {

constexpr float kLargestHalf = 65504;

// An int8 row is its f32 scale followed by its codes, without alignment.
int64_t row_bytes(StateStorage storage, int64_t size) {
  switch (storage) {
    case StateStorage::f32: return size * 4;
    case StateStorage::f16:
    case StateStorage::bf16: return size * 2;
    case StateStorage::int8: return size + 4;
  }
  return 0;
}

void store_row(StateStorage storage, int64_t size, const float* from, std::byte* to) {
  if (storage == StateStorage::f32) {
    std::memcpy(to, from, static_cast<size_t>(size) * 4);
  } else if (storage == StateStorage::int8) {
    float largest = 0;
    for (int64_t i = 0; i < size; ++i) largest = std::max(largest, std::abs(from[i]));
    const float scale = largest / 127, inverse = scale > 0 ? 1 / scale : 0;
    std::memcpy(to, &scale, 4);
    for (int64_t i = 0; i < size; ++i) {
      const float code = std::nearbyint(from[i] * inverse);
      to[4 + i] =
          static_cast<std::byte>(code > -127 ? static_cast<int8_t>(std::min(code, 127.0f)) : int8_t{-127});  // NaN becomes -127
    }
  } else {
    for (int64_t i = 0; i < size; ++i) {
      const uint16_t bits =
          storage == StateStorage::bf16 ? f32_to_bf16(from[i]) : f32_to_f16(std::clamp(from[i], -kLargestHalf, kLargestHalf));
      std::memcpy(to + 2 * i, &bits, 2);
    }
  }
}

void load_row(StateStorage storage, int64_t size, const std::byte* from, float* to) {
  if (storage == StateStorage::f32) {
    std::memcpy(to, from, static_cast<size_t>(size) * 4);
  } else if (storage == StateStorage::int8) {
    float scale = 0;
    std::memcpy(&scale, from, 4);
    for (int64_t i = 0; i < size; ++i) to[i] = scale * static_cast<float>(static_cast<int8_t>(from[4 + i]));
  } else {
    for (int64_t i = 0; i < size; ++i) {
      uint16_t bits = 0;
      std::memcpy(&bits, from + 2 * i, 2);
      to[i] = storage == StateStorage::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
    }
  }
}

}  // namespace

int64_t stored_bytes(StateStorage storage, int64_t rows, int64_t size) { return rows * row_bytes(storage, size); }

void store_rows(StateStorage storage, int64_t rows, int64_t size, const float* from, std::byte* to, Drift& drift) {
  if (storage == StateStorage::f32) {
    std::memcpy(to, from, static_cast<size_t>(stored_bytes(storage, rows, size)));
    return;
  }
  float back[kMaxDeltaHeadSize];
  for (int64_t r = 0; r < rows; ++r) {
    store_row(storage, size, from + r * size, to + r * row_bytes(storage, size));
    load_row(storage, size, to + r * row_bytes(storage, size), back);
    double squares = 0, errors = 0;
    for (int64_t i = 0; i < size; ++i) {
      const auto x = static_cast<double>(from[r * size + i]), e = static_cast<double>(back[i]) - x;
      squares += x * x;
      errors += e * e;
    }
    if (!std::isfinite(squares + errors)) continue;  // one such row would make the sums useless
    drift.size += squares;
    drift.error += errors;
  }
}

void load_rows(StateStorage storage, int64_t rows, int64_t size, const std::byte* from, float* to) {
  if (storage == StateStorage::f32)
    std::memcpy(to, from, static_cast<size_t>(stored_bytes(storage, rows, size)));
  else
    for (int64_t r = 0; r < rows; ++r) load_row(storage, size, from + r * row_bytes(storage, size), to + r * size);
}

}  // namespace model
}  // namespace weft
