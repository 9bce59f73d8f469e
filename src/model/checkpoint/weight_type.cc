// The types of stored weights: see weight_type.h.
#include "model/checkpoint/weight_type.h"

#include <array>
#include <cctype>

#include "common/blocks_256.h"
#include "common/blocks_32.h"
#include "common/half.h"

namespace weft::model {
namespace {

template <class Block>
void widen_blocks(const uint8_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += Block::kNumbers, from += Block::kBytes) Block::widen(from, to + i);
}

template <float (*value)(uint16_t)>
void widen_halves(const uint8_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, from + 2 * i, sizeof bits);
    to[i] = value(bits);
  }
}

void copy_floats(const uint8_t* from, int64_t count, float* to) {
  if (count == 0) return;  // null pointers are legal then, but not in memcpy
  std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
}

struct Entry {
  const char* name;
  WeightLayout layout;
  void (*widen)(const uint8_t*, int64_t, float*);
};
template <class Block>
constexpr Entry entry(const char* name) {
  return {name, {Block::kNumbers, Block::kBytes}, widen_blocks<Block>};
}
constexpr std::array<Entry, kWeightTypes> kEntries{Entry{"f32", {1, 4}, copy_floats},
                                                   Entry{"f16", {1, 2}, widen_halves<f16_to_f32>},
                                                   Entry{"bf16", {1, 2}, widen_halves<bf16_to_f32>},
                                                   entry<BlockQ80>("q8_0"),
                                                   entry<BlockQ40>("q4_0"),
                                                   entry<BlockQ41>("q4_1"),
                                                   entry<BlockQ50>("q5_0"),
                                                   entry<BlockQ51>("q5_1"),
                                                   entry<BlockQ4K>("q4_k"),
                                                   entry<BlockQ5K>("q5_k"),
                                                   entry<BlockQ6K>("q6_k")};

const Entry& entry_of(WeightType type) { return kEntries[static_cast<size_t>(type)]; }

}  // namespace

WeightLayout weight_layout(WeightType type) { return entry_of(type).layout; }
const char* weight_name(WeightType type) { return entry_of(type).name; }

std::optional<WeightType> find_weight_type(std::string_view name) {
  for (size_t i = 0; i < kEntries.size(); ++i) {
    const std::string_view known = kEntries[i].name;
    bool same = known.size() == name.size();
    for (size_t c = 0; same && c < known.size(); ++c) same = known[c] == std::tolower(static_cast<unsigned char>(name[c]));
    if (same) return static_cast<WeightType>(i);
  }
  return std::nullopt;
}

std::optional<DType> weight_dtype(WeightType type) {
  switch (type) {
    case WeightType::f32: return DType::f32;
    case WeightType::f16: return DType::f16;
    case WeightType::bf16: return DType::bf16;
    default: return std::nullopt;
  }
}

std::optional<WeightType> weight_type(DType dtype) {
  switch (dtype) {
    case DType::f32: return WeightType::f32;
    case DType::f16: return WeightType::f16;
    case DType::bf16: return WeightType::bf16;
    default: return std::nullopt;
  }
}

void widen(WeightType type, const void* from, int64_t first, int64_t count, float* to) {
  entry_of(type).widen(static_cast<const uint8_t*>(from) + weight_bytes(type, first), count, to);
}

}  // namespace weft::model
