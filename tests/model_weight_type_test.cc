// Block formats of weights: values bit for bit those of the Python package gguf (cases/golden/make_blocks.py).
#include "model/checkpoint/weight_type.h"

#include <gtest/gtest.h>

#include <bit>

#include "files/gguf.h"
#include "tests/support/golden_model.h"

namespace weft::model {
namespace {

using testing_support::Expected;

constexpr WeightType kAll[] = {WeightType::f16,  WeightType::bf16, WeightType::q8_0, WeightType::q4_0, WeightType::q4_1,
                               WeightType::q5_0, WeightType::q5_1, WeightType::q4_k, WeightType::q5_k, WeightType::q6_k};

std::string capitals(WeightType type) {
  std::string name = weight_name(type);
  for (char& c : name) c = static_cast<char>(std::toupper(c));
  return name;
}

const Expected& golden() {
  static const Expected file(std::filesystem::path(WEFT_SOURCE_DIR) / "cases/golden/weight_blocks.safetensors");
  return file;
}

// Equal bits; NaN, which an infinite scale gives, may have any payload.
void expect_bits(const std::vector<float>& got, const std::vector<uint32_t>& wanted, const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    const auto value = std::bit_cast<float>(wanted[i]);
    if (std::isnan(value) && std::isnan(got[i])) continue;
    ASSERT_EQ(std::bit_cast<uint32_t>(got[i]), wanted[i]) << what << ", number " << i << ": " << got[i] << " is not " << value;
  }
}

TEST(WeightType, NamesAndSizesAreThoseOfGguf) {
  for (int i = 0; i < kWeightTypes; ++i) {
    const auto type = static_cast<WeightType>(i);
    const files::GgufType* const known = files::find_gguf_type(capitals(type));
    ASSERT_TRUE(known) << weight_name(type);
    EXPECT_EQ(known->block, weight_layout(type).block) << weight_name(type);
    EXPECT_EQ(known->bytes, weight_layout(type).bytes) << weight_name(type);
    EXPECT_EQ(find_weight_type(capitals(type)), type);
    EXPECT_EQ(find_weight_type(weight_name(type)), type);
    EXPECT_EQ(is_float(type), weight_dtype(type).has_value());
    if (is_float(type)) {
      EXPECT_EQ(weight_type(*weight_dtype(type)), type);
    }
  }
  EXPECT_EQ(find_weight_type("Q2_K"), std::nullopt);
  EXPECT_EQ(find_weight_type("q4_"), std::nullopt);
  EXPECT_EQ(find_weight_type(""), std::nullopt);
}

TEST(WeightType, WidensAsThePackageGguf) {
  for (WeightType type : kAll) {
    const auto blocks = golden().get<uint8_t>(capitals(type) + ".blocks");
    const auto wanted = golden().get<uint32_t>(capitals(type) + ".values");
    std::vector<float> got(wanted.size());
    const auto count = static_cast<int64_t>(got.size());
    ASSERT_EQ(weight_bytes(type, count), static_cast<int64_t>(blocks.size()));
    widen(type, blocks.data(), 0, count, got.data());
    expect_bits(got, wanted, weight_name(type));
    // A part, from an odd address, gives the same numbers.
    std::vector<uint8_t> moved(blocks.size() + 1);
    std::copy(blocks.begin(), blocks.end(), moved.begin() + 1);
    const int64_t block = weight_layout(type).block;
    std::vector<float> part(static_cast<size_t>(2 * block));
    widen(type, moved.data() + 1, 3 * block, 2 * block, part.data());
    expect_bits(part, {wanted.begin() + 3 * block, wanted.begin() + 5 * block}, weight_name(type));
  }
}

}  // namespace
}  // namespace weft::model
