// The types of stored weights: floats, and the block formats of GGUF files.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "weft/tensor.h"

namespace weft::model {

// Float types come first.
enum class WeightType : uint8_t { f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k };
inline constexpr int kWeightTypes = 11;

// `block` consecutive numbers of a row take `bytes` bytes.
struct WeightLayout {
  int64_t block, bytes;
};
WeightLayout weight_layout(WeightType type);
const char* weight_name(WeightType type);  // "q4_k"
// The type of this name in upper or lower case, such as "Q4_K" or "bf16". Absent for other names.
std::optional<WeightType> find_weight_type(std::string_view name);

inline bool is_float(WeightType type) { return type <= WeightType::bf16; }
// The dtype of a float type, and the weight type of a dtype. Absent for other types.
std::optional<DType> weight_dtype(WeightType type);
std::optional<WeightType> weight_type(DType dtype);

// Bytes of `count` numbers, a multiple of the block.
inline int64_t weight_bytes(WeightType type, int64_t count) {
  const WeightLayout layout = weight_layout(type);
  return count / layout.block * layout.bytes;
}

// Writes numbers [first, first + count) as f32; `first` and `count` are multiples of the block size. Exact: every number of these
// types is an f32 number.
void widen(WeightType type, const void* from, int64_t first, int64_t count, float* to);

}  // namespace weft::model
